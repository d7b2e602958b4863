"""Memory pools among real processes that are killed, stopped and resumed in the middle of a copy: never wrong bytes."""

from __future__ import annotations

import json
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_parts import CAPACITY, MIB, access_at, load_one, mover_at, save_one
from stopping import stop_process
from waiting import until

from kvcm.connectors.transfer import Failure
from kvcm.connectors.transfer.mempool import MemPoolMover
from kvcm.connectors.transfer.pool_segment import PoolSegment, stamps_of
from kvcm.model.storages import PAGE_BYTES, chunk_bytes

pytestmark = pytest.mark.e2e

WORKER = Path(__file__).with_name("pool_worker.py")
SECONDS = 30.0
# An extent that is copied for so long that a signal meets it, and the pool whose chunks are as large.
LARGE_POOL = 512 * MIB
LARGE = 8 * MIB


class Worker:
    """A process of `pool_worker.py`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, str(WORKER), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        assert self.line() == "ready"

    def send_line(self, text: str) -> None:
        self._stdin.write(text + "\n")
        self._stdin.flush()

    def line(self) -> str:
        """Return what the process says next."""
        assert select.select([self._stdout], [], [], SECONDS)[0], "the worker says nothing"
        return self._stdout.readline().strip()

    def stop(self) -> None:
        stop_process(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> str:
        """Close its stdin and return the last line."""
        self._stdin.close()
        line = self.line()
        assert self._process.wait(SECONDS) == 0
        return line

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


@pytest.fixture
def new_worker() -> Iterator[Callable[..., Worker]]:
    def start(*arguments: object) -> Worker:
        worker = Worker(*arguments)
        workers.callback(worker.kill)
        return worker

    with ExitStack() as workers:
        yield start


@pytest.fixture
def worker(pool_directory: Path, new_worker: Callable[..., Worker]) -> Worker:
    return new_worker("scripted", pool_directory, LARGE_POOL)


@pytest.fixture
def mover(pool_directory: Path) -> MemPoolMover:
    assert chunk_bytes(LARGE_POOL) == LARGE
    return mover_at(pool_directory, LARGE_POOL)


@pytest.fixture
def segment(mover: MemPoolMover, pool_directory: Path) -> PoolSegment:
    return access_at(pool_directory, LARGE_POOL).find_or_create()


def is_locked(segment: PoolSegment) -> bool:
    with segment.write_lock() as claim:
        return not claim.lock(0, LARGE)


def test_a_writer_that_is_killed_in_its_copy_leaves_nothing_behind(
    mover: MemPoolMover, segment: PoolSegment, pool_directory: Path, new_worker: Callable[..., Worker]
) -> None:
    draw = random.Random(1)
    for round_number in range(12):
        stamp = 10 * round_number + 10
        worker = new_worker("scripted", pool_directory, LARGE_POOL)
        worker.send_line(f"save 0 {LARGE} {stamp}")
        until(lambda stamp=stamp: segment.newest_stamp(0, PAGE_BYTES) == stamp)
        moment = time.monotonic() + draw.random() * 0.004
        until(lambda moment=moment: time.monotonic() >= moment)
        worker.kill()
        assert not is_locked(segment)
        offset, size = draw.randrange(LARGE // PAGE_BYTES) * PAGE_BYTES, 1
        assert save_one(mover, offset, size, stamp + 1).ok
        assert load_one(mover, offset, size, stamp + 1).ok
        assert load_one(mover, 0, LARGE, stamp).failure is Failure.LOST
        assert save_one(mover, 0, LARGE, stamp + 2).ok
        assert load_one(mover, 0, LARGE, stamp + 2).ok


def stopped_in_a_copy(worker: Worker, segment: PoolSegment, first_stamp: int) -> int:
    """Stop a worker in its copy and return the stamp that it saves with; tries again when it was quicker."""
    for stamp in range(first_stamp, first_stamp + 1000):
        worker.send_line(f"save 0 {LARGE} {stamp}")
        stamps = stamps_of(stamp, LARGE)  # which are put before the copy
        until(lambda stamps=stamps: segment.has_stamps(0, stamps))
        worker.stop()
        if is_locked(segment):
            return stamp
        worker.resume()
        assert worker.line() == "ok"
    raise AssertionError("the worker was always quicker")


def test_no_writer_gets_pages_to_which_a_stopped_one_may_come_back(
    mover: MemPoolMover, segment: PoolSegment, worker: Worker
) -> None:
    stamp = stopped_in_a_copy(worker, segment, 100)
    newer = stamp + 1
    refused = save_one(mover, LARGE - PAGE_BYTES, 100, newer)
    assert refused.failure is Failure.BUSY
    assert "locked" in refused.reason
    assert save_one(mover, LARGE, 100, newer).ok  # beside it
    worker.resume()
    assert worker.line() == "ok"
    assert load_one(mover, 0, LARGE, stamp).ok
    assert save_one(mover, LARGE - PAGE_BYTES, 100, newer).ok
    worker.send_line(f"save 0 {LARGE} {stamp}")  # it comes late with the same once more
    assert worker.line() == Failure.REFUSED
    assert load_one(mover, LARGE - PAGE_BYTES, 100, newer).ok
    assert load_one(mover, 0, LARGE, stamp).failure is Failure.LOST


def test_a_stopped_writer_that_is_killed_gives_its_pages_back(
    mover: MemPoolMover, segment: PoolSegment, worker: Worker
) -> None:
    stamp = stopped_in_a_copy(worker, segment, 100)
    worker.kill()
    assert save_one(mover, 0, LARGE, stamp + 1).ok
    assert load_one(mover, 0, LARGE, stamp + 1).ok


def test_a_pool_that_is_removed_under_a_stopped_writer_takes_nothing_of_it(
    mover: MemPoolMover, segment: PoolSegment, pool_directory: Path, worker: Worker
) -> None:
    stamp = stopped_in_a_copy(worker, segment, 100)
    (pool_directory / "segment").unlink()
    assert save_one(mover, 0, 100, stamp + 1).ok
    worker.resume()
    assert worker.line() == Failure.ERROR
    assert load_one(mover, 0, 100, stamp + 1).ok
    assert load_one(mover, 0, LARGE, stamp).failure is Failure.LOST
    worker.send_line(f"load 0 100 {stamp + 1}")
    assert worker.line() == "ok"


def test_processes_that_overwrite_read_no_wrong_bytes(pool_directory: Path, new_worker: Callable[..., Worker]) -> None:
    """Invariant 5 at its worst: extents of all sizes handed out over each other, with writers killed and stopped."""
    assert mover_at(pool_directory, CAPACITY).save([], 1.0) == []  # makes the pool
    draw = random.Random(2)
    workers = [new_worker("hammer", pool_directory, number) for number in range(4)]
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        victim = draw.randrange(1, len(workers))
        workers[victim].stop()
        pause = time.monotonic() + draw.random() * 0.05
        until(lambda pause=pause: time.monotonic() >= pause)
        if draw.random() < 0.1:
            workers[victim].kill()
            workers[victim] = new_worker("hammer", pool_directory, victim)
        else:
            workers[victim].resume()
    seen = Counter[str]()
    for worker in workers:
        seen.update(json.loads(worker.end()))
    assert not seen["load WRONG"], seen
    assert seen["load ok"] > 20, seen
    assert seen["load lost"] > 20, seen
    assert seen["save ok"] > 20, seen
