"""What is kept from whom: secrets of the configuration from all but administrators, and what other groups do from
whoever is limited to some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rest_client import RestClient, component
from secured import Tenants
from test_transport_drivers import Api
from test_transport_sites import Site, group_spec, instance_fields, unique

from kvcm.registry.secrets import HIDDEN

PLANTED = "hunter2"
OTHER = "correcthorse"
_NOTE = f"see redis://u:{PLANTED}@h"


@pytest.fixture
def admin(tenants: Tenants) -> Iterator[Api]:
    with tenants.server.api() as api:
        yield api


def _storage_fields(tenants: Tenants, name: str, **spec: Any) -> dict[str, Any]:
    mountpoint = tenants.server.process.data_dir.parent / "mount"
    (mountpoint / "root").mkdir(parents=True, exist_ok=True)
    uri = f"mysql://u:{PLANTED}@meta:3306/db"
    fields = {"mountpoint": str(mountpoint), "root_dir": "root", "key_count_per_file": 1, "meta_storage_uri": uri}
    fields |= {"remote_host": "meta", "remote_port": 1, **spec}
    return {"global_unique_name": name, "vcnsthreefs": fields}


@pytest.fixture
def storage(tenants: Tenants, admin: Api) -> str:
    name = unique("secretive")
    admin.ok("AdminService.AddStorage", storage=_storage_fields(tenants, name))
    return name


@pytest.fixture
def group(admin: Api, storage: str) -> str:
    return Site(admin).group(storage, user_data=_NOTE)


@pytest.fixture
def instance(admin: Api, group: str) -> str:
    model = {"model_name": "m", "dtype": "bf16", "extra": f"token={PLANTED}", "user_data": _NOTE}
    return Site(admin).instance(group, model_deployment=model)


def _uri(api: Api, storage: str) -> str:
    listed = api.ok("AdminService.ListStorage").storage
    (found,) = [each for each in listed if each.global_unique_name == storage]
    return str(found.vcnsthreefs.meta_storage_uri)


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("who", ["viewer", "operator", "engine", "admin"])
def test_administrators_alone_see_secrets(
    tenants: Tenants, transport: str, who: str, storage: str, group: str, instance: str
) -> None:
    key = tenants.server.engine(unique("engine"), group) if who == "engine" else tenants.keys[who]
    calls = {
        "AdminService.GetInstanceInfo": {"instance_id": instance},
        "GetInstanceInfo": {"instance_id": instance},
    }
    if who != "engine":
        calls |= {
            "AdminService.ListStorage": {},
            "AdminService.GetInstanceGroup": {"name": group},
            "GroupService.ListInstanceGroup": {},
            "AdminService.ListInstanceInfo": {"instance_group_name": group},
        }
    with tenants.server.api(transport, key) as api:
        for rpc, fields in calls.items():
            shown = str(api.ok(rpc, **fields))
            assert (PLANTED in shown, HIDDEN in shown) == ((True, False) if who == "admin" else (False, True)), rpc


def test_engines_get_the_storages_of_their_group_as_they_are(tenants: Tenants, group: str) -> None:
    with tenants.server.api(key=tenants.server.engine(unique("engine"), group)) as api:
        answer = api.ok("RegisterInstance", **instance_fields(unique("instance"), group))
    assert PLANTED in answer.storage_configs


def test_what_was_read_without_secrets_can_be_sent_back(
    tenants: Tenants, admin: Api, storage: str, group: str, instance: str
) -> None:
    with tenants.server.api(key=tenants.keys["viewer"]) as viewer:
        (read,) = [each for each in viewer.ok("AdminService.ListStorage").storage if each.global_unique_name == storage]
        read_group = viewer.ok("AdminService.GetInstanceGroup", name=group).instance_group
        read_instance = viewer.ok("AdminService.GetInstanceInfo", instance_id=instance).instance_info
    read.vcnsthreefs.cluster_name = "renamed"
    admin.ok("AdminService.UpdateStorage", storage=read)
    read_group.version, read_group.quota.capacity = 2, 12345
    admin.ok("AdminService.UpdateInstanceGroup", instance_group=read_group, current_version=1)
    again = {"block_size": 4, "model_deployment": read_instance.model_deployment}
    admin.ok("AdminService.RegisterInstance", **{**instance_fields(instance, group), **again})
    assert PLANTED in _uri(admin, storage)
    stored = admin.ok("AdminService.GetInstanceGroup", name=group).instance_group
    assert (stored.user_data, stored.quota.capacity) == (_NOTE, 12345)


def test_a_secret_that_is_nowhere_is_refused(tenants: Tenants, admin: Api, storage: str, group: str) -> None:
    uri = f"mysql://{HIDDEN}@another/db"
    for call, name in (("AddStorage", unique("new")), ("UpdateStorage", storage)):
        fields = _storage_fields(tenants, name, meta_storage_uri=uri)
        assert "lacks a secret" in admin.refused(f"AdminService.{call}", storage=fields).message
    note = f"token={HIDDEN}"
    new = group_spec(unique("new"), storage, user_data=note)
    assert "lacks a secret" in admin.refused("AdminService.CreateInstanceGroup", instance_group=new).message
    changed = group_spec(group, storage, user_data=note, version=2)
    update = admin.refused("AdminService.UpdateInstanceGroup", instance_group=changed, current_version=1)
    assert "lacks a secret" in update.message
    model = {"model_name": "m", "dtype": "bf16", "extra": note}
    fields = instance_fields(unique("instance"), group, model_deployment=model)
    assert "lacks a secret" in admin.refused("RegisterInstance", **fields).message


@pytest.mark.parametrize("kind", ["storages", "groups"])
def test_resources_keep_secrets_and_conditions(
    tenants: Tenants, by_tenants: RestClient, storage: str, group: str, kind: str
) -> None:
    """Whoever sees less has tags of its own: one over the secret would tell who guessed it right."""
    path = f"/v1/{kind}/{component(storage if kind == 'storages' else group)}"
    by_admin, by_operator = ({"authorization": tenants.authorization(who)} for who in ("admin", "operator"))
    full, read = by_tenants.get(path, **by_admin), by_tenants.get(path, **by_operator)
    assert PLANTED.encode() in full.raw
    assert PLANTED.encode() not in read.raw + by_tenants.get(f"/v1/{kind}", **by_operator).raw
    assert read.headers["etag"] != full.headers["etag"]
    assert by_tenants.get(path, **by_operator, if_none_match=read.headers["etag"]).status == 304
    assert by_tenants.put(path, read.body, **by_admin, if_match=read.headers["etag"]).status == 412
    put = by_tenants.put(path, read.body, **by_admin, if_match=full.headers["etag"])
    assert put.status == 200
    assert put.headers["etag"] == by_tenants.get(path, **by_admin).headers["etag"]
    assert PLANTED.encode() in put.raw
    secret = (
        {"vcnsthreefs": {"meta_storage_uri": f"mysql://u:{OTHER}@meta:3306/db"}}
        if kind == "storages"
        else {"user_data": f"see redis://u:{OTHER}@h"}
    )
    patched = by_tenants.patch(path, secret, **by_admin, if_match=put.headers["etag"])
    assert OTHER.encode() in patched.raw
    hidden = {name: by_tenants.get(path, **by_operator).body[name] for name in secret}
    assert by_tenants.patch(path, hidden, **by_admin, if_match=put.headers["etag"]).status == 412
    assert OTHER.encode() in by_tenants.patch(path, hidden, **by_admin).raw


def test_an_operator_switches_a_storage_whose_secrets_it_does_not_see(
    tenants: Tenants, by_tenants: RestClient, admin: Api, storage: str
) -> None:
    by_operator = {"authorization": tenants.authorization("operator")}
    path = f"/v1/storages/{storage}"
    tag = by_tenants.get(path, **by_operator).headers["etag"]
    switched = by_tenants.patch(path, {"is_available": False}, **by_operator, if_match=tag)
    assert (switched.status, switched.body["is_available"]) == (200, False)
    assert PLANTED in _uri(admin, storage)
    assert by_tenants.patch(path, {"capacity_bytes": 5}, **by_operator).status == 403


def test_usage_of_a_limited_principal_is_its_own(tenants: Tenants, by_tenants: RestClient, admin: Api) -> None:
    site = Site(admin)
    storage, quota = site.storage(), unique("quota")
    own, foreign = (site.group(storage, global_quota_group_name=quota) for _ in range(2))
    admin.ok("CapacityService.SetGlobalQuota", global_quota={"name": quota, "capacity_bytes": 1 << 30})
    site.write(site.instance(own), [1])
    site.write(site.instance(foreign), [1, 2, 3])
    viewer = tenants.server.key(unique("limited"), "ROLE_VIEWER", instance_groups=[own])

    def seen(key: str) -> tuple[list[Any], list[Any]]:
        found = by_tenants.get(f"/v1/usage?group={own}", authorization=f"Bearer {key}").body
        storages = [(each["usage"]["used_bytes"], each["oversubscription"]) for each in found["storages"]]
        return storages, [(each["usage"]["used_bytes"], each["groups"]) for each in found["global_quotas"]]

    assert seen(tenants.keys["viewer"]) == ([(256, 0.0)], [(256, [own, foreign])])
    assert seen(viewer) == ([(64, 0.0)], [(64, [own])])
