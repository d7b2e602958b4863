"""The file system that fails on command: what no test of a storage on it would notice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_mount import FaultMount
from waiting import until

BYTES = bytes(range(256)) * 512


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def file(fault_mount: FaultMount) -> Path:
    """Return a file on the mount."""
    path = fault_mount.path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(BYTES)
    return path


def test_a_fault_begins_after_some_requests_and_ends_after_some(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", error="EIO", after=2, times=3)
    failed = []
    with opened(file) as descriptor:
        for _ in range(7):
            try:
                os.pread(descriptor, 1, 0)
                failed.append(False)
            except OSError:
                failed.append(True)
    assert failed == [False, False, True, True, True, False, False]


def test_reads_and_writes_are_short(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", "write", most_bytes=100)
    with opened(file) as descriptor:
        assert os.pread(descriptor, 1000, 50) == BYTES[50:150]
        assert os.pwrite(descriptor, b"y" * 1000, 50) == 100
    assert (fault_mount.directory / "folder" / "file").read_bytes() == BYTES[:50] + b"y" * 100 + BYTES[150:]


def test_requests_hang_until_the_fault_is_cleared_and_the_others_do_not(fault_mount: FaultMount, file: Path) -> None:
    """Far more of them than any pool of threads that uses the mount."""
    file.with_name("other").write_bytes(b"other")
    with ThreadPoolExecutor(80) as threads:
        fault_mount.inject("read", path="/folder/file", hang=True)
        reads = [threads.submit(file.read_bytes) for _ in range(80)]
        fault_mount.until_waiting(80)
        assert file.with_name("other").read_bytes() == b"other"
        assert not any(read.done() for read in reads)
        fault_mount.clear()
        assert all(read.result(20) == BYTES for read in reads)


def test_a_mount_ends_while_requests_hang(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", hang=True)
    reader = threading.Thread(target=_ignoring_errors, args=(file,))
    reader.start()
    fault_mount.until_waiting()
    fault_mount.close()
    reader.join(20)
    assert not reader.is_alive()
    assert list(fault_mount.path.iterdir()) == []


def test_a_mount_does_not_outlive_a_killed_test_run(fault_mount: FaultMount, tmp_path: Path) -> None:
    """Using the fixture only for its reason to skip."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from pathlib import Path; from fault_mount import FaultMount\n"
        f"mount = FaultMount(Path({str(tmp_path / 'medium')!r}), Path({str(tmp_path / 'orphan')!r}))\n"
        "print('mounted', flush=True)\n"
        "import time; time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout is not None
    with run.stdout:
        assert run.stdout.readline() == b"mounted\n"
        assert os.path.ismount(tmp_path / "orphan")
        run.kill()
        run.wait()
    until(lambda: not os.path.ismount(tmp_path / "orphan"), "the mount is gone")


def _ignoring_errors(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError:
        return
