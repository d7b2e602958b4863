"""The pool of transfer threads: bounded, loads first, never in the way of the process's end."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from connectors.transfer.pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool

WAIT = 20.0


def test_loads_overtake_saves_and_equals_keep_their_order() -> None:
    pool = WorkerPool(1, "test")
    started, gate, order = threading.Event(), threading.Event(), list[str]()

    def block() -> None:
        started.set()
        gate.wait(WAIT)

    futures = [pool.submit(PRIORITY_SAVE, block)]
    assert started.wait(WAIT)
    for name, priority in (("save1", PRIORITY_SAVE), ("save2", PRIORITY_SAVE), ("load", PRIORITY_LOAD)):
        futures.append(pool.submit(priority, lambda name=name: order.append(name)))
    gate.set()
    assert not wait(futures, WAIT).not_done
    assert order == ["load", "save1", "save2"]
    pool.close()


def test_at_most_so_many_tasks_run_at_once() -> None:
    pool = WorkerPool(3, "test")
    barrier = threading.Barrier(3, timeout=WAIT)  # passes only when all three threads work at the same time
    lock, running, most = threading.Lock(), 0, 0

    def task() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    futures = [pool.submit(PRIORITY_LOAD, task) for _ in range(9)]
    assert not wait(futures, WAIT).not_done
    assert all(future.exception() is None for future in futures)
    assert most == 3
    pool.close()


def test_a_failing_task_does_not_end_its_thread() -> None:
    pool = WorkerPool(1, "test")

    def fail() -> None:
        raise ValueError("no")

    first, second = pool.submit(PRIORITY_LOAD, fail), pool.submit(PRIORITY_LOAD, lambda: None)
    with pytest.raises(ValueError, match="no"):
        first.result(WAIT)
    assert second.result(WAIT) is None
    pool.close()


def test_close_cancels_what_waits_and_does_not_wait_for_what_hangs() -> None:
    pool = WorkerPool(1, "test")
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(WAIT)

    hanging = pool.submit(PRIORITY_LOAD, hang)
    assert started.wait(WAIT)
    waiting = pool.submit(PRIORITY_LOAD, lambda: None)
    pool.close(timeout_seconds=0.01)
    assert not hanging.done()
    late = pool.submit(PRIORITY_LOAD, lambda: None)
    gate.set()
    assert not wait([hanging, waiting, late], WAIT).not_done
    assert waiting.cancelled()
    assert late.cancelled()
