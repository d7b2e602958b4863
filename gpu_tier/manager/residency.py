"""Residency policies: they decide where selected items are on the device, and which items move.

`ResidencyPolicy.resolve` is the decision: hits, victims and loads of each request, layer and head. `LruDiffPolicy`
keeps a buffer in order of use; the other policies here keep all KV or a fixed set. Bytes are moved by
`SparseKVCacheManager.fetch`; block caches are in `token_blocks` (PQCache), `wave_buffer` and `wave_gpu` (RetroInfer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.kernels.lru_diff import DiffError, DiffOutputs, DiffScratch, LayerState, lru_diff
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.runtime import DeviceRuntime, upload
from kvcm.gpu_tier.types import ForwardBatch, MissPlan, Promotion, ResidencyPlan, Selection, SteadyRing

__all__ = [
    "BlockPolicy",
    "Buffer",
    "BufferFill",
    "DeviceResidentPolicy",
    "LruCounters",
    "LruDiffPolicy",
    "ResidencyPolicy",
    "SparseBuffers",
    "StaticSetPolicy",
]


@dataclass(frozen=True, slots=True)
class BufferFill:
    """Items to copy into a request's fresh buffer, the same in all layers and heads.

    Attributes:
        items: ``int64 [M]`` items, on the host.
        slots: ``int64 [M]`` device slot of each item's first token.
    """

    items: Tensor
    slots: Tensor


class ResidencyPolicy(Protocol):
    """One policy over all layers and requests of one engine."""

    def hold(self, request: int, n_tokens: int) -> None:
        """Set aside what a request of so many tokens needs beside its buffer; more than before or the same.

        Raises:
            PoolExhaustedError: there is too little; what the request had stays.
        """

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """Give a request its buffer and return what to fill it with.

        Args:
            request: row of the per-request tables.
            buffer_slots: ``int32 [C]`` device slot of each item of the buffer.
            newest_slots: ``int32 [2]`` device slots of the newest item i: entry ``i % 2``.
            n_tokens: tokens whose KV exists; the last, part-filled item goes to its newest slot.
        """

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """Return where each selected item is after the plan was fetched; no bytes move."""

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Take note that the layer's attention has read the buffer."""


class BlockPolicy(Protocol):
    """Residency `blocks`: each step an execution buffer is put together from three sources.

    A request's buffer in the arena has ``ring.capacity`` places for its steady tokens, and behind them places of the
    block cache, the same slots in every layer and head. Other tokens are on the host. Plans have `execution`:

    * steady tokens first, in ascending order, then the selected items in the order of the selection, in each the tokens
      in ascending order;
    * no byte of the result may depend on the content of the cache.

    Attributes:
        plans_on_host: whether plans are made on the host, of announced selections: then the copies need not wait for
            the device's current work.
    """

    plans_on_host: bool

    def hold(self, request: int, n_tokens: int) -> None:
        """Set aside host memory for a request of so many tokens, more than before or the same.

        Raises:
            PoolExhaustedError: there is too little; what the request had stays.
        """

    def cache_slots(self, n_tokens: int) -> int:
        """Return the places (tokens) of the cache of a request of so many tokens; grows with them or stays."""

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """Give a request its buffer, or a grown one: places that it had stay where they are.

        Args:
            request: row of the per-request tables.
            ring: its steady places.
            buffer_slots: ``int32 [ring.capacity + cache]`` device slot of each place.
        """

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too. Nothing of it is left for the next one in its row."""

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """Announce a call of `resolve`, as soon as it was given to the compute stream; does not wait."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """Return how the execution buffer is put together; no bytes of KV move."""

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Bring into the cache what the policy wants there, now that the layer's attention has been issued.

        What it copies out of the execution buffer is read before the buffer is written again (O4), and what it writes
        into the cache is there before the layer's next step reads it.
        """

    def host_source(self, layer_id: int) -> RowPool:
        """Return where the runs of `Source.HOST` of a layer lie."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory beside the host pool."""

    def close(self) -> None:
        """End threads and give host memory back; a second call does nothing. The device reads none of it any more."""


# Sparse buffers: pages of the arena in which a request keeps items for attention, the same slots in every layer.

_NEWEST = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """The buffer of one request.

    Attributes:
        items: ``int32 [C]`` device slot of each item's first token.
        newest: ``int32 [2]`` those of the newest slots.
    """

    items: Tensor
    newest: Tensor


class SparseBuffers:
    """Owners of the arena's pages that are buffers.

    A buffer is C items and two newest slots. The newest item i, the one being written, lives in newest slot ``i % 2``:
    the next item can be written before this one was moved into the buffer. The two are as large as an item.

    Args:
        pool: the arena.
        unit_tokens: tokens of an item; divides the page size.
    """

    def __init__(self, pool: DeviceKVPool, unit_tokens: int) -> None:
        self.pool = pool
        self.unit = unit_tokens
        self._pages: dict[int, list[int]] = {}

    def pages_for(self, capacity: int) -> int:
        """Return the pages of a buffer of `capacity` items."""
        return -(-(capacity + _NEWEST) * self.unit // self.pool.addressing.page_size)

    def cover(self, request: int, capacity: int) -> bool:
        """Let a request have a buffer of at least so many items; items keep their slots. Returns whether it grew.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        pages = self._pages.get(request, [])
        missing = self.pages_for(capacity) - len(pages)
        if missing > 0:
            self._pages[request] = pages + self.pool.allocator.alloc(missing)
        return missing > 0

    def __contains__(self, request: int) -> bool:
        return request in self._pages

    def item_slot(self, request: int, position: int) -> int:
        """Return the device slot of the item at a position of the buffer, on the host."""
        return self._slot(request, _NEWEST + position)

    def newest_slot(self, request: int, token: int) -> int:
        """Return the device slot of a token while its item is the newest, on the host."""
        return self._slot(request, token // self.unit % _NEWEST) + token % self.unit

    def _slot(self, request: int, index: int) -> int:
        # The newest slots come first, so that a buffer can grow behind them.
        size = self.pool.addressing.page_size
        page, offset = divmod(index * self.unit, size)
        return self._pages[request][page] * size + offset

    def buffer(self, request: int) -> Buffer:
        """Return the buffer of a request."""
        size = self.pool.addressing.page_size
        pages = torch.tensor(self._pages[request], dtype=torch.int32)
        slots = (pages[:, None] * size + torch.arange(0, size, self.unit, dtype=torch.int32)).flatten()
        return Buffer(slots[_NEWEST:], slots[:_NEWEST])

    def release(self, request: int) -> None:
        """Release the buffer of a request, if it has one."""
        self.pool.allocator.free(self._pages.pop(request, []))


# All KV on the device: the baseline that a hierarchy is compared with, and what short contexts are best served by.


class DeviceResidentPolicy:
    """Selected items are where they always were; nothing moves.

    Args:
        table: ``int32 [R, max_tokens]`` device slot of every token.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def hold(self, request: int, n_tokens: int) -> None:
        """See `ResidencyPolicy`; it keeps nothing."""

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """See `ResidencyPolicy`; there is no buffer."""
        return BufferFill(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    def release(self, request: int) -> None:
        """See `ResidencyPolicy`."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `ResidencyPolicy`."""
        rows = batch.req_pool_indices[:, None, None]
        tokens = selection.indices.long() * selection.unit_tokens
        slots = self._table[rows, tokens.clamp_min(0)]
        return ResidencyPlan(torch.where(selection.indices >= 0, slots, -1))

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `ResidencyPolicy`."""


# A fixed set of tokens per layer and KV head, to which new tokens are appended: nothing is ever loaded again.


class StaticSetPolicy:
    """Positions in the selection are positions in the buffer.

    The j-th token of a head's set lies in the j-th slot of the buffer, for any token; decoded tokens take the slots
    behind the set in the order in which they come.

    Args:
        max_requests: rows of the tables.
        device: where they lie.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._slots = torch.full((max_requests, 0), -1, dtype=torch.int32, device=device)

    def hold(self, request: int, n_tokens: int) -> None:
        """See `ResidencyPolicy`; it keeps nothing."""

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """See `ResidencyPolicy`; what goes into the buffer differs by layer and head, so it is not named here.

        Called again when the buffer has grown.
        """
        missing = len(buffer_slots) - self._slots.shape[1]
        if missing > 0:
            self._slots = torch.nn.functional.pad(self._slots, (0, missing), value=-1)
        self._slots[request, : len(buffer_slots)] = upload(buffer_slots, self._slots.device)
        return BufferFill(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    def release(self, request: int) -> None:
        """See `ResidencyPolicy`."""
        self._slots[request] = -1

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `ResidencyPolicy`."""
        width = selection.indices.shape[-1]
        slots = self._slots[batch.req_pool_indices, :width]
        slots = torch.nn.functional.pad(slots, (0, width - slots.shape[1]), value=-1)
        return ResidencyPlan(torch.where(selection.indices >= 0, slots[:, None], -1))

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `ResidencyPolicy`."""


# LRU diff residency: a buffer of C items per request, layer and head, kept in the order of use.

_MAX_CAPACITY = torch.iinfo(torch.int16).max


@dataclass(frozen=True, slots=True)
class LruCounters:
    """What happened so far, in items of all rows and heads.

    Attributes:
        selected: valid selected items.
        hits: those that were on the device: in the buffer, newest, or promoted in the same step.
        loads: those that were loaded from host memory.
        promotions: previous newest items that moved into the buffer.
    """

    selected: int
    hits: int
    loads: int
    promotions: int

    @property
    def hit_rate(self) -> float:
        """Hits per selected item; 1 when nothing was selected."""
        return self.hits / self.selected if self.selected else 1.0


class LruDiffPolicy:
    """See `kvcm.gpu_tier.manager.residency.ResidencyPolicy`.

    A step loads only the selected items that the buffer lacks, into the slots used longest ago. The newest item lives
    outside the buffer, in one of two slots by turns: the engine may write the next step's item before this step's one
    was promoted. All state is on the device and one kernel per layer does a step (`kvcm.gpu_tier.kernels.lru_diff` has
    its rules and invariants), so that nothing waits for the device.

    The tensors of a plan are used again by the layer after the next.

    Args:
        geometry: of the model's KV.
        capacity: items C of a buffer, at most 32767, at least as many as a selection is wide.
        unit_tokens: tokens of an item.
        selecting_heads: heads Hs that select on their own: 1, or all KV heads.
        max_requests: rows R of the state.
        max_items: most items of a request.
        host_loc: ``int64 [R, max_items]`` host slot of each item's first token, -1 while it is not backed up. The
            manager owns it.
        runtime: of the device.
        promote_newest: whether the previous newest item stays on the device; otherwise it has to be backed up by the
            next step.
        loads_hottest: whether loaded items are hotter than hits.
        kernels: which implementation of the kernel.
        debug_checks: check the selection and the error flag in every step; waits for the device.

    Raises:
        ConfigError: an argument is not allowed.
    """

    def __init__(
        self, geometry: KVGeometry, *, capacity: int, unit_tokens: int, selecting_heads: int, max_requests: int,
        max_items: int, host_loc: Tensor, runtime: DeviceRuntime, promote_newest: bool = True,
        loads_hottest: bool = False, kernels: str = "auto", debug_checks: bool = False,
    ) -> None:  # fmt: skip
        _check_sizes(geometry, capacity, unit_tokens, selecting_heads)
        if host_loc.shape != (max_requests, max_items) or host_loc.dtype is not torch.int64:
            raise ConfigError("host_loc", (host_loc.dtype, *host_loc.shape), f"int64 [{max_requests}, {max_items}]")
        self.geometry = geometry
        self.capacity = capacity
        self.unit_tokens = unit_tokens
        self.selecting_heads = selecting_heads
        self._promote_newest = promote_newest
        self._loads_hottest = loads_hottest
        self._kernels = kernels
        self._debug_checks = debug_checks
        self._device = runtime.device
        self._admitted: dict[int, int] = {}  # tokens of each request at its last step, or at its admission
        self._host_loc = host_loc
        per_slot = (geometry.num_layers, max_requests, selecting_heads, capacity)
        self._slot_item = self._ids(*per_slot)
        self._lru_slots = torch.arange(capacity, dtype=torch.int16, device=self._device).repeat(*per_slot[:3], 1)
        self._newest_item = self._ids(*per_slot[:3])
        self._slot_loc = self._ids(max_requests, capacity)
        self._newest_slots = self._ids(max_requests, 2)
        self._counts = torch.zeros(geometry.num_layers, 4, dtype=torch.int64, device=self._device)
        self._errors = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._outputs: dict[tuple[int, int, int], DiffOutputs] = {}
        self._memory: dict[tuple[int, int, int], DiffOutputs] = {}
        self._scratch: dict[int, DiffScratch] = {}
        self._layers = [self._state_of(layer) for layer in range(geometry.num_layers)]

    def _ids(self, *shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self._device)

    def hold(self, request: int, n_tokens: int) -> None:
        """See `ResidencyPolicy`; its state has a row for each request."""

    def admit(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> BufferFill:
        """See `ResidencyPolicy`: all full items if they fit, each in the slot of its number, else the last C of them.

        Raises:
            ConfigError: the slots are not C and 2, or there are more items than a request can have.
            StateError: the request has a buffer.
        """
        self._check_admission(request, buffer_slots, newest_slots, n_tokens)
        full, part = divmod(n_tokens, self.unit_tokens)
        first = max(0, full - self.capacity)
        held = full - first
        items = torch.arange(first, full + bool(part))
        self._slot_loc[request] = upload(buffer_slots, self._device)
        self._newest_slots[request] = upload(newest_slots, self._device)
        self._slot_item[:, request, :, :held] = torch.arange(first, full, dtype=torch.int32, device=self._device)
        order = torch.arange(held, held + self.capacity, device=self._device) % self.capacity
        self._lru_slots[:, request] = order.short()
        self._newest_item[:, request] = full if part else -1
        self._admitted[request] = n_tokens
        slots = self._slot_loc[request, :held].long()
        if part:
            slots = torch.cat([slots, self._newest_slots[request, full % 2 :][:1].long()])
        return BufferFill(items, slots)

    def _check_admission(self, request: int, buffer_slots: Tensor, newest_slots: Tensor, n_tokens: int) -> None:
        if request in self._admitted:
            raise StateError(f"request {request} has a buffer; release it first")
        if not 0 <= request < len(self._host_loc):
            raise ConfigError("request", request, f"rows are 0 to {len(self._host_loc) - 1}")
        if buffer_slots.shape != (self.capacity,) or newest_slots.shape != (2,):
            shapes = (tuple(buffer_slots.shape), tuple(newest_slots.shape))
            raise ConfigError("buffer_slots, newest_slots", shapes, f"must be ({self.capacity},) and (2,)")
        self._check_tokens("n_tokens", n_tokens)

    def _check_tokens(self, field: str, n_tokens: int) -> None:
        most = self._host_loc.shape[1] * self.unit_tokens
        if not 0 <= n_tokens <= most:
            raise ConfigError(field, n_tokens, f"a request has 0 to {most} tokens")

    def release(self, request: int) -> None:
        """See `ResidencyPolicy`. Nothing of the request is left for the next one in its row."""
        if request not in self._admitted:
            return
        del self._admitted[request]
        self._slot_item[:, request] = -1
        self._lru_slots[:, request] = torch.arange(self.capacity, dtype=torch.int16, device=self._device)
        self._newest_item[:, request] = -1
        self._slot_loc[request] = -1
        self._newest_slots[request] = -1

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `ResidencyPolicy`. One kernel, no waiting.

        Raises:
            ConfigError: the selection is wider than the buffer, or of other heads or items than the policy, or a
                request is longer than its rows.
            StateError: with `debug_checks`, the step broke a rule.
        """
        self._check_selection(selection)
        self._check_tokens("lengths", max(batch.lengths, default=0))
        if self._debug_checks:
            selection.validate(batch)
            self._check_growth(batch)
        layer = self.geometry.layer_index(layer_id)
        out = self._outputs_for(layer, selection.indices)
        lru_diff(
            items=selection.indices,
            requests=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            sparse_mask=sparse_mask,
            num_real=batch.num_real_reqs,
            state=self.layer_state(layer_id),
            out=out,
            scratch=self._scratch_for(batch.rows),
            unit_tokens=self.unit_tokens,
            promote_newest=self._promote_newest,
            loads_hottest=self._loads_hottest,
            impl=self._kernels,
        )
        if self._debug_checks:
            self.check()
        return ResidencyPlan(
            device_slot=out.device_slot,
            misses=MissPlan(out.load_host, out.load_device, out.load_count),
            promotion=Promotion(out.promote_src, out.promote_dst) if self._promote_newest else None,
            evicted_items=out.evicted_items,
            evicted_slots=out.load_device,
        )

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Do nothing: `resolve` has updated the order."""

    def check(self) -> None:
        """Raise what steps have reported since the last check; waits for the device.

        Raises:
            StateError: a step broke a rule; its plan has -1 for the items concerned.
        """
        errors = self.errors
        self.clear_errors()
        if errors:
            raise StateError(f"the LRU diff reported {errors.name}: see kvcm.gpu_tier.kernels.lru_diff.DiffError")

    @property
    def errors(self) -> DiffError:
        """What steps have reported since the errors were cleared; waits for the device."""
        return DiffError(int(self._errors.item()))

    def clear_errors(self) -> None:
        """Forget what steps have reported."""
        self._errors.zero_()

    @property
    def counters(self) -> LruCounters:
        """What happened so far in all layers; reading it waits for the device."""
        return LruCounters(*self._counts.sum(0).tolist())

    def layer_counters(self, layer_id: int) -> LruCounters:
        """Return what happened so far in a layer; waits for the device."""
        return LruCounters(*self._counts[self.geometry.layer_index(layer_id)].tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the state on the device, without `host_loc`."""
        state = (self._slot_item, self._lru_slots, self._newest_item, self._slot_loc, self._newest_slots)
        return sum(tensor.nbytes for tensor in state)

    def layer_state(self, layer_id: int) -> LayerState:
        """Return views of a layer's state."""
        return self._layers[self.geometry.layer_index(layer_id)]

    def _state_of(self, layer: int) -> LayerState:
        return LayerState(
            slot_item=self._slot_item[layer], lru_slots=self._lru_slots[layer], newest_item=self._newest_item[layer],
            slot_loc=self._slot_loc, newest_slots=self._newest_slots, host_loc=self._host_loc,
        )  # fmt: skip

    def _check_growth(self, batch: ForwardBatch) -> None:
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            if length < self._admitted.get(request, 0):
                raise StateError(f"request {request} has shrunk from {self._admitted[request]} to {length} tokens")
            if request in self._admitted:
                self._admitted[request] = length

    def _check_selection(self, selection: Selection) -> None:
        heads, width = selection.indices.shape[1:]
        if width > self.capacity:
            raise ConfigError("capacity", self.capacity, f"selections of {width} items need as many slots")
        if heads != self.selecting_heads:
            raise ConfigError("selection", heads, f"must have {self.selecting_heads} heads")
        if selection.unit_tokens != self.unit_tokens:
            raise ConfigError("unit_tokens", selection.unit_tokens, f"items here have {self.unit_tokens} tokens")

    def _outputs_for(self, layer: int, items: Tensor) -> DiffOutputs:
        rows, heads, width = items.shape
        key = (layer, rows, width)
        if key not in self._outputs:
            # Two sets by turns: the plan of a layer stays whole while the next one is made. Batches of about the same
            # size share them: a captured graph keeps pointing at what it was captured with, so none is ever replaced.
            shared = (layer % 2, _at_most(rows), width)
            if shared not in self._memory:
                sizes = (shared[1], heads, width)
                self._memory[shared] = DiffOutputs.empty(*sizes, self._counts[layer], self._errors)
            self._outputs[key] = self._memory[shared].of(rows, self._counts[layer])
        return self._outputs[key]

    def _scratch_for(self, rows: int) -> DiffScratch:
        most = _at_most(rows)
        if most not in self._scratch:
            items = self._host_loc.shape[1]
            self._scratch[most] = DiffScratch(
                rows=most, heads=self.selecting_heads, items=items, capacity=self.capacity, device=self._device
            )
        return self._scratch[most]


def _at_most(rows: int) -> int:
    """Return the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def _check_sizes(geometry: KVGeometry, capacity: int, unit_tokens: int, selecting_heads: int) -> None:
    if not 1 <= capacity <= _MAX_CAPACITY:
        raise ConfigError("capacity", capacity, f"must be 1 to {_MAX_CAPACITY} items")
    if unit_tokens < 1:
        raise ConfigError("unit_tokens", unit_tokens, "must be at least 1")
    if selecting_heads not in (1, geometry.num_kv_heads):
        raise ConfigError.choice("selecting_heads", selecting_heads, (1, geometry.num_kv_heads))
