"""Runs of blocks as they lie in Redis, their invariants, and what a plain dict says of the same blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcm.index.backends.backend import Access, Change, StagedChange, UniformRun, Written, is_resident, stored_at
from kvcm.index.backends.redis import RETIRED
from kvcm.index.backends.redis_runs import RunsBackend, TagKeys
from kvcm.index.codec import StampedRecord
from kvcm.index.locking import shards_of
from kvcm.index.run_codec import decode_runs, keys_of
from kvcm.model.keys import mixed_key, pack_keys, unpack_keys
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient

__all__ = [
    "DELETING",
    "OTHER",
    "SERVING",
    "WRITING",
    "Model",
    "StoredTag",
    "ask",
    "begin",
    "chain",
    "check_layout",
    "chunked",
    "run_of",
    "runs_in",
    "serve",
    "served",
    "stored_tag",
    "uniform",
    "write",
]

SERVING = Location("a", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"", 10, 1700000000.9)
WRITING = SERVING._replace(status=LocationStatus.WRITING, session_id="s", deadline=1700000030.125)
DELETING = SERVING._replace(status=LocationStatus.DELETING, deadline=1700000060.0)
OTHER = SERVING._replace(id="m", storage_type=StorageType.ST_MOONCAKE, size_bytes=3, chunk=b"other")
_ID_BYTES = 8
_TAG_SHIFT = 44


def chain(count: int, first: int = 1) -> list[int]:
    """Mixed keys that Redis holds as consecutive numbers."""
    return [mixed_key(key) for key in range(first, first + count)]


def chunked(keys: Sequence[int], version: str = "") -> list[bytes]:
    """A chunk for each block; every seventh is empty."""
    return [f"{position}{version}".encode() if position % 7 else b"" for position in range(len(keys))]


def run_of(keys: Sequence[int], location: Location = WRITING, parent: int | None = None, depth: int = 0) -> BlockRun:
    return BlockRun(keys, parent, depth, location, chunked(keys))


def served(location: Location) -> Location:
    """A location that is being written, when its session has ended."""
    return location._replace(status=LocationStatus.SERVING, session_id="", deadline=0.0)


def uniform(
    keys: Sequence[int], location: Location = WRITING, after: Location | None = None, chunks: Sequence[bytes] = ()
) -> tuple[UniformRun, UniformRun]:
    """Blocks that are being written and the same blocks serving; with chunks these are new."""
    old = [b"?"] * len(keys)
    after = after if after is not None else served(location)
    return UniformRun(keys, location, old), UniformRun(keys, after, chunks or old)


async def _settled(client: RedisClient, change: StagedChange) -> Written:
    answers = await client.run_in_turn([change.calls])
    return change.settle([answer for stage in answers for answer in stage])


async def begin(client: RedisClient, backend: RunsBackend, *runs: BlockRun) -> Written:
    """Add blocks that are beginning to be written."""
    return await _settled(client, backend.stage_begin(runs))


async def serve(client: RedisClient, backend: RunsBackend, *runs: tuple[UniformRun, UniformRun]) -> Written:
    """Let blocks serve."""
    return await _settled(client, backend.stage_serve(runs))


async def write(backend: RunsBackend, records: Mapping[int, BlockRecord | None]) -> list[int]:
    """Store or remove, and return the keys that lost."""
    olds = await backend.get_many(list(records))
    changes = [Change(key, old, records[key]) for key, old in zip(records, olds, strict=True)]
    return list((await backend.write_many(changes)).lost)


async def ask(client: RedisClient, *command: Any) -> Any:
    return (await client.execute([command]))[0]


# What lies in Redis.


class StoredTag(NamedTuple):
    """What the keys of one tag hold.

    Attributes:
        runs: by id.
        index: from packed keys to ids.
        order: scores by id.
        pending: due times by id.
        children: parents and children.
        usage: fields of the sums, but those that are 0.
        last_id: the number of the last id.
    """

    runs: dict[bytes, bytes]
    index: dict[bytes, bytes]
    order: dict[bytes, float]
    pending: dict[bytes, float]
    children: set[bytes]
    usage: dict[str, int]
    last_id: int


def _scores(flat: Sequence[bytes]) -> dict[bytes, float]:
    return dict(zip(flat[::2], map(float, flat[1::2]), strict=True))


async def stored_tag(client: RedisClient, uid: int, tag: int) -> StoredTag:
    """Read everything that there is of a tag; the tag's names of runs are found among all keys of the server."""
    names = TagKeys.of(client.prefix, uid, tag)
    found = await ask(client, "KEYS", names.runs + b"*")
    (values,) = await client.mget([found]) if found else ([],)
    index = await ask(client, "HGETALL", names.places)
    usage = await ask(client, "HGETALL", names.usage)
    fields = {field.decode(): int(size) for field, size in zip(usage[::2], usage[1::2], strict=True)}
    return StoredTag(
        {name.removeprefix(names.runs): value for name, value in zip(found, values, strict=True)},
        dict(zip(index[::2], index[1::2], strict=True)),
        _scores(await ask(client, "ZRANGE", names.order, 0, -1, "WITHSCORES")),
        _scores(await ask(client, "ZRANGE", names.pending, 0, -1, "WITHSCORES")),
        set(await ask(client, "ZRANGE", names.children, 0, -1)),
        {field: size for field, size in fields.items() if size and field not in "#@"},
        fields.get("@", 0),
    )


async def check_layout(client: RedisClient, uid: int, tags: int) -> dict[int, StampedRecord]:
    """Check that what lies in Redis agrees with itself, and return all records by key."""
    records: dict[int, StampedRecord] = {}
    for tag in range(tags):
        held = await stored_tag(client, uid, tag)
        members = {each: _cut(keys_of(value)) for each, value in held.runs.items()}
        assert all(1 <= len(keys) <= 64 for keys in members.values()), "up to 64 blocks in a run"
        leading = [(key, each) for each, keys in members.items() for key in keys]
        assert sorted(leading) == sorted(held.index.items()), "index: key -> id of its run, of each block exactly one"
        assert held.order.keys() == held.runs.keys(), "access order: id -> time and number of reads"
        numbers = [int.from_bytes(each) for each in held.runs]
        assert {number >> _TAG_SHIFT for number in numbers} <= {tag}, "the high 20 bits of an id are its tag"
        assert all(0 < number % (1 << _TAG_SHIFT) <= held.last_id for number in numbers), "@ is the last id"
        found = {each: decode_runs([value]) for each, value in held.runs.items()}
        of_tag = {key: record for each in found.values() for key, record in each.items()}
        assert set(shards_of(list(of_tag), tags)) <= {tag}, "a block lies in the tag of its key"
        _check_derived(held, found)
        assert not records.keys() & of_tag.keys()
        records |= of_tag
    return records


def _check_derived(held: StoredTag, found: Mapping[bytes, Mapping[int, StampedRecord]]) -> None:
    dues, relations, usage = {}, set(), Counter[str]()
    for each, records in found.items():
        assert len({(record.due, is_resident(record), record.stamp) for record in records.values()}) == 1, (
            "blocks alike"
        )
        first = next(iter(records.values()))
        dues |= {each: first.due} if first.due is not None else {}
        assert (held.order[each] < RETIRED) == is_resident(first), "what can be evicted stands before the rest"
        before = None
        for key, record in records.items():
            if record.parent is not None and record.parent != before:
                relations.add(b"".join(pack_keys([record.parent, key])))
            before = key
            _count(usage, record)
    assert held.pending == dues, "pending: id -> when a session expires or bytes may go"
    assert held.children == relations, "children that do not follow their parent within a run"
    assert held.usage == +usage, "usage: the sums of the records (invariant 4 of the design)"


def _count(usage: Counter[str], record: BlockRecord) -> None:
    for location in record.locations:
        field = f"{int(location.storage_type)}/{location.storage}"
        usage[field] += location.size_bytes
        usage[f"-{field}"] += location.size_bytes * (location.status is LocationStatus.DELETING)
    usage["-"] += all(location.status is LocationStatus.DELETING for location in record.locations)


def _cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + _ID_BYTES] for at in range(0, len(keys), _ID_BYTES)]


async def runs_in(client: RedisClient, uid: int, tags: int = 1) -> list[list[int]]:
    """The blocks of every run, in the order of the runs' ids."""
    held = [await stored_tag(client, uid, tag) for tag in range(tags)]
    return [unpack_keys(_cut(keys_of(each.runs[run]))) for each in held for run in sorted(each.runs)]


# What a plain dict says.


class Model:
    """Records and accesses, as the interface of index backends promises them.

    Attributes:
        records: by key.
        accesses: by key.
        versions: how often each record was written: a writer that read an older one loses.
    """

    def __init__(self) -> None:
        self.records: dict[int, BlockRecord] = {}
        self.accesses: dict[int, Access] = {}
        self.versions: Counter[int] = Counter()

    def begin(self, run: BlockRun) -> list[int]:
        """Add what is not there, and return the rest."""
        lost = [key for key in run.keys if key in self.records]
        for key, record in zip(run.keys, run.records(), strict=True):
            if key not in self.records:
                self._put(key, record)
        return lost

    def serve(self, before: UniformRun, after: UniformRun) -> list[int]:
        """Let blocks serve that are as their writer left them, and return the others."""
        lost = []
        for position, key in enumerate(before.keys):
            record = self.records.get(key)
            only = record.locations[0] if record is not None and len(record.locations) == 1 else None
            if record is None or only is None or only._replace(chunk=b"") != before.location:
                lost.append(key)
                continue
            chunk = only.chunk if after.chunks is before.chunks else after.chunks[position]
            self._put(key, record._replace(locations=(after.location._replace(chunk=chunk),)))
        return lost

    def write(self, changes: Sequence[Change], versions: Mapping[int, int]) -> list[int]:
        """Change the records that still are of these versions, and return the others."""
        lost = [change.key for change in changes if self.versions[change.key] != versions[change.key]]
        for key, _, new, _ in changes:
            if key not in lost:
                self._put(key, new)
        return lost

    def read(self, verb: str, counts: Mapping[int, int], at: int) -> None:
        """Do `touch`, `touch` without moving, or `requeue`."""
        for key in counts.keys() & self.records.keys():
            seconds, reads = self.accesses[key]
            if verb != "requeue":
                seconds, reads = max(seconds, at if verb == "touch" else 0), min(reads + counts[key], 4095)
            elif is_resident(self.records[key]):
                seconds, reads = at, min(counts[key], 4095)
            self.accesses[key] = Access(seconds, reads)

    def drop(self) -> None:
        """Forget everything."""
        for key in list(self.records):
            self._put(key, None)

    def _put(self, key: int, new: BlockRecord | None) -> None:
        old = self.records.get(key)
        if old is new is None:
            return
        self.versions[key] += 1
        if new is None:
            del self.records[key], self.accesses[key]
            return
        if old is None or (is_resident(new) and not is_resident(old)):
            self.accesses[key] = Access(int(stored_at(new)), 0)
        self.records[key] = new

    def usage(self) -> tuple[dict[StorageKey, int], dict[StorageKey, int], int]:
        """Bytes of all locations and of those that are being deleted, and blocks that are."""
        used: Counter[StorageKey] = Counter()
        deleting: Counter[StorageKey] = Counter()
        blocks = 0
        for record in self.records.values():
            for location in record.locations:
                used[location.place] += location.size_bytes
                deleting[location.place] += location.size_bytes * (location.status is LocationStatus.DELETING)
            blocks += all(location.status is LocationStatus.DELETING for location in record.locations)
        return dict(+used), dict(+deleting), blocks
