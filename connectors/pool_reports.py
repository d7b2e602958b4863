"""Tells the manager of the memory pools that an engine has mapped: each generation, and again every minute.

A pool that nobody has told of takes no writes, and its blocks count as missing. A manager may forget what it was told:
it loses its state, or the storage is removed and added again. It cannot ask, so it is told again and again. Where a
host agent runs, it has told already, and this adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.transfer.engine import TransferEngine
from kvcm.connectors.transfer.mempool import AttachedPool
from kvcm.connectors.transfer.worker_pool import PRIORITY_SAVE, WorkerPool

__all__ = ["PoolReporter", "PoolReports"]

_REPORT_INTERVAL_SECONDS = 60.0
_CLOSE_SECONDS = 5.0


class PoolReports:
    """What the manager was told. `due_pools` and `report` may be called in different threads.

    Args:
        client: of the manager.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(self, client: ManagerClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._reported_at: dict[AttachedPool, float] = {}

    def due_pools(self, pools: Sequence[AttachedPool]) -> list[AttachedPool]:
        """Return the pools to tell of now; they are not due again within a minute unless telling fails."""
        now = self._clock()
        due = [
            pool
            for pool in pools
            if pool not in self._reported_at or now - self._reported_at[pool] >= _REPORT_INTERVAL_SECONDS
        ]
        self._reported_at.update(dict.fromkeys(due, now))
        return due

    def reset(self) -> None:
        """Hear that the manager may know nothing any more: all pools are due."""
        self._reported_at = {}

    def report(self, pools: Sequence[AttachedPool], timeout_seconds: float) -> None:
        """Tell of pools; blocks for the timeout per pool at most. Those that no manager takes are due again."""
        untold = set(pools)
        try:
            for pool in pools:
                answer = self._client.report_pool(
                    pool.storage, pool.node_id, pool.generation, pool.capacity_bytes, timeout_seconds=timeout_seconds
                )
                if answer is not None:
                    untold.discard(pool)
        finally:
            for pool in untold:
                self._reported_at.pop(pool, None)


class PoolReporter:
    """Looks after the pools of an engine in a thread of its own: finds or makes them, and tells the manager.

    Args:
        reports: to the manager.
        timeout_seconds: for each report.
    """

    def __init__(self, reports: PoolReports, timeout_seconds: float) -> None:
        self._reports = reports
        self._timeout_seconds = timeout_seconds
        self._thread = WorkerPool(1, "kvcm-pools")
        self._engine: TransferEngine | None = None
        self._last: Future[None] | None = None

    def report_pools(self, engine: TransferEngine) -> None:
        """Look after the pools of an engine once, unless that is under way; never blocks. Called before every use.

        Another engine than before, or none since `forget`: then everything is told again.
        """
        if not engine.has_pools or (engine is self._engine and self._last is not None and not self._last.done()):
            return
        is_another, self._engine = engine is not self._engine, engine

        def look() -> None:
            if is_another:
                self._reports.reset()
            self._reports.report(self._reports.due_pools(engine.pools()), self._timeout_seconds)

        self._last = self._thread.submit(PRIORITY_SAVE, look)

    def reset(self) -> None:
        """Hear that the manager may know nothing any more: everything is told again."""
        self._engine = None

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Begin nothing more, and wait a little for what is under way."""
        self._thread.close(timeout_seconds)
