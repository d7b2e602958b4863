"""Directories that the embedded store cannot use: each reason has its own advice, and none of them says damage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks import CommitLog, Fsync, open_database

OPEN = """
import os, sys
from contextlib import suppress
from pathlib import Path
from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks import CommitLog, Fsync
if sys.argv[2] != "-":
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
try:
    log = CommitLog(Path(sys.argv[1]), Fsync.ALWAYS, SystemClock())
    for number in range(10_000):
        log.admit()
        log.append([(b"b%d" % number, os.urandom(10_000))])
    log.close_at_once()
except StorageIOError as error:
    print(error)
    with suppress(NameError, StorageIOError):  # else its thread works on while the process ends
        log.close_at_once()
"""
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user, or mount something")


def refused(directory: Path) -> str:
    with pytest.raises(StorageIOError) as caught:
        CommitLog(directory, Fsync.NEVER, SystemClock())
    return str(caught.value)


def refused_elsewhere(directory: Path, *before: str, user: str = "-") -> str:
    """What another process says, of another user, or in a mount namespace of its own."""
    command = [*before, sys.executable, "-c", OPEN, str(directory), user]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def mounted(directory: Path, options: str) -> list[str]:
    """The beginning of a command that sees a small file system in a directory."""
    directory.mkdir(exist_ok=True)
    prefix = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none "{directory}" && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    return prefix


def check_advice(said: str, *parts: str) -> None:
    for part in parts:
        assert part in said
    assert "backup" not in said
    assert "is damaged" not in said
    assert "repair" not in said


def a_file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def below_a_file(path: Path) -> Path:
    return a_file(path) / "db"


def a_loop(path: Path) -> Path:
    (path / "a").symlink_to(path / "b")
    (path / "b").symlink_to(path / "a")
    return path / "a" / "db"


def too_long(path: Path) -> Path:
    return path / ("x" * 300)


@pytest.mark.parametrize("bad", [a_file, below_a_file, a_loop, too_long])
def test_a_bad_path_is_to_be_corrected(tmp_path: Path, bad: Callable[[Path], Path]) -> None:
    check_advice(refused(bad(tmp_path)), "cannot be opened", "path")
    for path in tmp_path.glob("file"):
        assert path.stat().st_mode & 0o777 == 0o644, "a file that lies there is left alone"


@ROOT
@pytest.mark.parametrize("made", [False, True])
def test_a_directory_of_another_user_is_to_be_given(made: bool) -> None:
    path = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        path.chmod(0o755)
        if made:
            CommitLog(path / "db", Fsync.NEVER, SystemClock()).close_at_once()
        check_advice(refused_elsewhere(path / "db", user="65534"), "ermi", "chown -R 65534")
    finally:
        subprocess.run(["rm", "-r", str(path)], check=True)


@ROOT
@pytest.mark.parametrize("made", [False, True])
def test_a_read_only_file_system_is_to_be_mounted_for_writing(tmp_path: Path, made: bool) -> None:
    if made:
        CommitLog(tmp_path / "m" / "db", Fsync.NEVER, SystemClock()).close_at_once()
    (tmp_path / "m").mkdir(exist_ok=True)
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", script, str(tmp_path / "m")]
    if subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    check_advice(refused_elsewhere(tmp_path / "m" / "db", *before), "ead-only", "for writing")


@ROOT
@pytest.mark.parametrize("size", ["16k", "1m", "20m"])
def test_a_full_disk_is_to_be_freed(tmp_path: Path, size: str) -> None:
    before = mounted(tmp_path / "m", f"size={size}")
    check_advice(refused_elsewhere(tmp_path / "m" / "db", *before), "free space")


def test_a_directory_in_use_is_left_to_its_process(tmp_path: Path) -> None:
    log = CommitLog(tmp_path / "db", Fsync.NEVER, SystemClock())
    check_advice(refused(tmp_path / "db"), "is in use by another process")
    log.close_at_once()
    database = open_database(tmp_path / "old")  # as a release without a mark holds it
    check_advice(refused(tmp_path / "old"), "is in use by another process")
    database.close()


def test_a_newer_format_is_left_to_its_release(tmp_path: Path) -> None:
    database = open_database(tmp_path / "db")
    database[b"format"] = b"2"
    database.close()
    check_advice(refused(tmp_path / "db"), "has format version 2", "start the release that wrote it")
