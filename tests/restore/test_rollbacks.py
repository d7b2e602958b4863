"""Metadata older than packed files: no block is served with another's bytes, and none is lost that is still right."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from drill_stores import kvcm
from json_api import JsonApi
from manager_site import Manager, running
from mixed_load import bytes_of, bytes_stored, store_bytes
from ports import free_port
from redis_servers import RedisServer, cluster, is_replica_in_step, sentinel, standalone
from waiting import until

from kvcm.model.uri import LocationUri

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_CLUSTER = {"kvcm.cluster_id": "one", "kvcm.storage.slot_reuse_grace_ms": "1"}
_SURVIVORS = {7, 8, *range(9, 17)}


@dataclass
class Packed:
    """A manager with blocks of four slots a file.

    Attributes:
        wrong: blocks that were served with other bytes than were written.
    """

    manager: Manager
    root: Path
    wrong: list[int] = field(default_factory=list)

    @property
    def api(self) -> JsonApi:
        return JsonApi(self.manager)

    def set_up(self) -> None:
        """Configure it, and write blocks 1 to 16 into four files."""
        self.api.rest("PUT", "storages/disk", {"nfs": {"root_path": f"{self.root}/", "key_count_per_file": 4}})
        reclaim = {"delay_before_delete_ms": 0}
        self.api.rest("PUT", "groups/team", {
            "storage_candidates": ["disk"], "global_quota_group_name": "q", "quota": {"capacity": 1 << 24},
            "cache_config": {"reclaim_strategy": reclaim},
        })  # fmt: skip
        self.api.data(
            "RegisterInstance", instance_id="i", instance_group="team", block_size=4,
            location_spec_infos=[{"name": "kv", "size": "512"}], model_deployment={"model_name": "m", "dtype": "bf16"},
        )  # fmt: skip
        for first in (1, 5, 9, 13):
            self.write(range(first, first + 4))

    def write(self, keys: range) -> list[str]:
        """Write blocks; return where they lie."""
        started = self.api.data("StartWriteCache", instance_id="i", block_keys=list(map(str, keys)))
        uris = [place["location_specs"][0]["uri"] for place in started["locations"]]
        for uri in uris:
            store_bytes(uri)
        session = started["write_session_id"]
        offset = {"offset": len(uris)}
        self.api.data("FinishWriteCache", instance_id="i", write_session_id=session, success_blocks=offset)
        return uris

    def go_on(self) -> None:
        """Remove blocks 1 to 6, the last two from a file that stays, and give the slots of these to others."""
        before = self.served()
        self.api.data("RemoveCache", instance_id="i", block_keys=list(map(str, range(1, 7))))
        until(lambda: all(bytes_stored(before[key]) != bytes_of(before[key]) for key in range(1, 7)))
        keys, reused = iter(range(101, 200)), list[str]()

        def reuse() -> bool:
            key = next(keys)
            reused.extend(uri for uri in self.write(range(key, key + 1)) if "location=" in uri)
            return len(reused) >= 2

        until(reuse)
        files = {LocationUri.parse(before[key]).path for key in (5, 6)}
        assert {LocationUri.parse(uri).path for uri in reused} == files

    def served(self) -> dict[int, str]:
        """Return where the blocks are that are served, and note those with wrong bytes."""
        keys = [*range(1, 17), *range(101, 200)]
        answer = self.api.data(
            "GetCacheLocation", instance_id="i", query_type="QT_BATCH_GET", block_keys=list(map(str, keys))
        )
        uris = [place["location_specs"][0]["uri"] for place in answer["locations"]]
        found = {key: uri for key, uri in zip(keys, uris, strict=True) if uri}
        self.wrong += [key for key, uri in found.items() if bytes_stored(uri) != bytes_of(uri)]
        return found

    def assert_survived(self) -> None:
        """Only blocks whose slots are their own are served, and soon all of them; the storage is verified for good."""
        until(lambda: self.try_served() == _SURVIVORS)
        until(lambda: "storage_verified" in self.manager.log.read_text())
        self.write(range(201, 205))
        self.manager.kill()
        self.manager.start()
        self.assert_certain(_SURVIVORS)
        until(lambda: "KvcmStoreLostChanges" in self.alerts())  # also after the restart

    def assert_certain(self, blocks: set[int]) -> None:
        """These blocks are served, and the storage was never doubted."""
        assert {*self.served()} == blocks
        assert "storage_unverified" not in self.events()
        assert not self.wrong

    def try_served(self) -> set[int]:
        """Return the blocks that are served, none while the store is away."""
        try:
            return {*self.served()}
        except AssertionError:
            return set()

    def alerts(self) -> set[str]:
        return {alert["name"] for alert in self.api.rest("GET", "alerts")["items"]}

    def events(self) -> list[str]:
        return [event["event"] for event in self.manager.events()]


def packed(folder: Path, **settings: Any) -> Packed:
    return Packed(Manager(folder / "manager", {**_CLUSTER, **settings}), folder / "blocks")


def on_disk(folder: Path) -> Packed:
    return packed(folder, **{"kvcm.data_dir": str(folder / "data")})


@pytest.mark.parametrize("put_back", ["data", "blocks", ""])
def test_a_directory_that_is_put_back_from_a_copy(tmp_path: Path, put_back: str) -> None:
    """That of the metadata, that of the packed files, or none."""
    world = on_disk(tmp_path)
    with running(world.manager):
        world.set_up()
        world.manager.stop()
        if put_back:
            shutil.copytree(tmp_path / put_back, tmp_path / "copy")
        world.manager.start()
        world.go_on()
        before = {*world.served()}
        world.manager.kill()
        if put_back:
            shutil.rmtree(tmp_path / put_back)
            shutil.move(tmp_path / "copy", tmp_path / put_back)
            world.manager.spawn()
            until(lambda: "storage_unverified" in world.events())
            world.manager.kill()  # before it verified anything, or in the middle of that
        world.manager.start()
        world.assert_survived() if put_back else world.assert_certain(before)


def test_an_export_that_is_imported_after_the_storage_went_on(tmp_path: Path) -> None:
    world, other = on_disk(tmp_path), tmp_path / "other"
    with running(world.manager):
        world.set_up()
        world.manager.stop()
        backup, options = str(tmp_path / "backup"), ["--data-dir"]
        assert kvcm("index", "export", backup, *options, str(tmp_path / "data")).returncode == 0
        world.manager.start()
        world.go_on()
        world.manager.stop()
        assert kvcm("index", "import", backup, *options, str(other)).returncode == 0
        # Another cluster id: beside its own files there is no witness, and the import alone knows.
        world.manager.settings |= {"kvcm.data_dir": str(other), "kvcm.cluster_id": "two"}
        world.manager.start()
        world.assert_survived()


@pytest.mark.parametrize("is_old", [True, False])
def test_a_redis_that_loads_a_dump(tmp_path: Path, *, is_old: bool) -> None:
    """The manager goes on meanwhile."""
    with standalone(tmp_path / "redis") as made:
        world, server = packed(tmp_path, **{"kvcm.registry_storage.uri": made.uri("rolled")}), made.server
        with running(world.manager):
            world.set_up()
            save(server)
            dump = server.directory / "dump.rdb"
            shutil.copy(dump, tmp_path / "old.rdb")
            world.go_on()
            save(server)
            before = {*world.served()}
            server.kill()
            if is_old:
                shutil.copy(tmp_path / "old.rdb", dump)
            server.restart()
            if is_old:
                world.assert_survived()
            else:
                until(lambda: world.try_served() == before)
                world.assert_certain(before)


def save(server: RedisServer) -> None:
    with server.admin() as admin:
        admin.save()


def test_a_failover_to_a_replica_that_lags(tmp_path: Path) -> None:
    with sentinel(tmp_path / "redis") as made:
        world = packed(tmp_path, **{"kvcm.registry_storage.uri": made.uri("rolled", timeout_ms=2000)})
        master, replica = made.servers
        with running(world.manager):
            world.set_up()
            with master.admin() as admin:
                assert admin.wait(1, 20_000) == 1
            for each in made.sentinels:
                each.pause()
            with replica.admin() as admin:
                admin.execute_command("REPLICAOF", "127.0.0.1", free_port())
            world.go_on()
            master.kill()
            for each in made.sentinels:
                each.resume()
            made.give_up_soon()
            until(lambda: made.master is replica)
            world.assert_survived()


def test_a_failover_of_one_cluster_node_to_a_replica_that_lags(tmp_path: Path) -> None:
    with cluster(tmp_path / "redis", replicas=1) as made:
        world = packed(tmp_path, **{"kvcm.registry_storage.uri": made.uri("rolled", timeout_ms=2000)})
        with running(world.manager):
            world.set_up()
            for replica in made.nodes[3:]:
                until(lambda replica=replica: is_replica_in_step(replica))
                replica.pause()
            for master in made.nodes[:3]:
                with master.admin() as admin:
                    admin.execute_command("CLIENT", "KILL", "TYPE", "replica")
            world.go_on()
            made.nodes[0].kill()
            for replica in made.nodes[3:]:
                replica.resume()
            made.give_up_soon()
            until(lambda: "storage_verified" in world.events())
            until(lambda: world.try_served() >= _SURVIVORS)
            assert not world.wrong
