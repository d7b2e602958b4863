"""The file system that fails on command: what it passes on, and that each fault is what it says."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_mount import FaultMount
from fault_rules import Fault, Rules
from storage_rig import can_punch_holes
from waiting import until

BYTES = bytes(range(256)) * 512


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def close_after_writing(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, b"x")
    os.close(descriptor)


def synced(path: Path) -> None:
    with opened(path) as descriptor:
        os.fsync(descriptor)


def with_hole(path: Path) -> None:
    with opened(path) as descriptor:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(descriptor, 0x03, ctypes.c_int64(0), ctypes.c_int64(1 << 16)) != 0:
            raise OSError(ctypes.get_errno(), "fallocate")


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "getattr": os.lstat,
    "open": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "create": lambda path: path.with_name("new").write_bytes(b"x"),
    "read": Path.read_bytes,
    "write": lambda path: path.write_bytes(b"x"),
    "flush": close_after_writing,
    "fsync": synced,
    "fallocate": with_hole,
    "truncate": lambda path: os.truncate(path, 1),
    "unlink": os.unlink,
    "rename": lambda path: path.rename(path.with_name("new")),
    "mkdir": lambda path: path.with_name("new").mkdir(),
    "rmdir": lambda path: path.with_name("empty").rmdir(),
    "readdir": lambda path: list(path.parent.iterdir()),
    "statfs": os.statvfs,
}


@pytest.fixture
def file(fault_mount: FaultMount) -> Path:
    """Return a file on the mount, beside an empty directory."""
    path = fault_mount.path / "folder" / "file"
    path.parent.mkdir()
    path.with_name("empty").mkdir()
    path.write_bytes(BYTES)
    return path


def test_without_faults_it_is_the_directory(fault_mount: FaultMount, file: Path) -> None:
    beside = fault_mount.directory / "folder" / "file"
    assert beside.read_bytes() == file.read_bytes() == BYTES
    with opened(file) as descriptor:
        os.pwrite(descriptor, b"there", 1000)
        assert os.pread(descriptor, 7, 999) == BYTES[999:1000] + b"there" + BYTES[1005:1006]
    assert beside.stat().st_size == file.stat().st_size == len(BYTES)
    assert (beside.stat().st_mtime_ns, beside.stat().st_mode) == (file.stat().st_mtime_ns, file.stat().st_mode)
    os.truncate(file, 10)
    with file.open("ab") as appended:
        appended.write(b"end")
    assert beside.read_bytes() == BYTES[:10] + b"end"
    file.rename(file.with_name("other"))
    for folder in (file.parent, beside.parent):
        assert sorted(path.name for path in folder.iterdir()) == ["empty", "other"]
    assert os.statvfs(file.parent).f_blocks == os.statvfs(beside.parent).f_blocks
    shutil.rmtree(file.parent)
    assert list(fault_mount.directory.iterdir()) == []


def test_what_is_changed_beside_the_mount_is_seen_at_once(fault_mount: FaultMount, file: Path) -> None:
    """Nothing is cached: neither bytes, nor sizes, nor that something is missing."""
    beside = fault_mount.directory / "folder" / "file"
    assert not file.with_name("later").exists()
    with opened(file) as descriptor:
        assert os.pread(descriptor, 3, 0) == BYTES[:3]
        beside.write_bytes(b"new")
        beside.with_name("later").touch()
        assert os.pread(descriptor, 100, 0) == b"new"
    assert file.stat().st_size == 3
    assert file.with_name("later").exists()


def test_holes_are_punched_where_the_directory_can(fault_mount: FaultMount) -> None:
    assert can_punch_holes(fault_mount.path) == can_punch_holes(fault_mount.directory)


def test_a_mode_is_what_the_client_asked_for(fault_mount: FaultMount) -> None:
    os.close(os.open(fault_mount.path / "private", os.O_CREAT | os.O_WRONLY, 0o600))
    assert (fault_mount.path / "private").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_is_answered_until_it_is_cleared(fault_mount: FaultMount, file: Path, operation: str) -> None:
    for error in ("EIO", "ENOSPC", "ESTALE", "EROFS"):
        fault_mount.inject(operation, error=error)
        with pytest.raises(OSError) as raised:
            OPERATIONS[operation](file)
        assert raised.value.errno == getattr(errno, error)
        fault_mount.clear()
    OPERATIONS[operation](file)


def test_only_the_paths_of_a_pattern_meet_a_fault(fault_mount: FaultMount, file: Path) -> None:
    file.with_name("other").write_bytes(b"other")
    fault = fault_mount.inject("read", path="/folder/f*", error="EIO")
    assert file.with_name("other").read_bytes() == b"other"
    assert fault_mount.met(fault) == 0
    with pytest.raises(OSError, match="Input/output"):
        file.read_bytes()
    assert fault_mount.met(fault) == 1


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


def test_a_file_ends_early(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", ends_at=300)
    with opened(file) as descriptor:
        assert os.pread(descriptor, 1000, 250) == BYTES[250:300]
        assert os.pread(descriptor, 1000, 300) == b""
        assert os.pread(descriptor, 1000, 5000) == b""


def test_one_byte_is_read_wrong(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", flip_at=70_000)
    wrong = bytearray(BYTES)
    wrong[70_000] ^= 0xFF
    assert file.read_bytes() == wrong
    assert (fault_mount.directory / "folder" / "file").read_bytes() == BYTES


def test_a_request_is_late(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", delay_seconds=0.3)
    with opened(file) as descriptor:
        begin = time.monotonic()
        assert os.pread(descriptor, 10, 0) == BYTES[:10]
    assert time.monotonic() - begin >= 0.3


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


def test_what_is_hidden_on_one_mount_is_there_on_another(new_fault_mount: Callable[[], FaultMount]) -> None:
    writer, reader = new_fault_mount(), new_fault_mount()
    reader.hide("/new*")
    for name in ("new", "old"):
        (writer.path / name).write_bytes(b"written")
    assert (writer.path / "new").read_bytes() == (reader.path / "old").read_bytes() == b"written"
    with pytest.raises(FileNotFoundError):
        (reader.path / "new").read_bytes()
    reader.clear()
    assert (reader.path / "new").read_bytes() == b"written"


def test_a_mount_ends_while_requests_hang(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.inject("read", hang=True)
    reader = threading.Thread(target=_ignoring_errors, args=(file,))
    reader.start()
    fault_mount.until_waiting()
    fault_mount.close()
    reader.join(20)
    assert not reader.is_alive()
    assert list(fault_mount.path.iterdir()) == []


def test_a_mount_whose_process_died_fails_until_it_is_mounted_again(fault_mount: FaultMount, file: Path) -> None:
    fault_mount.die()
    with pytest.raises(OSError, match="not connected"):
        file.read_bytes()
    fault_mount.close()
    assert list(fault_mount.path.iterdir()) == []
    fault_mount.mount()
    assert file.read_bytes() == BYTES


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


def test_an_unknown_error_is_refused() -> None:
    with pytest.raises(ValueError, match="ENOSUCH"):
        Rules().inject(Fault(("read",), error="ENOSUCH"))


def _ignoring_errors(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError:
        return
