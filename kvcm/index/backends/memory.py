"""Records in the process's memory: the reference backend, gone with the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from random import Random

from kvcm.index.backends.backend import Change
from kvcm.model.locations import BlockRecord

__all__ = ["MemoryBackend"]


class MemoryBackend:
    """A dict of records, the children of each, and a list of keys to sample from.

    No method suspends, so every call is atomic on one event loop.
    """

    awaits = False

    def __init__(self) -> None:
        self._records: dict[int, BlockRecord] = {}
        # A parent has one child nearly always: a bare number saves the 200 bytes of a set.
        self._children: dict[int, int | set[int]] = {}
        # Keys in order of arrival. A removed key stays until `_gone` outweighs the rest; a key that comes back takes
        # its old place, so that no key is listed twice and sampling stays fair.
        self._order: list[int] = []
        self._gone: set[int] = set()

    @property
    def key_count(self) -> int:
        return len(self._records)

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        return list(map(self._records.get, keys))

    async def write_many(self, changes: Sequence[Change]) -> None:
        for key, old, new, _ in changes:
            if new is None:
                self._remove(key)
            else:
                self._store(key, old, new)
        if len(self._gone) > 1024 and len(self._gone) * 2 > len(self._order):
            self._compact()

    async def children(self, key: int) -> list[int]:
        children = self._children.get(key)
        if children is None:
            return []
        return [children] if isinstance(children, int) else sorted(children)

    async def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        keys = list(self._records)
        for start in range(0, len(keys), page_size):
            page = [key for key in keys[start : start + page_size] if key in self._records]
            if page:
                yield page

    async def random_sample(self, count: int, random: Random) -> list[int]:
        if count >= len(self._records):
            return list(self._records)
        # Compaction keeps at least half of the list (beyond 1,024 entries) alive: two draws per key on average.
        sample: dict[int, None] = {}
        while len(sample) < count:
            key = self._order[random.randrange(len(self._order))]
            if key in self._records:
                sample[key] = None
        return list(sample)

    def _store(self, key: int, old: BlockRecord | None, new: BlockRecord) -> None:
        if old is None:
            if key in self._gone:
                self._gone.discard(key)
            else:
                self._order.append(key)
        if old is None or old.parent != new.parent:
            self._unlink(key, old)
            self._link(key, new)
        self._records[key] = new

    def _remove(self, key: int) -> None:
        old = self._records.pop(key, None)
        if old is not None:
            self._gone.add(key)
            self._unlink(key, old)

    def _link(self, key: int, record: BlockRecord) -> None:
        parent = record.parent
        if parent is None:
            return
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = key
        elif isinstance(siblings, int):
            self._children[parent] = {siblings, key}
        else:
            siblings.add(key)

    def _unlink(self, key: int, record: BlockRecord | None) -> None:
        parent = record.parent if record is not None else None
        if parent is None:
            return
        siblings = self._children.get(parent)
        if isinstance(siblings, set):
            siblings.discard(key)
            if not siblings:
                del self._children[parent]
        elif siblings == key:
            del self._children[parent]

    def _compact(self) -> None:
        self._order = list(self._records)
        self._gone.clear()
