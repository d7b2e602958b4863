"""Reports the memory pools that an engine has mapped to the manager: each generation, and again every minute.

A pool without a report takes no writes, and its blocks count as missing. A manager may lose reports: with its state, or
when the storage is removed and added again. It cannot request them, so they are repeated. Where a host agent runs, its
reports suffice, and these add nothing.
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
    """The reports that a manager has. `due_pools` and `report` may be called in different threads.

    Args:
        client: of the manager.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(self, client: ManagerClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._reported_at: dict[AttachedPool, float] = {}

    def due_pools(self, pools: Sequence[AttachedPool]) -> list[AttachedPool]:
        """Return the pools to report now; they are not due again within a minute unless the report fails."""
        now = self._clock()
        due = [
            pool
            for pool in pools
            if pool not in self._reported_at or now - self._reported_at[pool] >= _REPORT_INTERVAL_SECONDS
        ]
        self._reported_at.update(dict.fromkeys(due, now))
        return due

    def reset(self) -> None:
        """Make all pools due, since the manager may have lost its reports."""
        self._reported_at = {}

    def report(self, pools: Sequence[AttachedPool], timeout_seconds: float) -> None:
        """Report pools; blocks for the timeout per pool at most. Those that no manager confirms are due again."""
        unconfirmed = set(pools)
        try:
            for pool in pools:
                answer = self._client.report_pool(
                    pool.storage, pool.node_id, pool.generation, pool.capacity_bytes, timeout_seconds=timeout_seconds
                )
                if answer is not None:
                    unconfirmed.discard(pool)
        finally:
            for pool in unconfirmed:
                self._reported_at.pop(pool, None)


class PoolReporter:
    """Finds or creates the pools of an engine, and reports them, in a thread of its own.

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
        """Report the due pools of an engine, unless that is under way; never blocks. Called before every use.

        After `reset`, and for another engine than before, all pools are due.
        """
        if not engine.has_pools or (engine is self._engine and self._last is not None and not self._last.done()):
            return
        is_another, self._engine = engine is not self._engine, engine

        def report_due_pools() -> None:
            if is_another:
                self._reports.reset()
            self._reports.report(self._reports.due_pools(engine.pools()), self._timeout_seconds)

        self._last = self._thread.submit(PRIORITY_SAVE, report_due_pools)

    def reset(self) -> None:
        """Make all pools due at the next call, since the manager may have lost its reports."""
        self._engine = None

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Start no more reports, and wait a little for the one in flight."""
        self._thread.close(timeout_seconds)
