"""Usage counters, shared by all managers (design.md decision 2).

Counters stand in *accounts*: one per group, one per storage, one over all groups (`kvcm.cache.accounts` says which
change counts where). Per account two hashes under one tag: the counters, and the open reservations by owner; beside
them the number of the last report of every manager, for a day, so that one that is sent twice counts once. Every
account counts some *fields* (bytes in a place, blocks of an instance, bytes of a group):

* `u:<field>` used: the sum of all differences that managers reported.
* `r:<field>` reserved: the sum of the open reservations.
* `g:<field>` grown: the sum of the positive differences alone; never falls.
* `epoch`, `dropped`: see below.

A write reserves before it stores and reports what it stored in the same call that ends its reservation, so used plus
reserved is never below the truth, and a limit is never exceeded however many managers write. A write that is under the
limits of several accounts reserves in one after the other, always in the same order, and releases what it has where a
later one refuses. The truth is in the counters that change with the records, shard by shard. A manager that dies loses
reports; the leader's recount puts the sum of those counters in place of `used`:

1. `begin`: a new epoch, and a copy of grown. 2. The counters of all shards are read, also of instances that were
registered just now. 3. `end`: used becomes the sum that was read plus the growth since 1, and the epoch changes again.

Additions between 1 and 3 may count twice, never zero times. A decrease is reported with the epoch in which it happened
and is dropped if that is over, since the recount may have seen it; that errs on the safe side too, is counted in
`dropped`, and the next recount mends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvcm.store.redis.client import RedisClient, Script, ScriptCall

__all__ = ["Counters", "Demand", "QuotaCounters", "Recount", "Report", "TotalLimit"]

_encode = msgspec.msgpack.encode
_RESERVE = Script(
    """
local counters, rows = KEYS[1], KEYS[2]
local want = cmsgpack.unpack(ARGV[3])
local taken, flat = {}, redis.call('HGETALL', counters)
for i = 1, #flat, 2 do
  local kind, field = string.match(flat[i], '^([ur]):(.*)$')
  if kind then taken[field] = (taken[field] or 0) + tonumber(flat[i + 1]) end
end
local function total(prefix, floors)
  local sum = 0
  for field, value in pairs(taken) do
    if prefix ~= '' and string.sub(field, 1, #prefix) == prefix and not floors[field] then sum = sum + value end
  end
  for field, floor in pairs(floors) do sum = sum + math.max(floor, taken[field] or 0) end
  return sum
end
local fits = true
for _, each in ipairs(cmsgpack.unpack(ARGV[4])) do
  if total(each[1], each[2]) + each[3] > each[4] then fits = false end
end
if fits and redis.call('HSETNX', rows, ARGV[1], cmsgpack.pack({ARGV[2], want})) == 1 then
  for _, each in ipairs(want) do redis.call('HINCRBY', counters, 'r:' .. each[1], each[2]) end
  flat = redis.call('HGETALL', counters)
end
return {fits and 1 or 0, flat}
""",
    creates=True,
    guards=True,
)
_RELEASE = """
local function release(owner)
  local row = redis.call('HGET', rows, owner)
  if not row then return end
  for _, each in ipairs(cmsgpack.unpack(row)[2]) do redis.call('HINCRBY', counters, 'r:' .. each[1], 0 - each[2]) end
  redis.call('HDEL', rows, owner)
end
"""
_RELEASE_CALL = Script(
    "local counters, rows = KEYS[1], KEYS[2]\n" + _RELEASE + "release(ARGV[1])\nreturn 1\n",
    allow_oom=True,
)
_REPORT = Script(
    "local counters, rows = KEYS[1], KEYS[2]\n"
    + _RELEASE
    + """
if tonumber(redis.call('GET', KEYS[3]) or 0) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[3], ARGV[2], 'EX', 86400)
  local current = (redis.call('HGET', counters, 'epoch') or '0') == ARGV[3]
  for _, each in ipairs(cmsgpack.unpack(ARGV[4])) do
    if each[2] > 0 then
      redis.call('HINCRBY', counters, 'u:' .. each[1], each[2])
      redis.call('HINCRBY', counters, 'g:' .. each[1], each[2])
    end
    if each[3] < 0 then
      if current then redis.call('HINCRBY', counters, 'u:' .. each[1], each[3])
      else redis.call('HINCRBY', counters, 'dropped', 1) end
    end
  end
  for _, owner in ipairs(cmsgpack.unpack(ARGV[5])) do release(owner) end
end
return redis.call('HGETALL', counters)
""",
    allow_oom=True,
)
_OVERDUE = Script("""
for _, row in ipairs(redis.call('HVALS', KEYS[1])) do
  if tonumber(cmsgpack.unpack(row)[1]) < tonumber(ARGV[1]) then return 1 end
end
return 0
""")
_BEGIN = Script(
    "local counters, rows = KEYS[1], KEYS[2]\n"
    + _RELEASE
    + """
for _, pair in ipairs({redis.call('HGETALL', rows)}) do
  for i = 1, #pair, 2 do
    if tonumber(cmsgpack.unpack(pair[i + 1])[1]) < tonumber(ARGV[1]) then release(pair[i]) end
  end
end
redis.call('HINCRBY', counters, 'epoch', 1)
redis.call('HSET', counters, 'dropped', 0)
return redis.call('HGETALL', counters)
""",
    allow_oom=True,
)
_END = Script(
    """
local counters = KEYS[1]
if (redis.call('HGET', counters, 'epoch') or '0') ~= ARGV[1] then return 0 end
local known = {}
local function number(name) return tonumber(redis.call('HGET', counters, name) or 0) end
for _, each in ipairs(cmsgpack.unpack(ARGV[2])) do
  local grown = tonumber(redis.call('HGET', counters, 'g:' .. each[1]) or 0) - each[3]
  redis.call('HSET', counters, 'u:' .. each[1], string.format('%.0f', each[2] + grown))
end
for _, kept in ipairs(cmsgpack.unpack(ARGV[3])) do known[kept] = true end
for _, name in ipairs(redis.call('HKEYS', counters)) do
  local field = string.match(name, '^[ugr]:(.*)$')
  if field and not known[field] and number('u:' .. field) == 0 and number('r:' .. field) == 0 then
    redis.call('HDEL', counters, name)
  end
end
redis.call('HINCRBY', counters, 'epoch', 1)
return 1
""",
    allow_oom=True,
)


class Demand(NamedTuple):
    """What a reservation takes of one field: bytes or blocks."""

    field: str
    amount: int


class TotalLimit(NamedTuple):
    """What several fields together may come to, used and reserved.

    Attributes:
        prefix: of the names of fields that count, "" for none.
        floors: least counts by field; these fields count whatever their name.
        amount: to be reserved.
        limit: most that they may come to with that.
    """

    prefix: str
    floors: Mapping[str, int]
    amount: int
    limit: int


class Report(NamedTuple):
    """What a manager reports to one account.

    Attributes:
        node: id of the manager.
        number: grows with every report of the manager.
        epoch: in which the differences happened.
        grown: positive differences by field.
        shrunk: negative differences by field.
        done: owners whose reservations end.
    """

    node: str
    number: int
    epoch: int
    grown: Mapping[str, int]
    shrunk: Mapping[str, int]
    done: Sequence[str]


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of an account at one moment.

    Attributes:
        used: by field.
        reserved: by field.
        grown: by field.
        epoch: changes with every recount.
        dropped: reports of the past epoch that were dropped.
    """

    used: Mapping[str, int]
    reserved: Mapping[str, int]
    grown: Mapping[str, int]
    epoch: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, answer: Sequence[bytes] | Mapping[bytes, bytes]) -> Counters:
        """Read the answer to HGETALL, of either protocol version."""
        pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
        parts: dict[str, dict[str, int]] = {"u": {}, "r": {}, "g": {}}
        single = {"epoch": 0, "dropped": 0}
        for name, value in pairs:
            kind, _, field = name.decode().partition(":")
            if kind in parts:
                parts[kind][field] = int(value)
            else:
                single[kind] = int(value)
        return cls(parts["u"], reserved=parts["r"], grown=parts["g"], epoch=single["epoch"], dropped=single["dropped"])


class Recount(NamedTuple):
    """A recount that has begun.

    Attributes:
        epoch: in which it runs.
        grown: by field, when it began.
    """

    epoch: int
    grown: Mapping[str, int]


class QuotaCounters:
    """The shared counters of all accounts.

    Args:
        client: where they are kept.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    @property
    def are_together(self) -> bool:
        """Whether all accounts are on one server, so that several cost as many round trips as one."""
        return not self._client.is_cluster

    async def read(self, account: str) -> Counters:
        """Return the counters of an account."""
        (counters,) = await self.read_many([account])
        return counters

    async def read_many(self, accounts: Sequence[str]) -> list[Counters]:
        """Return the counters of accounts, in order; each at one moment, different ones at different moments."""
        answers = await self._client.execute([("HGETALL", self._keys(account)[0]) for account in accounts])
        return [Counters.of(answer) for answer in answers]

    async def reserve(
        self, account: str, owner: str, deadline: float, demands: Sequence[Demand], limits: Sequence[TotalLimit]
    ) -> tuple[bool, Counters]:
        """Reserve all demands or none.

        Args:
            account: where to.
            owner: of the reservation; a second one of the same owner is not counted.
            deadline: unix seconds after which a recount voids the reservation.
            demands: the requested amounts.
            limits: what has to hold.

        Returns:
            Whether it fits, and the counters afterwards.
        """
        (answer,) = await self._client.run([self.reserving(account, owner, deadline, demands, limits)])
        return self.reserved(answer)

    def reserving(
        self, account: str, owner: str, deadline: float, demands: Sequence[Demand], limits: Sequence[TotalLimit]
    ) -> ScriptCall:
        """Return the call that does `reserve`, a guard; `reserved` reads its answer."""
        return ScriptCall(_RESERVE, self._keys(account), (owner, repr(deadline), _encode(demands), _encode(limits)))

    @staticmethod
    def reserved(answer: Sequence[Any]) -> tuple[bool, Counters]:
        """Return what `reserve` does, from the answer of its call."""
        return bool(answer[0]), Counters.of(answer[1])

    async def release(self, account: str, owner: str) -> None:
        """End a reservation under which nothing was stored; doing so twice is fine."""
        await self._client.run([ScriptCall(_RELEASE_CALL, self._keys(account), (owner,))])

    async def report(self, reports: Mapping[str, Report]) -> dict[str, Counters]:
        """Add differences to accounts and end reservations; a report with a number that was received already changes
        nothing."""
        (answers,) = await self._client.run_in_turn([[self._reporting(*each) for each in reports.items()]])
        return {account: Counters.of(answer) for account, answer in zip(reports, answers, strict=True)}

    def _reporting(self, account: str, report: Report) -> ScriptCall:
        fields = {*report.grown, *report.shrunk}
        changes = [(field, report.grown.get(field, 0), report.shrunk.get(field, 0)) for field in sorted(fields)]
        arguments = (report.node, report.number, str(report.epoch), _encode(changes), _encode(list(report.done)))
        counters, rows = self._keys(account)
        last_report = counters.replace(b":q{", b":s{", 1) + report.node.encode()
        return ScriptCall(_REPORT, (counters, rows, last_report), arguments)

    async def overdue(self, accounts: Sequence[str], now: float) -> frozenset[str]:
        """Return the accounts with a reservation that a recount would void."""
        calls = [ScriptCall(_OVERDUE, self._keys(account)[1:], (repr(now),)) for account in accounts]
        answers = await self._client.run(calls)
        return frozenset(account for account, answer in zip(accounts, answers, strict=True) if answer)

    async def begin_recount(self, account: str, now: float) -> Recount:
        """Begin a recount, and void the reservations whose deadline has passed."""
        (answer,) = await self._client.run([ScriptCall(_BEGIN, self._keys(account), (repr(now),))])
        counters = Counters.of(answer)
        return Recount(counters.epoch, {**dict.fromkeys(counters.used, 0), **counters.grown})

    async def end_recount(self, account: str, recount: Recount, counted: Mapping[str, int]) -> bool:
        """Replace the usage by the counted one.

        Args:
            account: which.
            recount: as begun.
            counted: sums over all shards by field; a field that is used and not named here counts as 0.

        Returns:
            False: another manager began a recount meanwhile, which is the one that counts.
        """
        fields = {*counted, *recount.grown}
        values = [(field, counted.get(field, 0), recount.grown.get(field, 0)) for field in sorted(fields)]
        arguments = (str(recount.epoch), _encode(values), _encode(sorted(counted)))
        call = ScriptCall(_END, self._keys(account), arguments)
        (answer,) = await self._client.run([call])
        return bool(answer)

    def _keys(self, account: str) -> tuple[bytes, bytes]:
        return f"{self._client.prefix}:q{{{account}}}".encode(), f"{self._client.prefix}:r{{{account}}}".encode()
