"""What a manager really serves: its OpenAPI documents, asked of one that is started for that."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Served", "ServedCall", "ask"]

_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ServedCall:
    """A call.

    Attributes:
        path: over HTTP.
        plane: which port has it: `data` or `admin`.
    """

    path: str
    plane: str


@dataclass(frozen=True, slots=True)
class Served:
    """All of it.

    Attributes:
        calls: by full name of the service and name.
        resources: OpenAPI document of the resources below /v1.
    """

    calls: dict[tuple[str, str], ServedCall]
    resources: dict[str, Any]


def ask() -> Served:
    """Start a manager on free ports, with everything in memory, and ask it.

    Raises:
        RuntimeError: It did not start; the message is what it said.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        options = [part for port in _PORTS for part in ("-e", f"kvcm.service.{port}=0")]
        command = [sys.executable, "-m", "kvcm", "serve", *options, "-e", "kvcm.logger.format=json"]
        with subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL) as process:
            try:
                addresses = _serving(process, log)
                return _asked(addresses["http"], addresses["admin_http"])
            finally:
                process.terminate()


def _serving(process: subprocess.Popen[bytes], log: IO[bytes]) -> dict[str, str]:
    """Return its addresses as soon as it prints them."""
    name = Path(log.name)
    waits = 0
    while True:
        for line in name.read_text().splitlines():
            if '"event": "serving"' in line or '"event":"serving"' in line:
                found: dict[str, str] = json.loads(line)
                return found
        waits += 1
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            if waits < _SECONDS * 20:
                continue
        raise RuntimeError(f"the manager does not serve: {name.read_text()}")


def _asked(data: str, admin: str) -> Served:
    calls: dict[tuple[str, str], ServedCall] = {}
    for plane, address in (("data", data), ("admin", admin)):
        for path, item in _document(address, "/openapi.json")["paths"].items():
            service, _, name = item["post"]["description"].rpartition(".")
            calls[service, name] = ServedCall(path, plane)
    return Served(calls, _document(admin, "/v1/openapi.json"))


def _document(address: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
