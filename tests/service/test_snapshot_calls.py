"""GenConfigSnapshot and LoadConfigSnapshot between real deployments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.json_format import MessageToDict
from redis_servers import Standalone
from test_transport_drivers import Api
from test_transport_process import manager
from test_transport_sites import group_spec, instance_fields, unique

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
    """Return what every admin call that reads says, but for times and health."""
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
    return {
        **{name: MessageToDict(answer) for name, answer in asked.items()},
        "storages": [MessageToDict(each) for each in storages.storage],
        "status": status,
        "text": text,
    }


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


def test_what_is_loaded_works(deployments: Deployments) -> None:
    api = deployments.redis
    load(api, snapshot(deployments.rocks))
    started = api.ok("StartWriteCache", instance_id="one", block_keys=[1, 2, 3])
    assert len(started.locations) == 3
    refused = api.refused(f"{ADMIN}.RegisterInstance", **instance_fields("too many", "a"))
    assert refused[0] == "REACH_MAX_ENTITY_CAPACITY"


def test_a_load_that_is_refused_leaves_every_answer_as_it_was(deployments: Deployments) -> None:
    api = deployments.redis
    before = answers(api)
    document = json.loads(snapshot(api))
    document["groups"][0]["user_data"] = "changed"
    document["storages"].append({"global_unique_name": "bad", "nfs": {"root_path": "/proc/nowhere/"}})
    code, text = api.refused(f"{ADMIN}.LoadConfigSnapshot", config_snapshot=json.dumps(document))
    assert code in {"IO_ERROR", "INVALID_ARGUMENT"}, text
    document["storages"].pop()
    document["groups"][2]["quota"]["capacity"] = "-1"
    code, text = api.refused(f"{ADMIN}.LoadConfigSnapshot", config_snapshot=json.dumps(document))
    assert (code, text) == ("INVALID_ARGUMENT", "groups[2].quota.capacity is -1, must be >= 0")
    assert answers(api) == before


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


def test_a_prune_removes_what_holds_no_blocks(deployments: Deployments) -> None:
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
