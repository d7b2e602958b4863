"""Invalidations: told of every change, and of every time that changes may have been missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from redis_servers import Cluster, Sentinels, Standalone, sentinel, standalone

from kvcm.store.redis import tracking
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.tracking import Invalidations
from kvcm.store.redis.uri import parse_redis_uri

KINDS = ["standalone", "cluster", "sentinel"]
WAIT_SECONDS = 40.0
SILENCE_SECONDS = 0.5 + 0.5 + 2.0  # from ping to ping, for an answer, and what a busy machine may add


class Listener:
    """What a cache would be told."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.prefix = f"{client.prefix}:b{{".encode()
        self.keys: set[bytes] = set()
        self.resets = 0
        self.reset_while_live = False
        self.invalidations = Invalidations(client, self.prefix, self._on_keys, self._on_reset)

    def _on_keys(self, keys: Sequence[bytes]) -> None:
        self.keys.update(keys)

    def _on_reset(self) -> None:
        self.resets += 1
        self.reset_while_live = self.invalidations.is_live

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition holds and return the seconds it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < WAIT_SECONDS
            await asyncio.sleep(0.002)
        return time.monotonic() - began

    async def live(self) -> None:
        await self.until(lambda: self.invalidations.is_live)


@asynccontextmanager
async def listening(servers: Standalone | Cluster | Sentinels) -> AsyncIterator[Listener]:
    client = RedisClient.of(parse_redis_uri(servers.uri(uuid4().hex)))
    listener = Listener(client)
    running = asyncio.create_task(listener.invalidations.run())
    try:
        await listener.live()
        yield listener
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
    assert running.cancelled(), running
    assert not listener.invalidations.is_live


@pytest.mark.parametrize("kind", KINDS)
async def test_changes_by_others_arrive_by_themselves(kind: str, request: pytest.FixtureRequest) -> None:
    servers = request.getfixturevalue(f"redis_{kind}")
    async with listening(servers) as listener:
        other = RedisClient.of(listener.client.settings)
        keys = {listener.prefix + b"%d}\r\n\x00\xff" % tag for tag in range(50)}
        await other.execute([(b"SET", key, b"1") for key in keys])
        await listener.until(lambda: listener.keys >= keys)
        listener.keys.clear()
        await other.execute([(b"DEL", key) for key in keys])
        await listener.until(lambda: listener.keys >= keys)
        await other.close()
        assert listener.keys == keys
        assert listener.resets == 1, "once, before it went live"


async def test_only_keys_below_the_prefix_are_told(redis_standalone: Standalone) -> None:
    async with listening(redis_standalone) as listener:
        last = listener.prefix + b"last"
        names = [listener.client.prefix.encode() + b":z{1}", b"foreign:b{1}", last]
        await listener.client.execute([(b"SET", name, b"1") for name in names])
        await listener.until(lambda: last in listener.keys)
        assert listener.keys == {last}


async def test_a_flushed_server_resets(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            with servers.server.admin() as admin:
                admin.flushall()
            await listener.until(lambda: listener.resets == 2)
            assert listener.invalidations.is_live


@pytest.fixture
def no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the connections themselves to say that they are lost."""
    monkeypatch.setattr(tracking, "_PING_SECONDS", 600.0)
    monkeypatch.setattr(tracking, "_PONG_SECONDS", 600.0)


@pytest.mark.usefixtures("no_pings")
async def test_a_lost_connection_resets_and_comes_back(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            with servers.server.admin() as admin:
                admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await listener.until(lambda: listener.resets == 2)
            assert not listener.invalidations.is_live
            await listener.live()
            assert listener.resets == 3
            assert not listener.reset_while_live, "what was missed is forgotten before anybody trusts the cache again"
            key = listener.prefix + b"1}"
            await listener.client.execute([(b"SET", key, b"1")])
            await listener.until(lambda: key in listener.keys)


@pytest.mark.usefixtures("no_pings")
async def test_a_killed_server_is_noticed_at_once(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            servers.server.kill()
            await listener.until(lambda: not listener.invalidations.is_live)
            assert listener.resets == 2
            servers.server.restart()
            await listener.live()


async def test_silence_is_noticed_within_about_a_second(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with listening(servers) as listener:
            servers.server.pause()
            try:
                assert await listener.until(lambda: not listener.invalidations.is_live) < SILENCE_SECONDS
                assert listener.resets == 2
            finally:
                servers.server.resume()
            await listener.live()


async def test_every_master_of_a_cluster_has_to_be_heard(redis_cluster: Cluster) -> None:
    async with listening(redis_cluster) as listener:
        redis_cluster.nodes[2].pause()
        try:
            assert await listener.until(lambda: not listener.invalidations.is_live) < SILENCE_SECONDS
        finally:
            redis_cluster.nodes[2].resume()
        await listener.until(redis_cluster.is_whole)
        await listener.live()


async def test_another_master_is_followed(tmp_path: Path) -> None:
    """A handover in which no process dies: the old master stays and would go on answering pings."""
    with sentinel(tmp_path) as servers:
        async with listening(servers) as listener:
            old = servers.master
            with servers.sentinels[0].admin() as admin:
                admin.execute_command("SENTINEL", "FAILOVER", "mymaster")
            await listener.until(lambda: servers.master is not old and listener.resets > 2)
            await listener.live()
            key = listener.prefix + b"1}"
            await listener.client.execute([(b"SET", key, b"1")])
            await listener.until(lambda: key in listener.keys)
