"""Audit and repair of the blocks in a Redis, shard by shard (layout: `redis.py`).

A script reads the parts of a block that lie in its shard at one moment, save the children; so do those that mend, and
only while the record is the one that was judged. Nothing here holds up other managers for more than a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError

from kvcm.index.backends.audit import BATCH_KEYS, Claims, StoredBlock
from kvcm.index.backends.backend import Sum
from kvcm.index.backends.redis import KEY, RELATION, RETIRED, ShardKeys, first_score, is_retired
from kvcm.index.codec import STAMP_SIZE, decode_record
from kvcm.index.run_codec import keys_of
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import join_keys, mixed, pack_keys, unpack_keys
from kvcm.store.redis.client import Argument, Command, RedisClient, Script, ScriptCall

__all__ = ["LostRuns", "RedisAudit", "StoredBlocks", "claims_of", "relations_of", "scanned_members"]

_KEYS_PER_CALL: Final = 256
_RUNS_PER_CALL: Final = 64
_ABSENT: Final = bytes(STAMP_SIZE)
_NO_RECORD: Final = b"is no record"  # longer than a key, so that it is none of a block
_NO_PARENTS: Final = frozenset[int]()
_READ_BLOCKS: Final = Script("""
-- KEYS: access order, pending, then the block records. Returns records, scores and deadlines of them.
local members = {}
for i = 3, #KEYS do members[#members + 1] = string.sub(KEYS[i], -8) end
return {
  redis.call('MGET', unpack(KEYS, 3)),
  redis.call('ZMSCORE', KEYS[1], unpack(members)),
  redis.call('ZMSCORE', KEYS[2], unpack(members)),
}
""")
_MEND: Final = Script("""
-- KEYS: access order, children, pending, block record.
-- ARGV: stamp of the record, zeros for none; score if it is not in the order; due time or ''; parent or '';
--       parents whose child it is not; what the score of a block that cannot be evicted has more, else 0.
local order, children, pending, block = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local member = string.sub(block, -8)
local held = redis.call('GET', block)
local none = '\\0\\0\\0\\0\\0\\0\\0\\0'
if (held and string.sub(held, 2, 9) or none) ~= ARGV[1] then return 0 end

if ARGV[1] == none then
  redis.call('ZREM', order, member)
else
  local score = tonumber(redis.call('ZSCORE', order, member) or ARGV[2])
  redis.call('ZADD', order, score % 8589934592 + tonumber(ARGV[6]), member)
end
if ARGV[3] == '' then redis.call('ZREM', pending, member) else redis.call('ZADD', pending, ARGV[3], member) end
for at = 1, #ARGV[5], 8 do
  redis.call('ZREM', children, string.sub(ARGV[5], at, at + 7) .. member)
end
if ARGV[4] ~= '' then redis.call('ZADD', children, 0, ARGV[4] .. member) end
return 1
""")
_DROP: Final = Script("""
-- KEYS: access order, pending, block record. ARGV: the record.
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 0 end
local member = string.sub(KEYS[3], -8)
redis.call('UNLINK', KEYS[3])
redis.call('ZREM', KEYS[1], member)
redis.call('ZREM', KEYS[2], member)
return 1
""")


class RedisAudit:
    """One instance's blocks.

    Args:
        client: the store.
        uid: number of the instance's registration.
        shard_count: as it was registered.
    """

    can_mend = True

    def __init__(self, client: RedisClient, uid: int, shard_count: int) -> None:
        self._client = client
        self.shards = range(shard_count)
        self._names = [ShardKeys.of(client.prefix, uid, shard) for shard in self.shards]

    async def listed(self, shard: int) -> AsyncIterator[Claims]:
        async for members in scanned_members(self._client, b"ZSCAN", self._names[shard].order):
            for batch in _cut(members[::2], BATCH_KEYS):
                yield dict.fromkeys(unpack_keys(batch), _NO_PARENTS)

    async def unlisted(self, shard: int) -> AsyncIterator[Claims]:
        async for members in scanned_members(self._client, b"ZSCAN", self._names[shard].pending):
            for batch in _cut(members[::2], BATCH_KEYS):
                yield dict.fromkeys(unpack_keys(batch), _NO_PARENTS)
        async for relations in scanned_members(self._client, b"ZSCAN", self._names[shard].children):
            for batch in _cut(relations[::2], BATCH_KEYS):
                yield claims_of(relations_of(each for each in batch if len(each) == RELATION.size))

    async def read_blocks(self, shard: int, claims: Claims) -> list[StoredBlock]:
        names, keys = self._names[shard], list(claims)
        calls = [
            ScriptCall(_READ_BLOCKS, [names.order, names.pending, *map(names.block, part)])
            for part in _cut(keys, _KEYS_PER_CALL)
        ]
        found = [row for answer in await self._client.run(calls) for row in zip(*answer, strict=True)]
        views = [_view(key, *row) for key, row in zip(keys, found, strict=True)]
        requested = ((parent, view.key) for view in views for parent in claims[view.key] | _parents_of(view))
        parents = await self._parents(names, requested)
        return [replace(view, parents=parents.get(view.key, _NO_PARENTS)) for view in views]

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
        joined = join_keys([parent] if parent is not None else [])
        keys = [names.order, names.children, names.pending, names.block(view.key)]
        shift = RETIRED if is_retired(score) else 0
        arguments: list[Argument] = [view.version or _ABSENT, score, due, joined, b"".join(wrong), shift]
        (done,) = await self._client.run([ScriptCall(_MEND, keys, arguments)])
        await self._invalidate(shard)
        return bool(done)

    async def drop_record(self, shard: int, view: StoredBlock) -> bool:
        names = self._names[shard]
        keys = [names.order, names.pending, names.block(view.key)]
        (done,) = await self._client.run([ScriptCall(_DROP, keys, [view.version])])
        return bool(done)

    async def add_usage(self, shard: int, difference: Mapping[Sum, int]) -> None:
        usage = self._names[shard].usage
        await self._client.execute([(b"HINCRBY", usage, of.field, size) for of, size in difference.items()])
        await self._invalidate(shard)

    async def _invalidate(self, shard: int) -> None:
        """Have managers read again what they know of a shard: they are notified of changes of records only."""
        beside = self._names[shard].blocks + _NO_RECORD
        await self._client.execute([(b"SET", beside, b"", b"PX", 1000), (b"DEL", beside)])

    async def _parents(self, names: ShardKeys, requested: Iterable[tuple[int, int]]) -> Claims:
        """Return whose children blocks are, of the pairs of parent and child that are asked for."""
        pairs = list(requested)
        if not pairs:
            return {}
        members = map(join_keys, pairs)
        (scores,) = await self._client.execute([(b"ZMSCORE", names.children, *members)])
        return claims_of(pair for pair, score in zip(pairs, scores, strict=True) if score is not None)


async def scanned_members(client: RedisClient, command: bytes, key: bytes) -> AsyncIterator[list[bytes]]:
    """Yield what a key holds, page by page; a member that is there all the time at least once.

    Args:
        client: the store.
        command: HSCAN or ZSCAN.
        key: of the hash or sorted set.
    """
    cursor: Any = b"0"
    while True:
        ((cursor, found),) = await client.execute([(command, key, cursor, b"COUNT", BATCH_KEYS)])
        if found:
            yield found
        if cursor == b"0":
            return


class _StoredKey(NamedTuple):
    """A key of the deployment that belongs to an instance.

    Attributes:
        name: of the key.
        uid: number of the instance's registration.
        shard: lock shard.
        block: whose record it is, None for another key.
        run: id of the run that it is, empty for another key.
    """

    name: bytes
    uid: int
    shard: int
    block: int | None
    run: bytes = b""


class LostRuns:
    """Runs with blocks that no index leads to, as they were found among all keys of the servers."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], bytes] = {}

    def add(self, uid: int, key: int, run: bytes) -> None:
        """Remember in which run a block is."""
        self._ids[uid, key] = run

    def of(self, uid: int, key: int) -> bytes:
        """Return the id of the run of a block, empty where none was found."""
        return self._ids.get((uid, key), b"")


class StoredBlocks:
    """All keys of blocks, of whatever instance: found by going through everything that the servers hold.

    Args:
        client: the store.
        lost: takes the runs of blocks that no index leads to.
    """

    def __init__(self, client: RedisClient, lost: LostRuns) -> None:
        self._client = client
        self._lost = lost

    async def uids(self) -> Counter[int]:
        """Return how many keys there are of each registration; some may be counted twice."""
        counted: Counter[int] = Counter()
        async for batch in self._batches():
            counted.update(key.uid for key in batch)
        return counted

    async def unlisted(self) -> AsyncIterator[tuple[int, int, list[int]]]:
        """Yield uid, shard and keys of records that are not in the access order, so that no scan finds them."""
        async for batch in self._batches():
            groups: dict[tuple[int, int], list[int]] = {}
            for key in batch:
                if key.block is not None:
                    groups.setdefault((key.uid, key.shard), []).append(key.block)
            commands = [
                (b"ZMSCORE", self._order(uid, shard), *pack_keys(blocks)) for (uid, shard), blocks in groups.items()
            ]
            answers = await self._client.execute(commands) if commands else []
            for ((uid, shard), blocks), scores in zip(groups.items(), answers, strict=True):
                missing = [block for block, score in zip(blocks, scores, strict=True) if score is None]
                if missing:
                    yield uid, shard, missing
            runs = [key for key in batch if key.run]
            for some in _cut(runs, _RUNS_PER_CALL):
                async for found in self._lost_of(some):
                    yield found

    async def _lost_of(self, runs: Sequence[_StoredKey]) -> AsyncIterator[tuple[int, int, list[int]]]:
        """Yield the blocks of runs that the index of their tag does not lead to; all of a run that no scan finds."""
        values = [value for (value,) in await self._client.mget([[key.name] for key in runs])]
        members = {key: blocks for key, value in zip(runs, values, strict=True) if (blocks := _blocks_in(value or b""))}
        commands: list[Command] = []
        for key, blocks in members.items():
            index = f"{self._client.prefix}:x{{{key.uid}.{key.shard}}}".encode()
            commands += [(b"HMGET", index, *blocks), (b"ZSCORE", self._order(key.uid, key.shard), key.run)]
        answers = await self._client.execute(commands) if commands else []
        for (key, blocks), ids, score in zip(members.items(), answers[::2], answers[1::2], strict=True):
            pairs = zip(blocks, ids, strict=True)
            missing = unpack_keys(member for member, found in pairs if found is None or score is None)
            for block in missing:
                self._lost.add(key.uid, block, key.run)
            if missing:
                yield key.uid, key.shard, missing

    async def drop(self, uids: Container[int]) -> None:
        """Forget every key of these registrations."""
        async for batch in self._batches():
            names = [key.name for key in batch if key.uid in uids]
            if names:
                await self._client.execute([(b"UNLINK", name) for name in names])

    def _order(self, uid: int, shard: int) -> bytes:
        return f"{self._client.prefix}:z{{{uid}.{shard}}}".encode()

    async def _batches(self) -> AsyncIterator[list[_StoredKey]]:
        pattern = _escaped(self._client.prefix) + b":[bzcpukx]{*"
        for address in await self._client.masters():
            connection = await self._client.connect(address)
            try:
                async for names in _scanned(connection, pattern):
                    batch = [key for name in names if (key := _parsed(self._client.prefix, name)) is not None]
                    if batch:
                        yield batch
            except (OSError, RedisError) as error:
                raise StorageIOError(f"redis {address}: {error}; try again") from error
            finally:
                await connection.disconnect(nowait=True)


async def _scanned(connection: Connection, pattern: bytes) -> AsyncIterator[list[bytes]]:
    cursor: Any = b"0"
    while True:
        await connection.send_command("SCAN", cursor, "MATCH", pattern, "COUNT", BATCH_KEYS)
        cursor, names = await connection.read_response()
        yield names
        if cursor == b"0":
            return


def _parsed(prefix: str, name: bytes) -> _StoredKey | None:
    start = len(prefix.encode()) + 1
    end = name.find(b"}", start)
    uid, _, shard = name[start + 2 : end].partition(b".")
    if not (uid.isdigit() and shard.isdigit()):
        return None  # a name like ours that is none of ours
    kind = name[start : start + 1]
    if len(name) != end + 1 + (KEY.size if kind in b"bk" else 0):
        return None
    if kind == b"k":
        return _StoredKey(name, int(uid), int(shard), None, name[-KEY.size :])
    return _StoredKey(name, int(uid), int(shard), *(unpack_keys([name[-KEY.size :]]) if kind == b"b" else [None]))


def _blocks_in(value: bytes) -> Sequence[bytes]:
    """Return the packed keys in a run, none where it cannot be read."""
    try:
        keys = keys_of(value)
    except StorageIOError:
        return ()
    return [keys[at : at + KEY.size] for at in range(0, len(keys), KEY.size)]


def _escaped(text: str) -> bytes:
    return "".join(f"\\{each}" if each in "*?[]\\^" else each for each in text).encode()


def _view(key: int, data: bytes | None, score: bytes | None, due: bytes | None) -> StoredBlock:
    record, damage, version = None, "", b""
    if data is not None:
        try:
            record = decode_record(data)
            version = data[1 : 1 + STAMP_SIZE]
        except StorageIOError as error:
            damage, version = str(error), data
    return StoredBlock(
        key,
        record=record,
        damage=damage,
        version=version,
        is_listed=score is not None,
        due=None if due is None else float(due),
        parents=_NO_PARENTS,
        is_evictable=None if score is None else not is_retired(float(score)),
    )


def _parents_of(view: StoredBlock) -> frozenset[int]:
    record = view.record
    return frozenset((record.parent,)) if record is not None and record.parent is not None else _NO_PARENTS


def claims_of(pairs: Iterable[tuple[int, int]]) -> Claims:
    """Return pairs of parent and child by child."""
    claims: dict[int, set[int]] = {}
    for parent, child in pairs:
        claims.setdefault(child, set()).add(parent)
    return {child: frozenset(parents) for child, parents in claims.items()}


def relations_of(members: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the mixed keys of parents and their children."""
    keys = mixed([key for member in members for key in RELATION.unpack(member)])
    return zip(keys[::2], keys[1::2], strict=True)


def _cut(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
