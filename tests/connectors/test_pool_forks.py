"""Locks of a pool's pages and processes that fork: a lock is its writer's, and ends with it, whatever was forked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_parts import CAPACITY, access_at
from waiting import until

from kvcm.connectors.transfer.pool_segment import PoolSegment
from kvcm.model.storages import PAGE_BYTES

SECONDS = 30.0

# Lives on in a child that was forked in the middle of a save, and until its stdin is closed.
KILLED = """
import os, signal, sys
from pathlib import Path
from kvcm.connectors.transfer.pool_segment import open_segment
segment = open_segment(Path(sys.argv[1]), int(sys.argv[2]))
with segment.write_lock() as lock:
    assert lock.lock(0, 4096)
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

# Its child leaves the lock that it was forked in, and saves something itself; the parent's lock stays.
OUTLIVED = """
import os, sys
from pathlib import Path
from kvcm.connectors.transfer.pool_segment import open_segment
segment = open_segment(Path(sys.argv[1]), int(sys.argv[2]))
with segment.write_lock() as spare:  # one that is free when it forks
    pass
locks = segment.write_lock()
lock = locks.__enter__()
assert lock.lock(0, 4096)
child = os.fork()
if child == 0:
    locks.__exit__(None, None, None)
    with segment.write_lock() as own:
        assert not own.lock(0, 4096)
        assert own.lock(4096, 4096)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
sys.stdin.read()
locks.__exit__(None, None, None)
with segment.write_lock() as lock:
    assert lock.lock(0, 8192)
"""


@pytest.fixture
def segment(pool_directory: Path) -> PoolSegment:
    return access_at(pool_directory).find_or_create()


@pytest.fixture
def started(segment: PoolSegment, pool_directory: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(pool_directory / "segment"), str(CAPACITY)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()  # closes stdin, which ends children, too


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS)[0], "the process says nothing"
    return process.stdout.readline().strip()


def is_locked(segment: PoolSegment) -> bool:
    with segment.write_lock() as lock:
        return not lock.lock(0, PAGE_BYTES)


def test_the_lock_of_a_killed_writer_ends(
    segment: PoolSegment, started: Callable[[str], subprocess.Popen[str]]
) -> None:
    writer = started(KILLED)
    child = int(line_of(writer))
    assert writer.wait(SECONDS) == -signal.SIGKILL
    until(lambda: not is_locked(segment), "the pages are free")
    os.kill(child, 0)  # it is still there


def test_a_child_leaves_its_parents_lock(segment: PoolSegment, started: Callable[[str], subprocess.Popen[str]]) -> None:
    writer = started(OUTLIVED)
    assert line_of(writer) == "0"
    assert is_locked(segment)
    writer.communicate()
    assert writer.returncode == 0
    assert not is_locked(segment)
