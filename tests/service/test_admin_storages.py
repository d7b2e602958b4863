"""Storages through the admin calls on both transports (wire.md 6.1): what is refused is not stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_transport_drivers import Api, eventually
from test_transport_process import manager
from test_transport_sites import Site, unique


def _stored(site: Site, name: str) -> Any:
    """The storage of that name as ListStorage tells it, None when it is not listed."""
    found = [s for s in site.api.ok("AdminService.ListStorage").storage if s.global_unique_name == name]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_storage_is_listed_as_it_was_added_and_in_order_of_names(site: Site, tmp_path: Path) -> None:
    name = site.storage(nfs={"root_path": f"{tmp_path}/", "key_count_per_file": 3})
    stored = _stored(site, name)
    assert stored.WhichOneof("storage_spec") == "nfs"
    assert (stored.nfs.root_path, stored.nfs.key_count_per_file) == (f"{tmp_path}/", 3)
    names = [s.global_unique_name for s in site.api.ok("AdminService.ListStorage").storage]
    assert names == sorted(names)
    assert "nfs_01" in names  # the built-in one


def test_a_missing_root_directory_is_created(site: Site, tmp_path: Path) -> None:
    site.storage(nfs={"root_path": str(tmp_path / "a" / "b"), "key_count_per_file": 1})
    assert (tmp_path / "a" / "b").is_dir()


NOT_OPENABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a file instead of a directory": ({"nfs": {"root_path": "/dev/null/x"}}, "IO_ERROR"),
    "relative root": ({"nfs": {"root_path": "x"}}, "INVALID_ARGUMENT"),
    "a root that a uri cannot carry": ({"nfs": {"root_path": "/tmp/a?b"}}, "INVALID_ARGUMENT"),
    "local": ({"local": {}}, "UNSUPPORTED"),
    "no spec": ({}, "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("rule", NOT_OPENABLE)
def test_a_storage_that_does_not_open_is_refused_and_not_stored(site: Site, rule: str) -> None:
    spec, code = NOT_OPENABLE[rule]
    name = unique("storage")
    storage = {"global_unique_name": name, **spec}
    assert site.api.refused("AdminService.AddStorage", storage=storage).code == code
    assert _stored(site, name) is None
    assert site.api.refused("AdminService.EnableStorage", storage_unique_name=name).code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("rule", NOT_OPENABLE)
def test_an_update_is_all_or_nothing(site: Site, tmp_path: Path, rule: str) -> None:
    name = site.storage(nfs={"root_path": str(tmp_path), "key_count_per_file": 1})
    instance = site.instance(site.group(name))
    written = site.write(instance, [1])
    before = _stored(site, name)
    spec, code = NOT_OPENABLE[rule]
    storage = {"global_unique_name": name, **spec}
    assert site.api.refused("AdminService.UpdateStorage", storage=storage, force_update=True).code == code
    assert _stored(site, name) == before
    assert site.match(instance, [1]) == written
    assert len(site.write(instance, [2])) == 1


def test_an_update_applies_to_new_blocks_and_old_ones_stay_where_they_are(site: Site, tmp_path: Path) -> None:
    old_root, new_root = tmp_path / "old", tmp_path / "new"
    name = site.storage(nfs={"root_path": str(old_root), "key_count_per_file": 1})
    instance = site.instance(site.group(name))
    (old,) = site.write(instance, [1])
    storage = {"global_unique_name": name, "nfs": {"root_path": str(new_root), "key_count_per_file": 1}}
    site.api.ok("AdminService.UpdateStorage", storage=storage)
    (new,) = site.write(instance, [2])
    assert f"file://{name}{old_root}/" in old["kv"]
    assert f"file://{name}{new_root}/" in new["kv"]
    assert site.match(instance, [1, 2]) == [old, new]
    path = Path(old["kv"].removeprefix(f"file://{name}").rpartition("?")[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(64))
    site.api.ok("RemoveCache", instance_id=instance, block_keys=[1])
    eventually(lambda: not path.exists())


def test_an_update_does_not_enable_a_disabled_storage(site: Site) -> None:
    name = site.storage()
    instance = site.instance(site.group(name))
    site.api.ok("AdminService.DisableStorage", storage_unique_name=name)
    storage = {"global_unique_name": name, "dummy": {"root_path": "new", "key_count_per_file": 1}}
    site.api.ok("AdminService.UpdateStorage", storage=storage)
    code, _ = site.api.refused("StartWriteCache", instance_id=instance, block_keys=[1])
    assert code == "SERVICE_NOT_READY"
    site.api.ok("AdminService.EnableStorage", storage_unique_name=name)
    assert len(site.write(instance, [1])) == 1


def test_a_taken_name_keeps_its_storage(site: Site) -> None:
    name = site.storage(dummy={"root_path": "first", "key_count_per_file": 1})
    storage = {"global_unique_name": name, "dummy": {"root_path": "second"}}
    assert site.api.refused("AdminService.AddStorage", storage=storage).code == "DUPLICATE_ENTITY"
    assert _stored(site, name).dummy.root_path == "first"


def test_enabling_and_disabling_twice_is_fine(site: Site) -> None:
    name = site.storage()
    for rpc in ("EnableStorage", "DisableStorage", "DisableStorage", "EnableStorage"):
        site.api.ok(f"AdminService.{rpc}", storage_unique_name=name)


def test_a_removed_storage_is_listed_no_more_and_its_blocks_are_missing_invariant_1(site: Site) -> None:
    name = site.storage()
    instance = site.instance(site.group(name, site.storage()))
    site.write(instance, [1])
    site.api.ok("AdminService.RemoveStorage", storage_unique_name=name)
    assert _stored(site, name) is None
    assert site.hits(instance, [1]) == []
    assert site.api.refused("AdminService.RemoveStorage", storage_unique_name=name).code == "INVALID_ARGUMENT"


def test_writes_go_to_the_first_available_candidate(site: Site) -> None:
    first, second = site.storage(), site.storage()
    instance = site.instance(site.group("missing", second, first))
    (uris,) = site.write(instance, [1])
    assert uris["kv"].startswith(f"dummy://{second}/")
    site.api.ok("AdminService.DisableStorage", storage_unique_name=second)
    (uris,) = site.write(instance, [2])
    assert uris["kv"].startswith(f"dummy://{first}/")


def test_where_others_can_reach_the_server_files_stay_below_the_allowed_roots_decision_12(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    roots = f"{inside}, {tmp_path / 'manager'}"  # the second one is for the built-in storage
    settings = ("--insecure", "kvcm.service.host=0.0.0.0", f"kvcm.storage.allowed_roots={roots}")
    with manager(tmp_path / "manager", *settings) as process, process.api() as api:
        _assert_only_inside(api, inside, outside)


def test_without_allowed_roots_a_server_for_others_takes_its_own_directory_only_decision_12(tmp_path: Path) -> None:
    settings = ("--insecure", "kvcm.service.host=0.0.0.0")
    with manager(tmp_path / "manager", *settings) as process, process.api() as api:
        _assert_only_inside(api, process.data_dir / "nfs", tmp_path / "out")


def test_a_server_for_others_connects_only_to_allowed_hosts(tmp_path: Path) -> None:
    settings = ("--insecure", "kvcm.service.host=0.0.0.0", "kvcm.storage.allowed_hosts=10.0.0.0/8")
    with manager(tmp_path / "manager", *settings) as process, process.api() as api:
        for host in ("11.0.0.1:50051", "169.254.169.254:80"):
            spec = {"local_hostname": "127.0.0.1", "protocol": "tcp", "metadata_connstring": "P2PHANDSHAKE"}
            mooncake = spec | {"master_service_entry": host}
            storage = {"global_unique_name": unique("storage"), "mooncake": mooncake}
            code, message = api.refused("AdminService.AddStorage", storage=storage)
            assert (code, "allowed_hosts" in message or "allowed hosts: 10.0.0.0/8" in message) == (
                "INVALID_ARGUMENT",
                True,
            )


def _assert_only_inside(api: Api, inside: Path, outside: Path) -> None:
    for root in (outside, inside / ".." / "out", Path(f"{inside}side")):
        storage = {"global_unique_name": unique("storage"), "nfs": {"root_path": str(root)}}
        code, message = api.refused("AdminService.AddStorage", storage=storage)
        assert (code, str(inside) in message) == ("INVALID_ARGUMENT", True)
        assert not outside.exists()
    inside.mkdir(exist_ok=True)
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    storage = {"global_unique_name": unique("storage"), "nfs": {"root_path": str(inside / "link")}}
    assert api.refused("AdminService.AddStorage", storage=storage).code == "INVALID_ARGUMENT"
    storage = {"global_unique_name": unique("storage"), "nfs": {"root_path": str(inside / "sub")}}
    api.ok("AdminService.AddStorage", storage=storage)
