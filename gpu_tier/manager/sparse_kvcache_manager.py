"""Makes sure that the bytes attention reads are on the device, and that all KV gets to the host.

Ordering rules, each kept by events between streams:

O1. The host copy of a token is complete before the token can be evicted: an item enters `host_loc` only when its copy
    has ended or compute waits for it, and policies evict nothing without an entry there.
O2. `fetch` of a layer is complete before the layer's attention reads the buffer: compute waits for its event.
O3. A slot written by `fetch` is not overwritten by the next step's before attention has read it: the copy stream waits
    for compute before it begins. An execution buffer is shared by the layers, so there this holds between layers.
O4. `commit` comes after the layer's attention on the compute stream, and what it copies out of an execution buffer
    before the next layer's `fetch`, which waits for compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.manager.execution_buffer import BlockResidency
from kvcm.gpu_tier.manager.host_tokens import HostTokens
from kvcm.gpu_tier.manager.residency import BlockPolicy, ResidencyPolicy, SparseBuffers
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool, ReqToTokenPool
from kvcm.gpu_tier.pools.transfer import KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime, Event, upload
from kvcm.gpu_tier.types import ExecutionPlan, ForwardBatch, ResidencyPlan, Selection, SteadyRing

__all__ = ["KVReader", "OffloadTicket", "ResidentLayers", "SparseKVCacheManager"]

# Dense pages of requests: prompts while they are computed, short requests, and all KV where residency is `device`.


class _DenseTokens:
    """Owners of the arena's pages that are dense.

    Tokens of a request lie in blocks of `page_size`; each block that is on the device has one page. The table of slots
    is read by dense attention, and locates every token: -1 means not on the device.
    """

    def __init__(self, pool: DeviceKVPool, tables: ReqToTokenPool) -> None:
        self.pool = pool
        self.tables = tables
        self._pages: dict[int, dict[int, int]] = {}
        self._spare: dict[int, list[int]] = {}

    def hold(self, request: int, pages: int) -> None:
        """Set pages aside for a request.

        Raises:
            PoolExhaustedError: there are too few; then none is held.
        """
        self._spare.setdefault(request, []).extend(self.pool.allocator.alloc(pages))
        self._pages.setdefault(request, {})

    def cover(self, request: int, start: int, stop: int) -> None:
        """Give every block of tokens start to stop - 1 a page, those set aside first.

        Raises:
            PoolExhaustedError: there are too few; then nothing changed.
        """
        size = self.pool.addressing.page_size
        pages, spare = self._pages.setdefault(request, {}), self._spare.setdefault(request, [])
        missing = [block for block in range(start // size, -(-stop // size)) if block not in pages]
        if len(missing) > len(spare):
            spare.extend(self.pool.allocator.alloc(len(missing) - len(spare)))
        pages.update((block, spare.pop()) for block in missing)
        if missing:
            first, last = missing[0] * size, (missing[-1] + 1) * size
            self.tables.set_slots(request, first, self.slots(request, first, last))

    def reuse(self, request: int, stop_block: int) -> None:
        """Set the pages of the blocks before `stop_block` aside: the request's next blocks get them."""
        pages, size = self._pages.get(request, {}), self.pool.addressing.page_size
        blocks = [block for block in pages if block < stop_block]
        if blocks:
            self._spare[request].extend(pages.pop(block) for block in blocks)
            self.tables.clear(request, min(blocks) * size, (max(blocks) + 1) * size)

    def release(self, request: int) -> None:
        """Release everything of a request."""
        pages = self._pages.pop(request, {})
        self.pool.allocator.free([*pages.values(), *self._spare.pop(request, [])])
        if pages:
            size = self.pool.addressing.page_size
            self.tables.clear(request, min(pages) * size, (max(pages) + 1) * size)

    def slot(self, request: int, token: int) -> int:
        """Return the device slot of a token that has one, on the host."""
        size = self.pool.addressing.page_size
        return self._pages[request][token // size] * size + token % size

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Return the device slots of tokens that have one, ``int32 [stop - start]``, on the host."""
        size = self.pool.addressing.page_size
        first = start // size
        pages = [self._pages[request][block] for block in range(first, -(-stop // size))]
        slots = torch.tensor(pages, dtype=torch.int32)[:, None] * size + torch.arange(size, dtype=torch.int32)
        return slots.flatten()[start - first * size : stop - first * size]

    def blocks(self, request: int) -> list[int]:
        """Return the blocks of a request that have a page, ascending."""
        return sorted(self._pages.get(request, {}))

    def has(self, request: int, start: int, stop: int) -> bool:
        """Return whether all tokens start to stop - 1 are on the device."""
        size = self.pool.addressing.page_size
        pages = self._pages.get(request, {})
        return all(block in pages for block in range(start // size, -(-stop // size)))


# Layers that always attend densely (Quest skips the first two): all of their KV stays on the device.


class ResidentLayers:
    """The arena of the first `count` layers.

    They have an arena of their own that holds only these layers, so that a request costs their share of its KV and no
    more. Every request is in it from its first token on, in every state, so attention of these layers is the same for
    all.

    Args:
        geometry: of all layers.
        count: layers that are resident.
        num_pages: pages of the arena; tokens of all requests must fit.
        max_requests: rows of the table.
        max_tokens: most tokens of a request.
        transfer: between the host pool and the arena of all layers.
        runtime: of the device.
    """

    def __init__(
        self, geometry: KVGeometry, count: int, num_pages: int, max_requests: int, max_tokens: int,
        transfer: KVTransfer, runtime: DeviceRuntime,
    ) -> None:  # fmt: skip
        first = replace(geometry, num_layers=min(count, geometry.num_layers))
        self.layers = first.layers
        self.pool = DeviceKVPool(first, num_pages, runtime)
        self._transfer = transfer.to(self.pool)
        self._tables = ReqToTokenPool(max_requests, max_tokens, runtime.device)
        self._dense = _DenseTokens(self.pool, self._tables)

    @property
    def table(self) -> Tensor:
        """Slots of every token in this arena, ``int32 [R, max_tokens]``."""
        return self._tables.table

    def begin(self, request: int) -> None:
        """Allocate a request's row."""
        self._tables.alloc_row(request)

    def cover(self, request: int, n_tokens: int) -> None:
        """Hold pages for so many tokens.

        Raises:
            PoolExhaustedError: there are too few; then nothing changed.
        """
        self._dense.cover(request, 0, n_tokens)

    def fill(self, request: int, host_slots: Tensor) -> None:
        """Load the first tokens of a request from the host pool, for an attached prefix."""
        slots = self.table[request, : len(host_slots)].long()
        self._transfer.load(host_slots[None], slots[None], layers=self.layers)

    def release(self, request: int) -> None:
        """Release everything of a request."""
        self._dense.release(request)
        self._tables.free(request)


# Reads a request's KV as numbers from both pools; for prefill over a prefix, rebuilding, and algorithms that need it.


class KVReader:
    """Reads rows from the arena where the table names a slot, else from the host.

    Not for the decode path of a deployment: it waits for copies on their way and for the device.

    Args:
        device: the arena.
        table: ``int32 [R, max_tokens]`` device slot of every token, -1 where it is not on the device.
        host: owners of the host pages.
        settle: waits until the copies to the host of a request are complete.
    """

    def __init__(self, device: DeviceKVPool, table: Tensor, host: HostTokens, settle: Callable[[int], None]) -> None:
        self._device = device
        self._table = table
        self._host = host
        self._settle = settle

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """Return the keys (latents of MLA) of tokens start to stop - 1, ``f32 [n, H, d]``."""
        return self._read(layer_id, 0, request, start, stop)

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys ``f32 [n, H, d]`` and values ``f32 [n, H, dv]`` of tokens start to stop - 1."""
        k = self.keys(layer_id, request, start, stop)
        if len(self._device.geometry.parts) == 1:
            return k, k[..., : self._device.geometry.v_head_dim]
        return k, self._read(layer_id, 1, request, start, stop)

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """Return the rows of a part (0 for keys and latents, 1 for values) as bytes, ``uint8 [n, H, row_bytes]``."""
        slots = self._table[request, start:stop].long()
        layer = self._device.layer(layer_id)
        rows = layer.k if part == 0 or layer.v is None else layer.v
        data = rows.data[slots.clamp_min(0)]
        absent = (slots < 0).nonzero().flatten().cpu()
        if len(absent):
            self._settle(request)
            host_slots = self._host.slots(request, start, stop)[absent]
            data[absent.to(data.device)] = self._host.pool.read(layer_id, part, host_slots).to(data.device)
        return data

    def _read(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        return self._device.geometry.parts[part].decode(self.raw(layer_id, part, request, start, stop))


# Copies to the host that are on their way. They run beside the computation; an event says when one is complete.


@dataclass(frozen=True, slots=True)
class OffloadTicket:
    """One copy.

    Attributes:
        requests: whose KV is copied.
        totals: tokens of each of them that are on the host once this is complete.
        done: the end of the copy.
    """

    requests: tuple[int, ...]
    totals: tuple[int, ...]
    done: Event


class _Offloads:
    """The copies on their way, oldest first: one stream runs them, so they end in this order."""

    def __init__(self) -> None:
        self._tickets: list[OffloadTicket] = []

    def add(self, ticket: OffloadTicket) -> OffloadTicket:
        """Note a copy that has begun."""
        self._tickets.append(ticket)
        return ticket

    def finished(self) -> list[OffloadTicket]:
        """Return the copies that have ended since the last call."""
        ended = 0
        while ended < len(self._tickets) and self._tickets[ended].done.is_done():
            ended += 1
        done, self._tickets = self._tickets[:ended], self._tickets[ended:]
        return done

    def until(self, ticket: OffloadTicket) -> list[OffloadTicket]:
        """Return the copies on their way that end no later than one of them; none when that one has ended."""
        places = [place for place, other in enumerate(self._tickets) if other is ticket]
        return self._tickets[: places[0] + 1] if places else []

    def of(self, requests: Sequence[int]) -> list[OffloadTicket]:
        """Return the copies on their way that touch one of the requests."""
        wanted = set(requests)
        return [ticket for ticket in self._tickets if wanted.intersection(ticket.requests)]


class SparseKVCacheManager:
    """The memory of all requests of one engine.

    Args:
        policy: residency; of `blocks` with its buffers.
        transfer: between the host pool and the arena.
        tables: rows of requests and their dense slots.
        host_tokens: owners of the host pages.
        runtime: of the device.
        unit_tokens: tokens of an item.
    """

    def __init__(
        self,
        policy: ResidencyPolicy | BlockResidency,
        transfer: KVTransfer,
        tables: ReqToTokenPool,
        host_tokens: HostTokens,
        runtime: DeviceRuntime,
        unit_tokens: int,
    ) -> None:
        self.host, self.device = transfer.pools
        self.tables = tables
        self.blocks = policy if isinstance(policy, BlockResidency) else None
        self.policy: ResidencyPolicy | BlockPolicy = policy.policy if isinstance(policy, BlockResidency) else policy
        self._items = None if isinstance(policy, BlockResidency) else policy
        self._announced: Event | None = None
        self.host_tokens = host_tokens
        self.runtime = runtime
        self.unit = unit_tokens
        self.layers = self.device.geometry.layers
        self.dense = _DenseTokens(self.device, tables)
        self.buffers = SparseBuffers(self.device, unit_tokens)
        self.transfer = transfer
        self.offloads = _Offloads()
        self.reader = KVReader(self.device, tables.table, host_tokens, self.wait_for_copies)

    # Residency of one layer.

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """Say what `resolve` will be asked, as soon as it was given to the compute stream."""
        if self.blocks is not None:
            self._announced = self.runtime.record("compute")
            self.blocks.policy.announce(layer_id, batch, selection)

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """Return where the selected items will be; no bytes move."""
        return self.policy.resolve(layer_id, batch, selection, sparse_mask)

    def fetch(self, layer_id: int, plan: ResidencyPlan) -> Event | None:
        """Begin to move what a plan asks for; attention must wait for the event (O2). None when nothing can move."""
        if plan.execution is not None:
            return self._gather(layer_id, plan.execution)
        if plan.misses is None and plan.promotion is None:
            return None
        self.runtime.fence(self.runtime.record("compute"), "h2d")  # the plan exists, and O3
        layers = range(layer_id, layer_id + 1)
        with self.runtime.stream("h2d"):
            if plan.promotion is not None:
                src, dst = plan.promotion.src, plan.promotion.dst
                self.transfer.move(
                    src.reshape(-1, 1), dst.reshape(-1, 1), layers=layers, per_head=src.shape[1] > 1,
                    unit_tokens=self.unit,
                )  # fmt: skip
            if plan.misses is not None:
                misses, width = plan.misses, plan.misses.src_host.shape[-1]
                self.transfer.load(
                    misses.src_host.reshape(-1, width), misses.dst_dev.reshape(-1, width), layers=layers,
                    count=misses.count.flatten(), per_head=misses.src_host.shape[1] > 1, unit_tokens=self.unit,
                )  # fmt: skip
        return self.runtime.record("h2d")

    @property
    def plans_on_host(self) -> bool:
        """Whether the host makes plans of announced selections, while the device may compute something else."""
        return self.blocks is not None and self.blocks.policy.plans_on_host

    def _gather(self, layer_id: int, plan: ExecutionPlan) -> Event:
        assert self.blocks is not None
        # The plan exists, O3 and O4. A plan of the host needs nothing that the device was given since it was announced.
        asked, self._announced = self._announced, None
        if asked is None or not self.plans_on_host:
            asked = self.runtime.record("compute")
        self.runtime.fence(asked, "h2d")
        arena = RowPool(self.device.data, self.device.addressing, self.device.geometry.layer_index(layer_id))
        with self.runtime.stream("h2d"):
            sources = self.blocks.sources(layer_id, arena)
            self.transfer.gather(sources, self.blocks.execution.source(), plan.runs)
        return self.runtime.record("h2d")

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """Notify the policy that the layer's attention was issued (O4)."""
        self.policy.commit(layer_id, plan)

    # Movement to the host.

    def offload(
        self, requests: Sequence[int], starts: Sequence[int], stops: Sequence[int], device_slots: Tensor
    ) -> OffloadTicket:
        """Begin to copy tokens ``[starts[i], stops[i])`` of each request to the host, all layers.

        Args:
            requests: rows.
            starts: first token of each.
            stops: token behind the last of each.
            device_slots: ``int64 [M]`` where they lie, request after request.
        """
        host_slots = self.host_tokens.span_slots(list(zip(requests, starts, stops, strict=True)))
        self.runtime.fence(self.runtime.record("compute"), "d2h")
        with self.runtime.stream("d2h"):
            target = upload(host_slots[None], self.runtime.device)
            self.transfer.store(device_slots[None].long(), target, layers=self.layers)
        done = self.runtime.record("d2h")
        ticket = self.offloads.add(OffloadTicket(tuple(requests), tuple(stops), done))
        self.poll()
        return ticket

    def offload_prompt(self, request: int, start: int, stop: int) -> OffloadTicket:
        """Begin to copy prompt tokens of a request to the host; they are dense."""
        return self.offload([request], [start], [stop], self.tables.slots(request, start, stop))

    def poll(self) -> list[OffloadTicket]:
        """Take note of the copies that have ended, and return them."""
        ended = self.offloads.finished()
        for ticket in ended:
            live = self._live(ticket)
            self.host_tokens.back_up([request for request, _ in live], [total for _, total in live])
        return ended

    def reach(self, ticket: OffloadTicket) -> None:
        """Let compute wait for a copy, and from now on rely on it and on all before it; the host does not wait."""
        self.runtime.fence(ticket.done, "compute")
        for pending in self.offloads.until(ticket):
            live = self._live(pending)
            self.host_tokens.locate([request for request, _ in live], [total for _, total in live])

    def _live(self, ticket: OffloadTicket) -> list[tuple[int, int]]:
        pairs = zip(ticket.requests, ticket.totals, strict=True)
        return [pair for pair in pairs if self.host_tokens.holds(pair[0])]

    def wait_for_copies(self, request: int) -> None:
        """Wait until no copy of a request is on its way."""
        for ticket in self.offloads.of([request]):
            ticket.done.wait()
        self.poll()

    # Lifetime of a request.

    def enter_buffer(self, request: int, capacity: int, n_tokens: int) -> None:
        """Give a request its buffer with `capacity` items, filled with the latest; all of its KV is on the host.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        self.buffers.cover(request, capacity)
        buffer = self.buffers.buffer(request)
        assert self._items is not None
        fill = self._items.admit(request, buffer.items[:capacity], buffer.newest, n_tokens)
        if len(fill.items):
            tokens = fill.items * self.unit
            self._fill(request, tokens[None], fill.slots[None], self.layers, per_head=False, n_tokens=n_tokens)

    def enter_static(self, request: int, sets: Sequence[Tensor], n_tokens: int) -> None:
        """Give a request a buffer with the set of each layer, ``int [Hs, m]`` tokens.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        kept = sets[0].shape[-1]
        self.buffers.cover(request, kept)
        self._admit_all(request, n_tokens)
        slots = self.buffers.buffer(request).items[:kept]
        for layer_id, tokens in zip(self.layers, sets, strict=True):
            targets = slots.expand(tokens.shape[0], -1)
            layers = range(layer_id, layer_id + 1)
            self._fill(request, tokens.long(), targets, layers, per_head=tokens.shape[0] > 1, n_tokens=n_tokens)

    def grow_static(self, request: int, capacity: int, n_tokens: int) -> None:
        """Let the buffer of a static set hold so many tokens; n_tokens is the request's length.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        if self.buffers.cover(request, capacity):
            self._admit_all(request, n_tokens)

    def _admit_all(self, request: int, n_tokens: int) -> None:
        buffer = self.buffers.buffer(request)
        assert self._items is not None
        self._items.admit(request, buffer.items, buffer.newest, n_tokens)

    def enter_blocks(self, request: int, ring: SteadyRing, n_tokens: int) -> None:
        """Give a request its buffer with its steady tokens, and release its dense pages.

        Raises:
            PoolExhaustedError: there are too few pages; then nothing changed.
        """
        assert self.blocks is not None
        self.blocks.admit(request, ring, n_tokens, self.buffers)
        spans = self.blocks.steady_spans(request, n_tokens)
        places = [self.blocks.places(request, span, self.buffers) for span in spans]
        for span, slots in zip(spans, places, strict=True):
            tokens = torch.arange(span.start, span.stop)
            self._fill(request, tokens[None], slots[None], self.layers, per_head=False, n_tokens=n_tokens)
        self.dense.release(request)
        for span, slots in zip(spans, places, strict=True):
            self.tables.set_slots(request, span.start, slots)

    def _fill(
        self, request: int, tokens: Tensor, slots: Tensor, layers: range, *, per_head: bool, n_tokens: int
    ) -> None:
        device = self.runtime.device
        target = upload(slots, device).long()
        if self.dense.has(request, 0, n_tokens):
            source = self.tables.slots(request, 0, n_tokens)[upload(tokens, device)].long()
            self.transfer.move(source, target, layers=layers, per_head=per_head, unit_tokens=self.unit)
            return
        self.wait_for_copies(request)
        source = upload(self.host_tokens.slots(request, 0, n_tokens)[tokens.cpu()], device)
        self.transfer.load(source, target, layers=layers, per_head=per_head, unit_tokens=self.unit)

    def close(self) -> None:
        """Give the host's memory back, once the device neither reads nor writes it; a second call does nothing."""
        for stream in ("compute", "h2d", "d2h", "upd"):
            self.runtime.record(stream).wait()
        if self.blocks is not None:
            self.blocks.policy.close()
        self.host.close()

    def release(self, request: int) -> None:
        """Release everything of a request, after the copies that touch it."""
        self.wait_for_copies(request)
        (self.blocks or self.policy).release(request)
        self.buffers.release(request)
        self.dense.release(request)
        self.host_tokens.release(request)
