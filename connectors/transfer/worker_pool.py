"""A bounded pool of daemon threads for blocking storage calls.

Why not `concurrent.futures.ThreadPoolExecutor`: the interpreter joins its threads at exit, so one read that hangs in a
dead network mount would keep the engine process from ending; and it serves in order of arrival, where a load (a user
waits) must overtake queued saves.

Invariants: (1) at most `threads` tasks run at once; (2) a task of a lower priority number starts first, equal ones in
order of arrival; (3) after `close` no task starts.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["PRIORITY_LOAD", "PRIORITY_SAVE", "WorkerPool"]

_log = logging.getLogger(__name__)
PRIORITY_LOAD = 0
PRIORITY_SAVE = 1
_PRIORITY_STOP = 2
_Entry = tuple[int, int, "Future[None] | None", Callable[[], None]]


class WorkerPool:
    """Runs tasks on up to `threads` daemon threads, started when first needed.

    Args:
        threads: most tasks at once, > 0.
        name: prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._limit = threads
        self._name = name
        self._tasks: queue.PriorityQueue[_Entry] = queue.PriorityQueue()
        self._arrival = itertools.count()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._closed = False

    def submit(self, priority: int, task: Callable[[], None]) -> Future[None]:
        """Queue `task`; the future is cancelled when the pool is closed. What a task raises is logged too."""
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                future.set_running_or_notify_cancel()  # wakes its waiters
                return future
            self._tasks.put((priority, next(self._arrival), future, task))
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._limit):
                self._start_thread()
        return future

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Start nothing more, wait for what runs; a thread that hangs longer is left behind as a daemon."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put((_PRIORITY_STOP, next(self._arrival), None, _stop_task))
        deadline = time.monotonic() + timeout_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            _, _, future, task = self._tasks.get()
            if future is None:
                return
            if self._closed:
                future.cancel()
            if future.set_running_or_notify_cancel():
                _run(task, future)
            with self._lock:
                self._unfinished -= 1


def _run(task: Callable[[], None], future: Future[None]) -> None:
    try:
        task()
    except BaseException as error:  # whatever a task raises must not end the thread
        _log.exception("a task of thread %s failed", threading.current_thread().name)
        future.set_exception(error)
    else:
        future.set_result(None)


def _stop_task() -> None:
    """Stand in for the task of a stop mark."""
