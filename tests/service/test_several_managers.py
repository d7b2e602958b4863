"""Managers that share one store, as `app` wires them, on real servers: the others serve the writes of one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest
from redis_servers import Standalone
from rest_client import RestClient
from test_transport_sites import group_spec, instance_fields

from kvcm.app import Manager
from kvcm.cache.usage_recount import UsageRecount
from kvcm.config import Settings
from kvcm.model.nodes import Endpoint
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

KEYS = list(range(1, 41))
"""What holds within a second, and what a busy machine may add."""
LONG_SECONDS = 600
ON_EVERY_SERVER = pytest.mark.parametrize(
    "nodes", ["redis_standalone", "redis_cluster", "redis_sentinel"], indirect=True
)


class Node(NamedTuple):
    """One running manager and how to call it."""

    endpoint: Endpoint
    meta: MetaServiceStub
    admin: AdminServiceStub


@contextlib.asynccontextmanager
async def node(settings: Settings) -> AsyncIterator[Node]:
    """A manager inside the block."""
    async with Manager(settings).running() as endpoint:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.meta_rpc_port}") as data,
            grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.admin_rpc_port}") as operators,
        ):
            yield Node(endpoint, MetaServiceStub(data), AdminServiceStub(operators))


def settings_of(uri: str, directory: Path) -> Settings:
    """Of managers that lead, and let requests wait, as long as a busy machine stands still."""
    ports = Settings(rpc_port=0, http_port=0, admin_rpc_port=0, admin_http_port=0)
    document = str(startup_document(directory))
    return replace(ports, registry_storage_uri=uri, lease_ms=60_000, max_queue_ms=60_000, startup_config=document)


def startup_document(directory: Path) -> Path:
    """A group whose blocks are deleted a moment after they were removed."""
    path = directory / "startup.json"
    path.write_text(
        '{"storage_config": {"type": "file", "global_unique_name": "nfs", "storage_spec": {"root_path": "%s/",'
        ' "key_count_per_file": 8}}, "instance_group": {"name": "default", "storage_candidates": ["nfs"],'
        ' "global_quota_group_name": "all", "max_instance_count": 10, "quota": {"capacity": 4000, "quota_config": []},'
        ' "cache_config": {"reclaim_strategy": {"reclaim_policy": 1, "delay_before_delete_ms": 50,'
        ' "trigger_strategy": {"used_percentage": 2.0}}, "cache_prefer_strategy": 2, "meta_indexer_config":'
        ' {"max_key_count": 1000, "mutex_shard_num": 4}}, "version": 1}}' % (directory / "bytes")
    )
    return path


@pytest.fixture
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Three managers; tests that say so run on every kind of server."""
    server = getattr(request, "param", "redis_standalone")
    uri = request.getfixturevalue(server).uri(f"t{secrets.token_hex(6)}")
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(settings_of(uri, tmp_path))) for _ in range(3)]


async def registered(on: Node) -> None:
    fields = instance_fields("i", "default", location_spec_infos=[{"name": "kv", "size": 100}])
    assert (await on.meta.RegisterInstance(meta.RegisterInstanceRequest(**fields))).header.status.code == meta.OK


async def start(on: Node, keys: list[int], seconds: int = LONG_SECONDS) -> meta.StartWriteCacheResponse:
    answer: meta.StartWriteCacheResponse = await on.meta.StartWriteCache(
        meta.StartWriteCacheRequest(instance_id="i", block_keys=keys, write_timeout_seconds=seconds)
    )
    return answer


async def finish(on: Node, started: meta.StartWriteCacheResponse, count: int) -> meta.CommonResponse:
    request = meta.FinishWriteCacheRequest(instance_id="i", write_session_id=started.write_session_id)
    request.success_blocks.offset = count
    answer: meta.CommonResponse = await on.meta.FinishWriteCache(request)
    return answer


async def hits(on: Node, keys: list[int] = KEYS) -> int:
    request = meta.GetCacheLocationRequest(instance_id="i", block_keys=keys, query_type=meta.QT_PREFIX_MATCH)
    answer = await on.meta.GetCacheLocation(request)
    assert answer.header.status.code == meta.OK, answer.header
    return len(answer.locations)


async def gauge(on: Node, name: str) -> float:
    answer = await on.admin.GetMetrics(admin.GetMetricsRequest())
    (value,) = {
        metric.metric_value.float_value or float(metric.metric_value.int_value)
        for metric in answer.metrics
        if metric.metric_name == name and all(tag.tag_value in {"default", "i"} for tag in metric.metric_tags)
    }
    return value


async def eventually(holds: Callable[[], object], seconds: float = 30.0) -> float:
    """Wait until a condition (a coroutine function) holds, and return how long that took."""
    begin = time.monotonic()
    while not await holds():  # type: ignore[misc]
        assert time.monotonic() - begin < seconds
        await asyncio.sleep(0.005)
    return time.monotonic() - begin


async def test_every_manager_reports_of_the_sessions_and_the_chains_of_all(nodes: list[Node]) -> None:
    def asked(on: Node, method: str, path: str, body: object = None) -> Any:
        client = RestClient(f"127.0.0.1:{on.endpoint.admin_http_port}")
        with contextlib.closing(client.connection):
            return client.ask(method, path, body).body

    async def states(on: Node) -> list[str]:
        order = {"block_keys": ["1", "2", "3"]}
        chain = await asyncio.to_thread(asked, on, "POST", "/v1/instances/i/explore", order)
        return [block["state"] for block in chain["blocks"]]

    async def sessions(on: Node) -> list[tuple[str, int]]:
        found = await asyncio.to_thread(asked, on, "GET", "/v1/sessions")
        return [(each["short_id"], each["blocks"]) for each in found["items"] if each["begun_at_ms"]]

    await registered(nodes[0])
    await eventually(lambda: _knows(nodes[1]))
    started = await start(nodes[0], [1, 2])
    assert await sessions(nodes[1]) == [(started.write_session_id[:8], 2)]
    assert await states(nodes[2]) == ["writing", "writing", "absent"]
    await finish(nodes[1], started, 2)
    assert (await sessions(nodes[2]), await states(nodes[0])) == ([], ["serving", "serving", "absent"])


async def _knows(on: Node) -> bool:
    answer = await on.meta.GetInstanceInfo(meta.GetInstanceInfoRequest(instance_id="i"))
    return bool(answer.header.status.code == meta.OK)


async def test_every_manager_reports_how_all_of_them_are(nodes: list[Node]) -> None:
    """One of them leads, and all name the same one."""
    ports = [each.endpoint.admin_http_port for each in nodes]

    def listed(port: int) -> list[dict[str, Any]]:
        client = RestClient(f"127.0.0.1:{port}")
        with contextlib.closing(client.connection):
            return list(client.get("/v1/managers").body["items"])

    async def all_agree() -> bool:
        seen = [await asyncio.to_thread(listed, port) for port in ports]
        are_served = all(
            {each["admin_http_port"]: each["phase"] for each in items} == dict.fromkeys(ports, "serving")
            for items in seen
        )
        leaders = {tuple(each["admin_http_port"] for each in items if each["is_leader"]) for items in seen}
        own = [[each["admin_http_port"] for each in items if each["is_self"]] for items in seen]
        return are_served and own == [[port] for port in ports] and len(leaders) == 1 and len(*leaders) == 1

    await eventually(all_agree)


async def test_blocks_on_a_storage_that_another_manager_just_added_are_there(nodes: list[Node], tmp_path: Path) -> None:
    """A packed storage is compared with the store before it takes part: unverified, its blocks would be hidden, and
    locations handed out for them a second time."""
    packed = {"root_path": str(tmp_path / "late"), "key_count_per_file": 8}
    (tmp_path / "late").mkdir()
    writer, late = nodes[:2]
    await writer.admin.AddStorage(admin.AddStorageRequest(storage={"global_unique_name": "late", "nfs": packed}))
    await writer.admin.CreateInstanceGroup(admin.CreateInstanceGroupRequest(instance_group=group_spec("late", "late")))
    fields = instance_fields("i", "late", location_spec_infos=[{"name": "kv", "size": 100}])
    assert (await writer.meta.RegisterInstance(meta.RegisterInstanceRequest(**fields))).header.status.code == meta.OK
    assert (await finish(writer, await start(writer, KEYS), len(KEYS))).header.status.code == meta.OK
    answers: list[meta.StartWriteCacheResponse] = []

    async def is_open() -> bool:
        answers.append(await start(late, KEYS))
        return answers[-1].header.status.code != meta.SERVICE_NOT_READY  # while a refresh opens it

    await eventually(is_open)
    assert (answers[-1].header.status.code, len(answers[-1].locations)) == (meta.OK, 0), answers[-1].header
    assert await hits(late) == len(KEYS)


async def test_an_engine_that_registers_is_given_a_storage_that_another_manager_just_added(
    nodes: list[Node], tmp_path: Path
) -> None:
    """Without it the engine would save nothing until it registers again."""
    (tmp_path / "late").mkdir()
    packed = {"root_path": str(tmp_path / "late"), "key_count_per_file": 8}
    storage = admin.AddStorageRequest(storage={"global_unique_name": "late", "nfs": packed})
    first, other = nodes[:2]
    await first.admin.AddStorage(storage)
    await first.admin.CreateInstanceGroup(admin.CreateInstanceGroupRequest(instance_group=group_spec("late", "late")))
    await first.admin.RemoveStorage(admin.RemoveStorageRequest(storage_unique_name="late"))

    async def is_removed() -> bool:
        known = await other.admin.GetInstanceGroup(admin.GetInstanceGroupRequest(name="late"))
        listed = await other.admin.ListStorage(admin.ListStorageRequest())
        names = {each.global_unique_name for each in listed.storage}
        return bool(known.header.status.code == meta.OK) and "late" not in names

    await eventually(is_removed)
    await first.admin.AddStorage(storage)
    fields = instance_fields("i", "late", location_spec_infos=[{"name": "kv", "size": 100}])
    answer = await other.meta.RegisterInstance(meta.RegisterInstanceRequest(**fields))
    assert "late" in answer.storage_configs, answer


async def leading(nodes: list[Node]) -> Node:
    """Wait until a manager leads, and return it: which one does is settled by chance."""
    found: list[Node] = []

    async def one_leads() -> bool:
        reported = [await each.admin.CheckHealth(admin.CheckHealthRequest()) for each in nodes]
        found[:] = [each for each, answer in zip(nodes, reported, strict=True) if answer.is_leader]
        return len(found) == 1

    await eventually(one_leads)
    return found[0]


@ON_EVERY_SERVER
async def test_one_manager_finishes_a_write_that_another_one_started(nodes: list[Node]) -> None:
    """Invariants 2 and 3: the blocks are masked at every manager meanwhile, and served by every one afterwards."""
    await registered(nodes[0])
    started = await start(nodes[0], KEYS)
    assert len(started.locations) == len(KEYS)
    elsewhere = await start(nodes[1], KEYS)
    assert (len(elsewhere.locations), elsewhere.block_mask.offset) == (0, len(KEYS))
    assert (await finish(nodes[2], started, len(KEYS))).header.status.code == meta.OK
    assert [await hits(each) for each in nodes] == [len(KEYS)] * 3
    assert (await finish(nodes[0], started, len(KEYS))).header.status.code == meta.OK  # once more, answered as before
    assert (await finish(nodes[1], started, 0)).header.status.code == meta.INVALID_ARGUMENT
    assert [await hits(each) for each in nodes] == [len(KEYS)] * 3


@ON_EVERY_SERVER
async def test_every_manager_answers_from_its_cache_until_a_block_changes(nodes: list[Node]) -> None:
    """Invariant 1, within the moment that an invalidation takes."""
    await registered(nodes[0])
    await finish(nodes[0], await start(nodes[0], KEYS), len(KEYS))
    for each in nodes:
        await eventually(lambda each=each: cached(each))
    await nodes[1].meta.RemoveCache(meta.RemoveCacheRequest(instance_id="i", block_keys=[20]))

    async def gone(each: Node) -> bool:
        return await hits(each) == 19

    for each in nodes:
        await eventually(lambda each=each: gone(each))


async def cached(each: Node) -> bool:
    """Whether a match is answered without a miss of the search cache."""
    before = await gauge(each, "meta_indexer.search_cache_miss_count")
    assert await hits(each) == len(KEYS)
    return await gauge(each, "meta_indexer.search_cache_miss_count") == before


@ON_EVERY_SERVER
async def test_a_quota_is_one_of_all_managers(nodes: list[Node]) -> None:
    """Invariant 4: 40 blocks fit; writers at every manager get these and no more.

    While writes begin all at once a block may count twice for a moment, as reserved and as used: never too few. No
    session ends by itself meanwhile.
    """
    await registered(nodes[0])
    answers = list(await asyncio.gather(*(start(nodes[i % 3], [1000 + i]) for i in range(60))))
    codes = [answer.header.status.code for answer in answers]
    assert set(codes) == {meta.OK, meta.REACH_MAX_ENTITY_CAPACITY}
    assert 20 <= codes.count(meta.OK) <= 40

    async def full() -> bool:
        answers.append(await start(nodes[len(answers) % 3], [2000 + len(answers)]))
        return sum(answer.header.status.code == meta.OK for answer in answers) == 40

    if codes.count(meta.OK) < 40:
        await eventually(full)
    assert (await start(nodes[0], [3000])).header.status.code == meta.REACH_MAX_ENTITY_CAPACITY
    done = await asyncio.gather(*(finish(nodes[2], each, 0) for each in answers if each.write_session_id))
    assert {answer.header.status.code for answer in done} == {meta.OK}

    async def empty() -> bool:
        return await gauge(nodes[1], "cache_manager_instance.byte_size") == 0

    async def writable() -> bool:
        started = await start(nodes[1], KEYS)
        if started.write_session_id:
            await finish(nodes[1], started, 0)  # a partial grant must not block the next try
        return len(started.locations) == len(KEYS)

    await eventually(empty)
    await eventually(writable)


async def test_a_removed_instance_vanishes_everywhere_and_can_be_registered_again(nodes: list[Node]) -> None:
    await registered(nodes[0])
    await finish(nodes[0], await start(nodes[0], KEYS), len(KEYS))
    assert await hits(nodes[2]) == len(KEYS)
    removed = await nodes[1].admin.RemoveInstance(
        admin.RemoveInstanceRequest(instance_group="default", instance_id="i")
    )
    assert removed.header.status.code == admin.OK
    await registered(nodes[1])

    async def empty(each: Node) -> bool:
        request = meta.GetCacheLocationRequest(instance_id="i", block_keys=KEYS, query_type=meta.QT_PREFIX_MATCH)
        answer = await each.meta.GetCacheLocation(request)
        return answer.header.status.code == meta.OK and not answer.locations

    for each in nodes:
        await eventually(lambda each=each: empty(each))


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_a_restart_finds_everything_again(tmp_path: Path, fsync: str) -> None:
    """RocksDB, stopped in good order: registry, blocks, an open session, usage."""
    settings = replace(settings_of("", tmp_path), data_dir=str(tmp_path / "data"), fsync=fsync)
    async with node(settings) as before:
        await registered(before)
        await finish(before, await start(before, KEYS[:20]), 20)
        open_session = await start(before, KEYS[20:])
        used = await gauge(before, "cache_manager_group.byte_size")
    async with node(settings) as after:
        assert await hits(after) == 20
        assert await gauge(after, "cache_manager_group.byte_size") == used == 4000
        assert (await finish(after, open_session, 20)).header.status.code == meta.OK
        assert await hits(after) == 40


async def test_a_manager_that_starts_again_under_its_configured_id_goes_on_counting(
    redis_standalone: Standalone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 4: others take its reports for new ones, not for those from before the restart."""

    async def put_nothing_right(_recount: UsageRecount) -> None:
        pass

    monkeypatch.setattr(UsageRecount, "check", put_nothing_right)
    uri = redis_standalone.uri(f"t{secrets.token_hex(6)}")
    settings = replace(settings_of(uri, tmp_path), node_id="configured")
    for run in range(3):
        async with node(settings) as running:
            await registered(running)
            for key in range(4):
                await finish(running, await start(running, [100 * run + key]), 1)
            expected = 400.0 * (run + 1)

            async def settled(running: Node = running, expected: float = expected) -> bool:
                return await gauge(running, "cache_manager_group.byte_size") == expected

            await eventually(settled)
