"""What a manager answers that does not lead, and one that learns of an instance a moment late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.removal import Remover
from kvcm.model.clock import SystemClock
from kvcm.model.errors import ErrorCode, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.nodes import Endpoint
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.admin_api import AdminApi
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.calls import Call, Caller, Plane
from kvcm.service.limits import RequestLimits
from kvcm.service.meta_api import MetaApi
from kvcm.service.node import refuse_unless_leading
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryLease, MemoryTable
from kvcm.telemetry.metrics import ApiMetrics

INSTANCE = Instance("", "g", "i", 16, (LocationSpecInfo("kv", 8),), ModelDeployment("m", "bf16"))


class Shared:
    """What the managers of a deployment have in common."""

    def __init__(self) -> None:
        self.clock = SystemClock()
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
            return Caller([CallMetrics(self._metrics)], refuse, lambda _: {})
        return Caller([CallMetrics(self._metrics)], lambda _: None, lambda _: {}, refresh)


@pytest.fixture
async def pair() -> tuple[Follower, Follower]:
    """The leader, and one that follows."""
    shared = Shared()
    leader, follower = Follower(shared, "node-a"), Follower(shared, "node-b")
    await leader.begin()
    await follower.begin()
    return leader, follower


async def test_both_tell_who_leads_and_where(pair: tuple[Follower, Follower]) -> None:
    for each in pair:
        caller = each.caller()
        own = each.endpoint.node_id
        cluster = (
            await caller.answer(each.call(Plane.DATA, "GetClusterInfo"), meta_pb.GetClusterInfoRequest())
        ).message
        assert (cluster.self_node_id, cluster.leader_node_id) == (own, "node-a")
        assert (cluster.leader_endpoint.host, cluster.leader_endpoint.meta_rpc_port) == ("node-a.example", 1001)
        call = each.call(Plane.ADMIN, "GetManagerClusterInfo")
        manager = (await caller.answer(call, admin_pb.GetManagerClusterInfoRequest())).message
        assert (manager.self_node_id, manager.leader_node_id) == (own, "node-a")
        assert (manager.leader_endpoint.host, manager.leader_endpoint.admin_http_port) == ("node-a.example", 1004)
        assert (manager.self_leader_expiration_time > 0) == (own == "node-a")


@pytest.mark.parametrize(
    ("plane", "name", "request_type", "addresses"),
    [
        (Plane.DATA, "GetInstanceInfo", meta_pb.GetInstanceInfoRequest, ("node-a.example:1001", "node-a.example:1002")),
        (Plane.ADMIN, "ListStorage", admin_pb.ListStorageRequest, ("node-a.example:1003", "node-a.example:1004")),
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
    found = await caller.answer(call, meta_pb.GetInstanceInfoRequest(instance_id="i"))
    assert (found.message.header.status.code, found.message.instance_group) == (ErrorCode.OK, "g")
    missing = await caller.answer(call, meta_pb.GetInstanceInfoRequest(instance_id="nobody"))
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
    await caller.answer(call, meta_pb.GetInstanceInfoRequest(instance_id="i"))
    assert refreshes == []
    missing = await caller.answer(call, meta_pb.GetInstanceInfoRequest(instance_id="nobody"))
    assert missing.message.header.status.code == ErrorCode.INSTANCE_NOT_EXIST
    assert refreshes == [True]


async def test_while_the_store_is_away_nobody_says_that_an_instance_does_not_exist(
    pair: tuple[Follower, Follower],
) -> None:
    """INSTANCE_NOT_EXIST would make engines register anew; IO_ERROR makes them try again."""

    async def refresh() -> bool:
        raise StorageIOError("connection refused")

    follower = pair[1]
    call = follower.call(Plane.DATA, "GetInstanceInfo")
    answer = await follower.caller(refresh).answer(call, meta_pb.GetInstanceInfoRequest(instance_id="i"))
    assert answer.message.header.status.code == ErrorCode.IO_ERROR


async def test_a_group_is_read_from_the_store(pair: tuple[Follower, Follower]) -> None:
    leader, follower = pair
    await leader.registry.groups.create(InstanceGroup("g", ("s",)))
    call = follower.call(Plane.ADMIN, "GetInstanceGroup")
    answer = await follower.caller(follower.registry.refresh).answer(call, admin_pb.GetInstanceGroupRequest(name="g"))
    assert answer.message.instance_group.name == "g"
