"""JSON documents (wire.md 4): the built-in one, round trips, defaults, wrong types."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import (
    CachePreferStrategy,
    InstanceGroup,
    MetaCachePolicyConfig,
    MetaIndexerConfig,
    MetaStorageBackendConfig,
    QuotaConfig,
    ReclaimPolicy,
)
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.registry.documents import builtin_document, parse_startup_document, storage_configs_json
from kvcm.registry.validation import check_group, check_storage

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
        part["persist_metadata_interval_time_ms"] = 1000
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
def test_what_is_no_document_is_refused(text: str) -> None:
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


@pytest.mark.parametrize("policy", ReclaimPolicy)
@pytest.mark.parametrize("prefer", CachePreferStrategy)
def test_enums_are_numbers(policy: ReclaimPolicy, prefer: CachePreferStrategy) -> None:
    document = deepcopy(BUILTIN)
    config = document["instance_group"]["cache_config"]
    config["cache_prefer_strategy"], config["reclaim_strategy"]["reclaim_policy"] = int(prefer), int(policy)
    _, group = parse(document)
    assert group.cache_config.data_storage_strategy is prefer
    assert group.cache_config.reclaim_strategy.reclaim_policy is policy


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


def test_kinds_are_strings_everywhere() -> None:
    document = deepcopy(BUILTIN)
    kinds = ["file", "hf3fs", "vcns_hf3fs", "mooncake", "pace", "dummy"]
    document["instance_group"]["quota"]["quota_config"] = [{"storage_type": kind, "capacity": 1} for kind in kinds]
    _, group = parse(document)
    assert group.quota.quota_config == tuple(QuotaConfig(StorageType.of_kind(kind), 1) for kind in kinds)


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


@settings(max_examples=200, deadline=None, derandomize=True)
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
