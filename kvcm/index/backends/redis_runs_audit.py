"""Audit and repair of the blocks in a Redis that keeps many to a value, tag by tag (layout: `redis_runs.py`).

What is derived of a run is that of each of its blocks: its place in the access order, its due time. A script reads all
of a block but its children at one moment; so do those that mend, and only while the run is the one that was judged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from typing import Any, Final

from kvcm.index.backends.audit import BATCH_KEYS, Claims, StoredBlock
from kvcm.index.backends.backend import Sum
from kvcm.index.backends.redis import RELATION, RETIRED, first_score, is_retired
from kvcm.index.backends.redis_audit import LostRuns, claims_of, relations_of, scanned_members
from kvcm.index.backends.redis_run_scripts import AUDIT, DROP_RUN, KEYS, MEND, STRAY
from kvcm.index.backends.redis_runs import TagKeys
from kvcm.index.codec import STAMP_SIZE, StampedRecord
from kvcm.index.run_codec import decode_runs
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import cut_keys, join_keys, pack_keys, split_keys, unpack_keys
from kvcm.store.redis.client import Argument, RedisClient, ScriptCall

__all__ = ["RunsAudit"]

_ABSENT: Final = bytes(STAMP_SIZE)
_NO_PARENTS: Final = frozenset[int]()
_KEYS_PER_CALL: Final = 256
_FIRST_GONE: Final = -(1 << 63)


class RunsAudit:
    """One instance's blocks.

    Args:
        client: the store.
        uid: number of the instance's registration.
        tags: as it was registered.
        lost: where blocks are that the index does not lead to.
    """

    can_mend = True

    def __init__(self, client: RedisClient, uid: int, tags: int, lost: LostRuns) -> None:
        self._client = client
        self._uid = uid
        self._lost = lost
        self._gone: dict[
            int, bytes
        ] = {}  # names of runs that are gone, by what stands for them in place of a block's key
        self.shards = range(tags)
        self._names = [TagKeys.of(client.prefix, uid, tag) for tag in self.shards]

    async def listed(self, shard: int) -> AsyncIterator[Claims]:
        """Yield the blocks of runs, run by run: those that the index leads to come one by one."""
        names = self._names[shard]
        async for members in scanned_members(self._client, b"ZSCAN", names.order):
            for some in _cut(members[::2], _KEYS_PER_CALL):
                (found,) = await self._client.run([ScriptCall(KEYS, [names.runs], some)])
                for batch in _cut(cut_keys(b"".join(found)), BATCH_KEYS):
                    yield dict.fromkeys(unpack_keys(batch), _NO_PARENTS)

    async def unlisted(self, shard: int) -> AsyncIterator[Claims]:
        names = self._names[shard]
        async for fields in scanned_members(self._client, b"HSCAN", names.places):
            for batch in _cut(fields[::2], BATCH_KEYS):
                (stray,) = await self._client.run([ScriptCall(STRAY, [names.places, names.runs], batch)])
                if stray:
                    yield dict.fromkeys(unpack_keys(stray), _NO_PARENTS)
        for sorted_set in (names.order, names.pending):
            async for members in scanned_members(self._client, b"ZSCAN", sorted_set):
                for batch in _cut(members[::2], BATCH_KEYS):
                    dangling = await self._without_run(names, batch)
                    if dangling:
                        yield dict.fromkeys(map(self._key_of_gone, dangling), _NO_PARENTS)
        async for relations in scanned_members(self._client, b"ZSCAN", names.children):
            for batch in _cut(relations[::2], BATCH_KEYS):
                yield claims_of(relations_of(each for each in batch if len(each) == RELATION.size))

    async def _without_run(self, names: TagKeys, ids: Sequence[bytes]) -> list[bytes]:
        """Return the ids of which there is no run."""
        (values,) = await self._client.mget([[names.runs + each for each in ids]])
        return [each for each, value in zip(ids, values, strict=True) if value is None]

    async def read_blocks(self, shard: int, claims: Claims) -> list[StoredBlock]:
        names = self._names[shard]
        views: list[StoredBlock] = []
        for part in _cut(list(claims), _KEYS_PER_CALL):
            others = [join_keys(sorted(claims[key])) for key in part]
            hints = [self._hint(key) for key in part]
            keys = [names.order, names.children, names.pending, names.places, names.runs]
            arguments = [each for row in zip(pack_keys(part), hints, others, strict=True) for each in row]
            (found,) = await self._client.run([ScriptCall(AUDIT, keys, arguments)])
            places, runs = found
            records = _Records(runs, self._gone)
            views += [records.view(key, *place) for key, place in zip(part, places, strict=True)]
        return views

    async def usage(self, shard: int) -> Mapping[Sum, int]:
        (flat,) = await self._client.execute([(b"HGETALL", self._names[shard].usage)])
        sizes = {Sum.parse(field.decode()): int(size) for field, size in zip(flat[::2], flat[1::2], strict=True)}
        return {of: size for of, size in sizes.items() if of is not None and size}

    async def mend(self, shard: int, view: StoredBlock) -> bool:
        names, record = self._names[shard], view.record
        score = first_score(record) if record is not None else 0
        due = repr(float(record.due)) if record is not None and record.due is not None else ""
        parent = record.parent if record is not None else None
        wrong = pack_keys([other for other in view.parents if other != parent])
        shift = RETIRED if is_retired(score) else 0
        (key,) = pack_keys((view.key,))
        hint = self._hint(view.key)
        arguments: list[Argument] = [key, hint, view.version or _ABSENT, score, due, b"".join(wrong), shift]
        (done,) = await self._client.run([ScriptCall(MEND, names, arguments)])
        return bool(done)

    async def drop_record(self, shard: int, view: StoredBlock) -> bool:
        names = self._names[shard]
        (key,) = pack_keys((view.key,))
        hint = self._hint(view.key)
        (done,) = await self._client.run([ScriptCall(DROP_RUN, names, [key, view.version, hint])])
        return bool(done)

    async def add_usage(self, shard: int, difference: Mapping[Sum, int]) -> None:
        usage = self._names[shard].usage
        await self._client.execute([(b"HINCRBY", usage, of.field, size) for of, size in difference.items()])
        await self._invalidate(shard)

    def _key_of_gone(self, run: bytes) -> int:
        """Return what stands for a run that is gone in place of a block's key."""
        for key, known in self._gone.items():
            if known == run:
                return key
        (key,) = unpack_keys([(_FIRST_GONE + len(self._gone)).to_bytes(8, signed=True)])
        self._gone[key] = run
        return key

    def _hint(self, key: int) -> bytes:
        """Return the run where a block may be if the index does not know it."""
        return self._gone.get(key) or self._lost.of(self._uid, key)

    async def _invalidate(self, shard: int) -> None:
        """Have managers read again what they know of a tag."""
        await self._client.execute([(b"SET", self._names[shard].changed, b"", b"NX")])


class _Records:
    """The runs that a script has read.

    Args:
        runs: id, value, score and due time of each, one after the other.
        gone: what stands for runs that are gone.
    """

    def __init__(self, runs: Sequence[Any], gone: Container[int]) -> None:
        self._gone = gone
        self._runs = {each: row for each, *row in _cut(runs, 4)}
        self._decoded: dict[bytes, dict[int, StampedRecord] | str] = {}

    def view(self, key: int, run: bytes | None, is_indexed: int, parents: bytes) -> StoredBlock:
        """Return all that is stored of a block.

        Args:
            key: of the block, or what stands for a run that is gone.
            run: id of its run, None where none is known.
            is_indexed: whether the index leads there.
            parents: those of whose children it is said to be, of the requested ones and of its record's.
        """
        value, score, due = self._runs.get(run, (None, None, None)) if run is not None else (None, None, None)
        records, record = self._records(run, value), None
        version, is_listed, is_evictable = b"", bool(is_indexed), None
        if isinstance(records, str):
            version = value or b""
        elif key in records:
            record = records[key]
            version, is_listed = record.stamp, is_listed and score is not None
            is_evictable = None if score is None else not is_retired(float(score))
        elif key in self._gone:
            is_listed = score is not None
        else:
            due = None  # of other blocks
        return StoredBlock(
            key,
            record=record,
            damage=records if isinstance(records, str) else "",
            version=version,
            is_listed=is_listed,
            due=None if due is None else float(due),
            parents=frozenset(split_keys(parents)),
            is_evictable=is_evictable,
        )

    def _records(self, run: bytes | None, value: bytes | None) -> dict[int, StampedRecord] | str:
        """Return the records of a run by key, or why it cannot be read."""
        if run is None or value is None:
            return {}
        if run not in self._decoded:
            try:
                self._decoded[run] = decode_runs([value])
            except StorageIOError as error:
                self._decoded[run] = str(error)
        return self._decoded[run]


def _cut(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
