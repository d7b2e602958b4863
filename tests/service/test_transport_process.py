"""A manager as a process of its own, as operators run it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from process_forker import ForkedProcess
from test_transport_drivers import Address, Api, ClientTls, GrpcDriver, HttpDriver

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_FREE_PORTS = ("kvcm.service.rpc_port", "kvcm.service.http_port", "kvcm.service.admin_http_port")
_PATIENT = ["kvcm.limits.max_queue_ms=60000", "kvcm.storage.probe_timeout_ms=60000"]
"""On a busy machine requests wait, and probes of storages; a config file says itself how long they may."""


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")}
    return {**kept, **changes}


def run_kvcm(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    variables = _environment({"COLUMNS": "200", "TERM": "dumb", **environment})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = ForkedProcess(arguments, directory, variables, output, errors)
        code = process.wait(_START_SECONDS)
        texts = [os.pread(file.fileno(), 1 << 28, 0).decode() for file in (output, errors)]
    return subprocess.CompletedProcess(["kvcm", *arguments], code, *texts)


class ManagerProcess:
    """A running manager.

    Args:
        directory: of its own: working directory, data directory and log.
        arguments: options of `kvcm serve`; they win over the defaults of tests.
        environment: additional variables.
    """

    def __init__(self, directory: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.data_dir = directory / "data"
        self.log = directory / "log"
        defaults = [f"{key}=0" for key in _FREE_PORTS] + [f"kvcm.service.admin_rpc_port={free_port()}"]
        defaults += [] if "-c" in arguments else _PATIENT
        options = [part for setting in defaults for part in ("-e", setting)]
        with self.log.open("wb") as log:
            command = ["serve", "--data-dir", str(self.data_dir), *arguments, *options]
            self.process = ForkedProcess(command, directory, _environment(environment), log, log)
        try:
            self.address = self._wait_until_serving()
        except BaseException:
            self.kill()  # no other code knows this process
            raise

    def _wait_until_serving(self) -> Address:
        deadline = time.monotonic() + _START_SECONDS
        while not (found := self.events("serving")):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, f"exit code {self.process.poll()}; log:\n{self.log_text()}"
            time.sleep(0.01)
        return Address(*(found[0][name] for name in ("grpc", "http", "admin_grpc", "admin_http")))

    def log_text(self) -> str:
        """Return everything written to stdout and stderr so far."""
        return self.log.read_text(encoding="utf-8")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log events of that name so far."""
        lines = [line for line in self.log_text().splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @contextlib.contextmanager
    def api(self, transport: str = "grpc", key: str = "", tls: ClientTls | None = None) -> Iterator[Api]:
        """Connect to it over `grpc` or `http`, with a key if one is given."""
        driver = GrpcDriver(self.address, key, tls) if transport == "grpc" else HttpDriver(self.address, key, tls)
        try:
            yield Api(driver)
        finally:
            driver.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(_STOP_SECONDS)

    def kill(self) -> None:
        """End it at once if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(_STOP_SECONDS)


@contextlib.contextmanager
def manager(directory: Path, *arguments: str, **environment: str) -> Iterator[ManagerProcess]:
    """Run a manager inside the block; `-e` options may be given as plain `key=value` texts."""
    options = [part for text in arguments for part in (("-e", text) if text.startswith("kvcm.") else (text,))]
    process = ManagerProcess(directory, tuple(options), environment)
    try:
        yield process
    finally:
        process.kill()


def manager_of_module(*arguments: str, **environment: str) -> Any:
    """Return a fixture: a manager that the tests of a module share."""

    @pytest.fixture(scope="module")
    def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
        with manager(tmp_path_factory.mktemp("manager"), *arguments, **environment) as process:
            yield process

    return shared
