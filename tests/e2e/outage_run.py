"""Two storages, and one goes away while engines read and write: what they notice, phase by phase.

Everything is a process of its own and none of them is started again: one manager, engines that move bytes, one that
generates tokens. Each block lies on one of both storages; half of the writes prefer the one that goes away.

Phases: `seed` fills, `before`; `unnoticed` from the outage until the manager shows the storage as DOWN; `down`;
`returning` from its return until the manager shows it as UP; `settling` until every engine has read and written there
again; `after`. Where bytes are lost with the storage, `restored`: engines write again what they miss. `audit`: each
engine reads everything it ever wrote.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from engine_figures import AWAY, GROUPS, STAYS, EngineFigures, TokenFigures, added
from google.protobuf import json_format
from manager_site import GroupPlan, Manager, running
from outage_engine import EngineSettings
from outage_engine import command_of as engine_command
from outage_storages import OUTAGES, Outage, file_storage
from reclaim_site import command
from site_operator import command_of as operator_command
from waiting import until

sys.path.insert(0, str(Path(__file__).parents[1] / "mooncake"))
from mooncake_rig import Process

_GENERATOR = str(Path(__file__).with_name("outage_generator.py"))  # importing it would take seconds, and torch
PHASES = ("seed", "before", "unnoticed", "down", "returning", "settling", "after", "restored", "audit")
PROBE_SECONDS = {"interval": 0.2, "timeout": 1.0}
_DEADLINE_SECONDS = 2.0  # of loads and saves
_QUOTA_BYTES = 1 << 33
_READ_PAUSE_SECONDS, _WRITE_PAUSE_SECONDS = 0.05, 0.15


@dataclass(slots=True)
class OutageReport:
    """What an outage meant.

    Attributes:
        keeps_bytes: what lay on the storage was there again afterwards.
        engines: by phase, of all engines that move bytes.
        tokens: by phase, of the one that generates.
        down_seconds: from the outage until the manager showed it.
        up_seconds: from the return until the manager showed it.
        settled_seconds: from then until every engine had read and written there again.
        wrong: what else was not as it should be.
    """

    keeps_bytes: bool
    engines: dict[str, EngineFigures] = field(default_factory=dict)
    tokens: dict[str, TokenFigures] = field(default_factory=dict)
    down_seconds: float = 0.0
    up_seconds: float = 0.0
    settled_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def run_outage(directory: Path, name: str, seconds: float, engines: int = 3, seed: int = 1) -> OutageReport:
    """Let a storage go away and come back.

    Args:
        directory: for everything.
        name: of the outage, see OUTAGES.
        seconds: of the phases before, down and after, each.
        engines: that move bytes.
        seed: of what they read.
    """
    with contextlib.ExitStack() as stack:
        outage = stack.enter_context(OUTAGES[name](directory))
        stack.enter_context(outage.entered())
        manager = Manager(directory / "manager", _settings(directory))
        stack.enter_context(running(manager))
        fleet = stack.enter_context(_started(manager, outage, directory, engines, seed))
        stack.callback(outage.come_back)  # first of all: a process that hangs in it cannot be ended
        return _Course(manager, fleet, outage).run(seconds)


def _settings(directory: Path) -> dict[str, str]:
    probes = {f"kvcm.storage.probe_{name}_ms": f"{seconds * 1000:.0f}" for name, seconds in PROBE_SECONDS.items()}
    return {"kvcm.data_dir": str(directory / "data"), **probes}


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The processes beside the manager."""

    watcher: Process
    engines: Sequence[Process]
    generator: Process

    @property
    def workers(self) -> list[Process]:
        return [*self.engines, self.generator]

    def ask(self, call: str, **arguments: Any) -> list[Any]:
        """Ask every engine."""
        return [each.ask(call, **arguments) for each in self.workers]

    def seed(self, chains: int) -> None:
        """Let everybody write, and each know what the others wrote."""
        known = [engine.ask("seed", chains=chains) for engine in self.engines]
        self.generator.ask("seed")  # last: it is still importing
        for number, engine in enumerate(self.engines):
            others = [chain for other, chains in enumerate(known) if other != number for chain in chains]
            engine.ask("know", chains=others)

    def kill(self) -> None:
        """End all."""
        for each in (self.watcher, *self.workers):
            each.kill()


@contextlib.contextmanager
def _started(manager: Manager, outage: Outage, directory: Path, engines: int, seed: int) -> Iterator[_Fleet]:
    address, log = manager.address(), directory / "engines.log"
    started: list[Process] = []

    def start(command_line: Sequence[str]) -> Process:
        started.append(Process(command_line, log))
        return started[-1]

    try:
        watcher = start(operator_command(manager.address("admin_rpc_port")))
        watcher.ask("set_up", storages=_storages(outage, directory), groups=_groups())
        pauses = (_READ_PAUSE_SECONDS, _WRITE_PAUSE_SECONDS)
        settings = [
            EngineSettings(address, number, _DEADLINE_SECONDS, *pauses, seed + number) for number in range(engines)
        ]
        yield _Fleet(
            watcher, [start(engine_command(each)) for each in settings], start([sys.executable, _GENERATOR, address])
        )
    finally:
        for process in started:
            process.popen.kill()
        for process in started:
            process.kill()


def _storages(outage: Outage, directory: Path) -> list[str]:
    return [json_format.MessageToJson(each) for each in (outage.config, file_storage(STAYS, directory / "stays"))]


def _groups() -> list[str]:
    texts = []
    for name, candidates in GROUPS.items():
        group = GroupPlan(name, (), _QUOTA_BYTES).group
        group.storage_candidates[:] = candidates
        group.cache_config.reclaim_strategy.storage_unique_name = candidates[0]
        texts.append(json_format.MessageToJson(group))
    return texts


class _Course:
    """One outage from its beginning to its end."""

    def __init__(self, manager: Manager, fleet: _Fleet, outage: Outage) -> None:
        self._manager = manager
        self._fleet = fleet
        self._outage = outage
        self._report = OutageReport(outage.keeps_bytes)

    def run(self, seconds: float) -> OutageReport:
        """Go through all phases."""
        self._fleet.seed(chains=int(20 + 4 * seconds))
        self._fleet.ask("enter", phase="before")
        self._fleet.ask("begin")
        self._pass(seconds)
        self._go_away(seconds)
        self._come_back(seconds)
        self._fleet.ask("end")
        self._audit()
        self._collect()
        return self._report

    def _go_away(self, seconds: float) -> None:
        self._fleet.ask("enter", phase="unnoticed")
        for engine in self._fleet.engines:
            engine.ask("finish_earlier")
        begin = time.monotonic()
        self._outage.leave()
        until(lambda: self._health() == "SH_DOWN", "the manager shows the storage as down")
        self._report.down_seconds = time.monotonic() - begin
        self._fleet.ask("enter", phase="down")
        self._check_command_line("SH_DOWN")
        self._pass(seconds)

    def _come_back(self, seconds: float) -> None:
        self._fleet.ask("enter", phase="returning")
        self._outage.come_back()
        begin = time.monotonic()
        until(lambda: self._health() == "SH_UP", "the manager shows the storage as up")
        self._report.up_seconds = time.monotonic() - begin
        self._fleet.ask("enter", phase="settling")
        begin = time.monotonic()
        engines = self._fleet.engines
        until(lambda: all(each.ask("works_with", storage=AWAY) for each in engines), "all engines are back")
        self._report.settled_seconds = time.monotonic() - begin
        self._fleet.ask("enter", phase="after")
        self._check_command_line("SH_UP")
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        """Let time pass, and more of it until every engine did something in this phase."""
        time.sleep(seconds)
        until(lambda: all(self._fleet.ask("has_worked")), "all engines did something")

    def _audit(self) -> None:
        for engine in self._fleet.engines:
            if not self._outage.keeps_bytes:
                engine.ask("enter", phase="restored")
                engine.ask("audit")  # reports missing blocks, so that they can be written again
                engine.ask("restore")
            engine.ask("enter", phase="audit")
            engine.ask("audit")

    def _collect(self) -> None:
        reported = [engine.ask("report") for engine in self._fleet.engines]
        tokens = self._fleet.generator.ask("report")
        for phase in PHASES:
            figures = (EngineFigures(**phases.get(phase, {})) for phases in reported)
            self._report.engines[phase] = reduce(added, figures)
            self._report.tokens[phase] = TokenFigures(**tokens["phases"].get(phase, {}))
        wrong = self._report.wrong
        wrong += [f"the generator's {name} failed {n} times" for name, n in tokens["failed_requests"].items() if n]
        wrong += [text[-1500:] for text in self._manager.failures()]
        changes = [event for event in self._manager.events() if event["event"] == "storage_health"]
        wrong += [
            f"{STAYS} was {each['state']}" for each in changes if (each["storage"], each["state"]) == (STAYS, "down")
        ]
        wrong += ["a process ended" for each in self._fleet.workers if each.popen.poll() is not None]
        wrong += [] if self._manager.is_running else ["the manager ended"]

    def _health(self) -> str:
        health = self._fleet.watcher.ask("health")[AWAY]
        assert isinstance(health, str)
        return health

    def _check_command_line(self, state: str) -> None:
        """Check the alerts and pages that operators see."""
        listed = command(self._manager, "storage", "list", "--json")
        states = {each["name"]: each["health"] for each in json.loads(listed.stdout)["storages"]}
        if states[AWAY] != state:
            self._report.wrong.append(f"kvcm storage list shows {states[AWAY]} when it is {state}")
