"""Records in a Redis that several managers share, many blocks to a value.

Blocks whose records differ in nothing but their place in the chain and their chunks are stored together, up to 64 in a
*run*: they began in one write, and mostly they serve, are read, are marked and go together. What such a change costs
the server hardly depends on how many blocks there are. A change of some blocks of a run takes them out into a run of
their own, and a read of some cuts it, as a radix tree would.

Keys of one tag share a hash tag, hence a slot of a cluster; `P` is the name of the deployment::

    P:k{uid.tag} + id       a run of blocks (index/run_codec.py)
    P:x{uid.tag}            index: key -> id of its run
    P:z{uid.tag}            access order: id -> time and number of reads, as in `redis.py`
    P:c{uid.tag}            children: parent + child, of the children that do not follow their parent within a run
    P:p{uid.tag}            pending: id -> when a session expires or bytes may go
    P:u{uid.tag}            usage, as in `redis.py`; @ -> the last id, counted from 1
    P:w{uid.tag}            there while something changed since a manager last asked to hear of it (`DueSets`)
    P:y{uid.tag}            fence: there while the blocks move to another store, and after they left (`StoreMoves`)

A change of blocks that can be served is published on the channel `P:k`, with their keys: managers keep answers for no
others, so new blocks cost the other managers nothing. Blocks that come to be served are published on `P:n` while a
manager listens there.

Keys of blocks and ids of runs are 8 bytes, big endian; the high 20 bits of an id are the number of its tag. Invariants:

1. All of them change in one Lua call, so a crash at any point leaves them in agreement (invariant 4 of the design).
2. A block changes only where its run still has the stamp that was read: of several managers one wins, the others lose
   and read again. A cut keeps the stamp, since it changes no record.
3. All blocks of a run were read alike: its place in the access order is that of each.
4. A request to a tag costs one call of a script, whatever the number of keys; a batch is cut, so that no call holds up
   the server for more than about a millisecond.

Rejected: a value per block (a member of each of three sorted sets, which is what the server's time goes into); a run
per session (all its blocks would have to change together); positions in the index (each cut would rewrite them).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, zip_longest
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvcm.index.backends.backend import (
    NOTHING_WRITTEN,
    Access,
    Change,
    FinishRun,
    PlaceTally,
    RowObserver,
    RunChange,
    StagedChange,
    StoredRun,
    Sum,
    UniformRun,
    Written,
    is_resident,
    sums_of,
    whole_seconds,
)
from kvcm.index.backends.redis import RETIRED, SharedCounts, SharedSums, access_of, merged, new_score
from kvcm.index.backends.redis_run_scripts import (
    AROUND,
    CHANGE,
    COLDEST,
    COLDEST_RUNS,
    DROP,
    FAMILIES,
    KEYS,
    LIFT_FENCE,
    LISTING,
    NEWER,
    OUTER_FAMILIES,
    PLACES,
    READ,
    REQUEUE,
    SAMPLE,
    SAMPLE_RUNS,
    SERVE,
    SET_FENCE,
    SHRINK,
    TOTALS,
    TOUCH,
)
from kvcm.index.codec import STAMP_SIZE
from kvcm.index.locking import shards_of
from kvcm.index.run_codec import (
    MOST_BLOCKS,
    decode_runs,
    decode_stored,
    decode_uniform,
    encode_blocks,
    encode_headers,
    encode_run,
    keys_of,
    new_run_stamp,
)
from kvcm.model.keys import cut_keys, join_keys, mixed, pack_keys, split_keys, unpack_keys
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, StorageKey
from kvcm.store.redis.client import MOST_KEYS_PER_SCRIPT, Argument, RedisClient, Script, ScriptCall
from kvcm.store.redis.due_sets import DueSets
from kvcm.store.redis.tracking import Revisions, owner_of
from kvcm.telemetry.metrics import measure, timed
from kvcm.telemetry.tracing import staged

__all__ = ["Fence", "RunsBackend", "TagKeys", "channel_of", "channel_of_new", "noticed_blocks"]

_ABSENT: Final = bytes(STAMP_SIZE)
_UNKNOWN: Final = b"\xff" * STAMP_SIZE  # no write has this stamp
_MOST_BLOCKS_PER_CALL: Final = 8 * MOST_BLOCKS
_MOST_CALLS_AT_ONCE: Final = 32
_MOST_KEYS_PER_READ: Final = 1024
_MOST_KEYS_PER_TOUCH: Final = 1024
_MOST_RUNS_PER_CALL: Final = 64
_MOST_RUNS_OF_FAMILIES: Final = 4  # each block of theirs costs the server up to 4 us
_FEW_RUNS: Final = 8
_MOST_RUNS_CUT: Final = 16  # by one call: each costs the server some 50 us
_FEW_BLOCKS: Final = 4  # for each that is to be drawn: then all keys are read
_MOST_FUTILE_DRAWS: Final = 32  # in a row; of runs of one block each, one draw of 512 brings eight
_KEY_BYTES: Final = 8
_MOST_DIGITS: Final = 19  # of a uid
_TAG_SHIFT: Final = 44
_LEFT_SECONDS: Final = 7 * 86400  # what belongs to a move is not on its way for longer
_encode: Final = msgspec.msgpack.Encoder().encode


class TagKeys(NamedTuple):
    """Names of the keys of one tag; `runs` is what the names of its runs begin with, `changed` is there while no
    manager has to be notified of another change; `fence` while the blocks move to another store."""

    order: bytes
    children: bytes
    pending: bytes
    usage: bytes
    places: bytes
    runs: bytes
    changed: bytes
    fence: bytes

    @classmethod
    def of(cls, deployment: str, uid: int, tag: int) -> TagKeys:
        """Return the names for a tag of an instance's registration."""
        return cls(*(f"{deployment}:{kind}{{{uid}.{tag}}}".encode() for kind in "zcpuxkwy"))


class Fence(StrEnum):
    """What an instance's blocks in a store let happen while they move to another one, and afterwards."""

    COPYING = "copying"
    """Only the move changes them."""
    LIVE = "live"
    LEAVING = "leaving"
    """Nothing changes them."""
    LEFT = "left"
    """Nor can they be read."""


def channel_of(deployment: str) -> bytes:
    """Return the channel on which changes of resident blocks are published."""
    return f"{deployment}:k".encode()


def channel_of_new(deployment: str) -> bytes:
    """Return the channel on which blocks are published that become resident."""
    return f"{deployment}:n".encode()


def noticed_blocks(notice: bytes) -> Mapping[int, Sequence[bytes]]:
    """Return the blocks of a published notice: their keys, as they are stored, by the uid of their instance; nothing of
    another message."""
    uid, dot, keys = notice.partition(b".")
    is_one = dot and uid.isdigit() and len(uid) <= _MOST_DIGITS and len(keys) % _KEY_BYTES == 0
    return {int(uid): cut_keys(keys)} if is_one else {}


class _Document(NamedTuple):
    """What the script does with the blocks of a group.

    Attributes:
        expected: what a block must have: the stamp of its run, zeros for no record, or else headers.
        is_run: whether the content is the run to store, else keys.
        headers: to set; empty to remove the blocks; None where the run has them.
        stamp: new one of the blocks; empty where the run has it.
        score: to set, True to retire the blocks, False to leave it.
        due: unix seconds, False for never.
        sums: what each block adds to the sums.
        is_resident: whether the blocks are, so that managers may keep answers for them.
        becomes_resident: whether they are afterwards, and were not.
        bodies: to set by block, None to leave them.
    """

    expected: bytes
    is_run: bool
    headers: bytes | None
    stamp: bytes
    score: int | bool
    due: float | bool
    sums: Mapping[Sum, int]
    is_resident: bool
    becomes_resident: bool
    bodies: Sequence[bytes] | None = None

    def numbered(self, argument: int) -> tuple[Any, ...]:
        """Return it as the script wants it; the content is the argument of that number."""
        headers = False if self.headers is None else _text(self.headers)
        fields, amounts = [of.field for of in self.sums], list(self.sums.values())
        ends = () if self.bodies is None else ([_text(body) for body in self.bodies],)
        notices = (self.is_resident, self.becomes_resident)
        rest = (headers, _text(self.stamp), self.score, self.due, fields, amounts, *notices, *ends)
        return (_text(self.expected), argument, self.is_run, *rest)


class _Group(NamedTuple):
    """Blocks of one tag that change alike.

    Attributes:
        keys: of the blocks, at most `MOST_BLOCKS`.
        growth: by how much each changes the number of blocks.
        content: keys, or the run to store.
        document: the rest.
    """

    keys: Sequence[int]
    growth: int
    content: bytes
    document: _Document


class _TagChange(NamedTuple):
    """One call that changes blocks.

    Attributes:
        tag: number of the tag.
        groups: in the order of the script's indexes.
        call: of the script.
    """

    tag: int
    groups: Sequence[_Group]
    call: ScriptCall

    def lost(self, indexes: Iterable[int]) -> list[int]:
        """Return the keys at indexes of the script, which count from 1."""
        keys = [key for group in self.groups for key in group.keys]
        return [keys[index - 1] for index in indexes]

    def totals(self, lost: set[int]) -> tuple[dict[Sum, int], int]:
        """Return what the blocks that did not lose add to the sums and to the number of blocks."""
        sums: Counter[Sum] = Counter()
        count = 0
        for group in self.groups:
            won = len(group.keys) - (len(lost.intersection(group.keys)) if lost else 0)
            count += won * group.growth
            for of, size in group.document.sums.items():
                sums[of] += won * size
        return {of: size for of, size in sums.items() if size}, count


class RunsBackend(SharedCounts):
    """Records of one instance.

    Args:
        client: the store.
        uid: number of the instance's registration, never used again.
        tags: parts that the keys are divided among; the same for all managers and for ever.
        flags: changes of the keys that say that a tag changed; without them the store is asked every time.
        move: number of the move that this backend is for (`StoreMoves`); 0 for all other use.
    """

    ends_at_miss = True
    most_touched = 4096
    has_runs = True

    def __init__(self, client: RedisClient, uid: int, tags: int, flags: Revisions | None = None, move: int = 0) -> None:
        self._move = move or ""
        self._tags = [TagKeys.of(client.prefix, uid, tag) for tag in range(tags)]
        pending, changed = [tag.pending for tag in self._tags], [tag.changed for tag in self._tags]
        owner = owner_of(changed[0])
        sums = SharedSums([ScriptCall(TOTALS, [tag.places, tag.usage, tag.fence]) for tag in self._tags])
        super().__init__(client, DueSets(client, pending, [(flags or Revisions(), owner)], changed), sums)

    # Reads.

    @staged("read", "redis_runs.py:get_many")
    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        values = await self._read_values(keys)
        with timed("meta_searcher.index_deserialize_time_us"):
            records = decode_runs(values, set(keys))
        return list(map(records.get, keys))

    @staged("read", "redis_runs.py:get_runs")
    async def get_runs(
        self, keys: Sequence[int], *, stop_at_miss: bool = False
    ) -> tuple[Sequence[UniformRun], Mapping[int, BlockRecord]]:
        values = await self._read_values(keys, stop_at_miss=stop_at_miss)
        with timed("meta_searcher.index_deserialize_time_us"):
            return decode_uniform(values)

    @staged("read", "redis_runs.py:get_fresh")
    async def get_fresh(self, keys: Sequence[int], *, is_head_known: bool) -> list[BlockRecord | None]:
        """Read the tag of the first block by a script where that one is known, and of all others only the index, by
        commands: mostly it knows none of them, and a script would cost the server more to find that out."""
        tags = list(self._by_tag(keys).items())
        by_script: Sequence[int] = tags[0][1] if is_head_known and tags else ()
        if len(by_script) == len(keys):
            return await self.get_many(keys)
        others = [(self._tags[tag], positions) for tag, positions in (tags[1:] if by_script else tags)]
        parts = [(tag, some) for tag, positions in others for some in _cut(positions, _MOST_KEYS_PER_READ)]
        members = pack_keys(keys)
        reading = self._client.execute([(b"HMGET", tag.places, *(members[i] for i in some)) for tag, some in parts])
        of_first: Sequence[BlockRecord | None] = ()
        if by_script:
            of_first, answers = await asyncio.gather(self.get_many([keys[i] for i in by_script]), reading)
        else:
            answers = await reading
        records: list[BlockRecord | None] = [None] * len(keys)
        for position, record in zip(by_script, of_first, strict=True):
            records[position] = record
        names: defaultdict[TagKeys, dict[bytes, None]] = defaultdict(dict)
        known: list[int] = []
        for (tag, positions), ids in zip(parts, answers, strict=True):
            for position, each in zip(positions, ids, strict=True):
                if each is not None:
                    known.append(position)
                    names[tag][tag.runs + each] = None
        if known:
            some_records = await self._get_known([keys[i] for i in known], [list(each) for each in names.values()])
            for position in known:
                records[position] = some_records.get(keys[position])
        return records

    async def _get_known(self, keys: Sequence[int], names: Sequence[Sequence[bytes]]) -> Mapping[int, BlockRecord]:
        """Return the records of blocks that the index knew, from the runs that it named, by tag."""
        values = [value for of_tag in await self._client.mget(names) for value in of_tag if value is not None]
        found: dict[int, BlockRecord] = {**decode_runs(values, set(keys))}
        left = [key for key in keys if key not in found]  # they changed meanwhile
        records = await self.get_many(left) if left else ()
        found.update((key, record) for key, record in zip(left, records, strict=True) if record is not None)
        return found

    @staged("read", "redis_runs.py:get_around")
    async def get_around(self, keys: Sequence[int], most: int) -> Mapping[int, BlockRecord]:
        found: dict[int, BlockRecord] = {}
        async for _, values in self._around(keys, most):
            found.update(decode_runs(values))
        return found

    async def runs_around(self, keys: Sequence[int], most: int) -> Sequence[tuple[StoredRun, Access]]:
        found: list[tuple[StoredRun, Access]] = []
        async for scores, values in self._around(keys, most):
            accesses = [access_of(float(score or RETIRED)) for score in scores]
            found += zip(decode_stored(values), accesses, strict=True)
        return found

    async def _around(self, keys: Sequence[int], most: int) -> AsyncIterator[tuple[Sequence[Any], Sequence[bytes]]]:
        """Yield scores and values of runs."""
        left = [(tag, cut_keys(members)) for tag, _, members in self._parts(keys, _MOST_KEYS_PER_READ)]
        while left and most > 0:
            per_call = max(1, min(most, _MOST_BLOCKS_PER_CALL))
            answers = await self._run(
                [
                    ScriptCall(AROUND, [tag.places, tag.runs, tag.children, tag.order, tag.fence], [per_call, *some])
                    for tag, some in left
                ]
            )
            scores, values = ([each for answer in answers for each in answer[first::2]] for first in (1, 2))
            yield scores, values
            most -= sum(len(keys_of(value)) for value in values) // _KEY_BYTES
            rest = [(tag, some[answer[0] :]) for (tag, some), answer in zip(left, answers, strict=True)]
            left = [(tag, some) for tag, some in rest if some]

    async def _read_values(self, keys: Sequence[int], *, stop_at_miss: bool = False) -> list[bytes]:
        """Return the runs with blocks of these keys; with `stop_at_miss` of each tag those before the first miss do."""
        left = [(tag, members) for tag, _, members in self._parts(keys, _MOST_KEYS_PER_READ)]
        values: list[bytes] = []
        while left:
            answers = await self._run(
                [
                    ScriptCall(READ, [tag.places, tag.runs, tag.order, tag.fence], [some, int(stop_at_miss)])
                    for tag, some in left
                ]
            )
            values += [each for answer in answers for each in answer[1:]]
            rest = [(tag, some[_KEY_BYTES * answer[0] :]) for (tag, some), answer in zip(left, answers, strict=True)]
            left = [(tag, some) for tag, some in rest if some]
        measure("meta_indexer.io_data_size", sum(map(len, values)))
        return values

    def answers(
        self, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
    ) -> None:
        """Records are in Redis: `get_runs`."""

    async def children(self, key: int) -> list[int]:
        (family,) = await self.families([key])
        return family

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        members = pack_keys(keys)
        relations: list[bytes] = [b""] * len(keys)
        left = [(tag, 0) for tag in self._tags if keys]  # where to go on
        while left:
            calls = [
                ScriptCall(FAMILIES, [tag.children, tag.places, tag.runs], members[at : at + _MOST_BLOCKS_PER_CALL])
                for tag, at in left
            ]
            answers = await self._run(calls)
            for (_, begin), families in zip(left, answers, strict=True):
                for at, family in enumerate(families, begin):
                    relations[at] += family
            ends = [(tag, at + len(families)) for (tag, at), families in zip(left, answers, strict=True)]
            left = [(tag, at) for tag, at in ends if at < len(keys)]
        return [sorted(_every_other(family)) for family in relations]

    async def due(self, now: float, most: int) -> list[int]:
        ids = await self._pending.until(now, most)
        by_tag = self._ids_by_tag(ids)
        parts = [(tag, part) for tag, some in by_tag for part in _cut(some, _MOST_RUNS_PER_CALL)]
        answers = await self._run([ScriptCall(KEYS, [self._tags[tag].runs], part) for tag, part in parts])
        keys: dict[bytes, bytes] = {}
        for (_, part), answer in zip(parts, answers, strict=True):
            keys.update(zip(part, answer, strict=True))
        return split_keys(b"".join([keys[each] for each in ids if each in keys]))[:most]

    @staged("read", "redis_runs.py:due_runs")
    async def due_runs(self, now: float, most: int) -> Sequence[StoredRun]:
        found: list[StoredRun] = []
        count, known = most // MOST_BLOCKS + _FEW_RUNS, set[bytes]()
        while True:
            ids = await self._pending.until(now, count)
            fresh = [each for each in ids if each not in known]
            by_tag = self._ids_by_tag(fresh)
            values = await self._client.mget([[self._tags[tag].runs + each for each in some] for tag, some in by_tag])
            value_of: dict[bytes, bytes | None] = {}
            for (_, some), of_tag in zip(by_tag, values, strict=True):
                value_of.update(zip(some, of_tag, strict=True))
            found += decode_stored([value for each in fresh if (value := value_of.get(each)) is not None])
            if len(ids) < count or sum(len(run.keys) for run in found) >= most:
                return found
            known.update(fresh)
            count *= 4  # most are small

    def _ids_by_tag(self, ids: Iterable[bytes]) -> Sequence[tuple[int, Sequence[bytes]]]:
        by_tag: defaultdict[int, list[bytes]] = defaultdict(list)
        for each in ids:
            if (tag := int.from_bytes(each) >> _TAG_SHIFT) < len(self._tags):  # else it is none of ours
                by_tag[tag].append(each)
        return list(by_tag.items())

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        found: list[Access | None] = [None] * len(keys)
        parts = list(self._parts(keys, _MOST_KEYS_PER_READ))
        calls = [ScriptCall(PLACES, [tag.order, tag.places], cut_keys(joined)) for tag, _, joined in parts]
        answers = await self._run(calls)
        for (_, positions, _), scores in zip(parts, answers, strict=True):
            for position, score in zip(positions, scores, strict=True):
                found[position] = None if score is None else access_of(float(score))
        return found

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        if count <= 0:
            return []
        start, requested = offset // len(self._tags), min(count, 2 * count // len(self._tags) + 16)
        if len(self._tags) == 1:
            requested = count
        coldest, is_enough = await self._coldest(count, start, requested)
        if not is_enough:
            coldest, _ = await self._coldest(count, start, count)
        keys = unpack_keys(member for member, _ in coldest)
        return [(key, access_of(score)) for key, (_, score) in zip(keys, coldest, strict=True)]

    async def _coldest(self, count: int, start: int, requested: int) -> tuple[list[tuple[bytes, float]], bool]:
        calls = [ScriptCall(COLDEST, [tag.order, tag.runs], [requested, start]) for tag in self._tags]
        return merged(await self._run(calls), count, requested)

    @staged("read", "redis_runs.py:coldest_runs")
    async def coldest_runs(self, count: int, offset: int) -> Sequence[tuple[StoredRun, Access]]:
        tags = len(self._tags)
        requested = min(count, 2 * count // tags + MOST_BLOCKS) if tags > 1 else count
        calls = [ScriptCall(COLDEST_RUNS, [tag.order, tag.runs], [requested, offset // tags]) for tag in self._tags]
        found: list[tuple[StoredRun, Access]] = []
        ends: list[Access] = []  # behind the last run of a tag there may be others as cold as that
        for answer in await self._run(calls):
            runs = decode_stored(answer[1::2])
            accesses = [access_of(float(score)) for score in answer[::2]]
            found += zip(runs, accesses, strict=True)
            if sum(len(run.keys) for run in runs) >= requested:
                ends.append(accesses[-1])
        return [each for each in found if not ends or each[1].at <= min(ends).at]

    @staged("read", "redis_runs.py:outer_families")
    async def outer_families(self, runs: Sequence[StoredRun], most: int) -> Sequence[Sequence[tuple[int, int]]]:
        members = [join_keys(run.keys) for run in runs]
        calls = [
            ScriptCall(OUTER_FAMILIES, [tag.children], [most, *some])
            for tag in self._tags
            for some in _cut(members, _MOST_RUNS_OF_FAMILIES)
        ]
        answers = await self._run(calls)
        per_tag = -(-len(members) // _MOST_RUNS_OF_FAMILIES)
        parts = [[each for answer in some for each in answer] for some in _cut(answers, per_tag)] if members else []
        families = [b"".join(each) for each in zip(*parts, strict=True)]
        relations = split_keys(b"".join(families))
        ends = [len(family) // _KEY_BYTES for family in families]
        spans = zip(accumulate(ends, initial=0), accumulate(ends), strict=False)
        return [list(zip(relations[begin:end:2], relations[begin + 1 : end : 2], strict=True)) for begin, end in spans]

    def observe(self, observer: RowObserver | None) -> None:
        """Return None: other managers change the records, too, so an observer would miss changes."""

    async def scan(self, batch_size: int) -> AsyncIterator[list[int]]:
        """Go through the runs, and then through those that came meanwhile: a block that leaves its run comes into a new
        one. In the order of the index each page would need the runs of all its blocks."""
        for tag in self._tags:
            number, is_last = await self._newest_run(tag), 0
            async for some in self._run_ids(tag, max(1, batch_size // MOST_BLOCKS)):
                (keys,) = await self._client.run([ScriptCall(KEYS, [tag.runs], some)])
                async for page in self._pages(tag, b"".join(keys), batch_size):
                    yield page
            while not is_last:
                call = ScriptCall(NEWER, [tag.usage, tag.runs, tag.fence], [number, _MOST_RUNS_PER_CALL])
                ((number, is_last, *keys),) = await self._client.run([call])
                async for page in self._pages(tag, b"".join(keys), batch_size):
                    yield page

    async def _pages(self, tag: TagKeys, keys: bytes, batch_size: int) -> AsyncIterator[list[int]]:
        """Yield keys in batches; of those after the first only what still is there."""
        members = cut_keys(keys)
        for number, batch in enumerate(_cut(members, batch_size)):
            if number:
                (ids,) = await self._client.execute([(b"HMGET", tag.places, *batch)])
                batch = [member for member, run in zip(batch, ids, strict=True) if run is not None]
            if batch:
                yield unpack_keys(batch)

    async def random_sample(self, count: int, random: Random) -> list[int]:
        sizes = await self._client.execute([(b"HLEN", tag.places) for tag in self._tags])
        if sum(sizes) <= _FEW_BLOCKS * count:
            found = await self._client.execute([(b"HKEYS", tag.places) for tag in self._tags])
            members = sorted(member for part in found for member in part)
            return unpack_keys(random.sample(members, min(count, len(members))))
        return await self._drawn(count, random)

    async def _drawn(self, count: int, random: Random) -> list[int]:
        """Draw places of runs and positions in a full one: each block has the same chance, and some hit none."""
        runs = await self._client.execute([(b"ZCARD", tag.order) for tag in self._tags])
        keys: dict[int, None] = {}
        known, futile = 0, 0
        # The order of a damaged store may name runs that are gone: then there are fewer blocks than it says.
        while len(keys) < count and futile < _MOST_FUTILE_DRAWS and sum(runs):
            tags = random.choices(range(len(runs)), runs, k=_MOST_BLOCKS_PER_CALL)
            calls = []
            for number, drawn in sorted(Counter(tags).items()):
                places = [place for _ in range(drawn) for place in _draw(runs[number], random)]
                calls.append(ScriptCall(SAMPLE, [self._tags[number].order, self._tags[number].runs], places))
            for answer in await self._run(calls):
                keys.update(dict.fromkeys(unpack_keys(answer)))
            known, futile = len(keys), futile + 1 if len(keys) == known else 0
        return random.sample(list(keys), min(count, len(keys)))

    async def random_records(self, count: int, random: Random) -> Mapping[int, tuple[BlockRecord, Access]]:
        found: dict[int, tuple[BlockRecord, Access]] = {}
        for score, value in await self._random_values(count, random):
            access = access_of(score)
            found.update((key, (record, access)) for key, record in decode_runs([value]).items())
        return found

    async def random_runs(self, count: int, random: Random) -> Sequence[tuple[StoredRun, Access]]:
        drawn = await self._random_values(count, random)
        runs = decode_stored([value for _, value in drawn])
        return list(zip(runs, [access_of(score) for score, _ in drawn], strict=True))

    async def _random_values(self, count: int, random: Random) -> Sequence[tuple[float, bytes]]:
        """Return score and value of runs in which about so many blocks lie, or of all."""
        sizes = await self._client.execute([(b"ZCARD", tag.order) for tag in self._tags])
        ends = list(accumulate(sizes))
        found: list[tuple[float, bytes]] = []
        places, size = random.sample(range(ends[-1]), min(count, ends[-1])), -(-count // MOST_BLOCKS)
        while places and sum(len(keys_of(value)) for _, value in found) < _KEY_BYTES * count:
            found += await self._values_at(places[:size], ends)
            places, size = places[size:], 2 * size  # runs may be of a block each
        return found

    async def _values_at(self, places: Iterable[int], ends: Sequence[int]) -> list[tuple[float, bytes]]:
        """Return score and value of runs, each a rank in a tag; the ranks of all tags are counted one after the
        other."""
        ranks: defaultdict[int, list[int]] = defaultdict(list)
        for place in sorted(places):
            tag = bisect_right(ends, place)
            ranks[tag].append(place - (ends[tag - 1] if tag else 0))
        parts = [(self._tags[tag], some) for tag, of_tag in ranks.items() for some in _cut(of_tag, _MOST_RUNS_PER_CALL)]
        answers = await self._run([ScriptCall(SAMPLE_RUNS, [tag.order, tag.runs], some) for tag, some in parts])
        return [pair for answer in answers for pair in zip(map(float, answer[::2]), answer[1::2], strict=True)]

    # Changes.

    @staged("store", "redis_runs.py:write_many")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        with timed("meta_searcher.index_serialize_time_us"):
            parts = [part for tag, some in self._changes_by_tag(changes) for part in self._calls(tag, _groups(some))]
        answers = await self._run([part.call for part in parts])
        return self._settled(parts, answers)

    @staged("store", "redis_runs.py:change_runs")
    async def change_runs(self, changes: Sequence[RunChange]) -> Written:
        groups: defaultdict[int, list[_Group]] = defaultdict(list)
        tags = shards_of([run.keys[0] for run, _ in changes], len(self._tags))
        for tag, (run, locations) in zip(tags, changes, strict=True):
            groups[tag].append(_group_of_run(run, locations))
        parts = [part for tag, some in groups.items() for part in self._calls(tag, some)]
        return self._settled(parts, await self._run([part.call for part in parts]))

    def begin(self, run: BlockRun) -> None:
        """Records are added in Redis, by `write_many` and `stage_begin`."""

    def serve(self, keys: Sequence[int], ending: FinishRun) -> None:
        """Records are changed in Redis, by `write_many` and `stage_serve`."""

    def retire(self, keys: Sequence[int], ending: FinishRun) -> None:
        """Records are changed in Redis, by `write_many` and `change_runs`."""

    def stage_begin(self, runs: Sequence[BlockRun]) -> StagedChange:
        groups: defaultdict[int, list[_Group]] = defaultdict(list)
        with timed("meta_searcher.index_serialize_time_us"):
            for run in runs:
                for tag, group in self._beginnings(run):
                    groups[tag].append(group)
        parts = [part for tag, some in groups.items() for part in self._calls(tag, some)]
        calls = [part.call for part in parts]
        return StagedChange(self._client, calls, lambda answers: self._settled(parts, answers))

    def stage_serve(self, runs: Sequence[tuple[UniformRun, UniformRun]]) -> StagedChange:
        groups: defaultdict[int, list[_Group]] = defaultdict(list)
        for before, after in runs:
            for tag, group in self._servings(before, after):
                groups[tag].append(group)
        parts = [part for tag, some in groups.items() for part in self._calls(tag, some, SERVE)]

        def settle(answers: Sequence[Any]) -> Written:
            lost: list[int] = []
            for part, answer in zip_longest(parts, answers):
                keys = [key for group in part.groups for key in group.keys]
                lost += keys if answer is None else part.lost(answer[1:])
            return Written(lost, {})

        return StagedChange(self._client, [part.call for part in parts], settle)

    def _beginnings(self, run: BlockRun) -> Iterator[tuple[int, _Group]]:
        """Yield the groups of a run that begins, with their tags."""
        location = run.location
        sums = {Sum(location.place, is_deleting=False): location.size_bytes} if location.size_bytes else {}
        score, due = whole_seconds(location.written_at) + RETIRED, float(location.deadline)
        document = _Document(
            _ABSENT,
            is_run=True,
            headers=None,
            stamp=b"",
            score=score,
            due=due,
            sums=sums,
            is_resident=False,
            becomes_resident=False,
        )
        if len(self._tags) == 1:
            for begin in range(0, len(run.keys), MOST_BLOCKS):
                part = run.cut(begin, min(begin + MOST_BLOCKS, len(run.keys)))
                yield 0, _Group(part.keys, 1, encode_run(part), document)
            return
        records = run.records()
        for tag, positions in self._by_tag(run.keys).items():
            for some in _cut(positions, MOST_BLOCKS):
                keys = [run.keys[i] for i in some]
                content = encode_blocks(keys, [records[i] for i in some])
                yield tag, _Group(keys, 1, content, document)

    def _servings(self, before: UniformRun, after: UniformRun) -> Iterator[tuple[int, _Group]]:
        """Yield the groups of a run that comes to serve, with their tags."""
        location = after.location
        expected, headers = encode_headers([before.location]), encode_headers([location])
        score, due = whole_seconds(location.written_at), float(location.deadline) if location.deadline else False
        bodies = None if after.chunks is before.chunks else after.chunks
        was_resident = before.location.status is LocationStatus.SERVING
        for tag, positions in self._by_tag(before.keys).items():
            for some in _cut(positions, MOST_BLOCKS):
                keys = [before.keys[i] for i in some]
                new_bodies = [bodies[i] for i in some] if bodies is not None else None
                document = _Document(
                    expected=expected,
                    is_run=False,
                    headers=headers,
                    stamp=new_run_stamp(),
                    score=score,
                    due=due,
                    sums={},
                    is_resident=was_resident,
                    becomes_resident=not was_resident,
                    bodies=new_bodies,
                )
                yield tag, _Group(keys, 0, join_keys(keys), document)

    def _calls(self, tag: int, groups: Sequence[_Group], script: Script | None = None) -> Iterator[_TagChange]:
        """Yield the calls that change groups of one tag."""
        names = self._tags[tag]
        per_call = _MOST_BLOCKS_PER_CALL // MOST_BLOCKS
        for some in _cut(groups, per_call):
            chosen = script or (CHANGE if any(group.growth > 0 for group in some) else SHRINK)
            documents = [group.document.numbered(at) for at, group in enumerate(some, 4)]
            contents = [group.content for group in some]
            arguments: list[Argument] = [_encode(documents), int(chosen.guards), self._move, *contents]
            measure("meta_indexer.io_data_size", sum(len(group.content) for group in some))
            load = sum(len(group.keys) for group in some) * MOST_KEYS_PER_SCRIPT // _MOST_BLOCKS_PER_CALL
            yield _TagChange(tag, some, ScriptCall(chosen, names, arguments, load))

    def _settled(self, parts: Sequence[_TagChange], answers: Sequence[Any]) -> Written:
        lost: list[int] = []
        usage: Counter[StorageKey] = Counter()
        for part, answer in zip_longest(parts, answers):
            if answer is None:  # did not run
                lost += [key for group in part.groups for key in group.keys]
                continue
            turn, *indexes = answer
            losers = part.lost(indexes)
            lost += losers
            sums, count = part.totals(set(losers))
            for of, size in sums.items():
                if of.place is not None and not of.is_deleting:
                    usage[of.place] += size
            self._sums.record(part.tag, turn, sums, count)
        return Written(lost, usage)

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        await self._rescore(TOUCH, counts, at, "move" if moves else "stay")

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        await self._rescore(REQUEUE, counts, at, "set")

    async def _rescore(self, script: Script, counts: Mapping[int, int], at: float, how: str) -> None:
        # Reads are recorded tail first, runs lie head first: that is how the script looks blocks up fastest.
        keys = list(counts)[::-1]
        numbers = set(counts.values())
        only = numbers.pop() if len(numbers) == 1 else None
        while keys:
            parts = list(self._parts(keys, _MOST_KEYS_PER_TOUCH))
            calls = []
            for tag, positions, members in parts:
                reads = _encode([counts[keys[i]] for i in positions] if only is None else only)
                calls.append(ScriptCall(script, tag, [int(at), how, members, reads, _MOST_RUNS_CUT]))
            answers = await self._run(calls)
            left = unpack_keys(key for answer in answers for key in answer[1:])
            for (_, positions, _), (visited, *_) in zip(parts, answers, strict=True):
                left += [keys[i] for i in positions[visited:]]
            keys = left

    async def drop(self) -> None:
        left = self._tags
        while left:
            sizes = await self._client.run([ScriptCall(DROP, tag, [_MOST_RUNS_PER_CALL, self._move]) for tag in left])
            left = [tag for tag, size in zip(left, sizes, strict=True) if size]
        self._sums.clear()

    # Moves to another store (`StoreMoves`).

    async def set_fence(self, fence: Fence) -> None:
        """Set the fence of every tag, as the move that this backend is for.

        Raises:
            BlocksMovedError: a later move was here.
        """
        seconds = _LEFT_SECONDS if fence is Fence.LEFT else 0
        await self._client.run([ScriptCall(SET_FENCE, [tag.fence], [self._move, fence, seconds]) for tag in self._tags])

    async def lift_fence(self, move: int) -> None:
        """Let changes go on that a move keeps waiting which has ended."""
        await self._client.run([ScriptCall(LIFT_FENCE, [tag.fence], [move]) for tag in self._tags])

    async def listing(self, most: int) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield stamp and keys, as they are stored, of every run, so many at a time. A run that is cut meanwhile may
        come twice, whole and in parts; one that comes meanwhile may be missing."""
        for number, tag in enumerate(self._tags):
            before = await self._newest_run(tag)
            async for ids in self._run_ids(tag, most):
                yield await self._listed(tag, ids)
            newer = range(before + 1, 1 + await self._newest_run(tag))
            for some in _cut(newer, most):
                yield await self._listed(tag, [(number << _TAG_SHIFT | each).to_bytes(_KEY_BYTES) for each in some])

    async def _listed(self, tag: TagKeys, ids: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        (runs,) = await self._client.run([ScriptCall(LISTING, [tag.runs], ids)])
        return [(run[:STAMP_SIZE], run[STAMP_SIZE:]) for run in runs if run]

    async def _newest_run(self, tag: TagKeys) -> int:
        (newest,) = await self._client.execute([(b"HGET", tag.usage, b"@")])
        return int(newest or 0)

    async def _run_ids(self, tag: TagKeys, most: int) -> AsyncIterator[Sequence[bytes]]:
        """Yield the ids of all runs; of those that come or go meanwhile maybe some."""
        cursor: Any = None
        while cursor != b"0":
            scan = (b"ZSCAN", tag.order, cursor or b"0", b"COUNT", most)
            ((cursor, found),) = await self._client.execute([scan])
            for ids in _cut(list(dict.fromkeys(found[::2])), most):
                yield ids

    async def _run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        return [answer for some in _cut(calls, _MOST_CALLS_AT_ONCE) for answer in await self._client.run(some)]

    def _by_tag(self, keys: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Return the positions of keys by tag."""
        if len(self._tags) == 1:
            return {0: range(len(keys))} if keys else {}
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for position, tag in enumerate(shards_of(keys, len(self._tags))):
            groups[tag].append(position)
        return groups

    def _parts(self, keys: Sequence[int], most: int) -> Iterator[tuple[TagKeys, Sequence[int], bytes]]:
        """Yield tags with positions of keys for one call, and the keys as the server has them, one after the other."""
        joined = join_keys(keys)
        for tag, positions in self._by_tag(keys).items():
            of_tag = joined
            if len(positions) < len(keys):
                of_tag = np.frombuffer(joined, np.int64)[positions].tobytes()
            for begin in range(0, len(positions), most):
                part = positions[begin : begin + most]
                yield self._tags[tag], part, of_tag[_KEY_BYTES * begin : _KEY_BYTES * (begin + len(part))]

    def _changes_by_tag(self, changes: Sequence[Change]) -> Iterator[tuple[int, Sequence[Change]]]:
        for tag, positions in self._by_tag([change.key for change in changes]).items():
            yield tag, [changes[i] for i in positions]


def _draw(runs: int, random: Random) -> tuple[int, int]:
    """Return the rank of a run and a position in it."""
    return random.randrange(runs), random.randint(1, MOST_BLOCKS)


def _text(content: bytes) -> msgspec.Raw:
    """Return bytes as msgpack has texts: Lua in the server knows no other type of bytes."""
    size = len(content)
    if size < 1 << 5:
        return msgspec.Raw(bytes((0xA0 | size,)) + content)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4) + content)


# Changes of blocks one by one, in groups that change alike.


def _groups(changes: Sequence[Change]) -> list[_Group]:
    """Return the groups of changes of one tag."""
    by_kind: defaultdict[tuple[Any, ...], list[Change]] = defaultdict(list)
    for change in changes:
        by_kind[_kind_of(change)].append(change)
    return [
        _group(kind, some)
        for kind, members in by_kind.items()
        for some in _cut(sorted(members, key=_depth_of), MOST_BLOCKS)
    ]


def _kind_of(change: Change) -> tuple[Any, ...]:
    """Return what changes of one group have in common: the expected stamp, whether the columns stay, and headers."""
    _, old, new, _ = change
    expected = _ABSENT if old is None else getattr(old, "stamp", b"") or _UNKNOWN
    before = _headers(old) if old is not None else None
    if new is None:
        return expected, False, before, None
    return expected, not _keeps_columns(old, new), before, _headers(new)


def _headers(record: BlockRecord) -> tuple[tuple[Any, ...], ...]:
    return tuple(location[:5] + location[6:] for location in record[2])


def _keeps_columns(old: BlockRecord | None, new: BlockRecord) -> bool:
    if old is None or old[0] != new[0] or old[1] != new[1] or len(old[2]) != len(new[2]):
        return False
    return all(before[5] == after[5] for before, after in zip(old[2], new[2], strict=True))


def _depth_of(change: Change) -> int:
    """Return the order of blocks in a run."""
    record = change.new or change.old
    return record[1] if record is not None else 0


def _group(kind: tuple[Any, ...], changes: Sequence[Change]) -> _Group:
    expected, is_run, *_ = kind
    _, old, new, _ = changes[0]
    keys = [change.key for change in changes]
    if not is_run:
        return _change_in_place(expected, keys, old, new)
    assert new is not None
    content = encode_blocks(keys, [change.new for change in changes if change.new is not None])
    was_resident = old is not None and is_resident(old)
    document = _Document(
        expected,
        is_run=True,
        headers=None,
        stamp=b"",
        score=new_score(old, new),
        due=_due_of(new),
        sums=_sums_of_change(old, new),
        is_resident=was_resident,
        becomes_resident=not was_resident and is_resident(new),
    )
    return _Group(keys, 1 - (old is not None), content, document)


def _group_of_run(run: StoredRun, locations: tuple[Location, ...]) -> _Group:
    old = BlockRecord(None, run.depth, run.locations)
    new = BlockRecord(None, run.depth, locations) if locations else None
    return _change_in_place(run.stamp, run.keys, old, new)


def _change_in_place(stamp: bytes, keys: Sequence[int], old: BlockRecord | None, new: BlockRecord | None) -> _Group:
    """Return a change of all locations but for their chunks, or the removal of blocks.

    Args:
        stamp: of the blocks.
        keys: of the blocks.
        old, new: records of one of them.
    """
    document = _Document(
        stamp,
        is_run=False,
        headers=encode_headers(new[2]) if new is not None else b"",
        stamp=new_run_stamp() if new is not None else b"",
        score=new_score(old, new),
        due=_due_of(new),
        sums=_sums_of_change(old, new),
        is_resident=(was_resident := old is not None and is_resident(old)),
        becomes_resident=not was_resident and new is not None and is_resident(new),
    )
    return _Group(keys, (new is not None) - (old is not None), join_keys(keys), document)


def _due_of(record: BlockRecord | None) -> float | bool:
    due = record.due if record is not None else None
    return float(due) if due is not None else False


def _sums_of_change(old: BlockRecord | None, new: BlockRecord | None) -> Mapping[Sum, int]:
    tally = PlaceTally()
    tally.change(old, new)
    return sums_of(tally.used, tally.deleting, tally.deleting_blocks)


def _every_other(relations: bytes) -> list[int]:
    """Return the mixed children of relations in a row."""
    children = [relations[at : at + _KEY_BYTES] for at in range(_KEY_BYTES, len(relations), 2 * _KEY_BYTES)]
    return mixed([int.from_bytes(child, signed=True) for child in children])


def _cut(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
