"""Which item lies in which place of a block cache, and which one goes when another comes; all on the device.

Per layer, request and selecting head there are P places and two tables: the item of each place and the place of each
item. A step names the items that it wants cached. Those that are there are *used*; the others take the places of the
coldest items that are not wanted, coldest first: empty places before all, then by the policy:

| policy | coldest |
|---|---|
| lru | used longest ago |
| lfu | used least often since it came; of those the one used longest ago |
| fifo | came first |
| random | drawn from a seeded generator |

Of equally cold places the lower one goes first. Nothing here waits for the device. Behind the last request there is a
spare row, and behind the last item and place a spare column, for what must not be written anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CacheLoads", "CachePlaces"]

_USE = 1 << 32
_HOTTEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class CacheLoads:
    """Items that come into the cache, left-aligned, -1 behind them.

    Attributes:
        items: ``int64 [B, Hs, k]`` items.
        places: ``int64 [B, Hs, k]`` places that they take.
        count: ``int64 [B, Hs]`` how many there are.
        evicted: ``int64 []`` items that left, of all rows.
    """

    items: Tensor
    places: Tensor
    count: Tensor
    evicted: Tensor


class CachePlaces:
    """The tables of all layers and requests.

    Args:
        layers: layers.
        max_requests: rows R of the tables.
        heads: heads Hs that have a cache of their own, 1 for one of all heads.
        places: most places P of a request and head.
        items: most items N of a request.
        policy: lru, lfu, fifo or random.
        seed: of random.
        device: where the tables lie.
    """

    def __init__(
        self, *, layers: int, max_requests: int, heads: int, places: int, items: int, policy: str, seed: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        rows = max_requests + 1
        self.places, self.items = places, items
        self._policy = policy
        self._place_of = torch.full((layers, rows, heads, items + 1), -1, dtype=torch.int32, device=device)
        self._item_of = torch.full((layers, rows, heads, places + 1), -1, dtype=torch.int32, device=device)
        self._heat = torch.full((layers, rows, heads, places + 1), -1, dtype=torch.int64, device=device)
        self._clock = torch.zeros(layers, dtype=torch.int64, device=device)
        self._heads = torch.arange(heads, device=device)[:, None]
        self._draw = torch.Generator(device).manual_seed(seed)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in (self._place_of, self._item_of, self._heat))

    def place_of(self, layer: int) -> Tensor:
        """Return the place of each item of a layer, ``int32 [R + 1, Hs, N + 1]``, -1 where it is not cached."""
        return self._place_of[layer]

    def held(self, layer: int, request: int) -> Tensor:
        """Return the item of each place of a request, ``int32 [Hs, P]``, -1 for an empty one."""
        return self._item_of[layer, request, :, : self.places]

    def reset(self, request: int) -> None:
        """Forget what is cached of a request."""
        for table in (self._place_of, self._item_of, self._heat):
            table[:, request] = -1

    def update(self, layers: Tensor, rows: Tensor, wanted: Tensor, usable: Tensor) -> CacheLoads:
        """Let the wanted items be in the cache, and return those that have to be loaded for that.

        Args:
            layers: ``int64 [B]`` position of each row's layer.
            rows: ``int64 [B]`` row of each request, unique in a layer but for R, which is nobody's.
            wanted: ``int64 [B, Hs, k]`` items, unique in a row and head, -1 anywhere; the first ones come first when
                there are too few places.
            usable: ``int64 [B]`` places of each request.
        """
        item, heat, clock = self._item_of[layers, rows], self._heat[layers, rows], self._clock[layers, None, None]
        index = (layers[:, None, None], rows[:, None, None], self._heads)
        place = self._place_of[(*index, wanted.clamp_min(0))].long().where(wanted >= 0, -1)
        used = torch.zeros_like(item, dtype=torch.bool).scatter_(-1, place.where(place >= 0, self.places), value=True)
        heat = torch.where(used, self._touched(heat, clock), heat)
        order, room = self._victims(item, heat, used, usable)
        misses = (wanted >= 0) & (place < 0)
        rank = misses.cumsum(-1) - 1
        loads = misses & (rank < room[..., None])
        victim = order.gather(-1, rank.clamp(0, self.places)).where(loads, self.places)
        old = item.gather(-1, victim).long()
        leaves = loads & (old >= 0)
        self._place_of[(*index, old.where(leaves, self.items))] = -1
        self._place_of[(*index, wanted.where(loads, self.items))] = victim.int().where(loads, -1)
        self._item_of[layers, rows] = item.scatter(-1, victim, wanted.int())
        self._heat[layers, rows] = heat.scatter(-1, victim, self._fresh(clock).expand_as(victim))
        self._clock[layers] += 1
        columns = rank.where(loads, wanted.shape[-1])
        return CacheLoads(_aligned(wanted, columns), _aligned(victim, columns), loads.sum(-1), leaves.sum())

    def _touched(self, heat: Tensor, clock: Tensor) -> Tensor:
        if self._policy == "lfu":
            return (heat // _USE + 1) * _USE + clock
        return clock if self._policy == "lru" else heat

    def _fresh(self, clock: Tensor) -> Tensor:
        return clock + _USE if self._policy == "lfu" else clock

    def _victims(self, item: Tensor, heat: Tensor, used: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places coldest first, and how many of them may be taken."""
        if self._policy == "random":
            drawn = torch.randint(_USE, heat.shape, generator=self._draw, device=heat.device)
            heat = drawn.where(item >= 0, -1)
        numbers = torch.arange(self.places + 1, device=item.device)
        free = ~used & (numbers < usable[:, None, None]) & (numbers < self.places)
        return heat.where(free, _HOTTEST).argsort(dim=-1, stable=True), free.sum(-1)


def _aligned(values: Tensor, columns: Tensor) -> Tensor:
    """Return values moved to their columns, those of the column behind the last dropped."""
    out = torch.full((*values.shape[:-1], values.shape[-1] + 1), -1, dtype=values.dtype, device=values.device)
    return out.scatter_(-1, columns, values)[..., :-1]
