"""Event report storages, and the fields of the original's later releases, over calls, resources and commands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_runner import Commands
from rest_client import RestClient
from test_transport_drivers import Api, HttpDriver, eventually, post
from test_transport_sites import Site, group_spec, instance_fields, unique

from kvcm.protocol import admin_service_pb2 as admin

L1P5, L2 = "ST_EVENT_REPORT_L1P5", "ST_EVENT_REPORT_L2"
TIMES = {
    "heartbeat_timeout_ms": 30_000,
    "cleanup_grace_ms": 300_000,
    "liveness_check_interval_ms": 5_000,
    "snapshot_min_interval_ms": 30_000,
    "snapshot_delta_drain_timeout_ms": 10_000,
}


def _listed(api: Api, name: str) -> tuple[Any, Any]:
    """Return a storage and its status as they are listed, None for each that is not."""
    answer = api.ok("AdminService.ListStorage")
    found = [each for each in answer.storage if each.global_unique_name == name]
    statuses = [each for each in answer.storage_status if each.storage_unique_name == name]
    return (found[0], statuses[0]) if found else (None, None)


def _report(site: Site, level: str = L2, **times: int) -> str:
    return site.storage(event_report=times, storage_type=level)


@pytest.mark.parametrize("level", [L1P5, L2])
def test_one_is_added_listed_updated_switched_and_removed(each_api: Api, level: str) -> None:
    name = _report(Site(each_api), level, cleanup_grace_ms=7)
    config, status = _listed(each_api, name)
    wanted = admin.EventReportStorageSpec(**{**TIMES, "cleanup_grace_ms": 7})
    assert (config.event_report, admin.StorageType.Name(config.storage_type)) == (wanted, level)
    assert (status.is_enabled, admin.StorageHealth.Name(status.health), status.reason) == (True, "SH_UP", "")
    config.event_report.heartbeat_timeout_ms = 8
    each_api.ok("AdminService.UpdateStorage", storage=config)
    each_api.ok("AdminService.DisableStorage", storage_unique_name=name)
    changed, status = _listed(each_api, name)
    assert (changed, status.is_enabled) == (config, False)
    each_api.ok("AdminService.EnableStorage", storage_unique_name=name)
    code, message = each_api.refused("StorageService.DrainStorage", storage_unique_name=name)
    assert (code, f"'{name}'" in message) == ("INVALID_ARGUMENT", True)
    each_api.ok("AdminService.RemoveStorage", storage_unique_name=name)
    assert _listed(each_api, name) == (None, None)
    assert name not in [each.storage_unique_name for each in each_api.ok("StorageService.ListDrain").drains]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"event_report": {}}, ["storage_type", "ST_UNSPECIFIED", L1P5, L2]),
        ({"event_report": {"cleanup_grace_ms": -1}, "storage_type": L2}, ["cleanup_grace_ms", "is -1", "must be > 0"]),
        ({"event_report": {}, "storage_type": L2, "capacity_bytes": 1}, ["capacity_bytes", "is 1", "must be 0"]),
        ({"dummy": {}, "storage_type": L2}, ["storage_type", L2, "ST_DUMMY"]),
        ({"dummy": {}, "storage_type": 77}, ["storage_type is 77", f"{L2}=8"]),
    ],
)
def test_a_malformed_one_is_refused_with_field_and_value(site: Site, fields: Any, named: list[str]) -> None:
    storage = {"global_unique_name": unique("storage"), **fields}
    code, message = site.api.refused("AdminService.AddStorage", storage=storage)
    assert code == "INVALID_ARGUMENT"
    assert all(text in message for text in named), message


def test_nothing_is_written_to_it_whatever_comes_first(site: Site) -> None:
    report, late = _report(site), unique("late")
    spec = group_spec(unique("group"), site.storage(), report)
    code, message = site.api.refused("AdminService.CreateInstanceGroup", instance_group=spec)
    assert (code, f"'{report}'" in message) == ("INVALID_ARGUMENT", True)
    group = site.group(site.storage(), late)
    storage = {"global_unique_name": late, "event_report": {}, "storage_type": L2}
    code, message = site.api.refused("AdminService.AddStorage", storage=storage)
    assert (code, f"group '{group}'" in message) == ("INVALID_ARGUMENT", True)


def test_a_group_names_it_and_absent_ones_are_named_in_the_answer(site: Site) -> None:
    report = _report(site)
    spec = group_spec(unique("group"), site.storage(), event_report_storage_candidates=[report, "absent"])
    answer = site.api.ok("AdminService.CreateInstanceGroup", instance_group=spec)
    assert "event_report_storage_candidates ['absent'] do not exist" in answer.header.status.message
    found = site.api.ok("AdminService.GetInstanceGroup", name=spec["name"]).instance_group
    assert list(found.event_report_storage_candidates) == [report, "absent"]
    usage = site.api.ok("CapacityService.GetUsage")
    assert report not in [each.storage_unique_name for each in usage.storages]


def test_over_http_the_older_name_of_the_candidates_is_read(apis: dict[str, Api]) -> None:
    http, site = apis["http"], Site(apis["http"])
    report = _report(site)
    spec = group_spec(unique("group"), site.storage())
    body = {"instance_group": {**spec, "event_reporting_storage_candidates": [report]}}
    assert isinstance(http.driver, HttpDriver)
    assert post(http.driver.admin, "/api/createInstanceGroup", json.dumps(body).encode()).status == 200
    (found,) = [each for each in http.ok("AdminService.ListInstanceGroup").instance_group if each.name == spec["name"]]
    assert list(found.event_report_storage_candidates) == [report]


def test_what_a_registration_says_is_returned_and_compared(site: Site) -> None:
    group = site.group(site.storage(), extra_info='{"tier": 1}')
    fields = instance_fields(unique("instance"), group, default_query_type="QT_PREFIX_MATCH")
    fields["model_deployment"] = {**fields["model_deployment"], "use_eagle_pop": True}
    assert site.api.ok("RegisterInstance", **fields).extra_info == '{"tier": 1}'
    assert site.api.ok("RegisterInstance", **fields).extra_info == '{"tier": 1}'
    for rpc in ("GetInstanceInfo", "AdminService.GetInstanceInfo"):
        info = site.api.ok(rpc, instance_id=fields["instance_id"]).instance_info
        assert (info.default_query_type, info.model_deployment.use_eagle_pop) == (2, True)
    code, message = site.api.refused("RegisterInstance", **{**fields, "default_query_type": "QT_BATCH_GET"})
    assert (code, "'QT_PREFIX_MATCH'" in message) == ("DUPLICATE_ENTITY", True)
    code, message = site.api.refused("RegisterInstance", **{**fields, "default_query_type": 9})
    assert (code, "default_query_type is 9" in message) == ("INVALID_ARGUMENT", True)


def test_a_number_that_can_be_unset_comes_back_as_it_was_sent(each_api: Api) -> None:
    site = Site(each_api)
    for given in (None, {}, {"value": 600}):
        spec = group_spec(unique("group"), site.storage())
        spec["cache_config"]["meta_indexer_config"]["persist_metadata_interval_time_ms"] = given
        remark = each_api.ok("AdminService.CreateInstanceGroup", instance_group=spec).header.status.message
        assert ("persist_metadata_interval_time_ms" in remark) == (given is not None)
        found = each_api.ok("AdminService.GetInstanceGroup", name=spec["name"]).instance_group
        assert found == admin.InstanceGroup(**spec)


def test_one_is_a_resource(rest: RestClient) -> None:
    name = unique("storage")
    path = f"/v1/storages/{name}"
    made = rest.put(path, {"event_report": {"cleanup_grace_ms": 7}, "storage_type": L1P5})
    assert (made.status, made.body["storage_type"]) == (201, L1P5)
    assert made.body["event_report"] == {**TIMES, "cleanup_grace_ms": 7}
    assert rest.put(path, made.body).body == made.body
    changed = rest.patch(path, {"event_report": {"heartbeat_timeout_ms": 8}, "is_available": False})
    assert (changed.status, changed.body["is_available"]) == (200, False)
    assert changed.body["event_report"]["heartbeat_timeout_ms"] == 8
    assert rest.get(f"{path}/status").body["health"] == "SH_UP"
    group = f"/v1/groups/{unique('group')}"
    document = {"storage_candidates": ["nfs_01"], "global_quota_group_name": "q"}
    document |= {"event_report_storage_candidates": [name], "extra_info": "{}"}
    indexer = {"persist_metadata_interval_time_ms": 5}
    made = rest.put(group, {**document, "cache_config": {"meta_indexer_config": indexer}})
    assert (made.status, made.body["event_report_storage_candidates"], made.body["extra_info"]) == (201, [name], "{}")
    assert made.body["cache_config"]["meta_indexer_config"]["persist_metadata_interval_time_ms"] == 5
    assert rest.patch(group, {"extra_info": "new"}).body["extra_info"] == "new"
    assert [rest.delete(group).status, rest.delete(path).status] == [204, 204]


def test_operators_configure_one_by_commands(commands: Commands, site: Site) -> None:
    name, group = unique("storage"), unique("group")
    commands.ok("storage", "add", name, "--type", "event_report_l2", "--set", "cleanup_grace_ms=7")
    assert "event_report_l2" in commands.ok("storage", "show", name)
    commands.ok("storage", "update", name, "--set", "heartbeat_timeout_ms=8")
    shown = commands.json("storage", "show", name)
    assert shown["event_report"] == {**TIMES, "cleanup_grace_ms": 7, "heartbeat_timeout_ms": 8}
    (listed,) = [each for each in commands.json("storage", "list")["storages"] if each["name"] == name]
    assert (listed["type"], listed["health"]) == ("event_report_l2", "SH_UP")
    options = ("--storage", site.storage(), "--quota", "1MiB", "--event-report-storage", name, "--extra-info", "{}")
    commands.ok("group", "create", group, *options)
    assert name in commands.ok("group", "show", group)
    found = commands.json("group", "show", group)
    assert (found["event_report_storage_candidates"], found["extra_info"]) == ([name], "{}")
    message = commands.refused("group", "update", group, "--quota-type", "event_report_l2=5")
    assert "'event_report_l2', must be one of" in message
    commands.ok("storage", "remove", name, "--yes")
    assert eventually(lambda: name not in [each["name"] for each in commands.json("storage", "list")["storages"]])


def test_a_snapshot_of_the_configuration_holds_it(site: Site) -> None:
    name = _report(site)
    snapshot = site.api.ok("AdminService.GenConfigSnapshot").config_snapshot
    (printed,) = [each for each in json.loads(snapshot)["storages"] if each["global_unique_name"] == name]
    assert (printed["storage_type"], printed["event_report"]["cleanup_grace_ms"]) == (L2, "300000")
    site.api.ok("AdminService.LoadConfigSnapshot", config_snapshot=snapshot)
