"""Validation of configured values, and the startup document."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_rig import GROUP, INSTANCE, Opener
from thoroughness import examples

from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError, UnsupportedError
from kvcm.model.groups import (
    CachePreferStrategy,
    CacheReclaimStrategy,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    InstanceOverride,
    MetaCachePolicyConfig,
    MetaIndexerConfig,
    MetaStorageBackendConfig,
    PrefixClass,
    QuotaConfig,
    ReclaimPolicy,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import (
    DummyStorageSpec,
    LocalStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.reclaim.policies import POLICIES
from kvcm.registry.registry import Registry
from kvcm.registry.startup_document import builtin_document, parse_startup_document, storage_configs_json
from kvcm.registry.validation import (
    POLICY_NAMES,
    check_global_quota,
    check_group,
    check_instance,
    check_storage,
    require,
)
from kvcm.store.memory import MemoryTable

NFS = StorageType.ST_NFS


def group_with(**fields: Any) -> InstanceGroup:
    """The valid group with some field of the cache config, the reclaim strategy or the indexer changed."""
    config = GROUP.cache_config
    reclaim, indexer = config.reclaim_strategy, config.meta_indexer_config
    for name, value in fields.items():
        if hasattr(reclaim, name):
            reclaim = replace(reclaim, **{name: value})
        elif hasattr(indexer, name):
            indexer = replace(indexer, **{name: value})
        else:
            config = replace(config, **{name: value})
    return replace(GROUP, cache_config=replace(config, reclaim_strategy=reclaim, meta_indexer_config=indexer))


def quota(capacity: int, *types: tuple[StorageType, int]) -> InstanceGroup:
    return replace(GROUP, quota=InstanceGroupQuota(capacity, tuple(QuotaConfig(*each) for each in types)))


def assert_refused(check: Any, value: Any, *named: str, error: type[KvcmError] = InvalidArgumentError) -> None:
    with pytest.raises(error) as refusal:
        check(value)
    assert all(each in str(refusal.value) for each in named), str(refusal.value)


@pytest.mark.parametrize(
    "group",
    [
        GROUP,
        quota(0),
        quota(1, (NFS, 0), (StorageType.ST_3FS, 5)),
        group_with(mutex_shard_num=1, max_key_count=1),
        group_with(mutex_shard_num=65536),
        group_with(trigger_strategy=TriggerStrategy(0, 0.0)),
        group_with(trigger_strategy=TriggerStrategy(5, 7.5)),
        replace(GROUP, storage_candidates=("not", "registered")),
        replace(GROUP, name="鍵/group ☃"),
    ],
)
def test_good_groups_pass(group: InstanceGroup) -> None:
    check_group(group)


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (replace(GROUP, name=""), ["InstanceGroup", "name", "required"]),
        (replace(GROUP, name="*"), ["InstanceGroup", "name", "all groups"]),
        (replace(GROUP, storage_candidates=()), ["storage_candidates", "required"]),
        (replace(GROUP, max_instance_count=-1), ["max_instance_count", "-1", ">= 0"]),
        (quota(-5), ["quota", "capacity", "-5", ">= 0"]),
        (quota(1, (NFS, -7)), ["quota_config", "capacity", "-7", ">= 0"]),
        (quota(1, (StorageType.ST_UNSPECIFIED, 1)), ["quota_config", "storage_type", "required"]),
        (quota(1, (NFS, 1), (NFS, 2)), ["quota_config", "file", "more than once"]),
        (group_with(trigger_strategy=TriggerStrategy(-1)), ["used_size", "-1", ">= 0"]),
        (group_with(trigger_strategy=TriggerStrategy(0, -0.1)), ["used_percentage", "-0.1", ">= 0"]),
        (group_with(trigger_strategy=TriggerStrategy(0, float("nan"))), ["used_percentage", "nan"]),
        (group_with(trigger_period_seconds=-1), ["trigger_period_seconds", "-1", ">= 0"]),
        (group_with(reclaim_step_size=-2), ["reclaim_step_size", "-2", ">= 0"]),
        (group_with(reclaim_step_percentage=-3), ["reclaim_step_percentage", "-3", ">= 0"]),
        (group_with(delay_before_delete_ms=-4), ["delay_before_delete_ms", "-4", ">= 0"]),
        (group_with(max_key_count=-1), ["max_key_count", "-1", ">= 0"]),
        (group_with(batch_key_size=-1), ["batch_key_size", "-1", ">= 0"]),
        (group_with(mutex_shard_num=-1), ["mutex_shard_num", "-1", "power of two", "65536"]),
        (group_with(mutex_shard_num=3), ["mutex_shard_num", "3", "power of two"]),
        (group_with(mutex_shard_num=131072), ["mutex_shard_num", "131072", "65536"]),
        (group_with(mutex_shard_num=16, max_key_count=8), ["mutex_shard_num", "16", "8"]),
        (
            group_with(meta_storage_backend_config=MetaStorageBackendConfig("redis", "redis://x")),
            ["meta_storage_backend_config", "storage_type", "'redis'", "'local'", "memory"],
        ),
        (
            group_with(meta_cache_policy_config=MetaCachePolicyConfig(high_pri_pool_ratio=float("nan"))),
            ["high_pri_pool_ratio", "nan", "finite"],
        ),
    ],
)
def test_bad_groups_are_refused(group: InstanceGroup, named: list[str]) -> None:
    assert_refused(check_group, group, *named)


def test_on_redis_an_index_has_fewer_lock_shards() -> None:
    check_group(group_with(mutex_shard_num=1024), "redis")
    check_group(group_with(mutex_shard_num=2048), "rocksdb")
    with pytest.raises(InvalidArgumentError, match="is 2048, must be a power of two from 1 to 1024 on redis, where"):
        check_group(group_with(mutex_shard_num=2048), "redis")


@pytest.mark.parametrize("store_kind", ["memory", "rocksdb", "redis"])
@pytest.mark.parametrize("named", ["local", "redis", "rocksdb", ""])
def test_a_group_may_name_the_store_of_the_deployment_and_no_other(store_kind: str, named: str) -> None:
    """Design decision 6; the uri is ignored."""
    group = group_with(meta_storage_backend_config=MetaStorageBackendConfig(named, "anything"))
    if named == "local" or named == store_kind == "redis":
        check_group(group, store_kind)
    else:
        with pytest.raises(InvalidArgumentError, match=f"'local'.*is {store_kind}"):
            check_group(group, store_kind)


def specs(*infos: tuple[str, int]) -> Instance:
    return replace(
        INSTANCE, location_spec_infos=tuple(LocationSpecInfo(*info) for info in infos), location_spec_groups=()
    )


def grouped(*groups: tuple[str, tuple[str, ...]]) -> Instance:
    return replace(INSTANCE, location_spec_groups=tuple(LocationSpecGroup(*group) for group in groups))


@pytest.mark.parametrize("instance", [INSTANCE, replace(INSTANCE, block_size=0), specs(("empty", 0)), grouped()])
def test_good_instances_pass(instance: Instance) -> None:
    check_instance(instance)


@pytest.mark.parametrize(
    ("instance", "named"),
    [
        (replace(INSTANCE, instance_group_name=""), ["instance_group", "required"]),
        (replace(INSTANCE, instance_id=""), ["instance_id", "required"]),
        (replace(INSTANCE, instance_id="a\tb"), ["instance_id", "a\\tb", "control"]),
        (replace(INSTANCE, model_deployment=ModelDeployment("", "bf16")), ["model_name", "required"]),
        (replace(INSTANCE, model_deployment=ModelDeployment("m", "")), ["dtype", "required"]),
        (replace(INSTANCE, block_size=-1), ["block_size", "-1", ">= 0"]),
        (specs(), ["location_spec_infos", "required"]),
        (specs(("a", 1), ("", 1)), ["location_spec_infos", "name", "required", "1"]),
        (specs(("a", -8)), ["location_spec_infos", "size", "-8", ">= 0"]),
        (specs(("a", 1), ("b", 1), ("a", 2)), ["location_spec_infos", "'a'", "more than once"]),
        (grouped(("", ("tp0",))), ["location_spec_groups", "name"]),
        (grouped(("g", ())), ["location_spec_groups", "spec_names", "'g'", "empty"]),
        (grouped(("g", ("tp0", "tp9"))), ["spec_names", "'g'", "tp9", "unregistered"]),
        (grouped(("g", ("tp0",)), ("g", ("tp1",))), ["location_spec_groups", "'g'", "more than once"]),
    ],
)
def test_bad_instances_are_refused(instance: Instance, named: list[str]) -> None:
    assert_refused(check_instance, instance, *named)


MOONCAKE = MooncakeStorageSpec("host", "meta", "tcp", "", "master:1")
VCNS = VcnsThreeFSStorageSpec("", "/m", "r", 1, False, "host", 1, "redis://x")


@pytest.mark.parametrize(
    "spec",
    [
        NfsStorageSpec("/r"),
        DummyStorageSpec(),
        ThreeFSStorageSpec("", "/m", "r"),
        VCNS,
        MOONCAKE,
        TairMemPoolStorageSpec("d"),
        TairMemPoolStorageSpec(node_id="n-1.A_z", capacity_bytes=1 << 20),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_good_storages_pass(spec: NfsStorageSpec) -> None:
    check_storage(StorageConfig("nfs_01.a-B", spec))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (NfsStorageSpec(""), ["StorageConfig", "NfsStorageSpec", "root_path", "required"]),
        (ThreeFSStorageSpec("", "", "r"), ["ThreeFSStorageSpec", "mountpoint", "required"]),
        (ThreeFSStorageSpec("", "/m", ""), ["ThreeFSStorageSpec", "root_dir", "required"]),
        (replace(VCNS, remote_host=""), ["VcnsThreeFSStorageSpec", "remote_host", "required"]),
        (replace(VCNS, meta_storage_uri=""), ["VcnsThreeFSStorageSpec", "meta_storage_uri", "required"]),
        (replace(VCNS, remote_port=0), ["VcnsThreeFSStorageSpec", "remote_port", "0", "> 0"]),
        (replace(MOONCAKE, local_hostname=""), ["MooncakeStorageSpec", "local_hostname"]),
        (replace(MOONCAKE, metadata_connstring=""), ["MooncakeStorageSpec", "metadata_connstring"]),
        (replace(MOONCAKE, protocol=""), ["MooncakeStorageSpec", "protocol"]),
        (replace(MOONCAKE, master_service_entry=""), ["MooncakeStorageSpec", "master_service_entry"]),
        (replace(MOONCAKE, protocol="rdma"), ["MooncakeStorageSpec", "rdma_device", "rdma"]),
        (TairMemPoolStorageSpec(""), ["TairMemPoolStorageSpec", "domain", "without node_id"]),
        (TairMemPoolStorageSpec("d", capacity_bytes=1 << 20), ["TairMemPoolStorageSpec", "node_id", "required"]),
        (TairMemPoolStorageSpec("d", node_id="n", capacity_bytes=1 << 20), ["domain", "'d'", "must be empty"]),
        (TairMemPoolStorageSpec(node_id="n"), ["capacity_bytes", "is 0", "1048576"]),
        (TairMemPoolStorageSpec(node_id="n", capacity_bytes=-1), ["capacity_bytes", "-1"]),
        (TairMemPoolStorageSpec(node_id="n/m", capacity_bytes=1 << 20), ["node_id", "'n/m'", "128"]),
        (TairMemPoolStorageSpec(node_id="n" * 129, capacity_bytes=1 << 20), ["node_id", "128"]),
    ],
)
def test_bad_storages_are_refused(spec: NfsStorageSpec, named: list[str]) -> None:
    assert_refused(check_storage, StorageConfig("s", spec), *named)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 129, "é", "a:80"])
def test_a_storage_name_must_fit_into_a_uri(name: str) -> None:
    named = ["global_unique_name"] + ([repr(name), "128"] if name else ["required"])
    assert_refused(check_storage, StorageConfig(name, DummyStorageSpec()), *named)


def test_a_local_storage_says_what_to_use_instead() -> None:
    assert_refused(check_storage, StorageConfig("s", LocalStorageSpec()), "local", "nfs", error=UnsupportedError)


def test_a_path_is_shown_with_its_messages() -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        require(condition=False, path="A.B.field", reason="is 7, must be 8")
    assert str(refusal.value) == "missing or invalid fields: {A: {B: {field}}}: field is 7, must be 8"
    require(condition=1, path="A.B.field")


# ── Limits, marks and policies ──


NAN, INF = float("nan"), float("inf")
NFS_CONFIG = StorageConfig("nfs", NfsStorageSpec("/r"))


def strategy(**fields: Any) -> InstanceGroup:
    return replace(GROUP, cache_config=replace(GROUP.cache_config, reclaim_strategy=CacheReclaimStrategy(**fields)))


def policy(name: str = "", ttl_seconds: int = 0, number: int = 0) -> InstanceGroup:
    return strategy(policy=EvictionPolicy(name, ttl_seconds), reclaim_policy=ReclaimPolicy(number))


def classed(*classes: PrefixClass, **fields: Any) -> InstanceGroup:
    return strategy(prefix_classes=classes, **fields)


def one_class(**fields: Any) -> InstanceGroup:
    return classed(PrefixClass("c", **fields))


def overridden(*overrides: InstanceOverride, **fields: Any) -> InstanceGroup:
    return strategy(instance_overrides=overrides, **fields)


def guaranteed(*guarantees: tuple[str, int]) -> InstanceGroup:
    return replace(GROUP, storage_guarantees=tuple(StorageGuarantee(*each) for each in guarantees))


def test_the_names_that_are_accepted_are_those_of_the_policies() -> None:
    assert sorted(POLICY_NAMES) == sorted(POLICIES)


@pytest.mark.parametrize(
    "group",
    [
        strategy(trigger_strategy=TriggerStrategy(0, 0.8, 0.0)),
        strategy(trigger_strategy=TriggerStrategy(0, 0.8, 0.999)),
        *(strategy(share=share) for share in ("", "group_lru", "proportional", "fixed")),
        *(policy(name) for name in POLICY_NAMES if name != "ttl"),
        *(policy(name, 5) for name in ("ttl", "fifo", "lru", "leaf_lru")),
        policy("", 5),  # leaf_lru
        policy("", 5, ReclaimPolicy.POLICY_LRU),
        policy("", 0, ReclaimPolicy.POLICY_TTL),  # as clients of the original send it
        policy("lru", 5, ReclaimPolicy.POLICY_LFU),
        one_class(min_depth=3, end_depth=4, min_reads=2, instance_ids=("i", "j"), priority=-100, budget=1.0),
        classed(PrefixClass("c", priority=100), PrefixClass("d", end_depth=1)),
        one_class(policy=EvictionPolicy("ttl", 5)),
        overridden(InstanceOverride("i", EvictionPolicy("fifo"), 0.5), InstanceOverride("j", weight=1e9)),
        guaranteed(("nfs", 0)),
        guaranteed(("nfs", 1 << 62)),
        replace(GROUP, pin_budget_bytes=1 << 62),
    ],
)
def test_good_settings_pass(group: InstanceGroup) -> None:
    check_group(group)


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (strategy(trigger_strategy=TriggerStrategy(0, 0.8, -0.1)), ["hysteresis", "-0.1", ">= 0"]),
        (strategy(trigger_strategy=TriggerStrategy(0, 0.8, 1.0)), ["hysteresis", "1.0", "< 1"]),
        (strategy(share="equal"), ["share", "'equal'", "'group_lru', 'proportional' or 'fixed'"]),
        (policy("lur"), ["policy", "name", "'lur'", *map(repr, POLICY_NAMES)]),
        (policy("lru", -5), ["ttl_seconds", "-5", ">= 0"]),
        (policy("ttl"), ["ttl_seconds", "must be > 0 with policy 'ttl'"]),
        (policy("lfu", 5), ["ttl_seconds", "5", "'lfu'", "'ttl', 'fifo', 'lru' or 'leaf_lru'"]),
        (policy("", 5, ReclaimPolicy.POLICY_LFU), ["ttl_seconds", "'lfu'"]),
        (classed(PrefixClass("")), ["prefix_classes", "name", "required"]),
        (classed(PrefixClass("a"), PrefixClass("a")), ["prefix_classes", "'a'", "more than once"]),
        (one_class(min_depth=-1), ["min_depth", "-1", ">= 0"]),
        (one_class(min_depth=5, end_depth=5), ["end_depth", "5", "above min_depth, 5"]),
        (one_class(min_reads=-1), ["min_reads", "-1", ">= 0"]),
        (one_class(instance_ids=("",)), ["instance_ids", "0 bytes"]),
        (one_class(priority=101), ["priority", "101", "-100 to 100"]),
        (one_class(budget=1.1), ["budget", "1.1", "0 to 1"]),
        (one_class(budget=NAN), ["budget", "nan"]),
        (one_class(policy=EvictionPolicy("x")), ["prefix_classes", "policy", "'x'"]),
        (
            classed(PrefixClass("c", policy=EvictionPolicy("", 5)), policy=EvictionPolicy("sieve")),
            ["prefix_classes", "ttl_seconds", "'sieve'"],
        ),
        (overridden(InstanceOverride("")), ["instance_overrides", "instance_id", "required"]),
        (overridden(InstanceOverride("i"), InstanceOverride("i")), ["instance_overrides", "'i'", "more than once"]),
        (overridden(InstanceOverride("i", weight=INF)), ["weight", "inf"]),
        (overridden(InstanceOverride("i", EvictionPolicy("ttl"))), ["instance_overrides", "ttl_seconds", "> 0"]),
        (guaranteed(("nfs", -1)), ["guaranteed_bytes", "-1", ">= 0"]),
        (guaranteed(("nfs", 1), ("nfs", 2)), ["storage_guarantees", "'nfs'", "more than once"]),
        (guaranteed(("other", 1)), ["storage_guarantees", "'other'", "storage_candidates", "'nfs'"]),
        (replace(GROUP, pin_budget_bytes=-1), ["pin_budget_bytes", "-1", ">= 0"]),
    ],
)
def test_bad_settings_are_refused(group: InstanceGroup, named: list[str]) -> None:
    assert_refused(check_group, group, *named)


@pytest.mark.parametrize("ratio", [0.0, 0.8, 1.0, 7.0])
def test_good_limits_pass(ratio: float) -> None:
    check_storage(replace(NFS_CONFIG, capacity_bytes=1 << 62, used_percentage=ratio))
    check_global_quota(GlobalQuota("all", 0, ratio))


@pytest.mark.parametrize(
    ("capacity", "ratio", "named"),
    [(-1, 0.0, ["capacity_bytes", "-1", ">= 0"]), (1, -0.1, ["used_percentage", "-0.1"]), (1, NAN, ["nan"])],
)
def test_bad_limits_are_refused(capacity: int, ratio: float, named: list[str]) -> None:
    assert_refused(check_storage, replace(NFS_CONFIG, capacity_bytes=capacity, used_percentage=ratio), *named)
    assert_refused(check_global_quota, GlobalQuota("all", capacity, ratio), *named)


async def test_malformed_quotas_are_not_stored() -> None:
    registry = Registry(Opener())
    with pytest.raises(InvalidArgumentError, match="name"):
        await registry.quotas.set(GlobalQuota("", 1))
    assert registry.quotas.all() == []


async def test_global_quotas_are_set_replaced_and_forgotten_for_all_managers() -> None:
    table = MemoryTable()
    here, there = Registry(Opener(), table), Registry(Opener(), table)
    await here.quotas.set(GlobalQuota("b", 1))
    await here.quotas.set(GlobalQuota("a", 2))
    await there.load()
    await here.quotas.set(GlobalQuota("a", 3, 0.5))
    await there.refresh()
    assert there.quotas.all() == here.quotas.all() == [GlobalQuota("a", 3, 0.5), GlobalQuota("b", 1)]
    await there.quotas.remove("a")
    await here.refresh()
    assert (here.quotas.find("a"), here.quotas.find("b")) == (None, GlobalQuota("b", 1))
    with pytest.raises(InvalidArgumentError, match="global quota 'a' does not exist"):
        await here.quotas.remove("a")


async def test_a_limit_changes_without_opening_anything() -> None:
    """Not even where the medium is away; the switch stays, and other managers open nothing either."""
    table, opener, theirs = MemoryTable(), Opener(), Opener()
    registry, other = Registry(opener, table), Registry(theirs, table)
    await registry.storages.add(NFS_CONFIG)
    await other.load()
    await registry.storages.set_enabled("nfs", enabled=False)
    opened = len(opener.calls)
    opener.refusal = theirs.refusal = StorageIOError("the mount is away")
    for update in (registry.storages.update, registry.storages.update_in_background):
        for capacity, ratio in ((100, 0.7), (100, 0.8), (0, 0.0)):
            await update(replace(NFS_CONFIG, capacity_bytes=capacity, used_percentage=ratio))
            await other.refresh()
            for each in (registry, other):
                (config,) = each.storages.all()
                assert (config.capacity_bytes, config.used_percentage, config.is_available) == (capacity, ratio, False)
    assert (len(opener.calls), theirs.calls) == (opened, [("open", "nfs"), ("disable", "nfs")])
    with pytest.raises(StorageIOError, match="away"):
        await registry.storages.update(replace(NFS_CONFIG, spec=NfsStorageSpec("/other"), capacity_bytes=5))


async def test_the_same_config_again_opens_the_medium_again() -> None:
    opener = Opener()
    registry = Registry(opener)
    await registry.storages.add(replace(NFS_CONFIG, capacity_bytes=5))
    await registry.storages.update(replace(NFS_CONFIG, capacity_bytes=5))
    assert opener.calls == [("open", "nfs")] * 2


def test_documents_say_everything() -> None:
    """With the names of the API."""
    sieved = {"name": "head", "min_depth": 1, "end_depth": 4, "min_reads": 2, "instance_ids": ["i"], "priority": -5}
    reclaim: dict[str, Any] = {
        "trigger_strategy": {"used_percentage": 0.8, "hysteresis": 0.1},
        "policy": {"name": "lru", "ttl_seconds": 60, "ttl_sliding": True},
        "share": "fixed",
        "prefix_classes": [{**sieved, "policy": {"name": "sieve"}, "budget": 0.25}, {"name": "rest"}],
        "instance_overrides": [{"instance_id": "i", "policy": {"name": "fifo"}, "weight": 2.5}],
    }
    limits = {"capacity_bytes": 1 << 50, "used_percentage": 0.75}
    document = {
        "storage_config": {"type": "file", "global_unique_name": "s", "storage_spec": {"root_path": "/r"}, **limits},
        "instance_group": {
            "name": "g",
            "storage_candidates": ["s"],
            "cache_config": {"reclaim_strategy": reclaim},
            "storage_guarantees": [{"storage_unique_name": "s", "guaranteed_bytes": 1 << 40}],
            "pin_budget_bytes": 1 << 41,
        },
    }
    storage, group = parse_startup_document(json.dumps(document))
    assert (storage.capacity_bytes, storage.used_percentage) == (1 << 50, 0.75)
    assert group.storage_guarantees == (StorageGuarantee("s", 1 << 40),)
    assert group.pin_budget_bytes == 1 << 41
    head = PrefixClass("head", 1, 4, 2, ("i",), -5, EvictionPolicy("sieve"), 0.25)
    assert group.cache_config.reclaim_strategy == CacheReclaimStrategy(
        storage_unique_name="s",
        trigger_strategy=TriggerStrategy(0, 0.8, 0.1),
        policy=EvictionPolicy("lru", 60, ttl_sliding=True),
        share="fixed",
        prefix_classes=(head, PrefixClass("rest")),
        instance_overrides=(InstanceOverride("i", EvictionPolicy("fifo"), 2.5),),
    )
    check_group(group)
    del reclaim["trigger_strategy"]["hysteresis"]
    _, group = parse_startup_document(json.dumps(document))
    assert group.cache_config.reclaim_strategy.trigger_strategy.hysteresis is None
    reclaim["prefix_classes"][0]["instance_ids"] = [5]
    with pytest.raises(
        InvalidArgumentError, match=r"prefix_classes\[0\].instance_ids is \[5\], allowed are lists of texts"
    ):
        parse_startup_document(json.dumps(document))


# ── JSON documents (wire.md 4): the built-in one, round trips, defaults, wrong types ──


# As wire.md 4.1 lists it, with this deployment's root.
BUILTIN: dict[str, Any] = {
    "storage_config": {
        "type": "file",
        "is_available": True,
        "global_unique_name": "nfs_01",
        "storage_spec": {"root_path": "/data/nfs/", "key_count_per_file": 8},
    },
    "instance_group": {
        "name": "default",
        "storage_candidates": ["nfs_01"],
        "global_quota_group_name": "default_quota_group",
        "max_instance_count": 100,
        "quota": {
            "capacity": 30000000000,
            "quota_config": [
                {"storage_type": "file", "capacity": 10000000000},
                {"storage_type": "hf3fs", "capacity": 10000000000},
                {"storage_type": "pace", "capacity": 10000000000},
            ],
        },
        "cache_config": {
            "reclaim_strategy": {
                "reclaim_policy": 1,
                "trigger_strategy": {"used_percentage": 0.8},
                "delay_before_delete_ms": 1000,
            },
            "cache_prefer_strategy": 2,
            "meta_indexer_config": {
                "max_key_count": 1000000,
                "mutex_shard_num": 16,
                "batch_key_size": 16,
                "meta_storage_backend_config": {"storage_type": "local", "storage_uri": ""},
                "meta_cache_policy_config": {
                    "capacity": 10000,
                    "type": "LRU",
                    "cache_shard_bits": 0,
                    "high_pri_pool_ratio": 0.0,
                },
            },
        },
        "user_data": '{"description":"built-in group"}',
        "version": 1,
    },
}


def parse(document: Any) -> tuple[StorageConfig, InstanceGroup]:
    parsed = parse_startup_document(json.dumps(document))
    return parsed.storage, parsed.group


def test_the_builtin_document_is_that_of_wire_md() -> None:
    builtin = builtin_document(Path("/data/nfs"))
    assert parse(BUILTIN) == (builtin.storage, builtin.group)
    check_storage(builtin.storage)
    check_group(builtin.group)


def test_missing_keys_keep_their_defaults() -> None:
    storage, group = parse({"storage_config": {"type": "file"}, "instance_group": {}})
    assert storage == StorageConfig("", NfsStorageSpec("", 1), is_available=True)
    assert group.cache_config.meta_indexer_config == MetaIndexerConfig(
        max_key_count=0,
        mutex_shard_num=16,
        batch_key_size=16,
        meta_storage_backend_config=MetaStorageBackendConfig("local", ""),
        meta_cache_policy_config=MetaCachePolicyConfig(1024, "lru", 6, 0.0),
    )
    assert (group.name, group.storage_candidates, group.version) == ("", (), 0)
    assert group.cache_config.data_storage_strategy is CachePreferStrategy.CPS_UNSPECIFIED
    assert group.cache_config.reclaim_strategy.reclaim_policy is ReclaimPolicy.POLICY_UNSPECIFIED


def test_unknown_keys_are_ignored() -> None:
    document = deepcopy(BUILTIN)
    for part in (
        document,
        document["storage_config"],
        document["instance_group"],
        document["instance_group"]["cache_config"]["meta_indexer_config"],
    ):
        part["persist_metadata_interval_time_us"] = 1000
        part["something"] = [{"new": None}]
    assert parse(document) == parse(BUILTIN)


def paths(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document that holds a value."""
    if isinstance(document, dict):
        return [path for key, value in document.items() for path in [(*prefix, key), *paths(value, (*prefix, key))]]
    if isinstance(document, list):
        return [path for i, value in enumerate(document) for path in [(*prefix, i), *paths(value, (*prefix, i))]]
    return []


@pytest.mark.parametrize("path", sorted(set(map(str, paths(BUILTIN)))))
def test_a_wrong_type_anywhere_refuses_the_document(path: str) -> None:
    """Numbers, texts, flags, lists and objects each take nothing else; the message names the place."""
    place = next(each for each in paths(BUILTIN) if str(each) == path)
    for wrong in (None, True, 7, 7.5, "text", [], [7], {}, {"a": 1}):
        document = deepcopy(BUILTIN)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        right = holder[place[-1]]
        same_kind = type(wrong) is type(right) or (type(right) is float and type(wrong) is int)
        if same_kind:
            continue
        holder[place[-1]] = wrong
        with pytest.raises(InvalidArgumentError) as refusal:
            parse(document)
        named = next(key for key in reversed(place) if isinstance(key, str))
        assert named in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"text"', "null", "nul", '{"storage_config": {}}', "{}"])
def test_texts_that_are_no_documents_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_startup_document(text)


@pytest.mark.parametrize(
    ("key", "number", "allowed"),
    [("reclaim_policy", 4, "3"), ("reclaim_policy", -1, "0"), ("cache_prefer_strategy", 9, "8")],
)
def test_unknown_numbers_of_enums_are_refused_with_the_known_ones(key: str, number: int, allowed: str) -> None:
    document = deepcopy(BUILTIN)
    config = document["instance_group"]["cache_config"]
    (config["reclaim_strategy"] if key == "reclaim_policy" else config)[key] = number
    with pytest.raises(InvalidArgumentError, match=rf"{key} is {number}, allowed are \[.*{allowed}"):
        parse(document)


@pytest.mark.parametrize("kind", ["", "nfs", "local", "unspecified", "FILE"])
def test_unknown_kinds_are_refused_with_the_known_ones(kind: str) -> None:
    for path in (("storage_config", "type"), ("instance_group", "quota")):
        document = deepcopy(BUILTIN)
        if path[1] == "type":
            document["storage_config"]["type"] = kind
        else:
            document["instance_group"]["quota"]["quota_config"][0]["storage_type"] = kind
        with pytest.raises(InvalidArgumentError, match=rf"{kind!r}, allowed are .*'file'.*'mooncake'.*'pace'"):
            parse(document)


# Storage configs for the transfer layer.


def test_storage_configs_are_printed_in_a_fixed_order_without_spaces() -> None:
    configs = [
        StorageConfig("a", NfsStorageSpec("/r é", 8), is_available=False),
        StorageConfig("b", MooncakeStorageSpec("h", "c", "tcp", "", "m")),
        StorageConfig("c", ThreeFSStorageSpec("c", "/m", "r", 2, touch_file_when_create=True)),
        StorageConfig("d", TairMemPoolStorageSpec("dom", 3, enable_vipserver=True)),
    ]
    assert storage_configs_json(configs) == (
        '[{"type":"file","is_available":false,"global_unique_name":"a",'
        '"storage_spec":{"root_path":"/r é","key_count_per_file":8}},'
        '{"type":"mooncake","is_available":true,"global_unique_name":"b",'
        '"storage_spec":{"local_hostname":"h","metadata_connstring":"c","protocol":"tcp","rdma_device":"",'
        '"master_server_entry":"m"}},'
        '{"type":"hf3fs","is_available":true,"global_unique_name":"c",'
        '"storage_spec":{"cluster_name":"c","mountpoint":"/m","root_dir":"r","key_count_per_file":2}},'
        '{"type":"pace","is_available":true,"global_unique_name":"d",'
        '"storage_spec":{"enable_vipserver":true,"domain":"dom","timeout":3}}]'
    )
    assert storage_configs_json([]) == "[]"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**31), 2**31 - 1)
SPECS: st.SearchStrategy[StorageSpec] = st.one_of(
    st.builds(NfsStorageSpec, TEXTS, NUMBERS),
    st.builds(DummyStorageSpec, TEXTS, NUMBERS),
    st.builds(ThreeFSStorageSpec, TEXTS, TEXTS, TEXTS, NUMBERS),
    st.builds(VcnsThreeFSStorageSpec, TEXTS, TEXTS, TEXTS, NUMBERS, st.just(value=False), TEXTS, NUMBERS, TEXTS),
    st.builds(MooncakeStorageSpec, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS),
    st.builds(TairMemPoolStorageSpec, TEXTS, NUMBERS, st.booleans(), TEXTS, st.integers(0, 1 << 60)),
)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(name=TEXTS, spec=SPECS, available=st.booleans())
def test_a_printed_storage_reads_back(name: str, spec: StorageSpec, available: bool) -> None:
    config = StorageConfig(name, spec, is_available=available)
    (printed,) = json.loads(storage_configs_json([config]))
    storage, _ = parse({"storage_config": printed, "instance_group": {}})
    assert storage == config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("instance_group", "version"), 1 << 63),
        (("instance_group", "quota", "capacity"), 10**23),
        (("instance_group", "cache_config", "reclaim_strategy", "delay_before_delete_ms"), 1 << 31),
        (("storage_config", "storage_spec", "key_count_per_file"), -(1 << 31) - 1),
    ],
)
def test_numbers_that_no_answer_could_carry_are_refused(path: tuple[str, ...], value: int) -> None:
    document = deepcopy(BUILTIN)
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(InvalidArgumentError, match=rf"{path[-1]} is {value}, allowed are numbers from"):
        parse(document)


def test_a_group_of_a_document_names_a_storage_to_reclaim_from_as_the_api_wants() -> None:
    _, group = parse(BUILTIN)
    assert group.cache_config.reclaim_strategy.storage_unique_name == "nfs_01"
