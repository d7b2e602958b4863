"""Commands to a Redis or Valkey, wherever their keys lie.

1. A call ends within twice `timeout_ms`, with an answer or with StorageIOError.
2. Writes are sent once: after a lost connection it is unknown whether they ran, and the caller has to find out. Only
   commands that certainly did not run are sent again: redirections, and scripts that the server did not know.
3. Nothing stays broken: a lost connection or an answer that speaks of another role makes the next call find the masters
   again, so calls succeed by themselves as soon as some server is responsible again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import re
import time
from binascii import crc_hqx
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import hiredis
import msgspec
from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from kvcm.model.errors import StorageIOError
from kvcm.model.tasks import end_tasks
from kvcm.store.redis.uri import Address, RedisSettings
from kvcm.store.store import BlocksMovedError, StoreGate
from kvcm.telemetry.metrics import Histogram

__all__ = [
    "MOST_KEYS_PER_SCRIPT",
    "MOVED_CODE",
    "Argument",
    "Command",
    "Eviction",
    "Exchange",
    "Node",
    "RedisClient",
    "Script",
    "ScriptCall",
    "Stages",
    "Topology",
    "fits_in_one",
    "open_connection",
    "run_across",
    "slot_of",
]

# Lua functions that run inside the server, atomically over the keys of one hash tag.

Argument = bytes | str | int | float
_encode = msgspec.msgpack.Encoder().encode


class Script:
    """A Lua text, known to servers by its SHA-1.

    Args:
        body: of the function.
        allow_oom: whether it runs on a server that is at its `maxmemory` too. For what ends or renews something and so
            must be possible then; it must not let the store grow with every call.
        creates: whether it stores something new, which is refused while the gate says so.
        guards: whether an answer of 0, alone or as the first of a list, keeps later stages from running
            (`RedisClient.run_in_turn`).
    """

    __slots__ = ("allow_oom", "body", "creates", "guards", "sha1", "text")

    def __init__(self, body: str, *, allow_oom: bool = False, creates: bool = False, guards: bool = False) -> None:
        self.body = body
        self.allow_oom = allow_oom
        self.creates = creates
        self.guards = guards
        # The server reads the flags of a script from its first line.
        self.text = f"#!lua flags=allow-oom\n{body}" if allow_oom else body
        self.sha1 = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """One call of a script.

    Attributes:
        script: what runs.
        keys: at least one; all share one hash tag.
        args: further arguments.
        load: how many keys it is worth as work for the server, where that is more than its keys.
    """

    script: Script
    keys: Sequence[bytes]
    args: Sequence[Argument] = ()
    load: int = 0

    @property
    def by_sha1(self) -> tuple[Argument, ...]:
        """The command, for a server that knows the script."""
        return (b"EVALSHA", self.script.sha1, len(self.keys), *self.keys, *self.args)

    @property
    def by_text(self) -> tuple[Argument, ...]:
        """The command, for a server that does not; it does afterwards."""
        return (b"EVAL", self.script.text, len(self.keys), *self.keys, *self.args)


# Stages: calls of which the later ones run only where the earlier ones succeed. On one server all of them are one call
# of one script, which has the texts of all as its functions: one round trip, and nothing comes in between.

Stages = Sequence[Sequence[ScriptCall]]
"""Calls of one stage run in any order; those of the next one only if no guard answered 0."""
MOVED_CODE: Final = "KVCMMOVED"
"""Error of a script that finds the blocks on their way to another store."""
MOST_KEYS_PER_SCRIPT: Final = 160
"""Of a stage; then a script holds up the server for about a millisecond."""
_IN_TURN: Final = """
local plan = cmsgpack.unpack(ARGV[1])
local key, arg, answers = 0, 1, {}
for number, stage in ipairs(plan) do
  local found, goes_on = {}, true
  for at, call in ipairs(stage) do
    local body, keys, args, guards = unpack(call)
    local answer = bodies[body]({unpack(KEYS, key + 1, key + keys)}, {unpack(ARGV, arg + 1, arg + args)})
    key, arg = key + keys, arg + args
    found[at] = answer or false
    if guards and (answer == 0 or type(answer) == 'table' and answer[1] == 0) then goes_on = false end
  end
  answers[number] = found
  if not goes_on then break end
end
return answers
"""


@lru_cache(64)
def _joined_script(scripts: tuple[Script, ...]) -> Script:
    """Return the script that runs these in stages."""
    bodies = "".join(f"function(KEYS, ARGV)\n{script.body}\nend,\n" for script in scripts)
    return Script(
        f"local bodies = {{\n{bodies}}}\n{_IN_TURN}",
        allow_oom=all(script.allow_oom for script in scripts),
        creates=any(script.creates for script in scripts),
    )


def _joined(stages: Stages) -> ScriptCall:
    """Return the one call that runs all stages."""
    calls = [call for stage in stages for call in stage]
    scripts = tuple(dict.fromkeys(call.script for call in calls))
    number = {script: at for at, script in enumerate(scripts, 1)}
    plan = [
        [(number[call.script], len(call.keys), len(call.args), call.script.guards) for call in stage]
        for stage in stages
    ]
    keys = [key for call in calls for key in call.keys]
    return ScriptCall(_joined_script(scripts), keys, [_encode(plan), *(arg for call in calls for arg in call.args)])


def _goes_on(stage: Sequence[ScriptCall], answers: Sequence[Any]) -> bool:
    """Return whether no guard of a stage answered 0."""
    firsts = (answer[0] if isinstance(answer, list) and answer else answer for answer in answers)
    return not any(call.script.guards and first == 0 for call, first in zip(stage, firsts, strict=True))


# One server: its connections, and round trips of several commands at once.
#
# Built on redis-py's connections and not on its clients. Those retry by policies of their own, so that a write whose
# answer was lost is sent twice; their cluster pipelines refuse MGET and EVALSHA; and packing arguments in Python costs
# more than the server needs for the answer.
#
# 1. A connection goes back only after every answer was read: an error or cancellation of a round trip closes its
#    connection, so no call reads the answer of another.
# 2. Nothing waits for ever: not for a free connection, a new one or an answer.
# 3. Commands are sent once. Only a caller whose command may run twice sends it again.

Command = Sequence[Argument]
Exchange = Callable[[Sequence[Command]], Awaitable[list[Any]]]
"""Sends commands to one server, and returns its answers; raises OSError or RedisError."""
_READ_BYTES = 1 << 18
_LOST = (OSError, RedisError)
_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment] # says: one argument


async def open_connection(settings: RedisSettings, address: Address) -> Connection:
    """Return a new, authenticated connection.

    Raises:
        OSError, RedisError: there is none.
    """
    connection = _new_connection(settings, address)
    try:
        async with asyncio.timeout(settings.connect_timeout_seconds):
            await connection.connect()  # type: ignore[no-untyped-call]
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection


def _new_connection(settings: RedisSettings, address: Address) -> Connection:
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": settings.database,
        "username": settings.user or None,
        "password": settings.password or None,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": settings.connect_timeout_seconds,
        "socket_read_size": _READ_BYTES,
        "driver_info": None,
    }
    if settings.tls is None:
        return Connection(**options)
    for file in (settings.tls.ca_file, settings.tls.cert_file, settings.tls.key_file):
        if file and not Path(file).is_file():
            raise FileNotFoundError(f"{file} is not a file")  # the TLS library does not say which one is missing
    return SSLConnection(
        ssl_ca_certs=settings.tls.ca_file or None,
        ssl_certfile=settings.tls.cert_file or None,
        ssl_keyfile=settings.tls.key_file or None,
        ssl_check_hostname=settings.tls.check_hostname,
        **options,
    )


class Node:
    """One server.

    Args:
        settings: how to reach it.
        address: where it is.
        must_be_master: refuse to talk to it as long as it is a replica.
        greet: called before a server that is not the last one of this address gets a command.
    """

    def __init__(
        self,
        settings: RedisSettings,
        address: Address,
        must_be_master: bool = False,
        greet: Callable[[Exchange], Awaitable[None]] | None = None,
    ) -> None:
        self.address = address
        self._greet = greet
        self._greeting = asyncio.Lock()
        self._run_id = b""  # of the process that was greeted
        self._past = 0  # connections of an earlier number are not used again
        self._settings = settings
        self._must_be_master = must_be_master
        self._idle: list[Connection] = []
        self._places = asyncio.Semaphore(settings.pool_size)
        self._closed = False

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one packet and return their answers in order; an error answer is a ResponseError there.

        Answers are those of RESP2: bytes, numbers, None and lists of them.

        Raises:
            StorageIOError: there is no connection, or it was lost; some of the commands may have run.
        """
        await self._acquire_slot()
        try:
            past, connection = self._past, await self._acquire()
            answers = await self._round_trip(connection, commands)
            await self._release(connection, past)
        except TimeoutError:
            raise self._failure(f"no answer within {self._settings.timeout_seconds:g} s") from None
        except AuthenticationError as error:
            raise StorageIOError(f"redis {self.address}: {error}; check user and password in the uri") from error
        except _LOST as error:
            raise self._failure(str(error)) from error
        else:
            return answers
        finally:
            self._places.release()

    async def forget_connections(self) -> None:
        """Close the connections that are not in use: they may lead to a server that changed its role."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)

    async def forget_server(self) -> None:
        """Greet the server again: it became a master, and what it has may be older than what the last one had."""
        self._run_id, self._past = b"", self._past + 1
        await self.forget_connections()

    async def close(self) -> None:
        """Close the connections, those in use after their round trips."""
        self._closed = True
        await self.forget_connections()

    async def _acquire_slot(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await self._places.acquire()
        except TimeoutError:
            raise self._failure(
                f"all {self._settings.pool_size} connections were busy for {self._settings.timeout_seconds:g} s"
            ) from None

    async def _acquire(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if await _is_usable(connection):
                return connection
            await connection.disconnect(nowait=True)
        connection = await open_connection(self._settings, self.address)
        try:
            await self._check_server(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _check_server(self, connection: Connection) -> None:
        if self._must_be_master:
            role = (await self._round_trip(connection, [(b"ROLE",)]))[0]
            if not isinstance(role, list) or role[0] != b"master":
                raise ResponseError("is not the master yet")
        if self._greet is None:
            return
        (info,) = await self._round_trip(connection, [(b"INFO", b"server")])
        run_id = info.partition(b"run_id:")[2].split()[0] if isinstance(info, bytes) and b"run_id:" in info else b"?"
        async with self._greeting:
            if run_id != self._run_id or run_id == b"?":
                await self._greet(lambda commands: self._round_trip(connection, commands))
                self._run_id = run_id

    async def _release(self, connection: Connection, past: int) -> None:
        if self._closed or past != self._past:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append(connection)

    async def _round_trip(self, connection: Connection, commands: Sequence[Command]) -> list[Any]:
        packed = b"".join([_pack(tuple(command)) for command in commands])
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await connection.send_packed_command([packed], check_health=False)
                return [await _answer(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    def _failure(self, what: str) -> StorageIOError:
        return StorageIOError(f"redis {self.address}: {what}; try again")


async def _answer(connection: Connection) -> Any:
    try:
        return await connection.read_response(disconnect_on_error=False)
    except ResponseError as error:
        return error


async def _is_usable(connection: Connection) -> bool:
    try:
        return not await connection.can_read()
    except _LOST:
        return False


# Which server is responsible for which keys: one server, the master that sentinels name, or the nodes of a cluster.
#
# A topology is cached until a lost connection, a redirection or the answer of a replica invalidates it. Then the next
# call queries several servers and takes the first answer, so that a server that hangs delays no call.

_SLOT_COUNT = 16384
_MOST_QUERIED = 4
_PATIENCE_SECONDS = 0.1
_Answer = TypeVar("_Answer")


class Topology(Protocol):
    """Which server is responsible for which keys."""

    async def node_of(self, slot: int) -> Node:
        """Return the master of a slot.

        Raises:
            StorageIOError: no server with the topology answers, or there is no master.
        """

    async def masters(self) -> list[Node]:
        """Query and return all masters, in a fixed order.

        Raises:
            StorageIOError: no server with the topology answers.
        """

    def at(self, address: Address) -> Node:
        """Return the server at an address that a redirection names."""

    async def invalidate(self) -> None:
        """Invalidate the topology: query it before the next call."""

    async def close(self) -> None:
        """Close all connections."""


_Greet = Callable[[Exchange], Awaitable[None]]


def _topology_of(settings: RedisSettings, random: Random, greet: _Greet) -> Topology:
    """Return the topology that a uri describes.

    Args:
        settings: what the uri says.
        random: chooses whom of many to ask.
        greet: called before a server that may be a new master gets a command.
    """
    if settings.kind == "cluster":
        return _ClusterTopology(settings, random, greet)
    if settings.kind == "sentinel":
        return _SentinelTopology(settings, random, greet)
    return _SingleTopology(settings, greet)


class _SingleTopology:
    """One server."""

    def __init__(self, settings: RedisSettings, greet: _Greet) -> None:
        self._node = Node(settings, settings.addresses[0], greet=greet)

    async def node_of(self, slot: int) -> Node:
        return self._node

    async def masters(self) -> list[Node]:
        return [self._node]

    def at(self, address: Address) -> Node:
        raise StorageIOError(f"redis {self._node.address} is a node of a cluster; use redis+cluster://")

    async def invalidate(self) -> None:
        # The name may lead to another server by now, so only the connections are doubtful.
        await self._node.forget_connections()

    async def close(self) -> None:
        await self._node.close()


class _SentinelTopology:
    """The master that sentinels name."""

    def __init__(self, settings: RedisSettings, random: Random, greet: _Greet) -> None:
        self._settings = settings
        self._greet = greet
        self._random = random
        at_sentinels = dataclasses.replace(
            settings, user=settings.sentinel_user, password=settings.sentinel_password, database=0
        )
        self._sentinels = [Node(at_sentinels, address) for address in settings.addresses]
        self._master: Node | None = None
        self._epoch = 0
        self._doubted = False
        self._asking = asyncio.Lock()

    async def node_of(self, slot: int) -> Node:
        if self._master is not None and not self._doubted:
            return self._master
        async with self._asking:
            return await self._find() if self._master is None or self._doubted else self._master

    async def masters(self) -> list[Node]:
        async with self._asking:
            return [await self._find()]

    def at(self, address: Address) -> Node:
        raise StorageIOError(f"redis {address} is a node of a cluster; use redis+cluster://")

    async def invalidate(self) -> None:
        self._doubted = True
        if self._master is not None:
            await self._master.forget_connections()  # whether it is still the master is asked of new connections

    async def close(self) -> None:
        for node in [*self._sentinels, *([self._master] if self._master else [])]:
            await node.close()

    async def _find(self) -> Node:
        queried = self._random.sample(self._sentinels, len(self._sentinels))
        try:
            self._epoch, address = await _first(queried, self._master_of, f"sentinels of {self._settings.service!r}")
        except StorageIOError:
            self._epoch = 0  # sentinels that were set up again count from the start
            raise
        before, self._doubted = self._master, False
        if before is not None and before.address == address:
            return before
        master = self._master = Node(self._settings, address, must_be_master=True, greet=self._greet)
        if before is not None:
            await before.close()
        return master

    async def _master_of(self, sentinel: Node) -> tuple[int, Address]:
        service = self._settings.service
        master, state = await sentinel.send(
            [(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service), (b"SENTINEL", b"MASTER", service)]
        )
        if not isinstance(master, list) or not isinstance(state, list):
            raise StorageIOError(f"sentinel {sentinel.address} knows no master {service!r}")
        epoch = int(dict(zip(state[::2], state[1::2], strict=True))[b"config-epoch"])
        if epoch < self._epoch:
            raise StorageIOError(f"sentinel {sentinel.address} has not heard of the last failover of {service!r} yet")
        return epoch, Address(master[0].decode(), int(master[1]))


class _ClusterTopology:
    """The nodes of a cluster by slot."""

    def __init__(self, settings: RedisSettings, random: Random, greet: _Greet) -> None:
        self._settings = settings
        self._greet = greet
        self._random = random
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * _SLOT_COUNT
        self._doubted = True
        self._asking = asyncio.Lock()

    async def node_of(self, slot: int) -> Node:
        if self._doubted:
            async with self._asking:
                if self._doubted:
                    await self._find()
        node = self._slots[slot]
        if node is None:
            self._doubted = True
            raise StorageIOError(f"no node of the redis cluster serves slot {slot} now; try again")
        return node

    async def masters(self) -> list[Node]:
        async with self._asking:
            await self._find()
        by_address = {node.address: node for node in self._slots if node is not None}
        return [by_address[address] for address in sorted(by_address)]

    def at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(self._settings, address, greet=self._greet)
        return node

    async def invalidate(self) -> None:
        self._doubted = True

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()

    async def _find(self) -> None:
        masters = list({node.address: node for node in self._slots if node is not None}.values())
        known = self._random.sample(masters, min(len(masters), _MOST_QUERIED))
        seeds = self._random.sample(self._settings.addresses, min(len(self._settings.addresses), _MOST_QUERIED))
        queried = list({node.address: node for node in [*known, *map(self.at, seeds)]}.values())
        ranges = await _first(queried, _slots_reported_by, "nodes of the redis cluster")
        slots: list[Node | None] = [None] * _SLOT_COUNT
        for first, last, address in ranges:
            slots[first : last + 1] = [self.at(address)] * (last + 1 - first)
        for node in {node for node in slots if node is not None}.difference(masters):
            await node.forget_server()
        self._slots, self._doubted = slots, False
        await self._close_others({address for _, _, address in ranges} | set(self._settings.addresses))

    async def _close_others(self, staying: set[Address]) -> None:
        for address in self._nodes.keys() - staying:
            await self._nodes.pop(address).close()


async def _slots_reported_by(node: Node) -> list[tuple[int, int, Address]]:
    (answer,) = await node.send([(b"CLUSTER", b"SLOTS")])
    if isinstance(answer, ResponseError):
        raise StorageIOError(f"redis {node.address} is no node of a cluster: {answer}")
    # A node that does not know its own name says nothing, or "?".
    return [
        (first, last, Address(_host(master[0]) or node.address.host, master[1]))
        for first, last, master, *_replicas in answer
    ]


def _host(name: bytes | None) -> str:
    return "" if name in (None, b"", b"?") else (name or b"").decode()


async def _first(nodes: Iterable[Node], query: Callable[[Node], Coroutine[Any, Any, _Answer]], whom: str) -> _Answer:
    """Ask one, and while there is no answer one more after each `_PATIENCE_SECONDS`; return the first answer."""
    waiting, running, errors = list(nodes), set[asyncio.Task[_Answer]](), list[str]()
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(query(waiting.pop(0))))
            patience = _PATIENCE_SECONDS if waiting else None
            done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, StorageIOError):
                    raise error
                errors.append(str(error))
    finally:
        await end_tasks(running)
    raise StorageIOError(f"none of the {whom} answers: {'; '.join(errors)}")


_MOST_ROUNDS = 32
_PAUSE_SECONDS = 0.02
_LEAST_VERSION = (7, 0)
# What a server says that is no master (any more), or cannot serve now; the same call may succeed later.
_OTHER_ROLE = frozenset({"READONLY", "MASTERDOWN", "CLUSTERDOWN"})
_PASSING = _OTHER_ROLE | {"ASK", "MOVED", "TRYAGAIN", "LOADING", "BUSY", "NOREPLICAS", "MISCONF"}
_FULL = "; the memory of the server is full: remove blocks or raise its maxmemory, then try again"


class _Sent(NamedTuple):
    """A command on its way: a redirection of the cluster that holds once says `asking`."""

    command: Command
    slot: int
    node: Node | None = None
    asking: bool = False


def slot_of(key: bytes) -> int:
    """Return the slot of a key in a cluster: a checksum of what its first braces hold, of all of it without them."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    return crc_hqx(key[start + 1 : end] if end > start + 1 else key, 0) % _SLOT_COUNT


class Eviction(NamedTuple):
    """What a server drops by itself when its memory is full.

    Attributes:
        address: of the server.
        policy: its `maxmemory-policy`, None where it does not say so: access rules may forbid both ways to ask.
        evicted: how many keys it dropped since it started.
    """

    address: Address
    policy: str | None
    evicted: int


_ASK_EVICTION: tuple[Command, ...] = (
    (b"INFO", b"memory"),
    (b"INFO", b"stats"),
    (b"CONFIG", b"GET", b"maxmemory-policy"),
)


def _eviction_of(address: Address, answers: Sequence[Any]) -> Eviction:
    memory, stats, config = answers
    facts = {**_facts(memory), **_facts(stats)}
    policy = facts.get("maxmemory_policy")
    if policy is None and isinstance(config, list) and len(config) == 2:
        policy = config[1].decode(errors="replace")
    return Eviction(address, policy, int(facts.get("evicted_keys") or 0))


def _facts(info: Any) -> dict[str, str]:
    """Return the lines of INFO by name; none of an error."""
    lines = info.decode(errors="replace").splitlines() if isinstance(info, bytes) else []
    return dict(line.partition(":")[::2] for line in lines)


class RedisClient:
    """Connections to one Redis or Valkey, made when needed.

    Every method that awaits raises StorageIOError when there is no answer in time, or an error for an answer.

    Attributes:
        prefix: name of the deployment; every key begins with it.
        is_cluster: whether keys of different hash tags may lie on different servers.
        times: how long operations took, by kind.
        gate: why there is nothing to be asked or stored now.
        on_new_server: called before a server that may be a new master gets a command; when it raises, it gets none.
    """

    def __init__(self, settings: RedisSettings, random: Random) -> None:
        self.settings = settings
        self.prefix = settings.cluster_name
        self.is_cluster = settings.kind == "cluster"
        self.times = {op: Histogram() for op in ("read", "script", "command", "other")}
        self.gate = StoreGate()
        self.on_new_server: _Greet = _accept_server
        self._used: dict[Script, None] = {}
        self._topology = _topology_of(settings, random, lambda send: self.on_new_server(send))

    @classmethod
    def of(cls, settings: RedisSettings) -> RedisClient:
        """Return a client that is not connected yet."""
        return cls(settings, Random())  # noqa: S311 - spreads load over nodes

    def ungated(self) -> RedisClient:
        """Return a client over the same connections that no gate holds up: for what decides over the gate."""
        return self.gated(StoreGate())

    def gated(self, gate: StoreGate) -> RedisClient:
        """Return a client over the same connections with a gate of its own."""
        other = copy.copy(self)
        other.gate = gate
        return other

    async def mget(self, groups: Sequence[Sequence[bytes]]) -> list[list[bytes | None]]:
        """Return values of keys, None where there is none. Keys of one group share a hash tag."""
        self._check_gate()
        async with self._deadline("read"):
            for _ in range(self.settings.retry_count):
                with contextlib.suppress(StorageIOError):
                    return await self._mget(groups)
            return await self._mget(groups)

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts and return their answers. An error of one raises; others may have run then."""
        self._check_gate(creates=any(call.script.creates for call in calls))
        async with self._deadline("script"):
            slots = [self._slot(call.keys[0]) for call in calls]
            answers = await self._send([_Sent(call.by_sha1, slot) for call, slot in zip(calls, slots, strict=True)])
            if self.is_cluster:
                self._used.update(dict.fromkeys(call.script for call in calls))
            unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            again = [_Sent(calls[at].by_text, slots[at]) for at in unknown]
            for at, answer in zip(unknown, await self._send([*again, *await self._handed_over(again)]), strict=False):
                answers[at] = answer
            return self._checked(answers)

    async def _handed_over(self, again: Sequence[_Sent]) -> list[_Sent]:
        """Return what hands all scripts over that were used so far to the servers of a cluster that lack one of them:
        each needs one round trip for it, and not one per script. A user who may not do that goes on as before."""
        if not self.is_cluster:
            return []
        slots = {await self._topology.node_of(one.slot): one.slot for one in again}
        return [_Sent((b"SCRIPT", b"LOAD", script.text), slot) for slot in slots.values() for script in self._used]

    async def run_in_turn(self, stages: Stages, recheck: ScriptCall | None = None) -> list[list[Any]]:
        """Run stages of scripts, each only if no guard of an earlier one answered 0, and return the answers of those
        that ran. On one server that is one round trip and nothing comes in between; on a cluster one per stage.

        A long last stage is cut: beyond `MOST_KEYS_PER_SCRIPT` keys it goes on in scripts of its own, in the same
        packet.

        Args:
            stages: at least one.
            recheck: a guard that answers 0 where the earlier stages did not succeed: it runs before each such script.
                None where there are no earlier ones.
        """
        if self.is_cluster:
            answers: list[list[Any]] = []
            for stage in stages:
                answers.append(await self.run(stage))
                if not _goes_on(stage, answers[-1]):
                    break
            return answers
        first, *rest = _cut_by_keys(stages[-1])
        before = [[recheck]] if recheck is not None else []
        answers, *later = await self.run([_joined([*stages[:-1], first]), *(_joined([*before, part]) for part in rest)])
        for found in later:
            if len(answers) == len(stages) and len(found) > len(before):
                answers[-1] += found[-1]
        return answers

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands that each have one key, in second place, and return their answers, as those of RESP2."""
        self._check_gate()
        async with self._deadline("command"):
            return self._checked(await self._send([_Sent(command, self._slot(_key(command))) for command in commands]))

    async def ping(self) -> None:
        """Return when every master answers."""
        await self._send_to_masters((b"PING",))

    async def info_version(self) -> tuple[int, ...]:
        """Return the version of the oldest master, as Redis counts them; nothing where access rules forbid to ask."""
        versions = []
        async with self._deadline():
            for node in await self._topology.masters():
                (answer,) = await node.send([(b"INFO", b"server")])
                if isinstance(answer, ResponseError) and _code(answer) in _PASSING:
                    self._checked([answer])
                if shown := _facts(answer).get("redis_version"):
                    versions.append(tuple(int(part) for part in shown.split(".")))
        return min(versions, default=())

    async def check(self) -> None:
        """Return if the servers are of a version that can be used, or do not say which."""
        version = await self.info_version()
        if version and version < _LEAST_VERSION:
            shown = ".".join(map(str, version))
            raise StorageIOError(f"redis is of version {shown}; use Redis 7.0 or later, or Valkey")

    async def eviction(self) -> list[Eviction]:
        """Return what the masters evict by themselves, by INFO or CONFIG, as far as they say so."""
        async with self._deadline():
            return [
                _eviction_of(node.address, await node.send(_ASK_EVICTION)) for node in await self._topology.masters()
            ]

    async def masters(self) -> list[Address]:
        """Query and return the addresses of all masters, in a fixed order."""
        async with self._deadline():
            return [node.address for node in await self._topology.masters()]

    async def one_per_master(self, names: Iterable[str]) -> list[str]:
        """Return the first of endless names for each master, by tables of one part."""
        async with self._deadline():
            missing, found = set(await self._topology.masters()), list[str]()
            for name in names:
                node = await self._topology.node_of(slot_of(f"{{{name}.0}}".encode()))
                if node in missing:
                    missing.remove(node)
                    found.append(name)
                if not missing:
                    break
            return found

    async def connect(self, address: Address) -> Connection:
        """Return a new, authenticated connection to a server, which belongs to the caller."""
        try:
            return await open_connection(self.settings, address)
        except (OSError, RedisError) as error:
            raise StorageIOError(f"redis {address}: {str(error) or 'no answer'}; try again") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._topology.close()

    def _check_gate(self, *, creates: bool = False) -> None:
        if self.gate.closed:
            raise (BlocksMovedError if self.gate.moved else StorageIOError)(self.gate.closed)
        if creates and self.gate.full:
            raise StorageIOError(self.gate.full)

    @asynccontextmanager
    async def _deadline(self, op: str = "other") -> AsyncIterator[None]:
        seconds, begin = 2 * self.settings.timeout_seconds, time.perf_counter()
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise StorageIOError(f"redis: not done within {seconds:g} s; try again") from None
        finally:
            self.times[op].observe(time.perf_counter() - begin)

    def _slot(self, key: bytes) -> int:
        return slot_of(key) if self.is_cluster else 0

    async def _mget(self, groups: Sequence[Sequence[bytes]]) -> list[list[bytes | None]]:
        queried = [group for group in groups if group]
        if self.is_cluster:
            sent = [_Sent((b"MGET", *group), self._slot(group[0])) for group in queried]
            answers = iter(self._checked(await self._send(sent)))
            return [next(answers) if group else [] for group in groups]
        keys = [key for group in queried for key in group]
        values: list[bytes | None] = self._checked(await self._send([_Sent((b"MGET", *keys), 0)]))[0] if keys else []
        answers = iter(values)
        return [list(islice(answers, len(group))) for group in groups]

    async def _send_to_masters(self, command: Command) -> list[Any]:
        async with self._deadline():
            return [self._checked(await node.send([command]))[0] for node in await self._topology.masters()]

    async def _send(self, sent: Sequence[_Sent]) -> list[Any]:
        """Return the answers, after redirections. Errors are returned, save lost connections."""
        answers: list[Any] = [None] * len(sent)
        left = dict(enumerate(sent))
        for _ in range(_MOST_ROUNDS):
            await self._round(left, answers)
            left = {at: again for at, one in left.items() if (again := await self._redirected(one, answers[at]))}
            if not left:
                break
            if any(one.node is None for one in left.values()):
                await asyncio.sleep(_PAUSE_SECONDS)
        return answers

    async def _round(self, left: dict[int, _Sent], answers: list[Any]) -> None:
        by_node: dict[Node, list[int]] = {}
        for at, one in list(left.items()):
            node = one.node or await self._topology.node_of(one.slot)
            left[at] = one._replace(node=node)
            by_node.setdefault(node, []).append(at)
        results = await _all(self._send_to(node, [left[at] for at in places]) for node, places in by_node.items())
        for places, result in zip(by_node.values(), results, strict=True):
            for at, answer in zip(places, result, strict=True):
                answers[at] = answer

    async def _send_to(self, node: Node, sent: Sequence[_Sent]) -> list[Any]:
        commands = [part for one in sent for part in (((b"ASKING",), one.command) if one.asking else (one.command,))]
        try:
            answers = iter(await node.send(commands))
        except StorageIOError:
            await self._topology.invalidate()
            raise
        return [(next(answers), next(answers))[1] if one.asking else next(answers) for one in sent]

    async def _redirected(self, sent: _Sent, answer: Any) -> _Sent | None:
        if not isinstance(answer, ResponseError):
            return None
        if isinstance(answer, AskError):
            if isinstance(answer, MovedError):
                await self._topology.invalidate()
            assert sent.node is not None
            # A node that does not know the other's name means its own.
            node = self._topology.at(Address(answer.host or sent.node.address.host, answer.port))
            return sent._replace(node=node, asking=not isinstance(answer, MovedError))
        if isinstance(answer, TryAgainError):
            # Some keys of the slot have moved and others not yet.
            return sent._replace(node=None, asking=False)
        if _code(answer) in _OTHER_ROLE:
            await self._topology.invalidate()
            if sent.node is not None:
                await sent.node.forget_server()  # as a replica it takes over the data of another one
        return None

    @staticmethod
    def _checked(answers: list[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, ResponseError):
                if _code(answer) == MOVED_CODE:
                    raise _moved(str(answer))
                hint = _FULL if _code(answer) == "OOM" else "; try again" if _code(answer) in _PASSING else ""
                text = f"{answer.status_code} {answer}" if answer.status_code else str(answer)
                raise StorageIOError(f"redis answers: {text}{hint}")
        return answers


def _moved(answer: str) -> BlocksMovedError:
    number = re.search("[0-9]+", answer)
    move = int(number[0]) if number is not None else 0
    return BlocksMovedError(f"the blocks are moving to another metadata store (move {move}): try again", move)


async def _accept_server(_send: Exchange) -> None:
    """Take any server as it is."""


async def _all(askings: Iterable[Awaitable[list[Any]]]) -> list[list[Any]]:
    """Wait until all are done, also when one fails: none goes on behind the caller's back."""
    waiting = list(askings)
    if len(waiting) == 1:
        return [await waiting[0]]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def run_across(stages: Sequence[tuple[RedisClient, Sequence[ScriptCall]]]) -> list[list[Any]]:
    """Run stages of scripts on several stores, each only if no guard of an earlier one answered 0, and return the
    answers of those that ran: a round trip for each."""
    answers: list[list[Any]] = []
    for client, stage in stages:
        answers.append(await client.run(stage))
        if not _goes_on(stage, answers[-1]):
            break
    return answers


def fits_in_one(stage: Sequence[ScriptCall]) -> bool:
    """Return whether `RedisClient.run_in_turn` does not cut a stage."""
    return len(_cut_by_keys(stage)) == 1


def _cut_by_keys(stage: Sequence[ScriptCall]) -> list[list[ScriptCall]]:
    """Cut a stage into parts of `MOST_KEYS_PER_SCRIPT` keys, where no call alone has more; one part at least."""
    parts: list[list[ScriptCall]] = [[]]
    count = 0
    for call in stage:
        work = max(len(call.keys), call.load)
        if parts[-1] and count + work > MOST_KEYS_PER_SCRIPT:
            parts.append([])
            count = 0
        parts[-1].append(call)
        count += work
    return parts


def _key(command: Command) -> bytes:
    key = command[1]
    assert isinstance(key, bytes), command[0]
    return key


def _code(error: ResponseError) -> str:
    return error.status_code or str(error).partition(" ")[0]
