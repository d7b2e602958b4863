"""PQCache's block cache: the middle tokens that are selected often are on the device, whole blocks of them.

Block b of a request holds the tokens ``sink + b·block`` to ``sink + (b + 1)·block - 1`` of all KV heads. A selected
token whose block is cached is read there, any other one on the host, row by row. After the attention of a layer the
`k_cache` blocks with the most selected tokens of all heads (of equals the first) are wanted in the cache: those that
are there count as used, and the others are loaded whole from the host, in the places of the blocks that the policy
gives up. Only blocks that are complete, all in the middle and all on the host are ever wanted.

With ``cache_unit="token"`` the same is done with single tokens of single heads: each head has its own places, and the
first ``k_cache·block`` selected tokens of each head are wanted. It is there to be compared with.

Everything is decided on the device and nothing waits for it. The plan's steady runs are the same in all layers and
heads and are made once a step, on the host (`kvcm.gpu_tier.manager.execution_buffer.SteadyPlanner`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.config import PQCacheConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.kernels.token_runs import TokenPlaces, TokenPlan, token_runs
from kvcm.gpu_tier.manager.execution_buffer import ExecutionBuffer, SteadyPlanner
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime, Event, upload
from kvcm.gpu_tier.types import ExecutionPlan, ForwardBatch, ResidencyPlan, Selection, SteadyRing, SteadyZone

__all__ = ["BatchRows", "BlockCacheCounters", "BlockStep", "CacheLoads", "CachePlaces", "TokenBlockPolicy"]

# Which item lies in which place of a block cache, and which one goes when another comes; all on the device.

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

    Per layer, request and selecting head there are P places and two tables: the item of each place and the place of
    each item. A step names the items that it wants cached. Those that are there are *used*; the others take the places
    of the coldest items that are not wanted, coldest first: empty places before all, then by the policy:

    | policy | coldest |
    |---|---|
    | lru | used longest ago |
    | lfu | used least often since it came; of those the one used longest ago |
    | fifo | came first |
    | random | drawn from a seeded generator |

    Of equally cold places the lower one goes first. Nothing here waits for the device. Behind the last request there is
    a spare row, and behind the last item and place a spare column, for what must not be written anywhere.

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
        """Forget the cached blocks of a request."""
        for table in (self._place_of, self._item_of, self._heat):
            table[:, request] = -1

    def update(self, layers: Tensor, rows: Tensor, wanted: Tensor, usable: Tensor) -> CacheLoads:
        """Let the wanted items be in the cache, and return those that have to be loaded for that.

        Args:
            layers: ``int64 [B]`` position of each row's layer.
            rows: ``int64 [B]`` row of each request, unique in a layer but for R, which belongs to no request.
            wanted: ``int64 [B, Hs, k]`` items, unique in a row and head, -1 anywhere; the first ones come first when
                there are too few places.
            usable: ``int64 [B]`` places of each request.
        """
        item, heat, clock = self._item_of[layers, rows], self._heat[layers, rows], self._clock[layers, None, None]
        index = (layers[:, None, None], rows[:, None, None], self._heads)
        place = self._place_of[(*index, wanted.clamp_min(0))].long().where(wanted >= 0, -1)
        used = torch.zeros_like(item, dtype=torch.bool).scatter_(-1, place.where(place >= 0, self.places), value=True)
        heat = torch.where(used, self._touched(heat, clock), heat)
        order, free_places = self._victims(item, heat, used, usable)
        misses = (wanted >= 0) & (place < 0)
        rank = misses.cumsum(-1) - 1
        loads = misses & (rank < free_places[..., None])
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


# What comes into PQCache's block cache: the blocks with the most selected tokens, and their way from the host.


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


class _BlockAdmissions:
    """Keeps the cache of all layers and requests up to date.

    Counting is done after each layer; deciding and loading for a few layers at once, because a decision is some hundred
    small launches and as quick for eight layers as for one. All of it runs on the stream `upd`, beside the next layers,
    and the next step of each layer waits for that layer's blocks alone.

    Args:
        cache: the cached blocks and their slots.
        slots: ``int32 [R + 1, tokens]`` device slot of each place of the requests' caches.
        usable: ``int64 [R + 1]`` places that each request has.
        host_tokens: which tokens are on the host, and where.
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
        """Let compute wait for the last admission of a layer (by its position)."""
        if layer in self._loaded:
            self._runtime.fence(self._loaded[layer], "compute")

    def abandon(self) -> None:
        """Forget pending decisions, and wait for admissions in flight."""
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


@dataclass(frozen=True, slots=True)
class BlockCacheCounters:
    """What happened so far.

    Attributes:
        selected: selected tokens of all rows and heads, steady ones not counted.
        hits: those that were read in the cache.
        admissions: blocks (or tokens) that came into the cache.
        evictions: those that left it.
    """

    selected: int
    hits: int
    admissions: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits per selected token; 1 when nothing was selected."""
        return self.hits / self.selected if self.selected else 1.0


class TokenBlockPolicy:
    """See `kvcm.gpu_tier.manager.residency.BlockPolicy`.

    Args:
        settings: of the algorithm; the cache's are used.
        execution: the buffer that plans are for.
        host_tokens: owners of the host pages; of single tokens.
        transfer: between the host pool and the arena in which requests have their places.
        runtime: of the device.
        max_requests: rows of the per-request tables.
        max_tokens: most tokens of a request.
        layers_at_once: layers whose admissions are decided together.
        kernels: which implementation of the kernels.
        debug_checks: check in every step that all tokens read are on the host; waits for the device.

    Raises:
        ConfigError: `host_tokens` counts items of several tokens.
    """

    def __init__(
        self, settings: PQCacheConfig, execution: ExecutionBuffer, host_tokens: HostTokens, transfer: KVTransfer,
        runtime: DeviceRuntime, *, max_requests: int, max_tokens: int, layers_at_once: int = 8,
        kernels: str = "auto", debug_checks: bool = False,
    ) -> None:  # fmt: skip
        if host_tokens.unit != 1:
            raise ConfigError("host_tokens", host_tokens.unit, "must count single tokens")
        self.geometry = transfer.geometry
        self._settings, self._execution, self._host, self._transfer = settings, execution, host_tokens, transfer
        self._runtime, self._kernels, self._debug_checks = runtime, kernels, debug_checks
        by_token = settings.cache_unit == "token"
        self._unit = 1 if by_token else settings.block
        self._max_requests = max_requests
        self._steady = SteadyPlanner(execution.tokens_per_row, runtime)
        self._cache = CachePlaces(
            layers=self.geometry.num_layers, max_requests=max_requests,
            heads=self.geometry.num_kv_heads if by_token else 1, places=settings.cache_tokens // self._unit,
            items=-(-max_tokens // self._unit), policy=settings.policy, seed=settings.seed, device=runtime.device,
        )  # fmt: skip
        self._slots = torch.full(
            (max_requests + 1, max(1, settings.cache_tokens)), -1, dtype=torch.int32, device=runtime.device
        )
        self._usable = torch.zeros(max_requests + 1, dtype=torch.int64, device=runtime.device)
        self._admissions = _BlockAdmissions(
            settings=settings,
            cache=self._cache,
            slots=self._slots,
            usable=self._usable,
            host_tokens=host_tokens,
            transfer=transfer,
            runtime=runtime,
            layers_at_once=layers_at_once,
        )
        self._counts = torch.zeros(3, dtype=torch.int64, device=runtime.device)
        self._rows: BatchRows | None = None
        self._steps: dict[int, BlockStep] = {}

    plans_on_host = False

    # Requests.

    def hold(self, request: int, n_tokens: int) -> None:
        """See `BlockPolicy`: nothing is kept on the host beside the host pool."""

    def cache_slots(self, n_tokens: int) -> int:
        """See `BlockPolicy`: whole blocks, no more than the request has, `cache_tokens` at most."""
        block = self._settings.block
        return min(self._settings.cache_tokens, n_tokens // block * block)

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """See `BlockPolicy`."""
        self._steady.admit(request, ring, buffer_slots)
        cache = buffer_slots[ring.capacity :][: self._settings.cache_tokens]
        self._slots[request, : len(cache)] = upload(cache.int(), self._runtime.device)
        self._usable[request] = len(cache) // self._unit

    def release(self, request: int) -> None:
        """See `BlockPolicy`. Waits for admissions on their way: they read host pages and write the request's places."""
        if request not in self._steady:
            return
        self._admissions.abandon()
        self._steady.release(request)
        self._cache.reset(request)
        self._slots[request] = -1
        self._usable[request] = 0

    # A step of a layer.

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """See `BlockPolicy`: nothing to prepare."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `BlockPolicy`.

        Raises:
            ConfigError: the selection is not of single tokens of every KV head beside a steady zone.
            StateError: more tokens are steady than have places, or, with `debug_checks`, a token is not on the host.
        """
        zone = self._zone(selection)
        layer = self.geometry.layer_index(layer_id)
        self._admissions.wait_on_device(layer)
        steady = self._steady.plan(batch, zone)
        rows = self._rows_of(batch, sparse_mask)
        heads, width = selection.indices.shape[1:]
        plan = TokenPlan.empty(batch.rows, heads, steady.kind.shape[1] + width, self._counts)
        places = TokenPlaces(
            place_of=self._cache.place_of(layer),
            slots=self._slots,
            host_loc=self._host.host_loc,
            sink=zone.sink,
            unit=self._unit,
        )
        token_runs(
            indices=selection.indices,
            lengths=selection.lengths,
            requests=rows.requests,
            active=rows.active,
            steady=steady,
            places=places,
            out=plan,
            impl=self._kernels,
        )
        if self._debug_checks:
            self._check_found()
        self._steps[layer] = BlockStep(batch, rows, zone, selection.indices)
        return ResidencyPlan(self._execution.table_of(batch.rows), execution=ExecutionPlan(plan.runs, plan.lens))

    def _rows_of(self, batch: ForwardBatch, sparse_mask: Tensor) -> BatchRows:
        """Return which rows of a batch select, the same in all layers of a step."""
        if self._rows is None or self._rows.batch is not batch or self._rows.sparse_mask is not sparse_mask:
            self._rows = BatchRows.of(batch, sparse_mask, self._max_requests)
        return self._rows

    def _check_found(self) -> None:
        lost = int(self._counts[2])
        self._counts[2] = 0
        if lost:
            raise StateError(f"{lost} selected tokens are neither cached nor on the host")

    def _zone(self, selection: Selection) -> SteadyZone:
        heads = selection.indices.shape[1]
        if selection.steady is None or selection.unit_tokens != 1 or heads != self.geometry.num_kv_heads:
            allowed = f"single tokens of {self.geometry.num_kv_heads} heads beside a steady zone"
            raise ConfigError("selection", (selection.steady, selection.unit_tokens, heads), allowed)
        return selection.steady

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `BlockPolicy`: the wanted blocks of this layer, or of some at once, begin their way from the host."""
        layer = self.geometry.layer_index(layer_id)
        step = self._steps.pop(layer, None)
        if step is not None and self._settings.cache_tokens:
            self._admissions.add(layer, step)

    # Inspection.

    def host_source(self, layer_id: int) -> RowPool:
        """See `BlockPolicy`: the host pool, in the order of tokens."""
        return RowPool(self._host.pool.data, self._host.pool.addressing, self.geometry.layer_index(layer_id))

    @property
    def host_bytes(self) -> int:
        """See `BlockPolicy`: none."""
        return 0

    def close(self) -> None:
        """See `BlockPolicy`; there is nothing."""

    @property
    def counters(self) -> BlockCacheCounters:
        """What happened so far; reading it waits for the device."""
        self._runtime.fence(self._runtime.record("upd"), "compute")
        return BlockCacheCounters(*self._counts[:2].tolist(), *self._admissions.counts.tolist())

    def cached_items(self, layer_id: int, request: int) -> Tensor:
        """Return the block (or token) in each place of a request, -1 for an empty one: ``int32 [1 or H, P]``.

        Blocks and tokens are counted from the end of the sink. For tests and metrics.
        """
        return self._cache.held(self.geometry.layer_index(layer_id), request)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache's tables on the device; its KV lies in the requests' buffers."""
        return self._cache.nbytes + self._slots.nbytes + self._usable.nbytes
