"""Managers whose Redis was emptied, is another deployment's, or drops keys: they say so, and come back alone."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from redis_dumps import contents, dumped, put_in_place
from redis_servers import Standalone, standalone
from rest_client import RestClient
from test_several_managers import (
    KEYS,
    Node,
    eventually,
    finish,
    instance_fields,
    node,
    settings_of,
    start,
)

from kvcm.config import Settings
from kvcm.doctor.findings import Level
from kvcm.doctor.manager import check_manager
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.terminal.admin_client import AdminClient

NAME = "one"
"""Of the deployment."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Standalone]:
    """One server of the test's own."""
    with standalone(tmp_path / "redis") as made:
        yield made


@pytest.fixture
def client(server: Standalone) -> Iterator[redis.Redis]:
    with server.server.admin() as made:
        yield made


def settings(server: Standalone, directory: Path) -> Settings:
    return settings_of(server.uri(NAME), directory)


@contextlib.asynccontextmanager
async def managers(server: Standalone, directory: Path, count: int) -> AsyncIterator[list[Node]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(settings(server, directory))) for _ in range(count)]


async def readiness(on: Node) -> tuple[int, str]:
    """Return status and text of the page."""

    def asked() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", on.endpoint.admin_http_port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz?verbose")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return await asyncio.to_thread(asked)


async def metric(on: Node, name: str) -> float:
    def asked() -> str:
        connection = http.client.HTTPConnection("127.0.0.1", on.endpoint.admin_http_port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    text = await asyncio.to_thread(asked)
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def all_ready(nodes: list[Node]) -> bool:
    return {(await readiness(each))[0] for each in nodes} == {200}


async def groups(on: Node) -> list[str]:
    found = []
    for name in ("default", "made"):
        answer = await on.admin.GetInstanceGroup(admin.GetInstanceGroupRequest(name=name))
        found += [name] * (answer.header.status.code == admin.OK)
    return found


async def make_group(on: Node, name: str) -> None:
    group = (await on.admin.GetInstanceGroup(admin.GetInstanceGroupRequest(name="default"))).instance_group
    group.name = name
    answer = await on.admin.CreateInstanceGroup(admin.CreateInstanceGroupRequest(instance_group=group))
    assert answer.header.status.code == admin.OK, answer.header


_keys = itertools.count(1_000)


async def writes(on: Node) -> bool:
    """Whether a block that is not there yet can be written and read."""
    keys = [next(_keys)]
    started = await start(on, keys)
    if started.header.status.code != meta.OK or (await finish(on, started, 1)).header.status.code != meta.OK:
        return False
    request = meta.GetCacheLocationRequest(instance_id="i", block_keys=keys, query_type=meta.QT_PREFIX_MATCH)
    return len((await on.meta.GetCacheLocation(request)).locations) == 1


async def registers(on: Node, name: str, group: str = "made") -> bool:
    fields = instance_fields(name, group, location_spec_infos=[{"name": "kv", "size": 1}])
    answer = await on.meta.RegisterInstance(meta.RegisterInstanceRequest(**fields))
    return bool(answer.header.status.code == meta.OK)


EMPTYINGS = {
    "everything": lambda client: client.flushall(),
    "the registry": lambda client: client.delete(f"{NAME}:t{{registry.0}}"),
    "the schema": lambda client: client.hdel(f"{NAME}:t{{registry.0}}", "meta/schema"),
}


@pytest.mark.parametrize("what", EMPTYINGS)
async def test_a_store_that_lost_its_registry_gets_it_back_without_a_restart(
    server: Standalone, client: redis.Redis, tmp_path: Path, what: str
) -> None:
    async with managers(server, tmp_path, 3) as nodes:
        await make_group(nodes[0], "made")
        assert await registers(nodes[0], "i", "default")
        assert await writes(nodes[0])
        for each in nodes:
            await eventually(lambda each=each: knows_all(each))
        EMPTYINGS[what](client)
        await eventually(lambda: restorations(nodes))
        for number, each in enumerate(nodes):
            await eventually(lambda each=each: writes(each))
            await eventually(lambda each=each, number=number: registers(each, f"new{number}"))
            assert await groups(each) == ["default", "made"]
        await eventually(lambda: all_ready(nodes))
        assert await alerts(nodes[0], "KvcmStoreLostChanges")
        assert any("lost changes" in found for found in await doctor(nodes[0]))


async def test_another_deployments_store_is_neither_read_nor_written(
    server: Standalone, client: redis.Redis, tmp_path: Path
) -> None:
    async with managers(server, tmp_path, 1) as nodes:
        assert await registers(nodes[0], "i", "default")
        foreign, expected = dumped(client, NAME), contents(client, NAME)
    client.flushall()
    async with managers(server, tmp_path, 2) as nodes:
        await make_group(nodes[0], "made")
        assert await registers(nodes[1], "i", "default")
        assert await writes(nodes[0])
        own = dumped(client, NAME)
        put_in_place(client, NAME, foreign)
        for each in nodes:
            await eventually(lambda each=each: says(each, "another deployment's"))
        # Until a quarter of a second after such a change within one server process, usage may be reported to it.
        found = contents(client, NAME)
        assert {key: found[key] for key in expected} == expected
        for each in nodes:
            assert not await writes(each)
            assert await metric(each, 'kvcm_store_unsound{reason="closed"}') == 1
        assert contents(client, NAME) == found
        put_in_place(client, NAME, own)
        await eventually(lambda: all_ready(nodes))
        for each in nodes:
            await eventually(lambda each=each: writes(each))


async def test_a_server_that_comes_back_with_others_data_gets_no_command(
    server: Standalone, client: redis.Redis, tmp_path: Path
) -> None:
    """Not even in the moment before the registry is read again."""
    files = server.server.directory
    async with managers(server, tmp_path, 1):
        client.save()
        foreign = (files / "dump.rdb").read_bytes()
    client.flushall()
    async with managers(server, tmp_path, 2) as nodes:
        assert await registers(nodes[0], "i", "default")
        server.server.kill()
        (files / "dump.rdb").write_bytes(foreign)
        server.server.restart()
        loaded = contents(client, NAME)
        calls = [asyncio.create_task(start(each, [number])) for number in range(20) for each in nodes]
        for each in nodes:
            await eventually(lambda each=each: says(each, "another deployment's"))
        await asyncio.gather(*calls)
        assert await metric(nodes[0], "kvcm_store_new_servers_total") == 1
        assert contents(client, NAME) == loaded


async def test_a_store_that_drops_keys_takes_nothing_new(
    server: Standalone, client: redis.Redis, tmp_path: Path
) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    async with managers(server, tmp_path, 2) as nodes:
        for each in nodes:
            await eventually(lambda each=each: says(each, "maxmemory-policy allkeys-lru"))
        assert await registers(nodes[0], "i", "default")
        refused = await start(nodes[0], KEYS)
        assert (refused.header.status.code, "maxmemory-policy" in refused.header.status.message) == (
            meta.IO_ERROR,
            True,
        )
        assert await metric(nodes[0], 'kvcm_store_unsound{reason="evicts"}') == 1
        assert await alerts(nodes[0], "KvcmStoreUnsound")
        assert any("maxmemory-policy" in found for found in await doctor(nodes[0]))
        client.config_set("maxmemory-policy", "noeviction")
        await eventually(lambda: all_ready(nodes))
        assert await writes(nodes[0])
        assert await metric(nodes[0], 'kvcm_store_unsound{reason="evicts"}') == 0


async def knows_all(on: Node) -> bool:
    answer = await on.meta.GetInstanceInfo(meta.GetInstanceInfoRequest(instance_id="i"))
    return answer.header.status.code == meta.OK and await groups(on) == ["default", "made"]


async def restorations(nodes: list[Node]) -> bool:
    return sum([await metric(each, "kvcm_store_restorations_total") for each in nodes]) >= 1


async def says(on: Node, reason: str) -> bool:
    status, text = await readiness(on)
    return status == 503 and reason in text


async def alerts(on: Node, name: str) -> bool:
    def listed() -> bool:
        client = RestClient(f"127.0.0.1:{on.endpoint.admin_http_port}")
        with contextlib.closing(client.connection):
            return name in {each["name"] for each in client.get("/v1/alerts").body["items"]}

    return await asyncio.to_thread(listed)


async def doctor(on: Node) -> list[str]:
    """Return what `kvcm doctor` says is wrong."""

    def found() -> list[str]:
        client = AdminClient(f"http://127.0.0.1:{on.endpoint.admin_http_port}")
        return [each.found for each in check_manager(client, is_expected=True) if each.level is Level.FAIL]

    return await asyncio.to_thread(found)
