"""File systems of a few megabytes, which tests fill."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

__all__ = ["fill", "free_bytes", "small_disk"]

_CAP_SYS_ADMIN = 1 << 21


@contextmanager
def small_disk(mount_point: Path, size_bytes: int, most_files: int = 0) -> Iterator[Path]:
    """Mount a file system in memory; the test is skipped where that is not allowed.

    Args:
        mount_point: made if missing.
        size_bytes: of the file system.
        most_files: how many files it can have, its root included; 0 for as many as fit.
    """
    (capabilities,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if not int(capabilities, 16) & _CAP_SYS_ADMIN:
        pytest.skip("a file system that can be filled is mounted, which needs root's CAP_SYS_ADMIN")
    mount_point.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes}" + (f",nr_inodes={most_files}" if most_files else "")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount_point)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def fill(disk: Path, name: str = "other-files", leave_bytes: int = 0) -> Path:
    """Fill a file system with one file, up to so many bytes or to the last; return the file."""
    path = disk / name
    with path.open("ab", buffering=0) as file:
        while (left := free_bytes(disk) - leave_bytes) > 0:
            with suppress(OSError):  # a manager that writes there too was quicker
                file.write(bytes(min(left, 1 << 20)))
    return path


def free_bytes(disk: Path) -> int:
    """Return how many bytes a file system has left."""
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize
