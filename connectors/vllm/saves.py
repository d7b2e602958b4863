"""Saves of one engine, on its scheduler's side: from a computed block to a published one.

reserved and pinned → computed → write session started (a call to the manager, in a thread) → job for the ranks → their
results → session finished (a call again) → unpinned. A block is unpinned on every path, as soon as no rank reads it any
more. Everything but the calls happens in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvcm.connectors.calls import use_trace_id
from kvcm.connectors.keys import HashKeys, event_hashes
from kvcm.connectors.results import WriteGrant
from kvcm.connectors.reuse.lookups import FoundPrefix
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.reuse.write_sessions import WriteSessions, count_masked
from kvcm.connectors.transfer.worker_pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from kvcm.connectors.vllm.connector_metadata import BlockToSave, SaveJob, SaveResult
from kvcm.connectors.vllm.kv_cache_groups import ALL_PARTS, FULL_PARTS, KvCacheLayout
from kvcm.model.keys import BlockKey

__all__ = ["BlockPins", "BlockRun", "Reservations", "ReservedBlock", "SaveQueue", "TrackedRequest"]


class BlockPins:
    """Pins blocks whose KV is still to be saved, up to a share of the pool. Used by the scheduler's thread alone.

    A pin is a reference in vLLM's block pool, as a request's is: vLLM does not reuse the block, even if its request is
    finished, preempted or past its window. When vLLM resets its prefix cache (its weights change, for example), it
    wants all blocks back at once, without a hook before. So the pool's method is wrapped: if pins are the only
    references, they are released first.

    Args:
        max_fraction: of all blocks.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pool: Any = None
        self._max_pinned = 0
        self._pinned: Counter[int] = Counter()
        self.count = 0

    def bind_gpu_block_pool(self, pool: Any, release_pins: Callable[[], None], on_reset: Callable[[], None]) -> None:
        """Pin blocks of vLLM's block pool from now on.

        Args:
            pool: of vLLM.
            release_pins: releases all pins; called when the pool is reset and they are the only references.
            on_reset: called when the pool was reset.
        """
        self._pool = pool
        self._max_pinned = int(pool.num_gpu_blocks * self._max_fraction)
        reset = pool.reset_prefix_cache

        def reset_without_pins() -> bool:
            if self._pinned and self._are_only_references:
                release_pins()
            is_reset = bool(reset())
            if is_reset:
                on_reset()
            return is_reset

        pool.reset_prefix_cache = reset_without_pins

    def try_pin(self, block_ids: Collection[int]) -> bool:
        """Pin blocks that have a reference now; False, and nothing pinned, when that would be too many."""
        if self._pool is None or self.count + len(block_ids) > self._max_pinned:
            return False
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pinned.update(block_ids)
        self.count += len(block_ids)
        return True

    def unpin(self, block_ids: Collection[int]) -> None:
        """Unpin blocks, once for each time that they were pinned."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])
        self.count -= len(block_ids)
        for block_id in block_ids:
            self._pinned[block_id] -= 1
            if not self._pinned[block_id]:
                del self._pinned[block_id]

    @property
    def are_scarce(self) -> bool:
        """Whether more than half of the allowed pins are in use."""
        return 2 * self.count > self._max_pinned

    @property
    def _are_only_references(self) -> bool:
        held = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()  # one block stands for dropped ones
        blocks = self._pool.blocks
        return held == len(self._pinned) and all(blocks[each].ref_cnt == pins for each, pins in self._pinned.items())


@dataclass(frozen=True, slots=True)
class ReservedBlock:
    """A block that is pinned until it is known to be computed, and then saved.

    Attributes:
        index: position in the request.
        block_ids: of the engine, by id of the group.
        step: that computes it.
    """

    index: int
    block_ids: Mapping[int, int]
    step: int


@dataclass(slots=True)
class TrackedRequest:
    """One request, from its arrival to its end.

    Attributes:
        request: vLLM's own object, which goes on changing.
        hash_keys: makes block keys of vLLM's hashes; None while the version of the weights is unknown.
        arrived_at: of the clock.
        found: prefix found by its lookup, None while that is pending.
        has_lookup: whether a lookup is under way or its lease is held.
        may_load: false after a load failed: a second one would most likely fail too, and then again.
        may_save: whether the manager answered, and there is no gap.
        has_gap: whether a block was dropped, or is of other weights: blocks after it cannot be found.
        unsaved: why its blocks are not saved, if they are not.
        is_loading: whether its blocks are being loaded.
        local_tokens: that vLLM's own cache had when it last asked for more.
        promised_tokens: that were found beyond those.
        next_block: first block that is neither stored nor reserved.
        reserved: blocks that wait until they are known to be computed, in order.
    """

    request: Any
    hash_keys: HashKeys | None = None
    arrived_at: float = 0.0
    found: FoundPrefix | None = None
    has_lookup: bool = False
    may_load: bool = True
    may_save: bool = False
    has_gap: bool = False
    unsaved: Unsaved = Unsaved.NO_ANSWER
    is_loading: bool = False
    local_tokens: int = 0
    promised_tokens: int = 0
    next_block: int = 0
    reserved: list[ReservedBlock] = field(default_factory=list)
    _keys: list[BlockKey] = field(default_factory=list)
    _last_hash: bytes = b""

    @property
    def id(self) -> str:
        """Of the request."""
        return str(self.request.request_id)

    def keys(self, end: int) -> Sequence[BlockKey]:
        """Return the keys of the first `end` blocks, or of as many as have a hash."""
        hashes = self.request.block_hashes
        end, known = min(end, len(hashes)), len(self._keys)
        if known and (known > len(hashes) or hashes[known - 1] != self._last_hash):
            self._keys, known = [], 0  # vLLM changes hashes when a streamed prompt goes on otherwise
        if end > known:
            assert self.hash_keys is not None  # nothing is looked up or saved before
            self._keys += self.hash_keys.keys(hashes[known:end])
            self._last_hash = hashes[end - 1]
        return self._keys[:end]

    def is_decoding(self, block_tokens: int) -> bool:
        """Return whether all reserved blocks hold new tokens."""
        return self.reserved[0].index >= self.request.num_prompt_tokens // block_tokens

    def pop_computed(self, block_tokens: int, processed_steps: int, least: int) -> list[ReservedBlock]:
        """Return the reserved blocks that are computed for certain, which are not reserved any more.

        Args:
            block_tokens: tokens per block.
            processed_steps: number of the last step whose outcome is known.
            least: blocks; when there are fewer, they stay reserved.
        """
        request = self.request
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        computed = min(tokens // block_tokens, len(request.block_hashes))
        # Without a step under way all of its steps are processed, the one included that vLLM is processing now.
        last = processed_steps if request.num_in_flight_tokens else None
        count = 0
        for block in self.reserved:
            if block.index >= computed or (last is not None and block.step > last):
                break
            count += 1
        count = count if count >= least else 0
        popped, self.reserved = self.reserved[:count], self.reserved[count:]
        return popped


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive computed blocks of a request, all pinned.

    Attributes:
        tracked: the request.
        first: position of the first block in it.
        parent: key of the block before, None at the start of the prompt.
        keys: of the blocks.
        block_ids: of the engine, per block by id of the group.
        part_groups: per block the name of the group of parts that there are.
        event_hashes: per block the number by which vLLM's KV events name it. Always there, whether or not this engine
            publishes events: others that share the blocks may, and a router may come later.
    """

    tracked: TrackedRequest
    first: int
    parent: BlockKey | None
    keys: Sequence[BlockKey]
    block_ids: Sequence[Mapping[int, int]]
    part_groups: Sequence[str]
    event_hashes: Sequence[int]

    def batches(self, size: int) -> list[BlockRun]:
        """Return the run in pieces of up to `size` blocks."""
        return [
            BlockRun(
                self.tracked,
                first=self.first + start,
                parent=self.keys[start - 1] if start else self.parent,
                keys=self.keys[start : start + size],
                block_ids=self.block_ids[start : start + size],
                part_groups=self.part_groups[start : start + size],
                event_hashes=self.event_hashes[start : start + size],
            )
            for start in range(0, len(self.keys), size)
        ]


@dataclass(slots=True)
class _SaveJobState:
    run: BlockRun
    session_id: str
    numbers: Sequence[int]  # of the run's blocks, one per location
    result: SaveResult | None = None
    is_abandoned: bool = False  # its blocks may hold anything by now


class SaveQueue:
    """Brings runs of blocks to storage.

    Args:
        sessions: write sessions with the manager.
        pins: of the engine's blocks.
        ranks: that answer every job.
        batch_blocks: most blocks of a job.
        save_seconds: for the bytes of a job.
        statistics: where to count.
        on_published: called with the published blocks of a run, in a thread of this queue.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        sessions: WriteSessions,
        pins: BlockPins,
        ranks: int,
        batch_blocks: int,
        save_seconds: float,
        statistics: ReuseStatistics,
        on_published: Callable[[BlockRun, Sequence[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._pins = pins
        self._ranks = ranks
        self._batch_blocks = batch_blocks
        self._save_seconds = save_seconds
        self._statistics = statistics
        self._on_published = on_published
        self._clock = clock
        self._pending: deque[BlockRun] = deque()
        self._abandoned = 0  # number of abandoned runs, the first ones of the pending
        self._answers: deque[tuple[BlockRun, WriteGrant | None, float]] = deque()
        self._jobs: dict[int, _SaveJobState] = {}
        self._publications: deque[Future[None]] = deque()
        self._next_id = 0
        # One thread each, so that sessions start in order of their blocks, and a finish waits for no start.
        self._start_thread = WorkerPool(1, "kvcm-begin")
        self._finish_thread = WorkerPool(1, "kvcm-end")

    @property
    def is_busy(self) -> bool:
        """Whether saves are in flight: the engine has to go on stepping, so that they end."""
        while self._publications and self._publications[0].done():  # one thread ends them in their order
            self._publications.popleft()
        return bool(self._pending or self._answers or self._jobs or self._publications)

    def add(self, run: BlockRun) -> None:
        """Save a run; its blocks are unpinned when that has ended, with or without an error."""
        for batch in run.batches(self._batch_blocks):
            self._pending.append(batch)
            self._start_thread.submit(PRIORITY_SAVE, partial(self._start_session, batch))

    def run_before_starts(self, task: Callable[[], None]) -> None:
        """Run a task in the thread that starts write sessions, before all pending starts."""
        self._start_thread.submit(PRIORITY_LOAD, task)

    def drain_jobs(self) -> list[SaveJob]:
        """Return the jobs of the sessions that started since the last call."""
        jobs: list[SaveJob] = []
        while self._answers:
            run, grant, answered_at = self._answers.popleft()
            pending = self._pending.popleft()
            assert pending is run  # one thread starts the sessions, in the order of the runs
            if grant is not None and (self._abandoned or self._clock() - answered_at > self._save_seconds):
                self._abort(grant.session_id)  # abandoned, or the engine made no step for long
                grant = None
            if self._abandoned:
                self._abandoned -= 1  # nothing of it is pinned any more
            else:
                jobs += self._job(run, grant)
        return jobs

    def on_save_results(self, results: Mapping[int, SaveResult]) -> None:
        """Handle results of ranks."""
        for number, result in results.items():
            job = self._jobs.get(number)
            if job is None:
                _log.error("ranks answered save job %d, which is not under way", number)
                continue
            job.result = job.result.combine(result) if job.result else result
            if job.result.ranks >= self._ranks:
                del self._jobs[number]
                if job.is_abandoned:
                    self._abort(job.session_id)
                    continue
                self._unpin(job.run, job.numbers)
                self._publications.append(
                    self._finish_thread.submit(PRIORITY_SAVE, partial(self._finish_session, job, job.result))
                )

    def cancel_pending(self) -> None:
        """Drop the saves that have not started; those on the ranks end by themselves."""
        for job in self.drain_jobs():
            self.on_save_results({job.id: SaveResult(self._ranks, (False,) * len(job.blocks), ({},) * len(job.blocks))})

    def abandon(self) -> None:
        """Unpin everything at once. Ranks may be reading blocks that are others' then: none of that is published."""
        for run in list(self._pending)[self._abandoned :]:
            self._unpin(run, range(len(run.keys)))
        self._abandoned = len(self._pending)
        for job in self._jobs.values():
            if not job.is_abandoned:
                self._unpin(job.run, job.numbers)
            job.is_abandoned = True

    def close(self, timeout_seconds: float) -> None:
        """Finish the sessions whose saves have ended, abort the rest."""
        self._start_thread.close(timeout_seconds / 4)
        self._finish_thread.close(timeout_seconds / 4)
        self._sessions.close(timeout_seconds / 4)

    def _start_session(self, run: BlockRun) -> None:
        grant = None
        try:
            with use_trace_id(run.tracked.id):
                grant = self._sessions.start(run.keys, run.parent, run.part_groups, run.event_hashes)
        finally:
            self._answers.append((run, grant, self._clock()))

    def _job(self, run: BlockRun, grant: WriteGrant | None) -> list[SaveJob]:
        if grant is None:
            self._statistics.count_unsaved(Unsaved.NO_LEAVE, len(run.keys))
            self._unpin(run, range(len(run.keys)))
            return []
        numbers = [number for number, is_masked in enumerate(grant.mask) if not is_masked]
        known = [number for number, is_masked in enumerate(grant.mask) if is_masked]
        count_masked(grant, self._statistics)
        self._unpin(run, known)
        if not numbers:
            return []
        self._next_id += 1
        self._jobs[self._next_id] = _SaveJobState(run, grant.session_id, numbers)
        blocks = [
            BlockToSave(location.uris, run.block_ids[number])
            for number, location in zip(numbers, grant.locations, strict=True)
        ]
        return [SaveJob(self._next_id, blocks, self._save_seconds)]

    def _abort(self, session_id: str) -> None:
        self._statistics.add(sessions_aborted=1)
        self._finish_thread.submit(PRIORITY_SAVE, partial(self._sessions.abort, session_id))

    def _unpin(self, run: BlockRun, numbers: Sequence[int]) -> None:
        ids = [block_id for number in numbers for block_id in run.block_ids[number].values()]
        if ids:
            self._pins.unpin(ids)

    def _finish_session(self, job: _SaveJobState, result: SaveResult) -> None:
        written = sum(result.written)
        with use_trace_id(job.run.tracked.id):
            is_published = self._sessions.finish(job.session_id, result.written, result.checksums)
        saved = written if is_published else 0
        self._statistics.add(
            saved_blocks=saved,
            sessions_finished=int(is_published),
            sessions_aborted=int(not is_published),
        )
        self._statistics.count_unsaved(Unsaved.STORAGE, len(result.written) - written, result.reason)
        self._statistics.count_unsaved(Unsaved.UNCONFIRMED, written - saved)
        if is_published:
            numbers = [number for number, is_written in zip(job.numbers, result.written, strict=True) if is_written]
            self._on_published(job.run, numbers)
        if result.reason:
            count = len(result.written)
            _log.warning("%d of %d blocks were not saved: %s", count - saved, count, result.reason)


_NULL_BLOCK = 0  # stands in block tables where a group has dropped its block


class Reservations:
    """Pins blocks in the step that computes them, and saves them once they are certainly computed.

    A step is processed once vLLM has its outcome. Steps may overlap, and a block may be computed for one request while
    another request counts it as its own already (vLLM shares blocks as soon as they are allocated). Invariants:

    1. If a step of a request is in flight, only blocks that were reserved in processed steps are saved.
    2. A block that is not computed after all (a load failed, a speculation was rejected, the request was preempted) is
       unpinned; it is reserved again when it is computed again.
    3. A prompt's blocks are saved step by step, so that others find them at once; blocks of new tokens are saved in
       batches, since a write session costs the same for one block and for many.
    4. A request that is not part of a step has no reserved blocks: an engine may stop stepping.

    Used by the scheduler's thread alone.

    Args:
        plan: how KV is stored.
        pins: of the engine's blocks.
        saves: where computed blocks go.
        decode_batch_blocks: blocks of new tokens to save at once.
        statistics: where to count.
    """

    def __init__(
        self,
        plan: KvCacheLayout,
        pins: BlockPins,
        saves: SaveQueue,
        decode_batch_blocks: int,
        statistics: ReuseStatistics,
    ) -> None:
        self._plan = plan
        self._pins = pins
        self._saves = saves
        self._decode_batch_blocks = decode_batch_blocks
        self._statistics = statistics
        self._reserving: dict[str, TrackedRequest] = {}
        self._step = 0
        self._processed = 0

    @property
    def has_reserved(self) -> bool:
        """Whether blocks are reserved, which the next step saves or unpins."""
        return bool(self._reserving)

    def on_step(self, tracked: Sequence[tuple[TrackedRequest, int]], state: Any) -> None:
        """Save the blocks that are computed by now, and reserve those that a step computes.

        Args:
            tracked: requests of the step, and how many of their tokens it computes.
            state: vLLM's `KVConnectorBlockState`.
        """
        self._step += 1
        idle = self._reserving.keys() - {request.id for request, _ in tracked}
        for request_id in idle:
            self.finish(self._reserving[request_id])
        for request, tokens in tracked:
            self._save_computed(request, self._min_blocks(request))
            self._reserve(request, tokens, state)

    def on_step_processed(self) -> None:
        """Count a step as processed: vLLM has the outcome of the oldest step in flight."""
        self._processed += 1

    def finish(self, tracked: TrackedRequest) -> None:
        """Save the computed blocks of a request, and unpin the rest."""
        self._save_computed(tracked, least=1)
        self.release(tracked)

    def count_unsaved(self, tracked: TrackedRequest, detail: str) -> None:
        """Count the blocks of a request that has ended which were computed and not saved.

        Args:
            tracked: the request.
            detail: why the manager did not answer, if it did not.
        """
        request = tracked.request
        computed = min(request.num_computed_tokens // self._plan.block_tokens, len(request.block_hashes))
        reason = tracked.unsaved if tracked.hash_keys is not None else Unsaved.WEIGHTS
        if not tracked.may_save:
            self._statistics.count_unsaved(reason, computed - tracked.next_block, detail)

    def release(self, tracked: TrackedRequest) -> None:
        """Unpin the reserved blocks of a request."""
        self._reserving.pop(tracked.id, None)
        if tracked.reserved:
            tracked.next_block = tracked.reserved[0].index
            self._pins.unpin([block_id for block in tracked.reserved for block_id in block.block_ids.values()])
            tracked.reserved = []

    def release_all(self) -> None:
        """Unpin all reserved blocks."""
        for tracked in list(self._reserving.values()):
            self.release(tracked)

    def _reserve(self, tracked: TrackedRequest, tokens: int, state: Any) -> None:
        """Pin the blocks that this step fills."""
        computed = tracked.request.num_computed_tokens + tokens
        end = computed // self._plan.block_tokens
        if not tracked.may_save or end <= tracked.next_block:
            return
        table = state.get_block_ids(tracked.id)
        if table is None:
            return
        is_at_end = end * self._plan.block_tokens == computed
        wanted = [
            self._reserved(index, table, has_state=is_at_end and index == end - 1)
            for index in range(tracked.next_block, end)
        ]
        ids = [block_id for block in wanted for block_id in block.block_ids.values()]
        if not self._pins.try_pin(ids):
            tracked.has_gap, tracked.may_save = True, False  # counted when the request ends, with those behind them
            tracked.unsaved = Unsaved.WAITING
            return
        tracked.reserved += wanted
        tracked.next_block = end
        self._reserving[tracked.id] = tracked

    def _reserved(self, index: int, table: Sequence[Sequence[int]], *, has_state: bool) -> ReservedBlock:
        """Return a block with the groups that have it; a state belongs to it only when the step ends with it."""
        ids = {
            group.id: table[group.id][index]
            for group in self._plan.groups
            if index < len(table[group.id]) and (has_state or not group.is_state)
        }
        return ReservedBlock(index, {group: block for group, block in ids.items() if block != _NULL_BLOCK}, self._step)

    def _min_blocks(self, tracked: TrackedRequest) -> int:
        """Return how many blocks are worth a write session."""
        may_batch = tracked.reserved and tracked.is_decoding(self._plan.block_tokens) and not self._pins.are_scarce
        return self._decode_batch_blocks if may_batch else 1

    def _save_computed(self, tracked: TrackedRequest, least: int) -> None:
        blocks = tracked.pop_computed(self._plan.block_tokens, self._processed, least)
        if not tracked.reserved:
            self._reserving.pop(tracked.id, None)
        if not blocks:
            return
        first, end = blocks[0].index, blocks[-1].index + 1
        keys = tracked.keys(end)
        has_all = [len(block.block_ids) == len(self._plan.groups) for block in blocks]
        self._saves.add(
            BlockRun(
                tracked,
                first=first,
                parent=keys[first - 1] if first else None,
                keys=keys[first:],
                block_ids=[block.block_ids for block in blocks],
                part_groups=[ALL_PARTS if is_whole else FULL_PARTS for is_whole in has_all],
                event_hashes=event_hashes(tracked.request.block_hashes[first:end]),
            )
        )
