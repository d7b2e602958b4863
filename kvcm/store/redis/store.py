"""The shared store: documents and leases of several managers in Redis or Valkey."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

from redis.exceptions import AskError, ResponseError

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import Argument, Exchange, RedisClient, Script, ScriptCall
from kvcm.store.redis.due_sets import DueSets
from kvcm.store.redis.tracking import Revisions, owner_of
from kvcm.store.store import MARK_BITS, PART, UNVERIFIED, LeaseState, ReadDocuments, Replacement, Revision

__all__ = ["RedisLease", "RedisStore", "RedisTable"]

# The lease in Redis: a key that expires, and a counter that fences off earlier holders.
#
# The server's clock alone decides when it ends. A server that loses its last second (a failover, `appendfsync
# everysec`) can forget a lease, so two managers may lead for a moment; the duties are compare-and-set like everything
# else. Such a server may also give a token again: what a manager remembers of a term goes by its own count
# (`Leadership.terms`).
#
# A manager that does not hold it reads it first, which is one command: the script runs where it is free.

_ACQUIRE = Script(
    """
local holder = redis.call('GET', KEYS[1])
if not holder then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return {ARGV[1], redis.call('INCR', KEYS[2])}
end
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return {holder, tonumber(redis.call('GET', KEYS[2]) or 0)}
""",
    allow_oom=True,  # background tasks need a leader, and they free memory
)
_RELEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 0
""")


class RedisLease:
    """One lease.

    Args:
        client: of the servers.
        revisions: of the key of the lease; without them the store is asked every time.
    """

    def __init__(self, client: RedisClient, revisions: Revisions | None = None) -> None:
        self._client = client
        self._revisions = revisions or Revisions()
        self._keys = (f"{client.prefix}:l{{leader}}".encode(), f"{client.prefix}:f{{leader}}".encode())
        self._owner = owner_of(self._keys[0])
        self._is_held = False  # by this manager, as last seen

    @property
    def revision(self) -> Revision | None:
        return self._revisions.of(self._owner)

    async def acquire(self, node_id: str, seconds: float) -> LeaseState:
        if not self._is_held:
            seen = await self.get()
            if seen.holder not in {"", node_id}:
                return seen
        args = (node_id.encode(), max(1, int(seconds * 1000)))
        ((holder, token),) = await self._client.run([ScriptCall(_ACQUIRE, self._keys, args)])
        self._is_held = holder.decode() == node_id
        return LeaseState(holder.decode(), token)

    async def get(self) -> LeaseState:
        ((holder, token),) = await self._client.execute([(b"MGET", *self._keys)])
        return LeaseState((holder or b"").decode(), int(token or 0))

    async def release(self, node_id: str) -> None:
        self._is_held = False
        await self._client.run([ScriptCall(_RELEASE, self._keys, (node_id.encode(),))])


# Documents in Redis: per part of a table a hash of documents, a sorted set of due times and a counter of changes.
#
# The three share a hash tag and change in one script, so that no crash leaves one of them behind. How a document ended
# is a string of its own of the same hash tag, which the server expires: no sweep is needed.
#
# A counter says that something changed, as long as the server goes forward. One that loads an old dump, or a replica
# that lagged, goes back, and counts up to the same number on another way. So a table that managers keep a copy of has a
# mark beside its counter, which every change replaces by a random one: number and mark together come once.
#
# Every change counts, so the invalidations of the counters say that a table changed. A table that changes with every
# write has a flag instead, which is set with a due time (`DueSets`). While invalidations arrive, a manager knows from
# when on something is due, and does not ask before.

_REPLACE = """
local there = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[2] == '1' then
  if there ~= ARGV[3] then return 0 end
elseif there then
  return 0
end
if ARGV[4] == '1' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[5])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
if ARGV[6] ~= '' then
  redis.call('ZADD', KEYS[2], ARGV[6], ARGV[1])
else
  redis.call('ZREM', KEYS[2], ARGV[1])
end
redis.call('INCR', KEYS[3])
if ARGV[7] ~= '' then redis.call('SET', KEYS[4], ARGV[7]) end
if ARGV[6] ~= '' then redis.call('SET', KEYS[5], '', 'NX') end
return 1
"""
_REPLACE_TOGETHER = """
for at = 2, #ARGV, 5 do
  local there = redis.call('HGET', KEYS[1], ARGV[at])
  if ARGV[at + 1] == '1' then
    if there ~= ARGV[at + 2] then return 0 end
  elseif there then
    return 0
  end
end
for at = 2, #ARGV, 5 do
  if ARGV[at + 3] == '1' then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 4])
  else
    redis.call('HDEL', KEYS[1], ARGV[at])
  end
  redis.call('ZREM', KEYS[2], ARGV[at])
end
redis.call('INCR', KEYS[3])
if ARGV[1] ~= '' then redis.call('SET', KEYS[4], ARGV[1]) end
return 1
"""
_CONCLUDE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('INCR', KEYS[3])
redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[4])
return 1
"""
_HOLDS = Script(
    """
return redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and 1 or 0
""",
    allow_oom=True,
    guards=True,
)
_CREATE = Script(_REPLACE, creates=True, guards=True)
# On a full server existing documents can be decided, finished and removed.
_CHANGE = Script(_REPLACE, allow_oom=True, guards=True)
_END = Script(_CONCLUDE, allow_oom=True, guards=True)  # what it keeps takes the place of more, and goes soon
_CREATE_TOGETHER = Script(_REPLACE_TOGETHER, creates=True)
_CHANGE_TOGETHER = Script(_REPLACE_TOGETHER, allow_oom=True)
# Written by operators and by managers that start: few, and removing an instance begins with a new document. Deletion
# numbers, one a storage, come before bytes are deleted, and so before memory is freed.
_ALWAYS = {"registry", "nodes", UNVERIFIED}
_MARKED = {"registry"}
# Tables that change seldom, and of which each change is notified; of the others only that something may be due.
_FOLLOWED = frozenset({"losses", UNVERIFIED, "wakes"})


class RedisTable:
    """One table.

    Attributes:
        client: of the servers.

    Args:
        client: of the servers.
        name: lower-case letters.
        shard_count: number of parts; the same for all managers.
        revisions: changes of the counters; without them the store is asked every time.
        flags: changes of the flags, as `revisions`.
    """

    def __init__(
        self,
        client: RedisClient,
        name: str,
        shard_count: int,
        revisions: Revisions | None = None,
        flags: Revisions | None = None,
    ) -> None:
        self.client = client
        is_always_taken = name in _ALWAYS or name.startswith(PART)
        self._create = _CHANGE if is_always_taken else _CREATE
        self._create_together = _CHANGE_TOGETHER if is_always_taken else _CREATE_TOGETHER
        self._is_marked, self._is_followed = name in _MARKED, name in _FOLLOWED
        self._parts = range(shard_count)
        self._documents, self._due, self._versions, self._marks, self._flags, self._outcomes = (
            [f"{client.prefix}:{kind}{{{name}.{part}}}".encode() for part in self._parts] for kind in "tdvmwo"
        )
        self._revisions, self._owner = revisions or Revisions(), owner_of(self._versions[0])
        followed = [(self._revisions, self._owner), (flags or Revisions(), owner_of(self._flags[0]))]
        self._due_sets = DueSets(client, self._due, followed, self._flags)

    @property
    def document_key(self) -> bytes:
        """Key of the documents of a table with one part."""
        (key,) = self._documents
        return key

    async def get(self, name: str) -> bytes | None:
        (document,) = await self.client.execute([(b"HGET", self._documents[self._part(name)], name.encode())])
        assert document is None or isinstance(document, bytes)
        return document

    async def get_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Return documents of a table of one part as they are at one moment, None where there is none."""
        (found,) = await self.client.execute([(b"HMGET", self.document_key, *(name.encode() for name in names))])
        documents: Sequence[bytes | None] = found
        return documents

    async def all(self) -> Mapping[str, bytes]:
        parts = await self.client.execute([(b"HGETALL", key) for key in self._documents])
        return {name.decode(): value for part in parts for name, value in _pairs(part)}

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        (done,) = await self.client.run([self.replacing(name, old, new, due)])
        return bool(done)

    def replacing(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> ScriptCall:
        """Return the call that does `replace`; it answers 1, or 0 where another document is there, and is a guard."""
        keys = self._keys(self._part(name))
        when = repr(float(due)) if due and new is not None else ""
        args = (*_arguments(Replacement(name, old, new)), when, self._new_mark())
        return ScriptCall(self._create if old is None else _CHANGE, keys, args)

    def holding(self, name: str, document: bytes) -> ScriptCall:
        """Return a guard that answers 1 where that is the document of the name."""
        return ScriptCall(_HOLDS, [self._documents[self._part(name)]], (name.encode(), document))

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        parts = {self._part(each.name) for each in replacements}
        assert len(parts) <= 1, "documents of several parts may lie on several servers"
        if not parts:
            return True
        creates = any(each.old is None for each in replacements)
        script = self._create_together if creates else _CHANGE_TOGETHER
        args = [self._new_mark(), *(argument for each in replacements for argument in _arguments(each))]
        (done,) = await self.client.run([ScriptCall(script, self._keys(parts.pop()), args)])
        return bool(done)

    async def finish(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        (done,) = await self.client.run([self.finishing(name, old, outcome, seconds)])
        return bool(done)

    def finishing(self, name: str, old: bytes, outcome: bytes, seconds: float) -> ScriptCall:
        """Return the call that does `finish`; it answers 1, or 0 where another document is there, and is a guard."""
        keys = (*self._keys(self._part(name))[:3], self._outcome_key(name))
        return ScriptCall(_END, keys, (name.encode(), old, outcome, max(1, round(seconds * 1000))))

    async def outcome(self, name: str, now: float) -> bytes | None:
        (outcome,) = await self.client.execute([(b"GET", self._outcome_key(name))])
        assert outcome is None or isinstance(outcome, bytes)
        return outcome

    def _outcome_key(self, name: str) -> bytes:
        return self._outcomes[self._part(name)] + name.encode()

    def _keys(self, part: int) -> tuple[bytes, ...]:
        return self._documents[part], self._due[part], self._versions[part], self._marks[part], self._flags[part]

    def _new_mark(self) -> bytes:
        return secrets.token_bytes(MARK_BITS // 8) if self._is_marked else b""

    async def due(self, now: float, most: int) -> list[str]:
        return [name.decode() for name in await self._due_sets.until(now, most)]

    @property
    def due_from(self) -> float:
        return self._due_sets.earliest

    @property
    def revision(self) -> Revision | None:
        assert self._is_followed, "not every change is notified of"
        return self._revisions.of(self._owner)

    async def version(self) -> int:
        if not self._is_marked:
            return sum(int(n or 0) for n in await self.client.execute([(b"GET", key) for key in self._versions]))
        keys = zip(self._versions, self._marks, strict=True)
        numbers = await self.client.execute([(b"MGET", *pair) for pair in keys])
        return sum(int(n or 0) << MARK_BITS | int.from_bytes(mark or b"") for n, mark in numbers)

    def _part(self, name: str) -> int:
        return zlib.crc32(name.encode()) % len(self._parts)


def _arguments(each: Replacement) -> tuple[Argument, ...]:
    return each.name.encode(), int(each.old is not None), each.old or b"", int(each.new is not None), each.new or b""


def _pairs(flat: list[Any]) -> zip[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


class RedisStore:
    """Documents in Redis.

    Args:
        client: of the servers; closed with the store.
        name: of a further store for blocks; "" for the store that has the registry.
        others: the further stores, by name. Of each a table has the name of it behind an `@`.

    Attributes:
        revisions: changes of the keys below `notified_prefixes`, and of blocks, while invalidations are received.
        flags: changes of the keys below `flag_prefix`, while this manager is notified of them.
    """

    is_shared = True

    def __init__(
        self, client: RedisClient, name: str = "", others: Mapping[str, RedisStore] = MappingProxyType({})
    ) -> None:
        self.client = client
        self.name = name
        self.others = others
        self.revisions, self.flags = Revisions(), Revisions()
        self._greeters: list[Callable[[ReadDocuments, float], Awaitable[None]]] = []

    def notified_prefixes(self, *, have_flags: bool) -> Sequence[bytes]:
        """Return what the names of the keys begin with whose invalidations report changes.

        Args:
            have_flags: whether all managers set flags; the release before counts only (`DueSets`).
        """
        counted = [f"v{{{name}." for name in sorted(_FOLLOWED)] if have_flags else ["v{"]
        return [f"{self.client.prefix}:{each}".encode() for each in (*counted, "l{")]

    @property
    def flag_prefix(self) -> bytes:
        """The beginning of the names of flags, of tables and of blocks: of use for a manager with duties."""
        return f"{self.client.prefix}:w{{".encode()

    def registry_table(self) -> RedisTable:
        """Return the table of the registry, which the gate of the client does not close."""
        return RedisTable(self.client.ungated(), "registry", 1)

    def table(self, name: str, shard_count: int = 1) -> RedisTable:
        base, _, store = name.partition("@")
        if store in self.others:
            return self.others[store].table(name, shard_count)
        if store != self.name:
            raise StorageIOError(f"kvcm.store.block_stores of this manager does not name {store!r}")
        return RedisTable(self.client, base, shard_count, self.revisions, self.flags)

    async def parts(self) -> Sequence[str]:
        """Return names of tables, one of them at least on each master, those of the further stores last."""
        names: Sequence[str] = (PART,)
        if self.client.is_cluster:
            names = await self.client.one_per_master(f"{PART}{number}" for number in count())
        own = [f"{name}@{self.name}" for name in names] if self.name else list(names)
        for other in self.others.values():
            own += await other.parts()
        return own

    def on_new_server(self, greet: Callable[[ReadDocuments, float], Awaitable[None]]) -> None:
        """Call `greet` before a server gets its first command that this process did not know as a master: it may be a
        replica that lagged, or have loaded older data. It is given a way to read documents of `parts` there, and
        the seconds that it may take; when it raises, the server gets no command, and is asked again. Several are called
        in the order in which they came."""
        self._greeters.append(greet)

        async def greet_server(send: Exchange) -> None:
            async def read(part: str, names: Sequence[str]) -> Sequence[bytes | None] | None:
                base, _, store = part.partition("@")
                if store != self.name:
                    return None
                key = RedisTable(self.client, base, 1).document_key
                (answer,) = await send([(b"HMGET", key, *(name.encode() for name in names))])
                if isinstance(answer, AskError):  # or MovedError: another server has it
                    return None
                if isinstance(answer, ResponseError):
                    raise answer  # it is loading, for example, and has all that later
                found: Sequence[bytes | None] = answer
                return found

            seconds = self.client.settings.timeout_seconds / 2  # within the call that needs the server
            for each in self._greeters:
                await each(read, seconds / len(self._greeters))

        self.client.on_new_server = greet_server

    async def flush(self) -> None:
        """Return at once: a change is as durable as the server is configured when it is answered."""

    async def sync(self) -> None:
        """As `flush`: when a server syncs is its own affair."""

    async def close(self) -> None:
        for store in (self, *self.others.values()):
            await store.client.close()
