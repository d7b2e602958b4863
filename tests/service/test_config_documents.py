"""The startup document (wire.md 4): what is read, which defaults hold, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import CachePreferStrategy
from kvcm.model.storages import StorageType
from kvcm.registry.documents import StartupDocument, builtin_document, parse_startup_document

STORAGE = {"type": "file", "global_unique_name": "s", "storage_spec": {"root_path": "/r"}}


def _parse(storage: Any = STORAGE, **group: Any) -> StartupDocument:
    return parse_startup_document(json.dumps({"storage_config": storage, "instance_group": {"name": "g", **group}}))


def test_missing_keys_have_the_defaults_of_documents() -> None:
    storage, group = _parse()
    assert (storage.is_available, storage.spec.key_count_per_file) == (True, 1)  # type: ignore[union-attr]
    indexer = group.cache_config.meta_indexer_config
    assert (indexer.max_key_count, indexer.mutex_shard_num, indexer.batch_key_size) == (0, 16, 16)
    policy = indexer.meta_cache_policy_config
    assert (policy.capacity, policy.type, policy.cache_shard_bits, policy.high_pri_pool_ratio) == (1024, "lru", 6, 0.0)
    assert indexer.meta_storage_backend_config.storage_type == "local"


def test_unknown_keys_are_ignored_and_ratios_may_be_whole_numbers() -> None:
    trigger = {"trigger_strategy": {"used_percentage": 1}}
    group = _parse(new=[1], cache_config={"reclaim_strategy": trigger, "persist": 1}).group
    assert group.cache_config.reclaim_strategy.trigger_strategy.used_percentage == 1.0


@pytest.mark.parametrize(
    ("kind", "storage_type"),
    [
        ("file", StorageType.ST_NFS),
        ("hf3fs", StorageType.ST_3FS),
        ("vcns_hf3fs", StorageType.ST_VCNS_3FS),
        ("mooncake", StorageType.ST_MOONCAKE),
        ("pace", StorageType.ST_TAIRMEMPOOL),
        ("dummy", StorageType.ST_DUMMY),
    ],
)
def test_storage_kinds_are_texts_and_enums_are_numbers(kind: str, storage_type: StorageType) -> None:
    quota = {"capacity": 9, "quota_config": [{"storage_type": kind, "capacity": 7}]}
    document = _parse({"type": kind, "global_unique_name": "s"}, quota=quota, cache_config={"cache_prefer_strategy": 4})
    assert document.storage.storage_type is storage_type
    assert document.group.quota.capacity_of(storage_type) == 7
    assert document.group.cache_config.data_storage_strategy is CachePreferStrategy.CPS_PREFER_MOONCAKE


REFUSED: dict[str, tuple[object, str]] = {
    "no object": ([], "must be an object"),
    "storage is no object": ({"storage_config": 1}, "storage_config is int, must be an object"),
    "unknown kind": ({"storage_config": {"type": "tape"}}, "storage_config.type"),
    "number for a text": ({"storage_config": STORAGE, "instance_group": {"name": 7}}, "instance_group.name"),
    "flag for a number": ({"storage_config": STORAGE, "instance_group": {"version": True}}, "instance_group.version"),
    "text for a number": (
        {"storage_config": STORAGE, "instance_group": {"quota": {"capacity": "1"}}},
        "quota.capacity is str",
    ),
    "number in a list of names": (
        {"storage_config": STORAGE, "instance_group": {"storage_candidates": [1]}},
        "storage_candidates",
    ),
    "unknown kind in a quota": (
        {"storage_config": STORAGE, "instance_group": {"quota": {"quota_config": [{"storage_type": "x"}]}}},
        "quota_config[0].storage_type",
    ),
    "unknown strategy": (
        {"storage_config": STORAGE, "instance_group": {"cache_config": {"cache_prefer_strategy": 99}}},
        "cache_prefer_strategy is 99",
    ),
    "null": ({"storage_config": STORAGE, "instance_group": {"name": None}}, "instance_group.name"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_wrong_type_refuses_the_whole_document_and_names_the_key(rule: str) -> None:
    document, text = REFUSED[rule]
    with pytest.raises(InvalidArgumentError) as refused:
        parse_startup_document(json.dumps(document))
    assert text in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "\ufeff{}", "{} x"])
def test_what_is_no_json_is_said_to_be_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not JSON"):
        parse_startup_document(text)


def test_the_built_in_document_is_that_of_the_original() -> None:
    storage, group = builtin_document(Path("/data/nfs"))
    assert (storage.global_unique_name, storage.storage_type) == ("nfs_01", StorageType.ST_NFS)
    assert (group.name, group.storage_candidates, group.version) == ("default", ("nfs_01",), 1)
    assert (group.global_quota_group_name, group.max_instance_count) == ("default_quota_group", 100)
    assert group.quota.capacity == 30_000_000_000
    for storage_type in (StorageType.ST_NFS, StorageType.ST_3FS, StorageType.ST_TAIRMEMPOOL):
        assert group.quota.capacity_of(storage_type) == 10_000_000_000
    reclaim = group.cache_config.reclaim_strategy
    assert (reclaim.trigger_strategy.used_percentage, reclaim.delay_before_delete_ms) == (0.8, 1000)
    assert group.cache_config.meta_indexer_config.max_key_count == 1_000_000
    json.loads(group.user_data)
