"""Metadata stores of groups as operators see them: calls, commands and offline tools, on a real Redis."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_runner import Commands
from probe_clients import ask
from redis_servers import Standalone
from rest_client import RestClient
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site, unique

from kvcm.store.redis.uri import parse_redis_uri

pytestmark = pytest.mark.e2e

KEYS = list(range(1, 41))


class Deployment(NamedTuple):
    """A deployment with one further store, whose name is `b`."""

    registry_uri: str
    block_uri: str

    @property
    def settings(self) -> tuple[str, str]:
        """Both stores."""
        return self.without_store, f"kvcm.store.block_stores=b={self.block_uri}"

    @property
    def without_store(self) -> str:
        """The store of the registry alone."""
        return f"kvcm.registry_storage.uri={self.registry_uri}"

    @property
    def options(self) -> tuple[str, ...]:
        """Both, for commands."""
        return tuple(part for setting in self.settings for part in ("-e", setting))


@pytest.fixture
def deployment(redis_standalone: Standalone) -> Deployment:
    """An empty one."""
    name = f"test-{secrets.token_hex(8)}"
    return Deployment(redis_standalone.uri(name), redis_standalone.uri(f"{name}-b"))


@pytest.fixture
def process(tmp_path: Path, deployment: Deployment) -> Iterator[ManagerProcess]:
    """A manager that leads."""
    with manager(tmp_path / "m", *deployment.settings) as running:
        with running.api() as api:
            eventually(lambda: api.ok("AdminService.CheckHealth").is_leader)
        yield running


def filled(api: Api) -> tuple[str, str]:
    """Store blocks; return the group and the instance."""
    site = Site(api)
    group = site.group()
    instance_id = site.instance(group)
    checksums = [{"location_specs": [{"name": "kv", "checksum": 2**64 - key}]} for key in KEYS]
    site.finish(instance_id, site.start(instance_id, KEYS), locations=checksums)
    return group, instance_id


def found(api: Api, instance_id: str) -> list[Any]:
    query = {"query_type": "QT_PREFIX_MATCH", "instance_id": instance_id, "block_keys": [*KEYS, 99]}
    return list(api.ok("GetCacheLocation", **query).locations)


def status(api: Api, group: str) -> Any:
    """Return what is said of a group."""
    groups = api.ok("GroupService.ListGroupStore").groups
    return next(each for each in groups if each.name == group)


def wait_until_placed(api: Api, group: str, store: str) -> None:
    eventually(lambda: (known := status(api, group)).store == store and not known.moves)


def test_a_group_moves_there_and_back(process: ManagerProcess) -> None:
    with process.api() as api:
        group, instance_id = filled(api)
        before = found(api, instance_id)
        assert len(before) == len(KEYS)
        stores = {each.name: each for each in api.ok("GroupService.ListGroupStore").stores}
        assert {name: each.is_usable for name, each in stores.items()} == {"registry": True, "b": True}
        for store in ("b", "registry"):
            api.ok("GroupService.MoveInstanceGroup", name=group, store=store)
            wait_until_placed(api, group, store)
            known = status(api, group)
            assert (known.instance_count, known.placed_instance_count, known.fixed_instance_count) == (1, 1, 0)
            assert found(api, instance_id) == before, store
            stores = {each.name: each.instance_count for each in api.ok("GroupService.ListGroupStore").stores}
            assert stores[store] >= 1
    assert [each["store"] for each in process.events("instance_moved")] == ["b", ""]


def test_what_cannot_be_is_refused(process: ManagerProcess) -> None:
    with process.api() as api:
        group = Site(api).group()
        move = "GroupService.MoveInstanceGroup"
        refusals = [
            ({"store": "b"}, "MoveInstanceGroup: {name}"),
            ({"name": group}, "store is required: 'registry', or a block store"),
            ({"name": "nowhere", "store": "b"}, "instance group 'nowhere' does not exist"),
            ({"name": group, "store": "c"}, "store is 'c': kvcm.store.block_stores names 'b'; 'registry' is the store"),
        ]
        for fields, text in refusals:
            refusal = api.refused(move, **fields)
            assert refusal.code == "INVALID_ARGUMENT"
            assert text in refusal.message


def test_a_manager_without_the_store_is_named(tmp_path: Path, process: ManagerProcess, deployment: Deployment) -> None:
    other = ("kvcm.leader_elector.node_id=other", deployment.without_store)
    with manager(tmp_path / "other", *other) as second, process.api() as api, second.api() as others:
        group, instance_id = filled(api)
        move = {"name": group, "store": "b"}
        refusal = api.refused("GroupService.MoveInstanceGroup", **move)
        assert "kvcm.store.block_stores of other does not name it" in refusal.message
        assert "names none" in others.refused("GroupService.MoveInstanceGroup", **move).message
        assert status(api, group).store == "registry"
        assert len(found(others, instance_id)) == len(KEYS)


def test_a_manager_that_does_not_lead_names_the_leader(
    tmp_path: Path, process: ManagerProcess, deployment: Deployment
) -> None:
    with manager(tmp_path / "other", *deployment.settings) as second, process.api() as api, second.api() as others:
        group, instance_id = filled(others)
        leader = api.ok("AdminService.GetManagerClusterInfo").leader_node_id
        others.ok("GroupService.MoveInstanceGroup", name=group, store="b")
        (move,) = status(others, group).moves
        assert (move.copied_blocks, move.failures) == (-1, -1)
        assert move.reason == f"manager {leader} leads and carries it out: ask that one how far it is"
        eventually(lambda: group in [each.name for each in api.ok("GroupService.ListGroupStore").groups])
        for each in (api, others):
            wait_until_placed(each, group, "b")
            assert len(found(each, instance_id)) == len(KEYS)


def test_commands_move_a_group_and_show_where_it_is(process: ManagerProcess, deployment: Deployment) -> None:
    commands = Commands(process)
    with process.api() as api:
        group, instance_id = filled(api)
        assert "store registry" in commands.ok("group", "show", group)
        commands.ok("group", "move", group, "--to", "b", "--wait")
        assert status(api, group).store == "b"
        assert commands.json("group", "show", group)["block_store"] == "b"
        shown = commands.json("group", "stores")
        assert [each["name"] for each in shown["stores"]] == ["registry", "b"]
        (known,) = (each for each in shown["groups"] if each["name"] == group)
        assert (known["store"], known["placed_instance_count"], known["moves"]) == ("b", 1, [])
        table = commands.ok("group", "stores")
        assert group in table
        assert "usable" in table
        new = unique("group")
        create = ("group", "create", new, "--storage", "nfs_01", "--quota", "1GiB", "--store")
        commands.ok(*create, "b")
        assert status(api, new).store == "b"
        assert "'c'" in commands.run("group", "create", unique("group"), *create[3:], "c").stderr
        assert len(found(api, instance_id)) == len(KEYS)


def test_resources_move_a_group_and_show_where_it_is(process: ManagerProcess) -> None:
    client = RestClient(process.address.admin_http)
    with process.api() as api:
        group, _ = filled(api)
        path = f"/v1/groups/{group}/store"
        assert client.get(path).body["store"] == "registry"
        moving = client.put(path, {"store": "b"})
        assert (moving.status, moving.body["store"]) == (202, "b")
        assert {move["target"] for move in moving.body["moves"]} <= {"b"}
        eventually(lambda: not client.get(path).body["moves"])
        assert client.get(path).body["placed_instance_count"] == 1
        assert [each["name"] for each in client.items("/v1/stores")] == ["b", "registry"]
        assert client.put(path, {"store": "c"}).status == 400
        assert client.put("/v1/groups/nowhere/store", {"store": "b"}).status == 404
        assert client.get("/v1/groups/nowhere/store").status == 404
    client.connection.close()


def test_a_store_that_is_away_is_reported(tmp_path: Path, redis_standalone: Standalone) -> None:
    name = f"test-{secrets.token_hex(8)}"
    away = "redis://127.0.0.1:9/?cluster_name=away"
    deployment = Deployment(redis_standalone.uri(name), away)
    with manager(tmp_path / "m", *deployment.settings) as process, process.api() as api:
        group, instance_id = filled(api)
        (store,) = (each for each in api.ok("GroupService.ListGroupStore").stores if each.name == "b")
        assert not store.is_usable
        assert "127.0.0.1:9" in store.reason
        api.ok("GroupService.MoveInstanceGroup", name=group, store="b")
        eventually(lambda: any(move.failures for move in status(api, group).moves))
        (move,) = status(api, group).moves
        assert (move.instance_id, move.source, move.target) == (instance_id, "registry", "b")
        assert "tried again in" in move.reason
        (alert,) = (each for each in api.ok("InsightService.ListAlerts").alerts if each.name == "KvcmBlockStoreUnsound")
        assert "127.0.0.1:9" in alert.reason
        metrics = ask(process.address.admin_http, "/metrics").body.decode()
        assert 'kvcm_block_store_usable{store="b"} 0' in metrics
        assert "kvcm_misplaced_instances 1" in metrics
        shown = Commands(process).ok("group", "stores")
        assert f"group {group}: " in shown
        assert len(found(api, instance_id)) == len(KEYS)


# ── offline tools ──


def _verified(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = run_kvcm(directory, "index", "verify", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def moved(process: ManagerProcess) -> tuple[str, str, str]:
    """A stopped manager's group and instance in `b`, and an instance in the store of the registry."""
    with process.api() as api:
        group, instance_id = filled(api)
        _, stays = filled(api)
        api.ok("GroupService.MoveInstanceGroup", name=group, store="b")
        wait_until_placed(api, group, "b")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    return group, instance_id, stays


def test_both_stores_are_verified_and_mended(
    tmp_path: Path, moved: tuple[str, str, str], deployment: Deployment, redis_standalone: Standalone
) -> None:
    code, report = _verified(tmp_path, *deployment.options)
    assert (code, report["clean"], report["findings"]) == (0, True, [])
    assert report["looked_at"]["records"] == 2 * len(KEYS)
    own, other = (parse_redis_uri(uri).cluster_name for uri in deployment)
    with redis_standalone.server.admin() as client:
        (usage,) = client.keys(f"{other}:u*")
        client.hincrby(usage, "6/x", 111)
        client.zadd(usage.replace(b":u{", b":p{"), {b"12345678": 9e9})
        (index,) = client.keys(f"{other}:x*")
        client.hdel(index, *list(client.hkeys(index))[:3])
        # A copy that a move left in the other store, and blocks of an instance that is gone.
        client.copy(usage, usage.replace(other.encode(), own.encode(), 1))
        client.hset(f"{other}:u{{7.0}}", "6/x", 1)
    code, report = _verified(tmp_path, *deployment.options)
    assert code == 1
    assert {"block", "usage", "stray"} <= {each["check"] for each in report["findings"]}
    wheres = [each["where"] for each in report["findings"] if each["check"] == "stray"]
    assert any("in store 'registry'" in where for where in wheres)
    assert "registration 7 in store 'b'" in wheres
    assert _verified(tmp_path, "--repair", *deployment.options)[0] == 0
    assert _verified(tmp_path, *deployment.options)[1]["clean"]
    with manager(tmp_path / "m", *deployment.settings) as process, process.api() as api:
        assert [len(found(api, instance_id)) for instance_id in moved[1:]] == [len(KEYS), len(KEYS)]


def test_a_store_that_the_settings_lack_is_named(
    tmp_path: Path, moved: tuple[str, str, str], deployment: Deployment
) -> None:
    done = run_kvcm(tmp_path, "index", "verify", "-e", deployment.without_store)
    assert done.returncode not in {0, 1}
    assert "kvcm.store.block_stores" in done.stderr


def test_an_export_comes_into_any_deployment(
    tmp_path: Path, moved: tuple[str, str, str], deployment: Deployment, redis_standalone: Standalone
) -> None:
    group, *instances = moved
    file = tmp_path / "backup"
    done = run_kvcm(tmp_path, "index", "export", str(file), *deployment.options)
    assert done.returncode == 0, done.stderr
    names = [f"test-{secrets.token_hex(8)}" for _ in range(4)]
    plain = Deployment(redis_standalone.uri(names[0]), "")
    done = run_kvcm(tmp_path, "index", "import", str(file), "-e", plain.without_store)
    assert done.returncode == 0, done.stderr
    with manager(tmp_path / "plain", plain.without_store) as process, process.api() as api:
        assert [len(found(api, instance_id)) for instance_id in instances] == [len(KEYS), len(KEYS)]
    new = Deployment(*(redis_standalone.uri(name) for name in names[1:3]))
    done = run_kvcm(tmp_path, "index", "import", str(file), *new.options)  # no group has a store yet
    assert done.returncode == 0, done.stderr
    with manager(tmp_path / "new", *new.settings) as process, process.api() as api:
        assert status(api, group).store == "registry"
        api.ok("GroupService.MoveInstanceGroup", name=group, store="b")
        wait_until_placed(api, group, "b")
        api.ok("AdminService.RemoveInstance", instance_id=instances[0])
        with redis_standalone.server.admin() as client:
            eventually(lambda: not client.keys(f"{names[2]}:x*"))  # its blocks are forgotten
    done = run_kvcm(tmp_path, "index", "import", str(file), *new.options)  # now the group has one
    assert done.returncode == 0, done.stderr
    with manager(tmp_path / "new", *new.settings) as process, process.api() as api:
        known = status(api, group)
        assert (known.store, known.placed_instance_count, list(known.moves)) == ("b", 1, [])
        assert [len(found(api, instance_id)) for instance_id in instances] == [len(KEYS), len(KEYS)]
    assert _verified(tmp_path, *new.options)[1]["clean"]
