"""A manager, hosts with a memory pool and an agent each, a host without, and an engine on each of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_figures import GROUP, SHARED, pool_of
from google.protobuf import json_format
from host_engine import EngineSettings
from host_engine import command_of as engine_command
from host_networks import Host, Network
from manager_site import GroupPlan, Manager
from site_operator import command_of as operator_command
from waiting import until

from kvcm.protocol import admin_service_pb2 as admin_pb

sys.path.insert(0, str(Path(__file__).parents[1] / "mooncake"))
from mooncake_rig import Process

HOSTS, HOSTLESS = ("a", "b"), "nobody"
"""Hosts with a pool, and the engine that names no host."""

_POOL_BYTES = (
    64 << 20
)  # what engines want to keep is more than its mark and less than all: always evicted from, never full
_MARK = 0.2
_DELAY_MS = 200
_DEADLINE_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
_AGENT_SECONDS = 0.8  # between two reports; three of them may be late on a busy machine
_PROBE_MS = {"interval": 200, "timeout": 1000}
PATIENCE_SECONDS = 120.0  # with a machine that is busy with other things; nothing is measured by it
_AGENT = "import sys; from kvcm.connectors.pool_agent import main; sys.exit(main())"


class HostSite:
    """All processes, and how they are started and ended.

    Args:
        directory: for everything but the pools' memory.
        seed: of what engines do.
        slowness: factor on the time limits that engines and agents have, for a machine that is busy with other things.
    """

    def __init__(self, directory: Path, seed: int, slowness: float = 1.0) -> None:
        self._directory = directory
        self._seed = seed
        self.slowness = slowness
        self.network = Network(directory)
        settings = {f"kvcm.storage.probe_{name}_ms": str(value) for name, value in _PROBE_MS.items()}
        self.manager = Manager(
            directory / "manager",
            {
                "kvcm.data_dir": str(directory / "data"),
                "kvcm.service.insecure": "true",
                "kvcm.storage.allowed_roots": str(directory),
                **settings,
            },
        )
        self.hosts: dict[str, Host] = {}
        self.engines: dict[str, Process] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._others: list[Process] = []

    def set_up(self) -> None:
        """Start everything, and wait until both pools are there."""
        self.start_manager()
        address = f"127.0.0.1:{self.manager.settings['kvcm.service.admin_rpc_port']}"
        log = self._directory / "watcher.log"
        self._others.append(Process([*self.network.centre.inside, *operator_command(address)], log))
        self.ask("set_up", storages=self._storages(), groups=[self._group()])
        for name in (*HOSTS, HOSTLESS):
            self.hosts[name] = self.network.add(name)
        for name in HOSTS:
            self.start_agent(name)
        for name in HOSTS:
            self.until(lambda name=name: self.is_in(name, "UP"), f"pool {name} is up")
        for name in (*HOSTS, HOSTLESS):
            self.start_engine(name)

    def ask(self, call: str, **arguments: Any) -> Any:
        """Ask the operator."""
        return self._others[0].ask(call, **arguments)

    def is_in(self, name: str, state: str) -> bool:
        """Return whether the pool of a host is up or down."""
        return bool(self.ask("health")[pool_of(name)] == f"SH_{state}")

    def is_at_rest(self) -> bool:
        """Return whether nothing is to be evicted from any pool, nor still being deleted after that."""
        used = self.ask("used")
        return all(used.get(pool_of(name), 0) <= _MARK * _POOL_BYTES for name in HOSTS)

    def start_manager(self) -> None:
        """Start it on its host, for the first time or again, and wait until it serves."""
        with self.network.centre.entered():
            self.manager.spawn()
        self.until(self._serves, "the manager serves")

    def _serves(self) -> bool:
        assert self.manager.is_running, f"the manager ended:\n{self.manager.new_log()[-2000:]}"
        return any(event["event"] == "serving" for event in self.manager.events())

    def start_agent(self, name: str) -> None:
        """Start the agent of a host; it takes its node from the host's name."""
        arguments = ["--storage", pool_of(name), "--capacity", str(_POOL_BYTES), "--manager", self._address(name)]
        command = [sys.executable, "-c", _AGENT, *arguments, "--interval", str(_AGENT_SECONDS * self.slowness)]
        self.agents[name] = self.hosts[name].start(command)

    def kill_agent(self, name: str) -> None:
        """End it at once."""
        self.agents[name].kill()
        self.agents.pop(name).wait()

    def start_engine(self, name: str) -> None:
        """Start the engine of a host."""
        self.engines[name] = self._started(name, "" if name == HOSTLESS else None)

    def start_liar(self, name: str, node_id: str) -> Process:
        """Start an engine that names another host than it is on."""
        self._others.append(self._started(name, node_id))
        return self._others[-1]

    def boot(self, name: str) -> None:
        """End a host with all that runs on it, and start one with nothing in its memory."""
        self.engines.pop(name).kill()
        self.kill_agent(name)
        self.network.remove(name)
        self.hosts[name] = self.network.add(name)

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait; returns how long that took."""
        begin = time.monotonic()
        until(condition, what, PATIENCE_SECONDS)
        return time.monotonic() - begin

    def close(self) -> None:
        """End everything."""
        for process in (*self.engines.values(), *self._others):
            process.kill()
        for name in list(self.agents):
            self.kill_agent(name)
        self.manager.kill()
        self.network.close()

    def _started(self, name: str, node_id: str | None) -> Process:
        number = (*HOSTS, HOSTLESS).index(name) + 1
        settings = EngineSettings(
            self._address(name),
            number,
            engines=len(HOSTS) + 1,
            node_id=node_id,
            deadline_seconds=_DEADLINE_SECONDS * self.slowness,
            pause_seconds=_PAUSE_SECONDS,
            seed=self._seed * 100 + number,
        )
        command = [*self.hosts[name].inside, *engine_command(settings)]
        return Process(command, self._directory / f"engine-{name}.log")

    def _address(self, name: str) -> str:
        return f"{self.network.centre_address(name)}:{self.manager.settings['kvcm.service.rpc_port']}"

    def _storages(self) -> list[str]:
        storages = []
        for name in HOSTS:
            pool = admin_pb.StorageConfig(global_unique_name=pool_of(name))
            pool.tair_mem_pool.node_id, pool.tair_mem_pool.capacity_bytes = name, _POOL_BYTES
            pool.used_percentage = _MARK
            storages.append(pool)
        spec = admin_pb.NfsStorageSpec(root_path=f"{self._directory}/shared/", key_count_per_file=4)
        storages.append(admin_pb.StorageConfig(global_unique_name=SHARED, nfs=spec))
        return [json_format.MessageToJson(each) for each in storages]

    def _group(self) -> str:
        group = GroupPlan(GROUP, (), 1 << 33, delay_ms=_DELAY_MS).group
        group.storage_candidates[:] = [*map(pool_of, HOSTS), SHARED]
        group.cache_config.reclaim_strategy.storage_unique_name = SHARED
        return json_format.MessageToJson(group)
