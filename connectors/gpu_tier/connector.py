"""The GPU tier's connector to the manager and its storages.

    parts = BlockParts(kv_bytes=geometry.page_bytes, sidecars={kv.sidecar_spec("dsa", parameters): sidecar_bytes})
    connector = ManagerConnector.connect("127.0.0.1:6381", "default", "deepseek-tier", kv, parts)

Invariants:

1. No method of the tier's Protocol waits: the connector's threads call the manager and move bytes.
2. A lookup holds its read lease until it is released; nothing is read after the lease ends.
3. A started write session ends once, also when the connector is closed.
4. A failure is a miss, or blocks that are not stored. Lost and corrupt parts are reported to the manager.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.keys import KeyChain
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.results import CallCounters, Location, MatchMode, MatchResult, Outcome, Registration
from kvcm.connectors.reuse.loads import LoadReport, PartToLoad, missing_report
from kvcm.connectors.reuse.registration import InstanceSpecs, KvIdentity, ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.reuse.write_sessions import SavedBlocks, SessionSettings, WriteSessions, save_blocks
from kvcm.connectors.transfer import CancelToken, Failure, TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.worker_pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from kvcm.gpu_tier.connector import (
    KV_SPEC,
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
from kvcm.model.errors import ErrorCode, InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo
from kvcm.model.keys import BlockKey
from kvcm.model.storages import StorageConfig

__all__ = ["BlockParts", "BlockWrite", "FoundBlocks", "ManagerConnector", "MatchQuery", "PrefixLoad", "TierSettings"]

# The manager refuses longer read leases.
_MAX_LEASE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Deadlines and sizes. After a deadline the tokens are computed, or not stored.

    Attributes:
        register_seconds: for the registration when connecting.
        call_seconds: for each call to the manager afterwards.
        load_seconds: for loading all blocks of a prompt; together with `call_seconds` at most 600.
        save_seconds: for saving the blocks of one write session.
        session_seconds: the blocks that a killed engine reserved for its saves are free after this time.
        shutdown_seconds: for loads and saves in flight when the connector is closed.
        batch_bytes: blocks of so many bytes are loaded together, and become usable together; most of a write session.
        threads: prompts that are looked up, and as many that are loaded, at once.
        transfer_threads: most accesses to a storage at once; 0 = number of cores, at most 4.
        checksums: report the checksum of every saved part, and reject loaded parts with another one.
        follow_assignment: see `ClientSettings`.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    register_seconds: float = 5.0
    call_seconds: float = 1.0
    load_seconds: float = 30.0
    save_seconds: float = 30.0
    session_seconds: int = 30
    shutdown_seconds: float = 5.0
    batch_bytes: int = 64 << 20
    threads: int = 4
    transfer_threads: int = 0
    checksums: bool = True
    follow_assignment: bool = True

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name not in ("transfer_threads", "checksums", "follow_assignment")):
                raise InvalidArgumentError(f"{name} is {value}, must be > 0")
        if self.lease_seconds > _MAX_LEASE_SECONDS:
            raise InvalidArgumentError(
                f"load_seconds is {self.load_seconds}, must be <= {_MAX_LEASE_SECONDS - self.call_seconds:g}: "
                "what was found is not kept readable for longer"
            )

    @property
    def lease_seconds(self) -> float:
        """Duration of read leases."""
        return self.load_seconds + self.call_seconds


# ---- registration: identity and parts of the tier's blocks ----
#
# The identity is that of the KV alone, so engines that run different algorithms over the same KV share its blocks when
# they register the same parts. Which algorithm with which parameters a sidecar belongs to is in the part's name: for
# an engine with others there is no such part.

_ENGINE = "gpu_tier/1"
_HASHING = "kvcm-chain/2"
_KV_GROUP = "kv"


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The parts of a block.

    Attributes:
        kv_bytes: of a block's KV.
        sidecars: bytes of a block's sidecar by name of its spec: of all algorithms of the instance. Empty when no
            algorithm has one.
    """

    kv_bytes: int
    sidecars: Mapping[str, int]

    def __post_init__(self) -> None:
        if self.kv_bytes <= 0:
            raise InvalidArgumentError(f"kv_bytes is {self.kv_bytes}, must be > 0")
        for name, size in self.sidecars.items():
            if size <= 0 or name == KV_SPEC:
                raise InvalidArgumentError(f"sidecar {name!r} has {size} bytes, must be > 0, and not {KV_SPEC!r}")

    def specs(self, kv: KVFormat, instance_group: str) -> InstanceSpecs:
        """Return what the instance registers as; the same for every engine that names the same parts."""
        infos = [LocationSpecInfo(KV_SPEC, self.kv_bytes)]
        infos += [LocationSpecInfo(name, size) for name, size in sorted(self.sidecars.items())]
        groups = [LocationSpecGroup(_KV_GROUP, (KV_SPEC,))] if self.sidecars else []
        groups += [LocationSpecGroup(_group(name), tuple(sorted((KV_SPEC, name)))) for name in sorted(self.sidecars)]
        return InstanceSpecs(
            instance_group,
            block_tokens=kv.page_tokens,
            parts=infos,
            deployment=_kv_identity(kv).deployment(),
            part_groups=groups,
        )

    def group_of(self, parts: Mapping[str, object]) -> str:
        """Return the name of the group of parts that are written together, "" when there are no groups.

        Raises:
            InvalidArgumentError: KV is not among them, or the instance has no such sidecar.
        """
        sidecars = [name for name in parts if name != KV_SPEC]
        if KV_SPEC not in parts or len(sidecars) > 1 or not self.sidecars.keys() >= set(sidecars):
            known = ", ".join(self.sidecars) or "none"
            raise InvalidArgumentError(f"parts are {', '.join(parts)}, must be {KV_SPEC} and at most one of {known}")
        if not self.sidecars:
            return ""
        return _group(sidecars[0]) if sidecars else _KV_GROUP


def _kv_identity(kv: KVFormat) -> KvIdentity:
    """Return what the KV of given tokens depends on, besides the weights."""
    return KvIdentity(
        model=kv.model,
        engine=_ENGINE,
        dtype=kv.kv_dtype,
        hashing=_HASHING,
        formats={KV_SPEC: f"{kv.layout}, {kv.page_tokens} tokens, {kv.shape}"},
        use_mla=kv.kind == "mla",
        extra={"rope": json.dumps(dict(kv.rope), sort_keys=True)},
    )


def _group(sidecar: str) -> str:
    return f"{_KV_GROUP}+{sidecar}"


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """A lookup of leading blocks and their parts.

    Attributes:
        handle: of the tier's lookup.
        required: specs that a block must have to be a hit.
        optional: specs whose hits are counted apart.
    """

    handle: PrefixHandle
    required: tuple[str, ...]
    optional: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """The answer to a `MatchQuery`.

    Attributes:
        match: for the tier.
        locations: of the leading blocks that have all required specs.
        lease_id: keeps them readable; "" when there is no lease.
        usable_until: of the clock; nothing may be read later.
        engine: loads them; None without a hit.
    """

    match: PrefixMatch
    locations: tuple[Location, ...] = ()
    lease_id: str = ""
    usable_until: float = 0.0
    engine: TransferEngine | None = None


def _match_blocks(
    link: ManagerLink,
    query: MatchQuery,
    settings: TierSettings,
    statistics: ReuseStatistics,
    clock: Callable[[], float] = time.monotonic,
) -> FoundBlocks:
    """Ask the manager; blocks for `call_seconds`, and as long for a registration that is due."""
    engine = link.engine(settings.call_seconds)
    if engine is None:
        statistics.add(lookups_failed=1)
        return _no_blocks(f"not registered: {link.registration.message}")
    started = clock()
    answer = _match(link.client, query, settings)
    statistics.observe("lookup_seconds", clock() - started)
    if answer.outcome is not Outcome.OK:
        statistics.add(lookups_failed=1)
        if answer.code == ErrorCode.INSTANCE_NOT_EXIST:
            link.invalidate()  # the manager lost its state; the next prompt registers again
        return _no_blocks(answer.reason or "the manager did not answer")
    found = _complete_prefix(answer.locations, query.required)
    statistics.add(lookups=1, lookup_blocks=len(query.handle.keys), hit_blocks=len(found))
    optional = {name: len(_complete_prefix(found, (name,))) for name in query.optional}
    # The lease began before its answer came; no load starts after it ends.
    usable_until = started + settings.lease_seconds
    return FoundBlocks(
        PrefixMatch(len(found), optional),
        locations=found,
        lease_id=answer.lease_id,
        usable_until=usable_until,
        engine=engine,
    )


def _match(client: ManagerClient, query: MatchQuery, settings: TierSettings) -> MatchResult:
    keys: Sequence[BlockKey] = [BlockKey(key) for key in query.handle.keys]
    match = partial(
        client.match,
        keys,
        MatchMode.PREFIX,
        read_lease_ms=int(settings.lease_seconds * 1000),
        timeout_seconds=settings.call_seconds,
    )
    # With names, blocks that lack one of them are left out: right for required specs, wrong for optional ones.
    return match() if query.optional else match(spec_names=query.required)


def _complete_prefix(locations: Sequence[Location | None], names: Sequence[str]) -> tuple[Location, ...]:
    """Return the locations before the first one that lacks a part."""
    found: list[Location] = []
    for location in locations:
        if location is None or any(name not in location.uris for name in names):
            break
        found.append(location)
    return tuple(found)


def _no_blocks(reason: str) -> FoundBlocks:
    return FoundBlocks(PrefixMatch(0, reason=reason))


# ---- a load: the parts of a prefix, straight into the host pool ----
#
# Why not through staging memory, as engines' connectors do: the tier can wait for a page that a storage may still write
# to; it keeps the page until `LoadProgress.is_settled`. So the bytes are written once, in place.
#
# Blocks are loaded in order, a batch at a time. After the first batch with a failed required part no batch starts:
# blocks after a gap are of no use. An optional part that failed is left out from there on.

_Part = tuple[int, str]


class PrefixLoad:
    """Loads the blocks of one prefix in the thread that calls `run`; progress may be asked for from any.

    Args:
        query: that was asked.
        found: blocks to load.
        pages: where blocks go, in ascending order and without a gap.
        batch_bytes: most bytes at a time.
        checksums: whether parts must have the checksums of their locations.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        report: missing and corrupt parts, for the manager; once the load is done.
        is_refused: whether the engine does not know a storage, or refuses an address.
        has_begun: whether it was run.
    """

    def __init__(
        self,
        query: MatchQuery,
        found: FoundBlocks,
        pages: Sequence[PageDst],
        *,
        batch_bytes: int,
        checksums: bool = True,
        statistics: ReuseStatistics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = LoadReport((), ())
        self.is_refused = False
        self.has_begun = False
        self._query = query
        self._found = found
        self._pages = pages
        self._batch_bytes = batch_bytes
        self._checksums = checksums
        self._statistics = statistics or ReuseStatistics()
        self._clock = clock
        self._cancel = CancelToken()
        self._ends = {name: page.block for page in pages[:1] for name in page.parts}
        self._failed: dict[str, str] = {}
        self._is_hanging = False
        self._is_done = False

    def run(self, deadline_seconds: float) -> None:
        """Load what can be loaded in time."""
        self.has_begun = True
        deadline = min(self._clock() + deadline_seconds, self._found.usable_until)
        started = self._clock()
        try:
            for batch in self._batches():
                if self._cancel.is_cancelled or not self._load(batch, deadline):
                    break
        finally:
            self._statistics.observe("load_seconds", self._clock() - started)
            self._is_done = True

    def fail(self, reason: str) -> None:
        """End a load that never began, or went wrong."""
        self._failed[""] = reason
        self._is_done = True

    def cancel(self) -> None:
        """End as soon as may be."""
        self._cancel.cancel()

    def progress(self) -> LoadProgress:
        """Return how far it is."""
        engine, is_done = self._found.engine, self._is_done
        is_hanging = self._is_hanging and engine is not None and engine.hung_accesses > 0
        reason = next(iter(self._failed.values()), "")
        return LoadProgress(dict(self._ends), is_done, is_done and not is_hanging, reason)

    def _batches(self) -> Iterator[Sequence[PageDst]]:
        batch: list[PageDst] = []
        size_bytes = 0
        for page in self._pages:
            page_bytes = sum(piece.nbytes for pieces in page.parts.values() for piece in pieces)
            if batch and size_bytes + page_bytes > self._batch_bytes:
                yield batch
                batch, size_bytes = [], 0
            batch.append(page)
            size_bytes += page_bytes
        if batch:
            yield batch

    def _load(self, batch: Sequence[PageDst], deadline: float) -> bool:
        """Load some blocks; returns whether to go on."""
        engine = self._found.engine
        assert engine is not None  # something was found
        places = [(page.block, name) for page in batch for name in page.parts if name not in self._failed]
        items = [self._item(page, name) for page in batch for name in page.parts if name not in self._failed]
        results = engine.load(items, deadline - self._clock(), self._cancel)
        self._record_results(places, items, results)
        self._update_progress(places, results)
        return not any(name in self._failed for name in self._query.required)

    def _item(self, page: PageDst, name: str) -> TransferItem:
        location = self._found.locations[page.block]
        checksum = location.checksums.get(name, 0) if self._checksums else 0
        return TransferItem(location.uris[name], page.parts[name], checksum=checksum)

    def _record_results(
        self, places: Sequence[_Part], items: Sequence[TransferItem], results: Sequence[TransferResult]
    ) -> None:
        keys = self._query.handle.keys
        parts = [
            PartToLoad(BlockKey(keys[block]), item.uri, item.checksum)
            for (block, _), item in zip(places, items, strict=True)
        ]
        added = missing_report(parts, results, self._statistics)
        self.report = LoadReport(self.report.lost + added.lost, self.report.corrupt + added.corrupt)
        self._is_hanging |= any(result.failure is Failure.PENDING for result in results)
        self.is_refused |= any(result.failure is Failure.REFUSED for result in results)

    def _update_progress(self, places: Sequence[_Part], results: Sequence[TransferResult]) -> None:
        ends = dict(self._ends)
        for (block, name), result in zip(places, results, strict=True):
            if name in self._failed:
                continue
            if result.ok:
                ends[name] = block + 1
            else:
                self._failed[name] = f"block {block}, {name}: {result.reason}"
        self._ends = ends


# One write: blocks with all of their parts, in sessions of bounded size, one after the other.


class BlockWrite:
    """Writes consecutive blocks of one chain in the thread that calls `run`.

    A part is asked leave for only where it is missing: of a block whose KV another engine stored, the sidecar alone is
    written. After a failure nothing more is written: what follows a gap could not be matched.

    Args:
        parent: key before the first block, None at the start of a prompt.
        pages: what to write.
        parts: of the instance's blocks.

    Attributes:
        has_begun: whether it was run.
    """

    def __init__(self, parent: int | None, pages: Sequence[PageSrc], parts: BlockParts) -> None:
        self.has_begun = False
        self._parent = None if parent is None else BlockKey(parent)
        self._pages = pages
        self._parts = parts
        self._groups = [parts.group_of(page.parts) for page in pages]
        self._cancel = CancelToken()
        self._progress = WriteProgress(False)

    @property
    def progress(self) -> WriteProgress:
        """How far it is."""
        return self._progress

    def cancel(self) -> None:
        """End as soon as may be."""
        self._cancel.cancel()

    def fail(self, reason: str) -> None:
        """End a write that never began, or went wrong."""
        self._progress = WriteProgress(True, self._progress.stored, reason)

    def run(
        self,
        link: ManagerLink,
        sessions: WriteSessions,
        settings: TierSettings,
        statistics: ReuseStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write what the manager does not have, and publish it."""
        self.has_begun = True
        engine = link.engine(settings.call_seconds)
        if engine is None:
            statistics.count_unsaved(Unsaved.UNREGISTERED, len(self._pages), link.registration.message)
            self.fail(f"not registered: {link.registration.message}")
            return
        for start, stop in self._batches(settings.batch_bytes):
            saved = self._save(
                start,
                stop=stop,
                engine=engine,
                sessions=sessions,
                settings=settings,
                statistics=statistics,
                clock=clock,
            )
            leading = next((i for i, is_stored in enumerate(saved.stored) if not is_stored), len(saved.stored))
            self._progress = WriteProgress(False, start + leading)
            if saved.reason or leading < stop - start:
                self.fail(saved.reason)
                return
        self._progress = WriteProgress(True, len(self._pages))

    def _batches(self, batch_bytes: int) -> Iterator[tuple[int, int]]:
        start = size_bytes = 0
        for position, page in enumerate(self._pages):
            page_bytes = sum(piece.nbytes for pieces in page.parts.values() for piece in pieces)
            if position > start and size_bytes + page_bytes > batch_bytes:
                yield start, position
                start, size_bytes = position, 0
            size_bytes += page_bytes
        if self._pages:
            yield start, len(self._pages)

    def _save(
        self,
        start: int,
        stop: int,
        engine: TransferEngine,
        sessions: WriteSessions,
        settings: TierSettings,
        statistics: ReuseStatistics,
        clock: Callable[[], float],
    ) -> SavedBlocks:
        pages = self._pages[start:stop]
        parent = BlockKey(self._pages[start - 1].key) if start else self._parent
        return save_blocks(
            sessions,
            engine=engine,
            keys=[BlockKey(page.key) for page in pages],
            parent=parent,
            memory_of=lambda index, name: pages[index].parts[name],
            deadline_seconds=settings.save_seconds,
            part_groups=self._groups[start:stop] if self._parts.sidecars else (),
            cancel=self._cancel,
            statistics=statistics,
            clock=clock,
        )


_log = logging.getLogger(__name__)


class _PendingMatch:
    """A query, and its answer once there is one. The second of answer and release returns the lease to give back."""

    def __init__(self, query: MatchQuery) -> None:
        self.query = query
        self.found: FoundBlocks | None = None
        self._is_released = False
        self._lock = threading.Lock()

    def resolve(self, found: FoundBlocks) -> str:
        """Set the answer; return the lease to give back, "" when it is needed or there is none."""
        with self._lock:
            self.found = found
            return found.lease_id if self._is_released else ""

    def release(self) -> str:
        """Drop the answer; return the lease to give back, "" when there is none."""
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
        self._chain = KeyChain(_kv_identity(kv).namespace(kv.weights), kv.page_tokens)
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._memory: tuple[memoryview, ...] = ()
        specs = parts.specs(kv, instance_group)
        self._link = ManagerLink(
            client, specs=specs, call_seconds=settings.call_seconds, make_engine=self._make_engine, clock=clock
        )
        session = SessionSettings(settings.session_seconds, call_seconds=settings.call_seconds)
        self._sessions = WriteSessions(client, session, clock)
        self._lookups = WorkerPool(settings.threads, "kvcm-tier-lookup")
        self._loaders = WorkerPool(settings.threads, "kvcm-tier-load")
        self._background = WorkerPool(1, "kvcm-tier-publish")  # one, so that the blocks of a chain are stored in order
        self._numbers = itertools.count()
        self._by_handle: dict[int, _PendingMatch] = {}
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

        A rejected registration (another format under this instance id) raises nothing: it is logged as an error,
        `registration` holds the reason, and every lookup is a miss.
        """
        settings = settings or TierSettings()
        node_id = NodeSettings.from_environment().node_id
        credentials = ClientCredentials.from_environment()
        client = ManagerClient(
            manager,
            instance_id,
            ClientSettings(
                timeout_seconds=settings.call_seconds,
                node_id=node_id,
                credentials=credentials,
                follow_assignment=settings.follow_assignment,
            ),
        )
        connector = cls(client, instance_group, kv, parts, settings, clock)
        connector._link.register(settings.register_seconds)
        return connector

    @property
    def registration(self) -> Registration:
        """Last answer of the manager to the registration."""
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
        engine = self._link.engine_if_ready()  # one that is made later registers the memory then
        if engine is not None:
            self._register_memory(engine)

    def match_prefix(self, keys: Sequence[int], required: Sequence[str], optional: Sequence[str] = ()) -> PrefixHandle:
        """See `KVConnector`."""
        handle = PrefixHandle(next(self._numbers), tuple(keys))
        lookup = self._by_handle[handle.number] = _PendingMatch(MatchQuery(handle, tuple(required), tuple(optional)))
        if keys:
            self._lookups.submit(PRIORITY_LOAD, partial(self._run_match, lookup))
        else:
            lookup.resolve(FoundBlocks(PrefixMatch(0)))
        return handle

    def matched(self, handle: PrefixHandle) -> PrefixMatch | None:
        """See `KVConnector`."""
        found = self._by_handle[handle.number].found
        return None if found is None else found.match

    def load(self, handle: PrefixHandle, pages: Sequence[PageDst]) -> LoadTicket:
        """See `KVConnector`."""
        lookup = self._by_handle[handle.number]
        assert lookup.found is not None  # the tier loads only hits of `matched`
        ticket = LoadTicket(next(self._numbers))
        load = self._loads[ticket.number] = PrefixLoad(
            lookup.query,
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
        self._release_lease_soon(self._by_handle.pop(handle.number).release())

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
        """See `KVConnector`. Transfers that hang for longer than `shutdown_seconds` are left behind, and calls to the
        manager after `call_seconds`."""
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

    def _run_match(self, lookup: _PendingMatch) -> None:
        try:
            found = _match_blocks(
                self._link,
                query=lookup.query,
                settings=self._settings,
                statistics=self.statistics,
                clock=self._clock,
            )
        except Exception as error:  # a miss, whatever it is
            _log.exception("a lookup went wrong")
            found = FoundBlocks(PrefixMatch(0, reason=repr(error)))
        self._release_lease_soon(lookup.resolve(found))

    def _release_lease_soon(self, lease_id: str) -> None:
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
            self._lookups.submit(PRIORITY_SAVE, partial(self._report_missing, load))
        if load.is_refused:
            self._link.invalidate()  # perhaps a storage was added since

    def _report_missing(self, load: PrefixLoad) -> None:
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
