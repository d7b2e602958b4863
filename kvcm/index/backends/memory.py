"""Records in the process's memory: the reference backend, gone with the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import groupby
from random import Random

from kvcm.index.backends.backend import NOTHING_WRITTEN, Access, Change, Written
from kvcm.index.backends.rows import RowObserver, Rows
from kvcm.index.backends.tally import PlaceTally
from kvcm.index.backends.written_columns import WrittenColumns
from kvcm.model.locations import BlockRecord, LocationStatus, Place
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
        difference = self._begun(changes) if changes[0].old is None else self._served(changes)
        if difference is not None:
            self._tally.update(difference)
            return Written((), difference.used)
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

    def _begun(self, changes: Sequence[Change]) -> PlaceTally | None:
        """Write the changes of a start, which only adds blocks; None, and nothing is done, where they are others."""
        records = [change.new for change in changes if change.new is not None and change.old is None]
        if len(records) != len(changes):
            return None
        keys = [change.key for change in changes]
        headers = self._blocks.begin(keys, records)
        if headers is None:
            return None
        difference, begin = PlaceTally(), 0
        for header, alike in groupby(headers):
            count = len(list(alike))
            difference.add(Place(header[1], header[2]), count * header[5])
            self._due.put_all(keys[begin : begin + count], header[8])
            begin += count
        return difference

    def _served(self, changes: Sequence[Change]) -> PlaceTally | None:
        """Write the changes of a finish whose blocks all serve; None, and nothing is done, where they are others."""
        olds = [change.old for change in changes if change.old is not None]
        news = [change.new for change in changes if change.new is not None]
        keys = [change.key for change in changes]
        if not len(olds) == len(news) == len(changes) or not self._blocks.serve(keys, olds, news):
            return None
        lives = [new[2][0][9] for new in news]
        if any(lives):
            for key, new in zip(keys, news, strict=True):
                self._schedule(key, new)
        else:
            self._due.discard_all(keys)
        return PlaceTally()

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
    locations = record.locations
    if len(locations) == 1:  # nearly every block: a third of the time of the property
        deadline = locations[0].deadline
        return deadline if deadline or locations[0].status is not LocationStatus.SERVING else None
    return record.due
