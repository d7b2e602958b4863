"""Checks of configured values. Each names the field, the value and what is allowed; what fails is never stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.groups import CacheConfig, InstanceGroup, MetaIndexerConfig
from kvcm.model.instances import Instance
from kvcm.model.names import check_name, check_storage_name
from kvcm.model.storages import (
    DummyStorageSpec,
    LocalStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)

__all__ = ["check_group", "check_instance", "check_storage", "most_shards", "require"]

_MOST_SHARDS = 1 << 16
_MOST_REDIS_SHARDS = 1 << 10  # every duty asks every shard

_REQUIRED_TEXTS: dict[type[object], tuple[str, ...]] = {
    ThreeFSStorageSpec: ("mountpoint", "root_dir"),
    VcnsThreeFSStorageSpec: ("mountpoint", "root_dir", "remote_host", "meta_storage_uri"),
    MooncakeStorageSpec: ("local_hostname", "metadata_connstring", "protocol", "master_service_entry"),
    TairMemPoolStorageSpec: ("domain",),
    NfsStorageSpec: ("root_path",),
    DummyStorageSpec: (),
}


def require(condition: object, path: str, reason: str = "is required") -> None:
    """Refuse a request unless `condition` holds.

    Args:
        condition: what must be true.
        path: the field with its messages, outermost first, as in `StorageConfig.NfsStorageSpec.root_path`.
        reason: what is wrong and what is allowed.

    Raises:
        InvalidArgumentError: the condition does not hold.
    """
    if not condition:
        nested = path.replace(".", ": {") + "}" * path.count(".")
        raise InvalidArgumentError(f"missing or invalid fields: {{{nested}}}: {path.rpartition('.')[2]} {reason}")


def check_storage(config: StorageConfig) -> None:
    """Check a storage as AddStorage and UpdateStorage take it.

    Raises:
        InvalidArgumentError: a field is missing or malformed.
        UnsupportedError: the storage is of kind `local`.
    """
    require(config.global_unique_name, "StorageConfig.global_unique_name")
    check_storage_name("global_unique_name", config.global_unique_name)
    spec = config.spec
    if isinstance(spec, LocalStorageSpec):
        raise UnsupportedError("storage_spec local cannot be opened by any manager; use nfs")
    prefix = f"StorageConfig.{type(spec).__name__}"
    for field in _REQUIRED_TEXTS[type(spec)]:
        require(getattr(spec, field), f"{prefix}.{field}")
    if isinstance(spec, VcnsThreeFSStorageSpec):
        require(spec.remote_port > 0, f"{prefix}.remote_port", f"is {spec.remote_port}, must be > 0")
    if isinstance(spec, MooncakeStorageSpec) and spec.protocol == "rdma":
        require(spec.rdma_device, f"{prefix}.rdma_device", "is required when protocol is rdma")


def check_group(group: InstanceGroup, store_kind: str = "memory") -> None:
    """Check a group, from the API and from documents alike. Candidates need not exist.

    Args:
        group: to check.
        store_kind: the deployment's metadata store.

    Raises:
        InvalidArgumentError: a field is missing, malformed or out of range.
    """
    require(group.name, "InstanceGroup.name")
    check_name("name", group.name)
    require(group.storage_candidates, "InstanceGroup.storage_candidates")
    _at_least_zero("InstanceGroup.max_instance_count", group.max_instance_count)
    _check_quota(group)
    _check_reclaim(group.cache_config)
    _check_indexer(group.cache_config.meta_indexer_config, store_kind)
    _check_store(group.cache_config.meta_indexer_config, store_kind)


def _check_quota(group: InstanceGroup) -> None:
    _at_least_zero("InstanceGroup.quota.capacity", group.quota.capacity)
    for quota in group.quota.quota_config:
        path = "InstanceGroup.quota.quota_config"
        require(quota.storage_type is not StorageType.ST_UNSPECIFIED, f"{path}.storage_type")
        _at_least_zero(f"{path}.capacity", quota.capacity)
    repeated = _repeated(quota.storage_type.kind for quota in group.quota.quota_config)
    require(not repeated, "InstanceGroup.quota.quota_config", f"lists {repeated} more than once")


def _check_reclaim(config: CacheConfig) -> None:
    path = "InstanceGroup.cache_config"
    strategy = config.reclaim_strategy
    trigger = strategy.trigger_strategy
    _at_least_zero(f"{path}.reclaim_strategy.trigger_strategy.used_size", trigger.used_size)
    ratio = trigger.used_percentage
    require(
        math.isfinite(ratio) and ratio >= 0,
        f"{path}.reclaim_strategy.trigger_strategy.used_percentage",
        f"is {ratio}, must be a ratio >= 0 (0.8 is 80 %, above 1 is off)",
    )
    for field in ("trigger_period_seconds", "reclaim_step_size", "reclaim_step_percentage", "delay_before_delete_ms"):
        _at_least_zero(f"{path}.reclaim_strategy.{field}", getattr(strategy, field))


def most_shards(store_kind: str) -> int:
    """Return how many lock shards an index may have on a store of that kind."""
    return _MOST_REDIS_SHARDS if store_kind == "redis" else _MOST_SHARDS


def _check_indexer(config: MetaIndexerConfig, store_kind: str) -> None:
    path = "InstanceGroup.cache_config.meta_indexer_config"
    _at_least_zero(f"{path}.max_key_count", config.max_key_count)
    _at_least_zero(f"{path}.batch_key_size", config.batch_key_size)
    shards = config.mutex_shard_num
    most = min(config.max_key_count or _MOST_SHARDS, most_shards(store_kind))
    why = (
        " on redis, where every duty asks every shard"
        if store_kind == "redis" and shards > most_shards("redis")
        else ""
    )
    require(
        shards == 0 or (0 < shards <= most and shards & (shards - 1) == 0),
        f"{path}.mutex_shard_num",
        f"is {shards}, must be a power of two from 1 to {most}{why}, or 0 for the default",
    )
    ratio = config.meta_cache_policy_config.high_pri_pool_ratio
    require(math.isfinite(ratio), f"{path}.meta_cache_policy_config.high_pri_pool_ratio", f"is {ratio}, must be finite")


def _check_store(config: MetaIndexerConfig, store_kind: str) -> None:
    """One store per deployment (design.md decision 6): a group may say so, and cannot choose another."""
    backend = config.meta_storage_backend_config.storage_type
    allowed = ("local", "redis") if store_kind == "redis" else ("local",)
    require(
        backend in allowed,
        "InstanceGroup.cache_config.meta_indexer_config.meta_storage_backend_config.storage_type",
        f"is {backend!r}, must be {' or '.join(map(repr, allowed))}: the store of this deployment is {store_kind}",
    )


def check_instance(instance: Instance) -> None:
    """Check a registration.

    Raises:
        InvalidArgumentError: a field is missing, malformed or out of range.
    """
    require(instance.instance_group_name, "RegisterInstance.instance_group")
    require(instance.instance_id, "RegisterInstance.instance_id")
    check_name("instance_id", instance.instance_id)
    deployment = instance.model_deployment
    require(deployment.model_name, "RegisterInstance.ModelDeployment.model_name")
    require(deployment.dtype, "RegisterInstance.ModelDeployment.dtype")
    _at_least_zero("RegisterInstance.block_size", instance.block_size)
    require(instance.location_spec_infos, "RegisterInstance.location_spec_infos")
    for index, info in enumerate(instance.location_spec_infos):
        require(info.name, "RegisterInstance.location_spec_infos.name", f"is required (index {index})")
        check_name(f"location_spec_infos[{index}].name", info.name)
        _at_least_zero("RegisterInstance.location_spec_infos.size", info.size)
    repeated = _repeated(instance.spec_names)
    require(not repeated, "RegisterInstance.location_spec_infos", f"names {repeated} more than once")
    _check_spec_groups(instance)


def _check_spec_groups(instance: Instance) -> None:
    path = "RegisterInstance.location_spec_groups"
    known = set(instance.spec_names)
    for group in instance.location_spec_groups:
        check_name("location_spec_groups.name", group.name)
        require(group.spec_names, f"{path}.spec_names", f"of group {group.name!r} is empty")
        unknown = sorted(set(group.spec_names) - known)
        require(not unknown, f"{path}.spec_names", f"of group {group.name!r} holds unregistered specs {unknown}")
    repeated = _repeated(group.name for group in instance.location_spec_groups)
    require(not repeated, path, f"names {repeated} more than once")


def _at_least_zero(path: str, value: int) -> None:
    require(value >= 0, path, f"is {value}, must be >= 0")


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)
