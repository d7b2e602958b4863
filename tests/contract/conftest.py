"""The media that storages of files keep their promises on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from uuid import uuid4

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fault_mount import FaultMount, may_mount, why_no_mounts

# Memory is a medium that differs in what it stores beside bytes, a little: CI tries it.
MEDIA = ["directory", pytest.param("tmpfs", marks=pytest.mark.ci), "fuse"]
_OF_STORAGES = {"test_storage_contract"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of storages on every medium. Those that are no coroutines are about names, and touch none."""
    touches_medium = iscoroutinefunction(metafunc.function) and "tmp_path" in metafunc.fixturenames
    if touches_medium and metafunc.module.__name__ in _OF_STORAGES:
        metafunc.parametrize("tmp_path", MEDIA, indirect=True)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return an empty directory on the medium that the test is run on."""
    medium = getattr(request, "param", "directory")
    if medium == "directory":
        return tmp_path
    directory: Path = request.getfixturevalue(f"{medium}_directory") / uuid4().hex
    directory.mkdir()
    return directory


@pytest.fixture(scope="session")
def tmpfs_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a file system in memory."""
    if not may_mount():
        pytest.skip("mounting needs root's CAP_SYS_ADMIN")
    mount_point = tmp_path_factory.mktemp("tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(mount_point)], check=True)
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


@pytest.fixture(scope="session")
def fuse_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a directory through FUSE, where nothing fails and nothing is cached."""
    if reason := why_no_mounts():
        pytest.skip(reason)
    mount = FaultMount(tmp_path_factory.mktemp("medium"), tmp_path_factory.mktemp("fuse"))
    try:
        yield mount.path
    finally:
        mount.close()
