"""One release serves the blocks that the other stored: forwards, and back again after new writes."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from manager_site import Manager, running
from previous_release import Release
from redis_servers import Standalone
from store_audit import verified
from world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(params=["rocksdb", "redis"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Manager:
    settings = {
        "kvcm.auth.mode": "required",
        "kvcm.auth.admin_key_file": str(tmp_path / "admin.key"),
        "kvcm.service.host": "127.0.0.1",
        "kvcm.storage.allowed_roots": str(tmp_path),
        "kvcm.data_dir": str(tmp_path / "data"),
    }
    if request.param == "redis":
        server: Standalone = request.getfixturevalue("redis_standalone")
        settings["kvcm.registry_storage.uri"] = server.uri(f"upgrade-{secrets.token_hex(8)}")
    return Manager(tmp_path / "manager", settings)


def test_forwards_and_back_again(manager: Manager, previous: Release, tmp_path: Path) -> None:
    world = World(tmp_path / "storages")
    manager.code = previous.code
    with running(manager):
        world.set_up(manager)
        first, second = (world.begin(manager, keys) for keys in (range(41, 51), range(51, 61)))
        before = world.seen(manager)
        assert all(before.values()), "there is something of everything"
        _become(manager, None)  # this release
        assert world.seen(manager) == before
        world.finish(manager, first)  # it was begun with the other one
        world.write(manager, range(61, 71))
        world.pin(manager, list(range(1, 21)))
        third = world.begin(manager, range(71, 81))
        before = world.seen(manager)
        _become(manager, previous.code)  # it did not go well
        assert world.seen(manager) == before
        world.finish(manager, second)
        world.finish(manager, third)
        world.write(manager, range(81, 91))
        before = world.seen(manager)
        _become(manager, None)
        assert world.seen(manager) == before
        assert manager.stop() == 0
    assert manager.failures() == []
    assert verified(manager.store_options) == []
    assert verified(manager.store_options, previous.environment) == []


def _become(manager: Manager, code: Path | None) -> None:
    assert manager.stop() == 0
    manager.code = code
    manager.start()
