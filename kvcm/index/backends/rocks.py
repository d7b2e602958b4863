"""Records in memory, made durable by RocksDB: the embedded default.

Reads never leave the memory. A write changes memory and queues the same change for the commit log in one step without
suspending, so calls stay as atomic as those of the memory backend; a request awaits the disk once, with the store's
`flush`, before it answers.

::

    row of a block    "b" · uid (uint32) · key (int64)     kvcm/index/codec.py, without a stamp
    row of its reads  "a" · uid (uint32) · key (int64)     last access in unix seconds (uint32) · reads (uint16)

all big endian. The second row exists for a block that was read, or whose time of storage is no longer in the first.

Nearly all blocks of a run that begins to be written serve together, and are rows then. Until then the run is one
document of the table `BEGUN`, named by uid and first key.

Invariant: no block of such a run has a row. The change that is the first one of any of them gives rows to all, and
removes the document, in one step.
"""

from __future__ import annotations

import gc
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.index.backends.backend import (
    Access,
    Change,
    FinishRun,
    IndexBackend,
    UniformRun,
    Written,
    is_resident,
    stored_at,
)
from kvcm.index.backends.memory import MemoryBackend, StoredBlocks
from kvcm.index.codec import (
    ColumnDecoder,
    decode_begun,
    decode_payload,
    encode_begun,
    encode_payload,
    encode_payloads,
)
from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.model.instances import Placement
from kvcm.model.keys import mixed_array, mixed_key, unmixed_array, unmixed_key
from kvcm.model.locations import BlockRecord, BlockRun, Location, StorageKey
from kvcm.store.load_progress import LoadProgress
from kvcm.store.rocks import (
    BEGUN,
    DOCUMENTS,
    REGISTRY,
    CommitLog,
    DocumentRow,
    Fsync,
    PutRows,
    RocksStore,
    Row,
    RowChange,
    decode_row,
    encode_row,
    row_prefix,
    row_title,
)
from kvcm.store.rocks_repair import Salvage, is_document
from kvcm.store.store import UNVERIFIED
from kvcm.telemetry.metrics import current_measures, measure, timed
from kvcm.telemetry.tracing import staged

__all__ = [
    "ADDRESS",
    "BLOCKS",
    "READS",
    "BadRow",
    "BlockSalvage",
    "LoadedBlocks",
    "RocksBackend",
    "RocksIndex",
    "RowsFound",
    "audit_rows",
    "check_readable",
    "drop_rows",
    "load_index",
]

# How blocks lie in a RocksDB: rows of records and rows of reads, by registration and block key.

BLOCKS: Final = b"b"
READS: Final = b"a"
ADDRESS: Final = Struct(">cIq")  # kind of row, uid, key
_REGISTRATION_END: Final = 5  # of kind and uid

_OnDrop = Callable[[int], None]
"""Receives the uid."""
_ACCESS: Final = Struct(">IH")
_ADDRESSES: Final = np.dtype([("kind", "S1"), ("uid", ">u4"), ("key", ">i8")])
_ACCESSES: Final = np.dtype([("at", ">u4"), ("reads", ">u2")])
_BATCH_ROWS: Final = 4096
_SLOT: Final = b"blkid="  # of the uri of a location in a packed file


class RocksBackend(MemoryBackend):
    """The memory backend, whose changes go to the commit log.

    Args:
        log: of the store. Where a change raises StorageIOError it is not applied, unless the log failed that very
            moment; then it failed for good.
        uid: of the instance's registration.
        on_drop: called when the index is dropped.
    """

    def __init__(self, log: CommitLog, uid: int, on_drop: _OnDrop = lambda _uid: None) -> None:
        super().__init__()
        self._log = log
        self._uid = uid
        self._on_drop = on_drop
        self._begun: defaultdict[str, list[_BegunRun]] = defaultdict(list)  # by session

    @staged("store", "rocks.py:write_many")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        self._log.admit()
        read_before, blocks = self._read_before(changes), self.key_count
        written = await super().write_many(changes)
        if written.lost:
            lost = set(written.lost)
            changes = [change for change in changes if change.key not in lost]
        if changes:
            rows, keys = self._rows(changes, read_before), [change[0] for change in changes]
            sessions = _sessions_of(changes) if self._begun else ()
            self._append(rows, keys, sessions, blocks=self.key_count - blocks, is_urgent=True)
        return written

    def begin(self, run: BlockRun) -> Mapping[StorageKey, int] | None:
        self._log.admit()
        used = super().begin(run)
        if used is not None:
            with timed("meta_searcher.index_serialize_time_us"):
                address, document = _begun_row(self._uid, run)
            measure("meta_indexer.io_data_size", len(document))
            self._begun[run.location.session_id].append(_BegunRun(address, run.keys))
            self._log.append([(address, document)], documents=1)
        return used

    def serve(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        self._log.admit()
        found = self._blocks.rows_of(keys)
        if found is None:
            return None
        places = np.array(found, np.int64)
        times, reads = self._blocks.access_columns(places)  # before they serve, which sets both back
        sessions: set[str] = set()

        def noted(run: UniformRun) -> UniformRun | None:
            sessions.add(run.location.session_id)
            return ending(run)

        served = self._serve(found, keys, noted)
        if served is None:
            return None
        puts: list[PutRows] = []
        read_before: list[int] = []
        at = 0
        for run_keys, location, chunks in served:
            end = at + len(run_keys)
            puts.append(self._run_rows(places[at:end], run_keys, location, chunks))
            is_read = (times[at:end] != int(location.written_at)) | (reads[at:end] > 0)
            read_before += [run_keys[place] for place in np.flatnonzero(is_read).tolist()]  # or they may have been
            at = end
        self._append(self._access_rows(read_before) if read_before else [], keys, sessions, puts=puts)
        return served

    def retire(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        self._log.admit()
        retired = super().retire(keys, ending)
        if retired is None:
            return None
        puts = [self._run_rows(np.array(self._blocks.rows_of(run.keys), np.int64), *run) for run in retired]
        self._append([], keys, (), puts=puts, is_urgent=True)  # no session wrote them any more
        return retired

    def _append(
        self,
        rows: list[RowChange],
        keys: Sequence[int],
        sessions: Iterable[str],
        *,
        puts: Sequence[PutRows] = (),
        blocks: int = 0,
        is_urgent: bool = False,
    ) -> None:
        """Append the rows of blocks that changed. A run of these sessions with one of them is a document no longer: its
        other blocks get rows, too."""
        documents = 0
        for session_id in self._begun.keys() & sessions:
            changed, begun = set(keys), self._begun.pop(session_id)
            for run in begun:
                if changed.isdisjoint(run.keys):
                    self._begun[session_id].append(run)
                    continue
                if not changed.issuperset(run.keys):
                    rows += self._rows_as_begun([key for key in run.keys if key not in changed])
                rows.append((run.address, None))
                blocks += len(run.keys)
                documents -= 1
        self._log.append(rows, puts=puts, blocks=blocks, documents=documents, is_urgent=is_urgent)

    def _rows_as_begun(self, keys: Sequence[int]) -> list[RowChange]:
        """Return the rows of blocks of a run that are as they were begun."""
        places = self._blocks.rows_of(keys)
        assert places is not None
        locations = [self._blocks.locations(place)[0] for place in places]
        chunks = [location.chunk for location in locations]
        put = self._run_rows(np.array(places, np.int64), keys, locations[0]._replace(chunk=b""), chunks)
        return list(zip(*put, strict=True))

    def load_begun(self, address: bytes, run: BlockRun) -> Callable[[], None] | None:
        """Add blocks that a document holds.

        Returns:
            What gives them rows; None where they need none, since none of the run has one. Some have only after a
            repair, or where an older release was here in between.
        """
        known = set(self.present(run.keys))
        for is_known, group in groupby(range(len(run.keys)), lambda place: run.keys[place] in known):
            places = list(group)
            if not is_known:
                super().begin(run.cut(places[0], places[-1] + 1))
        fresh = [key for key in run.keys if key not in known]
        if not known:
            self._begun[run.location.session_id].append(_BegunRun(address, run.keys))
            return None
        return lambda: self._log.append(
            [*(self._rows_as_begun(fresh) if fresh else ()), (address, None)], blocks=len(fresh), documents=-1
        )

    def _run_rows(
        self, rows: NDArray[np.int64], keys: Sequence[int], location: Location, chunks: Sequence[bytes]
    ) -> PutRows:
        with timed("meta_searcher.index_serialize_time_us"):
            payloads = encode_payloads(location, *self._blocks.chain_columns(rows), chunks)
        if current_measures() is not None:
            measure("meta_indexer.io_data_size", sum(map(len, payloads)))
        return self._addresses(BLOCKS, keys), payloads

    def _addresses(self, kind: bytes, keys: Sequence[int]) -> Sequence[bytes]:
        found = np.empty(len(keys), _ADDRESSES)
        found["kind"], found["uid"], found["key"] = kind, self._uid, unmixed_array(keys)
        addresses: list[bytes] = found.view(f"V{ADDRESS.size}").tolist()
        return addresses

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        self._log.admit()
        await super().touch(counts, at, moves=moves)
        self._log_accesses(list(counts))

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        self._log.admit()
        await super().requeue(counts, at)
        self._log_accesses(list(counts))

    def _log_accesses(self, keys: Sequence[int]) -> None:
        rows = self._access_rows(keys)
        if rows:
            self._log.append(rows)

    async def drop(self) -> None:
        self._log.admit()
        begun = [run for runs in self._begun.values() for run in runs]
        blocks = self.key_count - sum(len(run.keys) for run in begun)
        await super().drop()
        self._begun.clear()
        uid = self._uid.to_bytes(4)
        self._log.append(
            [(run.address, None) for run in begun],
            prefixes=(BLOCKS + uid, READS + uid),
            blocks=-blocks,
            documents=-len(begun),
            is_urgent=True,
        )
        self._on_drop(self._uid)

    def _read_before(self, changes: Sequence[Change]) -> set[int]:
        """Return the keys that become resident and that have, or may have, a row of reads from before."""
        coming = [
            (key, old)
            for key, old, new, _ in changes
            if old is not None and new is not None and is_resident(new) and not is_resident(old)
        ]
        accesses = zip(coming, self._blocks.accesses([key for key, _ in coming]), strict=True)
        return {key for (key, old), access in accesses if _has_reads(access, old)}

    def _rows(self, changes: Sequence[Change], read_before: Collection[int]) -> list[RowChange]:
        rows: list[RowChange] = []
        stored_again: list[int] = []
        with timed("meta_searcher.index_serialize_time_us"):
            payloads = [None if change[2] is None else encode_payload(change[2]) for change in changes]
        measure("meta_indexer.io_data_size", sum([len(payload) for payload in payloads if payload is not None]))
        addresses = self._addresses(BLOCKS, [change[0] for change in changes])
        for address, payload, (key, old, new, _) in zip(addresses, payloads, changes, strict=True):
            if new is not None:
                rows.append((address, payload))
                if old is not None and (key in read_before or stored_at(old) != stored_at(new)):
                    stored_again.append(key)
            elif old is not None:
                rows += ((address, None), (READS + address[1:], None))
        if stored_again:
            rows += self._access_rows(stored_again)
        return rows

    def _access_rows(self, keys: Sequence[int]) -> list[RowChange]:
        accesses = zip(self._addresses(READS, keys), self._blocks.accesses(keys), strict=True)
        return [(address, _ACCESS.pack(*access)) for address, access in accesses if access is not None]


class _BegunRun(NamedTuple):
    """A run that is a document: the key of its row, and its blocks."""

    address: bytes
    keys: Sequence[int]


def _begun_row(uid: int, run: BlockRun) -> Row:
    name = f"{uid}/{unmixed_key(run.keys[0])}"
    return encode_row(DocumentRow(BEGUN, name, 0.0, encode_begun(uid, run)))


def _sessions_of(changes: Sequence[Change]) -> set[str]:
    """Return the sessions that were writing blocks, or left them."""
    olds = (old for _, old, _, _ in changes if old is not None)
    return {location.session_id for old in olds for location in old.locations}


def _has_reads(access: Access | None, record: BlockRecord) -> bool:
    """Return whether a block that is not resident has, or may have, a row of reads."""
    return access is not None and bool(access[1] or access[0] != int(stored_at(record)))


class RocksIndex:
    """The backends of one store, by the uid of the instance's registration."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._backends: dict[int, RocksBackend] = {}

    def backend(self, uid: int) -> RocksBackend:
        """Return the backend of a registration, the same one until it is dropped, after which none returns."""
        backend = self._backends.get(uid)
        if backend is None:
            backend = self._backends[uid] = RocksBackend(self._log, uid, self._forget)
        return backend

    def _forget(self, uid: int) -> None:
        self._backends.pop(uid, None)

    def uids(self) -> list[int]:
        """Return the registrations that have blocks, also those that exist no more: their blocks have to be dropped."""
        return sorted(uid for uid, backend in self._backends.items() if backend.key_count)


def load_index(store: RocksStore, on_progress: LoadProgress = lambda _done, _estimated: None) -> RocksIndex:
    """Load every block of a store that was just opened. Blocks the thread for seconds.

    Args:
        store: nothing may have been written to it yet.
        on_progress: receives after each batch the number of loaded blocks, and the estimated number of rows.

    Raises:
        StorageIOError: a row is damaged or was written by another release; the message names the block.
    """
    index = RocksIndex(store.log)
    with _undisturbed():
        for uid, batches in groupby(_stored_blocks(store, on_progress), key=itemgetter(0)):
            index.backend(uid).load(blocks for _, blocks in batches)
        store.log.count_blocks(sum(index.backend(uid).key_count for uid in index.uids()))
        unfinished = [end for row in store.begun if (end := _load_begun(store, index, row)) is not None]
        for batch in _batches(store.log.read(READS)):
            _load_accesses(store, index, batch)
    for end in unfinished:
        end()
    return index


def _load_begun(store: RocksStore, index: RocksIndex, row: DocumentRow) -> Callable[[], None] | None:
    """Load a run that is a document; return what `RocksBackend.load_begun` does."""
    address, _ = encode_row(row)
    try:
        uid, run = decode_begun(row.document)
    except StorageIOError as error:
        title = row_title((address, b""))
        raise StorageIOError(
            f"{store.log.directory}: {title} cannot be read: {error}; "
            "run `kvcm index verify --repair --drop-unreadable`"
        ) from error
    return index.backend(uid).load_begun(address, run)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(islice(rows, _BATCH_ROWS)):
        yield batch


def _stored_blocks(store: RocksStore, on_progress: LoadProgress) -> Iterator[tuple[int, StoredBlocks]]:
    """Yield the blocks of each registration, those of one behind each other."""
    estimated, done = store.log.estimated_rows(), 0
    decoder, decoded = ColumnDecoder(), b""
    for batch in _batches(store.log.read(BLOCKS)):
        for registration, rows in _by_registration(batch):
            if registration != decoded:  # which shares nothing with the one before
                decoder, decoded = ColumnDecoder(), registration
            yield _decoded(store, rows, decoder)
        done += len(batch)
        if len(batch) == _BATCH_ROWS:
            on_progress(done, estimated)
    on_progress(done, estimated)


def _by_registration(rows: list[Row]) -> Iterable[tuple[bytes, list[Row]]]:
    """Return the rows of each registration with what their keys begin with."""
    if _registration_of(rows[0]) == _registration_of(rows[-1]):  # nearly always, and rows are in order
        return ((_registration_of(rows[0]), rows),)
    return ((registration, list(its)) for registration, its in groupby(rows, key=_registration_of))


def _registration_of(row: Row) -> bytes:
    return row[0][:_REGISTRATION_END]


def _decoded(store: RocksStore, rows: Sequence[Row], decoder: ColumnDecoder) -> tuple[int, StoredBlocks]:
    """Return the registration of rows and their blocks; all at once, which takes a fraction of the time of one after
    the other."""
    try:
        uids, keys = _addresses([key for key, _ in rows])
        columns = decoder.decode([value for _, value in rows])
    except (StorageIOError, struct_error):
        for key, value in rows:
            try:
                _addresses([key])
                decoder.decode([value])
            except (StorageIOError, struct_error) as error:
                raise _unreadable(store, key, error) from error
        raise
    return int(uids[0]), StoredBlocks(keys, *columns, decoder.headers)


def _addresses(keys: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return registrations and mixed keys.

    Raises:
        struct.error: one is no key of such a row.
    """
    for key in keys:
        if len(key) != ADDRESS.size:
            ADDRESS.unpack(key)
    found = np.frombuffer(b"".join(keys), _ADDRESSES)
    return found["uid"].astype(np.uint32), mixed_array(found["key"])


def _load_accesses(store: RocksStore, index: RocksIndex, rows: Sequence[Row]) -> None:
    """Set the last access of the blocks that have one of these rows of reads; some may have no block."""
    whole = [(key, value) for key, value in rows if len(value) == _ACCESS.size and len(key) == ADDRESS.size]
    if len(whole) < len(rows):
        _refuse_damaged_accesses(store, index, rows)
    if not whole:
        return
    uids, keys = _addresses([key for key, _ in whole])
    found = np.frombuffer(b"".join([value for _, value in whole]), _ACCESSES)
    for uid in np.unique(uids).tolist():
        of_uid = uids == uid
        its = found[of_uid]
        index.backend(uid).load_accesses(keys[of_uid], its["at"].astype(np.uint32), its["reads"].astype(np.uint16))


def _refuse_damaged_accesses(store: RocksStore, index: RocksIndex, rows: Sequence[Row]) -> None:
    """Raise where a row of reads has the wrong size; one without a block is left to `kvcm index verify`."""
    for key, value in rows:
        if len(key) == ADDRESS.size and len(value) != _ACCESS.size:
            _, uid, block = ADDRESS.unpack(key)
            if index.backend(uid).present([mixed_key(block)]):
                reason = f"its last access has {len(value)} bytes, not {_ACCESS.size}"
                raise _unreadable(store, BLOCKS + key[1:], struct_error(reason))


@contextmanager
def _undisturbed() -> Iterator[None]:
    # Loading makes no garbage, and collections would walk through all that is loaded again and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unreadable(store: RocksStore, key: bytes, error: Exception) -> StorageIOError:
    row = f"row {key.hex()}"
    if len(key) == ADDRESS.size:
        row = "block {2} of registration {1}".format(*ADDRESS.unpack(key))
    return StorageIOError(f"{store.log.directory}: {row} cannot be read: {error}; run `kvcm index verify`")


class BlockSalvage(Salvage):
    """Keeps blocks of a damaged store, and has their packed locations verified before they are served.

    An older record of a block may name a slot that is another block's by now.
    """

    def __init__(self) -> None:
        self._packed = set[str]()

    def see(self, key: bytes, value: bytes) -> bytes:
        """Note the storages of packed locations; what cannot be read is left to `kvcm index verify`."""
        if _SLOT in value:
            with suppress(StorageIOError):
                if key[:1] == BLOCKS:
                    self._packed |= {place.storage for place in decode_payload(value).locations if _SLOT in place.chunk}
                elif key.startswith(row_prefix(BEGUN)):
                    self._packed.add(decode_begun(decode_row(key, value).document)[1].location.storage)
        return value

    def more(self) -> Iterator[Row]:
        """Yield the marks of the storages, each another one than before."""
        for name in sorted(self._packed):
            yield encode_row(DocumentRow(UNVERIFIED, name, 0.0, secrets.token_bytes(16)))


# Audit of the rows of a RocksDB, one by one, also where the index cannot be loaded from them.
#
# All derived data is rebuilt when an index is loaded, so rows can only be unreadable, or be
# left over from a block or an instance that is gone.

_ACCESS_BYTES: Final = 6
_AUDIT_BATCH_ROWS: Final = 4096
_MOST_BAD: Final = 100_000  # the next audit finds the rest


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is of no use.

    Attributes:
        key: of the row.
        where: what it is of, for people.
        reason: the fault.
        holds_data: whether a record or a document goes with it.
        stops_loading: whether the store cannot be loaded with it.
    """

    key: bytes
    where: str
    reason: str
    holds_data: bool
    stops_loading: bool


@dataclass(slots=True)
class RowsFound:
    """What the rows of a store are of.

    Attributes:
        records: number of readable records by uid.
        bad: rows that are of no use.
    """

    records: Counter[int] = field(default_factory=Counter)
    bad: list[BadRow] = field(default_factory=list)

    @property
    def is_loadable(self) -> bool:
        """Whether a store can be loaded from the rows."""
        return not any(row.stops_loading for row in self.bad)


def check_readable(directory: Path, clock: Clock) -> None:
    """Read every row of a store. Blocks.

    Raises:
        DamagedStoreError: some cannot be read, or are missing.
        StorageIOError: the store cannot be opened.
    """
    log = CommitLog(directory, Fsync.NEVER, clock)
    try:
        for _ in log.read(READS):
            pass
        log.count_documents(sum(is_document(*row) for row in log.read(DOCUMENTS)))
        log.count_blocks(sum(1 for _ in log.read(BLOCKS)))
    finally:
        log.close_at_once()


def audit_rows(log: CommitLog, on_progress: LoadProgress = lambda _done, _estimated: None) -> RowsFound:
    """Look at every row. Blocks the thread.

    Args:
        log: to which nothing was appended yet.
        on_progress: receives after each batch the number of checked blocks, and the estimated number of rows.

    Raises:
        StorageIOError: the database itself is damaged.
    """
    found, estimated, done = RowsFound(), log.estimated_rows(), 0
    _audit_documents(log, found)
    reads = _RocksAuditReads(log.read(READS), found)
    for key, value in log.read(BLOCKS):
        if len(found.bad) >= _MOST_BAD:
            return found
        reads.skip_to(key)
        _audit_record(key, value, found)
        done += 1
        if done % _AUDIT_BATCH_ROWS == 0:
            on_progress(done, estimated)
    reads.skip_to(None)
    on_progress(done, estimated)
    return found


def drop_rows(log: CommitLog, rows: Sequence[BadRow]) -> None:
    """Delete rows."""
    for start in range(0, len(rows), _AUDIT_BATCH_ROWS):
        dropped = [(row.key, None) for row in rows[start : start + _AUDIT_BATCH_ROWS]]
        log.append(dropped, is_copied=any(key.startswith(row_prefix(REGISTRY)) for key, _ in dropped))


def _audit_documents(log: CommitLog, found: RowsFound) -> None:
    for key, value in log.read(DOCUMENTS):
        if len(found.bad) >= _MOST_BAD:
            return
        try:
            row = decode_row(key, value)
            if row.table == BEGUN:
                uid, run = decode_begun(row.document)
                found.records[uid] += len(run.keys)
        except StorageIOError as error:
            where = row_title((key, value))
            found.bad.append(BadRow(key, where, str(error), holds_data=True, stops_loading=True))


def _audit_record(key: bytes, value: bytes, found: RowsFound) -> None:
    if len(key) != ADDRESS.size:
        found.bad.append(
            BadRow(key, f"row {key.hex()}", "its key is no key of a block", holds_data=True, stops_loading=True)
        )
        return
    _, uid, _ = ADDRESS.unpack(key)
    try:
        decode_payload(value)
    except StorageIOError as error:
        found.bad.append(BadRow(key, _where(key), str(error), holds_data=True, stops_loading=True))
    else:
        found.records[uid] += 1


class _RocksAuditReads:
    """The rows of reads, which lie in the order of their blocks."""

    def __init__(self, rows: Iterator[Row], found: RowsFound) -> None:
        self._rows = rows
        self._found = found
        self._row = next(rows, None)

    def skip_to(self, block: bytes | None) -> None:
        """Look at the rows up to that of a block, None for all that are left: those before it belong to no block."""
        while self._row is not None and (block is None or self._row[0][1:] <= block[1:]):
            key, value = self._row
            if block is None or key[1:] != block[1:]:
                self._report(key, "the block that was read is not there", stops_loading=False)
            elif len(value) != _ACCESS_BYTES:
                # An index cannot be loaded with it, but its record is fine: without it the block was never read.
                self._report(key, "a stored access is damaged", stops_loading=True)
            self._row = next(self._rows, None)

    def _report(self, key: bytes, reason: str, *, stops_loading: bool) -> None:
        where = _where(key) if len(key) == ADDRESS.size else f"row {key.hex()}"
        self._found.bad.append(BadRow(key, f"reads of {where}", reason, holds_data=False, stops_loading=stops_loading))


def _where(key: bytes) -> str:
    _, uid, block = ADDRESS.unpack(key)
    return f"block {block} of registration {uid}"


class LoadedBlocks:
    """Everything that a store of one manager holds of blocks.

    Args:
        records: number of records by uid.
        new_backend: finds the backend of an index.
    """

    def __init__(self, records: Mapping[int, int], new_backend: Callable[[Placement], IndexBackend]) -> None:
        self._records = Counter(records)
        self._new_backend = new_backend

    async def uids(self) -> Counter[int]:
        """Return how many records there are of each registration."""
        return self._records

    async def unlisted(self) -> AsyncIterator[tuple[int, int, list[int]]]:
        """Yield nothing: scans find all loaded records."""
        for nothing in list[tuple[int, int, list[int]]]():
            yield nothing

    async def drop(self, uids: Container[int]) -> None:
        """Forget every record of these registrations."""
        for uid in self._records:
            if uid in uids:
                await self._new_backend(Placement(uid, 1)).drop()
