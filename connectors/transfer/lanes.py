"""Scheduling of transfers: one budget of bytes in flight, and per storage a lane of threads, queue and breaker.

`StorageLane.submit` queues groups of items; a thread of the lane acquires bytes with `TransferAdmission.try_acquire`,
moves a group, and fills its results in the `TransferCall`. The invariants stand at the classes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain

from kvcm.connectors.transfer.breaker import CallAdmission, StorageBreaker
from kvcm.connectors.transfer.mover import (
    BatchingMover,
    BoundedMover,
    Direction,
    Failure,
    Move,
    Mover,
    TransferItem,
    TransferResult,
    not_moved,
    record_checksums,
    verify_loads,
)
from kvcm.connectors.transfer.statistics import OK, DirectionCounts, StorageStatistics
from kvcm.model.errors import InvalidArgumentError

__all__ = [
    "Batch",
    "ByteBudget",
    "ItemGroup",
    "StorageLane",
    "StorageTransfer",
    "TransferAdmission",
    "TransferCall",
    "group_items",
]


class ByteBudget:
    """Counts bytes in flight, over all storages of an engine and for each of them. Not locked: its owner does that.

    Memory in flight is neither free nor the engine's own: a storage may still write to it. A storage that hangs keeps
    its bytes for as long as it hangs, so no storage may hold more than its share: the others always have capacity.

    Invariant: not more than `limit_bytes` are in flight, or one single piece that is larger than that.

    Args:
        limit_bytes: over all storages, > 0.
        storages: names; each may hold an equal share, or one piece larger than its share.
    """

    def __init__(self, limit_bytes: int, storages: Sequence[str]) -> None:
        if limit_bytes <= 0:
            raise InvalidArgumentError(f"limit_bytes is {limit_bytes}, must be > 0")
        self.limit_bytes = limit_bytes
        self.share_bytes = max(1, limit_bytes // max(1, len(storages)))
        self.total_bytes = 0
        self._held_bytes = dict.fromkeys(storages, 0)

    def held_bytes(self, storage: str) -> int:
        """Return the bytes in flight of a storage."""
        return self._held_bytes[storage]

    def fits_total(self, size_bytes: int) -> bool:
        """Return whether a piece of this size fits beside all bytes in flight; alone every piece does."""
        return self.total_bytes + size_bytes <= self.limit_bytes or not self.total_bytes

    def fits_share(self, storage: str, size_bytes: int) -> bool:
        """Return whether a storage may hold so much more; a single piece it always may."""
        held_bytes = self._held_bytes[storage]
        return held_bytes + size_bytes <= self.share_bytes or not held_bytes

    def acquire(self, storage: str, size_bytes: int) -> None:
        """Count a piece in; the owner asked `fits_budget` and `has_share` before."""
        self.total_bytes += size_bytes
        self._held_bytes[storage] += size_bytes

    def release(self, storage: str, size_bytes: int) -> None:
        """Count a piece out again."""
        self.total_bytes -= size_bytes
        self._held_bytes[storage] -= size_bytes
        assert self._held_bytes[storage] >= 0


class TransferAdmission:
    """Admits groups of all storages of an engine: its lock and its budget. All methods are called under the lock.

    Invariants: (1) a group starts only within the budget; (2) while a load waits for the budget, no save starts; (3) a
    rejected thread is woken when bytes are released; (4) a storage that waits for its own share blocks no other.

    Args:
        budget: of bytes in flight.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.lock = threading.Lock()
        self.budget = budget
        self._loads_waiting: set[str] = set()
        self._waiting: dict[str, threading.Condition] = {}

    def try_acquire(self, storage: str, direction: Direction, size_bytes: int, wake: threading.Condition) -> bool:
        """Acquire a group's bytes; if that fails, `wake` is notified when a retry is worth while."""
        fits_budget = self.budget.fits_total(size_bytes)
        has_share = self.budget.fits_share(storage, size_bytes)
        is_load = direction is Direction.LOAD
        if is_load and has_share and not fits_budget:
            self._loads_waiting.add(storage)
        elif is_load:  # it starts now, or waits for its share, not for the budget
            self.unblock_saves(storage)
        if fits_budget and has_share and (is_load or not self._loads_waiting):
            self.budget.acquire(storage, size_bytes)
            return True
        self._waiting[storage] = wake
        return False

    def release(self, storage: str, size_bytes: int) -> None:
        """Release a group's bytes."""
        self.budget.release(storage, size_bytes)
        self._notify_all()

    def unblock_saves(self, storage: str) -> None:
        """Let saves go on: the storage's load does not wait for the budget any more."""
        if storage in self._loads_waiting:
            self._loads_waiting.remove(storage)
            self._notify_all()

    def _notify_all(self) -> None:
        for condition in self._waiting.values():
            condition.notify_all()
        self._waiting.clear()


# ---- one call of the engine, as groups and batches for its threads ----
#
# A group is what a storage gets in one access: one item, or several of one packed file. A batch is what a thread takes
# at once: groups whose bytes are counted together, so that small files do not cost a turn of the engine's lock each.
#
# One atomic `popleft` or `pop` decides which thread gets a group: the thread that begins it, another thread that takes
# work over, or the caller that leaves. So a group that its caller has got back never begins.

_MAX_ITEMS = 512
_MAX_GROUPS = 16
_BATCH_BYTES = 1 << 20


class TransferCall:
    """One call: where its results come together, and what its caller waits for.

    Args:
        direction: of all items.
        count: of items.
        deadline: of the engine's clock; no group is begun afterwards.
    """

    __slots__ = ("_ended", "_left", "deadline", "direction", "results")

    def __init__(self, direction: Direction, count: int, deadline: float) -> None:
        self.direction = direction
        self.deadline = deadline
        self.results: list[TransferResult | None] = [None] * count
        self._left = count
        self._ended = threading.Event()

    def fill(self, positions: Sequence[int], result: TransferResult) -> None:
        """Enter the same result for several items. Under the engine's lock."""
        for position in positions:
            self.results[position] = result
        self.count_down(len(positions))

    def count_down(self, count: int) -> None:
        """Say that so many results have come; the last ones wake the caller. Under the engine's lock."""
        self._left -= count
        if not self._left:
            self.wake()

    def wake(self) -> None:
        """Let the caller go on."""
        self._ended.set()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until all results are there, `wake` is called or the time is over."""
        if self._left:
            self._ended.wait(min(max(0.0, timeout_seconds), threading.TIMEOUT_MAX))


class ItemGroup:
    """Items that a storage gets in one access: of one object where the storage has paths, ascending by offset."""

    __slots__ = ("has_ended", "items", "positions", "size_bytes")

    def __init__(self, positions: Sequence[int], items: Sequence[TransferItem], size_bytes: int) -> None:
        self.positions = positions
        self.items = items
        self.size_bytes = size_bytes
        self.has_ended = False  # its results are where they belong


class StorageTransfer:
    """The part of one transfer that belongs to one storage."""

    __slots__ = ("batches", "groups", "has_checksums", "passage", "positions", "size_bytes", "transfer")

    def __init__(self, transfer: TransferCall, positions: Sequence[int], groups: list[ItemGroup]) -> None:
        self.transfer = transfer
        self.positions = positions
        self.groups = groups
        self.size_bytes = sum([group.size_bytes for group in groups])
        self.batches: list[Batch] = []
        self.has_checksums = False  # of its loads, to compare, or of its saves, to return
        self.passage: CallAdmission | None = None  # None: the breaker did not let it through


class Batch:
    """Groups of a visit that a thread takes at once."""

    __slots__ = ("begun", "groups", "is_abandoned", "is_held_back", "size_bytes", "visit")

    def __init__(self, visit: StorageTransfer, groups: Sequence[ItemGroup]) -> None:
        self.visit = visit
        self.groups = deque(groups)  # not begun
        self.size_bytes = sum([group.size_bytes for group in groups])
        self.begun = 0.0  # of the engine's clock
        self.is_held_back = False  # the budget, or loads, did not let it go first
        self.is_abandoned = False  # its caller has left while it was moving
        visit.batches.append(self)

    def split(self) -> Batch | None:
        """Take over half of what has not begun, with its share of the counted bytes; None when there is nothing."""
        taken: list[ItemGroup] = []
        with suppress(IndexError):  # its thread goes on meanwhile
            taken.extend(self.groups.pop() for _ in range((len(self.groups) + 1) // 2))
        if not taken:
            return None
        other = Batch(self.visit, taken[::-1])
        self.size_bytes -= other.size_bytes
        return other

    def next_group(self) -> ItemGroup | None:
        """Pop the next group, atomically."""
        try:
            return self.groups.popleft()
        except IndexError:
            return None


def group_items(items: Sequence[TransferItem], positions: Sequence[int], group_bytes: int) -> Iterator[ItemGroup]:
    """Yield groups: items of one path together, by offset, up to `group_bytes` or one item."""
    objects: dict[str, list[int]] = {}
    for position in positions:
        uri = items[position].uri
        objects.setdefault(uri.path if uri.range_id is None else "", []).append(position)  # a memory pool is one object
    for members in objects.values():
        if len(members) == 1:
            item = items[members[0]]
            yield ItemGroup(members, [item], item.size_bytes)
            continue
        members = _by_offset(items, members)
        sizes = [items[position].size_bytes for position in members]
        for start, end, size_bytes in _chunks(sizes, group_bytes):
            chunk = members[start:end]
            yield ItemGroup(chunk, [items[position] for position in chunk], size_bytes)


def _batch_groups(groups: Sequence[ItemGroup], most_bytes: int) -> Iterator[list[ItemGroup]]:
    """Yield groups together as long as they are small."""
    batch: list[ItemGroup] = []
    size_bytes = 0
    for group in groups:
        if batch and (size_bytes + group.size_bytes > min(most_bytes, _BATCH_BYTES) or len(batch) == _MAX_GROUPS):
            yield batch
            batch, size_bytes = [], 0
        batch.append(group)
        size_bytes += group.size_bytes
    if batch:
        yield batch


def _by_offset(items: Sequence[TransferItem], members: list[int]) -> list[int]:
    offsets = [items[position].offset for position in members]
    ordered = sorted(offsets)  # which most are, and comparing numbers is quick
    return members if offsets == ordered else [position for _, position in sorted(zip(offsets, members, strict=True))]


def _chunks(sizes: Sequence[int], group_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield where groups begin and end, and their bytes."""
    start = size_bytes = 0
    for index, size in enumerate(sizes):
        if index > start and (size_bytes + size > group_bytes or index - start == _MAX_ITEMS):
            yield start, index, size_bytes
            start, size_bytes = index, 0
        size_bytes += size
    yield start, len(sizes), size_bytes


# ---- the threads, the queue and the breaker of one storage, so that storages do not wait for each other ----
#
# Why threads of our own and no `ThreadPoolExecutor`: the interpreter joins the executor's threads at exit, so one read
# that hangs in a dead mount would keep the engine process from ending; and a thread's next group depends on bytes
# that other storages release.
#
# Invariants: (1) at most `threads` groups move at once; (2) loads begin before saves, equal ones in order of arrival;
# (3) after its caller has left, a group does not begin; (4) bytes are counted until the storage has ended with them,
# also when the caller has left before; (5) no group waits for a thread that hangs while another one is idle.

_MIN_GROUP_BYTES = 1 << 20
_MAX_GROUP_BYTES = 16 << 20  # a load may have to wait for so many bytes of a save
_HUNG_SECONDS = 1.0  # an abandoned access that takes longer is taken for one that hangs
_log = logging.getLogger(__name__)
_Access = tuple[float, list[TransferResult]]
"""Seconds and results of one group."""


class StorageLane:
    """Moves the items of one storage.

    Args:
        storage: its name.
        mover: of its items.
        threads: most groups at once, > 0; they are started when first needed.
        gate: of the engine.
        clock: seconds of a clock that never runs backwards.
        checksums: whether saves return checksums.
    """

    def __init__(
        self,
        storage: str,
        mover: Mover,
        threads: int,
        gate: TransferAdmission,
        clock: Callable[[], float],
        *,
        checksums: bool = False,
    ) -> None:
        self._storage = storage
        self._mover = mover
        self._batch = _batch_of(mover)
        self._group_bytes = mover.group_bytes if isinstance(mover, BoundedMover) else _MAX_GROUP_BYTES
        self._limit = threads
        self._gate = gate
        self._clock = clock
        self._checksums = checksums
        self._work = threading.Condition(gate.lock)
        self._queues: dict[Direction, deque[Batch]] = {direction: deque() for direction in Direction}
        self._moving: list[Batch] = []
        # One each, since a full storage fails every save and still serves every load.
        self._breakers = {direction: StorageBreaker() for direction in Direction}
        self._counts = {direction: DirectionCounts() for direction in Direction}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def create_visit(
        self, transfer: TransferCall, items: Sequence[TransferItem], positions: Sequence[int]
    ) -> StorageTransfer:
        """Cut a transfer's items for this storage into groups, without beginning them."""
        size_bytes = sum([items[position].size_bytes for position in positions])
        shares = 2 * self._limit if self._limit > 1 else 1  # a single thread shares with no other
        wanted = min(max(size_bytes // shares, _MIN_GROUP_BYTES), self._group_bytes)
        most_bytes = self._gate.budget.share_bytes
        visit = StorageTransfer(transfer, positions, list(group_items(items, positions, min(wanted, most_bytes))))
        if transfer.direction is Direction.LOAD:
            visit.has_checksums = any(items[position].checksum for position in positions)
        else:
            visit.has_checksums = self._checksums
        for groups in _batch_groups(visit.groups, most_bytes):
            Batch(visit, groups)
        return visit

    def submit(self, visit: StorageTransfer) -> None:
        """Queue a visit, or fail its items at once. Under the engine's lock."""
        direction = visit.transfer.direction
        if self._is_closed:
            self._reject(visit, not_moved(Failure.CANCELLED, "the engine is closed"))
            return
        now = self._clock()
        if not self._is_stuck(visit, now):
            visit.passage = self._breakers[direction].admit(now)
        if visit.passage is None:
            reason = f"storage {self._storage} failed again and again and is left alone for a while"
            self._reject(visit, not_moved(Failure.UNAVAILABLE, reason))
            return
        self._queues[direction].extend(visit.batches)
        self._work.notify(len(visit.groups))
        queued = sum(map(len, self._queues.values()))  # idle threads that were notified before have yet to take theirs
        for _ in range(min(max(queued, len(visit.groups)) - self._idle, self._limit - len(self._threads))):
            self._start_thread()

    def cancel(self, visit: StorageTransfer, why: str) -> list[tuple[Sequence[int], TransferResult]]:
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
            self._drop_empty()
        return unfinished

    def record_outcomes(
        self, visit: StorageTransfer, outcomes: Mapping[str, tuple[int, int]], is_cancelled: bool
    ) -> None:
        """Count how a visit ended, also in the breaker. Under the engine's lock."""
        direction = visit.transfer.direction
        self._counts[direction].add_items(outcomes)
        if visit.passage is not None:
            self._breakers[direction].record_result(visit.passage, _succeeded(outcomes, is_cancelled), self._clock())

    def statistics(self) -> StorageStatistics:
        """Return a snapshot. Under the engine's lock."""
        loads, saves = (self._counts[side].snapshot(self._breakers[side].state) for side in Direction)
        waiting_bytes = sum(batch.size_bytes for queue in self._queues.values() for batch in queue)
        in_flight_bytes = self._gate.budget.held_bytes(self._storage)
        abandoned = sum(batch.is_abandoned for batch in self._moving)
        return StorageStatistics(loads, saves, waiting_bytes, in_flight_bytes, abandoned)

    def close(self) -> None:
        """Begin nothing more. Under the engine's lock."""
        self._is_closed = True
        closed = not_moved(Failure.CANCELLED, "the engine was closed")
        for batch in chain(self._moving, *self._queues.values()):
            for group in self._requeue(batch):
                batch.visit.transfer.fill(group.positions, closed)
                group.has_ended = True
        self._drop_empty()
        self._work.notify_all()

    def join(self, deadline: float) -> None:
        """Wait for the threads until a time of `time.monotonic`; one that hangs longer is left behind as a daemon."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._mover.close()

    def _is_stuck(self, visit: StorageTransfer, now: float) -> bool:
        """Whether abandoned accesses that hang leave a visit no thread or no bytes."""
        hung = [batch for batch in self._moving if batch.is_abandoned and now - batch.begun >= _HUNG_SECONDS]
        hung_bytes = sum(batch.size_bytes for batch in hung)
        has_share = not hung or hung_bytes + visit.batches[0].size_bytes <= self._gate.budget.share_bytes
        return len(hung) >= self._limit or not has_share

    def _reject(self, visit: StorageTransfer, result: TransferResult) -> None:
        visit.groups, visit.batches = [], []
        visit.transfer.fill(visit.positions, result)

    def _start_thread(self) -> None:
        name = f"kvcm-{self._storage}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads in the process: items wait for the existing ones
            _log.warning("no thread for storage %s: %s", self._storage, error)
            return
        self._threads.append(thread)

    def _serve(self) -> None:
        with self._gate.lock:
            while not self._is_closed:
                batch = self._next() or self._steal()
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
                    self._finish(batch, done)

    def _next(self) -> Batch | None:
        """Take the first batch that may begin; a save does not overtake a load of its own storage."""
        for direction, queue in self._queues.items():
            if not queue:
                continue
            batch = queue[0]
            if self._gate.try_acquire(self._storage, direction, batch.size_bytes, self._work):
                return queue.popleft()
            batch.is_held_back = True
            return None
        return None

    def _steal(self) -> Batch | None:
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
        move, into = self._move_of(mover, batch.visit), transfer.results
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

    def _move_of(self, mover: Mover, visit: StorageTransfer) -> Move:
        if visit.transfer.direction is Direction.LOAD:
            return verify_loads(mover.load) if visit.has_checksums else mover.load
        return record_checksums(mover.save, self._clock) if visit.has_checksums else mover.save

    def _finish(self, batch: Batch, done: Sequence[_Access]) -> None:
        transfer = batch.visit.transfer
        self._moving.remove(batch)
        self._gate.release(self._storage, batch.size_bytes)
        counts = self._counts[transfer.direction]
        for seconds, _ in done:
            counts.add_access(seconds)
        if not batch.is_abandoned:
            transfer.count_down(sum([len(results) for _, results in done]))
            return
        if any(result.ok for _, results in done for result in results):  # too late for its caller, and a sign of life
            self._breakers[transfer.direction].end_pause(self._clock())

    def _drain(self, visit: StorageTransfer, why: str) -> dict[ItemGroup, TransferResult]:
        """Take back the groups that have not begun, and return their results."""
        left: dict[ItemGroup, TransferResult] = {}
        for batch in visit.batches:
            reason = f"dropped under pressure: {why}" if batch.is_held_back else f"{why} before the item was begun"
            result = not_moved(Failure.CANCELLED, reason)
            left.update(dict.fromkeys(self._requeue(batch), result))
        return left

    def _requeue(self, batch: Batch) -> Iterator[ItemGroup]:
        """Take the groups of a batch that have not begun, and give their bytes back."""
        while (group := batch.next_group()) is not None:
            batch.size_bytes -= group.size_bytes
            if batch in self._moving:  # only then they were counted
                self._gate.release(self._storage, group.size_bytes)
            yield group

    def _drop_empty(self) -> None:
        """Drop batches that their callers have cancelled; batches behind them may be able to start."""
        for direction, queue in self._queues.items():
            if not all(batch.groups for batch in queue):
                self._queues[direction] = deque(batch for batch in queue if batch.groups)
                self._work.notify_all()
        if not self._queues[Direction.LOAD]:
            self._gate.unblock_saves(self._storage)


def _batch_of(mover: Mover) -> Callable[[], AbstractContextManager[Mover]]:
    return mover.batch if isinstance(mover, BatchingMover) else lambda: nullcontext(mover)


def _move_group(move: Move, group: ItemGroup, deadline_seconds: float) -> list[TransferResult]:
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
