"""Servers that hang, die, come back or hand over: calls end in time with an error, and work again by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from redis_servers import Cluster, RedisServer, Sentinels, Standalone, cluster, sentinel, standalone
from waiting import until

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import RedisClient, Script, ScriptCall, slot_of
from kvcm.store.redis.uri import Address, parse_redis_uri

INCREMENT = Script("return redis.call('INCR', KEYS[1])")
TIMEOUT_SECONDS = 1.0  # the default of uris
SPARE_SECONDS = 2.0  # that a busy machine may take beyond what a call may
LONG_MS = 20_000  # of a client whose calls are over long before: they wait for no timeout
SOON_SECONDS = 10.0
RECOVERY_SECONDS = 40.0


@asynccontextmanager
async def connected(servers: Standalone | Cluster | Sentinels, **parameters: object) -> AsyncIterator[RedisClient]:
    client = RedisClient.of(parse_redis_uri(servers.uri(uuid4().hex, **parameters)))
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Standalone]:
    """A durable server that the test may kill."""
    with standalone(tmp_path, appendonly=True) as made:
        yield made


def key_of(client: RedisClient, tag: int = 0) -> bytes:
    return f"{client.prefix}:b{{{tag}}}".encode()


async def increment(client: RedisClient, tag: int = 0) -> int:
    (count,) = await client.run([ScriptCall(INCREMENT, [key_of(client, tag)])])
    assert isinstance(count, int)
    return count


async def refused_after(call: Awaitable[object]) -> float:
    """Return after how many seconds a call ended with an error that says to try again."""
    began = time.monotonic()
    with pytest.raises(StorageIOError, match="try again"):
        await call
    return time.monotonic() - began


async def recovered(call: Callable[[], Awaitable[object]]) -> None:
    """Wait until a call succeeds; each that fails must do so in time."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        began = time.monotonic()
        if await is_done(call()):
            return
        assert time.monotonic() - began < 2 * TIMEOUT_SECONDS + SPARE_SECONDS
        await asyncio.sleep(0.02)
    raise AssertionError(f"not recovered after {RECOVERY_SECONDS} s")


async def is_done(call: Awaitable[object]) -> bool:
    try:
        await call
    except StorageIOError:
        return False
    return True


async def test_a_server_that_hangs_is_given_up_in_time(lone: Standalone) -> None:
    async with connected(lone, timeout_ms=2500) as client:
        assert await increment(client) == 1
        lone.server.pause()
        seconds = await asyncio.gather(
            refused_after(increment(client)),
            refused_after(client.mget([[key_of(client)]])),
            refused_after(client.execute([(b"GET", key_of(client))])),
            refused_after(client.ping()),
        )
        assert min(seconds) >= 2.5 - 0.01  # by default they would be over
        assert max(seconds) < 2 * 2.5 + SPARE_SECONDS
        lone.server.resume()
        await recovered(client.ping)
        assert await client.mget([[key_of(client)]]) == [[b"2"]]  # the refused write ran once the server went on


async def test_by_default_a_hanging_server_costs_two_seconds_at_most(lone: Standalone) -> None:
    async with connected(lone) as client:
        await client.ping()
        lone.server.pause()
        assert await refused_after(client.mget([[key_of(client)]])) < 2 * TIMEOUT_SECONDS + SPARE_SECONDS
        lone.server.resume()
        await recovered(client.ping)


async def test_a_dry_pool_waits_and_then_refuses(lone: Standalone) -> None:
    """A pause of all clients fills the pool; nothing crashes, and what waited briefly is served."""
    async with connected(lone, pool_size=4) as client:
        with lone.server.admin() as admin:
            admin.execute_command("CLIENT", "PAUSE", 6000, "ALL")
        seconds = await asyncio.gather(*(refused_after(increment(client)) for _ in range(100)))
        assert max(seconds) < 2 * TIMEOUT_SECONDS + SPARE_SECONDS
        with lone.server.admin() as admin:
            assert int(admin.info("clients")["connected_clients"]) <= 4 + 1
        await recovered(client.ping)
        assert len(set(await asyncio.gather(*(increment(client) for _ in range(100))))) == 100


async def test_a_killed_server_is_refused_at_once_and_found_again(lone: Standalone) -> None:
    async with connected(lone, timeout_ms=LONG_MS) as client:
        await asyncio.gather(*(increment(client) for _ in range(10)))
        lone.server.kill()
        assert await refused_after(increment(client)) < SOON_SECONDS
        assert await refused_after(client.mget([[key_of(client)]])) < SOON_SECONDS
        lone.server.restart()
        assert await client.mget([[key_of(client)]]) == [[b"10"]]  # the very next call, with nothing left broken
        counts = await asyncio.gather(*(increment(client) for _ in range(10)))
        assert sorted(counts) == list(range(11, 21))  # each ran once, in any order: they go over several connections


async def test_a_read_survives_connections_that_the_server_closed(redis_standalone: Standalone) -> None:
    async with connected(redis_standalone) as client:
        await asyncio.gather(*(increment(client) for _ in range(5)))
        with redis_standalone.server.admin() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await client.mget([[key_of(client)]]) == [[b"5"]]


async def test_a_cancelled_call_leaves_no_answer_behind_for_the_next(redis_standalone: Standalone) -> None:
    async with connected(redis_standalone, pool_size=1) as client:
        await client.execute([(b"SET", key_of(client), b"right")])
        for turns in range(12):
            call = asyncio.create_task(client.execute([(b"ECHO", b"wrong")]))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await client.mget([[key_of(client)]]) == [[b"right"]]


async def test_a_server_without_memory_refuses_writes_and_still_reads(lone: Standalone) -> None:
    async with connected(lone) as client:
        await increment(client)
        with lone.server.admin() as admin:
            admin.config_set("maxmemory", "1")
        with pytest.raises(StorageIOError, match=r"OOM.*try again"):
            await client.execute([(b"SET", key_of(client), b"x")])
        assert await client.mget([[key_of(client)]]) == [[b"1"]]


async def test_a_server_that_became_a_replica_refuses_writes(lone: Standalone, tmp_path: Path) -> None:
    with standalone(tmp_path / "other") as other:
        async with connected(lone) as client:
            await increment(client)
            with lone.server.admin() as admin:
                admin.execute_command("REPLICAOF", "127.0.0.1", other.server.port)
            await refused_after(increment(client))
            with lone.server.admin() as admin:
                admin.execute_command("REPLICAOF", "NO", "ONE")
            await increment(client)


async def test_the_replica_takes_over_when_the_master_dies(tmp_path: Path) -> None:
    with sentinel(tmp_path) as servers:
        async with connected(servers) as client:
            assert await increment(client) == 1
            old = servers.master
            replicate(old, key_of(client))
            old.kill()
            await refused_after(increment(client))
            await recovered(lambda: increment(client))
            assert await increment(client) == 3
            assert (await client.masters())[0].port != old.port


def replicate(server: RedisServer, key: bytes) -> None:
    """Return when the replica has everything that the master was told so far."""
    with server.admin() as admin:
        admin.set(key + b"-last", b"")
        assert admin.wait(1, 20_000) == 1


async def changed(client: RedisClient, old: list[Address]) -> list[Address]:
    """Wait for other masters and return them."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while (new := await client.masters()) == old:
        assert time.monotonic() < deadline
    return new


async def forgotten(client: RedisClient, port: int) -> None:
    """Wait until a port is no master's: other nodes may not have heard of the promotion yet."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while port in {address.port for address in await client.masters()}:
        assert time.monotonic() < deadline


async def test_a_sentinel_that_missed_a_failover_is_not_believed(tmp_path: Path) -> None:
    """Old news do not lead back to the old master."""
    with sentinel(tmp_path) as servers:
        async with connected(servers) as client:
            before = await client.masters()
            behind = servers.sentinels[2]
            behind.pause()
            with servers.sentinels[0].admin() as admin:
                admin.execute_command("SENTINEL", "FAILOVER", "mymaster")
            new = await changed(client, before)
            behind.resume()
            assert [await client.masters() for _ in range(200)] == [new] * 200


async def test_one_sentinel_is_enough(redis_sentinel: Sentinels) -> None:
    async with connected(redis_sentinel, timeout_ms=LONG_MS) as client:
        for paused in redis_sentinel.sentinels[:2]:
            paused.pause()
        try:
            began = time.monotonic()
            await increment(client)
            assert time.monotonic() - began < SOON_SECONDS
        finally:
            for paused in redis_sentinel.sentinels[:2]:
                paused.resume()


async def test_a_cluster_node_that_restarts_is_found_again(redis_cluster: Cluster) -> None:
    async with connected(redis_cluster) as client:
        await asyncio.gather(*(increment(client, tag) for tag in range(100)))
        redis_cluster.nodes[1].kill()
        calls = [is_done(increment(client, tag)) for tag in range(100)]
        done = await asyncio.gather(*calls)
        assert any(done), "the other nodes go on"
        assert not all(done)
        redis_cluster.nodes[1].restart()
        until(redis_cluster.is_whole)
        await recovered(lambda: asyncio.gather(*(increment(client, tag) for tag in range(100))))


async def test_the_replica_of_a_dead_cluster_node_takes_over(tmp_path: Path) -> None:
    with cluster(tmp_path, replicas=1) as servers:
        async with connected(servers) as client:
            assert set(await asyncio.gather(*(increment(client, tag) for tag in range(50)))) == {1}
            dead = owner(servers, slot_of(key_of(client)))
            replicate(dead, key_of(client))
            dead.kill()
            await recovered(lambda: increment(client))
            assert await increment(client) >= 3, "nothing was forgotten"
            await forgotten(client, dead.port)


async def test_keys_are_found_while_and_after_their_slot_moves(redis_cluster: Cluster) -> None:
    """ASK for keys that are gone, TRYAGAIN for groups that are torn, MOVED at the end."""
    async with connected(redis_cluster) as client:
        keys = [f"{{{client.prefix}}}{at}".encode() for at in range(4)]
        await client.execute([(b"SET", key, key) for key in keys])
        slot = slot_of(keys[0])
        source = owner(redis_cluster, slot)
        target = next(node for node in redis_cluster.nodes if node is not source)
        with source.admin() as old, target.admin() as new:
            new_id, old_id = node_id(new), node_id(old)
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 1000, "KEYS", *keys[:2])
            assert await client.execute([(b"GET", key) for key in keys]) == keys
            assert await client.mget([keys[:2], keys[2:]]) == [keys[:2], keys[2:]]
            torn = asyncio.create_task(client.mget([keys]))
            await asyncio.sleep(0.05)
            assert not torn.done()
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 1000, "KEYS", *keys[2:])
            for admin in (new, old):
                admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
            assert await torn == [keys]
        assert await client.run([ScriptCall(Script("return redis.call('GET', KEYS[1])"), [keys[0]])]) == [keys[0]]


def node_id(admin: redis.Redis) -> bytes:
    answer: bytes = admin.execute_command("CLUSTER", "MYID")
    return answer


def owner(servers: Cluster, slot: int) -> RedisServer:
    with servers.nodes[0].admin() as admin:
        ranges = admin.execute_command("CLUSTER", "SLOTS")
    (port,) = {master[1] for first, last, master, *_ in ranges if first <= slot <= last}
    return next(server for server in servers.nodes if server.port == port)
