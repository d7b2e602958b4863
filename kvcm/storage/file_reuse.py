"""Handing out free slots of packed files while a writer waits for its addresses.

Each file that slots are taken from has to be asked and told on the medium, so the time for that is bounded: what was
not reached in time is put back, and the writer gets fresh files. A medium that hangs holds one writer for a moment;
the others are not sent after it until it lets go.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

import structlog

from kvcm.storage.backend import Parts
from kvcm.storage.file_slots import PackedFiles, SlotsOfFile
from kvcm.storage.slots import InFile, Pool
from kvcm.storage.threads import StorageThreads

__all__ = ["SlotGiver"]

_WORK_SECONDS: Final = 0.25  # then no further file is begun
_WAIT_SECONDS: Final = 0.5

_log = structlog.get_logger("kvcm.storage")


class SlotGiver:
    """Gives the free slots of one storage away.

    Args:
        name: of the storage.
        files: its files.
        threads: where the medium is asked.
        seconds: time source of the bounds; a medium's time is real.
    """

    def __init__(
        self, name: str, files: PackedFiles, threads: StorageThreads, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._files = files
        self._threads = threads
        self._seconds = seconds
        self._hanging: _Giving | None = None

    async def give(self, instance: str, parts: Parts, location_id: str) -> dict[int, tuple[str, int]]:
        """Return path and slot of parts by their index; those that are left out need fresh ones.

        Args:
            instance: owner of the blocks, as a path component.
            parts: what needs a place.
            location_id: whose the slots will be.
        """
        taken = self._take(instance, parts)
        if not taken:
            return {}
        given = await self._ask(_Giving(self._files, taken, location_id, self._seconds))
        slots: dict[int, list[tuple[str, int]]] = {}
        for path, pool, numbers in given:
            slots.setdefault(pool.size_bytes, []).extend((path, number) for number in numbers)
        ways = {size: iter(found) for size, found in slots.items()}
        found = ((index, next(ways.get(size, iter(())), None)) for index, size in enumerate(parts.sizes))
        return {index: place for index, place in found if place is not None}

    def _take(self, instance: str, parts: Parts) -> list[InFile]:
        if not len(self._files.free) or (self._hanging is not None and not self._hanging.is_over):
            return []
        wanted = Counter(parts.sizes)
        return [each for size, count in wanted.items() for each in self._files.free.take(Pool(instance, size), count)]

    async def _ask(self, giving: _Giving) -> Sequence[InFile]:
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                # Also work that nobody waits for any more gets to a thread: it says that there are free ones again.
                return await asyncio.shield(self._threads.run(giving.work))
        except TimeoutError:
            self._hanging = giving
            _log.warning("free_slots_not_asked", storage=self._name, reason="no answer")
        except BaseException:  # the writer is gone
            giving.leave()
            raise
        return giving.leave()


class _Giving:
    """Slots being given to a location, by a thread that its client may leave behind."""

    def __init__(
        self, files: PackedFiles, taken: Sequence[InFile], location_id: str, seconds: Callable[[], float]
    ) -> None:
        self._files = files
        self._taken = taken
        self._location_id = location_id
        self._seconds = seconds
        self._until = seconds() + _WORK_SECONDS
        self._lock = Lock()
        self._given: list[InFile] = []
        self._is_left = False
        self._has_begun = False
        self.is_over = False

    def work(self) -> Sequence[InFile]:
        """Give what can be given in time. Blocks."""
        try:
            return self._work()
        finally:
            self.is_over = True

    def _work(self) -> Sequence[InFile]:
        if not self._begin():
            return ()
        given = [given for each in self._taken if (given := self._given_of(each)).slots]
        if self._end(given):
            return given
        for each in given:
            self._undo(each)
        return ()

    def _begin(self) -> bool:
        with self._lock:
            self._has_begun = not self._is_left
            return self._has_begun

    def _end(self, given: list[InFile]) -> bool:
        with self._lock:
            self._given = [] if self._is_left else given
            return not self._is_left

    def leave(self) -> Sequence[InFile]:
        """Wait no longer. Returns what was given all the same, because it was just being told; the thread takes back
        what it gives later."""
        with self._lock:
            if not self._has_begun:
                for each in self._taken:
                    self._files.free.give_back(each)
            self._is_left = True
            return self._given

    def _given_of(self, each: InFile) -> InFile:
        if self._seconds() >= self._until:
            self._files.free.give_back(each)
            return each._replace(slots=())
        try:
            return each._replace(slots=self._files.hand_out(each, self._location_id))
        except OSError as error:
            _log.warning("free_slots_not_asked", path=each.path, reason=error.strerror)
            return each._replace(slots=())

    def _undo(self, each: InFile) -> None:
        slots: set[tuple[int, str | None]] = {(slot, self._location_id) for slot in each.slots}
        try:
            self._files.delete(SlotsOfFile(each.path, each.pool.size_bytes, slots))
        except OSError as error:
            _log.warning("free_slots_lost", path=each.path, reason=error.strerror)
            return
        self._files.free.forgotten(each.path, each.slots)
