"""AdminService and GroupService: what operators call. Thin translation; decisions are made in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import structlog

from kvcm.cache.drains import StorageDrains
from kvcm.cache.instance_cache import batches
from kvcm.cache.manager import CacheManager
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import InstanceGroup
from kvcm.model.principals import AccountRole
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import config_service_pb2 as config_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb
from kvcm.registry.assignment import Assignment
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.registry.without_effect import group_values_without_effect, storage_values_without_effect, warning_of
from kvcm.service.access import redacted_for_principal
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.config_snapshot import ConfigSnapshotApi
from kvcm.service.meta_api import BlockCalls
from kvcm.service.metrics_series import CapacitySeries, state_series
from kvcm.service.request_limits import RequestLimits
from kvcm.service.translate import fill, instance_of, read, read_storage, write_storage
from kvcm.service.usage_values import StorageStatus
from kvcm.storage.directory import StorageDirectory
from kvcm.telemetry.logs import LEVELS, set_level
from kvcm.telemetry.metrics import ApiMetrics

__all__ = ["AdminApi", "ConfigApi", "SettingChange"]

_log = structlog.get_logger("kvcm.service")
_ADMIN = "kv_cache_manager.proto.admin.AdminService"
_GROUP = "kvcm.v1.GroupService"
_FILL_BATCH = 128
# Answered by every manager, whether it leads or not.
_ANY_NODE = {
    "GetMetrics",
    "CheckHealth",
    "GetManagerClusterInfo",
    "LeaderDemote",
    "GetLeaderElectorConfig",
    "UpdateLeaderElectorConfig",
    "UpdateLogger",
}
_ANSWERS = {
    "ListStorage": pb.ListStorageResponse,
    "GetInstanceGroup": pb.GetInstanceGroupResponse,
    "ListInstanceGroup": pb.ListInstanceGroupResponse,
    "GetCacheMeta": pb.GetCacheMetaResponse,
    "GetInstanceInfo": pb.GetInstanceInfoResponse,
    "ListInstanceInfo": pb.ListInstanceInfoResponse,
    "ListAccount": pb.ListAccountResponse,
    "GenConfigSnapshot": pb.ConfigSnapShotResponse,
    "LoadConfigSnapshot": pb.LoadConfigSnapshotResponse,
    "GetMetrics": pb.GetMetricsResponse,
    "CheckHealth": pb.CheckHealthResponse,
    "GetManagerClusterInfo": pb.GetManagerClusterInfoResponse,
    "GetLeaderElectorConfig": pb.GetLeaderElectorConfigResponse,
}


class AdminApi:
    """Handlers of the admin plane.

    Args:
        cache: blocks and instances.
        registry: the configuration.
        leadership: of this manager.
        metrics: counters of the calls.
        limits: sizes of requests.
        drains: removes storages, and forgets what lay on them.
        capacity: series of quotas, eviction and deletion, where there are such things.
        storages: the open storages, where their health is known.
        assignment: of instances to managers; None reports nothing.
    """

    def __init__(
        self,
        cache: CacheManager,
        registry: Registry,
        leadership: Leadership,
        metrics: ApiMetrics,
        limits: RequestLimits,
        drains: StorageDrains,
        capacity: CapacitySeries | None = None,
        storages: StorageDirectory | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        self._cache = cache
        self._registry = registry
        self._leadership = leadership
        self._metrics = metrics
        self._capacity = capacity
        self._storages = storages
        self._drains = drains
        self._assignment = assignment if assignment is not None else Assignment(leadership.node_id, {})
        cluster_id = storages.cluster_id if storages is not None else ""
        self._snapshots = ConfigSnapshotApi(registry.snapshots, cluster_id, registry.end_logins)
        self._blocks = BlockCalls(cache, pb.GetCacheMetaResponse, pb.CommonResponse)

    def calls(self) -> list[Call]:
        """Return every call of the admin plane."""
        handlers = {
            "AddStorage": self.add_storage,
            "EnableStorage": self.enable_storage,
            "DisableStorage": self.disable_storage,
            "RemoveStorage": self.remove_storage,
            "UpdateStorage": self.update_storage,
            "ListStorage": self.list_storage,
            "CreateInstanceGroup": self.create_group,
            "UpdateInstanceGroup": self.update_group,
            "RemoveInstanceGroup": self.remove_group,
            "GetInstanceGroup": self.get_group,
            "ListInstanceGroup": self.list_groups,
            "GetCacheMeta": self._blocks.get_cache_meta,
            "RemoveCache": self._blocks.remove_cache,
            "RegisterInstance": self.register_instance,
            "RemoveInstance": self.remove_instance,
            "GetInstanceInfo": self.get_instance_info,
            "ListInstanceInfo": self.list_instance_info,
            "AddAccount": self.add_account,
            "DeleteAccount": self.delete_account,
            "ListAccount": self.list_account,
            "GenConfigSnapshot": self._snapshots.generate,
            "LoadConfigSnapshot": self._snapshots.load,
            "GetMetrics": self.get_metrics,
            "CheckHealth": self.check_health,
            "GetManagerClusterInfo": self.cluster_info,
            "LeaderDemote": self.demote,
            "GetLeaderElectorConfig": self.get_elector_config,
            "UpdateLeaderElectorConfig": self.update_elector_config,
            "UpdateLogger": self.update_logger,
        }
        calls = [
            Call(
                service=_ADMIN,
                name=name,
                plane=Plane.ADMIN,
                request_type=getattr(pb, f"{name}Request"),
                response_type=_ANSWERS.get(name, pb.CommonResponse),
                handler=handler,
                leader_only=name not in _ANY_NODE,
                per_instance=name in {"GetCacheMeta", "RemoveCache"},
            )
            for name, handler in handlers.items()
        ]
        # Ours is older than the original's call of that name, to which clients of the original expect the path to lead.
        types = (group_pb.ListInstanceGroupRequest, group_pb.ListInstanceGroupResponse)
        ours = Call(
            _GROUP, "ListInstanceGroup", Plane.ADMIN, *types, self.list_own_groups, http_name="listInstanceGroups"
        )
        return [*calls, ours]

    async def add_storage(self, request: Any) -> Reply:
        """Add and open a storage."""
        config = read_storage("AddStorage", request)
        await self._registry.storages.add_in_background(config)
        return _reply_with(warning_of(storage_values_without_effect(config)))

    async def enable_storage(self, request: Any) -> Reply:
        """Make a storage available."""
        require(request.storage_unique_name, "EnableStorage.storage_unique_name")
        await self._registry.storages.set_enabled(request.storage_unique_name, enabled=True)
        return _empty_reply()

    async def disable_storage(self, request: Any) -> Reply:
        """Make a storage unavailable for reads and writes."""
        require(request.storage_unique_name, "DisableStorage.storage_unique_name")
        await self._registry.storages.set_enabled(request.storage_unique_name, enabled=False)
        return _empty_reply()

    async def remove_storage(self, request: Any) -> Reply:
        """Remove a storage, and in the background what lay on it."""
        require(request.storage_unique_name, "RemoveStorage.storage_unique_name")
        await self._drains.remove(request.storage_unique_name)
        return _empty_reply()

    async def update_storage(self, request: Any) -> Reply:
        """Replace a storage's config."""
        config = read_storage("UpdateStorage", request)
        await self._registry.storages.update_in_background(config)
        ignored = ["force_update has no effect: blocks stay where they are"] if request.force_update else []
        return _reply_with(warning_of(chain(ignored, storage_values_without_effect(config))))

    async def list_storage(self, _request: Any) -> Reply:
        """List all storages by name, and how each is for this manager."""
        message = pb.ListStorageResponse()
        for config in self._registry.storages.all():
            write_storage(message.storage.add(), redacted_for_principal(config))
            if self._storages is not None:
                health = self._storages.health(config.global_unique_name)
                fill(message.storage_status.add(), StorageStatus.of(config, health))
        return Reply(message)

    async def create_group(self, request: Any) -> Reply:
        """Add an instance group; candidates that do not exist are named in the answer."""
        group = _read_group("CreateInstanceGroup", request)
        await self._registry.groups.create(group)
        return self._group_reply(group)

    async def update_group(self, request: Any) -> Reply:
        """Replace an instance group."""
        group = _read_group("UpdateInstanceGroup", request)
        await self._registry.groups.update(group, request.current_version)
        return self._group_reply(group)

    def _group_reply(self, group: InstanceGroup) -> Reply:
        remarks = []
        for field in ("storage_candidates", "event_report_storage_candidates"):
            unknown = [name for name in getattr(group, field) if self._registry.storages.find(name) is None]
            if unknown:
                remarks.append(f"warning: {field} {unknown} do not exist and count as absent until they are added")
        if warning := warning_of(group_values_without_effect(group)):
            remarks.append(warning)
        return _reply_with("; ".join(remarks))

    async def remove_group(self, request: Any) -> Reply:
        """Forget an instance group."""
        require(request.name, "RemoveInstanceGroup.name")
        await self._registry.groups.remove(request.name)
        return _empty_reply()

    async def get_group(self, request: Any) -> Reply:
        """Return an instance group."""
        require(request.name, "GetInstanceGroup.name")
        message = pb.GetInstanceGroupResponse()
        fill(message.instance_group, redacted_for_principal(await self._registry.groups.read(request.name)))
        return Reply(message)

    async def list_groups(self, _request: Any) -> Reply:
        """List all instance groups by name."""
        message = pb.ListInstanceGroupResponse()
        self._fill_groups(message.instance_group)
        return Reply(message)

    async def list_own_groups(self, _request: Any) -> Reply:
        """Do the same for our own call."""
        message = group_pb.ListInstanceGroupResponse()
        self._fill_groups(message.instance_groups)
        return Reply(message)

    def _fill_groups(self, messages: Any) -> None:
        for group in self._registry.groups.all():
            fill(messages.add(), redacted_for_principal(group))

    async def register_instance(self, request: Any) -> Reply:
        """Register an instance."""
        await self._cache.register_instance(instance_of(request))
        return _empty_reply()

    async def remove_instance(self, request: Any) -> Reply:
        """Forget an instance and delete its blocks."""
        require(request.instance_id, "RemoveInstance.instance_id")
        await self._cache.remove_instance(request.instance_id)
        return _empty_reply()

    async def get_instance_info(self, request: Any) -> Reply:
        """Return a registration."""
        message = pb.GetInstanceInfoResponse()
        fill(message.instance_info, redacted_for_principal(self._registry.instances.get(request.instance_id)))
        return Reply(message)

    async def list_instance_info(self, request: Any) -> Reply:
        """List the instances of a group; of all groups when no name is given."""
        message = pb.ListInstanceInfoResponse()
        for page in batches(self._registry.instances.all(request.instance_group_name), _FILL_BATCH):
            for instance in page:
                fill(message.instance_info.add(), redacted_for_principal(instance))
            await asyncio.sleep(0)
        return Reply(message)

    async def add_account(self, request: Any) -> Reply:
        """Add an account."""
        if request.role not in set(AccountRole):
            raise InvalidArgumentError(
                f"role is {request.role}, must be ROLE_USER=0, ROLE_ADMIN=1 or ROLE_OPERATOR=1000"
            )
        await self._registry.accounts.add(request.user_name, request.password, AccountRole(request.role))
        return _empty_reply()

    async def delete_account(self, request: Any) -> Reply:
        """Remove an account."""
        require(request.user_name, "DeleteAccount.user_name")
        await self._registry.accounts.remove(request.user_name)
        await self._registry.end_logins(request.user_name)
        return _empty_reply()

    async def list_account(self, _request: Any) -> Reply:
        """List accounts with their roles."""
        message = pb.ListAccountResponse()
        for account in self._registry.accounts.all():
            message.accounts.add(user_name=account.user_name, role=pb.AccountRole.Name(account.role))
        return Reply(message)

    async def get_metrics(self, _request: Any) -> Reply:
        """Return all counters and gauges."""
        message = pb.GetMetricsResponse(timestamp=time.time_ns() // 1_000_000)
        for series in (*self._metrics.series(), *await state_series(self._cache, self._registry, self._capacity)):
            data = message.metrics.add(metric_name=series.name)
            if isinstance(series.value, int):
                data.metric_value.int_value = series.value
            else:
                data.metric_value.float_value = series.value
            for key, value in series.tags:
                data.metric_tags.add(tag_key=key, tag_value=value)
        return Reply(message)

    async def check_health(self, _request: Any) -> Reply:
        """Answer CheckHealth."""
        return Reply(
            pb.CheckHealthResponse(
                is_leader=self._leadership.is_leader,
                is_health=True,
                elector_last_loop_time_ms=int(self._leadership.last_tick * 1000),
            )
        )

    async def cluster_info(self, request: Any) -> Reply:
        """Answer GetManagerClusterInfo: this node, the leader, and the managers to call for an instance."""
        expires = self._leadership.expires
        message = pb.GetManagerClusterInfoResponse(
            info_updated_time=int(self._leadership.last_tick * 1000),
            self_leader_expiration_time=-1 if expires is None else int(expires * 1_000_000),
            self_node_id=self._leadership.node_id,
            leader_node_id=self._leadership.leader_node_id,
        )
        if (endpoint := self._leadership.leader_endpoint) is not None:
            fill(message.leader_endpoint, endpoint)
        if request.instance_id:
            for each in self._assignment.managers_of(request.instance_id):
                fill(message.preferred_managers.add(), each)
        return Reply(message)

    async def demote(self, _request: Any) -> Reply:
        """Give up leadership."""
        await self._leadership.demote()
        return _empty_reply()

    async def get_elector_config(self, _request: Any) -> Reply:
        """Return the campaign delay."""
        return Reply(pb.GetLeaderElectorConfigResponse(campaign_delay_time_ms=self._leadership.campaign_delay_ms))

    async def update_elector_config(self, request: Any) -> Reply:
        """Set the campaign delay."""
        self._leadership.campaign_delay_ms = request.campaign_delay_time_ms
        return _empty_reply()

    async def update_logger(self, request: Any) -> Reply:
        """Set the log level."""
        level = LEVELS.get(request.log_level.upper())
        if level is None:
            raise InvalidArgumentError(f"log_level is {request.log_level!r}, must be one of {', '.join(LEVELS)}")
        set_level(level)
        ignored = ["module_name has no effect: the level is that of all modules"] if request.module_name else []
        return _reply_with(warning_of(ignored))


def _empty_reply() -> Reply:
    return Reply(pb.CommonResponse())


def _reply_with(remark: str) -> Reply:
    """Return a success, with a remark unless that is empty."""
    reply = _empty_reply()
    reply.message.header.status.message = remark
    return reply


def _read_group(api: str, request: Any) -> InstanceGroup:
    require(request.HasField("instance_group"), f"{api}.instance_group")
    message = request.instance_group
    require(message.name, "InstanceGroup.name")
    require(message.storage_candidates, "InstanceGroup.storage_candidates")
    require(message.global_quota_group_name, "InstanceGroup.global_quota_group_name")
    require(message.HasField("cache_config"), "InstanceGroup.cache_config")
    config = message.cache_config
    require(config.HasField("reclaim_strategy"), "InstanceGroup.CacheConfig.reclaim_strategy")
    path = "InstanceGroup.CacheConfig"
    require(config.reclaim_strategy.storage_unique_name, f"{path}.CacheReclaimStrategy.storage_unique_name")
    require(
        config.data_storage_strategy,
        f"{path}.data_storage_strategy",
        "is required, allowed are the named values of CachePreferStrategy",
    )
    indexer = config.meta_indexer_config
    require(
        indexer.meta_storage_backend_config.storage_type,
        f"{path}.MetaIndexerConfig.MetaStorageBackendConfig.storage_type",
    )
    require(indexer.meta_cache_policy_config.type, f"{path}.MetaIndexerConfig.MetaCachePolicyConfig.type")
    return read(InstanceGroup, message)


# ConfigService: settings of a running manager. Thin translation.


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that was read with another value than the one in force.

    Attributes:
        key: of the setting.
        old: value so far, secrets left out.
        new: value that was read, secrets left out.
        needs_restart: the old value stays in force until the manager is started again.
    """

    key: str
    old: str
    new: str
    needs_restart: bool

    def text(self) -> str:
        """Return it as text for the log."""
        return f"{self.key}: {self.old!r} -> {self.new!r}{', restart needed' if self.needs_restart else ''}"


class ConfigApi:
    """Handlers of the calls about settings.

    Args:
        reload: reads the settings again and returns the changed ones.
    """

    def __init__(self, reload: Callable[[], Awaitable[Sequence[SettingChange]]]) -> None:
        self._reload = reload

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane; each manager has settings of its own."""
        types = (config_pb.ReloadConfigRequest, config_pb.ReloadConfigResponse)
        return [
            Call("kvcm.v1.ConfigService", "ReloadConfig", Plane.ADMIN, *types, self.reload_config, leader_only=False)
        ]

    async def reload_config(self, _request: Any) -> Reply:
        """Read the settings again."""
        message = config_pb.ReloadConfigResponse()
        for change in await self._reload():
            message.changes.add(
                key=change.key, old_value=change.old, new_value=change.new, needs_restart=change.needs_restart
            )
        return Reply(message)
