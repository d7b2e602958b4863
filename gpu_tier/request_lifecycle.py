"""The life of a request in the tier.

    REGISTERED → PREFILL → STAGING → SPARSE → FINISHED
                     └───→ DENSE ──→ STAGING

ABORTED is reached from every state but the two ends. Invariants:

1. A request in STAGING is decoded densely while its KV goes to the host. It becomes SPARSE when that copy and the
   representations exist, and only then its dense pages are released: every token keeps a copy that attention can read.
2. Memory for a whole prompt is held when the request begins, and for a token before its pass is planned: a pass that
   has begun finds its pages. A request that gets no memory keeps what it had.
3. A DENSE request that outgrows the buffer goes through STAGING like a new one; without free pages it stays DENSE.
4. A request that has ended holds nothing, in every state that it ended in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm, Sidecar
from kvcm.gpu_tier.config import SnapKVConfig, SparseConfig
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.forward_pass import BatchPlan, make_batch
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix
from kvcm.gpu_tier.manager.sparse_kvcache_manager import KVReader, OffloadTicket, ResidentLayers, SparseKVCacheManager
from kvcm.gpu_tier.types import ForwardBatch, Mode, SteadyRing

__all__ = ["RequestLifecycle", "RequestState", "RequestTrackers", "Tracker"]

_PIECE_TOKENS = 8192  # of a rebuilt index


class RequestState(StrEnum):
    """Where a request is in its life."""

    REGISTERED = "registered"
    PREFILL = "prefill"
    STAGING = "staging"
    SPARSE = "sparse"
    DENSE = "dense"
    FINISHED = "finished"
    ABORTED = "aborted"


_S = RequestState
_LIVE = (_S.REGISTERED, _S.PREFILL, _S.STAGING, _S.SPARSE, _S.DENSE)
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    _S.REGISTERED: frozenset({_S.PREFILL, _S.ABORTED}),
    _S.PREFILL: frozenset({_S.PREFILL, _S.STAGING, _S.SPARSE, _S.DENSE, _S.ABORTED}),
    _S.STAGING: frozenset({_S.SPARSE, _S.FINISHED, _S.ABORTED}),
    _S.SPARSE: frozenset({_S.FINISHED, _S.ABORTED}),
    _S.DENSE: frozenset({_S.STAGING, _S.SPARSE, _S.FINISHED, _S.ABORTED}),
    _S.FINISHED: frozenset(),
    _S.ABORTED: frozenset(),
}


@dataclass(slots=True)
class Tracker:
    """One request.

    Attributes:
        request: its row in the per-request tables.
        n_prompt: tokens of its prompt.
        wants_sparse: whether it becomes sparse after its prompt.
        cached_tokens: leading tokens that were attached from the host pool, a multiple of the page size.
        seq_len: tokens whose KV exists.
        state: where it is in its life.
        exact_tokens: leading tokens whose KV was computed with exact attention; only those may be published.
        starts_late: whether it was dense after its prompt and became sparse when it had grown.
    """

    request: int
    n_prompt: int
    wants_sparse: bool
    cached_tokens: int = 0
    seq_len: int = 0
    state: RequestState = RequestState.REGISTERED
    exact_tokens: int = 0
    starts_late: bool = False

    def set_state(self, state: RequestState) -> None:
        """Go to another state.

        Raises:
            StateError: the state cannot be reached from this one.
        """
        if state not in _NEXT[self.state]:
            raise StateError(f"request {self.request} is {self.state} and cannot become {state}")
        self.state = state

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended."""
        return self.state in _LIVE

    def require(self, *states: RequestState) -> None:
        """Check that the request is in one of the states.

        Raises:
            StateError: it is not.
        """
        if self.state not in states:
            allowed = " or ".join(states)
            raise StateError(f"request {self.request} is {self.state}; this needs it to be {allowed}")


class RequestTrackers:
    """The requests of one engine, by their rows."""

    def __init__(self) -> None:
        self._by_request: dict[int, Tracker] = {}

    def register(self, tracker: Tracker) -> None:
        """Add a request."""
        if tracker.request in self._by_request:
            raise StateError(f"request {tracker.request} is registered already")
        self._by_request[tracker.request] = tracker

    def __getitem__(self, request: int) -> Tracker:
        try:
            return self._by_request[request]
        except KeyError:
            raise StateError(f"request {request} is not known") from None

    def __contains__(self, request: int) -> bool:
        return request in self._by_request

    def __iter__(self) -> Iterator[Tracker]:
        return iter(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)

    def remove(self, request: int) -> Tracker:
        """Forget a request and return it."""
        tracker = self[request]
        del self._by_request[request]
        return tracker


@dataclass(slots=True)
class RequestLifecycle:
    """The requests of one engine and what they hold.

    | state | its KV |
    |---|---|
    | PREFILL | dense pages (of a window of the prompt, if set), and a host copy that grows chunk by chunk |
    | STAGING | dense pages until the host copy is complete; a buffer is set aside from the start |
    | SPARSE, lru and stream | host pages, a buffer |
    | SPARSE, static | a buffer with the kept tokens; host pages only if they stay retrievable, or are published |
    | SPARSE, device | dense pages |
    | SPARSE, blocks | a buffer with the steady tokens and the block cache; host pages, or of clusters a store |
    | DENSE | dense pages; a host copy only if the request is to be published |

    Attributes:
        config: settings.
        manager: pools and residency.
        algorithm: representations.
        resident: layers that attend densely, None when there are none.
        max_tokens: most tokens of a request.
        publishes: whether prompts are to be published, so that all of them get a host copy.
        trackers: the requests.
    """

    config: SparseConfig
    manager: SparseKVCacheManager
    algorithm: BaseSparseAlgorithm
    resident: ResidentLayers | None
    max_tokens: int
    publishes: bool
    trackers: RequestTrackers = field(default_factory=RequestTrackers)
    _kept: dict[int, int] = field(default_factory=dict)

    # Begin and end.

    def begin(self, n_prompt: int, prefix: AttachedPrefix | None) -> int:
        """Take a request in; see `SparseCoordinator.on_request_begin`."""
        cached = prefix.n_tokens if prefix else 0
        try:
            self._check_lengths(n_prompt, cached, len(prefix.pages) if prefix else 0)
            request = self.manager.tables.alloc()
        except Exception:
            self.manager.host.allocator.free(prefix.pages if prefix else ())
            raise
        tracker = Tracker(request, n_prompt, self._wants_sparse(n_prompt), cached, cached, exact_tokens=cached)
        self.trackers.register(tracker)
        try:
            if prefix:
                self.manager.host_tokens.adopt(request, prefix.pages, cached)
            self._allocate(tracker)
            if prefix:
                self._attach_prefix(tracker, prefix)
        except Exception:
            self.end(request, "aborted")
            raise
        return request

    def _check_lengths(self, n_prompt: int, cached: int, pages: int) -> None:
        if not 1 <= n_prompt <= self.max_tokens:
            raise ConfigError("n_prompt", n_prompt, f"must be 1 to max_tokens={self.max_tokens}")
        if cached >= n_prompt or cached != pages * self.config.page_size:
            allowed = f"whole pages of {self.config.page_size} tokens, and fewer than the prompt's {n_prompt}"
            raise ConfigError("prefix.n_tokens", cached, allowed)

    def _wants_sparse(self, n_prompt: int) -> bool:
        return self.config.algorithm != "full" and n_prompt >= self.config.min_sparse_prompt_len

    def _allocate(self, tracker: Tracker) -> None:
        request, n = tracker.request, tracker.n_prompt
        if self.resident:
            self.resident.begin(request)
            self.resident.cover(request, n)
        if self.algorithm.selects:
            self.algorithm.reserve(request, n)
        if self._backs_up(tracker):
            self.manager.host_tokens.cover(request, n)
        self.manager.policy.hold(request, n)  # for requests that are dense, too: they may get an index
        if self._leaves_device(tracker):
            self.manager.buffers.cover(request, self._capacity(tracker, n))
        on_host = tracker.cached_tokens if self._leaves_device(tracker) else 0
        window = self.config.prefill_window_tokens if self._leaves_device(tracker) else 0
        pages = -(-(n - on_host) // self.config.page_size)
        if window:  # which may begin and end inside a page
            pages = min(pages, -(-window // self.config.page_size) + 1)
        self.manager.dense.hold(request, pages)

    def _attach_prefix(self, tracker: Tracker, prefix: AttachedPrefix) -> None:
        request, cached = tracker.request, tracker.cached_tokens
        manager = self.manager
        slots = manager.host_tokens.slots(request, 0, cached)
        if not self._leaves_device(tracker):
            manager.dense.cover(request, 0, cached)
            target = manager.tables.slots(request, 0, cached).long()
            manager.transfer.load(slots[None], target[None], layers=manager.layers)
        if self.resident:
            self.resident.fill(request, slots)
        if not self.algorithm.selects:
            return
        sidecars = [Sidecar(run.first_page * self.config.page_size, run.rows) for run in prefix.sidecars]
        covered = sum(self.algorithm.import_sidecar(request, sidecar) for sidecar in sidecars)
        if covered < cached and self.algorithm.required_sidecar:
            allowed = f"{self.config.algorithm} cannot rebuild its representations from KV: they must cover {cached}"
            raise ConfigError("prefix.sidecars", covered, allowed)
        if self.algorithm.represents_keys:
            _rebuild_representations(
                algorithm=self.algorithm,
                reader=manager.reader,
                request=request,
                start=covered,
                stop=cached,
                device=manager.runtime.device,
            )

    def end(self, request: int, reason: str) -> None:
        """Release a request; one that is not known is passed over."""
        if request not in self.trackers:
            return
        tracker = self.trackers.remove(request)
        tracker.state = _S.FINISHED if reason == "finished" else _S.ABORTED
        self.algorithm.free(request)
        self.manager.release(request)
        if self.resident:
            self.resident.release(request)
        self._kept.pop(request, None)
        self.manager.tables.free(request)

    # What a state means.

    def _leaves_device(self, tracker: Tracker) -> bool:
        """Whether the request's dense pages are given up when it becomes sparse."""
        return tracker.wants_sparse and self.config.residency != "device"

    def _backs_up(self, tracker: Tracker) -> bool:
        """Whether the request has a host copy."""
        until_sparse = tracker.cached_tokens > 0 or (self.config.prefill_window_tokens > 0 and tracker.wants_sparse)
        needs = self._leaves_device(tracker) and self.config.algo.keeps_host_copy()
        return needs or self.publishes or (until_sparse and tracker.state is not _S.SPARSE)

    def is_exact(self, tracker: Tracker) -> bool:
        """Whether the request's next token is computed with exact attention over exact KV."""
        dense = tracker.state is not _S.SPARSE or not self.algorithm.selects
        return dense and tracker.exact_tokens == tracker.seq_len

    def _capacity(self, tracker: Tracker, n_tokens: int) -> int:
        """Return the items of the buffer of a request that has so many tokens when it becomes sparse."""
        if self.manager.blocks is not None:
            return self.manager.blocks.capacity(self._ring(tracker, n_tokens), n_tokens)
        if self.config.residency == "stream":
            return 0
        if self.config.residency == "static":
            assert isinstance(self.config.algo, SnapKVConfig)
            return self.config.algo.kept(tracker.n_prompt)
        return self.config.device_buffer_size // self.algorithm.unit_tokens

    def _ring(self, tracker: Tracker, n_tokens: int) -> SteadyRing:
        return self.algorithm.steady_ring(n_tokens if tracker.starts_late else tracker.n_prompt)

    # Passes.

    def plan_prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> ForwardBatch:
        """See `SparseCoordinator.plan_prefill`."""
        trackers = self._resolve(requests)
        for tracker, extend in zip(trackers, extend_lens, strict=True):
            tracker.require(_S.REGISTERED, _S.PREFILL)
            left = tracker.n_prompt - tracker.seq_len
            if not 1 <= extend <= left:
                raise ConfigError("extend_lens", extend, f"must be 1 to the remaining {left}")
        slots = []
        for tracker, extend in zip(trackers, extend_lens, strict=True):
            start, stop = tracker.seq_len, tracker.seq_len + extend
            self._trim(tracker)
            self.manager.dense.cover(tracker.request, start, stop)
            tracker.set_state(_S.PREFILL)
            slots.append(self.manager.dense.slots(tracker.request, start, stop))
        starts = tuple(tracker.seq_len for tracker in trackers)
        plan = BatchPlan(tuple(requests), starts, tuple(extend_lens), torch.cat(slots))
        return make_batch(Mode.PREFILL, plan, self.manager.runtime.device)

    def plan_decode(self, requests: Sequence[int], pad_to: int) -> ForwardBatch:
        """See `SparseCoordinator.plan_decode`."""
        trackers = self._resolve(requests)
        for tracker in trackers:
            tracker.require(_S.STAGING, _S.SPARSE, _S.DENSE)
            if tracker.seq_len >= self.max_tokens:
                raise ConfigError("max_tokens", self.max_tokens, f"request {tracker.request} has as many tokens")
        for tracker in trackers:
            self._advance(tracker)
            self._grow(tracker)
        slots = torch.tensor(self._next_slots(trackers), dtype=torch.int32)
        starts = tuple(tracker.seq_len for tracker in trackers)
        plan = BatchPlan(tuple(requests), starts, (1,) * len(trackers), slots)
        return make_batch(Mode.DECODE, plan, self.manager.runtime.device, pad_to)

    def _resolve(self, requests: Sequence[int]) -> list[Tracker]:
        if len(set(requests)) < len(requests):
            raise ConfigError("requests", list(requests), "must name each request once")
        return [self.trackers[request] for request in requests]

    def check_fresh(self, batch: ForwardBatch) -> None:
        """Check that no request of a planned pass has ended or advanced meanwhile.

        Raises:
            StateError: one has.
        """
        for request, length, extend in zip(batch.requests, batch.lengths, batch.extend_lens, strict=True):
            if self.trackers[request].seq_len != length - extend:
                raise StateError(f"request {request} is not what it was when the pass was planned: plan it again")

    def _trim(self, tracker: Tracker) -> None:
        """Release dense pages of the prompt beyond the window; their tokens are on the host."""
        window = self.config.prefill_window_tokens
        if not window or not self._leaves_device(tracker):
            return
        self.manager.wait_for_copies(tracker.request)
        on_host = self.manager.host_tokens.backed_up(tracker.request)
        self.manager.dense.reuse(tracker.request, on_host // self.config.page_size)

    def _grow(self, tracker: Tracker) -> None:
        request, n = tracker.request, tracker.seq_len + 1
        manager = self.manager
        if self._backs_up(tracker):
            manager.host_tokens.cover(request, n)
        manager.policy.hold(request, n)
        if tracker.state is not _S.SPARSE or self.config.residency == "device":
            manager.dense.cover(request, n - 1, n)
        elif manager.blocks is not None:
            manager.blocks.grow(request, n, manager.buffers)
        elif self.config.residency == "static":
            manager.grow_static(request, self._kept[request] + n - tracker.n_prompt, n)
        if self.algorithm.selects:
            self.algorithm.reserve(request, n)
        if self.resident:
            self.resident.cover(request, n)

    def _next_slots(self, trackers: Sequence[Tracker]) -> list[int]:
        """Return the device slot of each request's next token, and record new slots in the table."""
        slots, changes = [], []
        for tracker in trackers:
            slot, token = self._next_slot(tracker), tracker.seq_len
            slots.append(slot)
            if tracker.state is _S.SPARSE and self.config.residency != "device":
                changes.append((tracker.request, token, slot))
                if (overwritten := self._overwritten(tracker)) >= 0:
                    changes.append((tracker.request, overwritten, -1))
        if changes:
            requests, tokens, places = zip(*changes, strict=True)
            self.manager.tables.put(requests, tokens, places)
        return slots

    def _overwritten(self, tracker: Tracker) -> int:
        """Return the token whose place a sparse request's next token takes, -1 when there is none."""
        if self.manager.blocks is not None:
            return self.manager.blocks.overwritten(tracker.request, tracker.seq_len)
        return -1 if self.config.residency == "static" else tracker.seq_len - 2 * self.algorithm.unit_tokens

    def _next_slot(self, tracker: Tracker) -> int:
        request, token, buffers = tracker.request, tracker.seq_len, self.manager.buffers
        if tracker.state is not _S.SPARSE or self.config.residency == "device":
            return self.manager.dense.slot(request, token)
        if self.manager.blocks is not None:
            return buffers.item_slot(request, self.manager.blocks.ring(request).position(token))
        if self.config.residency == "static":
            return buffers.item_slot(request, self._kept[request] + token - tracker.n_prompt)
        return buffers.newest_slot(request, token)

    # States.

    def prompt_finished(self, request: int) -> None:
        """See `SparseCoordinator.prompt_finished`."""
        tracker = self.trackers[request]
        tracker.require(_S.PREFILL)
        if tracker.seq_len != tracker.n_prompt:
            raise StateError(f"request {request} has {tracker.seq_len} of its prompt's {tracker.n_prompt} tokens")
        if self.algorithm.selects:
            self.algorithm.finish_prompt(request, tracker.n_prompt)
        if not tracker.wants_sparse:
            tracker.set_state(_S.DENSE)
        else:
            tracker.set_state(_S.STAGING)
            self._advance(tracker)

    def _advance(self, tracker: Tracker) -> None:
        """Let a request go on to the next state if what that needs is there."""
        if tracker.state is _S.DENSE and self._has_outgrown(tracker):
            self._stage(tracker)
        if tracker.state is not _S.STAGING:
            return
        # What a window or a prefix has left to the host alone cannot be attended to densely: it waits for its copies.
        is_whole = self.manager.dense.has(tracker.request, 0, tracker.seq_len)
        if not is_whole:
            self.manager.wait_for_copies(tracker.request)
        self.manager.poll()
        on_host = self.manager.host_tokens.backed_up(tracker.request) >= tracker.seq_len
        may_leave = on_host or not self._backs_up(tracker) or self.config.residency == "device"
        if may_leave and (not is_whole or self.algorithm.is_ready(tracker.request)):
            self._enter_sparse(tracker)

    def _has_outgrown(self, tracker: Tracker) -> bool:
        limit = self.config.min_sparse_prompt_len
        if self.manager.blocks is None:
            limit = max(self.config.device_buffer_size, limit)
        may = self.config.algorithm != "full" and self.algorithm.can_start_late
        return may and tracker.seq_len > limit

    def _stage(self, tracker: Tracker) -> None:
        request, n = tracker.request, tracker.seq_len
        tracker.wants_sparse = tracker.starts_late = True
        if self.config.residency == "device":
            tracker.set_state(_S.STAGING)
            return
        try:
            self.manager.buffers.cover(request, self._capacity(tracker, n))
            if self._backs_up(tracker):
                self.manager.host_tokens.cover(request, n)
        except PoolExhaustedError:
            self.manager.buffers.release(request)
            # It goes on densely and tries again with its next token.
            tracker.wants_sparse = tracker.starts_late = False
            return
        tracker.set_state(_S.STAGING)
        copied = self.manager.host_tokens.backed_up(request)
        if copied < n and self._backs_up(tracker):
            self.manager.offload_prompt(request, copied, n)

    def _enter_sparse(self, tracker: Tracker) -> None:
        request, n = tracker.request, tracker.seq_len
        self.algorithm.become_sparse(request, n)
        if self.config.residency == "device":
            tracker.set_state(_S.SPARSE)  # its KV stays where it is
            return
        assert not self._backs_up(tracker) or self.manager.host_tokens.backed_up(request) >= n, "invariant 1"
        if self.manager.blocks is not None:
            self.manager.enter_blocks(request, self._ring(tracker, n), n)
        elif self.config.residency == "static":
            sets = [self.algorithm.static_items(request, layer_id) for layer_id in self.manager.layers]
            decoded = torch.arange(tracker.n_prompt, n, dtype=torch.int32, device=sets[0].device)
            self._kept[request] = sets[0].shape[-1]
            self.manager.enter_static(request, [torch.cat([s, decoded.expand(len(s), -1)], 1) for s in sets], n)
        else:
            self.manager.enter_buffer(request, self._capacity(tracker, n), n)
        tracker.set_state(_S.SPARSE)
        self.manager.dense.release(request)
        if not self._backs_up(tracker):  # what a window or a prefix needed
            self.manager.host_tokens.release(request)

    def offload_pass(self, batch: ForwardBatch) -> OffloadTicket | None:
        """Begin to copy the tokens of a pass to the host; None when none of them goes there."""
        wanted = [i for i, request in enumerate(batch.requests) if self._backs_up(self.trackers[request])]
        if not wanted:
            return None
        offsets = [0]
        for extend in batch.extend_lens:
            offsets.append(offsets[-1] + extend)
        slots = [batch.out_cache_loc[offsets[i] : offsets[i + 1]] for i in wanted]
        return self.manager.offload(
            [batch.requests[i] for i in wanted],
            [batch.lengths[i] - batch.extend_lens[i] for i in wanted],
            [batch.lengths[i] for i in wanted],
            torch.cat(slots),
        )


def _rebuild_representations(
    algorithm: BaseSparseAlgorithm, reader: KVReader, request: int, start: int, stop: int, device: torch.device
) -> None:
    """Add attached tokens to an algorithm's representations: one pass over the keys of each layer, in pieces."""
    for first in range(start, stop, _PIECE_TOKENS):
        last = min(first + _PIECE_TOKENS, stop)
        slots = torch.full((last - first,), -1)
        batch = make_batch(Mode.PREFILL, BatchPlan((request,), (first,), (last - first,), slots), device)
        for layer_id in algorithm.context.geometry.layers[algorithm.skip_layers :]:
            k, v = reader.keys(layer_id, request, first, last), None
            if algorithm.needs_values:
                k, v = reader.rows(layer_id, request, first, last)
            algorithm.construct_representations(layer_id, batch, k, v)
