"""The Triton kernels compile for sm_90, and they read in wide pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]  # the compiler takes minutes

pytest.importorskip("triton")


Launches = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """Return the compiled launches, by case and kernel."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = plain | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = Path(__file__).with_name("compiled_launches.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(launch["case"], launch["kernel"]): launch for launch in found}


@pytest.mark.parametrize(
    ("case", "widest"),
    [
        ("token 8x4-d128r0-bf16", 16),
        ("paged 8x4-d128r0-bf16", 16),
        ("token 8x4-d128r0-fp8", 4),  # rows of 132 bytes
        ("token 1x16-d576r64-bf16", 16),
        ("token 1x16-d576r64-fp8", 16),
        ("token 8x4-d64r0-f32", 16),
    ],
)
def test_rows_are_copied_in_the_widest_pieces_their_size_allows(launches: Launches, case: str, widest: int) -> None:
    split = launches[case, "_split"]
    assert max(split["copies"]) == widest
    assert bool(split["tensor_cores"]) == (not case.endswith("f32"))


def test_the_merge_reads_in_wide_pieces(launches: Launches) -> None:
    assert launches["token 8x4-d128r0-bf16", "_merge"]["loads"] == 16


def test_runs_are_copied_in_wide_pieces(launches: Launches) -> None:
    assert launches["gather", "_gather"]["loads"] == 16


def test_every_kernel_compiles_for_a_gpu_and_spills_nothing(tmp_path: Path) -> None:
    """In another process, because in this one kernels are interpreted."""
    root, found = Path(__file__).parents[2], tmp_path / "compiled.json"
    command = [sys.executable, "-W", "ignore", "benchmarks/gpu/compile_kernels.py", "--json", str(found)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    kernels = list((root / "kvcm" / "gpu_tier" / "kernels").glob("*/triton_impl.py"))
    (compiled,) = [row["value"] for row in json.loads(found.read_text())["rows"] if row["case"] == "all"]
    assert compiled >= len(kernels)


def test_bounds_are_read_in_wide_pieces(launches: Launches) -> None:
    assert launches["quest", "_score"]["loads"] == 16
    assert launches["quest", "_score"]["tensor_cores"]


@pytest.mark.parametrize("case", ["8x4-d128-torch.bfloat16", "1x128-d576-torch.bfloat16", "8x1-d128-torch.float32"])
def test_clusters_are_read_in_wide_pieces(launches: Launches, case: str) -> None:
    score, estimate = launches[f"clusters {case}", "_score"], launches[f"clusters {case}", "_estimate"]
    assert score["loads"] == max(estimate["copies"]) == 16
    assert bool(score["tensor_cores"]) == bool(estimate["tensor_cores"]) == case.endswith("bfloat16")


def test_the_indexer_multiplies_in_fp8(launches: Launches) -> None:
    assert "e4m3.e4m3" in launches["indexer", "_score"]["tensor_cores"][0]
