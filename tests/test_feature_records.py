"""Feature records equal the outcome of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from feature_records import FEATURES

_PREEMPTION, _METRICS = "preemption", "metrics"
_TESTS = f"""
import pytest

@pytest.mark.feature("transformers", {_PREEMPTION!r}, {_METRICS!r})
def test_that_passes():
    pass

@pytest.mark.feature("vllm", {_PREEMPTION!r})
def test_that_fails():
    assert False

@pytest.fixture
def broken():
    raise ValueError

@pytest.mark.feature("vllm", {_METRICS!r})
def test_that_never_begins(broken):
    pass

@pytest.mark.feature("sglang", {_METRICS!r})
def test_that_is_skipped():
    pytest.skip("no engine")

def test_of_nothing():
    pass
"""


def run(directory: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a process of their own that keeps its notes in a directory."""
    (directory / "conftest.py").write_text(
        f"import feature_records, pathlib\nfeature_records.DIRECTORY = pathlib.Path({str(directory)!r})\n"
    )
    (directory / "test_features.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "feature_records", "--rootdir", ".", "-c", os.devnull, "."]
    paths = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=directory, env=paths, capture_output=True, text=True, check=False)


def test_how_each_test_ended_is_noted(tmp_path: Path) -> None:
    done = run(tmp_path, _TESTS)
    lines = [line for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    notes = {(note["engine"], note["feature"]): note["passed"] for note in map(json.loads, lines)}
    assert notes == {
        ("transformers", _PREEMPTION): True,
        ("transformers", _METRICS): True,
        ("vllm", _PREEMPTION): False,
        ("vllm", _METRICS): False,
    }, done.stdout


@pytest.mark.parametrize("mark", ['"vllm", "preemtion"', '"vlm", "preemption"'])
def test_a_name_that_the_table_does_not_have_is_refused(mark: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"import pytest\n\n@pytest.mark.feature({mark})\ndef test_it():\n    pass\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "is not in tests/feature_records.py" in done.stderr + done.stdout


def test_features_have_one_name_each() -> None:
    assert len(set(FEATURES)) == len(FEATURES)
