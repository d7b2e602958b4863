"""The manager as a process of its own, on free loopback ports and a directory that is thrown away."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvcm.protocol import admin_service_pb2, admin_service_pb2_grpc

__all__ = ["Manager", "start_manager", "stop"]

_START_SECONDS = 30.0
_STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Manager:
    """A running manager."""

    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    data_dir: Path

    @property
    def address(self) -> str:
        """Where it serves engines."""
        return f"127.0.0.1:{self.ports['rpc_port']}"

    @property
    def files(self) -> list[Path]:
        """Files of KV in its storage."""
        return sorted(
            path for path in (self.data_dir / "nfs").rglob("*") if path.is_file() and not path.name.startswith(".kvcm-")
        )


def start_manager(data_dir: Path) -> Manager:
    """Start a manager and wait until it is healthy."""
    ports = dict(zip(("rpc_port", "http_port", "admin_rpc_port", "admin_http_port"), _free_ports(4), strict=True))
    command = [sys.executable, "-m", "kvcm", "serve", "--data-dir", str(data_dir)]
    for name, port in ports.items():
        command += ["-e", f"kvcm.service.{name}={port}"]
    with (data_dir / "manager.log").open("wb") as log:
        # A session of its own: Ctrl-C reaches this process only, which then ends the others in order.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    manager = Manager(process, ports, data_dir)
    try:
        _wait_until_healthy(manager)
    except BaseException:
        stop(process)
        raise
    return manager


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process politely, then firmly."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(manager: Manager) -> None:
    deadline = time.monotonic() + _START_SECONDS
    with grpc.insecure_channel(f"127.0.0.1:{manager.ports['admin_rpc_port']}") as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        while manager.process.poll() is None and time.monotonic() < deadline:
            try:
                if stub.CheckHealth(admin_service_pb2.CheckHealthRequest(), timeout=1, wait_for_ready=True).is_health:
                    return
            except grpc.RpcError:
                continue
    raise SystemExit(f"the manager did not start:\n{(manager.data_dir / 'manager.log').read_text()[-2000:]}")


def _free_ports(count: int) -> list[int]:
    """Return unused ports, below the range that the system gives to outgoing connections."""
    free: list[int] = []
    for port in random.sample(range(10240, 32768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    return free[:count]
