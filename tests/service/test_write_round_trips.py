"""How often a write waits for Redis, one answer after the other: what latency of the network costs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from delaying_proxy import distant
from fake_clock import FakeClock
from redis_servers import Servers, cluster
from test_several_managers import settings_of

from kvcm.app import Manager
from kvcm.cache.write_sessions import FinishedWrite, WriteRequest
from kvcm.components import Components, Sharing
from kvcm.config import Settings
from kvcm.model.errors import NotReadyError, StorageIOError
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import BlockMask
from kvcm.store.redis.client import Command, Node

DOCUMENT = Path(__file__).parents[2] / "docs/metadata.md"
BLOCKS = 64
WARM = 40
"""Writes after which every master of a cluster was met, and knows the scripts."""
MOST_TRIPS = {"redis_standalone": 3, "redis_sentinel": 3, "redis_cluster": 5}
"""Of a start and its finish together."""
MOST_SCRIPTS = {"redis_standalone": 2, "redis_sentinel": 2, "redis_cluster": 8}
"""Of each."""
_counted: ContextVar[Rounds | None] = ContextVar("counted", default=None)


class Rounds:
    """Counts the packets to servers that none was in flight beside, those that are sent at a time once, and scripts."""

    def __init__(self) -> None:
        self.count = self.scripts = self._in_flight = 0

    def begin(self, commands: Sequence[Command]) -> None:
        self.count += self._in_flight == 0
        self.scripts += sum(command[0] in {b"EVALSHA", b"EVAL"} for command in commands)
        self._in_flight += 1

    def end(self) -> None:
        self._in_flight -= 1


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Node.send

    async def counted(node: Node, commands: Sequence[Command]) -> list[Any]:
        rounds = _counted.get()
        if rounds is None:
            return await send(node, commands)
        rounds.begin(commands)
        try:
            return await send(node, commands)
        finally:
            rounds.end()

    monkeypatch.setattr(Node, "send", counted)


async def register(components: Components) -> None:
    specs = (LocationSpecInfo("kv", 10),)
    await components.registry.instances.register(Instance("", "default", "i", 16, specs, ModelDeployment("m", "bf16")))


def large_settings_of(uri: str, directory: Path) -> Settings:
    settings = settings_of(uri, directory)
    document = directory / "startup.json"
    document.write_text(document.read_text().replace("1000", "1000000").replace("4000", "4000000"))
    return settings


@asynccontextmanager
async def managed(uri: str, directory: Path) -> AsyncIterator[Components]:
    """A manager with an instance that many blocks fit in."""
    async with Manager(large_settings_of(uri, directory)).opened() as components:
        await register(components)
        yield components


async def write(
    components: Components, keys: Sequence[int], parent: int | None = None, masked: int = 0
) -> list[Rounds]:
    """Start and finish a write of which so many blocks are there; return what each of them waited for."""
    cache, rounds = components.cache, [Rounds(), Rounds()]
    instance = cache.cache("i")
    for counted, step in zip(rounds, ("start", "finish"), strict=True):
        token = _counted.set(counted)
        try:
            if step == "start":
                started = await cache.start_write(instance, WriteRequest(keys, timeout_seconds=60, parent_key=parent))
            else:
                success = BlockMask.of([True] * (len(keys) - masked))
                done = await cache.finish_write(instance, started.session.id, success)
        finally:
            _counted.reset(token)
    assert done == FinishedWrite(len(keys) - masked, 0, 0)
    return rounds


@pytest.mark.parametrize(
    ("server", "row"),
    [
        ("redis_standalone", "one server"),
        ("redis_cluster", "Cluster"),
        ("redis_sentinel", "one server, Sentinel"),
    ],
)
async def test_a_write_waits_for_as_many_answers_as_the_document_says(
    server: str, row: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    servers: Servers = request.getfixturevalue(server)
    stated = re.search(rf"^\| {row}.*?\| (\d+) \| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert stated is not None
    async with managed(servers.uri(f"t{uuid4().hex[:12]}"), tmp_path) as components:
        for turn in range(WARM):  # connects, and hands the scripts over
            await write(components, range(8 * turn, 8 * turn + 8))
        await write(components, range(-2000, -1000))
        head = range(10_000, 11_024)
        for keys, parent in (
            (head, None),
            (range(20_000, 21_024), head[-1]),
            (range(30_000, 30_000 + BLOCKS), None),
            (range(31_000, 31_000 + BLOCKS), 30_000 + BLOCKS - 1),
        ):
            rounds = await write(components, keys, parent)
            assert [each.count for each in rounds] == [int(number) for number in stated.groups()]
            assert sum(each.count for each in rounds) <= MOST_TRIPS[server]
            assert all(each.scripts <= MOST_SCRIPTS[server] for each in rounds), [each.scripts for each in rounds]


async def test_blocks_that_are_there_cost_one_answer_more_where_the_manager_does_not_know_their_first(
    redis_standalone: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharing, "is_coherent", lambda _self, _store: True)  # these managers have no background tasks
    uri = redis_standalone.uri(f"t{uuid4().hex[:12]}")
    async with managed(uri, tmp_path) as writer, managed(uri, tmp_path) as other:
        for components, first in ((writer, -500), (other, -300)):
            for turn in range(4):
                await write(components, range(first + 8 * turn, first + 8 * turn + 8))
            await write(components, range(first + 24, first + 40), masked=8)
        for begin in (1000, 2000):
            await write(writer, range(begin, begin + 64))
        starts = [
            (await write(writer, range(1000, 1100), masked=64))[0],
            (await write(other, range(1000, 1200), masked=100))[0],
            (await write(other, range(1050, 1300), masked=150))[0],
        ]
        assert [(start.count, start.scripts) for start in starts] == [(2, 2), (3, 1), (3, 1)]
        index = other.cache.cache("i").index
        await index.answers(list(range(2000, 2064)))
        (start, _) = await write(other, range(2000, 2100), masked=64)
        assert (start.count, start.scripts) == (2, 2)
        # Where the parent's depth has to be read, a script reads it with the blocks.
        (start, _) = await write(other, range(3000, 3064), parent=1063)
        assert (start.count, start.scripts) == (2, 2)
        await write(other, range(4000, 4064), parent=3063)
        depths = [record.depth for record in await index.get([3000, 4063]) if record is not None]
        assert depths == [64, 64 + 127]


async def test_latency_costs_a_cluster_s_writers_the_answers_that_they_wait_for(tmp_path: Path) -> None:
    """With 20 ms, and with a second: then a call still succeeds where it may take that long, and else fails in time."""
    with cluster(tmp_path / "redis") as servers:
        async with distant(servers) as (through, proxies):
            async with managed(through.uri("distant"), tmp_path) as components:
                for turn in range(WARM):
                    await write(components, range(8 * turn, 8 * turn + 8))
                for seconds, slack in ((0.02, 0.5), (1.0, 2.0)):
                    for proxy in proxies:
                        proxy.seconds = seconds
                    begin = time.monotonic()
                    rounds = await write(components, range(int(seconds * 100_000), int(seconds * 100_000) + 1024))
                    waited = sum(each.count for each in rounds)
                    assert waited <= MOST_TRIPS["redis_cluster"]
                    assert waited * seconds <= time.monotonic() - begin <= waited * seconds + slack
                    await components.cache.endings.concluded()
            for proxy in proxies:
                proxy.seconds = 0.0
            async with managed(through.uri("distant", timeout_ms=400), tmp_path) as components:
                for turn in range(WARM):
                    await write(components, range(-8 * turn - 8, -8 * turn))
                for proxy in proxies:
                    proxy.seconds = 1.0
                begin = time.monotonic()
                with pytest.raises(StorageIOError, match="try again"):
                    await write(components, range(500_000, 500_000 + BLOCKS))
                assert time.monotonic() - begin <= 2 * 2 * 0.4 + 1  # the read, and the rollback at most
                for proxy in proxies:
                    proxy.seconds = 0.0
                await asyncio.sleep(1)
                await write(components, range(500_000, 500_000 + BLOCKS))


async def test_a_start_that_redis_holds_up_for_long_ends_with_what_was_slow(
    redis_standalone: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy of blocks takes more round trips than one, in which its reservation might lapse. It leaves no
    session."""
    clock, send = FakeClock(1_000.0), Node.send

    async def late(node: Node, commands: Sequence[Command]) -> list[Any]:
        clock.time += 7.0
        return await send(node, commands)

    settings = settings_of(redis_standalone.uri(f"t{uuid4().hex[:12]}"), tmp_path)
    async with Manager(settings, clock).opened() as components:
        cache = components.cache
        await register(components)
        instance = cache.cache("i")
        first = await cache.start_write(instance, WriteRequest(keys=range(BLOCKS), timeout_seconds=60))
        await cache.finish_write(instance, first.session.id, BlockMask.of([True] * BLOCKS))
        monkeypatch.setattr(Node, "send", late)
        with pytest.raises(NotReadyError, match="the store took too long for the write to begin: start it again"):
            await cache.start_write(instance, WriteRequest(range(BLOCKS), timeout_seconds=60, min_replica_count=2))
        assert await cache.open_sessions.find_all() == []
