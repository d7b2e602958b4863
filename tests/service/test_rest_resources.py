"""/v1/groups, instances, storages, tasks, accounts, usage, pins, managers and history."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rest_client import RestClient, component
from secured import Tenants
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, group_spec, unique

from kvcm import __version__

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


def test_a_read_resource_can_be_put_back_unchanged(rest: RestClient, calls: Api) -> None:
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
def test_an_invalid_patch_names_the_field_and_changes_nothing(rest: RestClient, patch: Doc, field: str) -> None:
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


def test_conditions_decide_between_create_and_replace(rest: RestClient) -> None:
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


def test_a_client_that_has_the_state_is_reported_so(rest: RestClient) -> None:
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
    assert (refused.status, refused.body["code"]) == (400, "INVALID_ARGUMENT")
    assert refused.body["type"] == "urn:kvcm:error:invalid_argument"
    assert "mutex_shard_num" in refused.body["detail"]
    assert refused.body["request_id"].startswith("mine_")
    assert refused.headers["x-request-id"].startswith("mine_")


def test_instances_of_a_group_are_registered_and_removed(rest: RestClient, apis: dict[str, Api]) -> None:
    group, name = Site(apis["http"]).group(), unique("Org/Model")
    doc = {"instance_group_name": group, "block_size": 4, "location_spec_infos": [{"name": "kv", "size": 64}]}
    doc["model_deployment"] = {"model_name": "m", "dtype": "bf16"}
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


def _storage_doc(name: str, **fields: Any) -> Doc:
    return {"dummy": {"root_path": name}, **fields}


def _add(rest: RestClient, **fields: Any) -> str:
    name = unique("storage")
    assert rest.put(f"/v1/storages/{name}", _storage_doc(name, **fields)).status == 201
    return name


def test_a_storage_is_created_read_replaced_and_removed(rest: RestClient, calls: Api) -> None:
    name = unique("storage")
    path = f"/v1/storages/{name}"
    made = rest.put(path, _storage_doc(name, capacity_bytes=2**60))
    assert (made.status, made.headers["location"]) == (201, path)
    named = {"global_unique_name": name, "dummy": {"root_path": name, "key_count_per_file": 0}}
    limits = {"capacity_bytes": 2**60, "used_percentage": 0.0}
    rest_of_it = {"storage_type": "ST_DUMMY", "check_storage_available_when_open": False, "is_available": True}
    assert made.body == {**named, **limits, **rest_of_it}
    read = rest.get(path)
    assert (read.body, read.headers["etag"]) == (made.body, made.headers["etag"])
    assert made.body in rest.items("/v1/storages")
    replaced = rest.put(path, {**read.body, "dummy": {"root_path": "other"}})
    assert (replaced.status, replaced.body["dummy"]["root_path"]) == (200, "other")
    listed = calls.ok("AdminService.ListStorage").storage
    assert [each.dummy.root_path for each in listed if each.global_unique_name == name] == ["other"]
    assert [rest.delete(path).status, rest.get(path).status, rest.delete(path).status] == [204, 404, 404]


def test_a_patch_switches_a_storage_off_and_on_and_leaves_the_rest(rest: RestClient, calls: Api) -> None:
    name = _add(rest, used_percentage=0.5)
    path = f"/v1/storages/{name}"
    before = rest.get(path)
    off = rest.patch(path, {"is_available": False})
    assert (off.status, off.body) == (200, {**before.body, "is_available": False})
    status = [each for each in calls.ok("AdminService.ListStorage").storage_status if each.storage_unique_name == name]
    assert [each.is_enabled for each in status] == [False]
    assert rest.get(f"{path}/status").body["is_enabled"] is False
    both = rest.patch(path, {"is_available": True, "capacity_bytes": 5})
    assert both.body == {**before.body, "capacity_bytes": 5}


def test_conditions_hold_for_storages_too(rest: RestClient) -> None:
    name = _add(rest)
    path = f"/v1/storages/{name}"
    tag = rest.get(path).headers["etag"]
    assert rest.get(path, if_none_match=tag).status == 304
    assert rest.put(path, _storage_doc(name), if_none_match="*").status == 412
    assert rest.patch(path, {"capacity_bytes": 9}, if_match=tag).status == 200
    assert rest.patch(path, {"capacity_bytes": 8}, if_match=tag).status == 412
    assert rest.put(path, _storage_doc(name), if_match=tag).status == 412
    assert rest.delete(path, if_match=tag).status == 412
    assert rest.put(f"/v1/storages/{unique('storage')}", _storage_doc(name), if_match="*").status == 412
    assert rest.delete(path, if_match="*").status == 204


def test_lists_report_how_storages_are_when_they_are_asked_to(rest: RestClient) -> None:
    name = _add(rest)
    (shown,) = [each for each in rest.items("/v1/storages?with_status=true") if each["global_unique_name"] == name]
    status = rest.get(f"/v1/storages/{name}/status")
    assert set(shown["status"]) == set(status.body)
    assert (status.body["storage_unique_name"], status.body["is_draining"]) == (name, False)
    assert rest.get(f"/v1/storages/{unique('storage')}/status").status == 404


@pytest.mark.parametrize(
    ("doc", "field"),
    [
        ({}, "body"),
        ({"dummy": {}, "nfs": {"root_path": "/x/"}}, "body"),
        ({"nfs": {}}, "body.nfs.root_path"),
        ({"dummy": {}, "global_unique_name": "other"}, "body.global_unique_name"),
        ({"dummy": {}, "is_available": 1}, "body.is_available"),
        ({"dummy": {"key_count_per_file": 2**31}}, "body.dummy.key_count_per_file"),
    ],
)
def test_a_document_that_is_no_storage_names_the_field(rest: RestClient, doc: Doc, field: str) -> None:
    refused = rest.put(f"/v1/storages/{unique('storage')}", doc)
    assert (refused.status, [error["field"] for error in refused.body["errors"]]) == (400, [field])


def test_a_drain_is_a_task_until_it_is_cancelled(rest: RestClient) -> None:
    name = _add(rest)
    begun = rest.post(f"/v1/storages/{name}/drain")
    assert (begun.status, begun.headers["location"]) == (202, f"/v1/tasks/drain:{name}")
    task = rest.get(begun.headers["location"]).body
    assert (task["id"], task["kind"], task["storage"]) == (f"drain:{name}", "drain", name)
    assert f"drain:{name}" in [each["id"] for each in rest.items("/v1/tasks")]
    assert rest.get(f"/v1/storages/{name}/status").body["is_draining"] is True
    assert rest.delete(begun.headers["location"]).status == 204
    assert rest.get(begun.headers["location"]).status == 404
    assert rest.delete(begun.headers["location"]).status == 404
    assert rest.post("/v1/tasks", {"kind": "drain", "storage": name}).status == 202
    assert rest.delete(f"/v1/storages/{name}/drain").status == 204
    assert rest.items("/v1/tasks") == [each for each in rest.items("/v1/tasks") if each["storage"] != name]
    missing = unique("storage")
    assert rest.post(f"/v1/storages/{missing}/drain").status == 404
    assert rest.delete(f"/v1/storages/{missing}/drain").status == 404


def test_garbage_and_scrubs_are_answered_when_they_are_done(rest: RestClient, apis: dict[str, Api]) -> None:
    site = Site(apis["http"])
    instance = site.instance()
    site.write(instance, [1, 2])
    looked = rest.post("/v1/tasks", {"kind": "collect_garbage", "instance": instance, "dry_run": True})
    assert (looked.status, looked.body["state"], looked.body["report"]["blocks"]) == (200, "done", 2)
    scrubbed = rest.post("/v1/tasks", {"kind": "scrub", "storage": "nfs_01", "dry_run": True})
    assert (scrubbed.status, scrubbed.body["report"]["deleted"]) == (200, 0)
    assert rest.post("/v1/tasks", {"kind": "rest"}).status == 400
    assert rest.post("/v1/tasks", {"kind": "scrub"}).body["errors"][0]["field"] == "body.scrub.storage"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ManagerProcess]:
    """A manager of the test's own: its groups are few enough to be counted one by one."""
    with manager(tmp_path / "manager") as process:
        yield process


@pytest.fixture
def own_rest(own: ManagerProcess) -> Iterator[RestClient]:
    client = RestClient(own.address.admin_http)
    with contextlib.closing(client.connection):
        yield client


@pytest.fixture
def own_site(own: ManagerProcess) -> Iterator[Site]:
    with own.api() as api:
        yield Site(api)


def test_a_removal_with_blocks_is_a_task_that_cannot_be_cancelled(own_rest: RestClient, own_site: Site) -> None:
    storage = own_site.storage()
    own_site.write(own_site.instance(own_site.group(storage)), [1, 2, 3])
    assert own_rest.delete(f"/v1/storages/{storage}").status == 204
    path = f"/v1/tasks/removal:{storage}"
    listed = own_rest.get(path)
    assert (listed.status, listed.body["kind"], listed.body["left_bytes"]) == (200, "removal", 192)
    refused = own_rest.delete(path)
    assert (refused.status, "add the storage again" in refused.body["detail"]) == (409, True)
    eventually(lambda: own_rest.get(path).status == 404)


def test_an_account_is_added_once_and_its_password_is_never_shown(rest: RestClient, server: ManagerProcess) -> None:
    name, password = unique("user@example"), "swordfish-0451"
    path = f"/v1/accounts/{component(name)}"
    made = rest.put(path, {"password": password, "role": "ROLE_ADMIN"})
    assert (made.status, made.body) == (201, {"user_name": name, "role": "ROLE_ADMIN"})
    assert (rest.get(path).body, rest.get(path).headers["etag"]) == (made.body, made.headers["etag"])
    assert made.body in rest.items("/v1/accounts")
    again = rest.put(path, {"password": password})
    assert (again.status, again.body["code"]) == (409, "DUPLICATE_ENTITY")
    assert rest.put(path, {"password": password}, if_none_match="*").status == 412
    refused = rest.put(path, {"password": [password], "role": "ROLE_KING"})
    assert refused.status == 400
    assert password.encode() not in made.raw + again.raw + refused.raw
    assert rest.delete(path).status == 204
    assert [rest.get(path).status, rest.delete(path).status] == [404, 404]
    assert password not in server.log_text()


def test_the_password_of_an_account_is_changed(rest: RestClient, server: ManagerProcess) -> None:
    path = f"/v1/accounts/{component(name := unique('user@example'))}"
    rest.put(path, {"password": "old-swordfish"})
    changed = rest.put(f"{path}/password", {"password": "new-swordfish"})
    assert (changed.status, changed.raw) == (204, b"")
    found = [rest.post("/v1/login", {"user_name": name, "password": f"{age}-swordfish"}) for age in ("old", "new")]
    assert [answer.status for answer in found] == [401, 201]
    assert rest.put("/v1/accounts/nobody/password", {"password": "p"}).status == 404
    for body in (
        {},
        {"password": ""},
        {"password": "p", "old_password": "swordfish" * 200},
        {"password": "swordfish" * 200},
    ):
        refused = rest.put(f"{path}/password", body)
        assert (refused.status, bool(refused.body["errors"]), b"swordfish" in refused.raw) == (400, True, False)
    assert "swordfish" not in server.log_text()


def test_usage_is_that_of_the_calls(rest: RestClient, site: Site) -> None:
    instance = site.instance(group := site.group(capacity=1000))
    site.write(instance, [1, 2])
    usage = rest.get(f"/v1/usage?group={component(group)}").body
    (shown,) = usage["groups"]
    assert (shown["name"], shown["total"]["used_bytes"], shown["total"]["capacity_bytes"]) == (group, 128, 1000)
    assert [(each["instance_id"], each["key_count"]) for each in shown["instances"]] == [(instance, 2)]
    assert group in [each["name"] for each in rest.get("/v1/usage").body["groups"]]
    assert rest.get("/v1/usage?group=none").status == 400


def test_pins_are_made_listed_and_ended(rest: RestClient, site: Site) -> None:
    instance = site.instance(site.group(pin_budget_bytes=1 << 20))
    keys = [9007199254740993, -(2**63), 2**63 - 1]
    site.write(instance, keys)
    order = {"instance_id": instance, "block_keys": [str(key) for key in keys], "owner": "me", "ttl_seconds": 3600}
    made = rest.post("/v1/pins", order)
    assert (made.status, made.body["pinned_blocks"], made.body["pinned_bytes"]) == (201, 3, 192)
    assert made.headers["location"] == f"/v1/pins/{instance}/{made.body['pin_id']}"
    (pin,) = rest.items(f"/v1/pins?instance={instance}")
    assert (pin["pin_id"], pin["owner"], pin["last_block_key"]) == (made.body["pin_id"], "me", str(keys[-1]))
    assert pin["deadline_ms"] == made.body["deadline_ms"]
    assert rest.delete(made.headers["location"]).status == 204
    assert rest.delete(made.headers["location"]).status == 204
    assert rest.items(f"/v1/pins?instance={instance}") == []
    nothing = rest.post("/v1/pins", {**order, "block_keys": ["5"]})
    assert (nothing.status, "nothing to pin" in nothing.body["detail"]) == (409, True)
    assert rest.post("/v1/pins", {**order, "instance_id": "none"}).status == 404
    assert rest.get("/v1/pins?instance=none").status == 404
    assert rest.delete("/v1/pins/none/abc").status == 404


def test_a_manager_alone_is_its_leader(rest: RestClient, server: ManagerProcess) -> None:
    eventually(lambda: rest.get("/v1/managers").body["items"][0]["phase"] == "serving")
    (manager,) = rest.get("/v1/managers").body["items"]
    assert (manager["is_leader"], manager["is_self"], manager["version"]) == (True, True, __version__)
    assert f"127.0.0.1:{manager['admin_http_port']}" == server.address.admin_http
    assert manager["started_at_ms"] <= manager["seen_at_ms"]


def test_traffic_shows_in_the_rates_and_in_the_history(own_rest: RestClient, own_site: Site) -> None:
    rest, site = own_rest, own_site
    group = site.group()
    instance = site.instance(group)

    def series() -> dict[tuple[str, ...], list[float | None]]:
        body = rest.get(f"/v1/history?seconds=600&group={component(group)}").body
        return {(each["name"], *each["labels"].values()): each["values"] for each in body["series"]}

    def is_reported() -> bool:
        site.hits(instance, [1, 2, 3, 4])
        return any(series().get(("hit_ratio", group), ()))

    site.write(instance, [1, 2, 3])
    eventually(is_reported, seconds=60)
    found = series()
    assert {len(values) for values in found.values()} == {60}
    assert max(filter(None, found["hit_ratio", group])) == 0.75
    assert found["quota_bytes", group][-1]
    rates = lambda: rest.get("/v1/managers").body["items"][0]["rates"]["requests_per_second"]  # noqa: E731
    eventually(lambda: site.hits(instance, [1]) and rates()["match"] > 0)
    names = {each["name"] for each in rest.get("/v1/history").body["series"]}
    assert {"requests_per_second", "errors_per_second", "match_p50_seconds", "match_p99_seconds"} <= names


@pytest.mark.parametrize("query", ["seconds=59", "seconds=86401", "seconds=x", "minutes=5"])
def test_an_invalid_query_of_the_history_is_refused(rest: RestClient, query: str) -> None:
    answer = rest.get(f"/v1/history?{query}")
    field = query.partition("=")[0]
    assert (answer.status, [error["field"] for error in answer.body["errors"]]) == (400, [f"query.{field}"])


def test_the_history_of_no_group_is_not_found(rest: RestClient) -> None:
    answer = rest.get("/v1/history?group=none")
    assert (answer.status, answer.body.get("errors", [])) == (404, [])


def test_a_day_is_answered_in_360_values(rest: RestClient) -> None:
    body = rest.get("/v1/history?seconds=86400").body
    assert body["interval_seconds"] == 240
    assert {len(each["values"]) for each in body["series"]} == {360}


def test_a_key_limited_to_a_group_gets_the_history_of_that_alone(tenants: Tenants) -> None:
    own, other = "default", tenants.groups["b"]
    key = tenants.server.key("viewer-of-one", "ROLE_VIEWER", instance_groups=[own])
    client = RestClient(tenants.server.process.address.admin_http)
    with contextlib.closing(client.connection):

        def groups(headers: dict[str, str]) -> set[str | None]:
            return {each["labels"].get("group") for each in client.get("/v1/history", **headers).body["series"]}

        headers, of_all = ({"authorization": f"Bearer {each}"} for each in (key, tenants.keys["viewer"]))
        eventually(lambda: own in groups(of_all))  # from the first moment on
        assert groups(headers) == {own}
        assert None in groups(of_all)
        assert client.get(f"/v1/history?group={component(own)}", **headers).status == 200
        for name in (other, "none"):
            refused = client.get(f"/v1/history?group={component(name)}", **headers)
            assert (refused.status, name in refused.body["detail"]) == (403, False)
        assert client.get("/v1/managers", **headers).status == 403
