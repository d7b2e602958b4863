"""The traffic that the documents offer to look at a manager with."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from rest_client import RestClient
from test_transport_process import manager

TRAFFIC = Path(__file__).parents[2] / "docs/examples/traffic.py"


def test_it_makes_groups_and_fills_them(tmp_path: Path) -> None:
    with manager(tmp_path) as process:
        at = process.address
        command = [sys.executable, str(TRAFFIC), "--managers", at.http, "--admin", at.admin_http, "--seconds", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        client = RestClient(at.admin_http)
        with contextlib.closing(client.connection):
            used = {group["name"]: group["total"]["used_bytes"] for group in client.get("/v1/usage").body["groups"]}
    assert min(used[name] for name in ("chat", "code", "pinned", "batch")) > 0
    assert used["idle"] == 0
