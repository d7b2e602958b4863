"""Snapshots of the configuration: as text, and between deployments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from model_values import model_values
from redis_servers import Standalone
from test_transport_drivers import Api
from test_transport_process import manager
from test_transport_sites import group_spec, instance_fields, unique

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.principals import AccountRole
from kvcm.model.storages import MooncakeStorageSpec, NfsStorageSpec, StorageConfig, StorageSpec
from kvcm.registry.config_snapshots import AccountEntry, Configuration
from kvcm.service.config_snapshot import print_snapshot, print_value, read_snapshot
from kvcm.service.request_limits import MAX_SNAPSHOT_BYTES

PLAIN: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@=:"), max_size=6),
    int: st.integers(-(1 << 31), (1 << 31) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}


values = partial(model_values, plain=PLAIN)
STORAGES = st.builds(
    StorageConfig, *map(values, (str, StorageSpec, bool, bool)), st.integers(-(1 << 63), (1 << 63) - 1), values(float)
)
CONFIGS = st.builds(
    Configuration,
    st.lists(STORAGES, max_size=3).map(tuple),
    *(st.lists(values(kind), max_size=2).map(tuple) for kind in (InstanceGroup, GlobalQuota, Instance)),
    st.lists(st.builds(AccountEntry, values(str), st.sampled_from(AccountRole)), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(config=CONFIGS)
def test_a_snapshot_reads_back_as_it_was_printed(config: Configuration) -> None:
    text = print_snapshot(config, "cluster", 5)
    again = read_snapshot(text)
    assert again == config
    assert print_snapshot(again, "cluster", 5) == text


GROUP = InstanceGroup("g", ("nfs",), "q")
CONFIG = Configuration(
    storages=(StorageConfig("nfs", NfsStorageSpec("/x", 8), is_available=False),),
    groups=(GROUP, replace(GROUP, name="h")),
    quotas=(GlobalQuota("q", 1 << 60, 0.5),),
    accounts=(AccountEntry("ann", AccountRole.ROLE_ADMIN),),
)
TEXT = print_snapshot(CONFIG, "c", 7)


def test_snapshots_of_one_configuration_differ_in_their_time_alone() -> None:
    other = print_snapshot(CONFIG, "c", 8)
    differing = [(a, b) for a, b in zip(TEXT.splitlines(), other.splitlines(), strict=True) if a != b]
    assert differing == [('  "created_at_ms": "7",', '  "created_at_ms": "8",')]
    assert TEXT.endswith("}\n")


def test_fields_may_be_left_out_and_cluster_and_time_as_well() -> None:
    document = {"format": "kvcm-config", "version": 1, **{name: [] for name in _LISTS}}
    document["storages"] = [{"global_unique_name": "nfs", "nfs": {"root_path": "/x"}}]
    expected = Configuration(storages=(StorageConfig("nfs", NfsStorageSpec("/x", 0)),))
    assert read_snapshot(json.dumps(document)) == expected


_LISTS = ("storages", "groups", "quotas", "instances", "accounts")


def _set(path: str, value: object) -> Callable[[Any], None]:
    *above, last = path.split(".")

    def spoil(document: Any) -> None:
        for name in above:
            document = document[int(name) if name.isdigit() else name]
        document[last] = value

    return spoil


def _drop(name: str) -> Callable[[Any], None]:
    return lambda document: document.pop(name)


_SPOILT: list[tuple[str, Callable[[Any], None], str]] = [
    ("no format", _drop("format"), "format must be 'kvcm-config'"),
    ("another format", _set("format", "x"), "format must be"),
    ("a newer version", _set("version", 2), "version must be 1"),
    ("true is no version", _set("version", True), "version must be 1"),
    ("a misspelt list", _set("group", []), "group is unknown, allowed is groups"),
    ("a list is missing", _drop("quotas"), "quotas must be a list"),
    ("no list", _set("quotas", {}), "quotas must be a list"),
    ("a number for the cluster", _set("cluster_id", 5), "cluster_id must be a string"),
    ("no object", _set("groups", [5]), "groups[0] must be an object"),
    (
        "a misspelt field",
        _set("groups.1.quota.capcity", "1"),
        "groups[1].quota.capcity is unknown, allowed is capacity",
    ),
    ("a text for a number", _set("groups.1.quota.capacity", "x"), "groups[1].quota.capacity must be a number"),
    ("a number too large", _set("quotas.0.capacity_bytes", 1 << 63), "quotas[0].capacity_bytes is out of the range"),
    ("a fraction", _set("groups.0.version", 1.5), "groups[0].version must be an integer"),
    ("a double too large", _set("quotas.0.used_percentage", 10**400), "quotas[0].used_percentage is out of the range"),
    ("null", _set("groups.0.user_data", None), "groups[0].user_data is null"),
    ("null in a list", _set("groups.0.storage_candidates", [None]), "groups[0].storage_candidates[0] is null"),
    ("an unknown role", _set("accounts.0.role", "ROLE_KING"), "accounts[0].role is 'ROLE_KING', allowed are ROLE_USER"),
    ("an unknown number of a role", _set("accounts.0.role", 77), "accounts[0].role is 77"),
    ("a password", _set("accounts.0.password", "x"), "accounts[0].password is unknown"),
    ("no text for a switch", _set("storages.0.is_available", "no"), "storages[0].is_available must be true or false"),
    ("no spec", lambda document: document["storages"][0].pop("nfs"), "storages[0].storage_spec is required"),
    ("two specs", _set("storages.0.dummy", {}), "storages[0]."),
    ("a long text", _set("storages.0.nfs.root_path", "/" * 2000), "storages[0].nfs.root_path has 2000 bytes"),
    ("half a character", _set("groups.0.user_data", "\ud800"), "groups[0].user_data is not valid Unicode"),
    ("half a character in a key", _set("groups.0.\ud800", 1), "groups[0].\\ud800 is unknown"),
]


@pytest.mark.parametrize(("spoil", "text"), [pytest.param(*each[1:], id=each[0]) for each in _SPOILT])
def test_an_invalid_field_is_refused_with_its_path(spoil: Callable[[Any], None], text: str) -> None:
    document = json.loads(TEXT)
    spoil(document)
    with pytest.raises(InvalidArgumentError) as refusal:
        read_snapshot(json.dumps(document))
    assert text in str(refusal.value)
    assert len(str(refusal.value).encode()) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON document"),
        ("[]", "must be a JSON object"),
        ("5", "must be a JSON object"),
        (TEXT.replace("0.5", "NaN"), "NaN is no JSON number"),
        (TEXT.replace("0.5", "Infinity"), "Infinity is no JSON number"),
        (TEXT.replace("0.5", "1e999"), "Infinity is no JSON number"),
        (TEXT.replace('"version": 1', '"version": 1, "version": 1', 1), "'version' is given twice"),
        ("[" * 200 + "]" * 200, "nested deeper than 100 levels"),
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 100 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than 100 levels"),
        (TEXT + " " * MAX_SNAPSHOT_BYTES, f"at most {MAX_SNAPSHOT_BYTES} are allowed"),
        ("ü" * (MAX_SNAPSHOT_BYTES // 2 + 1), f"at most {MAX_SNAPSHOT_BYTES} are allowed"),
        ("1" * 100_000, "no JSON document"),
        ('{"' + "k" * 1_000_000 + '": 1, "format": "kvcm-config", "version": 1}', "is unknown"),
    ],
    ids=range(14),
)
def test_a_text_that_is_no_snapshot_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        read_snapshot(text)
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 400


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(TEXT) - 1), end=st.integers(0, 40), new=st.text(max_size=5))
def test_a_damaged_text_is_read_or_refused(at: int, end: int, new: str) -> None:
    with contextlib.suppress(InvalidArgumentError):
        read_snapshot(TEXT[:at] + new + TEXT[at + end :])


def test_no_secret_is_printed() -> None:
    secret = "hunter2"
    config = StorageConfig("mc", MooncakeStorageSpec("h", f"redis://:{secret}@h", "tcp", "", f"u:{secret}@m"))
    assert secret not in print_snapshot(Configuration(storages=(config,)), "c", 1)
    assert secret not in print_value(config)
    assert json.loads(print_value(CONFIG.storages[0]))["is_available"] is False


ADMIN = "AdminService"
SECRET = "hunter2"


def configure(api: Api, directory: Path) -> None:
    """Storages of three kinds, one of them disabled, three groups, two quotas, four instances, three accounts."""
    storages: dict[str, Any] = {
        "files": {"nfs": {"root_path": f"{directory}/files/", "key_count_per_file": 8}, "used_percentage": 0.7},
        "nothing": {"dummy": {"root_path": "x"}, "capacity_bytes": (1 << 62) + 1},
        "pool": {"tair_mem_pool": {"node_id": "node-1", "capacity_bytes": 64 << 20}},
    }
    for name, spec in storages.items():
        api.ok(f"{ADMIN}.AddStorage", storage={"global_unique_name": name, **spec})
    api.ok(f"{ADMIN}.DisableStorage", storage_unique_name="nothing")
    detailed = group_spec("b", "files", "pool", types={"ST_NFS": (1 << 53) + 1}, ratio=0.1 + 0.2, shards=4)
    detailed["cache_config"]["reclaim_strategy"] |= {
        "policy": {"name": "ttl", "ttl_seconds": 60},
        "prefix_classes": [{"name": "system", "end_depth": 4, "priority": 5, "budget": 1 / 3}],
        "instance_overrides": [{"instance_id": "one", "weight": 2.5}],
    }
    detailed["cache_config"]["reclaim_strategy"]["trigger_strategy"]["hysteresis"] = 0.0
    for spec in (group_spec("a", "files", max_instance_count=2), detailed, group_spec("c", "nothing", user_data="ü")):
        api.ok(f"{ADMIN}.CreateInstanceGroup", instance_group=spec)
    api.ok(
        f"{ADMIN}.UpdateInstanceGroup", instance_group=group_spec("c", "nothing") | {"version": 7}, current_version=1
    )
    for number, quota in enumerate(("quota", "other"), 1):
        limit = {"name": quota, "capacity_bytes": number << 40, "used_percentage": 0.9 / number}
        api.ok("CapacityService.SetGlobalQuota", global_quota=limit)
    specs = [{"name": "tp0", "size": 64, "kind": "LSK_FULL_ATTENTION"}, {"name": "state", "size": 1 << 20}]
    groups = [{"name": "z", "spec_names": ["tp0"]}, {"name": "all", "spec_names": ["tp0", "state"]}]
    model = {"model_name": "m", "dtype": "bf16", "tp_size": 2, "lora_name": "l", "extra": "{}", "user_data": "u"}
    for name, group in zip(("one", "two", "three", "Qwen/Qwen3-8B"), "aabc", strict=True):
        fields = instance_fields(name, group, location_spec_infos=specs, model_deployment=model)
        api.ok(f"{ADMIN}.RegisterInstance", **fields, location_spec_groups=groups)
    for name, role in (("ann", "ROLE_ADMIN"), ("bob", "ROLE_USER"), ("eve", "ROLE_USER")):
        api.ok(f"{ADMIN}.AddAccount", user_name=name, password=SECRET, role=role)


def answers(api: Api) -> dict[str, Any]:
    """Return the answers of all admin calls that read, without times and health."""
    asked: dict[str, Any] = {
        "groups": api.ok("GroupService.ListInstanceGroup"),
        "instances": api.ok(f"{ADMIN}.ListInstanceInfo"),
        "accounts": api.ok(f"{ADMIN}.ListAccount"),
        "quotas": api.ok("CapacityService.ListGlobalQuota"),
    }
    for group in asked["groups"].instance_groups:
        asked[f"group {group.name}"] = api.ok(f"{ADMIN}.GetInstanceGroup", name=group.name)
    for instance in asked["instances"].instance_info:
        asked[instance.instance_id] = api.ok(f"{ADMIN}.GetInstanceInfo", instance_id=instance.instance_id)
    for answer in asked.values():
        answer.ClearField("header")
    storages = api.ok(f"{ADMIN}.ListStorage")
    status = [(each.storage_unique_name, each.is_enabled, each.is_draining) for each in storages.storage_status]
    text = json.loads(api.ok(f"{ADMIN}.GenConfigSnapshot").config_snapshot)
    del text["created_at_ms"], text["cluster_id"]
    answers = {name: MessageToDict(answer) for name, answer in asked.items()}
    configured = [MessageToDict(each) for each in storages.storage]
    return {**answers, "storages": configured, "status": status, "text": text}


class Deployments(NamedTuple):
    """Three deployments, each over another store; the first is configured."""

    rocks: Api
    redis: Api
    back: Api


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory, redis_standalone: Standalone) -> Iterator[Deployments]:
    directory = tmp_path_factory.mktemp("deployments")
    uri = f"kvcm.registry_storage.uri={redis_standalone.uri(unique('snapshot'))}"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(manager(directory / "first"))
        apis = [stack.enter_context(first.api())]
        for name, options in (("second", [uri]), ("third", [])):
            process = stack.enter_context(manager(directory / name, *options))
            apis.append(stack.enter_context(process.api("http")))
        configure(apis[0], directory)
        yield Deployments(*apis)


def snapshot(api: Api) -> str:
    text: str = api.ok(f"{ADMIN}.GenConfigSnapshot").config_snapshot
    return text


def load(api: Api, text: str, **flags: bool) -> list[tuple[str, str, str]]:
    changes = api.ok(f"{ADMIN}.LoadConfigSnapshot", config_snapshot=text, **flags).changes
    return [(change.action, change.kind, change.name) for change in changes]


def test_a_deployment_goes_to_another_store_and_back_with_the_same_answers(deployments: Deployments) -> None:
    text = snapshot(deployments.rocks)
    expected = answers(deployments.rocks)
    assert [len(json.loads(text)[name]) for name in ("storages", "groups", "quotas", "instances", "accounts")] == [
        *(4, 4, 2, 4, 3)
    ]
    for target in (deployments.redis, deployments.back):
        before = snapshot(target)
        would = load(target, text, dry_run=True)
        assert snapshot(target).partition("storages")[2] == before.partition("storages")[2]
        assert load(target, text) == would
        assert {action for action, _, _ in would} == {"add", "change"}
        assert answers(target) == expected
        assert load(target, snapshot(target)) == []
        text = snapshot(target)
    assert load(deployments.rocks, text) == []


def test_secrets_leave_with_no_snapshot_and_no_change(deployments: Deployments) -> None:
    api = deployments.rocks
    texts = [f'{{"api_key": "{SECRET}"}}', f"redis://u:{SECRET}@h/?password={SECRET}"]
    spec = group_spec("secretive", "files", user_data=texts[0])
    backend = spec["cache_config"]["meta_indexer_config"]["meta_storage_backend_config"]
    backend["storage_uri"] = texts[1]
    api.ok(f"{ADMIN}.CreateInstanceGroup", instance_group=spec)
    model = {"model_name": "m", "dtype": "bf16", "extra": texts[0], "user_data": texts[1]}
    api.ok(f"{ADMIN}.RegisterInstance", **instance_fields("secret", "secretive", model_deployment=model))
    text = snapshot(api)
    assert SECRET not in text
    document = json.loads(text)
    (group,) = (each for each in document["groups"] if each["name"] == "secretive")
    group["pin_budget_bytes"] = "5"
    answer = api.ok(f"{ADMIN}.LoadConfigSnapshot", config_snapshot=json.dumps(document))
    assert [(change.action, change.name) for change in answer.changes] == [("change", "secretive")]
    assert SECRET not in str(answer)
    stored = api.ok(f"{ADMIN}.GetInstanceGroup", name="secretive").instance_group
    assert (stored.pin_budget_bytes, stored.user_data, stored.version) == (5, texts[0], 2)
    code, refusal = deployments.back.refused(f"{ADMIN}.LoadConfigSnapshot", config_snapshot=text)
    assert (code, "lacks a secret" in refusal, SECRET in refusal) == ("INVALID_ARGUMENT", True, False)


def test_a_prune_removes_resources_without_blocks(deployments: Deployments) -> None:
    api = deployments.back
    document = json.loads(snapshot(api))
    kept = dict(document)
    document |= {"quotas": [], "accounts": document["accounts"][:1]}
    assert load(api, json.dumps(document), prune=True) == [
        *[("remove", "quota", name) for name in ("other", "quota")],
        *[("remove", "account", name) for name in ("bob", "eve")],
    ]
    assert [account.user_name for account in api.ok(f"{ADMIN}.ListAccount").accounts] == ["ann"]
    document["instances"] = []
    code, text = api.refused(f"{ADMIN}.LoadConfigSnapshot", config_snapshot=json.dumps(document), prune=True)
    assert (code, "RemoveInstance" in text) == ("INVALID_ARGUMENT", True)
    assert len(load(api, json.dumps(kept))) == 4
