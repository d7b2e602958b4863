"""Invariants 3 and 4 over drains: a storage that is drained under load loses its own blocks, no others.

Engines read and write all the time; each group prefers another of both storages. What an engine begins counts in the
phase in which it began, so what it does after an answer of the command line is never counted before it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from engine_figures import AWAY, GROUPS, STAYS, EngineFigures, added
from google.protobuf import json_format
from manager_site import GroupPlan, Manager, running
from outage_engine import EngineSettings
from outage_engine import command_of as engine_command
from outage_storages import file_storage
from reclaim_site import command
from site_operator import command_of as operator_command
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import WriteGrant
from kvcm.connectors.transfer import TransferEngine, TransferItem
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

sys.path.insert(0, str(Path(__file__).parents[1] / "mooncake"))
from mooncake_rig import Process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_DELAY_MS = 1000  # longer than any engine takes between a question and its load
_GROUP, _INSTANCE = "away-first", "own"
_SPEC = LocationSpecInfo("kv", 4096)
_WRITTEN = range(200, 208)


class World:
    """A manager, engines that work, and one more engine in this process that does one thing at a time."""

    def __init__(self, directory: Path, manager: Manager, watcher: Process, engines: list[Process]) -> None:
        self.directory = directory
        self.manager = manager
        self.watcher = watcher
        self.engines = engines
        self.client = ManagerClient(manager.address(), _INSTANCE)
        registration = self.client.register_instance(_GROUP, 4, [_SPEC], ModelDeployment("m", "f"), timeout_seconds=20)
        assert registration.ok, registration
        self.transfers = TransferEngine.for_storages(registration.storages)

    def close(self) -> None:
        self.transfers.close()
        self.client.close()

    def enter(self, phase: str) -> None:
        for engine in self.engines:
            engine.ask("enter", phase=phase)

    def finish_earlier(self) -> None:
        for engine in self.engines:
            engine.ask("finish_earlier")

    def settle(self) -> None:
        """Return when all engines have noticed that the manager is there again, for each of their instances."""
        for engine in self.engines:
            until(lambda e=engine: e.ask("is_answered"), "an engine is answered for each of its instances")

    def work(self, *storages: str) -> None:
        """Return when every engine has read and written these storages in this phase."""
        for engine in self.engines:
            for storage in storages:
                until(lambda e=engine, s=storage: e.ask("works_with", storage=s), f"an engine works with {storage}")

    def kvcm(self, *words: str) -> str:
        done = command(self.manager, "storage", *words)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    def drain(self) -> dict[str, Any] | None:
        """Return what the command line lists of the storage."""
        drains = {each["storage_unique_name"]: each for each in json.loads(self.kvcm("drains", "--json"))["drains"]}
        found = drains.get(AWAY)
        assert found is None or isinstance(found, dict)
        return found

    def used(self) -> dict[str, int]:
        found = self.watcher.ask("used")
        assert isinstance(found, dict)
        return found

    def files(self, storage: str) -> list[Path]:
        """Return the files of a storage but probes."""
        paths = (self.directory / storage).rglob("*")
        return [path for path in paths if path.is_file() and ".kvcm-" not in path.name]

    def start(self, keys: range) -> WriteGrant:
        grant = self.client.start_write(keys, session_seconds=120, timeout_seconds=40)
        assert grant is not None
        assert len(grant.locations) == len(keys)
        return grant

    def finish(self, keys: range, grant: WriteGrant) -> None:
        items = [
            TransferItem(place.uris[_SPEC.name], [memoryview(_content(key))])
            for key, place in zip(keys, grant.locations, strict=True)
        ]
        assert all(result.ok for result in self.transfers.save(items, 40))
        assert self.client.finish_write(grant.session_id, [True] * len(keys), timeout_seconds=40)

    def seen(self) -> dict[str, EngineFigures]:
        """Return the figures of all engines by phase."""
        reported = [engine.ask("report") for engine in self.engines]
        names = {phase for phases in reported for phase in phases}
        return {
            name: reduce(added, (EngineFigures(**phases.get(name, {})) for phases in reported))
            for name in sorted(names)
        }


def _content(key: int) -> bytes:
    return key.to_bytes(8, "little") * (_SPEC.size // 8)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Both storages are filled, and two engines work."""
    settings = {"kvcm.data_dir": str(tmp_path / "data"), "kvcm.storage.allowed_roots": str(tmp_path)}
    manager = Manager(tmp_path / "manager", settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(manager))
        started: list[Process] = []

        def start(words: list[str]) -> Process:
            started.append(Process(words, tmp_path / "processes.log"))
            stack.callback(started[-1].kill)
            return started[-1]

        watcher = start(operator_command(manager.address("admin_rpc_port")))
        storages = [json_format.MessageToJson(file_storage(name, tmp_path / name)) for name in (AWAY, STAYS)]
        watcher.ask("set_up", storages=storages, groups=[_group(*each) for each in GROUPS.items()])
        engines = [
            start(engine_command(EngineSettings(manager.address(), number, 20.0, 0.02, 0.05, number)))
            for number in range(2)
        ]
        world = World(tmp_path, manager, watcher, engines)
        stack.callback(world.close)
        for engine in engines:
            engine.ask("seed", chains=15)
        world.enter("before")
        for engine in engines:
            engine.ask("begin")
        world.work(AWAY, STAYS)
        yield world
    assert manager.failures() == []


def _group(name: str, candidates: list[str]) -> str:
    group = GroupPlan(name, (), 1 << 33, delay_ms=_DELAY_MS).group
    group.storage_candidates[:] = candidates
    group.cache_config.reclaim_strategy.storage_unique_name = candidates[0]
    return json_format.MessageToJson(group)


def test_a_drain_under_load_goes_on_after_a_kill_and_can_be_ended(world: World) -> None:
    assert world.used()[AWAY] > 0
    grant = world.start(_WRITTEN)  # keeps the drain from its end
    assert {place.uris[_SPEC.name].storage for place in grant.locations} == {AWAY}
    world.kvcm("drain", AWAY)
    world.enter("draining")
    world.work(STAYS)
    found = world.drain()
    assert found is not None
    assert (found["state"], "being written" in found["reason"]) == ("DRAIN_RUNNING", True), found
    world.enter("killed")
    world.finish_earlier()
    world.manager.kill()
    world.manager.start()
    world.work(STAYS)
    world.settle()
    world.enter("restarted")
    world.finish_earlier()
    world.work(STAYS)
    assert world.watcher.ask("drain", storage=AWAY)["state"] == "DRAIN_RUNNING"
    world.finish(_WRITTEN, grant)  # a session from before the drain ends well
    done = {"state": "DRAIN_DONE", "reason": ""}
    until(lambda: world.watcher.ask("drain", storage=AWAY) == done, "the drain is done")
    assert (world.used().get(AWAY, 0), world.files(AWAY)) == (0, [])
    world.enter("cancelling")
    world.kvcm("drain", "--cancel", AWAY)
    world.enter("cancelled")
    world.work(AWAY, STAYS)
    seen = _ended(world)
    for phase in ("draining", "killed", "restarted"):
        assert (phase, seen[phase].accepted.get(AWAY, 0)) == (phase, 0)
        assert seen[phase].accepted[STAYS] > 0
    _assert_undisturbed({phase: figures for phase, figures in seen.items() if phase != "killed"})


def _ended(world: World) -> dict[str, EngineFigures]:
    """End the work, and let every engine read all that it ever wrote."""
    for engine in world.engines:
        engine.ask("end")
    world.enter("audit")
    for engine in world.engines:
        engine.ask("audit")
    seen = world.seen()
    for phase, figures in seen.items():
        assert (phase, figures.wrong, figures.errors) == (phase, [], [])
    return seen


def _assert_undisturbed(seen: dict[str, EngineFigures]) -> None:
    """Every block on the other storage is found, and no engine fails or gets other bytes."""
    assert seen["audit"].asked[STAYS] > 0
    for phase, figures in seen.items():
        assert (phase, figures.failed_requests) == (phase, [])
        assert (phase, figures.hit.get(STAYS, 0)) == (phase, figures.asked.get(STAYS, 0))
