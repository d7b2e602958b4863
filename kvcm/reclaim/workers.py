"""Workers of one storage: a few deletions at a time, pauses after failures, and what waits, in numbers.

A deletion that takes too long counts as a failure, once; it keeps its worker until the storage lets go of it, so that
nothing is deleted a second time beside it. Workers that hang are therefore missing, and when all of them do, what waits
stays where it was found, in the records. Only when the storage is removed do they let go of it: whatever such a call
still does then, it does to bytes that nobody will delete or reuse.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvcm.model.clock import Clock

__all__ = ["LATE_SECONDS", "Backlog", "StorageWorkers"]

LATE_SECONDS = 30.0
"""A deletion that takes so long counts as failed."""

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_DOUBLINGS = 6  # of the first pause: longer than the longest then
_SLOW_SECONDS = 1.0

T = TypeVar("T")


class Backlog(NamedTuple):
    """What waits for one storage.

    Attributes:
        waiting: locations that are due, or were put off because the storage failed or is busy.
        executing: locations that it is deleting.
        failures: locations that it did not delete when it was asked, since the manager began.
        oldest_seconds: for how long the oldest of those waits that were taken up and are not put off.
        late: locations that it is deleting for too long.
    """

    waiting: int = 0
    executing: int = 0
    failures: int = 0
    oldest_seconds: float = 0.0
    late: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Deletions that are asked for together."""

    count: int
    since: float
    begun: float | None = None
    is_late: bool = False


class StorageWorkers:
    """Paces the deletions of one storage.

    Args:
        count: batches at a time.
        clock: time source.
    """

    def __init__(self, count: int, clock: Clock) -> None:
        self._count = count
        self._clock = clock
        self._free = asyncio.Semaphore(count)
        self._batches: dict[_Batch, None] = {}
        self._failures = 0
        self._failures_in_a_row = 0
        self._paused_until = 0.0
        self._seconds_each = 0.0
        self._last_done = -math.inf
        self._put_off: dict[float, int] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._removed: asyncio.Future[None] | None = None

    async def call(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what a call of the storage returns; None when it was let go of before: then it goes on by itself."""
        if self._removed is None:
            self._removed = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        ends: set[asyncio.Future[Any]] = {task, self._removed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result() if task.done() else None

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # of one that was let go of, nobody asks

    def let_go(self) -> None:
        """The storage was removed: whoever waits for a call waits no more, and what failed is of no interest."""
        removed, self._removed = self._removed, None
        if removed is not None:
            removed.set_result(None)
        self.succeeded()

    def cancel(self) -> None:
        """End the calls that go on by themselves, too."""
        for task in self._calls:
            task.cancel()

    @asynccontextmanager
    async def turn(self, count: int) -> AsyncIterator[None]:
        """Have a worker inside the block, for so many locations."""
        batch = _Batch(count, self._clock.now())
        self._batches[batch] = None
        try:
            async with self._free:
                batch.begun = self._clock.now()
                yield
                self._last_done = self._clock.now()
                self._seconds_each = (self._last_done - batch.begun) / count / self._count
        finally:
            del self._batches[batch]

    @property
    def pause_seconds(self) -> float:
        """How long the storage is left alone from now on."""
        return max(0.0, self._paused_until - self._clock.now())

    @property
    def is_slow(self) -> bool:
        """Whether nothing began or ended for a while, though there is something to do."""
        return self._stalled_seconds >= _SLOW_SECONDS

    @property
    def _stalled_seconds(self) -> float:
        begun = [batch.begun for batch in self._batches if batch.begun is not None]
        return self._clock.now() - max(self._last_done, *begun) if begun else 0.0

    def seconds_for(self, count: int) -> float:
        """Return how long so many locations will take, at least a first pause and at most the longest."""
        expected = max(self._seconds_each * count, self._stalled_seconds)
        return min(max(_FIRST_PAUSE_SECONDS, expected), _LONGEST_PAUSE_SECONDS)

    def succeeded(self) -> None:
        """The storage did all it was asked for."""
        self._failures_in_a_row = 0
        self._paused_until = 0.0

    def failed(self, count: int) -> float:
        """The storage did not delete so many locations. Returns how long it is left alone: what fails during a pause
        does not make it longer."""
        self._failures += count
        now = self._clock.now()
        if now >= self._paused_until:
            self._paused_until = now + min(_FIRST_PAUSE_SECONDS * 2**self._failures_in_a_row, _LONGEST_PAUSE_SECONDS)
            self._failures_in_a_row = min(self._failures_in_a_row + 1, _MOST_DOUBLINGS)
        return self._paused_until - now

    def fail_late(self) -> int:
        """Count deletions that take too long as failures, each once. Returns how many locations those are."""
        began = self._clock.now() - LATE_SECONDS
        late = [each for each in self._batches if not each.is_late and each.begun is not None and each.begun <= began]
        for batch in late:
            batch.is_late = True
        count = sum(batch.count for batch in late)
        if count:
            self.failed(count)
        return count

    def put_off(self, count: int, until: float) -> None:
        """So many locations are due again at a later time."""
        self._put_off[until] = self._put_off.get(until, 0) + count

    @property
    def put_off_count(self) -> int:
        """Locations that are not due again yet."""
        now = self._clock.now()
        self._put_off = {until: count for until, count in self._put_off.items() if until > now}
        return sum(self._put_off.values())

    @property
    def backlog(self) -> Backlog:
        """What waits."""
        return Backlog(
            self.put_off_count + sum(batch.count for batch in self._batches if batch.begun is None),
            sum(batch.count for batch in self._batches if batch.begun is not None),
            self._failures,
            max((self._clock.now() - batch.since for batch in self._batches), default=0.0),
            sum(batch.count for batch in self._batches if batch.is_late),
        )
