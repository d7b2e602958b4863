"""A manager in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from ports import free_port

from kvcm.protocol import admin_service_pb2, admin_service_pb2_grpc

_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
_START_SECONDS = 90.0
_RETRY_SECONDS = 0.05


@dataclass
class ManagerProcess:
    """A manager in a process of its own."""

    data_dir: Path
    ports: dict[str, int]
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Where it serves engines."""
        return f"127.0.0.1:{self.ports['rpc_port']}"

    def allow_pins(self, group: str, budget_bytes: int) -> None:
        """Set the pin budget of a group."""

        def change(found: admin_service_pb2.InstanceGroup) -> None:
            found.pin_budget_bytes = budget_bytes

        self._update_group(group, change)

    def set_quota(self, group: str, capacity_bytes: int) -> None:
        """Set how much a group may use, per type of storage, too; what it has is not evicted when it is full."""

        def change(found: admin_service_pb2.InstanceGroup) -> None:
            found.cache_config.reclaim_strategy.trigger_strategy.used_percentage = 2  # off
            found.quota.capacity = capacity_bytes
            for quota in found.quota.quota_config:
                quota.capacity = capacity_bytes

        self._update_group(group, change)

    def allow_instances(self, group: str, most: int) -> None:
        """Let a group have more instances than usual: tests that share a manager have one each."""

        def change(found: admin_service_pb2.InstanceGroup) -> None:
            found.max_instance_count = most

        self._update_group(group, change)

    def _update_group(self, group: str, change: Callable[[admin_service_pb2.InstanceGroup], None]) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['admin_rpc_port']}") as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            found = stub.GetInstanceGroup(admin_service_pb2.GetInstanceGroupRequest(name=group)).instance_group
            version = found.version
            found.version = version + 1
            change(found)
            update = admin_service_pb2.UpdateInstanceGroupRequest(instance_group=found, current_version=version)
            status = stub.UpdateInstanceGroup(update).header.status
            assert status.code == admin_service_pb2.OK, status.message

    def add_pool(self, name: str, node_id: str, capacity_bytes: int) -> None:
        """Add a memory pool of a node, and a group of the same name that uses nothing else."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['admin_rpc_port']}") as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            storage = admin_service_pb2.StorageConfig(global_unique_name=name)
            storage.tair_mem_pool.node_id, storage.tair_mem_pool.capacity_bytes = node_id, capacity_bytes
            status = stub.AddStorage(admin_service_pb2.AddStorageRequest(storage=storage)).header.status
            assert status.code == admin_service_pb2.OK, status.message
        self.add_group(name, name)

    def add_group(self, name: str, storage: str) -> None:
        """Add a group like the default one, on this storage."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['admin_rpc_port']}") as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            group = stub.GetInstanceGroup(admin_service_pb2.GetInstanceGroupRequest(name="default")).instance_group
            group.name, group.storage_candidates[:] = name, [storage]
            create = admin_service_pb2.CreateInstanceGroupRequest(instance_group=group)
            status = stub.CreateInstanceGroup(create).header.status
            assert status.code == admin_service_pb2.OK, status.message

    @property
    def files(self) -> list[Path]:
        """Files of KV in its storage."""
        return sorted(path for path in (self.data_dir / "nfs").rglob("*") if path.is_file())

    def kill(self) -> None:
        """End it the hard way."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it the polite way, the hard way when it does not listen."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


def start_manager(
    data_dir: Path,
    ports: dict[str, int] | None = None,
    settings: Sequence[str] = (),
    credentials: grpc.ChannelCredentials | None = None,
    start_seconds: float = _START_SECONDS,
) -> ManagerProcess:
    """Start a manager and wait until it is healthy; with credentials where its settings have it speak TLS."""
    ports = ports or {name: free_port() for name in _PORTS}
    command = [sys.executable, "-m", "kvcm", "serve", "--data-dir", str(data_dir)]
    for name, port in ports.items():
        command += ["-e", f"kvcm.service.{name}={port}"]
    for setting in settings:
        command += ["-e", setting]
    manager = ManagerProcess(
        data_dir, ports, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    )
    try:
        _wait_until_healthy(manager, credentials, start_seconds)
    except BaseException:
        manager.kill()
        raise
    return manager


def _wait_until_healthy(
    manager: ManagerProcess, credentials: grpc.ChannelCredentials | None, start_seconds: float
) -> None:
    deadline = time.monotonic() + start_seconds
    address = f"127.0.0.1:{manager.ports['admin_rpc_port']}"
    with grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        while True:
            if manager.process.poll() is not None:
                raise RuntimeError(f"the manager ended with exit code {manager.process.returncode}")
            try:
                if stub.CheckHealth(admin_service_pb2.CheckHealthRequest(), timeout=9, wait_for_ready=True).is_health:
                    return
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)  # to refuse call after call takes a manager that loads a fifth of its time
