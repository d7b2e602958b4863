"""Records in a Redis or Valkey that several managers share.

Keys of one lock shard of one instance share a hash tag, hence a slot of a cluster; `P` is the name of the deployment::

    P:b{uid.shard} + key    block record: version, stamp, body (index/codec.py)
    P:z{uid.shard}          access order: key -> time and number of reads
    P:c{uid.shard}          children: parent + child of the children that lie in this shard, all of score 0
    P:p{uid.shard}          pending: key -> when a session expires or bytes may go
    P:u{uid.shard}          usage: type/storage -> bytes, -type/storage -> those that are being deleted;
                            - -> blocks of which everything is being deleted; # -> number of writes

Keys of blocks are 8 bytes, big endian. Invariants:

1. All five change in one Lua call, so a crash at any point leaves them in agreement (invariant 4 of the design).
2. A record changes only where its stamp still is the one that was read: of several managers one wins, the others
   lose and read again.
3. A request to a shard costs one command or one call of a script, whatever the number of keys; there is no
   waiting per key. A batch is cut, so that no call holds up the server for more than about a millisecond.
4. Whatever changes pending or usage changes a record of the same shard (repairs change a key beside the records). So
   while invalidations arrive, a manager knows that both are as it read them, and an instance that does not change
   costs no command.

Rejected: WATCH and MULTI (a connection of its own and two round trips per attempt); sets of children beside the parent
(its shard lies on another node); one value per parent that holds its children (a system prompt has 100,000 of them, and
each new one would be a copy of the value); ZRANDMEMBER (only about fair, and without a seed).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import zip_longest
from random import Random
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from kvcm.index.backends.backend import (
    NOTHING_WRITTEN,
    Access,
    Change,
    FinishRun,
    RowObserver,
    StagedChange,
    Sum,
    UniformRun,
    Written,
    is_leaving,
    is_resident,
    stored_at,
    takes_the_same,
    whole_seconds,
)
from kvcm.index.codec import (
    STAMP_SIZE,
    decode_records,
    encode_chunk_of,
    encode_header,
    encode_record,
    encode_records,
    new_stamp,
)
from kvcm.index.locking import shards_of
from kvcm.model.errors import KvcmError
from kvcm.model.keys import join_keys, mixed, pack_keys, unpack_keys
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import MOST_KEYS_PER_SCRIPT, Argument, RedisClient, Script, ScriptCall
from kvcm.store.redis.due_sets import DueSets
from kvcm.store.redis.tracking import Revisions, owner_of
from kvcm.store.store import Revision, StoreGate
from kvcm.telemetry.metrics import measure, timed
from kvcm.telemetry.tracing import staged

__all__ = [
    "KEY",
    "RELATION",
    "REQUEUE",
    "RETIRED",
    "SAMPLE",
    "WRITE",
    "BlockKeys",
    "Placed",
    "RedisBackend",
    "ShardKeys",
    "SharedCounts",
    "SharedSums",
    "access_of",
    "first_score",
    "is_retired",
    "merged",
    "new_score",
    "totals_of",
]

# Names of what an index keeps in Redis (docs/metadata.md): all keys of a lock shard share one hash tag.

KEY: Final = Struct(">q")
"""A block key as part of a name and as a member of the sorted sets; not mixed (kvcm/model/keys.py)."""
RELATION: Final = Struct(">qq")
"""Parent and child, as a member of the sorted set of children."""
_MOST_HEADS: Final = 1 << 16


class ShardKeys(NamedTuple):
    """Names of the keys of one lock shard; `blocks` is what its records' names begin with."""

    blocks: bytes
    order: bytes
    children: bytes
    pending: bytes
    usage: bytes

    @classmethod
    def of(cls, deployment: str, uid: int, shard: int) -> ShardKeys:
        """Return the names for a shard of an instance's registration."""
        return cls(*(f"{deployment}:{kind}{{{uid}.{shard}}}".encode() for kind in "bzcpu"))

    def block(self, key: int) -> bytes:
        """Return the name of a block's record."""
        return self.block_of(*pack_keys((key,)))

    def block_of(self, member: bytes) -> bytes:
        """Return the name of the record of a member of the sorted sets."""
        return self.blocks + member


class BlockKeys:
    """The records of one deployment.

    Attributes:
        prefix: what the names of all of them begin with.

    Args:
        deployment: name that every key of the deployment begins with.
    """

    def __init__(self, deployment: str) -> None:
        self.prefix = f"{deployment}:b{{".encode()
        self._match = re.compile(re.escape(self.prefix) + rb"(\d{1,19})\.\d{1,19}\}").fullmatch
        self._uids: dict[bytes, int | None] = {}  # by the beginnings of names, of which each shard has one

    def by_head(self, names: Iterable[bytes]) -> dict[bytes, list[bytes]]:
        """Return what the names end with, keys of blocks, by what they begin with: the same for a shard.
        Every manager does this for each change of a block, so a name costs two slices and one lookup."""
        members: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for name in names:
            members[name[: -KEY.size]].append(name[-KEY.size :])
        return members

    def by_uid(self, heads: Mapping[bytes, Sequence[bytes]]) -> dict[int, list[bytes]]:
        """Return the same members by uid, without those of names that only begin like one of a record."""
        found: dict[int, list[bytes]] = {}
        for head, members in heads.items():
            uid = self._uids[head] if head in self._uids else self._parse(head)
            if uid is not None:
                found.setdefault(uid, []).extend(members)
        return found

    def _parse(self, head: bytes) -> int | None:
        found = self._match(head)
        if len(self._uids) >= _MOST_HEADS:
            self._uids.clear()
        self._uids[head] = uid = int(found[1]) if found is not None else None
        return uid


# What changes in Redis at once: the Lua functions of the Redis backend, each over the keys of one shard tag.
#
# A call of the server from Lua costs more than the work it does, so every function reads all with one command,
# decides, and writes with one command per kind of key. Nothing can fail after the first write: the server refuses a
# function for lack of memory at its first write or not at all, and every key has one type.
#
# A server that is full refuses WRITE and TOUCH, and runs REWRITE and REQUEUE: blocks that are there can be picked,
# marked, decided and removed, which frees memory. No command here reads or writes more than the blocks of its
# call, however many siblings they have; only FAMILIES reads the requested ones.

RETIRED: Final = 1 << 33
"""Added to the scores of blocks without a serving location, so that those that can be evicted stand before them."""
_WRITE: Final = """
-- KEYS: access order, children, pending, usage, then the block records.
-- ARGV[1]: 8 bytes per block, the stamp that its record must have; zeros: there must be none.
-- ARGV[2]: packed {score: number to set, true to retire the block, false to leave it;
--                  due time: number to set, true to clear, false to leave;
--                  blocks that leave a parent; blocks that come to a parent: indexes;
--                  fields of usage;
--                  usage: {index, number of the field, bytes or blocks, index, ...}}.
-- ARGV[3], ARGV[4]: 8 bytes per block that leaves and per block that comes: the parent.
-- ARGV[5...]: the records to store, empty to remove.
-- Returns the turn of the shard that this call is, 0 when all blocks lost, then the indexes of blocks whose record had
-- another stamp.
local order, children, pending, usage = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local scores, dues, leaving, coming, fields, bytes = unpack(cmsgpack.unpack(ARGV[2]))
local won, lost = {}, {}

local function eight(text, n) return string.sub(text, n * 8 - 7, n * 8) end

local function call(command, key, list)
  if #list > 0 then redis.call(command, key, unpack(list)) end
end

local function compare(held)
  for i = 1, #held do
    local stamp = held[i] and string.sub(held[i], 2, 9) or '\\0\\0\\0\\0\\0\\0\\0\\0'
    if stamp == eight(ARGV[1], i) then
      won[i] = string.sub(KEYS[4 + i], -8)
    else
      lost[#lost + 1] = i
    end
  end
end

local function write(held)
  local stored, removed, forgotten = {}, {}, {}
  for i, member in pairs(won) do
    if ARGV[4 + i] ~= '' then
      stored[#stored + 1] = KEYS[4 + i]
      stored[#stored + 1] = ARGV[4 + i]
    elseif held[i] then
      removed[#removed + 1] = KEYS[4 + i]
      forgotten[#forgotten + 1] = member
    end
  end
  if #stored > 0 then redis.call('MSET', unpack(stored)) end
  if #removed > 0 then redis.call('UNLINK', unpack(removed)) end
  call('ZREM', order, forgotten)
end

local function retire(members, ordered)
  if #members == 0 then return end
  for n, score in ipairs(redis.call('ZMSCORE', order, unpack(members))) do
    score = tonumber(score)
    if score and score < 8589934592 then
      ordered[#ordered + 1] = score + 8589934592
      ordered[#ordered + 1] = members[n]
    end
  end
end

local function schedule()
  local ordered, retiring, due, done = {}, {}, {}, {}
  for i, member in pairs(won) do
    if scores[i] == true then
      retiring[#retiring + 1] = member
    elseif scores[i] then
      ordered[#ordered + 1] = scores[i]
      ordered[#ordered + 1] = member
    end
    if dues[i] == true then
      done[#done + 1] = member
    elseif dues[i] then
      due[#due + 1] = dues[i]
      due[#due + 1] = member
    end
  end
  retire(retiring, ordered)
  call('ZADD', order, ordered)
  call('ZADD', pending, due)
  call('ZREM', pending, done)
end

local function relate()
  local left, joined = {}, {}
  for n, i in ipairs(leaving) do
    if won[i] then left[#left + 1] = eight(ARGV[3], n) .. won[i] end
  end
  for n, i in ipairs(coming) do
    if won[i] then
      joined[#joined + 1] = 0
      joined[#joined + 1] = eight(ARGV[4], n) .. won[i]
    end
  end
  call('ZREM', children, left)
  call('ZADD', children, joined)
end

local function count()
  local totals = {}
  for n = 1, #bytes, 3 do
    if won[bytes[n]] then totals[bytes[n + 1]] = (totals[bytes[n + 1]] or 0) + bytes[n + 2] end
  end
  for field, total in pairs(totals) do
    if total ~= 0 then redis.call('HINCRBY', usage, fields[field], string.format('%.0f', total)) end
  end
end

local held = redis.call('MGET', unpack(KEYS, 5))
compare(held)
write(held)
schedule()
relate()
count()
if next(won) == nil then return {0, unpack(lost)} end
return {redis.call('HINCRBY', usage, '#', 1), unpack(lost)}
"""
_BEGIN: Final = Script(
    """
-- KEYS: access order, children, pending, usage, then the records of blocks, none of which should be there.
-- ARGV[1]: score; ARGV[2]: due time; ARGV[3]: field of usage; ARGV[4]: bytes of a block;
-- ARGV[5]: 8 bytes per block, its parent; ARGV[6]: index of the block that has none, or 0;
-- ARGV[7...]: the records.
-- Returns the same as the script that writes.
local score, due, headless = ARGV[1], ARGV[2], tonumber(ARGV[6])
local stored, ordered, waiting, joined, lost = {}, {}, {}, {}, {}
local last = 0
for i, held in ipairs(redis.call('MGET', unpack(KEYS, 5))) do
  if held then
    lost[#lost + 1] = i
  else
    local name = KEYS[4 + i]
    local member = string.sub(name, -8)
    last = last + 2
    stored[last - 1], stored[last] = name, ARGV[6 + i]
    ordered[last - 1], ordered[last] = score, member
    waiting[last - 1], waiting[last] = due, member
    if i ~= headless then
      joined[#joined + 1] = 0
      joined[#joined + 1] = string.sub(ARGV[5], i * 8 - 7, i * 8) .. member
    end
  end
end
if last == 0 then return {0, unpack(lost)} end
redis.call('MSET', unpack(stored))
redis.call('ZADD', KEYS[1], unpack(ordered))
redis.call('ZADD', KEYS[3], unpack(waiting))
if #joined > 0 then redis.call('ZADD', KEYS[2], unpack(joined)) end
redis.call('HINCRBY', KEYS[4], ARGV[3], string.format('%.0f', last / 2 * ARGV[4]))
return {redis.call('HINCRBY', KEYS[4], '#', 1), unpack(lost)}
""",
    creates=True,
)
_SERVE: Final = Script(
    """
-- KEYS: access order, pending, then the records of blocks that were being written.
-- ARGV[1], ARGV[2]: header of their only location before and after; ARGV[3]: version and new stamp; ARGV[4]: score;
-- ARGV[5]: due time or ''; ARGV[6...]: new chunks, or none.
-- Returns 1, or 0 and the indexes of the blocks that are something else, which stay as they are.
local before, after, stamp, score, due = unpack(ARGV, 1, 5)
local stored, ordered, waiting, done, others = {}, {}, {}, {}, {}
local last = 0
for i, held in ipairs(redis.call('MGET', unpack(KEYS, 3))) do
  -- One location: the version, a stamp of 8 bytes, an array of four.
  local is_one = held and string.byte(held) == string.byte(stamp) and string.byte(held, 10) == 148
  local at = is_one and string.find(held, before, 11, true)
  if at then
    local name = KEYS[2 + i]
    local member = string.sub(name, -8)
    last = last + 2
    stored[last - 1] = name
    stored[last] = stamp .. string.sub(held, 10, at - 1) .. after .. (ARGV[5 + i] or string.sub(held, at + #before))
    ordered[last - 1], ordered[last] = score, member
    waiting[last - 1], waiting[last] = due, member
    done[last / 2] = member
  else
    others[#others + 1] = i
  end
end
if last > 0 then
  redis.call('MSET', unpack(stored))
  redis.call('ZADD', KEYS[1], unpack(ordered))
  if due ~= '' then redis.call('ZADD', KEYS[2], unpack(waiting)) else redis.call('ZREM', KEYS[2], unpack(done)) end
end
return {#others == 0 and 1 or 0, unpack(others)}
""",
    allow_oom=True,
    guards=True,
)
WRITE: Final = Script(_WRITE, creates=True)
_REWRITE: Final = Script(_WRITE, allow_oom=True)
_TOUCH: Final = Script("""
-- KEYS: access order. ARGV: unix seconds, 1 if they are set, then key and number of reads of every block read.
local members, counts = {}, {}
for i = 3, #ARGV, 2 do
  members[#members + 1] = ARGV[i]
  counts[#counts + 1] = tonumber(ARGV[i + 1])
end
local at = ARGV[2] == '1' and tonumber(ARGV[1]) or 0
local changed = {}
for n, score in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(members))) do
  score = tonumber(score)
  if score then
    local retired = score < 8589934592 and 0 or 8589934592
    local seconds = math.floor(score) - retired
    local reads = math.floor((score % 1) * 4096 + 0.5) + counts[n]
    changed[#changed + 1] = retired + math.max(seconds, at) + math.min(reads, 4095) / 4096
    changed[#changed + 1] = members[n]
  end
end
if #changed > 0 then redis.call('ZADD', KEYS[1], unpack(changed)) end
""")
_REQUEUE: Final = """
-- KEYS: access order. ARGV: unix seconds, then key and number of reads of every block.
local members, scores = {}, {}
for i = 2, #ARGV, 2 do
  members[#members + 1] = ARGV[i]
  scores[#scores + 1] = tonumber(ARGV[1]) + math.min(tonumber(ARGV[i + 1]), 4095) / 4096
end
local changed = {}
for n, score in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(members))) do
  if score and tonumber(score) < 8589934592 then
    changed[#changed + 1] = scores[n]
    changed[#changed + 1] = members[n]
  end
end
if #changed > 0 then redis.call('ZADD', KEYS[1], unpack(changed)) end
"""
REQUEUE: Final = Script(_REQUEUE, allow_oom=True)
_FAMILIES: Final = Script("""
-- KEYS: children. ARGV: 8 bytes per parent. Returns for each what stands of its family, one relation after the other.
local families = {}
for at = 1, #ARGV[1], 8 do
  local parent = string.sub(ARGV[1], at, at + 7)
  local first, last = '[' .. parent .. string.rep('\\0', 8), '[' .. parent .. string.rep('\\255', 8)
  families[#families + 1] = table.concat(redis.call('ZRANGEBYLEX', KEYS[1], first, last))
end
return families
""")
SAMPLE: Final = Script("""
-- KEYS: access order. ARGV: positions in it. Returns who stands there, none beyond the end.
local sample = {}
for _, position in ipairs(ARGV) do
  sample[#sample + 1] = redis.call('ZRANGE', KEYS[1], position, position)[1]
end
return sample
""")
_DROP: Final = Script("""
-- KEYS: access order, children, pending, usage, then block records, which stand in the access order.
-- Returns how many blocks are left; the rest goes with the last of them.
local members = {}
for i = 5, #KEYS do members[#members + 1] = string.sub(KEYS[i], -8) end
if #members > 0 then
  redis.call('UNLINK', unpack(KEYS, 5))
  redis.call('ZREM', KEYS[1], unpack(members))
end
local left = redis.call('ZCARD', KEYS[1])
if left == 0 then redis.call('UNLINK', unpack(KEYS, 1, 4)) end
return left
""")

# The access order of the Redis backend: one score says when a block was last read, how often, and whether it can be
# evicted.
#
# The score is unix seconds + min(reads, 4095) / 4096. That of a block without a serving location is greater by
# `RETIRED`, so that the blocks that can be evicted stand before all others, the coldest first.

_READS_PER_SECOND: Final = 4096
Placed = tuple[bytes, float]
"""A member of the order and its score."""


def access_of(score: float) -> Access:
    """Return the access that a score encodes."""
    seconds, reads = divmod(score, 1)
    return Access(int(seconds) % RETIRED, round(reads * _READS_PER_SECOND))


def is_retired(score: float) -> bool:
    """Return whether the block is one of those that cannot be evicted."""
    return score >= RETIRED


def first_score(record: BlockRecord) -> int:
    """Return the score of an unread block."""
    return whole_seconds(stored_at(record)) + (0 if is_resident(record) else RETIRED)


def new_score(old: BlockRecord | None, new: BlockRecord | None) -> int | bool:
    """Return the score that a change sets, True to retire the block, False to leave its score."""
    if new is None:
        return False
    if old is None:
        return first_score(new)
    if is_resident(new):
        return False if is_resident(old) else first_score(new)
    return is_resident(old)


def _touch_call(order: bytes, counts: Mapping[int, int], keys: Sequence[int], at: float, *, moves: bool) -> ScriptCall:
    """Return the call that records reads of some keys."""
    return ScriptCall(_TOUCH, [order], [int(at), int(moves), *_pairs(counts, keys)])


def _requeue_call(order: bytes, counts: Mapping[int, int], keys: Sequence[int], at: float) -> ScriptCall:
    """Return the call that sets the accesses of some keys."""
    return ScriptCall(REQUEUE, [order], [int(at), *_pairs(counts, keys)])


def _pairs(counts: Mapping[int, int], keys: Sequence[int]) -> list[Argument]:
    return [item for key, member in zip(keys, pack_keys(keys), strict=True) for item in (member, counts[key])]


def merged(answers: Sequence[Sequence[bytes]], count: int, requested: int) -> tuple[list[Placed], bool]:
    """Merge the beginnings of the orders of several shards.

    Args:
        answers: members and their scores by turns, per shard.
        count: how many are wanted.
        requested: how many were asked of every shard.

    Returns:
        The coldest of those that can be evicted, and whether no shard can hold a colder one behind its answer.
    """
    orders = [list(zip(answer[::2], map(float, answer[1::2]), strict=True)) for answer in answers]
    # Of equals one of each shard after the other: a call that asks for what comes behind begins equally far in each.
    evictable = (
        (placed[1], position, placed)
        for order in orders
        for position, placed in enumerate(order)
        if not is_retired(placed[1])
    )
    coldest = [placed for _, _, placed in nsmallest(count, evictable, key=lambda each: each[:2])]
    end = coldest[-1][1] if len(coldest) == count else RETIRED
    return coldest, all(len(order) < requested or order[-1][1] >= end for order in orders)


# The sums that the shards of a Redis keep, as one manager knows them.
#
# Sums are read now and then, and in between this manager adds its own writes. A write may be in flight while the sums
# are read, and the time alone does not say whether they include it: counted twice it looks like usage, and blocks are
# evicted for it. So every write takes a turn of its shard, a number
# that grows by one: it is in the sums exactly if its turn is not after theirs.

_TOTALS: Final = Script("""
-- KEYS: access order, usage. Returns how many blocks there are, and fields and values of the sums, at one moment.
return {redis.call('ZCARD', KEYS[1]), redis.call('HGETALL', KEYS[2])}
""")
_SEQUENCE_FIELD: Final = b"#"


def totals_of(shard: ShardKeys) -> ScriptCall:
    """Return the call that reads the sums of a shard."""
    return ScriptCall(_TOTALS, [shard.order, shard.usage])


Run = Callable[[Sequence[ScriptCall]], Awaitable[Sequence[Any]]]


class _Written(NamedTuple):
    """What a write of this manager changed."""

    shard: int
    sequence: int
    sums: Mapping[Sum, int]
    keys: int


class SharedSums:
    """Sums over all shards of an instance, as last read, with the later writes of this manager.

    Attributes:
        key_count: blocks.
        usage: bytes by place.
        deleting: those of them that are being deleted.
        deleting_keys: blocks of which everything is being deleted.

    Args:
        calls: for each shard the call that returns the number of its blocks, and fields and values of its sums.
    """

    def __init__(self, calls: Sequence[ScriptCall]) -> None:
        self._calls = calls
        self._one_at_a_time = asyncio.Lock()
        self._requested = self._reported = 0  # how often, and the number of the last time that was answered or failed
        self._trouble: KvcmError | None = None  # of that time
        self._during: list[_Written] | None = None  # writes while the sums are being read
        self.clear()

    def clear(self) -> None:
        """Reset: there are no blocks."""
        self._turns = [0] * len(self._calls)  # of the sums that were read last
        self.key_count = self.deleting_keys = 0
        self.usage: Counter[StorageKey] = Counter()
        self.deleting: Counter[StorageKey] = Counter()

    async def refresh(self, run: Run) -> None:
        """Read the sums. All calls during a read share the next one, or its failure: no queue forms behind a store that
        does not answer.

        Args:
            run: runs scripts on the store, and returns their answers in order.

        Raises:
            KvcmError: of `run`.
        """
        came = self._requested
        async with self._one_at_a_time:  # of two answers the older one could come last
            if self._reported <= came:
                await self._read(run)
            elif self._trouble is not None:
                raise self._trouble

    async def _read(self, run: Run) -> None:
        self._requested += 1
        during: list[_Written] = []
        self._during = during
        try:
            answers = await run(self._calls)
        except KvcmError as error:
            self._reported, self._trouble = self._requested, error
            raise
        finally:
            self._during = None
        self._reported, self._trouble = self._requested, None
        self.clear()
        for shard, (keys, fields) in enumerate(answers):
            self._merge(shard, keys, dict(zip(fields[::2], map(int, fields[1::2]), strict=True)))
        for written in during:
            self._count(written)

    def record(self, shard: int, turn: int, sums: Mapping[Sum, int], keys: int) -> None:
        """Count what this manager wrote.

        Args:
            shard: number of the shard.
            turn: of the write.
            sums: what it adds.
            keys: blocks that it adds.
        """
        written = _Written(shard, turn, sums, keys)
        self._count(written)
        if self._during is not None:
            self._during.append(written)

    def _merge(self, shard: int, keys: int, sums: dict[bytes, int]) -> None:
        self._turns[shard] = sums.pop(_SEQUENCE_FIELD, 0)
        self.key_count += keys
        for field, size in sums.items():
            self._add(Sum.parse(field.decode()), size)

    def _count(self, written: _Written) -> None:
        if written.sequence <= self._turns[written.shard]:
            return  # the read sums include it
        self.key_count += written.keys
        for of, size in written.sums.items():
            self._add(of, size)

    def _add(self, of: Sum | None, size: int) -> None:
        if of is None:
            return  # of another release
        if of.place is None:
            self.deleting_keys += size
        else:
            (self.deleting if of.is_deleting else self.usage)[of.place] += size


# A change of blocks of one shard, as arguments of the Lua functions.

_ABSENT = bytes(STAMP_SIZE)
_LEAVING = Sum(None, is_deleting=True)
_UNKNOWN = b"\xff" * STAMP_SIZE  # no write has this stamp
_encode = msgspec.msgpack.Encoder().encode


class _ShardWrite:
    """Changes of one shard as the script wants them.

    Attributes:
        changes: in the order of the script's indexes, which count from 1.
        sums: what every change adds to the sums of the shard.
        call: of the script.
    """

    def __init__(self, shard: ShardKeys, changes: Sequence[Change]) -> None:
        self.changes = changes
        self.sums = _Sums()
        self._scores: list[int | bool] = []
        self._dues: list[float | bool] = []
        self._leaving: list[int] = []
        self._coming: list[int] = []
        self._parents_left: list[int] = []
        self._parents_joined: list[int] = []
        for index, (_, old, new, _) in enumerate(changes, 1):
            self._scores.append(new_score(old, new))
            self._dues.append(_due_order(old, new))
            self._relate(index, old, new)
            self.sums.count(index, old, new)
        is_growth = any(old is None and new is not None for _, old, new, _ in changes)
        self.call = ScriptCall(WRITE if is_growth else _REWRITE, self._keys(shard), self._arguments())

    def _keys(self, shard: ShardKeys) -> list[bytes]:
        return [*shard[1:], *map(shard.block_of, pack_keys([change[0] for change in self.changes]))]

    def _arguments(self) -> list[bytes]:
        relations = (self._leaving, self._coming)
        packed = _encode((self._scores, self._dues, *relations, self.sums.fields, self.sums.triples))
        parents = (join_keys(self._parents_left), join_keys(self._parents_joined))
        with timed("meta_searcher.index_serialize_time_us"):
            records = [b"" if change.new is None else encode_record(change.new) for change in self.changes]
        measure("meta_indexer.io_data_size", sum(map(len, records)))
        return [b"".join([_stamp(change.old) for change in self.changes]), packed, *parents, *records]

    def _relate(self, index: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        before = old.parent if old is not None else None
        after = new.parent if new is not None else None
        if before == after:
            return
        if before is not None:
            self._leaving.append(index)
            self._parents_left.append(before)
        if after is not None:
            self._coming.append(index)
            self._parents_joined.append(after)


class _Sums:
    """What the changes of one call add to the sums that the shard keeps.

    Attributes:
        fields: names of the sums.
        triples: index of a change, number of a field, bytes or blocks; again and again. Both count from 1.
    """

    def __init__(self) -> None:
        self._sums = [_LEAVING]
        self.fields = [_LEAVING.field]
        self.triples: list[int] = []
        self._first_fields: dict[StorageKey, int] = {}  # the next field is that of the blocks being deleted
        self._storage: str | None = None
        self._type: StorageType | None = None
        self._field = 0

    def count(self, index: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        """Count what a change adds."""
        before = old[2] if old is not None else ()
        after = new[2] if new is not None else ()
        if takes_the_same(before, after):
            return
        for location in after:
            self._add(index, location, location[6])
        for location in before:
            self._add(index, location, -location[6])
        leaving = (new is not None and is_leaving(new)) - (old is not None and is_leaving(old))
        if leaving:
            self.triples += (index, 1, leaving)

    def totals(self, losers: Collection[int]) -> dict[Sum, int]:
        """Return what all changes but some add together."""
        totals = [0] * len(self._sums)
        triples = self.triples
        for index, field, size in zip(triples[::3], triples[1::3], triples[2::3], strict=True):
            if index not in losers:
                totals[field - 1] += size
        return {of: total for of, total in zip(self._sums, totals, strict=True) if total}

    def _add(self, index: int, location: Location, size_bytes: int) -> None:
        if location[1] is not self._storage or location[2] is not self._type:
            self._turn_to(location)
        self.triples += (index, self._field, size_bytes)
        if location[3] is LocationStatus.DELETING:
            self.triples += (index, self._field + 1, size_bytes)

    def _turn_to(self, location: Location) -> None:
        # As in `PlaceTally`: blocks in a row mostly lie in one place, and hashing it is what costs.
        place = location.place
        if place not in self._first_fields:
            self._first_fields[place] = len(self._sums) + 1
            self._sums += (Sum(place, is_deleting=False), Sum(place, is_deleting=True))
            self.fields += (of.field for of in self._sums[-2:])
        self._storage, self._type, self._field = location[1], location[2], self._first_fields[place]


class _Beginning(NamedTuple):
    """Blocks of one shard that begin to be written together.

    Attributes:
        call: of the script.
        shard: number of the shard.
        keys: of the blocks, in the order of the script's indexes, which count from 1.
        place: where they go.
        size_bytes: of each.
    """

    call: ScriptCall
    shard: int
    keys: Sequence[int]
    place: StorageKey
    size_bytes: int


def _stamp(old: BlockRecord | None) -> bytes:
    return _ABSENT if old is None else getattr(old, "stamp", b"") or _UNKNOWN


def _due_order(old: BlockRecord | None, new: BlockRecord | None) -> float | bool:
    """Return the due time to set, True to clear it, False to leave it."""
    due = new.due if new is not None else None
    if due is not None:
        return float(due)
    return old is not None and old.due is not None


_MOST_KEYS_PER_CALL: Final = 256
_MOST_STAGED_KEYS: Final = MOST_KEYS_PER_SCRIPT - 6  # with the keys of the shard, and of the document before them
_MOST_CALLS_AT_ONCE: Final = 32
_MOST_KEYS_PER_READ: Final = 4096
_FIRST_MEMBER, _LAST_MEMBER = bytes(KEY.size), b"\xff" * KEY.size  # as the server orders bytes
_Item = TypeVar("_Item")


class SharedCounts:
    """The part of a backend that knows sums and due times of the blocks in Redis without asking.

    Args:
        client: the store.
        pending: when something is due of blocks.
        sums: over them.
    """

    awaits = True
    is_shared = True
    ends_at_miss = False
    most_touched = 1024
    has_runs = False

    def __init__(self, client: RedisClient, pending: DueSets, sums: SharedSums) -> None:
        self._client = client
        self._pending = pending
        self._sums = sums
        self._sums_revision: Revision | None = None

    def leave(self) -> None:
        """Refuse every call from now on: the blocks lie in another store."""
        text = "the blocks of this instance moved to another metadata store: try again"
        self._client = self._client.gated(StoreGate(closed=text, moved=True))

    @property
    def key_count(self) -> int:
        return self._sums.key_count

    @property
    def usage_bytes(self) -> Mapping[StorageKey, int]:
        return self._sums.usage

    @property
    def deleting_bytes(self) -> Mapping[StorageKey, int]:
        return self._sums.deleting

    @property
    def deleting_keys(self) -> int:
        return self._sums.deleting_keys

    @property
    def due_from(self) -> float:
        return self._pending.earliest

    @property
    def revision(self) -> Revision | None:
        return self._pending.revision

    async def refresh(self, *, is_exact: bool = True) -> None:
        revision = self.revision
        if is_exact or revision is None or revision != self._sums_revision:
            revision = await self._pending.expect_changes()
            await self._sums.refresh(self._client.run)
            self._sums_revision = revision


class RedisBackend(SharedCounts):
    """Records of one instance.

    Args:
        client: the store.
        uid: number of the instance's registration, never used again.
        shard_count: lock shards, a power of two; the same for all managers and for ever.
        revisions: of the keys of records; without them the store is asked every time.
    """

    def __init__(self, client: RedisClient, uid: int, shard_count: int, revisions: Revisions | None = None) -> None:
        self._shards = [ShardKeys.of(client.prefix, uid, shard) for shard in range(shard_count)]
        pending, owner = [shard.pending for shard in self._shards], owner_of(self._shards[0].blocks)
        sums = SharedSums([totals_of(shard) for shard in self._shards])
        super().__init__(client, DueSets(client, pending, [(revisions or Revisions(), owner)]), sums)

    @staged("read", "redis.py:get_many")
    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        if len(keys) <= _MOST_KEYS_PER_READ:
            return await self._read(keys)
        return [record for part in _cut(keys, _MOST_KEYS_PER_READ) for record in await self._read(part)]

    async def get_runs(
        self, keys: Sequence[int], *, stop_at_miss: bool = False
    ) -> tuple[Sequence[UniformRun], Mapping[int, BlockRecord]]:
        pairs = zip(keys, await self.get_many(keys), strict=True)
        return (), {key: record for key, record in pairs if record is not None}

    @staged("store", "redis.py:write_many")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        if not changes:
            return NOTHING_WRITTEN
        writes = [
            (shard, _ShardWrite(self._shards[shard], part))
            for shard, positions in self._by_shard([change.key for change in changes]).items()
            for part in _cut([changes[position] for position in positions], _MOST_KEYS_PER_CALL)
        ]
        lost: list[int] = []
        usage: Counter[StorageKey] = Counter()
        for some in _cut(writes, _MOST_CALLS_AT_ONCE):
            answers = await self._client.run([write.call for _, write in some])
            for (shard, write), (turn, *losers) in zip(some, answers, strict=True):
                lost += self._record(shard, write, turn, losers, usage)
        return Written(lost, usage)

    def answers(
        self, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
    ) -> None:
        """Records are in Redis: `get_many`."""

    async def get_fresh(self, keys: Sequence[int], *, is_head_known: bool) -> list[BlockRecord | None]:
        return await self.get_many(keys)

    def begin(self, run: BlockRun) -> None:
        """Records are added in Redis, by `write_many` and `stage_begin`."""

    def serve(self, keys: Sequence[int], ending: FinishRun) -> None:
        """Records are changed in Redis, by `write_many` and `stage_serve`."""

    def retire(self, keys: Sequence[int], ending: FinishRun) -> None:
        """Records are changed in Redis, by `write_many`."""

    def stage_begin(self, runs: Sequence[BlockRun]) -> StagedChange:
        parts = [part for run in runs for part in self._beginnings(run)]

        def settle(answers: Sequence[Any]) -> Written:
            lost: list[int] = []
            usage: Counter[StorageKey] = Counter()
            for part, answer in zip_longest(parts, answers):
                if answer is None:
                    lost += part.keys
                    continue
                turn, *losers = answer
                lost += [part.keys[index - 1] for index in losers]
                count = len(part.keys) - len(losers)
                usage[part.place] += count * part.size_bytes
                added = {Sum(part.place, is_deleting=False): count * part.size_bytes}
                self._sums.record(part.shard, turn, added, count)
            return Written(lost, usage)

        return StagedChange(self._client, [part.call for part in parts], settle)

    def stage_serve(self, runs: Sequence[tuple[UniformRun, UniformRun]]) -> StagedChange:
        parts = [part for before, after in runs for part in self._servings(before, after)]

        def settle(answers: Sequence[Any]) -> Written:
            lost: list[int] = []
            for (_, keys), answer in zip_longest(parts, answers):
                lost += keys if answer is None else [keys[index - 1] for index in answer[1:]]
            return Written(lost, {})

        return StagedChange(self._client, [call for call, _ in parts], settle)

    def _beginnings(self, run: BlockRun) -> Iterator[_Beginning]:
        """Yield the calls that begin a run, by shard."""
        location, field = run.location, Sum(run.location.place, is_deleting=False).field
        with timed("meta_searcher.index_serialize_time_us"):
            records = encode_records(location, run.links(), run.chunks)
        measure("meta_indexer.io_data_size", sum(map(len, records)))
        members = pack_keys(run.keys)
        heads = [_ABSENT] if run.parent is None else pack_keys((run.parent,))
        parents = [*heads, *members[:-1]]
        score, due = whole_seconds(location.written_at) + RETIRED, repr(float(location.deadline))
        for shard, at in self._parts_of(run.keys):
            names = self._shards[shard]
            headless = 1 if run.parent is None and at[0] == 0 else 0
            given = (score, due, field, location.size_bytes, b"".join([parents[i] for i in at]), headless)
            keys = [*names[1:], *[names.blocks + members[i] for i in at]]
            call = ScriptCall(_BEGIN, keys, [*given, *[records[i] for i in at]])
            yield _Beginning(call, shard, [run.keys[i] for i in at], location.place, location.size_bytes)

    def _servings(self, before: UniformRun, after: UniformRun) -> Iterator[tuple[ScriptCall, Sequence[int]]]:
        """Yield the calls that let a run serve, by shard, and their keys."""
        location = after.location
        headers = (encode_header(before.location), encode_header(location))
        chunks = [] if after.chunks is before.chunks else [encode_chunk_of(chunk) for chunk in after.chunks]
        score, due = whole_seconds(location.written_at), repr(float(location.deadline)) if location.deadline else ""
        members = pack_keys(before.keys)
        for shard, at in self._parts_of(before.keys):
            names = self._shards[shard]
            keys = [names.order, names.pending, *[names.blocks + members[i] for i in at]]
            given: tuple[Argument, ...] = (*headers, new_stamp(), score, due)
            call = ScriptCall(_SERVE, keys, [*given, *([chunks[i] for i in at] if chunks else ())])
            yield call, [before.keys[i] for i in at]

    def _parts_of(self, keys: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield shards with positions of keys for one call, in ascending order."""
        if len(self._shards) == 1:
            groups: Mapping[int, Sequence[int]] = {0: range(len(keys))}
        else:
            groups = self._by_shard(keys)
        for shard, positions in groups.items():
            for part in _cut(positions, _MOST_STAGED_KEYS):
                yield shard, part

    async def random_records(self, count: int, random: Random) -> Mapping[int, tuple[BlockRecord, Access]]:
        keys = await self.random_sample(count, random)
        found = zip(keys, await self.get_many(keys), await self.accesses(keys), strict=True)
        return {key: (record, access) for key, record, access in found if record is not None and access is not None}

    async def get_around(self, keys: Sequence[int], most: int) -> Mapping[int, BlockRecord]:
        keys = keys[:most]
        records = zip(keys, await self.get_many(keys), strict=True)
        return {key: record for key, record in records if record is not None}

    async def children(self, key: int) -> list[int]:
        (parent,) = pack_keys((key,))
        bounds = (b"[" + parent + _FIRST_MEMBER, b"[" + parent + _LAST_MEMBER)
        families = await self._client.execute([(b"ZRANGEBYLEX", shard.children, *bounds) for shard in self._shards])
        return sorted(unpack_keys(relation[KEY.size :] for family in families for relation in family))

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        calls = [
            ScriptCall(_FAMILIES, [shard.children], [b"".join(part)])
            for part in _cut(pack_keys(keys), _MOST_KEYS_PER_CALL)
            for shard in self._shards
        ]
        answers = [answer for some in _cut(calls, _MOST_CALLS_AT_ONCE) for answer in await self._client.run(some)]
        # Every shard returns its own part of the keys.
        by_part = _cut(answers, len(self._shards))
        relations = [b"".join(found) for shards in by_part for found in zip(*shards, strict=True)]
        return [sorted(mixed([child for _, child in RELATION.iter_unpack(family)])) for family in relations]

    async def due(self, now: float, most: int) -> list[int]:
        return unpack_keys(await self._pending.until(now, most))

    async def lift_fence(self, move: int) -> None:
        """Do nothing: blocks with a value each do not move."""

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        await self._run([_touch_call(order, counts, part, at, moves=moves) for order, part in self._parts(counts)])

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        await self._run([_requeue_call(order, counts, part, at) for order, part in self._parts(counts)])

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
        members = pack_keys(keys)
        answers = await self._client.execute(
            [
                (b"ZMSCORE", self._shards[shard].order, *(members[i] for i in positions))
                for shard, positions in groups.items()
            ]
        )
        return _restored(len(keys), groups, (map(_access, answer) for answer in answers))

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        if count <= 0:
            return []
        # Keys spread evenly over the shards: mostly a bit more than its part of the blocks is enough of each.
        start, requested = offset // len(self._shards), min(count, 2 * count // len(self._shards) + 16)
        coldest, is_enough = await self._coldest(count, start, requested)
        if not is_enough:
            coldest, _ = await self._coldest(count, start, count)
        keys = unpack_keys(member for member, _ in coldest)
        return [(key, access_of(score)) for key, (_, score) in zip(keys, coldest, strict=True)]

    async def _coldest(self, count: int, start: int, requested: int) -> tuple[list[Placed], bool]:
        firsts = [(b"ZRANGE", shard.order, start, start + requested - 1, b"WITHSCORES") for shard in self._shards]
        return merged(await self._client.execute(firsts), count, requested)

    def observe(self, observer: RowObserver | None) -> None:
        """Return None: other managers change the records, too, so an observer would miss changes."""

    async def scan(self, batch_size: int) -> AsyncIterator[list[int]]:
        for shard in self._shards:
            cursor: Any = None
            while cursor != b"0":
                scan = (b"ZSCAN", shard.order, cursor or b"0", b"COUNT", batch_size)
                ((cursor, found),) = await self._client.execute([scan])
                for number, batch in enumerate(_cut(list(dict.fromkeys(found[::2])), batch_size)):
                    members = await self._present(shard, batch) if number else batch
                    if members:
                        yield unpack_keys(members)

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
        return unpack_keys(member for members in await self._client.run(calls) for member in members)

    async def drop(self) -> None:
        left = self._shards
        while left:
            firsts = await self._client.execute(
                [(b"ZRANGE", shard.order, 0, _MOST_KEYS_PER_CALL - 1) for shard in left]
            )
            calls = [
                ScriptCall(_DROP, [*shard[1:], *(shard.blocks + member for member in members)])
                for shard, members in zip(left, firsts, strict=True)
            ]
            sizes = await self._client.run(calls)
            left = [shard for shard, size in zip(left, sizes, strict=True) if size]
        self._sums.clear()

    def _by_shard(self, keys: Sequence[int]) -> dict[int, list[int]]:
        """Return the positions of keys by shard."""
        groups: dict[int, list[int]] = {}
        for position, shard in enumerate(shards_of(keys, len(self._shards))):
            groups.setdefault(shard, []).append(position)
        return groups

    async def _read(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        blocks = [shard.blocks for shard in self._shards]
        shards = shards_of(keys, len(blocks))
        names = [blocks[shard] + member for shard, member in zip(shards, pack_keys(keys), strict=True)]
        if not self._client.is_cluster:
            (values,) = await self._client.mget([names])
            return _decoded(values)
        groups = self._by_shard(keys)
        parts = await self._client.mget([[names[i] for i in positions] for positions in groups.values()])
        return _decoded(_restored(len(keys), groups, parts))

    async def _sizes(self) -> list[int]:
        return await self._client.execute([(b"ZCARD", shard.order) for shard in self._shards])

    async def _present(self, shard: ShardKeys, members: Sequence[bytes]) -> list[bytes]:
        """Return those that are still there: a small shard answers a scan with all it has, pages before their time."""
        ((scores),) = await self._client.execute([(b"ZMSCORE", shard.order, *members)])
        return [member for member, score in zip(members, scores, strict=True) if score is not None]

    def _record(
        self, shard: int, write: _ShardWrite, turn: int, lost: Sequence[int], usage: Counter[StorageKey]
    ) -> list[int]:
        """Count the writes, and return the keys that lost."""
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
        self._sums.record(shard, turn, sums, keys)
        return [write.changes[index - 1].key for index in lost]


def _access(score: bytes | None) -> Access | None:
    return None if score is None else access_of(float(score))


def _cut(items: Sequence[_Item], size: int) -> Iterable[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _decoded(values: Sequence[bytes | None]) -> list[BlockRecord | None]:
    """Return records, measured for the call that runs."""
    present = [data for data in values if data is not None]
    with timed("meta_searcher.index_deserialize_time_us"):
        records = iter(decode_records(present))
    measure("meta_indexer.io_data_size", sum(map(len, present)))
    return [None if data is None else next(records) for data in values]


def _restored(
    count: int, groups: Mapping[int, Sequence[int]], parts: Iterable[Iterable[_Item | None]]
) -> list[_Item | None]:
    """Return answers per group in the order of the requested keys."""
    items: list[_Item | None] = [None] * count
    for positions, part in zip(groups.values(), parts, strict=True):
        for position, item in zip(positions, part, strict=True):
            items[position] = item
    return items
