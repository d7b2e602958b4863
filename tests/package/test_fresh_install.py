"""The wheel in a fresh environment, away from the repository: with the base install and with the server's extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from package_builds import ROOT, VERSION, build, tree_of
from ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
_PATIENCE_SECONDS = 90.0


class Fresh:
    """An environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "environment" / "bin"
        self.folder = folder
        own = ("PYTHON", "KVCM", "VIRTUAL_ENV")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        self._done([sys.executable, "-m", "venv", str(self.bin.parent)])

    def install(self, what: str) -> None:
        constraints = ROOT / ".ci/constraints.txt"
        self._done([str(self.bin / "python"), "-m", "pip", "install", "--quiet", "-c", str(constraints), what])

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(
            program, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("wb") as log:
            program = [str(self.bin / command[0]), *command[1:]]
            return subprocess.Popen(program, cwd=self.folder, env=self.environment, stdout=log, stderr=log)

    def _done(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]


def test_the_wheel_installs_without_extras_and_serves_with_the_server_s(tmp_path: Path) -> None:
    wheel = next(build(tree_of(tmp_path / "tree"), "--wheel").glob("*.whl"))
    fresh = Fresh(tmp_path)
    fresh.install(str(wheel))
    refused = fresh.run("kvcm", "--version")
    assert refused.returncode == 1
    assert "pip install 'kvcm[server]'" in refused.stderr
    imported = fresh.run(
        "python", "-c", "import kvcm.connectors.client, kvcm.connectors.transfer, kvcm; print(kvcm.__version__)"
    )
    assert imported.stdout == f"{VERSION}\n", imported.stderr
    old_name = fresh.run(
        "python", "-c", "import connectors.client, kvcm.connectors.client as new; print(connectors.client is new)"
    )
    assert old_name.stdout == "True\n", old_name.stderr
    assert "the package 'connectors' is called 'kvcm.connectors' now" in old_name.stderr

    fresh.install(f"{wheel}[server]")
    assert fresh.run("kvcm", "--version").stdout == f"kvcm {VERSION}\n"
    _serve(fresh)


def _serve(fresh: Fresh) -> None:
    ports = {name: free_port() for name in _PORTS}
    settings = [part for name, port in ports.items() for part in ("-e", f"kvcm.service.{name}={port}")]
    manager = fresh.spawn("kvcm", "serve", "--data-dir", "data", *settings)
    try:
        admin = f"http://127.0.0.1:{ports['admin_http_port']}"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _is_ready(admin):
            assert manager.poll() is None, (fresh.folder / "log").read_text()
            assert time.monotonic() < deadline, (fresh.folder / "log").read_text()
            time.sleep(0.05)
        with urllib.request.urlopen(f"{admin}/metrics") as answer:
            (build_info,) = re.findall(r"^kvcm_build_info.*", answer.read().decode(), re.MULTILINE)
        assert f'version="{VERSION}"' in build_info
        with urllib.request.urlopen(f"{admin}/openapi.json") as answer:
            assert json.load(answer)["info"]["version"] == VERSION
        for page, kind in (("/console/", "text/html"), ("/console/static/console.css", "text/css")):
            with urllib.request.urlopen(f"{admin}{page}") as answer:
                assert (answer.status, answer.headers.get_content_type()) == (200, kind)
        listed = fresh.run("kvcm", "storage", "list", "--manager", admin)
        assert listed.returncode == 0, listed.stderr
    finally:
        manager.terminate()
        assert manager.wait(60) == 0


def _is_ready(admin: str) -> bool:
    try:
        with urllib.request.urlopen(f"{admin}/readyz", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
