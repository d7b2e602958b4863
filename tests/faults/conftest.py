"""Mounts that fail on command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

for folder in ("faults", "reclaim"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from fault_mount import FaultMount, why_no_mounts  # noqa: E402


@pytest.fixture
def new_fault_mount(tmp_path: Path) -> Iterator[Callable[[], FaultMount]]:
    """Mount one directory again and again, as several hosts do; all mounts are ended."""
    reason = why_no_mounts()
    if reason:
        pytest.skip(reason)
    directory = tmp_path / "medium"
    directory.mkdir()
    mounts: list[FaultMount] = []

    def mount() -> FaultMount:
        mounts.append(FaultMount(directory, tmp_path / f"mount-{len(mounts)}"))
        return mounts[-1]

    yield mount
    for each in mounts:
        each.close()


@pytest.fixture
def fault_mount(new_fault_mount: Callable[[], FaultMount]) -> FaultMount:
    """Mount a directory of the test's own."""
    return new_fault_mount()
