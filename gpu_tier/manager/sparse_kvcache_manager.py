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

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.manager.block_residency import BlockResidency
from gpu_tier.manager.buffers import SparseBuffers
from gpu_tier.manager.dense_tokens import DenseTokens
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.manager.key_reader import KVReader
from gpu_tier.manager.offload import Offloads, OffloadTicket
from gpu_tier.manager.policy import BlockPolicy, ResidencyPolicy
from gpu_tier.pools.req_to_token import ReqToTokenPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.runtime import DeviceRuntime, Event, upload
from gpu_tier.types import ExecutionPlan, ForwardBatch, ResidencyPlan, Selection, SteadyRing

__all__ = ["SparseKVCacheManager"]


class SparseKVCacheManager:
    """The memory of all requests of one engine.

    Args:
        policy: residency; of `blocks` with its buffers.
        transfer: between the host pool and the arena.
        tables: rows of requests and their dense slots.
        host_tokens: who holds which host pages.
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
        self.dense = DenseTokens(self.device, tables)
        self.buffers = SparseBuffers(self.device, unit_tokens)
        self.transfer = transfer
        self.offloads = Offloads()
        self.reader = KVReader(self.device, tables.table, host_tokens, self.settle)

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
        """Whether the host makes plans of what was announced, while the device may compute something else."""
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
        """Tell the policy that the layer's attention was issued (O4)."""
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

    def settle(self, request: int) -> None:
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
        self.settle(request)
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
        self.settle(request)
        (self.blocks or self.policy).release(request)
        self.buffers.release(request)
        self.dense.release(request)
        self.host_tokens.release(request)
