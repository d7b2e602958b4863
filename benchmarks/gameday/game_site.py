"""Everything that runs in a game: three managers, their store, two storages, four engines, and the prober."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import redis
from game_engine import EngineSettings
from game_network import HOSTS, Network
from game_processes import GameProcess, waited_for
from game_storages import KEYS_PER_FILE, Storages

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub

__all__ = ["ENGINES", "LEASE_SECONDS", "MANAGERS", "EnginePlan", "Manager", "Site"]

MANAGERS = ("m1", "m2", "m3")
LEASE_SECONDS = 2.0
PROBE_GROUP = "probe"
_START_SECONDS = 120.0
_SUPERVISOR_SECONDS = 0.5
_DELAY_MS = 1000
_MIB = 1 << 20
_RPC, _ADMIN_RPC, _ADMIN_HTTP = 6381, 6491, 6492


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Where an engine works.

    Attributes:
        group: of its instance; the instance has the same name.
        seed: added to that of the game.
    """

    group: str
    seed: int


ENGINES = {
    "e1": EnginePlan("steady-a", 1),
    "e2": EnginePlan("steady-a", 2),
    "e3": EnginePlan("steady-b", 3),
    "e4": EnginePlan("churning", 4),
}
# Name → candidates in order, quota, and the ratio of it above which blocks are evicted; above 1: never.
_GROUPS: Mapping[str, tuple[tuple[str, str], int, float]] = {
    "steady-a": (("disk_a", "disk_b"), 4096 * _MIB, 2.0),
    "steady-b": (("disk_b", "disk_a"), 4096 * _MIB, 2.0),
    "churning": (("disk_b", "disk_a"), 6 * _MIB, 0.8),
    PROBE_GROUP: (("disk_a", "disk_b"), 1 * _MIB, 0.8),
}


class Manager(GameProcess):
    """A manager."""

    @property
    def address(self) -> str:
        """Of its admin port."""
        return f"http://{HOSTS[self.host]}:{_ADMIN_HTTP}"

    def probe(self, name: str) -> bool:
        """Return whether `/readyz` or another probe of it is 200."""
        try:
            with urllib.request.urlopen(f"{self.address}/{name}", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def page(self, path: str) -> str:
        """Return a page of the admin port."""
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=60.0) as answer:
            return str(answer.read().decode())

    def failures(self) -> list[str]:
        """Return every defect that any process of this manager logged: events that carry an exception."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [line for line in lines if '"exception"' in line or "Traceback" in line or "duty_failed" in line]


@dataclass(slots=True)
class Site:
    """Starts everything and knows where it is.

    Attributes:
        folder: of the game.
        seed: of the game.
        seconds: that it lasts.
        conversations: that engines have.
        expected: file of the tokens.
        network: between the hosts.
        storages: of the blocks.
        store: the Redis server.
        managers: by name.
        engines: by name.
        prober: asks all the time.
        prober_seconds: deadline of its calls; longer where the machine may be busy with other things.
    """

    folder: Path
    seed: int
    seconds: float
    conversations: int
    expected: Path
    network: Network
    storages: Storages
    began: float = 0.0
    prober_seconds: float = 1.0
    store: GameProcess = field(init=False)
    managers: dict[str, Manager] = field(init=False)
    engines: dict[str, GameProcess] = field(init=False, default_factory=dict)
    prober: GameProcess = field(init=False)
    watchers: dict[str, ManagerClient] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.store = GameProcess(self.network, "store", _STORE, self.folder / "store")
        self.managers = {name: self._manager(name) for name in MANAGERS}

    @property
    def settings(self) -> dict[str, str]:
        """Settings that managers share."""
        store_ms = int(1000 * max(1.0, self.prober_seconds - 1.0))  # 1000 is the default
        return {
            "kvcm.registry_storage.uri": f"redis://{HOSTS['store']}:6379/?cluster_name=game&timeout_ms={store_ms}",
            "kvcm.leader_elector.lease_ms": str(int(LEASE_SECONDS * 1000)),
            "kvcm.storage.allowed_roots": str(self.storages.roots["disk_a"].parent),
            "kvcm.storage.probe_interval_ms": "1000",
            "kvcm.storage.probe_timeout_ms": "1000",
            "kvcm.storage.slot_reuse_grace_ms": "30000",  # longer than any mount hangs here
            "kvcm.service.drain_timeout_ms": "2000",
            "kvcm.logger.format": "json",
            "kvcm.startup_config": str(self.folder / "startup.json"),
        }

    @property
    def addresses(self) -> list[str]:
        """Of all managers, for clients."""
        return [f"{HOSTS[name]}:{_RPC}" for name in MANAGERS]

    def start(self) -> None:
        """Start store and managers, and set up groups."""
        (self.folder / "startup.json").write_text(json.dumps(_startup(self.storages)))
        self.start_store()
        for manager in self.managers.values():
            manager.start()
        for name in MANAGERS:
            self.wait_for_manager(name)
        self._set_up()
        settings = ClientSettings(0.5, follow_assignment=False)  # each watches one manager
        self.watchers = {name: ManagerClient(f"{HOSTS[name]}:{_RPC}", "watcher", settings) for name in MANAGERS}

    def start_store(self) -> None:
        """Start the Redis server and wait until it has loaded its data."""
        self.store.start()
        assert waited_for(_store_answers, _START_SECONDS), "the store does not answer"

    def wait_for_manager(self, name: str) -> None:
        """Wait until a manager that was started serves.

        One that ends instead, since the store does not answer at its start, is started again, as its supervisor does.
        """
        manager = self.managers[name]

        def serves() -> bool:
            if not manager.is_running:
                time.sleep(_SUPERVISOR_SECONDS)
                manager.start()
            return manager.probe("startupz")

        assert waited_for(serves, _START_SECONDS), f"{name} does not start: {manager.log.read_text()[-2000:]}"

    def start_engines(self) -> None:
        """Start the engines and the prober."""
        self.began = time.time()
        for name in ENGINES:
            self.engines[name] = self._engine(name)
            self.engines[name].start()
        self.prober = self._prober()
        self.prober.start()

    def leader(self) -> str:
        """Return the leader that all managers name; "" when they name none or do not agree."""
        reported = {name: self._led_by(name) for name in MANAGERS}
        leaders = set(reported.values())
        return leaders.pop() if len(leaders) == 1 else ""

    def any_leader(self) -> str:
        """Return the leader that the first manager with an answer names."""
        return next((leader for leader in map(self._led_by, MANAGERS) if leader), MANAGERS[0])

    def _led_by(self, name: str) -> str:
        info = self.watchers[name].cluster_info() if self.managers[name].is_running else None
        return info.leader_node_id if info is not None else ""

    def end(self) -> None:
        """Close connections; processes end with the game."""
        for watcher in self.watchers.values():
            watcher.close()

    def _manager(self, name: str) -> Manager:
        folder = self.folder / name
        own = {
            "kvcm.leader_elector.node_id": name,
            "kvcm.service.host": "0.0.0.0",
            "kvcm.event.log_file": str(folder / "events"),
        }
        options = [part for key, value in {**self.settings, **own}.items() for part in ("-e", f"{key}={value}")]
        return Manager(self.network, name, [sys.executable, "-m", "kvcm", "serve", "--insecure", *options], folder)

    def _engine(self, name: str) -> GameProcess:
        from game_engine import command_of

        plan, folder = ENGINES[name], self.folder / name
        first = list(ENGINES).index(name) % len(MANAGERS)
        addresses = self.addresses[first:] + self.addresses[:first]
        settings = EngineSettings(
            name,
            ",".join(addresses),
            plan.group,
            plan.group,
            str(folder / "ledger"),
            str(folder / "results"),
            str(self.expected),
            self.conversations,
            self.began,
            self.seconds,
            0.2,
            self.seed * 100 + plan.seed,
        )
        return GameProcess(self.network, name, command_of(settings), folder, _ENGINE_ENVIRONMENT)

    def _prober(self) -> GameProcess:
        from game_prober import ProberSettings, command_of

        folder = self.folder / "prober"
        settings = ProberSettings(
            ",".join(self.addresses), PROBE_GROUP, str(folder / "samples"), 8.0, self.prober_seconds
        )
        return GameProcess(self.network, "prober", command_of(settings), folder)

    def _set_up(self) -> None:
        with grpc.insecure_channel(f"{HOSTS['m1']}:{_ADMIN_RPC}") as channel:
            admin = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            spec = admin_pb.NfsStorageSpec(
                root_path=f"{self.storages.roots['disk_b']}/", key_count_per_file=KEYS_PER_FILE["disk_b"]
            )
            storage = admin_pb.StorageConfig(global_unique_name="disk_b", nfs=spec)
            _check(admin.AddStorage(admin_pb.AddStorageRequest(storage=storage)))
            for name in _GROUPS:
                _check(admin.CreateInstanceGroup(admin_pb.CreateInstanceGroupRequest(instance_group=_group(name))))


def _startup(storages: Storages) -> dict[str, object]:
    """Return the document that the first manager begins with: the first storage, and an unused group."""
    spec = {"root_path": f"{storages.roots['disk_a']}/", "key_count_per_file": KEYS_PER_FILE["disk_a"]}
    return {
        "storage_config": {"type": "file", "global_unique_name": "disk_a", "storage_spec": spec},
        "instance_group": {
            "name": "unused",
            "storage_candidates": ["disk_a"],
            "global_quota_group_name": "unused",
            "max_instance_count": 1,
            "quota": {"capacity": 0, "quota_config": []},
            "cache_config": {
                "reclaim_strategy": {"reclaim_policy": 1, "trigger_strategy": {"used_percentage": 0.8}},
                "cache_prefer_strategy": 2,
                "meta_indexer_config": {"max_key_count": 1000, "mutex_shard_num": 8},
            },
            "version": 1,
        },
    }


def _group(name: str) -> admin_pb.InstanceGroup:
    candidates, capacity, mark = _GROUPS[name]
    group = admin_pb.InstanceGroup(name=name, storage_candidates=candidates, global_quota_group_name="all")
    group.version, group.max_instance_count = 1, 100
    group.quota.capacity = capacity
    reclaim = group.cache_config.reclaim_strategy
    reclaim.storage_unique_name, reclaim.delay_before_delete_ms = candidates[0], _DELAY_MS
    reclaim.reclaim_policy = admin_pb.POLICY_LRU
    reclaim.trigger_strategy.used_percentage = mark
    group.cache_config.data_storage_strategy = admin_pb.CPS_PREFER_3FS
    indexer = group.cache_config.meta_indexer_config
    indexer.mutex_shard_num = 8
    indexer.meta_storage_backend_config.storage_type = "local"
    indexer.meta_cache_policy_config.type = "LRU"
    return group


def _check(answer: object) -> None:
    assert answer.header.status.code == 1, answer  # type: ignore[attr-defined]


def _store_answers() -> bool:
    with contextlib.closing(redis.Redis(HOSTS["store"], protocol=2, socket_timeout=1.0, retry=None)) as client:
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):
            return False


_STORE = [
    *("redis-server", "--bind", "0.0.0.0", "--port", "6379", "--protected-mode", "no", "--save", ""),
    *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
]
_ENGINE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
