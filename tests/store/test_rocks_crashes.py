"""What the commit log promises a process that dies, with real processes and kill -9."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
import rocks_writer

from kvcm.model.clock import SystemClock
from kvcm.store.rocks.log import CommitLog, Fsync


def start_writer(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, rocks_writer.__file__, str(directory), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def latest(lines: Iterable[str]) -> dict[int, int]:
    """The last number that each task said to be durable."""
    return {int(task): int(number) for task, number in (line.split() for line in lines if line.endswith("\n"))}


def stored(directory: Path) -> dict[int, int]:
    """The number that each task's rows hold; all rows of a task must hold the same."""
    log = CommitLog(directory, Fsync.NEVER, SystemClock())
    rows = dict(log.read(b"b"))
    log.close_at_once()
    numbers = {}
    for task in {key[1] for key in rows}:
        found = [rows.get(rocks_writer.row_key(task, row)) for row in range(rocks_writer.ROWS)]
        assert len(set(found)) == 1, f"half a batch of task {task}"
        numbers[task] = int.from_bytes(rows[rocks_writer.row_key(task, 0)][:8])
    return numbers


def killed_after(directory: Path, fsync: str, count: int) -> list[str]:
    """What a writer said that was killed when it had said so many lines."""
    with start_writer(directory, fsync) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(count)]
        writer.kill()
        return lines + writer.stdout.readlines()


@pytest.mark.parametrize("fsync", ["always", "everysec", "never"])
def test_a_killed_process_loses_nothing_that_was_flushed_and_leaves_no_half_batch(tmp_path: Path, fsync: str) -> None:
    random = Random(fsync)
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        said = latest(killed_after(directory, fsync, random.randrange(1, 400)))
        found = stored(directory)
        assert all(found.get(task, 0) >= number for task, number in said.items()), (said, found)


def test_writing_goes_on_over_many_kills(tmp_path: Path) -> None:
    for count in (150, 20, 90):
        said = latest(killed_after(tmp_path, "always", count))
        found = stored(tmp_path)
        assert all(found[task] >= number for task, number in said.items())


def test_a_full_disk_stops_the_log_and_keeps_what_was_flushed(tmp_path: Path) -> None:
    with start_writer(tmp_path, "always", str(300_000)) as writer:
        output, _ = writer.communicate(timeout=60)
    *lines, last = output.splitlines(keepends=True)
    assert last.startswith(f"failed {tmp_path} cannot be written: ")
    assert "make room" in last
    said = latest(line for line in lines if not line.startswith("failed"))
    assert set(said) == set(range(rocks_writer.TASKS))
    found = stored(tmp_path)
    assert all(found[task] >= number for task, number in said.items()), (said, found)


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    with start_writer(tmp_path, "always") as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        second = subprocess.run(
            [sys.executable, rocks_writer.__file__, str(tmp_path), "always"], capture_output=True, text=True, timeout=60
        )
        writer.kill()
    assert second.stdout.startswith(f"failed {tmp_path} is in use by another process")
    assert stored(tmp_path)
