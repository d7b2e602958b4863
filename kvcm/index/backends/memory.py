"""Records in the process's memory: the reference backend, gone with the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random

from kvcm.index.backends.alike import Alike, Ending
from kvcm.index.backends.backend import NOTHING_WRITTEN, Access, Change, Written
from kvcm.index.backends.rows import RowObserver, Rows
from kvcm.index.backends.tally import PlaceTally
from kvcm.index.backends.written_columns import WrittenColumns
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place
from kvcm.model.runs import BlockRun
from kvcm.store.due_queue import DueQueue
from kvcm.telemetry.stages import staged

__all__ = ["MemoryBackend"]


class MemoryBackend:
    """Blocks in columns, the deadlines of those that are due some time, and the bytes of all of them.

    No method suspends, so every call is atomic on one event loop.
    """

    awaits = False
    is_shared = False

    def __init__(self) -> None:
        self._blocks = WrittenColumns()
        self._due: DueQueue[int] = DueQueue()
        self._tally = PlaceTally()

    @property
    def key_count(self) -> int:
        return len(self._blocks)

    @property
    def usage_bytes(self) -> Mapping[Place, int]:
        return self._tally.used

    @property
    def deleting_bytes(self) -> Mapping[Place, int]:
        return self._tally.deleting

    @property
    def deleting_keys(self) -> int:
        return self._tally.deleting_blocks

    @property
    def due_from(self) -> float:
        return self._due.earliest

    async def refresh(self) -> None:
        """Nobody else changes the records: what is known here is the truth."""

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        return self._blocks.get(keys)

    @staged("store")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        lost: list[int] = []
        difference = PlaceTally()
        for key, old, new, _ in changes:
            if self._blocks.swap(key, old, new):
                self._schedule(key, new)
                difference.change(old, new)
            else:
                lost.append(key)
        self._tally.update(difference)
        return Written(lost, difference.used)

    def begin(self, run: BlockRun) -> Mapping[Place, int] | None:
        if not self._blocks.begin(run):
            return None
        self._due.put_all(run.keys, run.location.deadline)
        place, size_bytes = run.location.place, len(run.keys) * run.location.size_bytes
        if size_bytes:
            self._tally.add(place, size_bytes)
        return {place: size_bytes}

    def serve(self, keys: Sequence[int], ending: Ending) -> Sequence[Alike] | None:
        served = self._blocks.serve(keys, ending)
        for alike in served or ():
            due = _due_of_only(alike.location)
            if due is None:
                self._due.discard_all(alike.keys)
            else:
                self._due.put_all(alike.keys, due)
        return served

    def load(self, key: int, record: BlockRecord, access: Access | None = None) -> None:
        """Add a record that was stored before this process began, with its last access if it was read."""
        self._blocks.insert(key, record, access)
        self._schedule(key, record)
        self._tally.change(None, record)

    async def children(self, key: int) -> list[int]:
        return self._blocks.family(key)

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        return [self._blocks.family(key) for key in keys]

    async def due(self, now: float, most: int) -> list[int]:
        return self._due.until(now, most)

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        self._blocks.touch(counts, int(at), moves=moves)

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        self._blocks.requeue(counts, int(at))

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        return self._blocks.accesses(keys)

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        return self._blocks.coldest(offset + count)[offset:]

    def follow(self, observer: RowObserver | None) -> Rows:
        self._blocks.follow(observer)
        return self._blocks

    async def drop(self) -> None:
        self._blocks.clear()
        self._due.clear()
        self._tally.clear()

    async def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        keys = self._blocks.keys()
        for start in range(0, len(keys), page_size):
            page = [key for key in keys[start : start + page_size] if key in self._blocks]
            if page:
                yield page

    async def random_sample(self, count: int, random: Random) -> list[int]:
        return self._blocks.sample(count, random)

    def _schedule(self, key: int, record: BlockRecord | None) -> None:
        due = _due(record) if record is not None else None
        if due is not None:
            self._due.put(key, due)
        else:
            self._due.discard(key)


def _due(record: BlockRecord) -> float | None:
    if len(record.locations) == 1:  # nearly every block: a third of the time of the property
        return _due_of_only(record.locations[0])
    return record.due


def _due_of_only(location: Location) -> float | None:
    return location.deadline if location.deadline or location.status is not LocationStatus.SERVING else None
