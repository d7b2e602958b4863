"""Managers on a Redis at its `maxmemory`: nothing new is stored, and all that makes room goes on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis_servers import Standalone, standalone
from test_several_managers import (
    KEYS,
    Node,
    eventually,
    finish,
    gauge,
    hits,
    leading,
    node,
    registered,
    settings_of,
    start,
)

from kvcm.protocol import meta_service_pb2 as meta

BLOCK_BYTES = 100


class Limited:
    """A server whose memory can be said to be used up."""

    def __init__(self, server: Standalone) -> None:
        self._server = server
        self.uri = server.uri("full")

    def limit(self, most_bytes: int) -> None:
        with self._server.server.admin() as admin:
            admin.config_set("maxmemory", most_bytes)

    def leader(self) -> str:
        """Return who holds the lease, "" for nobody."""
        with self._server.server.admin() as admin:
            return str(admin.get("full:l{leader}") or b"", "ascii")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Limited]:
    with standalone(tmp_path / "redis") as made:
        yield Limited(made)


async def test_a_full_store_is_left_by_finishing_expiring_and_removing(server: Limited, tmp_path: Path) -> None:
    """Invariants 1, 3 and 4 hold on the way: what is answered, decided and counted is what is stored."""
    settings = settings_of(server.uri, tmp_path)
    async with contextlib.AsyncExitStack() as one, contextlib.AsyncExitStack() as another:
        ends = {await stack.enter_async_context(node(settings)): stack for stack in (one, another)}
        first, second = ends
        await registered(first)
        await finish(first, await start(first, KEYS[:10]), 10)
        finishing = await start(first, KEYS[10:20])
        await start(second, KEYS[20:25], seconds=1)
        server.limit(1)
        await refused(second)
        assert (await finish(second, finishing, 10)).header.status.code == meta.OK
        assert await hits(second) == 20
        await remove(second, 20)
        await eventually(lambda: uses(second, 19))  # what expired and what was removed is gone
        assert await hits(second) == 19
        leader = await leading([first, second])
        (left,) = ends.keys() - {leader}
        await ends[leader].aclose()
        await eventually(lambda: leads(server, left))
        await remove(left, 19)
        await eventually(lambda: uses(left, 18))
        await refused(left)
        server.limit(0)
        assert len((await start(left, [500])).locations) == 1


async def refused(on: Node) -> None:
    status = (await start(on, [500])).header.status
    assert status.code == meta.IO_ERROR
    assert "memory of the server is full" in status.message


async def remove(on: Node, key: int) -> None:
    answer = await on.meta.RemoveCache(meta.RemoveCacheRequest(instance_id="i", block_keys=[key]))
    assert answer.header.status.code == meta.OK


async def uses(on: Node, blocks: int) -> bool:
    return await gauge(on, "cache_manager_instance.byte_size") == blocks * BLOCK_BYTES


async def leads(server: Limited, manager: Node) -> bool:
    return server.leader() == manager.endpoint.node_id
