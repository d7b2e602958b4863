"""Managers as processes that are killed and started again, and what a workload needs on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from ports import free_port

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.kvcm.v1.capacity_service_pb2_grpc import CapacityServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

BLOCK_BYTES = 512
_START_SECONDS = 90.0
_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))


def code_of(answer: Any) -> int:
    """Return the outcome code of an answer."""
    return int(answer.header.status.code)


class Wire:
    """The calls of one manager."""

    def __init__(self, rpc_address: str, admin_address: str) -> None:
        self._channels = [grpc.aio.insecure_channel(each, _CHANNEL) for each in (rpc_address, admin_address)]
        self.meta: Any = MetaServiceStub(self._channels[0])  # type: ignore[no-untyped-call]
        self.admin: Any = AdminServiceStub(self._channels[1])  # type: ignore[no-untyped-call]
        self.capacity: Any = CapacityServiceStub(self._channels[1])  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()


class Manager:
    """A manager on ports of its own that stay the same when it is started again.

    Args:
        directory: for its log and, without a shared store, its data.
        settings: `kvcm.…` keys and values.

    Attributes:
        code: directory of the packages that the next start runs, None for those of the test.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self.code: Path | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.settings = {**{f"kvcm.service.{name}": str(free_port()) for name in _PORTS}, **settings}
        self.log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def options(self) -> list[str]:
        """The settings as options of the command line."""
        return [part for key, value in self.settings.items() for part in ("-e", f"{key}={value}")]

    @property
    def store_options(self) -> list[str]:
        """The settings of its store alone, for commands that open it beside or instead of the manager."""
        own = {key: value for key, value in self.settings.items() if not key.startswith("kvcm.service.")}
        return [part for key, value in own.items() for part in ("-e", f"{key}={value}")]

    @property
    def pid(self) -> int:
        """Id of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start the process without waiting."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvcm", "serve", *self.options],
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _environment(self) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")}
        return own if self.code is None else {**own, "PYTHONPATH": str(self.code)}

    def start(self) -> None:
        """Start the process and wait until it serves."""
        self.spawn()
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Return when the started process serves."""
        deadline = time.monotonic() + _START_SECONDS
        while not any(event["event"] == "serving" for event in self.events()):
            assert self.is_running, f"the manager ended:\n{self.new_log()[-2000:]}"
            assert time.monotonic() < deadline, "the manager does not serve"
            time.sleep(0.01)

    def new_log(self) -> str:
        """Return what the latest process logged."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the log events of the latest process."""
        lines = (line for line in self.new_log().splitlines() if line.startswith("{") and line.endswith("}"))
        return [json.loads(line) for line in lines]

    def failures(self) -> list[str]:
        """Return every defect that any process of this manager logged: events that carry an exception."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if '"exception"' in line or "Traceback" in line or "duty_failed" in line]

    def kill(self) -> None:
        """End it at once, wherever it is."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait(60)

    def stop(self) -> int:
        """End it the polite way; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(60)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Return the exit code when it has ended."""
        assert self._process is not None
        return self._process.wait(seconds)

    def address(self, port: str = "rpc_port") -> str:
        """Return where a port is reached."""
        return f"127.0.0.1:{self.settings[f'kvcm.service.{port}']}"

    def connect(self) -> Wire:
        """Return a new connection."""
        return Wire(self.address(), self.address("admin_rpc_port"))

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Wire]:
        """Connect for the time of the block."""
        wire = self.connect()
        try:
            yield wire
        finally:
            await wire.close()


@contextlib.contextmanager
def running(*managers: Manager) -> Iterator[None]:
    """Start managers, and kill those that still run at the end of the block."""
    try:
        for manager in managers:
            manager.spawn()
        for manager in managers:
            manager.wait_until_serving()
        yield
    finally:
        for manager in managers:
            manager.kill()


@contextlib.contextmanager
def managers_on(
    directory: Path, uri: str = "", count: int = 1, settings: Mapping[str, str] | None = None
) -> Iterator[list[Manager]]:
    """Run managers on one store inside the block.

    Args:
        directory: for data and logs.
        uri: of a shared store; "" for a RocksDB.
        count: of the managers.
        settings: more of them.
    """
    store = {"kvcm.registry_storage.uri": uri} if uri else {"kvcm.data_dir": str(directory / "data")}
    managers = [Manager(directory / f"manager-{number}", {**store, **(settings or {})}) for number in range(count)]
    with running(*managers):
        yield managers


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group of a site.

    Attributes:
        name: of the group.
        instances: ids of its instances.
        capacity_bytes: its quota.
        root: directory of its `file` storage, None for a storage without bytes.
        mark: ratio of its quota above which blocks are evicted; above 1: never.
        delay_ms: how long removed bytes stay.
        keys_per_file: blocks that share a file.
    """

    name: str
    instances: tuple[str, ...]
    capacity_bytes: int
    root: Path | None = None
    mark: float = 2.0
    delay_ms: int = 200
    keys_per_file: int = 8

    @property
    def storage(self) -> admin_pb.StorageConfig:
        """Its storage."""
        name = f"{self.name}-storage"
        if self.root is None:
            return admin_pb.StorageConfig(
                global_unique_name=name, dummy=admin_pb.DummyStorageSpec(root_path=name, key_count_per_file=1)
            )
        return admin_pb.StorageConfig(
            global_unique_name=name,
            nfs=admin_pb.NfsStorageSpec(root_path=f"{self.root}/", key_count_per_file=self.keys_per_file),
        )

    @property
    def group(self) -> admin_pb.InstanceGroup:
        """Its settings."""
        name = f"{self.name}-storage"
        group = admin_pb.InstanceGroup(name=self.name, storage_candidates=[name], global_quota_group_name="quota")
        group.version = 1
        group.quota.capacity = self.capacity_bytes
        reclaim = group.cache_config.reclaim_strategy
        reclaim.storage_unique_name, reclaim.delay_before_delete_ms = name, self.delay_ms
        reclaim.reclaim_policy = admin_pb.POLICY_LRU
        reclaim.trigger_strategy.used_percentage = self.mark
        group.cache_config.data_storage_strategy = admin_pb.CPS_PREFER_3FS
        indexer = group.cache_config.meta_indexer_config
        indexer.mutex_shard_num = 8
        indexer.meta_storage_backend_config.storage_type = "local"
        indexer.meta_cache_policy_config.type = "LRU"
        return group


class Site:
    """Groups and instances of a workload; one spec per block."""

    def __init__(self, *groups: GroupPlan) -> None:
        self.groups = groups

    @property
    def instances(self) -> list[str]:
        """Ids of all instances."""
        return [instance for group in self.groups for instance in group.instances]

    def group_of(self, instance: str) -> GroupPlan:
        """Return the group of an instance."""
        return next(group for group in self.groups if instance in group.instances)

    async def set_up(self, wire: Wire) -> None:
        """Create everything; what exists is left."""
        for group in self.groups:
            await wire.admin.AddStorage(admin_pb.AddStorageRequest(storage=group.storage))
            await wire.admin.CreateInstanceGroup(admin_pb.CreateInstanceGroupRequest(instance_group=group.group))
            for instance in group.instances:
                answer = await wire.meta.RegisterInstance(_registration(instance, group.name))
                assert code_of(answer) == meta_pb.OK, answer

    async def until_known_at(self, wires: Sequence[Wire]) -> None:
        """Return when other managers know all of it: one that is asked for an instance looks for changes."""
        for wire, instance in itertools.product(wires, self.instances):
            request = meta_pb.GetInstanceInfoRequest(instance_id=instance)
            while code_of(await wire.meta.GetInstanceInfo(request)) != meta_pb.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def set_up_at(self, manager: Manager) -> None:
        """Create everything over a connection of its own."""
        async with manager.connected() as wire:
            await self.set_up(wire)


def _registration(instance: str, group: str) -> meta_pb.RegisterInstanceRequest:
    request = meta_pb.RegisterInstanceRequest(instance_id=instance, instance_group=group, block_size=4)
    request.location_spec_infos.add(name="kv", size=BLOCK_BYTES)
    request.model_deployment.model_name, request.model_deployment.dtype = "model", "bf16"
    return request
