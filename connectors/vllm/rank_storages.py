"""The storages of one rank: it does not register itself, the scheduler tells what the manager said.

One registration per engine: whatever vLLM changes in its configuration inside a worker, all ranks of an engine store
and load under one identity.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from connectors.client import ManagerClient
from connectors.pool_reports import PoolReports, PoolTeller
from connectors.transfer import TransferEngine
from connectors.transfer.pool import PRIORITY_LOAD, WorkerPool
from connectors.vllm.options import VllmOptions
from kvcm.model.storages import StorageConfig

__all__ = ["RankStorages"]

_log = logging.getLogger(__name__)


class RankStorages:
    """Makes what moves bytes, in the background, and again when the group's storages change.

    Args:
        client: of the manager, which is told of memory pools that are mapped here; closed with the storages.
        options: what is configured.
    """

    def __init__(self, client: ManagerClient, options: VllmOptions) -> None:
        self._client = client
        self._options = options
        self._changed = threading.Condition()
        self._engine: TransferEngine | None = None
        self._maker = WorkerPool(1, "kvcm-storages")
        self._pool_teller = PoolTeller(PoolReports(client), options.call_seconds)

    def use(self, storages: Sequence[StorageConfig]) -> None:
        """Move bytes to and from these storages from now on."""
        self._maker.submit(PRIORITY_LOAD, partial(self._use, storages))

    def engine(self, timeout_seconds: float) -> TransferEngine | None:
        """Return what moves bytes, None when there is nothing in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._engine is not None, max(0.0, timeout_seconds))
            engine = self._engine
        if engine is not None:
            self._pool_teller.look_after(engine)
        return engine

    def close(self, timeout_seconds: float) -> None:
        """Close everything; what hangs longer is left behind."""
        deadline = time.monotonic() + timeout_seconds
        self._maker.close(deadline - time.monotonic())
        self._pool_teller.close(deadline - time.monotonic())
        self._client.close()
        if self._engine is not None:
            self._engine.close(deadline - time.monotonic())

    def _use(self, storages: Sequence[StorageConfig]) -> None:
        threads, checksums = self._options.transfer_threads or None, self._options.checksums
        try:
            engine = TransferEngine.for_storages(storages, threads, checksums=checksums)
        except Exception:  # a storage's client may raise anything; the engine that we serve goes on
            _log.exception("the storages of the group cannot be used here, KV is not reused")
            return
        self._pool_teller.look_after(engine)
        with self._changed:
            before, self._engine = self._engine, engine
            self._changed.notify_all()
        if before is not None:
            before.close()
