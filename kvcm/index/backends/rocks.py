"""Records in memory, made durable by RocksDB: the embedded default.

Reads never leave the memory. A write changes memory and queues the same change for the commit log in one step without
suspending, so calls stay as atomic as those of the memory backend; a request awaits the disk once, with the store's
`flush`, before it answers.

::

    row of a block    "b" · uid (uint32) · key (int64)     kvcm/index/codec.py, without a stamp
    row of its reads  "a" · uid (uint32) · key (int64)     last access in unix seconds (uint32) · reads (uint16)

all big endian. The second row exists for a block that was read, or whose time of storage the first no longer tells.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from struct import Struct
from struct import error as struct_error
from typing import Final

from kvcm.index.backends.access import is_resident, stored_at
from kvcm.index.backends.alike import Alike, Ending
from kvcm.index.backends.backend import Access, Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.rocks_rows import ADDRESS, BLOCKS, READS
from kvcm.index.codec import decode_payload, encode_payload, encode_payloads
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord, Place
from kvcm.model.runs import BlockRun
from kvcm.store.rocks.database import Row
from kvcm.store.rocks.log import CommitLog, RowChange
from kvcm.store.rocks.progress import LoadProgress
from kvcm.store.rocks.store import RocksStore
from kvcm.telemetry.stages import staged

__all__ = ["RocksBackend", "RocksIndex", "load_index"]

OnDrop = Callable[[int], None]
"""Told the uid."""

_ACCESS: Final = Struct(">IH")
_BEYOND_ALL: Final = b"\xff" * 16
_PAGE_ROWS: Final = 4096


class RocksBackend(MemoryBackend):
    """The memory backend, whose changes go to the commit log.

    Args:
        log: of the store. Where a change raises StorageIOError it is not applied, unless the log failed that very
            moment; then it failed for good.
        uid: of the instance's registration.
        on_drop: told when everything is forgotten.
    """

    def __init__(self, log: CommitLog, uid: int, on_drop: OnDrop = lambda _uid: None) -> None:
        super().__init__()
        self._log = log
        self._uid = uid
        self._on_drop = on_drop

    @staged("store")
    async def write_many(self, changes: Sequence[Change]) -> Written:
        self._log.admit()
        read_before = self._read_before(changes)
        written = await super().write_many(changes)
        if written.lost:
            lost = set(written.lost)
            changes = [change for change in changes if change.key not in lost]
        if changes:
            self._log.append(self._rows(changes, read_before))
        return written

    def begin(self, run: BlockRun) -> Mapping[Place, int] | None:
        self._log.admit()
        used = super().begin(run)
        if used is not None:
            pairs = zip(run.keys, encode_payloads(run), strict=True)
            self._log.append([(ADDRESS.pack(BLOCKS, self._uid, key), payload) for key, payload in pairs])
        return used

    def serve(self, keys: Sequence[int], ending: Ending) -> Sequence[Alike] | None:
        self._log.admit()
        accesses = self._blocks.accesses(keys)
        served = super().serve(keys, ending)
        if served is not None:
            records = self._blocks.get(keys)
            pairs = zip(keys, records, accesses, strict=True)
            read_before = {key for key, record, access in pairs if record is not None and _has_reads(access, record)}
            self._log.append(self._rows(list(map(Change, keys, records, records)), read_before))
        return served

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
        await super().drop()
        uid = self._uid.to_bytes(4)
        self._log.append((), prefixes=(BLOCKS + uid, READS + uid))
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
        uid, pack = self._uid, ADDRESS.pack
        rows: list[RowChange] = []
        stored_anew: list[int] = []
        for key, old, new, _ in changes:
            if new is not None:
                rows.append((pack(BLOCKS, uid, key), encode_payload(new)))
                if old is not None and (key in read_before or stored_at(old) != stored_at(new)):
                    stored_anew.append(key)
            elif old is not None:
                rows.append((pack(BLOCKS, uid, key), None))
                rows.append((pack(READS, uid, key), None))
        if stored_anew:
            rows += self._access_rows(stored_anew)
        return rows

    def _access_rows(self, keys: Sequence[int]) -> list[RowChange]:
        accesses = zip(keys, self._blocks.accesses(keys), strict=True)
        return [
            (ADDRESS.pack(READS, self._uid, key), _ACCESS.pack(*access))
            for key, access in accesses
            if access is not None
        ]


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
        on_progress: told after each page how many blocks are loaded, and about how many rows there are.

    Raises:
        StorageIOError: a row is damaged or was written by another release; the message names the block.
    """
    index = RocksIndex(store.log)
    estimated, done = store.log.estimated_rows(), 0
    reads = _Reads(store.log.read(READS))
    with _undisturbed():
        uid, backend = 0, index.backend(0)
        for key, value in store.log.read(BLOCKS):
            try:
                _, row_uid, block = ADDRESS.unpack(key)
                if row_uid != uid:
                    uid, backend = row_uid, index.backend(row_uid)
                backend.load(block, decode_payload(value), reads.of(key))
            except (StorageIOError, struct_error) as error:
                raise _unreadable(store, key, error) from error
            done += 1
            if done % _PAGE_ROWS == 0:
                on_progress(done, estimated)
    on_progress(done, estimated)
    return index


class _Reads:
    """The rows of reads, asked for by blocks in ascending order; both lie in the same order."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._address, self._value = self._next()

    def of(self, block_row: bytes) -> Access | None:
        """Return the last access of the block with this row, None if it was never read."""
        address = block_row[1:]
        while self._address < address:
            self._address, self._value = self._next()
        return Access(*_ACCESS.unpack(self._value)) if self._address == address else None

    def _next(self) -> Row:
        key, value = next(self._rows, (_BEYOND_ALL, b""))
        return key[1:], value


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
