"""Answers for callers on nodes with memory of their own.

Memory of a node is readable on that node alone, so the same block has another answer there. Answers are composed anew
for every request, from records: where these are of this process, that costs half a microsecond per block, and where
they have to be fetched, the records that were fetched are kept, once for all nodes.

Rejected: a search cache per node, as there is one for everybody else. Every change of a block would have to be told to
each of them, so that writing would cost the more the more nodes read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcm.index.answers import StorageView, compose_answer
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.search_cache import CacheBudget, SearchCache
from kvcm.model.locations import BlockRecord

__all__ = ["NodeAnswers"]

_FIRST_WINDOW = 16  # records a prefix match reads first: nearly always it ends there
_WINDOW = 1024
_RECORD_BYTES = 300
_LOCATION_BYTES = 600


class NodeAnswers:
    """Composes answers of one index.

    Args:
        backend: where the records live.
        budget: bytes of the records that are kept, shared with other caches.
    """

    def __init__(self, backend: IndexBackend, budget: CacheBudget) -> None:
        self._backend = backend
        self._budget = budget
        self._records: SearchCache[BlockRecord] = SearchCache(_Always(), budget, _itself, _size_of)

    async def answers(self, keys: Sequence[int], view: StorageView, *, stop_at_miss: bool) -> list[bytes | None]:
        """Do `MetaIndex.answers` for whoever sees the storages as `view` does."""
        found: list[bytes | None] = []
        window = _FIRST_WINDOW if stop_at_miss else len(keys)
        while len(found) < len(keys):
            for record in await self._read(keys[len(found) : len(found) + window]):
                answer = compose_answer(record, view) if record is not None else None
                if answer is None and stop_at_miss:
                    return found
                found.append(answer)
            window = _WINDOW
        return found

    async def _read(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        if not self._backend.awaits:
            return await self._backend.get_many(keys)
        records = self._records.lookup(keys)
        unknown = [position for position, record in enumerate(records) if record is None]
        self._budget.hits += len(keys) - len(unknown)
        self._budget.misses += len(unknown)
        for position, record in zip(unknown, await self._fetch([keys[i] for i in unknown]), strict=True):
            records[position] = record
        return records

    async def _fetch(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        if not keys:
            return []
        read = self._records.begin(keys)
        try:
            return self._records.end(read, await self._backend.get_many(keys))
        except BaseException:
            self._records.abandon(read)
            raise

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the records of keys that changed, and keep nothing of reads that are under way."""
        if self._backend.awaits:
            self._records.forget(keys)

    def clear(self) -> None:
        """Drop everything, reads under way included: changes may have been missed."""
        self._records.clear()


class _Always:
    """Records are the same whatever storages are available."""

    generation = 0

    def rank(self, _storage: str) -> int | None:
        return 0


def _itself(record: BlockRecord, _view: StorageView) -> BlockRecord:
    return record


def _size_of(record: BlockRecord) -> int:
    chunks = sum(len(location.chunk) for location in record.locations)
    return _RECORD_BYTES + _LOCATION_BYTES * len(record.locations) + chunks
