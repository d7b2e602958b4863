"""`kvcm index verify`: whether a store holds what the invariants promise.

* Invariant 4: per instance and lock shard the usage kept with the records is that of the records; the counters that
  managers share, of groups, storages and all together, are the sums of those.
* Invariant 5: no two locations share an extent.
* Of every block, the record and all that is derived from it agree; nothing is being written past its deadline or by a
  session that is gone; what cannot be read is named.
* Documents can be read, become due, and belong to instances that exist; so do all keys of blocks.

Memory does not grow with the index. Other managers may change a shared store meanwhile, and a block cannot be read at
one moment. So a difference is only a suspect, and a finding when it is the same after a pause; usage of a shard is
compared with a recount during which it did not change, twice.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcm.cache.audit_report import AuditReport, Finding, Repair
from kvcm.cache.instance_cache import InstanceCache, OpenCaches
from kvcm.cache.pins import Pin
from kvcm.cache.quotas import SharedLedger, field_title
from kvcm.cache.read_leases import ReadLease
from kvcm.cache.usage_recount import UsageRecount
from kvcm.cache.write_sessions import SessionStore, WriteSession
from kvcm.index.backends.audit import AuditedIndex, Claims, StoredBlock, faults
from kvcm.index.backends.backend import PlaceTally, Sum, sums_of
from kvcm.index.locking import shards_of
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import REGISTRY_STORE, GroupStore, Placement, Registration, Removal, StoreMove
from kvcm.model.keys import unmixed_key
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk
from kvcm.model.principals import Account
from kvcm.model.storages import StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.registry.document_cache import decode_document
from kvcm.registry.instances import ReservedInstances
from kvcm.registry.registry import Registry
from kvcm.store.store import Store, Table

__all__ = [
    "AuditedStore",
    "BlockAudit",
    "DocumentAudit",
    "Extent",
    "ExtentPart",
    "IndexAuditor",
    "Owner",
    "Pause",
    "StoredBlocks",
    "overlapping",
    "part_count",
]

# Invariant 5: an extent of a storage belongs to exactly one location.
#
# Extents are gathered in parts by a hash of the object's name. Each part is sorted by object and offset, where overlaps
# are neighbours. A part has `_PART_EXTENTS` of 40 bytes on average, and sorting takes as much again: 200 MB at most.
# The number of passes grows with the index. Objects are compared by 64 bits of a hash; `overlapping` compares names.

_PART_EXTENTS: Final = 2_000_000
_WHOLE: Final = 1 << 62
_OBJECT_BITS: Final = 63


class Owner(NamedTuple):
    """A block of an instance."""

    uid: int
    key: int


class Extent(NamedTuple):
    """Bytes of an object; of one that is not packed all there are."""

    object_name: str
    start: int
    end: int


def part_count(extents: int) -> int:
    """Return into how many parts to cut so many extents."""
    return max(1, -(-extents // _PART_EXTENTS))


def _extents_of(location: Location) -> list[Extent]:
    """Return what a location has of its storage; specs that are not there have nothing.

    Raises:
        InvalidArgumentError: a uri cannot be read.
    """
    return [_extent(spec.uri) for spec in decode_chunk(location.chunk).specs if spec.uri]


def overlapping(one: Location, other: Location) -> Extent | None:
    """Return an extent of `one` that `other` has too, None when there is none."""
    others = _extents_of(other)
    for mine in _extents_of(one):
        for theirs in others:
            if mine.object_name == theirs.object_name and mine.start < theirs.end and theirs.start < mine.end:
                return mine
    return None


def _extent(uri: str) -> Extent:
    parsed = LocationUri.parse(uri)
    # Of a pool's memory the stamp says whose it is: what was freed may have the place of what is there now.
    whose = parsed.key if parsed.range_id is None else parsed.range_id
    name = f"{parsed.scheme}://{parsed.storage}{parsed.path}?{whose or ''}"
    if parsed.blkid is None:
        return Extent(name, 0, _WHOLE)
    start = min(parsed.offset, _WHOLE - 1)  # what a storage cannot hold still has to fit into a column
    return Extent(name, start, min(start + max(1, parsed.size), _WHOLE))


class ExtentPart:
    """The extents of the objects of one part.

    Args:
        number: of the part, counted from 0.
        count: number of parts.
    """

    def __init__(self, number: int, count: int) -> None:
        self._number = number
        self._count = count
        self._columns = tuple(array("q") for _ in range(5))  # object, start, end, uid, key

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, owner: Owner, record: BlockRecord) -> str:
        """Add what the locations of a block have in this part; return why a uri cannot be read, "" when all can."""
        damage = ""
        for location in record.locations:
            try:
                for name, start, end in _extents_of(location):
                    digest = xxh3_64_intdigest(name.encode())
                    if digest % self._count == self._number:
                        self._append(digest >> (64 - _OBJECT_BITS), start, end, *owner)
            except InvalidArgumentError as error:
                damage = str(error)
        return damage

    def suspects(self, most: int) -> Iterator[tuple[Owner, Owner]]:
        """Yield pairs of blocks whose extents overlap, by the hashes of their objects; a block with itself, too."""
        if len(self) < 2:
            return
        objects, starts, ends, uids, keys = (np.frombuffer(column, np.int64) for column in self._columns)
        order = np.lexsort((starts, objects))
        objects, starts, ends, uids, keys = (column[order] for column in (objects, starts, ends, uids, keys))
        same = objects[1:] == objects[:-1]
        touched = np.unique(objects[1:][same & (starts[1:] < ends[:-1])])  # if any two overlap, some neighbours do
        found = 0
        for name in touched:
            first, last = np.searchsorted(objects, (name, name + 1))
            reach, holder = -1, first
            for at in range(first, last):
                if starts[at] < reach:
                    yield Owner(int(uids[holder]), int(keys[holder])), Owner(int(uids[at]), int(keys[at]))
                    found += 1
                    if found >= most:
                        return
                if ends[at] > reach:
                    reach, holder = int(ends[at]), at

    def _append(self, *values: int) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)


# Verification of one instance's blocks. In memory: one batch of blocks, suspects, findings, keys of a suspect shard.

Pause = Callable[[], Awaitable[None]]
"""Waits until changes under way are stored."""
_MOST_SUSPECTS: Final = 10_000
_MOST_LEFT: Final = 100_000  # beyond, a block may be counted as often as ways lead to it
_OVERDUE_SECONDS: Final = 10.0  # the leader looks twice a second, and takes over after five
_TRIES: Final = 4
_RESTART = "the next start of the manager rebuilds it from the records"


class _BlockDefect(NamedTuple):
    problem: str
    writer: str | None = None  # session that has to be ended, None for derived things


class _Suspect(NamedTuple):
    parents: frozenset[int]
    wrong: frozenset[_BlockDefect]


class BlockAudit:
    """The blocks of one instance.

    Args:
        cache: the instance; changed only by repairs.
        audited: the same records with all that is derived from them.
        sessions: the documents of write sessions.
        endings: roll writers back.
        clock: time source.
        pause: between two looks at a suspect.
        repair: what may be changed.
        report: takes findings.
    """

    def __init__(
        self,
        cache: InstanceCache,
        audited: AuditedIndex,
        sessions: Table,
        endings: SessionStore,
        clock: Clock,
        pause: Pause,
        repair: Repair,
        report: AuditReport,
    ) -> None:
        self.cache = cache
        self._audited = audited
        self._sessions = sessions
        self._endings = endings
        self._clock = clock
        self._pause = pause
        self._repair = repair
        self._report = report
        self._suspects: defaultdict[int, dict[int, _Suspect]] = defaultdict(dict)
        self._suspect_count = 0
        # What was found and is not mended: another way to the same block may lead there after it was judged.
        self._left: dict[tuple[int, int], frozenset[_BlockDefect]] = {}

    async def run(self, extents: ExtentPart, progress: Callable[[int], None]) -> None:
        """Look at every block.

        Args:
            extents: takes what the blocks have of storages.
            progress: called with the number of blocks of each batch.
        """
        wrong_sums = []
        for shard in self._audited.shards:
            counted, records = await self._check_listed(shard, extents, progress)
            async for claims in self._audited.unlisted(shard):
                await self.inspect(shard, claims)
            self._report.checked["records"] += records
            if counted != await self._audited.usage(shard):
                wrong_sums.append(shard)
        await self.confirm()
        await self._confirm_usage(wrong_sums)
        await self._check_key_count()

    async def snapshots(self, keys: Sequence[int], shard: int | None = None) -> list[StoredBlock]:
        """Return what there is of some blocks of one shard, which is that of the first when it is not given."""
        if shard is None:
            (shard,) = shards_of(keys[:1], len(self._audited.shards))
        return await self._audited.read_blocks(shard, dict.fromkeys(keys, frozenset()))

    async def gather(self, extents: ExtentPart) -> None:
        """Add what the blocks have of storages, and look at nothing else."""
        uid = self.cache.placement.uid
        for shard in self._audited.shards:
            async for claims in self._audited.listed(shard):
                for view in await self._audited.read_blocks(shard, claims):
                    if view.record is not None:
                        extents.add(Owner(uid, view.key), view.record)

    async def inspect(self, shard: int, claims: Claims) -> list[StoredBlock]:
        """Look at blocks, and remember those that look wrong."""
        views = await self._audited.read_blocks(shard, claims)
        for key, wrong in (await self._find_defects(views)).items():
            self._suspect(shard, key, _Suspect(claims[key], frozenset(wrong)))
        if self._suspect_count >= _MOST_SUSPECTS:
            await self.confirm()
        return views

    async def confirm(self) -> None:
        """Look at the suspects again, after a pause; report and mend those that still are wrong."""
        suspects, self._suspects, self._suspect_count = self._suspects, defaultdict(dict), 0
        if not suspects:
            return
        await self._pause()
        for shard, of_shard in suspects.items():
            claims = {key: suspect.parents for key, suspect in of_shard.items()}
            views = await self._audited.read_blocks(shard, claims)
            again = await self._find_defects(views)
            for view in views:
                wrong = of_shard[view.key].wrong & frozenset(again.get(view.key, ()))
                wrong -= self._left.get((shard, view.key), frozenset())
                if wrong:
                    await self._report_defects(shard, view, sorted(wrong, key=lambda each: each.problem))

    def _suspect(self, shard: int, key: int, suspect: _Suspect) -> None:
        known = self._suspects[shard].get(key)
        if known is None:
            self._suspect_count += 1
        else:
            suspect = _Suspect(known.parents | suspect.parents, known.wrong | suspect.wrong)
        self._suspects[shard][key] = suspect

    async def _check_listed(
        self, shard: int, extents: ExtentPart, progress: Callable[[int], None]
    ) -> tuple[dict[Sum, int], int]:
        counted = PlaceTally()
        records = 0
        async for claims in self._audited.listed(shard):
            for view in await self.inspect(shard, claims):
                if view.record is None:
                    continue
                records += 1
                counted.change(None, view.record)
                damage = extents.add(Owner(self.cache.placement.uid, view.key), view.record)
                if damage:
                    self._report.add(Finding("uri", self._location_of(view.key), damage, "none: remove the block"))
            progress(len(claims))
        return sums_of(counted.used, counted.deleting, counted.deleting_blocks), records

    async def _find_defects(self, views: Sequence[StoredBlock]) -> dict[int, list[_BlockDefect]]:
        open_sessions: dict[str, bool] = {}
        wrong: dict[int, list[_BlockDefect]] = {}
        for view in views:
            found = list(map(_BlockDefect, faults(view)))
            for location in _writing(view):
                what = await self._find_writer_defect(location, open_sessions)
                if what:
                    found.append(_BlockDefect(f"location {location.id} {what}", location.session_id))
            if found:
                wrong[view.key] = found
        return wrong

    async def _find_writer_defect(self, location: Location, open_sessions: dict[str, bool]) -> str:
        if location.deadline + _OVERDUE_SECONDS < self._clock.now():
            return "is still being written, past the deadline of its session"
        name = location.session_id
        if name not in open_sessions:
            open_sessions[name] = await self._sessions.get(name) is not None
        return "" if open_sessions[name] else "is being written by a session that is gone"

    async def _report_defects(self, shard: int, view: StoredBlock, wrong: Sequence[_BlockDefect]) -> None:
        if view.damage:
            repair = "with --drop-unreadable forgets the block; its bytes are left to the scrub"
            is_mended = await self._drop(shard, view)
        else:
            repair = self._repair_text(wrong)
            is_mended = self._repair.repair and await self._mend(shard, view, wrong)
        if not is_mended and len(self._left) < _MOST_LEFT:
            self._left[shard, view.key] = self._left.get((shard, view.key), frozenset()) | frozenset(wrong)
        what = "; ".join(each.problem for each in wrong)
        self._report.add(Finding("block", self._location_of(view.key), what, repair, is_mended))

    def _repair_text(self, wrong: Sequence[_BlockDefect]) -> str:
        texts = ["rolls the writer back"] if any(each.writer is not None for each in wrong) else []
        if any(each.writer is None for each in wrong):
            texts.append("makes the derived keys anew from the record" if self._audited.can_mend else _RESTART)
        return ", ".join(texts)

    async def _mend(self, shard: int, view: StoredBlock, wrong: Sequence[_BlockDefect]) -> bool:
        writers = {each.writer for each in wrong if each.writer is not None}
        is_mended = all(each.writer is not None for each in wrong) or await self._audited.mend(shard, view)
        if is_mended and writers:
            await self._endings.expire_writers(self.cache, {session_id: [view.key] for session_id in writers})
        return is_mended

    async def _drop(self, shard: int, view: StoredBlock) -> bool:
        if not (self._repair.repair and self._repair.drop_unreadable):
            return False
        if not await self._audited.drop_record(shard, view):
            return False
        (left,) = await self._audited.read_blocks(shard, {view.key: view.parents})
        return await self._audited.mend(shard, left)

    # ── usage (invariant 4) ──

    async def _confirm_usage(self, shards: Sequence[int]) -> None:
        """Recount shards until each was found right, or wrong by the same twice."""
        last: dict[int, Mapping[Sum, int] | None] = dict.fromkeys(shards)
        for attempt in range(_TRIES):
            if not last:
                return
            if attempt:
                await self._pause()
            for shard in list(last):
                difference = await self._usage_difference(shard)
                if difference and difference == last[shard]:
                    await self._report_usage(shard, difference)
                if difference is not None and (not difference or difference == last[shard]):
                    del last[shard]
                else:
                    last[shard] = difference
        for shard in last:
            self._report.unconfirmed.append(f"usage of {self._title}, shard {shard}, which changes all the time")

    async def _usage_difference(self, shard: int) -> dict[Sum, int] | None:
        """Return the missing changes in the kept sums; None if they changed meanwhile."""
        kept = await self._audited.usage(shard)
        counted = PlaceTally()
        seen: set[int] = set()
        async for claims in self._audited.listed(shard):
            fresh = [key for key in claims if key not in seen]
            seen.update(fresh)
            for view in await self.snapshots(fresh, shard):
                counted.change(None, view.record)
        if kept != await self._audited.usage(shard):
            return None
        difference = Counter(sums_of(counted.used, counted.deleting, counted.deleting_blocks))
        difference.subtract(kept)
        return {of: size for of, size in difference.items() if size}

    async def _report_usage(self, shard: int, difference: Mapping[Sum, int]) -> None:
        mended = self._repair.repair and self._audited.can_mend
        if mended:
            await self._audited.add_usage(shard, difference)
        what = ", ".join(f"{-size:+} {of}" for of, size in sorted(difference.items(), key=str))
        repair = "puts the recount in its place" if self._audited.can_mend else _RESTART
        where = f"{self._title}, shard {shard}"
        self._report.add(Finding("usage", where, f"the kept usage differs from the records: {what}", repair, mended))

    async def _check_key_count(self) -> None:
        """Where nothing else is stored than the records, their number is kept apart; elsewhere it is that of a set."""
        if self._audited.can_mend:
            return
        counted = 0
        async for claims in self._audited.listed(0):
            counted += len(claims)
        if counted != self.cache.index.key_count:
            what = f"{self.cache.index.key_count} blocks are counted, there are {counted}"
            self._report.add(Finding("usage", self._title, what, _RESTART))

    @property
    def _title(self) -> str:
        return f"instance {self.cache.instance.instance_id!r} (registration {self.cache.placement.uid})"

    def _location_of(self, key: int) -> str:
        return f"block {unmixed_key(key)} of {self._title}"


def _writing(view: StoredBlock) -> list[Location]:
    locations = view.record.locations if view.record is not None else ()
    return [location for location in locations if location.status is LocationStatus.WRITING]


# Verification of the store's documents: registry, write sessions, read leases and pins.

_ALL: Final = 1 << 62
_NO_EXPIRY: Final = float("inf")
_KINDS: Final[dict[str, type[Any]]] = {
    "storage/": StorageConfig,
    "group/": InstanceGroup,
    "instance/": Registration,
    "removal/": Removal,
    "account/": Account,
    "quota/": GlobalQuota,
    "seats/": ReservedInstances,
    "groupstore/": GroupStore,
    "move/": StoreMove,
}
_UNREADABLE = "with --drop-unreadable removes the document"


class _ExpiringDocument(Protocol):
    @property
    def uid(self) -> int: ...

    @property
    def deadline(self) -> float: ...


class _DocumentDefect(NamedTuple):
    problem: str
    repair: str
    is_unreadable: bool = False
    due: float | None = None  # None: the document goes


class DocumentAudit:
    """Looks at documents; what looks wrong is looked at again by `confirm`.

    Args:
        known: numbers of the instances that are registered or being removed; read again at every check.
        repair: what may be changed.
        report: takes findings.
    """

    def __init__(self, known: Callable[[], Collection[int]], repair: Repair, report: AuditReport) -> None:
        self._known = known
        self._repair = repair
        self._report = report
        self._suspects: dict[str, tuple[Table, list[str]]] = {}

    async def check_registry(self, table: Table) -> None:
        """Look at every document of the registry."""
        await self._check("registry", table)

    async def check_sessions(self, table: Table) -> None:
        """Look at every write session."""
        await self._check("session", table)

    async def check_leases(self, table: Table) -> None:
        """Look at every read lease."""
        await self._check("lease", table)

    async def check_pins(self, table: Table) -> None:
        """Look at every pin."""
        await self._check("pin", table)

    @property
    def has_suspects(self) -> bool:
        """Whether something has to be looked at again."""
        return bool(self._suspects)

    async def confirm(self) -> None:
        """Look at the suspects again, report those that still are wrong and mend them."""
        suspects, self._suspects = self._suspects, {}
        for kind, (table, names) in suspects.items():
            # Asked before and after: what comes or goes meanwhile must not look wrong.
            before = set(await table.due(_NO_EXPIRY, _ALL))
            documents = {name: await table.get(name) for name in names}
            after = set(await table.due(_NO_EXPIRY, _ALL))
            for name, document in documents.items():
                scheduled = before & after if document is None else before | after
                await self._confirm_one(kind, table, name, document, is_scheduled=name in scheduled)

    async def _confirm_one(
        self, kind: str, table: Table, name: str, document: bytes | None, *, is_scheduled: bool
    ) -> None:
        wrong = self._find_defect(kind, name, document, is_scheduled=is_scheduled)
        if wrong is not None:
            is_mended = await self._mend(table, name, document, wrong)
            self._report.add(Finding(kind, _where(kind, name), wrong.problem, wrong.repair, is_mended))

    async def _check(self, kind: str, table: Table) -> None:
        # The due times first: a document that is there afterwards and not in them came meanwhile, and is cleared by
        # the second look.
        scheduled = set(await table.due(_NO_EXPIRY, _ALL))
        documents = await table.all()
        self._report.checked["documents"] += len(documents)
        for name in sorted(documents.keys() | scheduled):
            if self._find_defect(kind, name, documents.get(name), is_scheduled=name in scheduled) is not None:
                self._suspects.setdefault(kind, (table, []))[1].append(name)

    def _find_defect(
        self, kind: str, name: str, document: bytes | None, *, is_scheduled: bool
    ) -> _DocumentDefect | None:
        if document is None:
            return (
                _DocumentDefect("is due some time, but is not there", "forgets the due time") if is_scheduled else None
            )
        try:
            ending = _decoded(kind, name, document)
        except StorageIOError as error:
            return _DocumentDefect(str(error), _UNREADABLE, is_unreadable=True)
        if ending is None:
            return None
        if ending.uid not in self._known():
            return _DocumentDefect(f"belongs to registration {ending.uid}, which is gone", "removes the document")
        if not is_scheduled:
            return _DocumentDefect("never becomes due", "sets its due time", due=ending.deadline)
        return None

    async def _mend(self, table: Table, name: str, document: bytes | None, wrong: _DocumentDefect) -> bool:
        if not self._repair.repair or (wrong.is_unreadable and not self._repair.drop_unreadable):
            return False
        if wrong.due is not None:
            return await table.replace(name, document, document, wrong.due)
        return await table.replace(name, document, None)


def _decoded(kind: str, name: str, document: bytes) -> _ExpiringDocument | None:
    if kind == "session":
        return WriteSession.decoded(name, document)
    if kind == "lease":
        return ReadLease.decoded(name, document)
    if kind == "pin":
        return Pin.decoded(name, document)
    for prefix, value_kind in _KINDS.items():
        if name.startswith(prefix):
            decode_document(value_kind, document)
    return None


def _where(kind: str, name: str) -> str:
    # The id of a session or a lease is the right to end it.
    return f"document {name!r}" if kind == "registry" else f"{kind} {name[:6]}…"


_SESSION_SHARDS: Final = 16
_COUNTER_PAUSES: Final = 12  # the leader recounts what differed in two looks, five seconds apart
_MOST_PAIRS: Final = 10_000


class StoredBlocks(Protocol):
    """Everything that a store holds of blocks, whether an instance is registered for it or not."""

    async def uids(self) -> Counter[int]:
        """Return about how many keys or rows there are of each registration."""

    def unlisted(self) -> AsyncIterator[tuple[int, int, list[int]]]:
        """Yield uid, shard and keys of records that no scan of their index finds."""

    async def drop(self, uids: Container[int]) -> None:
        """Forget all that there is of registrations."""


class AuditedStore(NamedTuple):
    """The data to verify.

    Attributes:
        store: documents.
        registry: loaded from it.
        caches: the indexes, for repairs.
        audited: from a placement to the records with all that is derived from them.
        blocks: everything that is stored of blocks, by name of the store; "" for the one that has the registry.
        ledger: the counters that managers share, None where there is one manager.
    """

    store: Store
    registry: Registry
    caches: OpenCaches
    audited: Callable[[Placement], AuditedIndex]
    blocks: Mapping[str, StoredBlocks]
    ledger: SharedLedger | None = None


class IndexAuditor:
    """Verifies one store.

    Args:
        audited: the store.
        clock: time source.
        pause: waits between two looks at what looks wrong; a second does.
        repair: what may be changed.
        progress: called with the blocks read and about how many there are.
    """

    def __init__(
        self,
        audited: AuditedStore,
        clock: Clock,
        pause: Pause,
        repair: Repair,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._store = audited
        self._clock = clock
        self._pause = pause
        self._repair = repair
        self._progress = progress
        self._done = 0
        self._total = 0
        self._sessions = audited.store.table("sessions", _SESSION_SHARDS)
        self._endings = SessionStore(self._sessions, self._find, clock)
        self._audits: dict[int, BlockAudit] = {}
        self.report = AuditReport()

    async def _find(self, uid: int) -> InstanceCache | None:
        return self._store.caches.by_uid(uid)

    async def run(self) -> AuditReport:
        """Look at everything.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._check_documents()
        await self._check_unregistered()
        parts = await self._open()
        await self._check_unlisted()
        await self._check_blocks(parts)
        if self._store.ledger is not None:
            await self._check_counters(self._store.ledger)
        await self._store.store.flush()
        return self.report

    async def _open(self) -> int:
        """Open every index, and return into how many parts to cut the extents."""
        extents = 0
        for cache in self._store.caches.all():
            await cache.index.refresh()
            self._total += cache.index.key_count
            extents += cache.index.key_count * len(cache.instance.location_spec_infos)
            audited = self._store.audited(cache.placement)
            self._audits[cache.placement.uid] = BlockAudit(
                cache,
                audited,
                sessions=self._sessions,
                endings=self._endings,
                clock=self._clock,
                pause=self._pause,
                repair=self._repair,
                report=self.report,
            )
        self.report.checked["instances"] = len(self._audits)
        return part_count(extents)

    # ── documents, and keys of instances that are gone ──

    async def _check_documents(self) -> None:
        documents = DocumentAudit(self._confirm, self._repair, self.report)
        await documents.check_registry(self._store.store.table("registry"))
        await documents.check_sessions(self._sessions)
        await documents.check_leases(self._store.store.table("leases", _SESSION_SHARDS))
        await documents.check_pins(self._store.store.table("pins", _SESSION_SHARDS))
        if documents.has_suspects:
            await self._pause()
            await self._store.registry.refresh()
            await documents.confirm()

    async def _check_unregistered(self) -> None:
        suspects = {name: (await blocks.uids()).keys() - self._confirm(name) for name, blocks in self._blocks()}
        if not any(suspects.values()):
            return
        await self._pause()
        await self._store.registry.refresh()
        for name, blocks in self._blocks():
            suspected = suspects[name] - self._confirm(name)
            # Counted again: blocks that moved meanwhile have left this store.
            stored = await blocks.uids() if suspected else Counter[int]()
            strays = suspected & stored.keys()
            if self._repair.repair and strays:
                await blocks.drop(strays)
            for uid in sorted(strays):
                self._report_stray(name, uid, stored[uid])

    def _blocks(self) -> Sequence[tuple[str, StoredBlocks]]:
        return list(self._store.blocks.items())

    def _report_stray(self, store: str, uid: int, count: int) -> None:
        where = f"registration {uid}" + (f" in store {store!r}" if store else "")
        what = f"{count} keys of blocks, but no such instance is registered or being removed"
        repair = "forgets them; their bytes are left to the scrub"
        if uid in self._confirm():
            what = f"{count} keys of blocks, but its blocks are kept in store {self._store_of(uid)!r}, and do not move"
            where, repair = f"registration {uid} in store {store or REGISTRY_STORE!r}", "forgets this copy"
        self.report.add(Finding("stray", where, what, repair, self._repair.repair))

    def _store_of(self, uid: int) -> str:
        return next((each.store or REGISTRY_STORE for each in self._placements() if each.uid == uid), "")

    def _placements(self) -> list[Placement]:
        instances = self._store.registry.instances
        placed = [instances.placement(instance.instance_id) for instance in instances.all()]
        return [*placed, *(removal.placement for removal in instances.removals())]

    def _confirm(self, store: str | None = None) -> set[int]:
        """Return the numbers of the instances that are registered or being removed; of those that may have keys in one
        store, if it is named."""
        found = {each.uid for each in self._placements() if store in {None, each.store}}
        moves = self._store.registry.group_stores.moves()
        return found | {move.uid for move in moves if store in {move.source, move.target}}

    # ── blocks ──

    async def _check_unlisted(self) -> None:
        for name, blocks in self._blocks():
            async for uid, shard, keys in blocks.unlisted():
                if uid in self._audits and self._audits[uid].cache.placement.store == name:
                    await self._audits[uid].inspect(shard, dict.fromkeys(keys, frozenset()))
        for audit in self._audits.values():
            await audit.confirm()

    async def _check_blocks(self, parts: int) -> None:
        part = ExtentPart(0, parts)
        for audit in self._audits.values():
            await audit.run(part, self._count)
        await self._check_extents(part)
        for number in range(1, parts):
            part = ExtentPart(number, parts)
            for audit in self._audits.values():
                await audit.gather(part)
            await self._check_extents(part)

    def _count(self, blocks: int) -> None:
        self._done += blocks
        self._progress(self._done, self._total)

    # ── extents (invariant 5) ──

    async def _check_extents(self, part: ExtentPart) -> None:
        self.report.checked["extents"] += len(part)
        suspects = dict.fromkeys(part.suspects(_MOST_PAIRS))  # a pair may share several objects
        if not suspects:
            return
        await self._pause()
        for one, other in suspects:
            await self._check_pair(one, other)

    async def _check_pair(self, one: Owner, other: Owner) -> None:
        mine = await self._locations(one)
        theirs = mine if other == one else await self._locations(other)
        for at, location in enumerate(mine):
            for to, another in enumerate(theirs):
                if other == one and to <= at:
                    continue
                name = _shared_extent(location, another)
                if name:
                    await self._report_shared_extent(name, (one, location), (other, another))

    async def _locations(self, owner: Owner) -> Sequence[Location]:
        (view,) = await self._audits[owner.uid].snapshots([owner.key])
        return view.record.locations if view.record is not None else ()

    async def _report_shared_extent(self, name: str, *places: tuple[Owner, Location]) -> None:
        for owner, location in places if self._repair.repair else ():
            await self._forget(owner, location)
        (one, _), (other, _) = places
        where = " and ".join(
            sorted(f"block {unmixed_key(each.key)} of registration {each.uid}" for each in (one, other))
        )
        repair = "forgets both locations: either may hold the other's bytes"
        self.report.add(Finding("extent", where, f"they share bytes of {name}", repair, self._repair.repair))

    async def _forget(self, owner: Owner, location: Location) -> None:
        def without(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            left = tuple(place for place in old.locations if place != location) if old is not None else ()
            if old is None or not left:
                return None
            return old if left == old.locations else old._replace(locations=left)

        await self._audits[owner.uid].cache.index.read_modify_write([owner.key], without)

    # ── counters that managers share (invariant 4) ──

    async def _check_counters(self, ledger: SharedLedger) -> None:
        await ledger.flush()
        recount = UsageRecount(self._store.registry, self._store.caches, ledger, self._clock)
        titles = recount.accounts()
        first = last = await self._counter_differences(recount, titles)
        changing: set[str] = set()
        for _ in range(_COUNTER_PAUSES):
            if not last:
                return
            await self._pause()
            last = await self._counter_differences(recount, last)
            changing |= {account for account, difference in last.items() if difference != first[account]}
        for account, difference in last.items():
            if account in changing:
                self.report.unconfirmed.append(f"shared counters of {titles[account]}, which change all the time")
            else:
                await self._report_counters(recount, account, titles[account], difference)

    async def _counter_differences(self, recount: UsageRecount, accounts: Collection[str]) -> dict[str, dict[str, int]]:
        different = await recount.different_accounts(accounts)
        return {account: different[account] for account in accounts if different.get(account)}

    async def _report_counters(
        self, recount: UsageRecount, account: str, title: str, difference: dict[str, int]
    ) -> None:
        is_mended = self._repair.repair and await recount.recount([account])
        what = ", ".join(f"{field_title(account, field)} {value:+}" for field, value in difference.items())
        what = f"the counters that managers share differ from what is kept with the records: {what}"
        self.report.add(Finding(check="usage", where=title, what=what, repair="recounts it", is_mended=is_mended))


def _shared_extent(one: Location, other: Location) -> str:
    """Return the object in which two locations share bytes, "" when they share none."""
    try:
        extent = overlapping(one, other)
    except InvalidArgumentError:  # a uri cannot be read; that is a finding of its own
        return ""
    return extent.object_name if extent is not None else ""
