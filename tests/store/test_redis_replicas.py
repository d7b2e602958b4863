"""What replicas give: writes that wait for one, and what a promoted one has, behind sentinels and in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest
from redis_servers import Cluster, RedisServer, Sentinels, cluster, sentinel

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.store import RedisLease, RedisTable
from kvcm.store.redis.uri import parse_redis_uri

pytestmark = pytest.mark.ci  # processes that wait

Servers = Sentinels | Cluster


def nodes_of(servers: Servers) -> Sequence[RedisServer]:
    return servers.servers if isinstance(servers, Sentinels) else servers.nodes


def role(server: RedisServer) -> str:
    with server.admin() as admin:
        return admin.execute_command("ROLE")[0].decode()


@pytest.fixture(params=["sentinel", "cluster"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """Servers of the test's own, each master with one replica that it wants to have before it takes a write."""
    making = sentinel(tmp_path) if request.param == "sentinel" else cluster(tmp_path, replicas=1)
    with making as made:
        for each in nodes_of(made):
            with each.admin() as admin:
                admin.config_set("min-replicas-to-write", 1)
                admin.config_set("min-replicas-max-lag", 3)
        yield made


async def eventually(call: Callable[[], object], refused: bool) -> str:
    """Call until it is refused, or is not, and return with what; a server may be looked for meanwhile."""
    async with asyncio.timeout(60):
        while True:
            reason = ""
            try:
                await call()  # type: ignore[misc]
            except StorageIOError as error:
                reason = str(error)
            if bool(reason) is refused:
                return reason
            await asyncio.sleep(0.05)


async def test_without_its_replicas_a_master_refuses_writes_and_takes_them_again(servers: Servers) -> None:
    """Of every kind, leadership too; reads go on."""
    client = RedisClient.of(parse_redis_uri(servers.uri(uuid4().hex)))
    table, lease, number = RedisTable(client, "sessions", 8), RedisLease(client), iter(range(1_000_000))

    async def write() -> None:
        assert await table.replace(f"d{next(number)}", None, b"x")

    await eventually(write, refused=False)
    written = set(await table.all())
    replicas = [each for each in nodes_of(servers) if role(each) == "slave"]
    for each in replicas:
        each.pause()
    try:
        assert "NOREPLICAS" in await eventually(write, refused=True)
        assert "NOREPLICAS" in await eventually(lambda: lease.acquire("a", 1), refused=True)
        assert written <= set(await table.all())
    finally:
        for each in replicas:
            each.resume()
    await eventually(write, refused=False)
    await eventually(lambda: lease.acquire("a", 1), refused=False)
    await client.close()


@pytest.mark.ci
async def test_what_a_replica_confirmed_is_there_after_the_failover(servers: Servers) -> None:
    """`WAIT` says that replicas have all writes of a connection: with one replica that is the one that takes over."""
    client = RedisClient.of(parse_redis_uri(servers.uri(uuid4().hex)))
    table = RedisTable(client, "registry", 1)
    for number in range(100):
        await eventually(lambda number=number: table.replace(f"d{number}", None, b"x"), refused=False)
    old = master_of(servers, table)
    with old.admin() as admin:
        admin.execute_command("SET", table.document_key.replace(b":t{", b":wait{"), b"1")  # all before it, too
        assert admin.execute_command("WAIT", 1, 30_000) == 1
    servers.give_up_soon()
    old.kill()
    found = dict[str, bytes]()

    async def read() -> None:
        found.update(await table.all())

    await eventually(read, refused=False)
    assert sorted(found) == sorted(f"d{number}" for number in range(100))
    # The new master has no replica: until it has one it keeps what it has, and takes nothing new.
    assert "NOREPLICAS" in await eventually(lambda: table.replace("new", None, b"x"), refused=True)
    await client.close()


def master_of(servers: Servers, table: RedisTable) -> RedisServer:
    """Return the master that has the table."""
    for each in nodes_of(servers):
        with each.admin() as admin, contextlib.suppress(Exception):
            if role(each) == "master" and admin.exists(table.document_key):
                return each
    raise AssertionError("no master has the table")
