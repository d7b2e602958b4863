"""One process prefills and publishes; another attaches and decodes the same tokens without prefill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manager_process import ManagerProcess
from sharing_rig import continued
from tier_engine_process import TOKENS

PREFIX = 192  # full blocks that leave a token of the prompt


def answer(*arguments: str) -> dict[str, Any]:
    script = Path(__file__).with_name("tier_engine_process.py")
    paths = ":".join([str(script.parent), str(script.parent.with_name("gpu_tier")), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "GPU_TIER_KERNELS": "reference"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("model", "algorithm"), [("llama", "quest"), ("llama", "snapkv"), ("latent", "dsa")])
def test_another_process_decodes_without_prefill(
    manager: ManagerProcess, instance_id: str, model: str, algorithm: str
) -> None:
    expected = continued(model, algorithm, TOKENS)
    first = answer(manager.address, instance_id, model, algorithm)
    assert first == {"tokens": expected, "attached": 0, "steps": 7, "written": 12}
    second = answer(manager.address, instance_id, model, algorithm)
    assert second == {"tokens": expected, "attached": PREFIX, "steps": 1, "written": 0}
