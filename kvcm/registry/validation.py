"""Checks of configured values. An error names the field, the value and the allowed values; a value that fails is never
stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace

from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.groups import (
    CacheConfig,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    MetaIndexerConfig,
    PrefixClass,
    TriggerStrategy,
)
from kvcm.model.instances import Instance
from kvcm.model.principals import ALL_GROUPS
from kvcm.model.storages import (
    MIN_POOL_BYTES,
    DummyStorageSpec,
    EventReportStorageSpec,
    LocalStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import check_name, check_storage_name

__all__ = [
    "POLICY_NAMES",
    "SHARES",
    "check_global_quota",
    "check_group",
    "check_instance",
    "check_storage",
    "check_storages_of_group",
    "check_storages_of_named_group",
    "most_shards",
    "require",
]

POLICY_NAMES = ("lru", "lfu", "lfu_aging", "ttl", "fifo", "sieve", "s3fifo", "leaf_lru")
"""Eviction policies that can be configured; a test compares them with those that there are."""

SHARES = ("", "group_lru", "proportional", "fixed")

_WITH_TTL = ("ttl", "fifo", "lru", "leaf_lru")
_MOST_PRIORITY = 100
_MOST_SHARDS = 1 << 16
_MOST_REDIS_SHARDS = 1 << 10  # every duty asks every shard

_REQUIRED_TEXTS: dict[type[object], tuple[str, ...]] = {
    ThreeFSStorageSpec: ("mountpoint", "root_dir"),
    VcnsThreeFSStorageSpec: ("mountpoint", "root_dir", "remote_host", "meta_storage_uri"),
    MooncakeStorageSpec: ("local_hostname", "metadata_connstring", "protocol", "master_service_entry"),
    TairMemPoolStorageSpec: (),
    NfsStorageSpec: ("root_path",),
    DummyStorageSpec: (),
    EventReportStorageSpec: (),
}
_EVENT_REPORTS = tuple(each.name for each in StorageType if each.is_event_report)


def require(condition: object, path: str, reason: str = "is required") -> None:
    """Refuse a request unless `condition` holds.

    Args:
        condition: what must be true.
        path: the field with its messages, outermost first, as in `StorageConfig.NfsStorageSpec.root_path`.
        reason: the error and the allowed values.

    Raises:
        InvalidArgumentError: the condition does not hold.
    """
    if not condition:
        nested = path.replace(".", ": {") + "}" * path.count(".")
        text = f"missing or invalid fields: {{{nested}}}: {path.rpartition('.')[2]} {reason}"
        raise InvalidArgumentError(text, path, reason)


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
    if isinstance(spec, TairMemPoolStorageSpec):
        _check_pool(spec, prefix)
    _check_report(config, prefix)
    _at_least_zero("StorageConfig.capacity_bytes", config.capacity_bytes)
    _check_mark("StorageConfig.used_percentage", config.used_percentage)


def _check_report(config: StorageConfig, prefix: str) -> None:
    spec, report_type = config.spec, config.report_type
    if not isinstance(spec, EventReportStorageSpec):
        require(
            report_type is StorageType.ST_UNSPECIFIED,
            "StorageConfig.storage_type",
            f"is {report_type.name}, must be {_type_of_spec(config).name} or left out with these settings",
        )
        return
    require(
        report_type.is_event_report,
        "StorageConfig.storage_type",
        f"is {report_type.name}, must be {' or '.join(_EVENT_REPORTS)} with event_report",
    )
    for field in fields(spec):
        value = getattr(spec, field.name)
        require(
            value > 0, f"{prefix}.{field.name}", f"is {value}, must be > 0 milliseconds, or left out for the default"
        )
    require(
        not config.capacity_bytes,
        "StorageConfig.capacity_bytes",
        f"is {config.capacity_bytes}, must be 0 with event_report: no bytes are written to it",
    )


def _type_of_spec(config: StorageConfig) -> StorageType:
    return replace(config, report_type=StorageType.ST_UNSPECIFIED).storage_type


def _check_pool(spec: TairMemPoolStorageSpec, prefix: str) -> None:
    _at_least_zero(f"{prefix}.capacity_bytes", spec.capacity_bytes)
    if not spec.node_id:
        require(spec.domain, f"{prefix}.domain", "is required without node_id")
        require(not spec.capacity_bytes, f"{prefix}.node_id", "is required with capacity_bytes")
        return
    check_storage_name("node_id", spec.node_id)
    require(not spec.domain, f"{prefix}.domain", f"is {spec.domain!r}, must be empty with node_id")
    require(
        spec.capacity_bytes >= MIN_POOL_BYTES,
        f"{prefix}.capacity_bytes",
        f"is {spec.capacity_bytes}, must be at least {MIN_POOL_BYTES} with node_id",
    )


def check_global_quota(quota: GlobalQuota) -> None:
    """Check a limit over groups.

    Raises:
        InvalidArgumentError: a field is missing, malformed or out of range.
    """
    require(quota.name, "GlobalQuota.name")
    check_name("name", quota.name)
    _at_least_zero("GlobalQuota.capacity_bytes", quota.capacity_bytes)
    _check_mark("GlobalQuota.used_percentage", quota.used_percentage)


def check_group(group: InstanceGroup, store_kind: str = "memory") -> None:
    """Check a group, from the API and from documents alike. Candidates need not exist (`check_storages_of_group`).

    Args:
        group: to check.
        store_kind: the deployment's metadata store.

    Raises:
        InvalidArgumentError: a field is missing, malformed or out of range.
    """
    require(group.name, "InstanceGroup.name")
    require(group.name != ALL_GROUPS, "InstanceGroup.name", f"is {ALL_GROUPS!r}, which stands for all groups in keys")
    check_name("name", group.name)
    require(group.storage_candidates, "InstanceGroup.storage_candidates")
    repeated = _repeated(group.event_report_storage_candidates)
    require(not repeated, "InstanceGroup.event_report_storage_candidates", f"lists {repeated} more than once")
    _at_least_zero("InstanceGroup.max_instance_count", group.max_instance_count)
    _check_quota(group)
    _check_guarantees(group)
    _check_reclaim(group.cache_config)
    _check_policies(group)
    _check_indexer(group.cache_config.meta_indexer_config, store_kind)
    _check_store(group.cache_config.meta_indexer_config, store_kind)


def check_storages_of_group(group: InstanceGroup, find: Callable[[str], StorageConfig | None]) -> None:
    """Check the types of the storages that a group names; those that do not exist are absent until they are added.

    Args:
        group: to check.
        find: returns a storage by its name, None when there is none.

    Raises:
        InvalidArgumentError: bytes cannot be written to a candidate, or a candidate for reports takes none.
    """
    candidates = [config for name in group.storage_candidates if (config := find(name)) is not None]
    for config in candidates:
        require(
            not config.is_event_report,
            "InstanceGroup.storage_candidates",
            f"lists {config.global_unique_name!r} of type {config.storage_type.kind}, to which no bytes are written: "
            "list it in event_report_storage_candidates",
        )
    path = "InstanceGroup.event_report_storage_candidates"
    reports = [config for name in group.event_report_storage_candidates if (config := find(name)) is not None]
    by_type: dict[StorageType, str] = {}
    for config in reports:
        name, kind = config.global_unique_name, config.storage_type.kind
        allowed = _listed(each.kind for each in StorageType if each.is_event_report)
        require(config.is_event_report, path, f"lists {name!r} of type {kind}, allowed are types {allowed}")
        first = by_type.setdefault(config.storage_type, name)
        require(first == name, path, f"lists {first!r} and {name!r}, both of type {kind}: a group has one of each type")


def check_storages_of_named_group(group: InstanceGroup, find: Callable[[str], StorageConfig | None]) -> None:
    """Do `check_storages_of_group` for a group that is configured already, which the error names."""
    try:
        check_storages_of_group(group, find)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"group {group.name!r}: {error}") from error


def _check_quota(group: InstanceGroup) -> None:
    _at_least_zero("InstanceGroup.quota.capacity", group.quota.capacity)
    for quota in group.quota.quota_config:
        path = "InstanceGroup.quota.quota_config"
        require(quota.storage_type is not StorageType.ST_UNSPECIFIED, f"{path}.storage_type")
        require(
            not quota.storage_type.is_event_report,
            f"{path}.storage_type",
            f"is {quota.storage_type.name}, must be a type that bytes are written to",
        )
        _at_least_zero(f"{path}.capacity", quota.capacity)
    repeated = _repeated(quota.storage_type.kind for quota in group.quota.quota_config)
    require(not repeated, "InstanceGroup.quota.quota_config", f"lists {repeated} more than once")


def _check_guarantees(group: InstanceGroup) -> None:
    path = "InstanceGroup.storage_guarantees"
    for guarantee in group.storage_guarantees:
        name = guarantee.storage_unique_name
        check_storage_name("storage_guarantees.storage_unique_name", name)
        require(
            name in group.storage_candidates,
            f"{path}.storage_unique_name",
            f"is {name!r}, must be one of the storage_candidates {list(group.storage_candidates)}",
        )
        _at_least_zero(f"{path}.guaranteed_bytes", guarantee.guaranteed_bytes)
    repeated = _repeated(each.storage_unique_name for each in group.storage_guarantees)
    require(not repeated, path, f"lists {repeated} more than once")
    _at_least_zero("InstanceGroup.pin_budget_bytes", group.pin_budget_bytes)


def _check_reclaim(config: CacheConfig) -> None:
    path = "InstanceGroup.cache_config.reclaim_strategy"
    strategy = config.reclaim_strategy
    _check_trigger(f"{path}.trigger_strategy", strategy.trigger_strategy)
    for field in ("trigger_period_seconds", "reclaim_step_size", "reclaim_step_percentage", "delay_before_delete_ms"):
        _at_least_zero(f"{path}.{field}", getattr(strategy, field))
    require(strategy.share in SHARES, f"{path}.share", f"is {strategy.share!r}, must be {_listed(SHARES)}")


def _check_trigger(path: str, trigger: TriggerStrategy) -> None:
    _at_least_zero(f"{path}.used_size", trigger.used_size)
    _check_mark(f"{path}.used_percentage", trigger.used_percentage)
    hysteresis = trigger.hysteresis
    require(
        hysteresis is None or 0 <= hysteresis < 1,
        f"{path}.hysteresis",
        f"is {hysteresis}, must be a ratio >= 0 and < 1 (0.02 is two points of the limit)",
    )


def _check_mark(path: str, ratio: float) -> None:
    require(
        math.isfinite(ratio) and ratio >= 0,
        path,
        f"is {ratio}, must be a ratio >= 0 (0.8 is 80 %, above 1 is off)",
    )


def _check_policies(group: InstanceGroup) -> None:
    path = "InstanceGroup.cache_config.reclaim_strategy"
    strategy = group.cache_config.reclaim_strategy
    everywhere = group.policy_of("")
    _check_policy(f"{path}.policy", strategy.policy, everywhere)
    for prefix_class in strategy.prefix_classes:
        _check_class(f"{path}.prefix_classes", prefix_class, everywhere)
    repeated = _repeated(each.name for each in strategy.prefix_classes)
    require(not repeated, f"{path}.prefix_classes", f"names {repeated} more than once")
    for override in strategy.instance_overrides:
        below = f"{path}.instance_overrides"
        require(override.instance_id, f"{below}.instance_id")
        check_name("instance_overrides.instance_id", override.instance_id)
        _check_policy(f"{below}.policy", override.policy, everywhere)
        weight = override.weight
        require(math.isfinite(weight) and weight >= 0, f"{below}.weight", f"is {weight}, must be >= 0; 0 is 1")
    repeated = _repeated(each.instance_id for each in strategy.instance_overrides)
    require(not repeated, f"{path}.instance_overrides", f"names {repeated} more than once")


def _check_policy(path: str, policy: EvictionPolicy, above: EvictionPolicy) -> None:
    """Check a policy below one that is complete. The original's POLICY_TTL says no age: it is an order, then."""
    require(
        policy.name in ("", *POLICY_NAMES),
        f"{path}.name",
        f"is {policy.name!r}, must be empty or {_listed(POLICY_NAMES)}",
    )
    _at_least_zero(f"{path}.ttl_seconds", policy.ttl_seconds)
    require(policy.name != "ttl" or policy.ttl_seconds, f"{path}.ttl_seconds", "is 0, must be > 0 with policy 'ttl'")
    in_force = policy.with_defaults(above).name
    require(
        not policy.ttl_seconds or in_force in _WITH_TTL,
        f"{path}.ttl_seconds",
        f"is {policy.ttl_seconds} with policy {in_force!r}, allowed with {_listed(_WITH_TTL)}",
    )


def _check_class(path: str, prefix_class: PrefixClass, above: EvictionPolicy) -> None:
    require(prefix_class.name, f"{path}.name")
    check_name("prefix_classes.name", prefix_class.name)
    _at_least_zero(f"{path}.min_depth", prefix_class.min_depth)
    end = prefix_class.end_depth
    require(
        end == 0 or end > prefix_class.min_depth,
        f"{path}.end_depth",
        f"is {end}, must be above min_depth, {prefix_class.min_depth}, or 0 for no end",
    )
    _at_least_zero(f"{path}.min_reads", prefix_class.min_reads)
    for instance_id in prefix_class.instance_ids:
        check_name("prefix_classes.instance_ids", instance_id)
    priority = prefix_class.priority
    require(
        abs(priority) <= _MOST_PRIORITY,
        f"{path}.priority",
        f"is {priority}, must be from -{_MOST_PRIORITY} to {_MOST_PRIORITY}",
    )
    _check_policy(f"{path}.policy", prefix_class.policy, above)
    budget = prefix_class.budget
    require(
        math.isfinite(budget) and 0 <= budget <= 1,
        f"{path}.budget",
        f"is {budget}, must be a ratio from 0 to 1 of the group's capacity, 0 for no limit",
    )


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


def _listed(names: Iterable[str]) -> str:
    *others, last = (repr(name) for name in names)
    return f"{', '.join(others)} or {last}"


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)
