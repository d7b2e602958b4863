"""Threads of one storage: a medium that hangs blocks this storage only.

The event loop's own threads are shared by everything that must not block it, and a hanging mount would take one after
the other. These are made when they are needed, end when nothing came for a while, and never keep the process from
ending: what they were deleting is found again in the records.

Rejected: `ThreadPoolExecutor`, whose threads the interpreter waits for at its end, on a hanging mount for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

__all__ = ["StorageThreads"]

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class StorageThreads:
    """Runs blocking work.

    Args:
        name: begins the names of the threads.
        most: threads at the same time; more work waits for one of them.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._lock = Lock()
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._unfinished = 0
        self._thread_count = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work in a thread and return what it returns, or raise what it raises.

        When the caller is cancelled, work that has begun goes on.
        """
        future: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
            self._work.put((future, work))
            if self._thread_count < min(self._unfinished, self._most):
                self._thread_count += 1
                Thread(target=self._live, name=self._name, daemon=True).start()
        return await asyncio.wrap_future(future)

    def _live(self) -> None:
        while True:
            try:
                future, work = self._work.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._work.empty():
                        self._thread_count -= 1
                        return
                continue
            self._finish(future, work)
            del future, work  # or the last result lives as long as the thread

    def _finish(self, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:  # it is the caller's
            future.set_exception(error)
        finally:
            with self._lock:
                self._unfinished -= 1
