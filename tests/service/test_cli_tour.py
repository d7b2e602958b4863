"""The tour of docs/cli.md, run as it is written, but for the ports and the place of the data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_runner import port_options
from secured import secured

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs/cli.md"
MOST_SECONDS = 240
_ENGINE = "docs/examples/tenant_engine.py"


def _blocks() -> list[str]:
    tour = PAGE.read_text().partition("## Tour: two tenants")[2]
    return re.findall(r"```sh\n(.*?)```", tour, re.DOTALL)


def test_the_tour_does_what_it_says(tmp_path: Path) -> None:
    serve, *steps = _blocks()
    assert "kvcm serve --data-dir data" in serve
    with secured(tmp_path) as server:
        address = server.process.address
        script = "\n".join(["set -euo pipefail", *steps])
        script = script.replace("127.0.0.1:6492", address.admin_http)
        script = script.replace(_ENGINE, f"{PAGE.parent}/{_ENGINE.partition('/')[2]} --manager {address.rpc}")
        options = " ".join(port_options(*address))
        script = re.sub(r"^(kvcm doctor .*)$", rf"\1 {options}", script, flags=re.MULTILINE)
        kept = {key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")}
        path = f"{Path(sys.executable).parent}:{kept['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env={**kept, "PATH": path, "COLUMNS": "160"}, capture_output=True,
            text=True, timeout=MOST_SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = ["red-engine", "the secret is in red.key", "red: loaded 0 of", "red: loaded 3", "blue: loaded 0 of"]
    for part in (*said, "an engine can load the first 24 of 24 blocks", "not let in", "turned away"):
        assert part in done.stdout, done.stdout
    assert "instance 'red-model' is not registered" in done.stderr
    assert (tmp_path / "blue.new.key").stat().st_mode & 0o777 == 0o600
