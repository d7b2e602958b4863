"""MetaIndex: the blocks of one instance. Instances never share an index.

Invariants held here:

* 1: `answers` returns a location only if it is serving and its storage is available.
* 4: usage changes in the same step as the records it counts, from their difference, and nowhere else.
* 8: read-modify-write goes by sub-batches of whole lock shards, ascending; reads take no lock.

Every change is a read-modify-write with a pure function from the old record to the new one. That one verb is what a
shared store can do atomically too (compare-and-set, retry the keys that lost), so nothing above depends on where the
records live; `put`, `update` and `delete` are spelled with it.

A backend that never suspends needs no locks on one loop, and none are taken for it (design.md decision 19).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random

from kvcm.index.answers import AnswerBook, StorageView, compose_answer
from kvcm.index.backends.backend import Change, IndexBackend
from kvcm.index.shards import ShardLocks, plan_sub_batches
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.locations import BlockRecord
from kvcm.model.storages import StorageType

__all__ = ["Applied", "Change", "MetaIndex", "Modify", "UsageListener"]

Modify = Callable[[int, BlockRecord | None], BlockRecord | None]
"""From (key, record or None) to the record to store: the same object for no change, None to remove. It must be pure,
since a key that loses a race is tried again."""

Applied = Callable[[Sequence[Change]], None]
"""Told of changes that are stored."""

UsageListener = Callable[[StorageType, int], None]
"""Told of every change of usage: storage type and difference in bytes."""


class MetaIndex:
    """Records of one instance.

    Args:
        backend: where the records live.
        view: which storages can be read.
        shard_count: lock shards, a power of two.
        batch_key_size: least keys per sub-batch of a read-modify-write.
        max_key_count: most keys the index accepts.
        on_usage: told of changes of usage.
    """

    def __init__(
        self,
        backend: IndexBackend,
        view: StorageView,
        *,
        shard_count: int = 16,
        batch_key_size: int = 256,
        max_key_count: int = 1 << 62,
        on_usage: UsageListener = lambda _type, _bytes: None,
    ) -> None:
        if shard_count < 1 or shard_count & (shard_count - 1):
            raise ValueError(f"shard_count is {shard_count}, must be a power of two")
        self._backend = backend
        self._answers = AnswerBook(view)
        self._locks = ShardLocks(shard_count)
        self._shard_count = shard_count
        self._batch_key_size = batch_key_size
        self._max_key_count = max_key_count
        self._on_usage = on_usage
        self._usage: Counter[StorageType] = Counter()
        self._incoming = 0
        self._reserved = 0
        self._writes = 0

    @property
    def key_count(self) -> int:
        """Blocks in the index, in any status."""
        return self._backend.key_count

    @property
    def max_key_count(self) -> int:
        """Most blocks that the index accepts."""
        return self._max_key_count

    @property
    def free_key_count(self) -> int:
        """Blocks that still fit beside those that are there, on their way in, or reserved."""
        return max(0, self._max_key_count - self._backend.key_count - self._incoming - self._reserved)

    @property
    def usage_bytes(self) -> Mapping[StorageType, int]:
        """Bytes of all locations by storage type, whatever their status (invariant 4)."""
        return self._usage

    async def answers(self, keys: Sequence[int], *, stop_at_miss: bool = False) -> list[bytes | None]:
        """Return the encoded answer of every key, None where nothing can be read.

        Args:
            keys: block keys, in request order.
            stop_at_miss: return only the answers before the first miss.
        """
        found: list[bytes | None] = list(map(self._answers.lookup(), keys))
        position = -1
        while (position := _next_none(found, position + 1)) >= 0:
            # Absent from the book: a miss nearly always. A prefix match asks for one record, the others for all at
            # once.
            if stop_at_miss:
                found[position : position + 1] = await self._fill(keys[position : position + 1])
                if found[position] is None:
                    del found[position:]
            else:
                unknown = [i for i, answer in enumerate(found) if answer is None]
                for i, answer in zip(unknown, await self._fill([keys[i] for i in unknown]), strict=True):
                    found[i] = answer
                break
        return found

    async def _fill(self, keys: Sequence[int]) -> list[bytes | None]:
        writes = self._writes
        records = await self._backend.get_many(keys)
        if writes == self._writes:
            return list(map(self._answers.note, keys, records))
        # Something was written while the records were on their way: they answer this call and are not kept.
        return [record and compose_answer(record, self._answers.view) for record in records]

    async def get(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order."""
        return await self._backend.get_many(keys)

    async def exists(self, keys: Sequence[int]) -> list[bool]:
        """Return for every key whether the index holds a record of it, whatever its status."""
        return [record is not None for record in await self._backend.get_many(keys)]

    async def put(self, records: Mapping[int, BlockRecord]) -> list[Change]:
        """Store records, replacing what was there; new keys beyond the key limit are refused."""
        return await self.read_modify_write(records, lambda key, _old: records[key])

    async def update(self, records: Mapping[int, BlockRecord]) -> list[Change]:
        """Replace records that exist; the others are left absent."""
        return await self.read_modify_write(records, lambda key, old: old and records[key])

    async def delete(self, keys: Iterable[int]) -> list[Change]:
        """Remove records."""
        return await self.read_modify_write(keys, lambda _key, _old: None)

    @contextmanager
    def reserve_keys(self, count: int) -> Iterator[None]:
        """Keep room for so many new blocks, for calls of read-modify-write with `reserved`."""
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count

    async def read_modify_write(
        self,
        keys: Iterable[int],
        modify: Modify,
        applied: Applied = lambda _changes: None,
        *,
        reserved: bool = False,
    ) -> list[Change]:
        """Apply `modify` to every key, atomically per key.

        A call that fails or is cancelled may have changed some keys and not others; `applied` was told of those.

        Args:
            keys: block keys; a repeated one counts once.
            modify: from the old record to the new one.
            applied: told of the changes of each sub-batch once they are stored, whatever happens afterwards.
            reserved: the caller holds a reservation for all new keys, so none is refused.

        Returns:
            One change per distinct key, in the order of `keys`.
        """
        distinct = list(dict.fromkeys(keys))
        if not self._backend.awaits:
            return await self._apply(distinct, modify, applied, reserved)
        changes: dict[int, Change] = {}
        for batch in plan_sub_batches(distinct, self._shard_count, self._batch_key_size):
            async with self._locks.hold(batch.shards):
                changes.update(
                    (change.key, change) for change in await self._apply(batch.keys, modify, applied, reserved)
                )
        return [changes[key] for key in distinct]

    async def _apply(self, keys: Sequence[int], modify: Modify, applied: Applied, reserved: bool) -> list[Change]:
        records = await self._backend.get_many(keys)
        changes = [Change(key, old, modify(key, old)) for key, old in zip(keys, records, strict=True)]
        changes, incoming = (changes, 0) if reserved else self._within_limit(changes)
        self._incoming += incoming  # at once: whatever runs before the store answers has to see it
        store = self._store(changes, incoming, applied)
        await (uninterrupted(store) if self._backend.awaits else store)
        return changes

    async def _store(self, changes: Sequence[Change], incoming: int, applied: Applied) -> None:
        written = [change for change in changes if change.new is not change.old]
        try:
            await self._backend.write_many(written)
        finally:
            self._incoming -= incoming
            self._writes += 1
        for key, old, new, _ in written:
            self._answers.note(key, new)
            self._count(old, new)
        applied(changes)

    def _within_limit(self, changes: list[Change]) -> tuple[list[Change], int]:
        free = self.free_key_count
        arriving = [i for i, change in enumerate(changes) if change.old is None and change.new is not None]
        for i in arriving[free:]:
            changes[i] = Change(changes[i].key, None, None, refused=True)
        return changes, min(len(arriving), free)

    def _count(self, old: BlockRecord | None, new: BlockRecord | None) -> None:
        before = old.locations if old is not None else ()
        after = new.locations if new is not None else ()
        if [location.id for location in before] == [location.id for location in after]:
            return
        difference: Counter[StorageType] = Counter()
        for location in after:
            difference[location.storage_type] += location.size_bytes
        for location in before:
            difference[location.storage_type] -= location.size_bytes
        for storage_type, size_bytes in difference.items():
            if size_bytes:
                self._usage[storage_type] += size_bytes
                self._on_usage(storage_type, size_bytes)

    async def children(self, key: int) -> list[int]:
        """Return the blocks that directly follow `key` in some prefix chain."""
        return await self._backend.children(key)

    def scan(self, page_size: int = 1024) -> AsyncIterator[list[int]]:
        """Yield every key that exists during the whole scan exactly once, in pages."""
        return self._backend.scan(page_size)

    async def random_sample(self, count: int, random: Random) -> list[int]:
        """Return up to `count` distinct keys, each equally likely."""
        return await self._backend.random_sample(count, random)


def _next_none(answers: list[bytes | None], start: int) -> int:
    try:
        return answers.index(None, start)
    except ValueError:
        return -1
