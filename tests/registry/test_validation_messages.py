"""Every refused value is named with its field and what is allowed, and nothing refused is stored."""

from dataclasses import replace
from typing import Any

import pytest
from registry_rig import GROUP, INSTANCE

from kvcm.model.errors import InvalidArgumentError, KvcmError, UnsupportedError
from kvcm.model.groups import (
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaCachePolicyConfig,
    MetaIndexerConfig,
    MetaStorageBackendConfig,
    QuotaConfig,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment
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
from kvcm.registry.validation import check_group, check_instance, check_storage, require

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
        (replace(GROUP, name="x" * 257), ["name", "257", "256"]),
        (replace(GROUP, name="a\x00"), ["name", "control"]),
        (replace(GROUP, storage_candidates=()), ["storage_candidates", "required"]),
        (replace(GROUP, max_instance_count=-1), ["max_instance_count", "-1", ">= 0"]),
        (quota(-5), ["quota", "capacity", "-5", ">= 0"]),
        (quota(1, (NFS, -7)), ["quota_config", "capacity", "-7", ">= 0"]),
        (quota(1, (StorageType.ST_UNSPECIFIED, 1)), ["quota_config", "storage_type", "required"]),
        (quota(1, (NFS, 1), (NFS, 2)), ["quota_config", "file", "more than once"]),
        (group_with(trigger_strategy=TriggerStrategy(-1)), ["used_size", "-1", ">= 0"]),
        (group_with(trigger_strategy=TriggerStrategy(0, -0.1)), ["used_percentage", "-0.1", ">= 0"]),
        (group_with(trigger_strategy=TriggerStrategy(0, float("nan"))), ["used_percentage", "nan"]),
        (group_with(trigger_strategy=TriggerStrategy(0, float("inf"))), ["used_percentage", "inf"]),
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


def test_every_number_of_the_reclaim_strategy_and_the_indexer_is_tested_above() -> None:
    numbers = {
        name
        for config in (CacheReclaimStrategy(), MetaIndexerConfig())
        for name in config.__dataclass_fields__
        if type(getattr(config, name)) is int
    }
    assert numbers == {
        "trigger_period_seconds",
        "reclaim_step_size",
        "reclaim_step_percentage",
        "delay_before_delete_ms",
        "max_key_count",
        "mutex_shard_num",
        "batch_key_size",
    }


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
        (replace(INSTANCE, instance_id="x" * 300), ["instance_id", "300", "256"]),
        (replace(INSTANCE, instance_id="a\tb"), ["instance_id", "a\\tb", "control"]),
        (replace(INSTANCE, model_deployment=ModelDeployment("", "bf16")), ["model_name", "required"]),
        (replace(INSTANCE, model_deployment=ModelDeployment("m", "")), ["dtype", "required"]),
        (replace(INSTANCE, block_size=-1), ["block_size", "-1", ">= 0"]),
        (specs(), ["location_spec_infos", "required"]),
        (specs(("a", 1), ("", 1)), ["location_spec_infos", "name", "required", "1"]),
        (specs(("a\n", 1)), ["location_spec_infos[0].name", "control"]),
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
