"""Records in a Redis or Valkey that several managers share.

Keys of one lock shard of one instance share a hash tag, hence a slot of a cluster; `P` is the name of the deployment::

    P:b{uid.shard} + key    block record: version, stamp, body (index/codec.py)
    P:z{uid.shard}          access order: key -> unix seconds + min(reads, 4095) / 4096
    P:c{uid.shard}          children: parent + child of the children that lie in this shard, all of score 0
    P:p{uid.shard}          pending: key -> when a session expires or bytes may go
    P:u{uid.shard}          usage: storage type -> bytes

Keys of blocks are 8 bytes, big endian. Invariants:

1. All five change in one Lua call, so a crash at any point leaves them in agreement (invariant 4 of the design).
2. A record changes only where its stamp still is the one that was read: of several managers one wins, the others hear
   that they lost and read again.
3. What is asked of a shard costs one command or one call of a script, whatever the number of keys; there is no
   waiting per key. A batch is cut, so that no call holds up the server for more than about a millisecond.

Rejected: WATCH and MULTI (a connection of its own and two round trips per attempt); sets of children beside the parent
(its shard lies on another node); one value per parent that holds its children (a system prompt has 100,000 of them, and
each new one would be a copy of the value); ZRANDMEMBER (only about fair, and nobody can give it a seed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeVar

import msgspec

from kvcm.index.backends.backend import NOTHING_WRITTEN, Access, Change, Written
from kvcm.index.backends.redis_keys import KEY, ShardKeys
from kvcm.index.backends.redis_scripts import DROP, REWRITE, SAMPLE, TOUCH, WRITE
from kvcm.index.codec import STAMP_SIZE, decode_record, encode_record
from kvcm.index.shards import shard_of
from kvcm.model.locations import BlockRecord
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient, ScriptCall

__all__ = ["RedisBackend"]

_MOST_KEYS_PER_CALL: Final = 256
_MOST_CALLS_AT_ONCE: Final = 32
_MOST_KEYS_PER_READ: Final = 4096
_READS_PER_SECOND: Final = 4096  # the score of an access: whole seconds, and reads as the fraction

_FIRST_MEMBER, _LAST_MEMBER = bytes(KEY.size), b"\xff" * KEY.size  # as the server orders bytes
_ABSENT = bytes(STAMP_SIZE)
_UNKNOWN = b"\xff" * STAMP_SIZE  # no write has this stamp

_encode = msgspec.msgpack.Encoder().encode
_Item = TypeVar("_Item")


class RedisBackend:
    """Records of one instance.

    Args:
        client: the store.
        uid: number of the instance's registration, never used again.
        shard_count: lock shards, a power of two; the same for all managers and for ever.
    """

    awaits = True
    is_shared = True

    def __init__(self, client: RedisClient, uid: int, shard_count: int) -> None:
        self._client = client
        self._shards = [ShardKeys.of(client.prefix, uid, shard) for shard in range(shard_count)]
        self._key_count = 0
        self._usage: Counter[StorageType] = Counter()

    @property
    def key_count(self) -> int:
        return self._key_count

    @property
    def usage_bytes(self) -> Mapping[StorageType, int]:
        return self._usage

    async def refresh(self) -> None:
        sizes = [(b"ZCARD", shard.order) for shard in self._shards]
        answers = await self._client.execute(sizes + [(b"HGETALL", shard.usage) for shard in self._shards])
        self._key_count = sum(answers[: len(sizes)])
        self._usage.clear()
        for usage in answers[len(sizes) :]:
            for storage_type, size_bytes in zip(usage[::2], usage[1::2], strict=True):
                self._usage[StorageType(int(storage_type))] += int(size_bytes)

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        if len(keys) <= _MOST_KEYS_PER_READ:
            return await self._read(keys)
        return [record for part in _cut(keys, _MOST_KEYS_PER_READ) for record in await self._read(part)]

    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        writes = [
            _ShardWrite(self._shards[shard], part)
            for shard, positions in self._by_shard([change.key for change in changes]).items()
            for part in _cut([changes[position] for position in positions], _MOST_KEYS_PER_CALL)
        ]
        lost: list[int] = []
        usage: Counter[StorageType] = Counter()
        for some in _cut(writes, _MOST_CALLS_AT_ONCE):
            answers = await self._client.run([write.call for write in some])
            for write, answer in zip(some, answers, strict=True):
                lost += self._note(write, answer, usage)
        return Written(lost, usage)

    async def children(self, key: int) -> list[int]:
        parent = KEY.pack(key)
        bounds = (b"[" + parent + _FIRST_MEMBER, b"[" + parent + _LAST_MEMBER)
        families = await self._client.execute([(b"ZRANGEBYLEX", shard.children, *bounds) for shard in self._shards])
        return sorted(_key(relation[KEY.size :]) for family in families for relation in family)

    async def due(self, now: float, most: int) -> list[int]:
        limit = (b"WITHSCORES", b"LIMIT", 0, most)
        answers = await self._client.execute(
            [(b"ZRANGEBYSCORE", shard.pending, b"-inf", repr(now), *limit) for shard in self._shards]
        )
        found = [(float(at), key) for answer in answers for key, at in zip(answer[::2], answer[1::2], strict=True)]
        return [_key(member) for _, member in sorted(found)[:most]]

    async def touch(self, counts: Mapping[int, int], at: float) -> None:
        keys = list(counts)
        calls = []
        for shard, positions in self._by_shard(keys).items():
            for part in _cut(positions, _MOST_KEYS_PER_CALL):
                reads = [item for i in part for item in (KEY.pack(keys[i]), counts[keys[i]])]
                calls.append(ScriptCall(TOUCH, [self._shards[shard].order], [int(at), *reads]))
        for some in _cut(calls, _MOST_CALLS_AT_ONCE):
            await self._client.run(some)

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        groups = self._by_shard(keys)
        answers = await self._client.execute(
            [
                (b"ZMSCORE", self._shards[shard].order, *(KEY.pack(keys[i]) for i in positions))
                for shard, positions in groups.items()
            ]
        )
        return _restored(len(keys), groups, (map(_access, answer) for answer in answers))

    async def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        for shard in self._shards:
            cursor: Any = None
            while cursor != b"0":
                scan = (b"ZSCAN", shard.order, cursor or b"0", b"COUNT", page_size)
                ((cursor, found),) = await self._client.execute([scan])
                for number, page in enumerate(_cut(list(dict.fromkeys(found[::2])), page_size)):
                    members = await self._resident(shard, page) if number else page
                    if members:
                        yield list(map(_key, members))

    async def random_sample(self, count: int, random: Random) -> list[int]:
        sizes = await self._sizes()
        total = sum(sizes)
        # Places in the access order of all shards in a row: drawn here, each with the same chance.
        places = iter(sorted(random.sample(range(total), min(count, total))))
        place, end, calls = next(places, total), 0, []
        for shard, size in zip(self._shards, sizes, strict=True):
            start, end = end, end + size
            inside = []
            while place < end:
                inside.append(place - start)
                place = next(places, total)
            calls += [ScriptCall(SAMPLE, [shard.order], part) for part in _cut(inside, _MOST_KEYS_PER_CALL)]
        return [_key(member) for members in await self._client.run(calls) for member in members]

    async def drop(self) -> None:
        left = self._shards
        while left:
            firsts = await self._client.execute(
                [(b"ZRANGE", shard.order, 0, _MOST_KEYS_PER_CALL - 1) for shard in left]
            )
            calls = [
                ScriptCall(DROP, [*shard[1:], *(shard.blocks + member for member in members)])
                for shard, members in zip(left, firsts, strict=True)
            ]
            sizes = await self._client.run(calls)
            left = [shard for shard, size in zip(left, sizes, strict=True) if size]
        self._key_count = 0
        self._usage.clear()

    def _by_shard(self, keys: Iterable[int]) -> dict[int, list[int]]:
        """Return the positions of keys by shard."""
        groups: dict[int, list[int]] = {}
        shard_count = len(self._shards)
        for position, key in enumerate(keys):
            groups.setdefault(shard_of(key, shard_count), []).append(position)
        return groups

    async def _read(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        shard_count, shards = len(self._shards), self._shards
        names = [shards[shard_of(key, shard_count)].block(key) for key in keys]
        if not self._client.is_cluster:
            (values,) = await self._client.mget([names])
            return [None if data is None else decode_record(data) for data in values]
        groups = self._by_shard(keys)
        parts = await self._client.mget([[names[i] for i in positions] for positions in groups.values()])
        return [None if data is None else decode_record(data) for data in _restored(len(keys), groups, parts)]

    async def _sizes(self) -> list[int]:
        return await self._client.execute([(b"ZCARD", shard.order) for shard in self._shards])

    async def _resident(self, shard: ShardKeys, members: Sequence[bytes]) -> list[bytes]:
        """Return those that are still there: a small shard answers a scan with all it has, pages before their time."""
        ((scores),) = await self._client.execute([(b"ZMSCORE", shard.order, *members)])
        return [member for member, score in zip(members, scores, strict=True) if score is not None]

    def _note(self, write: _ShardWrite, lost: Sequence[int], usage: Counter[StorageType]) -> list[int]:
        """Count what was written, and return the keys that lost."""
        losers = set(lost)
        for index, storage_type, size_bytes in _triples(write.usage):
            if index not in losers:
                usage[storage_type] += size_bytes
                self._usage[storage_type] += size_bytes
        for index, (_, old, new, _) in enumerate(write.changes, 1):
            if index not in losers:
                self._key_count += (new is not None) - (old is not None)
        return [write.changes[index - 1].key for index in lost]


class _ShardWrite:
    """Changes of one shard as the script wants them.

    Attributes:
        changes: in the order of the script's indexes, which count from 1.
        usage: index of a change, storage type, bytes; again and again.
        call: of the script.
    """

    def __init__(self, shard: ShardKeys, changes: Sequence[Change]) -> None:
        self.changes = changes
        self.usage: list[int] = []
        self._scores: list[int | bool] = []
        self._dues: list[float | bool] = []
        self._leaving: list[int] = []
        self._coming: list[int] = []
        self._parents_left: list[bytes] = []
        self._parents_joined: list[bytes] = []
        for index, (_, old, new, _) in enumerate(changes, 1):
            self._scores.append(int(new.locations[0].written_at) if new is not None and old is None else False)
            self._dues.append(_due_order(old, new))
            self._relate(index, old, new)
            self._count(index, old, new)
        is_growth = any(old is None and new is not None for _, old, new, _ in changes)
        self.call = ScriptCall(WRITE if is_growth else REWRITE, self._keys(shard), self._arguments())

    def _keys(self, shard: ShardKeys) -> list[bytes]:
        blocks = shard.blocks
        return [*shard[1:], *(blocks + KEY.pack(change.key) for change in self.changes)]

    def _arguments(self) -> list[bytes]:
        packed = _encode((self._scores, self._dues, self._leaving, self._coming, self.usage))
        parents = (b"".join(self._parents_left), b"".join(self._parents_joined))
        records = (b"" if change.new is None else encode_record(change.new) for change in self.changes)
        return [b"".join([_stamp(change.old) for change in self.changes]), packed, *parents, *records]

    def _relate(self, index: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        before = old.parent if old is not None else None
        after = new.parent if new is not None else None
        if before == after:
            return
        if before is not None:
            self._leaving.append(index)
            self._parents_left.append(KEY.pack(before))
        if after is not None:
            self._coming.append(index)
            self._parents_joined.append(KEY.pack(after))

    def _count(self, index: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        before = old.locations if old is not None else ()
        after = new.locations if new is not None else ()
        if [location.id for location in before] == [location.id for location in after]:
            return
        for location in after:
            self.usage += (index, location.storage_type, location.size_bytes)
        for location in before:
            self.usage += (index, location.storage_type, -location.size_bytes)


def _stamp(old: BlockRecord | None) -> bytes:
    return _ABSENT if old is None else getattr(old, "stamp", b"") or _UNKNOWN


def _due_order(old: BlockRecord | None, new: BlockRecord | None) -> float | bool:
    """Return the due time to set, True to clear it, False to leave it."""
    due = new.due if new is not None else None
    if due is not None:
        return float(due)
    return old is not None and old.due is not None


def _access(score: bytes | None) -> Access | None:
    if score is None:
        return None
    seconds, reads = divmod(float(score), 1)
    return Access(int(seconds), round(reads * _READS_PER_SECOND))


def _key(member: bytes) -> int:
    (key,) = KEY.unpack(member)
    return int(key)


def _triples(flat: Sequence[int]) -> Iterable[tuple[int, StorageType, int]]:
    return zip(flat[::3], map(StorageType, flat[1::3]), flat[2::3], strict=True)


def _cut(items: Sequence[_Item], size: int) -> Iterable[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _restored(
    count: int, groups: Mapping[int, Sequence[int]], parts: Iterable[Iterable[_Item | None]]
) -> list[_Item | None]:
    """Return what was found group by group, in the order of the keys that were asked for."""
    items: list[_Item | None] = [None] * count
    for positions, part in zip(groups.values(), parts, strict=True):
        for position, item in zip(positions, part, strict=True):
            items[position] = item
    return items
