"""Managers that share one store: the others serve the writes of one."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fake_clock import FakeClock
from redis_servers import Standalone, standalone
from test_several_managers import KEYS, Node, eventually, finish, gauge, hits, node, registered, settings_of, start
from test_transport_sites import group_spec, instance_fields

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.removal import Remover
from kvcm.connectors.client import AsyncManagerClient
from kvcm.connectors.results import CallCounters
from kvcm.model.errors import ErrorCode, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.nodes import Endpoint
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity
from kvcm.protocol.kvcm.v1.capacity_service_pb2_grpc import CapacityServiceStub
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.admin_api import AdminApi
from kvcm.service.admission import refuse_unless_leading
from kvcm.service.calls import Call, Caller, CallRecorder, Plane
from kvcm.service.meta_api import MetaApi
from kvcm.service.request_limits import RequestLimits
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryLease, MemoryTable
from kvcm.telemetry.metrics import ApiMetrics

INSTANCE = Instance("", "g", "i", 16, (LocationSpecInfo("kv", 8),), ModelDeployment("m", "bf16"))


class Shared:
    """What the managers of a deployment have in common."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registry, self.nodes = MemoryTable(), MemoryTable()
        self.lease = MemoryLease(self.clock)


class Follower:
    """A manager without servers."""

    def __init__(self, shared: Shared, node_id: str) -> None:
        storages = StorageDirectory("cluster")
        self.endpoint = Endpoint(node_id, f"{node_id}.example", 1001, 1002, 1003, 1004)
        self.registry = Registry(storages, shared.registry)
        self.leadership = Leadership(node_id, shared.clock, 10.0, shared.lease, shared.nodes)
        cache = CacheManager(self.registry, storages, shared.clock)
        self._metrics = ApiMetrics()
        meta = MetaApi(cache, self.registry, self.leadership, RequestLimits())
        remover = Remover(shared.clock, self.registry.groups.find)
        drains = StorageDrains(self.registry, cache.open_caches, remover, shared.clock, is_shared=True)
        admin = AdminApi(cache, self.registry, self.leadership, self._metrics, RequestLimits(), drains)
        self._calls = {(call.plane, call.name): call for call in (*meta.calls(), *admin.calls())}

    async def begin(self) -> None:
        await self.leadership.publish(self.endpoint)
        await self.leadership.tick()

    def call(self, plane: Plane, name: str) -> Call:
        return self._calls[plane, name]

    def caller(self, refresh: Callable[[], Awaitable[bool]] | None = None) -> Caller:
        def refuse(plane: Plane) -> None:
            refuse_unless_leading(self.leadership, plane)

        if refresh is None:
            return Caller(CallRecorder(self._metrics), refuse, lambda _: {})
        return Caller(CallRecorder(self._metrics), lambda _: None, lambda _: {}, refresh)


@pytest.fixture
async def pair() -> tuple[Follower, Follower]:
    """The leader, and one that follows."""
    shared = Shared()
    leader, follower = Follower(shared, "node-a"), Follower(shared, "node-b")
    await leader.begin()
    await follower.begin()
    return leader, follower


async def test_both_report_the_leader_and_its_address(pair: tuple[Follower, Follower]) -> None:
    for each in pair:
        caller = each.caller()
        own = each.endpoint.node_id
        cluster = (await caller.answer(each.call(Plane.DATA, "GetClusterInfo"), meta.GetClusterInfoRequest())).message
        assert (cluster.self_node_id, cluster.leader_node_id) == (own, "node-a")
        assert (cluster.leader_endpoint.host, cluster.leader_endpoint.meta_rpc_port) == ("node-a.example", 1001)
        call = each.call(Plane.ADMIN, "GetManagerClusterInfo")
        manager = (await caller.answer(call, admin.GetManagerClusterInfoRequest())).message
        assert (manager.self_node_id, manager.leader_node_id) == (own, "node-a")
        assert (manager.leader_endpoint.host, manager.leader_endpoint.admin_http_port) == ("node-a.example", 1004)
        assert (manager.self_leader_expiration_time > 0) == (own == "node-a")


@pytest.mark.parametrize(
    ("plane", "name", "request_type", "addresses"),
    [
        (Plane.DATA, "GetInstanceInfo", meta.GetInstanceInfoRequest, ("node-a.example:1001", "node-a.example:1002")),
        (Plane.ADMIN, "ListStorage", admin.ListStorageRequest, ("node-a.example:1003", "node-a.example:1004")),
    ],
)
async def test_a_follower_that_must_not_serve_names_the_leader(
    pair: tuple[Follower, Follower], plane: Plane, name: str, request_type: type, addresses: tuple[str, str]
) -> None:
    _, follower = pair
    answer = await follower.caller().answer(follower.call(plane, name), request_type())
    status = answer.message.header.status
    assert status.code == ErrorCode.SERVER_NOT_LEADER
    assert all(f"{address} (" in status.message for address in addresses)


async def test_an_instance_registered_elsewhere_a_moment_ago_is_found(pair: tuple[Follower, Follower]) -> None:
    leader, follower = pair
    await leader.registry.groups.create(InstanceGroup("g", ("s",)))
    await leader.registry.instances.register(INSTANCE)
    caller, call = follower.caller(follower.registry.refresh), follower.call(Plane.DATA, "GetInstanceInfo")
    found = await caller.answer(call, meta.GetInstanceInfoRequest(instance_id="i"))
    assert (found.message.header.status.code, found.message.instance_group) == (ErrorCode.OK, "g")
    missing = await caller.answer(call, meta.GetInstanceInfoRequest(instance_id="nobody"))
    assert missing.message.header.status.code == ErrorCode.INSTANCE_NOT_EXIST


async def test_an_unknown_instance_is_looked_up_once_and_a_known_one_never(pair: tuple[Follower, Follower]) -> None:
    leader, _ = pair
    refreshes: list[bool] = []

    async def refresh() -> bool:
        refreshes.append(True)
        return True  # something else changed

    await leader.registry.groups.create(InstanceGroup("g", ("s",)))
    await leader.registry.instances.register(INSTANCE)
    caller, call = leader.caller(refresh), leader.call(Plane.DATA, "GetInstanceInfo")
    await caller.answer(call, meta.GetInstanceInfoRequest(instance_id="i"))
    assert refreshes == []
    missing = await caller.answer(call, meta.GetInstanceInfoRequest(instance_id="nobody"))
    assert missing.message.header.status.code == ErrorCode.INSTANCE_NOT_EXIST
    assert refreshes == [True]


async def test_while_the_store_is_away_no_manager_denies_an_instance(pair: tuple[Follower, Follower]) -> None:
    """INSTANCE_NOT_EXIST would make engines register again; IO_ERROR makes them try again."""

    async def refresh() -> bool:
        raise StorageIOError("connection refused")

    follower = pair[1]
    call = follower.call(Plane.DATA, "GetInstanceInfo")
    answer = await follower.caller(refresh).answer(call, meta.GetInstanceInfoRequest(instance_id="i"))
    assert answer.message.header.status.code == ErrorCode.IO_ERROR


async def test_a_group_is_read_from_the_store(pair: tuple[Follower, Follower]) -> None:
    leader, follower = pair
    await leader.registry.groups.create(InstanceGroup("g", ("s",)))
    call = follower.call(Plane.ADMIN, "GetInstanceGroup")
    answer = await follower.caller(follower.registry.refresh).answer(call, admin.GetInstanceGroupRequest(name="g"))
    assert answer.message.instance_group.name == "g"


_FINISH = "/kv_cache_manager.proto.meta.MetaService/FinishWriteCache"


class Swallower(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands calls on to a manager; the caller gets no answer.

    Args:
        manager: a channel to it.
    """

    def __init__(self, manager: grpc.aio.Channel) -> None:
        self._manager = manager
        self.swallowed = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._hand_on)

    async def _hand_on(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._manager.unary_unary(_FINISH)(request)
        self.swallowed += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")


async def test_a_finish_whose_answer_was_lost_is_confirmed_by_the_next_manager(two_managers: list[Node]) -> None:
    first, second = two_managers
    await registered(first)
    started = await start(first, [1, 2, 3])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.endpoint.meta_rpc_port}") as behind:
        swallower = Swallower(behind)
        between = grpc.aio.server(handlers=[swallower])
        port = between.add_insecure_port("127.0.0.1:0")
        await between.start()
        addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{second.endpoint.meta_rpc_port}"]
        client = AsyncManagerClient(addresses, "i")
        assert await client.finish_write(started.write_session_id, [True] * 3, timeout_seconds=30.0)
        assert client.counters()["finish_write"] == CallCounters(ok=1, retries=1)
        assert swallower.swallowed == 1
        assert not await client.finish_write(started.write_session_id, [True, True, False], timeout_seconds=30.0)
        await client.close()
        await between.stop(None)
    assert await hits(second, [1, 2, 3]) == 3


BLOCK = 100
HOURLY = 3600  # a task that does not wake does nothing while a test waits

Change = Callable[[Node], Awaitable[Any]]


def storage(capacity_bytes: int = 0) -> admin.StorageConfig:
    config = admin.StorageConfig(global_unique_name="d", capacity_bytes=capacity_bytes, used_percentage=0.8)
    config.dummy.SetInParent()
    return config


def group(blocks: int, mark: float, version: int = 1, **policy: Any) -> admin.InstanceGroup:
    spec = group_spec("g", "d", capacity=blocks * BLOCK, ratio=mark, version=version, global_quota_group_name="shared")
    strategy = spec["cache_config"]["reclaim_strategy"]
    strategy |= {"trigger_period_seconds": HOURLY, "policy": policy}
    strategy["trigger_strategy"]["hysteresis"] = 0.0
    return admin.InstanceGroup(**spec)


async def prepare(on: Node, blocks: int, mark: float) -> None:
    """A storage, a group and an instance `i`."""
    answers = [
        await on.admin.AddStorage(admin.AddStorageRequest(storage=storage())),
        await on.admin.CreateInstanceGroup(admin.CreateInstanceGroupRequest(instance_group=group(blocks, mark))),
    ]
    fields = instance_fields("i", "g", location_spec_infos=[{"name": "kv", "size": BLOCK}])
    answers.append(await on.meta.RegisterInstance(meta.RegisterInstanceRequest(**fields)))
    assert {answer.header.status.code for answer in answers} == {meta.OK}, answers


async def written(on: Node, keys: Sequence[int]) -> int:
    """Write one block after the other; return how many were refused."""
    refused = 0
    for key in keys:
        started = await start(on, [key])
        if started.header.status.code == meta.REACH_MAX_ENTITY_CAPACITY:
            refused += 1
        else:
            assert (await finish(on, started, 1)).header.status.code == meta.OK
    return refused


async def count(on: Node, keys: Sequence[int]) -> int:
    """How many of the blocks can be read."""
    request = meta.GetCacheLocationRequest(instance_id="i", block_keys=keys, query_type=meta.QT_BATCH_GET)
    answer = await on.meta.GetCacheLocation(request)
    assert answer.header.status.code == meta.OK, answer.header
    return sum(any(spec.uri for spec in each.location_specs) for each in answer.locations)


async def soon(on: Node, keys: Sequence[int], left: int) -> None:
    async def holds() -> bool:
        return await count(on, keys) == left

    await eventually(holds)


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Node]:
    """A manager with a store of its own."""
    async with node(replace(settings_of("", tmp_path), data_dir=str(tmp_path / "data"))) as running:
        yield running


@pytest.fixture
async def two_managers(redis_standalone: Standalone, tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Two managers; the first one leads."""
    settings = settings_of(redis_standalone.uri(f"t{secrets.token_hex(6)}"), tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(settings)) for _ in range(2)]


# Writes.


async def test_a_write_that_crosses_a_mark_wakes_at_once(alone: Node) -> None:
    await prepare(alone, 100, 0.5)
    assert await written(alone, range(50)) == 0
    assert await count(alone, range(51)) == 50
    await written(alone, [50])
    await soon(alone, range(51), 50)


async def test_a_refused_write_wakes_at_once(alone: Node) -> None:
    """While one session wrote everything there was nothing to evict, and its end crosses nothing."""
    await prepare(alone, 10, 1.0)
    everything = await start(alone, list(range(10)))
    await finish(alone, everything, 10)

    async def granted() -> bool:
        return await written(alone, [100]) == 0

    await eventually(granted)


async def test_a_write_at_a_manager_that_does_not_lead_wakes_the_one_that_does(two_managers: list[Node]) -> None:
    await prepare(two_managers[0], 100, 0.5)

    async def known() -> bool:
        return (await start(two_managers[1], [1000])).header.status.code == meta.OK

    await eventually(known)
    await written(two_managers[1], range(60))
    await soon(two_managers[1], range(60), 49)  # and one block that is still being written


# Settings.


async def update(on: Node, changed: admin.InstanceGroup) -> Any:
    return await on.admin.UpdateInstanceGroup(
        admin.UpdateInstanceGroupRequest(instance_group=changed, current_version=1)
    )


async def lower_group(on: Node) -> Any:
    return await update(on, group(50, 0.8, version=2))


async def limit_globally(on: Node) -> Any:
    quota = capacity.GlobalQuota(name="shared", capacity_bytes=50 * BLOCK, used_percentage=0.8)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{on.endpoint.admin_rpc_port}") as channel:
        return await CapacityServiceStub(channel).SetGlobalQuota(capacity.SetGlobalQuotaRequest(global_quota=quota))


async def limit_storage(on: Node) -> Any:
    return await on.admin.UpdateStorage(admin.UpdateStorageRequest(storage=storage(50 * BLOCK)))


@pytest.mark.parametrize(
    ("change", "left"), [(lower_group, [40]), (limit_globally, range(38, 41)), (limit_storage, range(38, 41))]
)
@pytest.mark.parametrize("at", [0, 1])
async def test_a_setting_changed_at_any_manager_does_not_wait_for_the_period(
    two_managers: list[Node], at: int, change: Change, left: Sequence[int]
) -> None:
    await prepare(two_managers[0], 1000, 0.9)
    await written(two_managers[0], range(60))
    assert (await change(two_managers[at])).header.status.code == meta.OK

    async def holds() -> bool:
        return await count(two_managers[1 - at], range(60)) in left

    await eventually(holds)


async def test_blocks_leave_at_their_age_whatever_the_period(alone: Node) -> None:
    await prepare(alone, 1000, 0.9)
    await update(alone, group(1000, 0.9, version=2, name="fifo", ttl_seconds=1))
    await written(alone, range(10))

    async def gone() -> bool:
        return await count(alone, range(10)) == 0

    await eventually(gone)


class Limited:
    """A server whose memory can be said to be used up."""

    def __init__(self, limited: Standalone) -> None:
        self._server = limited
        self.uri = limited.uri("full")

    def limit(self, most_bytes: int) -> None:
        with self._server.server.admin() as admin:
            admin.config_set("maxmemory", most_bytes)

    def leader(self) -> str:
        """Return the id of the manager that holds the lease, "" when none does."""
        with self._server.server.admin() as admin:
            return str(admin.get("full:l{leader}") or b"", "ascii")


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Limited]:
    with standalone(tmp_path / "redis") as made:
        yield Limited(made)


async def test_a_full_store_is_left_by_finishing_expiring_and_removing(limited: Limited, tmp_path: Path) -> None:
    """Invariants 1, 3 and 4 hold on the way: answers, decisions and counters agree with the store."""
    settings = settings_of(limited.uri, tmp_path)
    async with contextlib.AsyncExitStack() as rest:
        async with node(settings) as first:
            second = await rest.enter_async_context(node(settings))
            await registered(first)
            await finish(first, await start(first, KEYS[:10]), 10)
            finishing = await start(first, KEYS[10:20])
            await start(second, KEYS[20:25], seconds=1)
            limited.limit(1)
            await refused(second)
            assert (await finish(second, finishing, 10)).header.status.code == meta.OK
            assert await hits(second) == 20
            await remove(second, 20)
            await eventually(lambda: uses(second, 19))  # expired and removed blocks are gone
            assert await hits(second) == 19
            assert limited.leader() == first.endpoint.node_id
        await eventually(lambda: leads(limited, second))
        await remove(second, 19)
        await eventually(lambda: uses(second, 18))
        await refused(second)
        limited.limit(0)
        assert len((await start(second, [500])).locations) == 1


async def refused(on: Node) -> None:
    status = (await start(on, [500])).header.status
    assert status.code == meta.IO_ERROR
    assert "memory of the server is full" in status.message


async def remove(on: Node, key: int) -> None:
    answer = await on.meta.RemoveCache(meta.RemoveCacheRequest(instance_id="i", block_keys=[key]))
    assert answer.header.status.code == meta.OK


async def uses(on: Node, blocks: int) -> bool:
    return await gauge(on, "cache_manager_instance.byte_size") == blocks * BLOCK


async def leads(limited: Limited, manager: Node) -> bool:
    return limited.leader() == manager.endpoint.node_id
