"""The restore drill as printed: one store is exported, restored as another kind, and wiped; nothing is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill_stores import DrillStore, kvcm, run_drill
from manager_site import running
from redis_servers import Standalone
from waiting import until
from world import World

from kvcm.model.uri import LocationUri

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("from_kind", "to_kind"), [("rocksdb", "redis"), ("redis", "rocksdb")])
def test_a_wiped_store_comes_back_on_another_kind_of_store(
    from_kind: str, to_kind: str, tmp_path: Path, redis_standalone: Standalone
) -> None:
    source, target = (DrillStore(kind, tmp_path, redis_standalone) for kind in (from_kind, to_kind))
    world = World(tmp_path / "storages")
    with running(source.manager):
        world.set_up(source.manager, is_draining=False)
        world.write(source.manager, range(41, 61))
        world.pin(source.manager, list(range(1, 31)))
        before = world.seen(source.manager)
        assert all(value for name, value in before.items() if name != "tasks")
        assert source.manager.stop() == 0
    drilled = run_drill([source.name, target.name, "backup"], tmp_path)
    assert drilled.returncode == 0, drilled.stdout + drilled.stderr
    assert "restored and checked in" in drilled.stdout
    source.wipe()
    with running(target.manager):
        until(lambda: len(world.places(target.manager)) == len(world.written), "blocks are verified after an import")
        assert world.seen(target.manager) == before
        world.write(target.manager, range(61, 71))
        world.unpin(target.manager, 30)
        assert sorted(pin for pin, _ in world.seen(target.manager)["pins"]) == ["at 10"]
        _assert_lost_bytes_are_found(world, target)
        assert target.manager.stop() == 0
    assert target.manager.failures() == source.manager.failures() == []
    assert kvcm("index", "verify", *target.options).returncode == 0


def _assert_lost_bytes_are_found(world: World, target: DrillStore) -> None:
    """Storages changed after the snapshot: a scrub drops the metadata of bytes that are gone."""
    places = world.places(target.manager)
    gone = Path(LocationUri.parse(places[70]).path)
    gone.unlink()
    admin = f"http://127.0.0.1:{target.manager.settings['kvcm.service.admin_http_port']}"
    key = target.manager.settings["kvcm.auth.admin_key_file"]
    looked = kvcm("storage", "garbage", "--check-bytes", "--delete", "--manager", admin, "--key-file", key)
    assert looked.returncode == 0, looked.stderr
    left = {block: uri for block, uri in places.items() if LocationUri.parse(uri).path != str(gone)}
    assert 0 < len(left) < len(places)
    assert world.places(target.manager) == left


def test_a_drill_ends_where_something_is_wrong(tmp_path: Path, redis_standalone: Standalone) -> None:
    assert run_drill([], tmp_path).returncode == 2
    nothing = run_drill([str(tmp_path / "nowhere"), str(tmp_path / "to"), "backup"], tmp_path)
    assert nothing.returncode == 2
    assert "nowhere" in nothing.stderr
    assert not (tmp_path / "to").exists()
