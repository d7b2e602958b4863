"""A configuration with something of every kind, and ways to spoil it."""

from __future__ import annotations

from dataclasses import replace

from registry_rig import GROUP, INSTANCE, Opener

from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    InstanceOverride,
    PrefixClass,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, LocationSpecKind, ModelDeployment
from kvcm.model.principals import AccountRole
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    TairMemPoolStorageSpec,
)
from kvcm.registry.config_snapshots import AccountEntry, Configuration
from kvcm.registry.instances import with_sorted_groups
from kvcm.registry.registry import Registry
from kvcm.store.memory import MemoryTable
from kvcm.store.store import Table

STRATEGY = CacheReclaimStrategy(
    "nfs",
    trigger_strategy=TriggerStrategy(1 << 60, 0.1 + 0.2, hysteresis=0.0),
    delay_before_delete_ms=7,
    policy=EvictionPolicy("ttl", 60, ttl_sliding=True),
    prefix_classes=(PrefixClass("system", end_depth=3, priority=-5, budget=1 / 3),),
    instance_overrides=(InstanceOverride("i0", weight=2.5),),
)
GROUPS = (
    replace(GROUP, name="a", max_instance_count=3),
    replace(GROUP, name="b", version=9, cache_config=CacheConfig(STRATEGY), user_data='{"note": "ü"}'),
    replace(GROUP, name="c", storage_guarantees=(StorageGuarantee("nfs", 1 << 53),), pin_budget_bytes=(1 << 53) + 1),
)
CONFIG = Configuration(
    storages=(
        StorageConfig("dummy", DummyStorageSpec("/d"), is_available=False, capacity_bytes=(1 << 62) + 1),
        StorageConfig("nfs", NfsStorageSpec("/nfs/", 8), used_percentage=0.7),
        StorageConfig("pool", TairMemPoolStorageSpec(node_id="n1", capacity_bytes=1 << 30)),
    ),
    groups=GROUPS,
    quotas=(GlobalQuota("all", 1 << 40, 0.95), GlobalQuota("quota-group", 5)),
    instances=tuple(
        replace(
            with_sorted_groups(INSTANCE),
            instance_id=f"i{number}",
            instance_group_name="aabc"[number],
            quota_group_name="quota-group",
            model_deployment=ModelDeployment("m", "bf16", extra="x", user_data=f"u{number}"),
            location_spec_infos=(
                LocationSpecInfo("tp0", 64, LocationSpecKind.LSK_FULL_ATTENTION),
                LocationSpecInfo("tp1", 1 << 40),
            ),
            location_spec_groups=(LocationSpecGroup("all", ("tp0", "tp1")), LocationSpecGroup("one", ("tp0",))),
        )
        for number in range(4)
    ),
    accounts=(
        AccountEntry("ann", AccountRole.ROLE_ADMIN),
        AccountEntry("bob", AccountRole.ROLE_USER),
        AccountEntry("eve", AccountRole.ROLE_USER),
    ),
)
SECRET = "hunter2"
MOONCAKE = StorageConfig(
    "mc", MooncakeStorageSpec("h", f"etcd://kvcm:{SECRET}@meta:2379", "tcp", "", f"root:{SECRET}@master:1")
)


def registry_over(table: Table | None = None, opener: Opener | None = None) -> Registry:
    """Return a manager's registry."""
    return Registry(opener or Opener(), table or MemoryTable())


async def loaded(config: Configuration = CONFIG, table: Table | None = None) -> Registry:
    """Return a registry of a deployment that has a configuration."""
    registry = registry_over(table)
    await registry.snapshots.load(config)
    return registry


def without(
    config: Configuration, instance: Instance | None = None, group: InstanceGroup | None = None
) -> Configuration:
    """Return a configuration less some."""
    return replace(
        config,
        instances=tuple(each for each in config.instances if each != instance),
        groups=tuple(each for each in config.groups if each != group),
    )


async def refused_without_a_trace(registry: Registry, table: MemoryTable, config: Configuration, **flags: bool) -> None:
    """Load a configuration that the registry rejects: raise its error, and check that the table did not change."""
    before = await table.all()
    try:
        await registry.snapshots.load(config, **flags)
    finally:
        assert await table.all() == before
