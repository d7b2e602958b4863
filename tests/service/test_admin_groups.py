"""Instance groups and instances through the admin calls on both transports (wire.md 6.2, 6.3)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess
from test_transport_sites import Site, group_spec, unique

from kvcm.protocol import admin_service_pb2 as admin


def _create(api: Api, spec: dict[str, Any]) -> Any:
    return api.ok("AdminService.CreateInstanceGroup", instance_group=spec)


def _stored(api: Api, name: str) -> Any:
    return api.ok("AdminService.GetInstanceGroup", name=name).instance_group


def test_a_group_comes_back_as_it_was_created(site: Site) -> None:
    name = unique("Gruppe ü/1")
    spec = group_spec(name, site.storage(), "b", "a", types={"ST_NFS": 2**62, "ST_DUMMY": 0}, ratio=0.123456789)
    spec |= {"user_data": '{"a":"ü"}', "max_instance_count": 7, "version": -(2**63)}
    reclaim = {"trigger_period_seconds": 1, "reclaim_step_size": 2, "reclaim_step_percentage": 3}
    spec["cache_config"]["reclaim_strategy"] |= {**reclaim, "reclaim_policy": "POLICY_TTL"}
    spec["cache_config"]["reclaim_strategy"]["trigger_strategy"]["used_size"] = 2**62
    indexer = spec["cache_config"]["meta_indexer_config"]
    indexer |= {"max_key_count": 1 << 40, "mutex_shard_num": 64, "batch_key_size": 5}
    indexer["meta_storage_backend_config"]["storage_uri"] = "file:///ignored"
    indexer["meta_cache_policy_config"] = {
        "capacity": 9,
        "type": "LRU",
        "cache_shard_bits": 2,
        "high_pri_pool_ratio": 0.5,
    }
    _create(site.api, spec)
    assert _stored(site.api, name) == admin.InstanceGroup(**spec)
    listed = site.api.ok("GroupService.ListInstanceGroup").instance_groups
    assert [group for group in listed if group.name == name] == [admin.InstanceGroup(**spec)]


def test_the_built_in_group_can_be_read_changed_and_sent_back(site: Site) -> None:
    """The first thing an operator does: raise the quota of what is there."""
    group = site.api.ok("AdminService.GetInstanceGroup", name="default").instance_group
    version = group.version
    group.quota.capacity += 1
    group.version += 1
    site.api.ok("AdminService.UpdateInstanceGroup", instance_group=group, current_version=version)
    assert site.api.ok("AdminService.GetInstanceGroup", name="default").instance_group == group


def test_all_groups_are_listed_in_order_of_names(site: Site) -> None:
    created = {site.group() for _ in range(3)}
    names = [group.name for group in site.api.ok("GroupService.ListInstanceGroup").instance_groups]
    assert names == sorted(names)
    assert created | {"default"} <= set(names)


def test_unknown_candidates_are_accepted_and_named_in_a_warning(site: Site) -> None:
    known = site.storage()
    spec = group_spec(unique("group"), known, "nope-1", "nope-2")
    message = _create(site.api, spec).header.status.message
    assert ("nope-1" in message, "nope-2" in message, known in message) == (True, True, False)
    assert list(_stored(site.api, spec["name"]).storage_candidates) == [known, "nope-1", "nope-2"]
    changed = {**spec, "version": 2, "storage_candidates": [known, "nope-3"]}
    answer = site.api.ok("AdminService.UpdateInstanceGroup", instance_group=changed, current_version=1)
    assert "nope-3" in answer.header.status.message


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 1.5},
        {"ratio": 0.0},
        {"shards": 0},
        {"shards": 1},
        {"shards": 65536},
        {"shards": 8, "max_keys": 8},
        {"strategy": "CPS_ALWAYS_VCNS_3FS"},
        {"capacity": 2**63 - 1},
        {"delay_ms": 2**31 - 1},
    ],
    ids=str,
)
def test_values_at_the_edge_are_accepted(site: Site, changes: dict[str, Any]) -> None:
    spec = group_spec(unique("group"), site.storage(), **changes)
    _create(site.api, spec)
    assert _stored(site.api, spec["name"]) == admin.InstanceGroup(**spec)


def test_a_refused_group_is_not_stored(site: Site) -> None:
    spec = group_spec(unique("group"), "s", ratio=math.nan)
    site.api.refused("AdminService.CreateInstanceGroup", instance_group=spec)
    assert site.api.refused("AdminService.GetInstanceGroup", name=spec["name"]).code == "INVALID_ARGUMENT"


def test_an_update_replaces_the_whole_group_and_its_version_may_jump(site: Site) -> None:
    name = site.group(user_data="old", max_instance_count=3)
    changed = group_spec(name, "other", version=100)
    site.api.ok("AdminService.UpdateInstanceGroup", instance_group=changed, current_version=1)
    assert _stored(site.api, name) == admin.InstanceGroup(**changed)


@pytest.mark.parametrize(("current", "version"), [(0, 2), (2, 3), (1, 1), (1, 0), (1, -5)])
def test_an_update_needs_the_stored_version_and_a_greater_new_one(site: Site, current: int, version: int) -> None:
    name = site.group()
    before = _stored(site.api, name)
    spec = group_spec(name, "s", version=version)
    fields = {"instance_group": spec, "current_version": current}
    code, message = site.api.refused("AdminService.UpdateInstanceGroup", **fields)
    assert (code, "version" in message) == ("INVALID_ARGUMENT", True)
    assert _stored(site.api, name) == before


def test_an_ignored_meta_storage_uri_is_said_once_in_the_log_decision_6(server: ManagerProcess, site: Site) -> None:
    for _ in range(2):
        spec = group_spec(unique("group"), "s")
        backend = {"storage_type": "local", "storage_uri": "file:///somewhere"}
        spec["cache_config"]["meta_indexer_config"]["meta_storage_backend_config"] = backend
        _create(site.api, spec)
    said = eventually(lambda: [event for event in server.events("ignored") if "storage_uri" in str(event)])
    assert len(said) == 1


# ── Instances ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _listed(site: Site, group: str = "") -> list[str]:
    infos = site.api.ok("AdminService.ListInstanceInfo", instance_group_name=group).instance_info
    return [info.instance_id for info in infos]


def test_the_instances_of_a_group_are_listed_in_order(site: Site) -> None:
    group, other = site.group(), site.group()
    mine = sorted([site.instance(group), site.instance(group)])
    foreign = site.instance(other)
    assert _listed(site, group) == mine
    assert {*mine, foreign} <= set(_listed(site))
    assert _listed(site) == sorted(_listed(site))


def test_a_group_without_instances_and_an_unknown_group_have_an_empty_list(site: Site) -> None:
    assert _listed(site, site.group()) == []
    assert _listed(site, "nowhere") == []


def test_quota_group_name_is_that_of_the_registration(site: Site) -> None:
    group = site.group(global_quota_group_name="first")
    instance = site.instance(group)
    site.update_group(group, "s", global_quota_group_name="second")
    info = site.api.ok("GetInstanceInfo", instance_id=instance).instance_info
    assert info.quota_group_name == "first"
