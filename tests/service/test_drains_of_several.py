"""Managers on one store: a drain that one is asked for holds for all, and whoever leads carries it out."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from redis_servers import Standalone
from test_several_managers import (
    KEYS,
    Node,
    eventually,
    finish,
    hits,
    leading,
    node,
    registered,
    settings_of,
    start,
)

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as pb
from kvcm.protocol.kvcm.v1.storage_service_pb2_grpc import StorageServiceStub

pytestmark = pytest.mark.e2e

SETTLES_SECONDS = 30.0


@pytest.fixture
async def nodes(redis_standalone: Standalone, tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Two managers."""
    uri = redis_standalone.uri(f"t{secrets.token_hex(6)}")
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(settings_of(uri, tmp_path))) for _ in range(2)]


@contextlib.asynccontextmanager
async def storages_of(on: Node) -> AsyncIterator[StorageServiceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{on.endpoint.admin_rpc_port}") as channel:
        yield StorageServiceStub(channel)


async def drains(on: Node) -> list[pb.Drain]:
    async with storages_of(on) as stub:
        return list((await stub.ListDrain(pb.ListDrainRequest())).drains)


async def refuses(on: Node) -> bool:
    answer = await start(on, [1000])
    return answer.header.status.code == meta.SERVICE_NOT_READY and "being drained" in answer.header.status.message


@pytest.mark.timeout(120)
async def test_a_drain_holds_for_all_and_outlives_a_change_of_leaders(nodes: list[Node]) -> None:
    await registered(nodes[0])
    await finish(nodes[0], await start(nodes[0], KEYS), len(KEYS))
    leader = await leading(nodes)
    (other,) = (each for each in nodes if each is not leader)
    async with storages_of(other) as stub:
        answer = await stub.DrainStorage(pb.DrainStorageRequest(storage_unique_name="nfs"))
        assert answer.header.status.code == admin.OK
    await leader.admin.LeaderDemote(admin.LeaderDemoteRequest())
    for each in nodes:
        await eventually(lambda each=each: refuses(each))

    async def is_empty(on: Node) -> bool:
        return [(each.left_bytes, each.state) for each in await drains(on)] == [(0, pb.DRAIN_DONE)]

    for each in nodes:
        await eventually(lambda each=each: is_empty(each), SETTLES_SECONDS)
        assert await hits(each) == 0
    async with storages_of(nodes[0]) as stub:
        await stub.CancelDrain(pb.CancelDrainRequest(storage_unique_name="nfs"))

    async def writes(on: Node) -> bool:
        return (await start(on, [on.endpoint.meta_rpc_port])).header.status.code == meta.OK

    for each in nodes:
        await eventually(lambda each=each: writes(each))
        assert await drains(each) == []
