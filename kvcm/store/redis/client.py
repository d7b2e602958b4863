"""Commands to a Redis or Valkey, wherever their keys lie.

1. A call ends within twice `timeout_ms`, with an answer or with StorageIOError.
2. Writes are sent once: after a lost connection nobody knows whether they ran, and the caller has to find out. Only
   what certainly did not run is sent again: redirections, and scripts that the server did not know.
3. Nothing stays broken: a lost connection or an answer that speaks of another role makes the next call look around
   (`topology.py`), so calls succeed by themselves as soon as some server is responsible again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from binascii import crc_hqx
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from redis.asyncio.connection import Connection
from redis.exceptions import AskError, MovedError, NoScriptError, RedisError, ResponseError, TryAgainError

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.node import Command, Node, open_connection
from kvcm.store.redis.script import Script, ScriptCall
from kvcm.store.redis.topology import topology_of
from kvcm.store.redis.uri import Address, RedisSettings
from kvcm.telemetry.metrics_values import Histogram

__all__ = ["RedisClient", "Script", "ScriptCall", "slot_of"]

_SLOT_COUNT = 16384
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


class RedisClient:
    """Connections to one Redis or Valkey, made when needed.

    Every method that awaits raises StorageIOError when there is no answer in time, or an error for an answer.

    Attributes:
        prefix: name of the deployment; every key begins with it.
        is_cluster: whether keys of different hash tags may lie on different servers.
        times: how long operations took, by kind.
    """

    def __init__(self, settings: RedisSettings, random: Random) -> None:
        self.settings = settings
        self.prefix = settings.cluster_name
        self.is_cluster = settings.kind == "cluster"
        self.times = {op: Histogram() for op in ("read", "script", "command", "other")}
        self._topology = topology_of(settings, random)

    @classmethod
    def of(cls, settings: RedisSettings) -> RedisClient:
        """Return a client that is not connected yet."""
        return cls(settings, Random())  # noqa: S311 - spreads load over nodes

    async def mget(self, groups: Sequence[Sequence[bytes]]) -> list[list[bytes | None]]:
        """Return values of keys, None where there is none. Keys of one group share a hash tag."""
        async with self._deadline("read"):
            for _ in range(self.settings.retry_count):
                with contextlib.suppress(StorageIOError):
                    return await self._mget(groups)
            return await self._mget(groups)

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts and return their answers. An error of one raises; others may have run then."""
        async with self._deadline("script"):
            slots = [self._slot(call.keys[0]) for call in calls]
            answers = await self._send([_Sent(call.by_sha1, slot) for call, slot in zip(calls, slots, strict=True)])
            unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            again = await self._send([_Sent(calls[at].by_text, slots[at]) for at in unknown])
            for at, answer in zip(unknown, again, strict=True):
                answers[at] = answer
            return self._checked(answers)

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands that each have one key, in second place, and return their answers, as those of RESP2."""
        async with self._deadline("command"):
            return self._checked(await self._send([_Sent(command, self._slot(_key(command))) for command in commands]))

    async def ping(self) -> None:
        """Return when every master answers."""
        await self._ask_masters((b"PING",))

    async def info_version(self) -> tuple[int, ...]:
        """Return the version of the oldest master, as Redis counts them."""
        versions = []
        for answer in await self._ask_masters((b"INFO", b"server")):
            lines = dict(line.partition(":")[::2] for line in answer.decode().splitlines())
            versions.append(tuple(int(part) for part in lines["redis_version"].split(".")))
        return min(versions)

    async def check(self) -> None:
        """Return if the servers are of a version that can be used."""
        version = await self.info_version()
        if version < _LEAST_VERSION:
            shown = ".".join(map(str, version))
            raise StorageIOError(f"redis is of version {shown}; use Redis 7.0 or later, or Valkey")

    async def masters(self) -> list[Address]:
        """Ask anew and return the addresses of all masters, in a fixed order."""
        async with self._deadline():
            return [node.address for node in await self._topology.masters()]

    async def connect(self, address: Address) -> Connection:
        """Return a new, authenticated connection to a server, which belongs to the caller."""
        try:
            return await open_connection(self.settings, address)
        except (OSError, RedisError) as error:
            raise StorageIOError(f"redis {address}: {str(error) or 'no answer'}; try again") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._topology.close()

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
        asked = [group for group in groups if group]
        if self.is_cluster:
            sent = [_Sent((b"MGET", *group), self._slot(group[0])) for group in asked]
            answers = iter(self._checked(await self._send(sent)))
            return [next(answers) if group else [] for group in groups]
        keys = [key for group in asked for key in group]
        values: list[bytes | None] = self._checked(await self._send([_Sent((b"MGET", *keys), 0)]))[0] if keys else []
        answers = iter(values)
        return [list(islice(answers, len(group))) for group in groups]

    async def _ask_masters(self, command: Command) -> list[Any]:
        async with self._deadline():
            return [self._checked(await node.ask([command]))[0] for node in await self._topology.masters()]

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
        results = await _all(self._ask(node, [left[at] for at in places]) for node, places in by_node.items())
        for places, result in zip(by_node.values(), results, strict=True):
            for at, answer in zip(places, result, strict=True):
                answers[at] = answer

    async def _ask(self, node: Node, sent: Sequence[_Sent]) -> list[Any]:
        commands = [part for one in sent for part in (((b"ASKING",), one.command) if one.asking else (one.command,))]
        try:
            answers = iter(await node.ask(commands))
        except StorageIOError:
            await self._topology.doubt()
            raise
        return [(next(answers), next(answers))[1] if one.asking else next(answers) for one in sent]

    async def _redirected(self, sent: _Sent, answer: Any) -> _Sent | None:
        if not isinstance(answer, ResponseError):
            return None
        if isinstance(answer, AskError):
            if isinstance(answer, MovedError):
                await self._topology.doubt()
            assert sent.node is not None
            # A node that does not know the other's name means its own.
            node = self._topology.at(Address(answer.host or sent.node.address.host, answer.port))
            return sent._replace(node=node, asking=not isinstance(answer, MovedError))
        if isinstance(answer, TryAgainError):
            # Some keys of the slot have moved and others not yet.
            return sent._replace(node=None, asking=False)
        if _code(answer) in _OTHER_ROLE:
            await self._topology.doubt()
        return None

    @staticmethod
    def _checked(answers: list[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, ResponseError):
                hint = _FULL if _code(answer) == "OOM" else "; try again" if _code(answer) in _PASSING else ""
                text = f"{answer.status_code} {answer}" if answer.status_code else str(answer)
                raise StorageIOError(f"redis answers: {text}{hint}")
        return answers


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


def _key(command: Command) -> bytes:
    key = command[1]
    assert isinstance(key, bytes), command[0]
    return key


def _code(error: ResponseError) -> str:
    return error.status_code or str(error).partition(" ")[0]
