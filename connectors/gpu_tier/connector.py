"""The GPU tier's connector to the manager and its storages.

    parts = BlockParts(kv_bytes=geometry.page_bytes, sidecars={kv.sidecar_spec("dsa", parameters): sidecar_bytes})
    connector = ManagerConnector.connect("127.0.0.1:6381", "default", "deepseek-tier", kv, parts)

Invariants:

1. No method of the tier's Protocol waits: threads of this room call the manager and move bytes.
2. A lookup holds its read lease until it is released; nothing is read after the lease ends.
3. A write session that was begun ends once, also when the connector is closed.
4. Whatever fails is a miss, or blocks that are not stored. What was found lost or corrupt is told to the manager.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from connectors.client import ManagerClient
from connectors.credentials import ClientCredentials
from connectors.exchanges import ClientSettings
from connectors.gpu_tier.identity import BlockParts, kv_identity
from connectors.gpu_tier.loads import PrefixLoad
from connectors.gpu_tier.lookup import FoundBlocks, Question, ask
from connectors.gpu_tier.settings import TierSettings
from connectors.gpu_tier.writes import BlockWrite
from connectors.keys import KeyChain
from connectors.node import NodeSettings
from connectors.results import CallCounters, Registration
from connectors.reuse.link import ManagerLink
from connectors.reuse.sessions import SessionSettings, WriteSessions
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import TransferEngine
from connectors.transfer.pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from gpu_tier.connector import (
    KVFormat,
    LoadProgress,
    LoadTicket,
    PageDst,
    PageSrc,
    PrefixHandle,
    PrefixMatch,
    WriteProgress,
    WriteTicket,
)
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageConfig

__all__ = ["ManagerConnector"]

_log = logging.getLogger(__name__)


class _Lookup:
    """A question, and its answer once it is there. Whoever comes second, answer or release, gives the lease back."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.found: FoundBlocks | None = None
        self._is_released = False
        self._lock = threading.Lock()

    def answer(self, found: FoundBlocks) -> str:
        """Take the answer; returns the lease that nobody needs any more, "" when it is needed or there is none."""
        with self._lock:
            self.found = found
            return found.lease_id if self._is_released else ""

    def release(self) -> str:
        """Hear that the answer is not needed any more; returns as `answer` does."""
        with self._lock:
            self._is_released = True
            return self.found.lease_id if self.found is not None else ""


class ManagerConnector:
    """Loads and stores the tier's blocks; made with `connect`. The tier's calls come from one thread.

    Args:
        client: of the manager; closed with the connector.
        instance_group: existing group whose quota and storages are used.
        kv: format of the KV.
        parts: of a block.
        settings: deadlines and sizes.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        statistics: counts of lookups, loads and saves.
    """

    def __init__(
        self,
        client: ManagerClient,
        instance_group: str,
        kv: KVFormat,
        parts: BlockParts,
        settings: TierSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statistics = ReuseStatistics()
        self._chain = KeyChain(kv_identity(kv).namespace, kv.page_tokens)
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._memory: tuple[memoryview, ...] = ()
        specs = parts.specs(kv, instance_group)
        self._link = ManagerLink(client, specs, settings.call_seconds, self._make_engine, clock)
        session = SessionSettings(settings.session_seconds, call_seconds=settings.call_seconds)
        self._sessions = WriteSessions(client, session, clock)
        self._lookups = WorkerPool(settings.threads, "kvcm-tier-lookup")
        self._loaders = WorkerPool(settings.threads, "kvcm-tier-load")
        self._background = WorkerPool(1, "kvcm-tier-publish")  # one, so that the blocks of a chain are stored in order
        self._numbers = itertools.count()
        self._by_handle: dict[int, _Lookup] = {}
        self._loads: dict[int, PrefixLoad] = {}
        self._writes: dict[int, BlockWrite] = {}

    @classmethod
    def connect(
        cls,
        manager: str | Sequence[str],
        instance_group: str,
        instance_id: str,
        kv: KVFormat,
        parts: BlockParts,
        *,
        settings: TierSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> ManagerConnector:
        """Register the tier's blocks with the manager.

        Args:
            manager: `host:port` of each manager, a list or separated by commas. It need not be there yet.
            instance_group: existing group whose quota and storages are used.
            instance_id: shared by all engines with this format and these parts.
            kv: format of the KV.
            parts: of a block.
            settings: deadlines and sizes.
            clock: seconds of a clock that never runs backwards.

        Raises:
            InvalidArgumentError: an argument, or a variable of `NodeSettings` or `ClientCredentials`, is malformed.

        A manager that refuses the registration (another format under this instance id) is no exception: it is logged
        as an error, `registration` tells, and every lookup is a miss.
        """
        settings = settings or TierSettings()
        node_id = NodeSettings.from_environment().node_id
        credentials = ClientCredentials.from_environment()
        client = ManagerClient(
            manager,
            instance_id,
            ClientSettings(timeout_seconds=settings.call_seconds, node_id=node_id, credentials=credentials),
        )
        connector = cls(client, instance_group, kv, parts, settings, clock)
        connector._link.register(settings.register_seconds)
        return connector

    @property
    def registration(self) -> Registration:
        """What the manager last said to the registration."""
        return self._link.registration

    @property
    def counters(self) -> dict[str, CallCounters]:
        """Snapshot of how the calls to the manager ended."""
        return self._link.client.counters()

    def page_keys(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the key of every full page of a prompt."""
        return tuple(self._chain.keys(token_ids))

    def use_memory(self, memory: Sequence[memoryview]) -> None:
        """See `KVConnector`."""
        self._memory = tuple(memory)
        engine = self._link.engine_now()  # one that is made later is told when it is made
        if engine is not None:
            self._register_memory(engine)

    def match_prefix(self, keys: Sequence[int], required: Sequence[str], optional: Sequence[str] = ()) -> PrefixHandle:
        """See `KVConnector`."""
        handle = PrefixHandle(next(self._numbers), tuple(keys))
        lookup = self._by_handle[handle.number] = _Lookup(Question(handle, tuple(required), tuple(optional)))
        if keys:
            self._lookups.submit(PRIORITY_LOAD, partial(self._look_up, lookup))
        else:
            lookup.answer(FoundBlocks(PrefixMatch(0)))
        return handle

    def matched(self, handle: PrefixHandle) -> PrefixMatch | None:
        """See `KVConnector`."""
        found = self._by_handle[handle.number].found
        return None if found is None else found.match

    def load(self, handle: PrefixHandle, pages: Sequence[PageDst]) -> LoadTicket:
        """See `KVConnector`."""
        lookup = self._by_handle[handle.number]
        assert lookup.found is not None  # the tier loads what it was told of
        ticket = LoadTicket(next(self._numbers))
        load = self._loads[ticket.number] = PrefixLoad(
            lookup.question,
            lookup.found,
            pages,
            batch_bytes=self._settings.batch_bytes,
            checksums=self._settings.checksums,
            statistics=self.statistics,
            clock=self._clock,
        )
        self._loaders.submit(PRIORITY_LOAD, partial(self._run_load, load))
        return ticket

    def poll(self, ticket: LoadTicket) -> LoadProgress:
        """See `KVConnector`."""
        progress = self._loads[ticket.number].progress()
        if progress.is_settled:
            del self._loads[ticket.number]
        return progress

    def cancel(self, ticket: LoadTicket) -> None:
        """See `KVConnector`."""
        self._loads[ticket.number].cancel()

    def release(self, handle: PrefixHandle) -> None:
        """See `KVConnector`."""
        self._give_back(self._by_handle.pop(handle.number).release())

    def write(self, parent: int | None, pages: Sequence[PageSrc]) -> WriteTicket:
        """See `KVConnector`."""
        ticket = WriteTicket(next(self._numbers))
        write = self._writes[ticket.number] = BlockWrite(parent, pages, self._parts)
        self._background.submit(PRIORITY_SAVE, partial(self._run_write, write))
        return ticket

    def poll_write(self, ticket: WriteTicket) -> WriteProgress:
        """See `KVConnector`."""
        progress = self._writes[ticket.number].progress
        if progress.is_done:
            del self._writes[ticket.number]
        return progress

    def close(self) -> None:
        """See `KVConnector`. What hangs for longer than `shutdown_seconds` is left behind."""
        seconds = self._settings.shutdown_seconds
        deadline = self._clock() + seconds
        jobs: list[PrefixLoad | BlockWrite] = [*self._loads.values(), *self._writes.values()]
        for job in jobs:
            job.cancel()
        for pool in (self._lookups, self._loaders, self._background):
            pool.close(max(0.0, deadline - self._clock()))
        for job in jobs:
            if not job.has_begun:  # and never will
                job.fail("the connector was closed")
        self._sessions.close(self._settings.call_seconds)
        self._link.close(max(self._settings.call_seconds, deadline - self._clock()))

    def __enter__(self) -> ManagerConnector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _look_up(self, lookup: _Lookup) -> None:
        try:
            found = ask(self._link, lookup.question, self._settings, self.statistics, self._clock)
        except Exception as error:  # a miss, whatever it is
            _log.exception("a lookup went wrong")
            found = FoundBlocks(PrefixMatch(0, reason=repr(error)))
        self._give_back(lookup.answer(found))

    def _give_back(self, lease_id: str) -> None:
        if lease_id:
            self._lookups.submit(PRIORITY_SAVE, lambda: self._release_lease(lease_id))

    def _release_lease(self, lease_id: str) -> None:
        self._link.client.release_lease(lease_id, timeout_seconds=self._settings.call_seconds)

    def _run_load(self, load: PrefixLoad) -> None:
        try:
            load.run(self._settings.load_seconds)
        except Exception as error:
            _log.exception("a load went wrong")
            load.fail(repr(error))
        if load.report:
            # Otherwise the manager would promise these blocks forever.
            self._lookups.submit(PRIORITY_SAVE, partial(self._tell, load))
        if load.is_refused:
            self._link.forget()  # perhaps a storage was added since

    def _tell(self, load: PrefixLoad) -> None:
        lost, corrupt = load.report
        self._link.client.report_missing(lost, corrupt=corrupt, timeout_seconds=self._settings.call_seconds)

    def _run_write(self, write: BlockWrite) -> None:
        try:
            write.run(self._link, self._sessions, self._settings, self.statistics, self._clock)
        except Exception as error:
            _log.exception("a write went wrong")
            write.fail(repr(error))

    def _make_engine(self, storages: Sequence[StorageConfig]) -> TransferEngine:
        settings = self._settings
        engine = TransferEngine.for_storages(storages, settings.transfer_threads or None, checksums=settings.checksums)
        self._register_memory(engine)
        return engine

    def _register_memory(self, engine: TransferEngine) -> None:
        try:
            engine.register_memory(self._memory)
        except InvalidArgumentError as error:
            _log.warning("blocks are copied on their way to a storage: %s", error)
