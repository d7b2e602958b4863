"""Records in the process's memory: the reference backend, gone with the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random

from kvcm.index.backends.backend import NOTHING_WRITTEN, Access, Change, Written
from kvcm.index.backends.columns import BlockColumns
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.storages import StorageType
from kvcm.store.due_queue import DueQueue

__all__ = ["MemoryBackend"]

_TYPES = tuple(StorageType)
_NUMBERS = max(_TYPES) + 1


class MemoryBackend:
    """Blocks in columns, the deadlines of those that are due some time, and the bytes of all of them.

    No method suspends, so every call is atomic on one event loop.
    """

    awaits = False
    is_shared = False

    def __init__(self) -> None:
        self._blocks = BlockColumns()
        self._due: DueQueue[int] = DueQueue()
        self._usage: Counter[StorageType] = Counter()

    @property
    def key_count(self) -> int:
        return len(self._blocks)

    @property
    def usage_bytes(self) -> Mapping[StorageType, int]:
        return self._usage

    async def refresh(self) -> None:
        """Nobody else changes the records: what is known here is the truth."""

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        return self._blocks.get(keys)

    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        lost: list[int] = []
        # By number: a list is indexed by an enum in a fraction of the time that a dict takes to hash it.
        difference = [0] * _NUMBERS
        for key, old, new, _ in changes:
            if self._blocks.swap(key, old, new):
                self._schedule(key, new)
                _count(difference, old, new)
            else:
                lost.append(key)
        usage = {storage_type: difference[storage_type] for storage_type in _TYPES if difference[storage_type]}
        self._usage.update(usage)
        return Written(lost, usage)

    def load(self, key: int, record: BlockRecord, access: Access | None = None) -> None:
        """Add a record that was stored before this process began, with its last access if it was read."""
        self._blocks.insert(key, record, access)
        self._schedule(key, record)
        for location in record.locations:
            self._usage[location.storage_type] += location.size_bytes

    async def children(self, key: int) -> list[int]:
        return self._blocks.children(key)

    async def due(self, now: float, most: int) -> list[int]:
        return self._due.until(now, most)

    async def touch(self, counts: Mapping[int, int], at: float) -> None:
        self._blocks.touch(counts, int(at))

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        return self._blocks.accesses(keys)

    async def drop(self) -> None:
        self._blocks = BlockColumns()
        self._due = DueQueue()
        self._usage.clear()

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
        return None if locations[0].status is LocationStatus.SERVING else locations[0].deadline
    return record.due


def _count(difference: list[int], old: BlockRecord | None, new: BlockRecord | None) -> None:
    if new is not None:
        for location in new.locations:
            difference[location.storage_type] += location.size_bytes
    if old is not None:
        for location in old.locations:
            difference[location.storage_type] -= location.size_bytes
