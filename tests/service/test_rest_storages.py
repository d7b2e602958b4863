"""/v1/storages and /v1/tasks against a live manager."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rest_client import RestClient
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, unique

Doc = dict[str, Any]


@pytest.fixture
def calls(apis: dict[str, Api]) -> Api:
    return apis["grpc"]


def _doc(name: str, **fields: Any) -> Doc:
    return {"dummy": {"root_path": name}, **fields}


def _add(rest: RestClient, **fields: Any) -> str:
    name = unique("storage")
    assert rest.put(f"/v1/storages/{name}", _doc(name, **fields)).status == 201
    return name


def test_a_storage_is_created_read_replaced_and_removed(rest: RestClient, calls: Api) -> None:
    name = unique("storage")
    path = f"/v1/storages/{name}"
    made = rest.put(path, _doc(name, capacity_bytes=2**60))
    assert (made.status, made.headers["location"]) == (201, path)
    assert made.body == {
        "global_unique_name": name,
        "dummy": {"root_path": name, "key_count_per_file": 0},
        "check_storage_available_when_open": False,
        "capacity_bytes": 2**60,
        "used_percentage": 0.0,
        "is_available": True,
    }
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
    assert rest.put(path, _doc(name), if_none_match="*").status == 412
    assert rest.patch(path, {"capacity_bytes": 9}, if_match=tag).status == 200
    assert rest.patch(path, {"capacity_bytes": 8}, if_match=tag).status == 412
    assert rest.put(path, _doc(name), if_match=tag).status == 412
    assert rest.delete(path, if_match=tag).status == 412
    assert rest.put(f"/v1/storages/{unique('storage')}", _doc(name), if_match="*").status == 412
    assert rest.delete(path, if_match="*").status == 204


def test_of_changes_of_one_state_at_the_same_time_one_wins(rest: RestClient, server: ManagerProcess) -> None:
    name = _add(rest)
    tag = rest.get(f"/v1/storages/{name}").headers["etag"]
    statuses: list[int] = []

    def change(capacity: int) -> None:
        client = RestClient(server.address.admin_http)
        statuses.append(client.patch(f"/v1/storages/{name}", {"capacity_bytes": capacity}, if_match=tag).status)
        client.connection.close()

    threads = [threading.Thread(target=change, args=(capacity,)) for capacity in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [412] * 7


def test_lists_tell_how_storages_are_when_they_are_asked_to(rest: RestClient) -> None:
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


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "%2E%2E%2Fx", "a" * 129, "%FF", "a%40b"])
def test_a_name_that_no_storage_can_have_is_400(rest: RestClient, name: str) -> None:
    refused = rest.get(f"/v1/storages/{name}")
    assert (refused.status, refused.body["errors"][0]["field"]) == (400, "path.name")


def test_the_type_of_a_storage_stays(rest: RestClient, tmp_path: Path) -> None:
    name = _add(rest)
    refused = rest.put(f"/v1/storages/{name}", {"nfs": {"root_path": f"{tmp_path}/"}})
    assert (refused.status, refused.body["code"]) == (400, "INVALID_ARGUMENT")
    assert "type" in refused.body["detail"]


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
    with manager(tmp_path / "manager") as process:
        yield process


def test_a_removal_with_blocks_is_a_task_that_cannot_be_cancelled(own: ManagerProcess) -> None:
    rest = RestClient(own.address.admin_http)
    with own.api() as api:
        site = Site(api)
        storage = site.storage()
        instance = site.instance(site.group(storage))
        site.write(instance, [1, 2, 3])
        assert rest.delete(f"/v1/storages/{storage}").status == 204
        listed = rest.get(f"/v1/tasks/removal:{storage}")
        assert (listed.status, listed.body["kind"], listed.body["left_bytes"]) == (200, "removal", 192)
        refused = rest.delete(f"/v1/tasks/removal:{storage}")
        assert (refused.status, "add the storage again" in refused.body["detail"]) == (409, True)
        eventually(lambda: rest.get(f"/v1/tasks/removal:{storage}").status == 404)
    rest.connection.close()
