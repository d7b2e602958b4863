"""Saves of one engine, seen by its scheduler: from a computed block to one that every engine can read.

pinned → leave to write (a call to the manager, in a thread) → job for the ranks → their answers → published (a call
again) → unpinned. A block is unpinned on every path, as soon as no rank reads it any more. Everything but the calls
happens in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from connectors.results import WriteGrant
from connectors.reuse.sessions import WriteSessions
from connectors.reuse.statistics import ReuseStatistics
from connectors.traces import traced
from connectors.transfer.pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from connectors.vllm.messages import BlockToSave, SaveJob, SaveResult
from connectors.vllm.pins import Pins
from connectors.vllm.tracked import TrackedRequest
from kvcm.model.keys import BlockKey

__all__ = ["BlockRun", "SaveQueue"]

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
    """

    tracked: TrackedRequest
    first: int
    parent: BlockKey | None
    keys: Sequence[BlockKey]
    block_ids: Sequence[Mapping[int, int]]
    part_groups: Sequence[str]

    def batches(self, size: int) -> list[BlockRun]:
        """Return the run in pieces of up to `size` blocks."""
        return [
            BlockRun(
                self.tracked,
                self.first + start,
                self.keys[start - 1] if start else self.parent,
                self.keys[start : start + size],
                self.block_ids[start : start + size],
                self.part_groups[start : start + size],
            )
            for start in range(0, len(self.keys), size)
        ]


@dataclass(slots=True)
class _Job:
    run: BlockRun
    session_id: str
    numbers: Sequence[int]  # of the run's blocks, one per location
    result: SaveResult | None = None
    is_given_up: bool = False  # its blocks may hold anything by now


class SaveQueue:
    """Brings runs of blocks to storage.

    Args:
        sessions: write sessions with the manager.
        pins: of the engine's blocks.
        ranks: that answer every job.
        batch_blocks: most blocks of a job.
        save_seconds: for the bytes of a job.
        statistics: where to count.
        on_published: is told which blocks of a run were published, in a thread of this queue.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        sessions: WriteSessions,
        pins: Pins,
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
        self._asked: deque[BlockRun] = deque()
        self._given_up = 0  # of those that are asked for, the first ones
        self._answers: deque[tuple[BlockRun, WriteGrant | None, float]] = deque()
        self._jobs: dict[int, _Job] = {}
        self._publications: deque[Future[None]] = deque()
        self._next_id = 0
        # One thread each, so that blocks are begun in their order; ends wait for no begin.
        self._begins = WorkerPool(1, "kvcm-begin")
        self._ends = WorkerPool(1, "kvcm-end")

    @property
    def is_busy(self) -> bool:
        """Whether blocks are on their way: the engine has to go on stepping, so that they arrive."""
        while self._publications and self._publications[0].done():  # one thread ends them in their order
            self._publications.popleft()
        return bool(self._asked or self._answers or self._jobs or self._publications)

    def add(self, run: BlockRun) -> None:
        """Save a run; its blocks are unpinned when that has ended, in whatever way."""
        for batch in run.batches(self._batch_blocks):
            self._asked.append(batch)
            self._begins.submit(PRIORITY_SAVE, partial(self._begin, batch))

    def call_before_begins(self, task: Callable[[], None]) -> None:
        """Run a task in the thread that asks for leave to write, before all that it has not asked for yet."""
        self._begins.submit(PRIORITY_LOAD, task)

    def take_jobs(self) -> list[SaveJob]:
        """Return the jobs that there is leave for since the last call."""
        jobs: list[SaveJob] = []
        while self._answers:
            run, grant, answered_at = self._answers.popleft()
            asked = self._asked.popleft()
            assert asked is run  # one thread asks, in the order of the runs
            if grant is not None and (self._given_up or self._clock() - answered_at > self._save_seconds):
                self._abort(grant.session_id)  # nobody wants it any more, or the engine stood still for long
                grant = None
            if self._given_up:
                self._given_up -= 1  # nothing of it is pinned any more
            else:
                jobs += self._job(run, grant)
        return jobs

    def answered(self, results: Mapping[int, SaveResult]) -> None:
        """Hear what ranks did."""
        for number, result in results.items():
            job = self._jobs.get(number)
            if job is None:
                _log.error("ranks answered save job %d, which is not under way", number)
                continue
            job.result = job.result.plus(result) if job.result else result
            if job.result.ranks >= self._ranks:
                del self._jobs[number]
                if job.is_given_up:
                    self._abort(job.session_id)
                    continue
                self._unpin(job.run, job.numbers)
                self._publications.append(self._ends.submit(PRIORITY_SAVE, partial(self._end, job, job.result)))

    def drop(self) -> None:
        """Give up what has not begun yet; what the ranks are busy with ends by itself."""
        for job in self.take_jobs():
            self.answered({job.id: SaveResult(self._ranks, (False,) * len(job.blocks), ({},) * len(job.blocks))})

    def give_up(self) -> None:
        """Unpin everything at once. Ranks may be reading blocks that are others' then: none of that is published."""
        for run in list(self._asked)[self._given_up :]:
            self._unpin(run, range(len(run.keys)))
        self._given_up = len(self._asked)
        for job in self._jobs.values():
            if not job.is_given_up:
                self._unpin(job.run, job.numbers)
            job.is_given_up = True

    def close(self, timeout_seconds: float) -> None:
        """Publish what has ended, give up the rest."""
        self._begins.close(timeout_seconds / 4)
        self._ends.close(timeout_seconds / 4)
        self._sessions.close(timeout_seconds / 4)

    def _begin(self, run: BlockRun) -> None:
        grant = None
        try:
            with traced(run.tracked.id):
                grant = self._sessions.begin(run.keys, run.parent, run.part_groups)
        finally:
            self._answers.append((run, grant, self._clock()))

    def _job(self, run: BlockRun, grant: WriteGrant | None) -> list[SaveJob]:
        if grant is None:
            self._statistics.add(dropped_save_blocks=len(run.keys))
            self._unpin(run, range(len(run.keys)))
            return []
        numbers = [number for number, is_masked in enumerate(grant.mask) if not is_masked]
        known = [number for number, is_masked in enumerate(grant.mask) if is_masked]
        self._statistics.add(known_blocks=len(known))
        self._unpin(run, known)
        if not numbers:
            return []
        self._next_id += 1
        self._jobs[self._next_id] = _Job(run, grant.session_id, numbers)
        blocks = [
            BlockToSave(location.uris, run.block_ids[number])
            for number, location in zip(numbers, grant.locations, strict=True)
        ]
        return [SaveJob(self._next_id, blocks, self._save_seconds)]

    def _abort(self, session_id: str) -> None:
        self._statistics.add(sessions_aborted=1)
        self._ends.submit(PRIORITY_SAVE, partial(self._sessions.abort, session_id))

    def _unpin(self, run: BlockRun, numbers: Sequence[int]) -> None:
        ids = [block_id for number in numbers for block_id in run.block_ids[number].values()]
        if ids:
            self._pins.release(ids)

    def _end(self, job: _Job, result: SaveResult) -> None:
        written = sum(result.written)
        with traced(job.run.tracked.id):
            is_published = self._sessions.finish(job.session_id, result.written, result.checksums)
        saved = written if is_published else 0
        self._statistics.add(
            saved_blocks=saved,
            failed_save_blocks=len(result.written) - saved,
            sessions_finished=int(is_published),
            sessions_aborted=int(not is_published),
        )
        if is_published:
            numbers = [number for number, is_written in zip(job.numbers, result.written, strict=True) if is_written]
            self._on_published(job.run, numbers)
        if result.reason:
            count = len(result.written)
            _log.warning("%d of %d blocks were not saved: %s", count - saved, count, result.reason)
