"""What comes into PQCache's block cache: the blocks with the most selected tokens, and their way from the host.

Counting is done after each layer; deciding and loading for a few layers at once, because a decision is some hundred
small launches and as quick for eight layers as for one. All of it runs on the stream `upd`, beside the next layers, and
the next step of each layer waits for that layer's blocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.manager.cache_places import CacheLoads, CachePlaces
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.retrieval_config import PQCacheConfig
from gpu_tier.runtime import DeviceRuntime, Event
from gpu_tier.types import ForwardBatch, SteadyZone

__all__ = ["BatchRows", "BlockAdmissions", "BlockStep"]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which rows of a batch select, and where they stand in the tables.

    Attributes:
        batch: the batch.
        sparse_mask: ``bool [B]`` rows that are sparse, padding or not.
        active: ``bool [B]`` rows that select.
        requests: ``int64 [B]`` row of each request, 0 for those that do not.
        rows: ``int64 [B]`` the same in tables with a spare row, which is theirs.
    """

    batch: ForwardBatch
    sparse_mask: Tensor
    active: Tensor
    requests: Tensor
    rows: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, sparse_mask: Tensor, spare: int) -> BatchRows:
        """Return the rows of a batch; `spare` is the number of the spare row."""
        active = sparse_mask & (torch.arange(batch.rows, device=sparse_mask.device) < batch.num_real_reqs)
        own = batch.req_pool_indices
        return cls(batch, sparse_mask, active, own.where(active, 0), own.where(active, spare))


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What a step of a layer has selected.

    Attributes:
        batch: the step.
        rows: which rows select.
        zone: steady tokens.
        indices: ``int32 [B, H, K]`` selected tokens, -1 behind them.
    """

    batch: ForwardBatch
    rows: BatchRows
    zone: SteadyZone
    indices: Tensor


@dataclass(frozen=True, slots=True)
class _Demand:
    """A layer's step until it is decided: hits ``int64 [B, blocks + 1]`` of each block, or tokens ``[B, H, k]``."""

    layer: int
    step: BlockStep
    wants: Tensor

    def goes_with(self, other: _Demand) -> bool:
        """Whether both are of one pass: the first of a pass that was cut short and of the next one are not."""
        same = self.step.batch is other.step.batch and self.wants.shape == other.wants.shape
        return same and self.layer != other.layer


class BlockAdmissions:
    """Keeps the cache of all layers and requests up to date.

    Args:
        settings: of the cache.
        cache: what is where.
        slots: ``int32 [R + 1, tokens]`` device slot of each place of the requests' caches.
        usable: ``int64 [R + 1]`` places that each request has.
        host_tokens: which tokens are on the host, and where.
        transfer: from there.
        runtime: of the device.
        layers_at_once: layers that are decided together.

    Attributes:
        counts: ``int64 [2]`` items that came into the cache, and items that left it.
    """

    def __init__(
        self, settings: PQCacheConfig, cache: CachePlaces, slots: Tensor, usable: Tensor, host_tokens: HostTokens,
        transfer: KVTransfer, runtime: DeviceRuntime, layers_at_once: int,
    ) -> None:  # fmt: skip
        self._settings, self._cache, self._slots, self._usable = settings, cache, slots, usable
        self._host, self._transfer, self._runtime = host_tokens, transfer, runtime
        self._layers_at_once = layers_at_once
        self._by_token = settings.cache_unit == "token"
        self._unit = 1 if self._by_token else settings.block
        self._geometry = transfer.geometry
        self._layer_numbers = torch.arange(self._geometry.num_layers, device=runtime.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=runtime.device)
        self._waiting: list[_Demand] = []
        self._loaded: dict[int, Event] = {}

    def wait_on_device(self, layer: int) -> None:
        """Let compute wait for what was last admitted in a layer (by its position)."""
        if layer in self._loaded:
            self._runtime.fence(self._loaded[layer], "compute")

    def abandon(self) -> None:
        """Forget what is not yet decided, and wait until nothing is on its way."""
        self._waiting.clear()
        for event in self._loaded.values():
            event.wait()
        self._loaded.clear()

    def add(self, layer: int, step: BlockStep) -> None:
        """Take note of a layer's step, whose attention was issued; the last layer of some begins their admissions."""
        runtime = self._runtime
        runtime.fence(runtime.record("compute"), "upd")
        with runtime.stream("upd"):
            runtime.used(step.rows.requests, step.rows.rows, step.zone.first, step.indices)
            demand = _Demand(layer, step, self._wants(step))
            if self._waiting and not demand.goes_with(self._waiting[0]):
                self._decide()
            self._waiting.append(demand)
            last = self._geometry.num_layers - 1
            if layer == last or len(self._waiting) == self._layers_at_once:
                self._decide()

    def _wants(self, step: BlockStep) -> Tensor:
        if self._by_token:
            tokens = step.indices[..., : self._settings.k_cache * self._settings.block].long()
            return (tokens - step.zone.sink).where(tokens >= 0, -1)
        blocks = max(1, -(-max(step.batch.lengths, default=0) // self._unit))
        items = (step.indices.flatten(1).long() - step.zone.sink) // self._unit
        items = items.where(items >= 0, blocks)
        hits = torch.zeros(len(items), blocks + 1, dtype=torch.int64, device=items.device)
        return hits.scatter_add_(1, items, torch.ones_like(items))

    def _decide(self) -> None:
        """Bring the wanted blocks of the layers that wait on their way."""
        demands, self._waiting = self._waiting, []
        layers = torch.stack([self._layer_numbers[demand.layer] for demand in demands])
        step, count = demands[0].step, len(demands)
        requests, rows = step.rows.requests.repeat(count), step.rows.rows.repeat(count)
        first = torch.cat([demand.step.zone.first for demand in demands])
        wants = torch.cat([demand.wants for demand in demands])
        choose = self._wanted_tokens if self._by_token else self._wanted_blocks
        wanted = choose(requests, step.zone.sink, first, wants)
        loads = self._cache.update(layers.repeat_interleave(step.batch.rows), rows, wanted, self._usable[rows])
        self.counts += torch.stack([loads.count.sum(), loads.evicted])
        self._load([demand.layer for demand in demands], requests, rows, step.zone.sink, loads)

    def _wanted_blocks(self, requests: Tensor, sink: int, first: Tensor, hits: Tensor) -> Tensor:
        """Return the blocks with the most selected tokens, ``int64 [N, 1, k]``, -1 behind them."""
        blocks = hits.shape[1] - 1
        numbers = torch.arange(blocks, device=hits.device)
        behind = sink + (numbers + 1) * self._unit
        # Tokens get their host slot in order: a block whose last one has it is on the host.
        last = (behind - 1).clamp_max(self._host.host_loc.shape[1] - 1)
        on_host = self._host.host_loc[requests[:, None], last] >= 0
        may = (hits[:, :blocks] > 0) & (behind <= first[:, None]) & on_host
        # Most hits first, of equals the first block: no two keys are equal.
        key = (hits[:, :blocks] * blocks + (blocks - 1 - numbers)).where(may, -1)
        best = key.topk(min(self._settings.k_cache, blocks)).values
        return (blocks - 1 - best % blocks).where(best >= 0, -1)[:, None]

    def _wanted_tokens(self, requests: Tensor, sink: int, first: Tensor, items: Tensor) -> Tensor:
        """Return those of the wanted tokens that are in the middle and on the host, ``int64 [N, H, k]``."""
        tokens = sink + items.clamp_min(0)
        on_host = self._host.host_loc[requests[:, None, None], tokens] >= 0
        return items.where((items >= 0) & (tokens < first[:, None, None]) & on_host, -1)

    def _load(self, layers: list[int], requests: Tensor, rows: Tensor, sink: int, loads: CacheLoads) -> None:
        """Copy whole items from the host to their places, layer after layer."""
        offsets = torch.arange(self._unit, device=rows.device)
        tokens = sink + loads.items.clamp_min(0)[..., None] * self._unit + offsets
        places = loads.places.clamp_min(0)[..., None] * self._unit + offsets
        index = (slice(None), None, None, None)
        shape = (len(layers), -1, tokens.shape[2] * self._unit)
        src = self._host.host_loc[requests[index], tokens].view(shape)
        dst = self._slots[rows[index], places].view(shape)
        count = (loads.count * self._unit).int().view(len(layers), -1)
        for number, layer in enumerate(layers):
            layer_id = self._geometry.start_layer + layer
            self._transfer.load(
                src[number], dst[number], layers=range(layer_id, layer_id + 1), count=count[number],
                per_head=self._by_token,
            )  # fmt: skip
            self._loaded[layer] = self._runtime.record("upd")
