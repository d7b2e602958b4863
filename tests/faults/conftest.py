"""Mounts that fail on command, and what memory pools and managers need."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

for folder in ("faults", "reclaim", "connectors"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from corruption_media import NODE  # noqa: E402
from fault_mount import FaultMount, why_no_mounts  # noqa: E402
from manager_process import ManagerProcess, start_manager  # noqa: E402


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


@pytest.fixture(scope="session")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """One manager for all tests that leave it alive; each uses a storage of its own."""
    running = start_manager(tmp_path_factory.mktemp("manager"))
    yield running
    running.stop()


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A directory for pools, and a process that is on their node."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kvcm-test-", dir=parent if parent.is_dir() else tmp_path) as folder:
        monkeypatch.setenv("KVCM_NODE_ID", NODE)
        monkeypatch.setenv("KVCM_POOL_DIRECTORY", folder)
        monkeypatch.delenv("KVCM_CLUSTER_ID", raising=False)
        yield Path(folder)
