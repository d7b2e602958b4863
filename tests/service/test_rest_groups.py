"""/v1/groups against a live manager: create, replace, merge, conditions, versions, and that it is the calls' state."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from rest_client import RestClient, component
from test_transport_drivers import Api
from test_transport_process import ManagerProcess
from test_transport_sites import Site, group_spec, unique

Doc = dict[str, Any]


@pytest.fixture
def calls(apis: dict[str, Api]) -> Api:
    return apis["http"]


def _doc(**fields: Any) -> Doc:
    return {"storage_candidates": ["nfs_01"], "global_quota_group_name": "quota", "quota": {"capacity": 1000}, **fields}


def _path(name: str) -> str:
    return f"/v1/groups/{component(name)}"


def test_a_group_is_created_read_replaced_and_removed(rest: RestClient, calls: Api) -> None:
    name = unique("group")
    created = rest.put(_path(name), _doc(user_data="a"))
    assert (created.status, created.headers["location"], created.body["version"]) == (201, _path(name), 1)
    read = rest.get(_path(name))
    assert (read.status, read.body, read.headers["etag"]) == (200, created.body, created.headers["etag"])
    replaced = rest.put(_path(name), {**read.body, "user_data": "b"})
    assert (replaced.status, replaced.body["version"], replaced.body["user_data"]) == (200, 2, "b")
    assert replaced.headers["etag"] != read.headers["etag"]
    assert calls.ok("AdminService.GetInstanceGroup", name=name).instance_group.user_data == "b"
    removed = rest.delete(_path(name))
    assert (removed.status, removed.raw) == (204, b"")
    gone = rest.get(_path(name))
    assert (gone.status, gone.headers["content-type"]) == (404, "application/problem+json")
    assert rest.delete(_path(name)).status == 404


def test_a_group_of_which_little_is_said_evicts(rest: RestClient) -> None:
    name = unique("group")
    rest.put(_path(name), _doc())
    (shown,) = rest.get(f"/v1/usage?group={name}").body["groups"]
    assert (shown["total"]["capacity_bytes"], shown["total"]["high_mark_bytes"]) == (1000, 800)


def test_what_the_calls_stored_is_shown_with_numbers_and_names_of_enums(rest: RestClient, calls: Api) -> None:
    name = unique("group")
    spec = group_spec(name, "nfs_01", capacity=2**53 + 1, types={"ST_NFS": 7}, ratio=0.5, delay_ms=9)
    calls.ok("AdminService.CreateInstanceGroup", instance_group=spec)
    shown = rest.get(_path(name)).body
    assert shown["quota"] == {"capacity": 2**53 + 1, "quota_config": [{"storage_type": "ST_NFS", "capacity": 7}]}
    strategy = shown["cache_config"]["reclaim_strategy"]
    assert (strategy["reclaim_policy"], strategy["delay_before_delete_ms"]) == ("POLICY_LRU", 9)
    assert strategy["trigger_strategy"] == {"used_size": 0, "used_percentage": 0.5}
    assert shown in rest.items("/v1/groups")


def test_what_is_read_can_be_put_back_as_it_is(rest: RestClient, calls: Api) -> None:
    name = unique("group")
    trigger = {"used_percentage": 0.5, "hysteresis": 0.0}
    cache = group_spec(name, "nfs_01")["cache_config"]
    prefix_class = {"name": "c", "end_depth": 2, "instance_ids": ["i"], "budget": 0.5, "policy": {"name": "lfu"}}
    cache["reclaim_strategy"] |= {
        "trigger_strategy": trigger,
        "policy": {"name": "lru", "ttl_seconds": 5},
        "prefix_classes": [prefix_class],
        "instance_overrides": [{"instance_id": "i", "weight": 2.0}],
        "share": "fixed",
    }
    spec = group_spec(name, "nfs_01", types={"ST_NFS": 7}, cache_config=cache, pin_budget_bytes=3)
    spec["storage_guarantees"] = [{"storage_unique_name": "nfs_01", "guaranteed_bytes": 5}]
    calls.ok("AdminService.CreateInstanceGroup", instance_group=spec)
    before = calls.ok("AdminService.GetInstanceGroup", name=name).instance_group
    put = rest.put(_path(name), rest.get(_path(name)).body)
    assert put.status == 200, put.body
    after = calls.ok("AdminService.GetInstanceGroup", name=name).instance_group
    assert after.version == before.version + 1
    after.version = before.version
    assert after == before


def test_a_merge_patch_changes_what_it_names_and_null_takes_it_back(rest: RestClient) -> None:
    name = unique("group")
    rest.put(_path(name), _doc(user_data="a", quota={"capacity": 5, "quota_config": [{"storage_type": "ST_NFS"}]}))
    patched = rest.patch(_path(name), {"quota": {"capacity": 6}, "user_data": None, "pin_budget_bytes": 2})
    assert (patched.status, patched.body["version"], patched.body["user_data"]) == (200, 2, "")
    assert patched.body["quota"] == {"capacity": 6, "quota_config": [{"storage_type": "ST_NFS", "capacity": 0}]}
    assert rest.patch(_path(name), {"quota": {"quota_config": []}}).body["quota"] == {"capacity": 6, "quota_config": []}
    assert rest.patch(_path(unique("group")), {}).status == 404


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"storage_candidates": None}, "body.storage_candidates"),
        ({"quota": 5}, "body.quota"),
        ({"quota": {"capacity": "5"}}, "body.quota.capacity"),
        ({"quota": {"capacity": 5.5}}, "body.quota.capacity"),
        ({"quota": {"capacity": 2**63}}, "body.quota.capacity"),
        ({"quota": {"capacity": True}}, "body.quota.capacity"),
        ({"quota": {"quota_config": [{"storage_type": "ST_TAPE"}]}}, "body.quota.quota_config[0].storage_type"),
        ({"cache_config": {"data_storage_strategy": 3}}, "body.cache_config.data_storage_strategy"),
        ({"nothing": 1}, "body.nothing"),
        ({"name": "other"}, "body.name"),
    ],
)
def test_a_patch_that_makes_no_group_names_the_field_and_changes_nothing(
    rest: RestClient, patch: Doc, field: str
) -> None:
    name = unique("group")
    before = rest.put(_path(name), _doc())
    refused = rest.patch(_path(name), patch)
    assert (refused.status, [error["field"] for error in refused.body["errors"]]) == (400, [field])
    assert rest.get(_path(name)).body == before.body


def test_integers_may_be_written_as_floats_as_long_as_no_digit_is_lost(rest: RestClient) -> None:
    path = _path(unique("group"))
    assert rest.put(path, _doc(quota={"capacity": 5e3})).body["quota"]["capacity"] == 5000
    for capacity in ("9007199254740993.0", "1e16", "5.5", "1e400"):
        assert rest.patch(path, f'{{"quota": {{"capacity": {capacity}}}}}'.encode()).status == 400


def test_conditions_decide_what_is_created_and_what_is_replaced(rest: RestClient) -> None:
    name = unique("group")
    assert rest.put(_path(name), _doc(), if_match="*").status == 412
    first = rest.put(_path(name), _doc(), if_none_match="*")
    assert first.status == 201
    again = rest.put(_path(name), _doc(), if_none_match="*")
    assert (again.status, again.headers["content-type"]) == (412, "application/problem+json")
    old = first.headers["etag"]
    assert rest.put(_path(name), _doc(user_data="b"), if_match=f'"x", {old}').status == 200
    assert rest.put(_path(name), _doc(user_data="c"), if_match=old).status == 412
    assert rest.patch(_path(name), {"user_data": "c"}, if_match=old).status == 412
    assert rest.delete(_path(name), if_match=old).status == 412
    now = rest.get(_path(name))
    assert now.body["user_data"] == "b"
    assert rest.put(_path(name), _doc(), if_match=f"W/{now.headers['etag']}").status == 412  # weak tags never match
    assert rest.patch(_path(name), {"user_data": "c"}, if_match=now.headers["etag"]).status == 200
    assert rest.delete(_path(name), if_match="*").status == 204


def test_a_client_that_has_the_state_is_told_so(rest: RestClient) -> None:
    name = unique("group")
    tag = rest.put(_path(name), _doc()).headers["etag"]
    for known in (tag, f"W/{tag}", f'"a", {tag}', "*"):
        unchanged = rest.get(_path(name), if_none_match=known)
        assert (unchanged.status, unchanged.raw, unchanged.headers["etag"]) == (304, b"", tag)
    assert rest.get(_path(name), if_none_match='"a"').status == 200


def test_patches_at_the_same_time_are_all_kept(rest: RestClient, server: ManagerProcess) -> None:
    name = unique("group")
    rest.put(_path(name), _doc())
    fields = ["user_data", "pin_budget_bytes", "max_instance_count"]
    values: list[Any] = ["x", 7, 9]
    statuses: list[int] = []

    def change(field: str, value: Any) -> None:
        client = RestClient(server.address.admin_http)
        while (status := client.patch(_path(name), {field: value}).status) == 409:
            pass
        statuses.append(status)
        client.connection.close()

    threads = [threading.Thread(target=change, args=pair) for pair in zip(fields, values, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 3
    group = rest.get(_path(name)).body
    assert [group[field] for field in fields] == values
    assert group["version"] == 4


def test_a_warning_of_the_call_stands_in_a_header(rest: RestClient) -> None:
    made = rest.put(_path(unique("group")), _doc(storage_candidates=["nowhere"]))
    assert made.status == 201
    assert "nowhere" in made.headers["x-kvcm-warning"]


def test_the_handlers_own_refusals_are_problems_with_their_code(rest: RestClient) -> None:
    indexer = {"meta_indexer_config": {"mutex_shard_num": 3}}
    refused = rest.put(_path(unique("group")), _doc(cache_config=indexer), x_request_id="mine")
    assert (refused.status, refused.body["code"], refused.body["type"]) == (
        400,
        "INVALID_ARGUMENT",
        "urn:kvcm:error:invalid_argument",
    )
    assert "mutex_shard_num" in refused.body["detail"]
    assert refused.body["request_id"].startswith("mine_")
    assert refused.headers["x-request-id"].startswith("mine_")


def test_instances_of_a_group_are_registered_and_removed(rest: RestClient, apis: dict[str, Api]) -> None:
    group, name = Site(apis["http"]).group(), unique("Org/Model")
    doc = {
        "instance_group_name": group,
        "block_size": 4,
        "location_spec_infos": [{"name": "kv", "size": 64}],
        "model_deployment": {"model_name": "m", "dtype": "bf16"},
    }
    path = f"/v1/instances/{component(name)}"
    made = rest.put(path, doc)
    assert (made.status, made.headers["location"]) == (201, path)
    assert made.body["quota_group_name"] == "quota"
    assert rest.put(path, made.body).status == 200
    other = rest.put(path, {**doc, "block_size": 8})
    assert (other.status, other.body["code"]) == (409, "DUPLICATE_ENTITY")
    assert rest.put(path, doc, if_none_match="*").status == 412
    assert rest.items(f"/v1/instances?group={component(group)}") == [made.body]
    assert made.body in rest.items("/v1/instances")
    assert rest.get(path, if_none_match=made.headers["etag"]).status == 304
    assert rest.put(f"/v1/instances/{component(unique('i'))}", {**doc, "instance_group_name": "none"}).status == 400
    assert rest.delete(path, if_match='"a"').status == 412
    assert rest.delete(path).status == 204
    assert [rest.get(path).status, rest.delete(path).status] == [404, 404]
