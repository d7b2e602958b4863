"""Records in a Redis or Valkey that several managers share.

Keys of one lock shard of one instance share a hash tag, hence a slot of a cluster; `P` is the name of the deployment::

    P:b{uid.shard} + key    block record: version, stamp, body (index/codec.py)
    P:z{uid.shard}          access order: key -> time and number of reads (redis_order.py)
    P:c{uid.shard}          children: parent + child of the children that lie in this shard, all of score 0
    P:p{uid.shard}          pending: key -> when a session expires or bytes may go
    P:u{uid.shard}          usage: type/storage -> bytes, -type/storage -> those that are being deleted;
                            - -> blocks of which everything is being deleted; # -> number of writes (redis_sums.py)

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
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeVar

from kvcm.index.backends.alike import Ending
from kvcm.index.backends.backend import NOTHING_WRITTEN, Access, Change, Written
from kvcm.index.backends.redis_keys import KEY, RELATION, ShardKeys
from kvcm.index.backends.redis_order import Placed, access_of, merged, requeue_call, touch_call
from kvcm.index.backends.redis_scripts import DROP, FAMILIES, SAMPLE
from kvcm.index.backends.redis_sums import SharedSums
from kvcm.index.backends.redis_write import ShardWrite
from kvcm.index.backends.rows import RowObserver
from kvcm.index.codec import decode_record
from kvcm.index.shards import shard_of
from kvcm.model.locations import BlockRecord, Place
from kvcm.model.runs import BlockRun
from kvcm.store.redis.client import RedisClient, ScriptCall
from kvcm.telemetry.stages import staged

__all__ = ["RedisBackend"]

_MOST_KEYS_PER_CALL: Final = 256
_MOST_CALLS_AT_ONCE: Final = 32
_MOST_KEYS_PER_READ: Final = 4096

_FIRST_MEMBER, _LAST_MEMBER = bytes(KEY.size), b"\xff" * KEY.size  # as the server orders bytes
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
        self._sums = SharedSums(self._shards)

    @property
    def key_count(self) -> int:
        return self._sums.key_count

    @property
    def usage_bytes(self) -> Mapping[Place, int]:
        return self._sums.usage

    @property
    def deleting_bytes(self) -> Mapping[Place, int]:
        return self._sums.deleting

    @property
    def deleting_keys(self) -> int:
        return self._sums.deleting_keys

    @property
    def due_from(self) -> float:
        return 0.0

    async def refresh(self) -> None:
        await self._sums.refresh(self._client.run)

    @staged("read")
    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        if len(keys) <= _MOST_KEYS_PER_READ:
            return await self._read(keys)
        return [record for part in _cut(keys, _MOST_KEYS_PER_READ) for record in await self._read(part)]

    @staged("store")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        writes = [
            (shard, ShardWrite(self._shards[shard], part))
            for shard, positions in self._by_shard([change.key for change in changes]).items()
            for part in _cut([changes[position] for position in positions], _MOST_KEYS_PER_CALL)
        ]
        lost: list[int] = []
        usage: Counter[Place] = Counter()
        for some in _cut(writes, _MOST_CALLS_AT_ONCE):
            answers = await self._client.run([write.call for _, write in some])
            for (shard, write), (turn, *losers) in zip(some, answers, strict=True):
                lost += self._note(shard, write, turn, losers, usage)
        return Written(lost, usage)

    def begin(self, run: BlockRun) -> None:
        """Records are added in Redis, by `write_many`."""

    def serve(self, keys: Sequence[int], ending: Ending) -> None:
        """Records are changed in Redis, by `write_many`."""

    async def children(self, key: int) -> list[int]:
        parent = KEY.pack(key)
        bounds = (b"[" + parent + _FIRST_MEMBER, b"[" + parent + _LAST_MEMBER)
        families = await self._client.execute([(b"ZRANGEBYLEX", shard.children, *bounds) for shard in self._shards])
        return sorted(_key(relation[KEY.size :]) for family in families for relation in family)

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        calls = [
            ScriptCall(FAMILIES, [shard.children], [b"".join(map(KEY.pack, part))])
            for part in _cut(keys, _MOST_KEYS_PER_CALL)
            for shard in self._shards
        ]
        answers = [answer for some in _cut(calls, _MOST_CALLS_AT_ONCE) for answer in await self._client.run(some)]
        # Of each part of the keys every shard tells what lies in it.
        by_part = _cut(answers, len(self._shards))
        relations = [b"".join(found) for shards in by_part for found in zip(*shards, strict=True)]
        return [sorted(child for _, child in RELATION.iter_unpack(family)) for family in relations]

    async def due(self, now: float, most: int) -> list[int]:
        limit = (b"WITHSCORES", b"LIMIT", 0, most)
        answers = await self._client.execute(
            [(b"ZRANGEBYSCORE", shard.pending, b"-inf", repr(now), *limit) for shard in self._shards]
        )
        found = [(float(at), key) for answer in answers for key, at in zip(answer[::2], answer[1::2], strict=True)]
        return [_key(member) for _, member in sorted(found)[:most]]

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        await self._run([touch_call(order, counts, part, at, moves=moves) for order, part in self._parts(counts)])

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        await self._run([requeue_call(order, counts, part, at) for order, part in self._parts(counts)])

    def _parts(self, keys: Iterable[int]) -> Iterator[tuple[bytes, Sequence[int]]]:
        """Yield access orders, each with keys for one call."""
        distinct = list(keys)
        for shard, positions in self._by_shard(distinct).items():
            for part in _cut(positions, _MOST_KEYS_PER_CALL):
                yield self._shards[shard].order, [distinct[i] for i in part]

    async def _run(self, calls: Sequence[ScriptCall]) -> None:
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

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        if count <= 0:
            return []
        # Keys spread evenly over the shards: mostly a bit more than its part of the blocks is enough of each.
        start, asked = offset // len(self._shards), min(count, 2 * count // len(self._shards) + 16)
        coldest, is_enough = await self._coldest(count, start, asked)
        if not is_enough:
            coldest, _ = await self._coldest(count, start, count)
        return [(_key(member), access_of(score)) for member, score in coldest]

    async def _coldest(self, count: int, start: int, asked: int) -> tuple[list[Placed], bool]:
        firsts = [(b"ZRANGE", shard.order, start, start + asked - 1, b"WITHSCORES") for shard in self._shards]
        return merged(await self._client.execute(firsts), count, asked)

    def follow(self, observer: RowObserver | None) -> None:
        """Other managers change the records, and none of them are here: nobody can be told."""

    async def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        for shard in self._shards:
            cursor: Any = None
            while cursor != b"0":
                scan = (b"ZSCAN", shard.order, cursor or b"0", b"COUNT", page_size)
                ((cursor, found),) = await self._client.execute([scan])
                for number, page in enumerate(_cut(list(dict.fromkeys(found[::2])), page_size)):
                    members = await self._present(shard, page) if number else page
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
        self._sums.clear()

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

    async def _present(self, shard: ShardKeys, members: Sequence[bytes]) -> list[bytes]:
        """Return those that are still there: a small shard answers a scan with all it has, pages before their time."""
        ((scores),) = await self._client.execute([(b"ZMSCORE", shard.order, *members)])
        return [member for member, score in zip(members, scores, strict=True) if score is not None]

    def _note(self, shard: int, write: ShardWrite, turn: int, lost: Sequence[int], usage: Counter[Place]) -> list[int]:
        """Count what was written, and return the keys that lost."""
        losers = set(lost)
        sums = write.sums.totals(losers)
        for of, size in sums.items():
            if of.place is not None and not of.is_deleting:
                usage[of.place] += size
        keys = sum(
            (new is not None) - (old is not None)
            for index, (_, old, new, _) in enumerate(write.changes, 1)
            if index not in losers
        )
        self._sums.note(shard, turn, sums, keys)
        return [write.changes[index - 1].key for index in lost]


def _access(score: bytes | None) -> Access | None:
    return None if score is None else access_of(float(score))


def _key(member: bytes) -> int:
    (key,) = KEY.unpack(member)
    return int(key)


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
