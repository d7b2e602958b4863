"""Every stored field of the configuration has an effect that some test shows, or is reported as without one."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Field

from kvcm import config
from kvcm.connectors.sglang.options import SglangOptions
from kvcm.connectors.transformers.settings import ReuseSettings
from kvcm.connectors.vllm.options import VllmOptions
from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceOverride,
    MetaCachePolicyConfig,
    MetaIndexerConfig,
    MetaStorageBackendConfig,
    PrefixClass,
)
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.registry.startup_document import builtin_document, parse_startup_document
from kvcm.registry.without_effect import group_values_without_effect, storage_values_without_effect, warning_of

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

# The test that shows the effect of fields, by file and name.
_SHOWN = (
    (
        "registry/test_registries.py",
        "test_an_update_must_fit_the_stored_version",
        ("InstanceGroup.name", "InstanceGroup.version"),
    ),
    (
        "cache/test_write_planning.py",
        "test_disabled_and_unregistered_storages_count_as_absent",
        ("InstanceGroup.storage_candidates", "CacheConfig.data_storage_strategy"),
    ),
    (
        "cache/test_shared_quotas.py",
        "test_a_group_that_changes_its_global_quota_takes_its_usage_along",
        ("InstanceGroup.global_quota_group_name",),
    ),
    (
        "registry/test_instance_limit.py",
        "test_the_limit_is_never_exceeded_and_no_slot_is_lost",
        ("InstanceGroup.max_instance_count",),
    ),
    ("cache/test_pins.py", "test_the_error_names_the_budget_and_the_pinned_bytes", ("InstanceGroup.pin_budget_bytes",)),
    (
        "cache/test_quotas.py",
        "test_no_limit_is_ever_exceeded",
        (
            "InstanceGroupQuota.capacity",
            "QuotaConfig.storage_type",
            "QuotaConfig.capacity",
            "GlobalQuota.capacity_bytes",
        ),
    ),
    (
        "cache/test_quotas.py",
        "test_guaranteed_bytes_are_there_for_their_group_alone",
        ("StorageGuarantee.storage_unique_name", "StorageGuarantee.guaranteed_bytes"),
    ),
    (
        "service/test_capacity_and_drains.py",
        "test_usage_is_reported_by_group_type_storage_and_instance_invariant_4",
        ("CacheReclaimStrategy.reclaim_policy",),
    ),
    (
        "service/test_managers_together.py",
        "test_a_setting_changed_at_any_manager_does_not_wait_for_the_period",
        ("CacheReclaimStrategy.trigger_period_seconds",),
    ),
    (
        "reclaim/test_needs.py",
        "test_a_round_marks_no_more_than_a_step",
        ("CacheReclaimStrategy.reclaim_step_size", "CacheReclaimStrategy.reclaim_step_percentage"),
    ),
    (
        "cache/test_removal.py",
        "test_a_removed_key_vanishes_at_once_and_is_freed_after_the_delay",
        ("CacheReclaimStrategy.delay_before_delete_ms",),
    ),
    ("reclaim/test_needs.py", "test_proportional_takes_the_same_part_of_each", ("CacheReclaimStrategy.share",)),
    (
        "service/test_capacity_and_drains.py",
        "test_of_two_marks_of_a_group_the_lower_one_is_reported",
        ("TriggerStrategy.used_size", "TriggerStrategy.used_percentage"),
    ),
    ("reclaim/test_needs.py", "test_the_hysteresis_is_how_far_eviction_goes", ("TriggerStrategy.hysteresis",)),
    (
        "optimizer/test_live_manager.py",
        "test_a_live_manager_finds_what_the_row_of_its_policy_says",
        ("EvictionPolicy.name", "EvictionPolicy.ttl_seconds"),
    ),
    (
        "reclaim/test_eviction_rules.py",
        "test_a_class_by_depth_goes_by_its_priority",
        ("PrefixClass.name", "PrefixClass.end_depth", "PrefixClass.priority"),
    ),
    (
        "reclaim/test_levels_over_redis.py",
        "test_a_class_over_its_budget_goes_first_and_no_further",
        ("PrefixClass.min_depth", "PrefixClass.budget"),
    ),
    (
        "reclaim/test_eviction_rules.py",
        "test_a_class_by_reads_takes_a_block_when_it_was_read_often_enough",
        ("PrefixClass.min_reads",),
    ),
    (
        "reclaim/test_eviction_rules.py",
        "test_a_class_of_one_instance_leaves_the_others_alone",
        ("PrefixClass.instance_ids",),
    ),
    (
        "reclaim/test_needs.py",
        "test_fixed_takes_from_the_instance_furthest_above_its_share",
        ("InstanceOverride.instance_id", "InstanceOverride.weight"),
    ),
    ("cache/test_shared_quotas.py", "test_the_key_limit_is_one_of_all_managers", ("MetaIndexerConfig.max_key_count",)),
    ("registry/test_registries.py", "test_a_placement_never_changes", ("MetaIndexerConfig.mutex_shard_num",)),
    ("index/test_meta_index.py", "test_a_batch_is_no_larger_than_it_must_be", ("MetaIndexerConfig.batch_key_size",)),
    (
        "registry/test_configuration.py",
        "test_a_group_may_name_the_store_of_the_deployment_and_no_other",
        ("MetaStorageBackendConfig.storage_type",),
    ),
    (
        "registry/test_config_snapshots.py",
        "test_storages_are_opened_switched_and_limited",
        ("StorageConfig.global_unique_name",),
    ),
    (
        "cache/test_quotas.py",
        "test_limits_are_those_that_are_configured_right_now",
        ("StorageConfig.capacity_bytes", "GlobalQuota.name"),
    ),
    (
        "storage/test_storage_directory.py",
        "test_a_mountpoint_is_a_directory_and_never_made",
        ("ThreeFSStorageSpec.mountpoint", "VcnsThreeFSStorageSpec.mountpoint"),
    ),
    (
        "storage/test_storage_directory.py",
        "test_slashes_become_one_where_mountpoint_and_root_dir_meet",
        ("ThreeFSStorageSpec.root_dir", "VcnsThreeFSStorageSpec.root_dir"),
    ),
    (
        "contract/test_storage_contract.py",
        "test_any_allocation_is_packed_as_wire_md_8_says",
        (
            "ThreeFSStorageSpec.key_count_per_file",
            "VcnsThreeFSStorageSpec.key_count_per_file",
            "NfsStorageSpec.root_path",
            "NfsStorageSpec.key_count_per_file",
            "DummyStorageSpec.root_path",
            "DummyStorageSpec.key_count_per_file",
        ),
    ),
    (
        "cache/test_write_planning.py",
        "test_the_next_candidate_takes_the_blocks_in_the_same_call",
        ("ThreeFSStorageSpec.touch_file_when_create", "VcnsThreeFSStorageSpec.touch_file_when_create"),
    ),
    (
        "mooncake/test_mooncake_storage.py",
        "test_a_malformed_field_is_named_when_the_storage_is_opened",
        (
            "MooncakeStorageSpec.local_hostname",
            "MooncakeStorageSpec.protocol",
            "MooncakeStorageSpec.master_service_entry",
        ),
    ),
    (
        "model/test_hosts.py",
        "test_all_hosts_of_a_mooncake_storage_are_found",
        ("MooncakeStorageSpec.metadata_connstring",),
    ),
    (
        "storage/test_mempool.py",
        "test_a_pool_without_a_node_cannot_be_opened",
        ("TairMemPoolStorageSpec.domain", "TairMemPoolStorageSpec.node_id"),
    ),
    (
        "storage/test_mempool.py",
        "test_a_pool_of_no_whole_pages_is_as_large_as_its_pages",
        ("TairMemPoolStorageSpec.capacity_bytes",),
    ),
    ("reclaim/test_needs.py", "test_a_global_quota_above_one_never_evicts", ("GlobalQuota.used_percentage",)),
    (
        "registry/test_event_report_storages.py",
        "test_a_group_finds_its_storage_of_each_type",
        (
            "InstanceGroup.event_report_storage_candidates",
            "StorageConfig.storage_type",
            "EventReportStorageSpec.heartbeat_timeout_ms",
            "EventReportStorageSpec.cleanup_grace_ms",
            "EventReportStorageSpec.liveness_check_interval_ms",
            "EventReportStorageSpec.snapshot_min_interval_ms",
            "EventReportStorageSpec.snapshot_delta_drain_timeout_ms",
        ),
    ),
)
_RETURNED = (
    "InstanceGroup.user_data",
    "InstanceGroup.extra_info",
    "ThreeFSStorageSpec.cluster_name",
    "VcnsThreeFSStorageSpec.cluster_name",
)
"""Texts for people and programs."""
# Without an age ttl_sliding has no effect, on other types than 3FS the check has none, without a capacity the watermark
# has none, with tcp the device has none.
_REPORTED = (
    "CacheReclaimStrategy.storage_unique_name",
    "EvictionPolicy.ttl_sliding",
    "MetaStorageBackendConfig.storage_uri",
    "MetaCachePolicyConfig.capacity",
    "MetaCachePolicyConfig.type",
    "MetaCachePolicyConfig.cache_shard_bits",
    "MetaCachePolicyConfig.high_pri_pool_ratio",
    "StorageConfig.check_storage_available_when_open",
    "StorageConfig.used_percentage",
    "VcnsThreeFSStorageSpec.remote_host",
    "VcnsThreeFSStorageSpec.remote_port",
    "VcnsThreeFSStorageSpec.meta_storage_uri",
    "MooncakeStorageSpec.rdma_device",
    "TairMemPoolStorageSpec.timeout",
    "TairMemPoolStorageSpec.enable_vipserver",
    "TairMemPoolStorageSpec.service_discovery_url",
    "TairMemPoolStorageSpec.media_type",
    "MetaIndexerConfig.persist_metadata_interval_time_ms",
    "InstanceGroup.revisit_interval_buckets",
)


def fields(message: Descriptor) -> Iterator[str]:
    """Yield the fields of a message and of those in it that are no messages."""
    for field in message.fields:
        if field.type == Field.TYPE_MESSAGE and field.message_type.full_name != "google.protobuf.Int64Value":
            yield from fields(field.message_type)
        else:
            yield f"{message.name}.{field.name}"


@cache
def names_of_tests(file: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_every_stored_field_has_an_effect_or_is_reported() -> None:
    stored = [pb.InstanceGroup.DESCRIPTOR, pb.StorageConfig.DESCRIPTOR, capacity_pb.GlobalQuota.DESCRIPTOR]
    shown = [field for _, _, fields_shown in _SHOWN for field in fields_shown]
    known = [*shown, *_RETURNED, *_REPORTED]
    assert len(set(known)) == len(known)
    assert set(known) == {field for message in stored for field in fields(message)}
    for file, test, _ in _SHOWN:
        assert test in names_of_tests(file), (file, test)


def strategy_of(**changes: Any) -> InstanceGroup:
    return InstanceGroup("g", ("a", "b"), cache_config=CacheConfig(CacheReclaimStrategy(**changes)))


def indexer_of(**changes: Any) -> InstanceGroup:
    return InstanceGroup("g", ("a", "b"), cache_config=CacheConfig(meta_indexer_config=MetaIndexerConfig(**changes)))


def read_cache(**changes: Any) -> InstanceGroup:
    return indexer_of(meta_cache_policy_config=MetaCachePolicyConfig(**changes))


NFS = NfsStorageSpec("/r")
VCNS = VcnsThreeFSStorageSpec("c", "/m", "d", remote_host="h", remote_port=1, meta_storage_uri="u")
TCP = MooncakeStorageSpec("h", "m", "tcp", "mlx5_0", "s:1")


@pytest.mark.parametrize(
    ("field", "group"),
    [
        ("CacheReclaimStrategy.storage_unique_name", strategy_of(storage_unique_name="a")),
        ("MetaCachePolicyConfig.capacity", read_cache(capacity=512)),
        ("MetaCachePolicyConfig.type", read_cache(type="lfu")),
        ("MetaCachePolicyConfig.cache_shard_bits", read_cache(cache_shard_bits=3)),
        ("MetaCachePolicyConfig.high_pri_pool_ratio", read_cache(high_pri_pool_ratio=0.5)),
        ("MetaStorageBackendConfig.storage_uri", indexer_of(
            meta_storage_backend_config=MetaStorageBackendConfig("redis", "redis://h"))),
        ("MetaIndexerConfig.persist_metadata_interval_time_ms", indexer_of(persist_metadata_interval_time_ms=0)),
        ("InstanceGroup.revisit_interval_buckets", InstanceGroup("g", ("a",), revisit_interval_buckets="1,5,30")),
        ("EvictionPolicy.ttl_sliding", strategy_of(policy=EvictionPolicy("lru", 0, ttl_sliding=True))),
        ("EvictionPolicy.ttl_sliding", strategy_of(policy=EvictionPolicy("fifo", 5, ttl_sliding=True))),
        ("EvictionPolicy.ttl_sliding", strategy_of(
            instance_overrides=(InstanceOverride("i", EvictionPolicy("", 0, ttl_sliding=True)),))),
        ("EvictionPolicy.ttl_sliding", strategy_of(
            prefix_classes=(PrefixClass("c", policy=EvictionPolicy("fifo", 5, ttl_sliding=True)),))),
    ],
)  # fmt: skip
def test_values_of_groups_without_effect_are_named(field: str, group: InstanceGroup) -> None:
    (sentence,) = group_values_without_effect(group)
    assert field in _REPORTED
    assert field.partition(".")[2] in sentence
    assert "no effect" in sentence


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("VcnsThreeFSStorageSpec.remote_host", StorageConfig("s", VCNS)),
        ("VcnsThreeFSStorageSpec.remote_port", StorageConfig("s", VCNS)),
        ("VcnsThreeFSStorageSpec.meta_storage_uri", StorageConfig("s", VCNS)),
        ("TairMemPoolStorageSpec.timeout", StorageConfig("s", TairMemPoolStorageSpec(timeout=5, node_id="n"))),
        ("TairMemPoolStorageSpec.enable_vipserver", StorageConfig("s", TairMemPoolStorageSpec(enable_vipserver=True))),
        ("TairMemPoolStorageSpec.service_discovery_url", StorageConfig(
            "s", TairMemPoolStorageSpec(service_discovery_url="u"))),
        ("TairMemPoolStorageSpec.media_type", StorageConfig("s", TairMemPoolStorageSpec(media_type=5))),
        ("MooncakeStorageSpec.rdma_device", StorageConfig("s", TCP)),
        ("StorageConfig.check_storage_available_when_open", StorageConfig(
            "s", NFS, check_storage_available_when_open=True)),
        ("StorageConfig.used_percentage", StorageConfig("s", NFS, used_percentage=0.5)),
    ],
)  # fmt: skip
def test_values_of_storages_without_effect_are_named(field: str, config: StorageConfig) -> None:
    (sentence,) = storage_values_without_effect(config)
    assert field in _REPORTED
    assert field.partition(".")[2] in sentence
    assert "no effect" in sentence


@pytest.mark.parametrize(
    "spec",
    [
        NFS, DummyStorageSpec("d"), ThreeFSStorageSpec("c", "/m", "d"), replace(TCP, protocol="rdma"),
        TairMemPoolStorageSpec(node_id="n", capacity_bytes=5),
    ],
)  # fmt: skip
def test_storages_whose_values_all_count_are_not_reported(spec: StorageSpec) -> None:
    config = StorageConfig("s", spec, capacity_bytes=5, used_percentage=0.5)
    assert warning_of(storage_values_without_effect(config)) == ""


def test_what_our_own_tools_and_documents_say_is_not_reported() -> None:
    for name in ("any", "unused", ""):
        assert not list(group_values_without_effect(strategy_of(storage_unique_name=name)))
    assert not list(group_values_without_effect(strategy_of(policy=EvictionPolicy("ttl", 5, ttl_sliding=True))))
    builtin = builtin_document(Path("/r"))
    assert not list(group_values_without_effect(builtin.group))
    assert not list(storage_values_without_effect(builtin.storage))


def test_a_long_value_is_not_returned_whole() -> None:
    (sentence,) = group_values_without_effect(strategy_of(storage_unique_name="x" * 100_000))
    assert len(sentence) < 400


def test_keys_of_a_startup_document_that_nothing_reads_are_named() -> None:
    spec = {"root_path": "/r/", "root_pth": "/x"}
    reclaim = {"trigger_strategy": {"used_percent": 0.5}}
    document = {
        "storage_config": {"type": "file", "global_unique_name": "s", "storage_spec": spec},
        "instance_group": {"name": "g", "storage_candidates": ["s"], "cache_config": {"reclaim_strategy": reclaim}},
        "extra": 1,
    }
    unknown: list[str] = []
    parse_startup_document(json.dumps(document), unknown.append)
    assert [text.partition(" is unknown")[0] for text in unknown] == [
        "startup document.extra",
        "startup document.storage_config.storage_spec.root_pth",
        "startup document.instance_group.cache_config.reclaim_strategy.trigger_strategy.used_percent",
    ]


# Settings of managers and options of connectors: each is read by some code.


def attributes_in(*folders: str) -> Counter[str]:
    """Return how often attributes of each name are read in the modules of folders."""
    modules = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    trees = (ast.parse(path.read_text()) for path in modules if "protocol" not in path.parts)
    nodes = (node for tree in trees for node in ast.walk(tree))
    return Counter(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))


def test_every_setting_is_read_or_reported() -> None:
    read = attributes_in("kvcm")
    reported = config._WITHOUT_EFFECT
    assert {field.name for field in dataclasses.fields(config.Settings)} - set(read) == reported


@pytest.mark.parametrize("options", [VllmOptions, SglangOptions, ReuseSettings])
def test_every_option_of_a_connector_is_read(options: type[Any]) -> None:
    names = {field.name for field in dataclasses.fields(options)}
    assert len(names) > 3
    assert names - set(attributes_in("connectors")) == set()
