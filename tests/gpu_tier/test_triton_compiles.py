"""The Triton kernels compile for a GPU as well, see `compile_kernels`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_kernels import CASES

pytest.importorskip("triton")


CLUSTERING = ["kmeans_assign", "kmeans_update", "segment_sum"]
OTHERS = [name for name in CASES if name not in CLUSTERING]


@pytest.mark.parametrize("names", [OTHERS[:4], OTHERS[4:], CLUSTERING], ids=["moving", "scoring", "clustering"])
def test_kernels_compile_for_a_gpu(names: list[str], tmp_path: Path) -> None:
    # Another process, because in this one kernels are interpreted.
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_kernels.py")), *names],
        env=plain | {"GPU_TIER_TUNING": "first", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) >= len(names)
