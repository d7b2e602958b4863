"""One process stores, another one loads: keys, registration and bytes mean the same in both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manager_process import ManagerProcess
from reuse_process import batch, model_of


def generate(manager: ManagerProcess, instance_id: str, kind: str, pool_blocks: int = 0) -> dict[str, Any]:
    arguments = [manager.address, instance_id, kind, str(pool_blocks)]
    script = Path(__file__).with_name("reuse_process.py")
    paths = ":".join([str(script.parent), str(script.parent.with_name("store")), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.feature("transformers", "saves, and another process loads")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "bamba"])
def test_another_process_goes_on(manager: ManagerProcess, instance_id: str, kind: str) -> None:
    ids, mask = batch()
    expected = model_of(kind).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False).tolist()
    first = generate(manager, instance_id, kind)
    assert first == {"tokens": expected, "loaded": [0, 0], "saved": 7 + 4, "reason": ""}
    second = generate(manager, instance_id, kind, pool_blocks=20 if kind == "llama" else 0)
    assert second == {"tokens": expected, "loaded": [96, 32], "saved": 0, "reason": ""}
