"""The threads, the queue and the breakers of one storage, so that storages do not wait for each other.

Why threads of our own and no `ThreadPoolExecutor`: the interpreter joins the executor's threads at exit, so one read
that hangs in a dead mount would keep the engine process from ending; and what a thread takes next depends on room that
other storages make.

Invariants: (1) at most `threads` groups move at once; (2) loads begin before saves, equal ones in order of arrival;
(3) after its caller has left, a group does not begin; (4) bytes are counted until the storage has ended with them, also
when the caller has left before; (5) no group waits for a thread that hangs while another one is idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

from connectors.transfer.breaker import Breaker
from connectors.transfer.checksums import Move, recorded, verified
from connectors.transfer.gate import Gate
from connectors.transfer.mover import (
    BatchingMover,
    BoundedMover,
    Direction,
    Failure,
    Mover,
    TransferItem,
    TransferResult,
    not_moved,
)
from connectors.transfer.statistics import OK, DirectionCounts, StorageStatistics
from connectors.transfer.work import Batch, Group, Transfer, Visit, batches, cut

__all__ = ["Lane"]

_LEAST_GROUP_BYTES = 1 << 20
_MOST_GROUP_BYTES = 16 << 20  # what a load may have to wait for when a save was first
_HUNG_SECONDS = 1.0  # an abandoned access that takes longer is taken for one that hangs
_log = logging.getLogger(__name__)

_Access = tuple[float, list[TransferResult]]
"""Seconds and results of one group."""


class Lane:
    """Moves the items of one storage.

    Args:
        storage: its name.
        mover: of its items.
        threads: most groups at once, > 0; they are started when first needed.
        gate: of the engine.
        clock: seconds of a clock that never runs backwards.
        checksums: whether saves tell the checksums of what they saved.
    """

    def __init__(
        self,
        storage: str,
        mover: Mover,
        threads: int,
        gate: Gate,
        clock: Callable[[], float],
        *,
        checksums: bool = False,
    ) -> None:
        self._storage = storage
        self._mover = mover
        self._batch = _batch_of(mover)
        self._group_bytes = mover.group_bytes if isinstance(mover, BoundedMover) else _MOST_GROUP_BYTES
        self._limit = threads
        self._gate = gate
        self._clock = clock
        self._checksums = checksums
        self._work = threading.Condition(gate.lock)
        self._queues: dict[Direction, deque[Batch]] = {direction: deque() for direction in Direction}
        self._moving: list[Batch] = []
        # One each, since a full storage fails every save and still serves every load.
        self._breakers = {direction: Breaker() for direction in Direction}
        self._counts = {direction: DirectionCounts() for direction in Direction}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def visit(self, transfer: Transfer, items: Sequence[TransferItem], positions: Sequence[int]) -> Visit:
        """Cut a transfer's items for this storage into groups, without beginning them."""
        size_bytes = sum([items[position].size_bytes for position in positions])
        shares = 2 * self._limit if self._limit > 1 else 1  # one thread has nobody to share with
        wanted = min(max(size_bytes // shares, _LEAST_GROUP_BYTES), self._group_bytes)
        most_bytes = self._gate.budget.share_bytes
        visit = Visit(transfer, positions, list(cut(items, positions, min(wanted, most_bytes))))
        if transfer.direction is Direction.LOAD:
            visit.has_checksums = any(items[position].checksum for position in positions)
        else:
            visit.has_checksums = self._checksums
        for groups in batches(visit.groups, most_bytes):
            Batch(visit, groups)
        return visit

    def begin(self, visit: Visit) -> None:
        """Queue a visit, or fail its items at once. Under the engine's lock."""
        direction = visit.transfer.direction
        if self._is_closed:
            self._refuse(visit, not_moved(Failure.CANCELLED, "the engine is closed"))
            return
        now = self._clock()
        if not self._is_stuck(visit, now):
            visit.passage = self._breakers[direction].enter(now)
        if visit.passage is None:
            reason = f"storage {self._storage} failed again and again and is left alone for a while"
            self._refuse(visit, not_moved(Failure.UNAVAILABLE, reason))
            return
        self._queues[direction].extend(visit.batches)
        self._work.notify(len(visit.groups))
        queued = sum(map(len, self._queues.values()))  # idle threads that were notified before have yet to take theirs
        for _ in range(min(max(queued, len(visit.groups)) - self._idle, self._limit - len(self._threads))):
            self._start_thread()

    def withdraw(self, visit: Visit, why: str) -> list[tuple[Sequence[int], TransferResult]]:
        """Let nothing of a visit begin any more, and return positions and results of what has not ended.

        Threads move on meanwhile, so the caller copies the transfer's results afterwards: those of groups that have
        ended by now are among them. Under the engine's lock.
        """
        left = self._drain(visit, why)
        pending = not_moved(Failure.PENDING, f"{why} while the storage was busy with the item")
        unfinished = [(group.positions, left.get(group, pending)) for group in visit.groups if not group.has_ended]
        if unfinished:
            for batch in self._moving:
                if batch.visit is visit:
                    batch.is_abandoned = True
            self._forget_empty()
        return unfinished

    def settle(self, visit: Visit, outcomes: Mapping[str, tuple[int, int]], is_cancelled: bool) -> None:
        """Count how a visit ended and tell the breaker. Under the engine's lock."""
        direction = visit.transfer.direction
        self._counts[direction].add_items(outcomes)
        if visit.passage is not None:
            self._breakers[direction].leave(visit.passage, _succeeded(outcomes, is_cancelled), self._clock())

    def statistics(self) -> StorageStatistics:
        """Return a snapshot. Under the engine's lock."""
        loads, saves = (self._counts[side].snapshot(self._breakers[side].state) for side in Direction)
        waiting_bytes = sum(batch.size_bytes for queue in self._queues.values() for batch in queue)
        in_flight_bytes = self._gate.budget.held_bytes(self._storage)
        abandoned = sum(batch.is_abandoned for batch in self._moving)
        return StorageStatistics(loads, saves, waiting_bytes, in_flight_bytes, abandoned)

    def shut(self) -> None:
        """Begin nothing more. Under the engine's lock."""
        self._is_closed = True
        closed = not_moved(Failure.CANCELLED, "the engine was closed")
        for batch in chain(self._moving, *self._queues.values()):
            for group in self._take_back(batch):
                batch.visit.transfer.fill(group.positions, closed)
                group.has_ended = True
        self._forget_empty()
        self._work.notify_all()

    def join(self, deadline: float) -> None:
        """Wait for the threads until a time of `time.monotonic`; one that hangs longer is left behind as a daemon."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._mover.close()

    def _is_stuck(self, visit: Visit, now: float) -> bool:
        """Whether accesses that hang, and that nobody waits for any more, leave a visit no thread or no bytes."""
        hung = [batch for batch in self._moving if batch.is_abandoned and now - batch.begun >= _HUNG_SECONDS]
        hung_bytes = sum(batch.size_bytes for batch in hung)
        has_share = not hung or hung_bytes + visit.batches[0].size_bytes <= self._gate.budget.share_bytes
        return len(hung) >= self._limit or not has_share

    def _refuse(self, visit: Visit, result: TransferResult) -> None:
        visit.groups, visit.batches = [], []
        visit.transfer.fill(visit.positions, result)

    def _start_thread(self) -> None:
        name = f"kvcm-{self._storage}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process has no room for one: items wait for the threads that there are
            _log.warning("no thread for storage %s: %s", self._storage, error)
            return
        self._threads.append(thread)

    def _serve(self) -> None:
        with self._gate.lock:
            while not self._is_closed:
                batch = self._next() or self._take_over()
                if batch is None:
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                    continue
                batch.begun = self._clock()
                self._moving.append(batch)
                done: list[_Access] = []
                self._gate.lock.release()
                try:
                    done = self._move(batch)
                finally:
                    self._gate.lock.acquire()
                    self._end(batch, done)

    def _next(self) -> Batch | None:
        """Take the first batch that may begin; a save does not overtake a load of its own storage."""
        for direction, queue in self._queues.items():
            if not queue:
                continue
            batch = queue[0]
            if self._gate.enter(self._storage, direction, batch.size_bytes, self._work):
                return queue.popleft()
            batch.is_held_back = True
            return None
        return None

    def _take_over(self) -> Batch | None:
        """Take half of what another thread's batch has not begun: that thread may hang."""
        for batch in self._moving:
            other = batch.split()
            if other is not None:
                return other
        return None

    def _move(self, batch: Batch) -> list[_Access]:
        """Move a batch group by group."""
        with self._batch() as mover:
            return self._move_with(mover, batch)

    def _move_with(self, mover: Mover, batch: Batch) -> list[_Access]:
        transfer = batch.visit.transfer
        move, into = self._way(mover, batch.visit), transfer.results
        done: list[_Access] = []
        now = self._clock()
        while now < transfer.deadline and (group := batch.next_group()) is not None:
            begun = now
            results = _move_group(move, group, transfer.deadline - begun)
            for position, result in zip(group.positions, results, strict=True):
                into[position] = result
            group.has_ended = True
            now = self._clock()
            done.append((now - begun, results))
        return done

    def _way(self, mover: Mover, visit: Visit) -> Move:
        if visit.transfer.direction is Direction.LOAD:
            return verified(mover.load) if visit.has_checksums else mover.load
        return recorded(mover.save, self._clock) if visit.has_checksums else mover.save

    def _end(self, batch: Batch, done: Sequence[_Access]) -> None:
        transfer = batch.visit.transfer
        self._moving.remove(batch)
        self._gate.leave(self._storage, batch.size_bytes)
        counts = self._counts[transfer.direction]
        for seconds, _ in done:
            counts.add_access(seconds)
        if not batch.is_abandoned:
            transfer.count_down(sum([len(results) for _, results in done]))
            return
        if any(result.ok for _, results in done for result in results):  # too late for its caller, and a sign of life
            self._breakers[transfer.direction].hurry(self._clock())

    def _drain(self, visit: Visit, why: str) -> dict[Group, TransferResult]:
        """Take back the groups that have not begun, and return their results."""
        left: dict[Group, TransferResult] = {}
        for batch in visit.batches:
            reason = f"dropped under pressure: {why}" if batch.is_held_back else f"{why} before the item was begun"
            result = not_moved(Failure.CANCELLED, reason)
            left.update(dict.fromkeys(self._take_back(batch), result))
        return left

    def _take_back(self, batch: Batch) -> Iterator[Group]:
        """Take the groups of a batch that have not begun, and give their bytes back."""
        while (group := batch.next_group()) is not None:
            batch.size_bytes -= group.size_bytes
            if batch in self._moving:  # only then they were counted
                self._gate.leave(self._storage, group.size_bytes)
            yield group

    def _forget_empty(self) -> None:
        """Drop batches that their callers have taken back; what was behind them may be able to begin."""
        for direction, queue in self._queues.items():
            if not all(batch.groups for batch in queue):
                self._queues[direction] = deque(batch for batch in queue if batch.groups)
                self._work.notify_all()
        if not self._queues[Direction.LOAD]:
            self._gate.no_load_waits(self._storage)


def _batch_of(mover: Mover) -> Callable[[], AbstractContextManager[Mover]]:
    return mover.batch if isinstance(mover, BatchingMover) else lambda: nullcontext(mover)


def _move_group(move: Move, group: Group, deadline_seconds: float) -> list[TransferResult]:
    try:
        results = move(group.items, deadline_seconds)
        if len(results) == len(group.items):
            return results
        reason = f"{len(results)} results for {len(group.items)} items"
    except BaseException as error:  # a defect of the mover must not end the thread
        reason = repr(error)
    return [not_moved(Failure.ERROR, reason)] * len(group.items)


def _succeeded(outcomes: Mapping[str, tuple[int, int]], is_cancelled: bool) -> bool | None:
    """Return whether the storage answered at least once; None when it was not asked, or not given its time."""
    if OK in outcomes or Failure.LOST in outcomes or Failure.CORRUPT in outcomes:
        return True
    if Failure.ERROR in outcomes or (Failure.PENDING in outcomes and not is_cancelled):
        return False
    return None
