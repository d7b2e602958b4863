"""How often a write waits for Redis, one answer after the other: what latency of the network costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from redis_servers import Servers
from test_several_managers import settings_of

from kvcm.app import Manager
from kvcm.cache.write_sessions import WriteRequest
from kvcm.components import Components
from kvcm.model.errors import NotReadyError
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import BlockMask
from kvcm.store.redis.client import Command, Node

DOCUMENT = Path(__file__).parents[2] / "docs/metadata.md"
BLOCKS = 64
_counted: ContextVar[Rounds | None] = ContextVar("counted", default=None)


class Rounds:
    """Counts the packets to servers that none was in flight beside: those that are sent at a time count once."""

    def __init__(self) -> None:
        self.count = self._in_flight = 0

    def begin(self) -> None:
        self.count += self._in_flight == 0
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
        rounds.begin()
        try:
            return await send(node, commands)
        finally:
            rounds.end()

    monkeypatch.setattr(Node, "send", counted)


async def register(components: Components) -> None:
    specs = (LocationSpecInfo("kv", 10),)
    await components.registry.instances.register(Instance("", "default", "i", 16, specs, ModelDeployment("m", "bf16")))


@pytest.mark.parametrize(
    ("server", "row"),
    [
        ("redis_standalone", "one server"),
        ("redis_cluster", "Cluster, at most"),
        ("redis_sentinel", "one server, Sentinel"),
    ],
)
async def test_a_write_waits_for_as_many_answers_as_the_document_says(
    server: str, row: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    servers: Servers = request.getfixturevalue(server)
    stated = re.search(rf"^\| {row}.*?\| (\d+) \| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert stated is not None
    async with Manager(settings_of(servers.uri(f"t{uuid4().hex[:12]}"), tmp_path)).opened() as components:
        cache = components.cache
        await register(components)
        instance, rounds = cache.cache("i"), []
        for turn in range(2):  # the first one also connects
            keys = range(turn * BLOCKS, (turn + 1) * BLOCKS)
            for step in ("start", "finish"):
                counted = Rounds()
                token = _counted.set(counted)
                if step == "start":
                    started = await cache.start_write(instance, WriteRequest(keys=keys, timeout_seconds=60))
                else:
                    await cache.finish_write(instance, started.session.id, BlockMask.of([True] * BLOCKS))
                _counted.reset(token)
                rounds.append(counted.count)
        assert len(started.session.keys) == BLOCKS
    most = [int(number) for number in stated.groups()]
    if server == "redis_cluster":  # which masters hold what is settled by chance
        assert all(count <= bound for count, bound in zip(rounds[2:], most, strict=True)), rounds
    else:
        assert rounds[2:] == most


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
