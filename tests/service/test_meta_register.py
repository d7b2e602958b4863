"""RegisterInstance and GetInstanceInfo on both transports (wire.md 5.4): what is the same instance, what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_transport_sites import Site, instance_fields, specs, unique

GROUPS = [
    {"name": "full", "spec_names": ["v", "k"]},
    {"name": "all", "spec_names": ["s", "v", "k"]},
]
SPECS = [{"name": "k", "size": 8}, {"name": "v", "size": 8}, {"name": "s", "size": 4}]
MODEL = {"model_name": "m", "dtype": "bf16", "tp_size": 2, "user_data": "u", "extra": "e"}


def _registration(site: Site, **changes: Any) -> dict[str, Any]:
    whole = instance_fields(unique("instance"), site.group(), location_spec_infos=SPECS, model_deployment=MODEL)
    return {**whole, "location_spec_groups": GROUPS, **changes}


def test_the_same_registration_again_is_ok_and_answers_the_same_storages(site: Site) -> None:
    registration = _registration(site)
    first = site.api.ok("RegisterInstance", **registration)
    assert site.api.ok("RegisterInstance", **registration).storage_configs == first.storage_configs


def test_order_of_spec_groups_and_of_their_names_does_not_matter(site: Site) -> None:
    registration = _registration(site)
    site.api.ok("RegisterInstance", **registration)
    sorted_groups = [{"name": "all", "spec_names": ["k", "s", "v"]}, {"name": "full", "spec_names": ["k", "v"]}]
    site.api.ok("RegisterInstance", **{**registration, "location_spec_groups": sorted_groups})
    site.api.ok("AdminService.RegisterInstance", **{**registration, "location_spec_groups": GROUPS[::-1]})


def test_user_data_is_no_part_of_the_identity(site: Site) -> None:
    registration = _registration(site)
    site.api.ok("RegisterInstance", **registration)
    site.api.ok("RegisterInstance", **{**registration, "model_deployment": {**MODEL, "user_data": "other"}})
    info = site.api.ok("GetInstanceInfo", instance_id=registration["instance_id"]).instance_info
    assert info.model_deployment.user_data == "u"


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "block size": ({"block_size": 8}, "block_size"),
    "order of specs": ({"location_spec_infos": SPECS[::-1]}, "location_spec_infos"),
    "size of a spec": ({"location_spec_infos": [{**SPECS[0], "size": 9}, *SPECS[1:]]}, "location_spec_infos"),
    "kind of a spec": ({"location_spec_infos": [{**SPECS[0], "kind": 2}, *SPECS[1:]]}, "location_spec_infos"),
    "spec groups": ({"location_spec_groups": GROUPS[:1]}, "location_spec_groups"),
    "extra": ({"model_deployment": {**MODEL, "extra": ""}}, "model_deployment"),
    "tensor parallelism": ({"model_deployment": {**MODEL, "tp_size": 4}}, "model_deployment"),
    "LoRA": ({"model_deployment": {**MODEL, "lora_name": "l"}}, "model_deployment"),
}


@pytest.mark.parametrize("rpc", ["RegisterInstance", "AdminService.RegisterInstance"])
@pytest.mark.parametrize("rule", DIFFERENCES)
def test_another_layout_under_a_taken_id_is_a_duplicate_and_changes_nothing(site: Site, rpc: str, rule: str) -> None:
    registration = _registration(site)
    site.api.ok("RegisterInstance", **registration)
    before = site.api.ok("GetInstanceInfo", instance_id=registration["instance_id"]).instance_info
    changes, field = DIFFERENCES[rule]
    code, message = site.api.refused(rpc, **{**registration, **changes})
    assert code == "DUPLICATE_ENTITY"
    assert field in message
    assert registration["instance_id"] in message
    assert site.api.ok("GetInstanceInfo", instance_id=registration["instance_id"]).instance_info == before


def test_a_registration_again_under_another_group_is_refused(site: Site) -> None:
    registration = _registration(site)
    site.api.ok("RegisterInstance", **registration)
    for group in (site.group(), "nowhere"):
        code, message = site.api.refused("RegisterInstance", **{**registration, "instance_group": group})
        assert (code, "instance_group" in message) == ("DUPLICATE_ENTITY", True)


def test_what_was_registered_comes_back_complete_and_sorted(site: Site) -> None:
    registration = _registration(site)
    site.api.ok("RegisterInstance", **registration)
    for rpc in ("GetInstanceInfo", "AdminService.GetInstanceInfo"):
        info = site.api.ok(rpc, instance_id=registration["instance_id"]).instance_info
        assert info.instance_id == registration["instance_id"]
        assert info.instance_group_name == registration["instance_group"]
        assert info.quota_group_name == "quota"
        assert info.block_size == 4
        assert [(spec.name, spec.size) for spec in info.location_spec_infos] == [("k", 8), ("v", 8), ("s", 4)]
        groups = [(group.name, list(group.spec_names)) for group in info.location_spec_groups]
        assert groups == [("all", ["k", "s", "v"]), ("full", ["k", "v"])]
        deployment = info.model_deployment
        assert (deployment.model_name, deployment.tp_size, deployment.extra) == ("m", 2, "e")
    answer = site.api.ok("GetInstanceInfo", instance_id=registration["instance_id"])
    assert answer.instance_group == registration["instance_group"]
    assert answer.header.status.message == ""


def test_a_refused_registration_is_not_stored_and_carries_no_storages(site: Site) -> None:
    registration = _registration(site, location_spec_infos=[{"name": "k", "size": -1}])
    answer = site.api.call("RegisterInstance", **registration)
    assert answer.storage_configs == ""
    code, _ = site.api.refused("GetInstanceInfo", instance_id=registration["instance_id"])
    assert code == "INSTANCE_NOT_EXIST"


def test_storage_configs_lists_existing_candidates_by_name_with_their_availability(site: Site, tmp_path: Path) -> None:
    later = site.storage(nfs={"root_path": f"{tmp_path}/", "key_count_per_file": 8})
    sooner = site.storage(dummy={"root_path": "d", "key_count_per_file": 1})
    first, second = sorted((later, sooner))
    group = site.group(second, "missing", first)
    site.api.ok("AdminService.DisableStorage", storage_unique_name=sooner)
    answer = site.api.ok("RegisterInstance", **instance_fields(unique("instance"), group))
    configs = json.loads(answer.storage_configs)
    assert [config["global_unique_name"] for config in configs] == [first, second]
    by_name = {config["global_unique_name"]: config for config in configs}
    assert by_name[sooner]["is_available"] is False
    assert by_name[later] == {
        "type": "file",
        "is_available": True,
        "global_unique_name": later,
        "storage_spec": {"root_path": f"{tmp_path}/", "key_count_per_file": 8},
    }
    assert list(by_name[later]) == ["type", "is_available", "global_unique_name", "storage_spec"]
    assert " " not in answer.storage_configs.replace(str(tmp_path), "")


def test_storage_configs_is_an_empty_list_when_no_candidate_exists(site: Site) -> None:
    answer = site.api.ok("RegisterInstance", **instance_fields(unique("instance"), site.group("missing")))
    assert answer.storage_configs == "[]"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "..", "ä ö/ü", "x" * 256, "a%2Fb?c=d#e"])
def test_any_printable_name_of_256_bytes_is_an_instance_whose_files_stay_in_its_storage(
    site: Site, tmp_path: Path, name: str
) -> None:
    storage = site.storage(nfs={"root_path": str(tmp_path), "key_count_per_file": 1})
    group = site.group(storage)
    instance = name if len(name) == 256 else name + unique("")
    site.api.ok("RegisterInstance", **instance_fields(instance, group))
    try:
        (uris,) = site.write(instance, [-1])
        path = uris["kv"].removeprefix(f"file://{storage}").rpartition("?")[0]
        assert Path(path).resolve().is_relative_to(tmp_path.resolve())
        assert uris["kv"].startswith(f"file://{storage}/")
        assert len(Path(path).relative_to(tmp_path).parts) == 4  # cluster / instance / spec / object
        assert "/ffffffffffffffff." in path
        assert site.match(instance, [-1]) == [uris]
    finally:
        site.api.ok("AdminService.RemoveInstance", instance_id=instance)


def test_max_instance_count_of_the_group_is_a_limit(site: Site) -> None:
    group = site.group(max_instance_count=1)
    site.instance(group)
    code, message = site.api.refused("RegisterInstance", **instance_fields(unique("instance"), group))
    assert code == "REACH_MAX_ENTITY_CAPACITY"
    assert "max_instance_count" in message
    assert group in message


def test_a_removed_instance_is_unknown_and_its_id_starts_empty_with_any_layout(site: Site) -> None:
    group = site.group()
    instance = site.instance(group)
    site.write(instance, [1, 2])
    open_session = site.start(instance, [3]).write_session_id
    site.api.ok("AdminService.RemoveInstance", instance_id=instance, instance_group="ignored")
    for rpc in ("GetCacheLocation", "StartWriteCache", "GetCacheMeta", "AdminService.GetInstanceInfo"):
        assert site.api.refused(rpc, instance_id=instance).code == "INSTANCE_NOT_EXIST"
    other = instance_fields(instance, group, location_spec_infos=[{"name": "other", "size": 1}])
    site.api.ok("RegisterInstance", **other)
    assert site.hits(instance, [1, 2, 3]) == []
    finish = {"write_session_id": open_session, "success_blocks": {"offset": 1}}
    assert site.api.refused("FinishWriteCache", instance_id=instance, **finish).code == "INVALID_ARGUMENT"
    assert [set(specs(entry)) for entry in site.start(instance, [1]).locations] == [{"other"}]
