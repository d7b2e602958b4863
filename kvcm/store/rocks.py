"""The embedded store: one RocksDB in the data directory makes the documents and blocks in memory durable.

`CommitLog` is the only writer of the database. `RocksTable` and the RocksDB index backend change memory and append the
same change to the log in one step, so that reads never touch the disk.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from math import inf
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from rocksdict import (
    BlockBasedOptions,
    DbClosedError,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.store.memory import MemoryTable, Outcomes
from kvcm.store.store import PART, Replacement
from kvcm.telemetry.metrics import Histogram

__all__ = [
    "DOCUMENTS",
    "FORMAT_VERSION",
    "CommitLog",
    "DocumentRow",
    "Fsync",
    "RocksStore",
    "RocksTable",
    "Row",
    "RowChange",
    "decode_row",
    "open_database",
    "row_title",
]

# Opening the RocksDB of one directory, and reading what it holds.

Row = tuple[bytes, bytes]
"""Key and value."""
FORMAT_VERSION: Final = 1
_FORMAT_KEY: Final = b"format"
_MEBIBYTE: Final = 1 << 20


def open_database(directory: Path) -> Rdict:
    """Open the database in `directory`, or make one there, readable by this user only. Blocks.

    Raises:
        StorageIOError: another process has it open, another release wrote it, or it cannot be read.
    """
    try:
        _make_private(directory)
        database = Rdict(str(directory), _options())
    except Exception as error:  # RocksDB's errors have no type of their own
        raise _unopened(directory, error) from error
    try:
        _check_format(directory, database)
    except BaseException:
        database.close()
        raise
    return database


def _read_rows(database: Rdict, prefix: bytes) -> Iterator[Row]:
    """Yield the rows whose key begins with `prefix`, ascending.

    Raises:
        StorageIOError: a row is damaged.
    """
    options = ReadOptions()
    if prefix:
        options.set_iterate_upper_bound(_prefix_end(prefix))
    options.set_readahead_size(4 * _MEBIBYTE)
    rows = database.iter(options)
    rows.seek(prefix)
    while rows.valid():
        yield rows.key(), rows.value()
        rows.next()
    try:
        rows.status()  # an iterator ends at a damaged block as if it had come to the end
    except Exception as error:
        raise StorageIOError(f"{database.path()} is damaged: {error}; {_REPAIR}") from error


def _prefix_end(prefix: bytes) -> bytes:
    """Return the least key above all keys that begin with `prefix`, unless all its bytes are 255."""
    return (int.from_bytes(prefix) + 1).to_bytes(len(prefix))


_REPAIR = "put a backup of the directory in its place, or move it away to start with an empty index"


def _make_private(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        parent = os.open(directory.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    directory.chmod(0o700)


def _unopened(directory: Path, error: Exception) -> StorageIOError:
    if f"{directory}/LOCK" in str(error):
        return StorageIOError(f"{directory} is in use by another process: stop it, or choose another data directory")
    return StorageIOError(f"{directory} cannot be opened: {error}; {_REPAIR}")


def _check_format(directory: Path, database: Rdict) -> None:
    written = database.get(_FORMAT_KEY)
    ours = str(FORMAT_VERSION).encode()
    if written is None and next(_read_rows(database, b""), None) is None:
        database[_FORMAT_KEY] = ours
    elif written != ours:
        found = written.decode(errors="replace") if written else "missing"
        raise StorageIOError(
            f"{directory} has format version {found}, this release reads version {FORMAT_VERSION}: start the release "
            "that wrote it, or move the index with its `kvcm index export` and our `kvcm index import`"
        )


def _options() -> Options:
    # The default recovery, up to the first damaged record of the log, is what a power failure needs: its tail may be
    # torn, and nothing of it was acknowledged.
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # Small tables in memory, and many of their files before they are merged: rows are read only at start, so files cost
    # nothing, and a merge handles as much at a time as with large tables.
    options.set_write_buffer_size(16 * _MEBIBYTE)
    options.set_max_write_buffer_number(8)
    options.set_level_zero_file_num_compaction_trigger(16)
    options.set_level_zero_slowdown_writes_trigger(64)
    options.set_level_zero_stop_writes_trigger(96)
    options.set_max_total_wal_size(256 * _MEBIBYTE)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_background_jobs(2)
    options.set_max_open_files(512)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(8 * _MEBIBYTE)
    options.set_stats_dump_period_sec(0)
    # Rows are read once, in order, at start: no filters, and larger blocks compress better.
    table = BlockBasedOptions()
    table.set_block_size(16 << 10)
    options.set_block_based_table_factory(table)
    return options


# The commit log makes changes durable: an ordered log of row changes into one RocksDB.
#
# A change of memory is appended here in the same step, and answered after `flush`.
#
# Invariants:
#
# * Changes reach the disk in the order of their `append`. One `append` is stored as a whole or not at all.
# * One thread writes. A round takes all queued changes, writes them as one atomic batch, makes it as durable as the
#   policy says and then answers every `flush` that waits for it (group commit): any number of requests share one sync.
#   So do calls of `sync`, which is on the disk under every policy.
# * A round that fails is the last one. Memory is then ahead of the disk, and only a restart can repair that.
#
# Rejected: RocksDB's own synced write, which holds Python's global lock while the disk works (measured: the event loop
# stood still for the whole sync of 20 ms); an unsynced write followed by a sync of the log of RocksDB does not. A
# write that RocksDB would stall, because compaction is behind, would hold it too: it is refused by RocksDB and tried
# again. Rejected, too: a batch built by the event loop, since two batches cannot be joined.

RowChange = tuple[bytes, bytes | None]
"""Key of a row and its new value, None to delete it."""
_OnFailure = Callable[[str], None]
"""Receives, on the writing thread, the reason why a round failed: the process has to end."""
_SYNC_SECONDS: Final = 1.0
_STALL_SECONDS: Final = 0.005
_ROUND_ROWS: Final = 8192  # the global lock is held about 0.4 µs per row


class Fsync(StrEnum):
    """When changes are synced to the disk. Until then they survive the death of the process, not that of the host."""

    ALWAYS = "always"
    EVERYSEC = "everysec"
    NEVER = "never"


class _Batch(NamedTuple):
    prefixes: Sequence[bytes]
    rows: Sequence[RowChange]
    size_bytes: int


class _Waiter(NamedTuple):
    batch_number: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


class CommitLog:
    """The log of one directory. Opening blocks; stored rows can be read until the first `append`.

    Args:
        directory: where the database is, or is made.
        fsync: when changes are synced.
        clock: time source of the policy.
        on_failure: receives, on the writing thread, the reason why a round failed: the process has to end.
        most_queued_bytes: how far memory may run ahead of the disk before changes are refused.

    Attributes:
        times: how long operations took, by kind: a write of a batch, a sync, and what a `flush` waited for both.

    Raises:
        StorageIOError: the directory cannot be opened, or another process has.
    """

    def __init__(
        self,
        directory: Path,
        fsync: Fsync,
        clock: Clock,
        on_failure: _OnFailure = lambda _reason: None,
        most_queued_bytes: int = 256 << 20,
    ) -> None:
        self._database = open_database(directory)
        self.directory = directory
        self._fsync = fsync
        self._clock = clock
        self._on_failure = on_failure
        self._most_queued_bytes = most_queued_bytes
        self._changed = threading.Condition()  # guards all that follows
        self._queue: deque[_Batch] = deque()
        self._queued_bytes = 0
        self._appended = 0
        self._committed = 0
        self._synced = 0
        self._waiters: deque[_Waiter] = deque()
        self._sync_waiters: deque[_Waiter] = deque()
        self._failure: str | None = None
        self._closing = False
        self._rounds = 0
        self._written = 0  # batches; as the two below only the writer's thread changes it
        self._synced_at = clock.now()
        self._is_synced = True
        self.times = {op: Histogram() for op in ("write", "sync", "flush")}  # each written by one thread alone
        self._thread = threading.Thread(target=self._run, name="commit-log", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the log failed for good; None while it works."""
        return self._failure

    @property
    def rounds(self) -> int:
        """Rounds written so far."""
        return self._rounds

    def read(self, prefix: bytes) -> Iterator[Row]:
        """Yield the rows on disk whose key begins with `prefix`, ascending, without queued changes.

        Raises:
            StorageIOError: a row is damaged.
        """
        return _read_rows(self._database, prefix)

    def estimated_rows(self) -> int:
        """Return about how many rows there are."""
        return self._database.property_int_value("rocksdb.estimate-num-keys") or 0

    def admit(self) -> None:
        """Return if a change can be appended now; to be called before memory changes.

        Raises:
            StorageIOError: the log failed or is closed, or the disk is too far behind.
        """
        with self._changed:
            self._check()
            if self._queued_bytes >= self._most_queued_bytes:
                raise StorageIOError(
                    f"{self.directory}: {self._queued_bytes} bytes wait to be written, the disk is too slow; try again"
                )

    def append(self, rows: Sequence[RowChange], prefixes: Sequence[bytes] = ()) -> None:
        """Queue a change, to be written as a whole after all that was appended before.

        Args:
            rows: rows to put and to delete.
            prefixes: all rows whose key begins with one of these are deleted first.

        Raises:
            StorageIOError: the log failed or is closed.
        """
        size_bytes = sum([len(key) + (len(value) if value is not None else 0) for key, value in rows])  # a hot loop
        with self._changed:
            self._check()
            self._queue.append(_Batch(prefixes, rows, size_bytes))
            self._queued_bytes += size_bytes
            self._appended += 1
            self._changed.notify()

    async def flush(self) -> None:
        """Return when all that was appended before is as durable as the policy says.

        Raises:
            StorageIOError: it could not be written.
        """
        with self._changed:
            self._check_failure()
            if self._committed >= self._appended:
                return
            waiter = self._new_waiter()
            self._waiters.append(waiter)
        begin = time.perf_counter()
        await waiter.done
        self.times["flush"].observe(time.perf_counter() - begin)

    async def sync(self) -> None:
        """Return when all that was appended before is on the disk, whatever the policy says.

        Raises:
            StorageIOError: it could not be written.
        """
        with self._changed:
            self._check_failure()
            if self._synced >= self._appended:
                return
            waiter = self._new_waiter()
            self._sync_waiters.append(waiter)
            self._changed.notify()
        await waiter.done

    async def close(self) -> None:
        """Write and sync everything, whatever the policy says, and let go of the directory.

        Raises:
            StorageIOError: it could not be written.
        """
        await asyncio.to_thread(self.close_at_once)

    def close_at_once(self) -> None:
        """Do what `close` does, blocking the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        with suppress(DbClosedError):
            self._database.close()
        self._check_failure()

    def _new_waiter(self) -> _Waiter:
        loop = asyncio.get_running_loop()
        return _Waiter(self._appended, loop, loop.create_future())

    def _check(self) -> None:
        self._check_failure()
        if self._closing:
            raise StorageIOError(f"{self.directory} is closed: the manager is stopping")

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise StorageIOError(self._failure)

    # ── the thread that writes ──

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_round()
            self._sync()
        except Exception as error:  # RocksDB's errors have no type of their own
            self._fail(error)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to write or to sync; False when all is written and the log is closing."""
        with self._changed:
            timeout = _SYNC_SECONDS if self._fsync is Fsync.EVERYSEC and not self._is_synced else None
            if not self._queue and not self._sync_waiters and not self._closing:
                self._changed.wait(timeout)
            return bool(self._queue) or not self._closing

    def _run_round(self) -> None:
        batches = self._pop_batches()
        if batches:
            self._write(batches)
            self._is_synced = False
            self._rounds += 1
            self._written += len(batches)
        if self._fsync is Fsync.ALWAYS or self._is_sync_awaited():
            self._sync()
        self._answer(batches)
        if self._fsync is Fsync.EVERYSEC and self._clock.now() >= self._synced_at + _SYNC_SECONDS:
            self._sync()

    def _pop_batches(self) -> list[_Batch]:
        with self._changed:
            batches: list[_Batch] = []
            rows = 0
            while self._queue and rows < _ROUND_ROWS:
                batches.append(self._queue.popleft())
                rows += len(batches[-1].rows)
            return batches

    def _write(self, batches: Sequence[_Batch]) -> None:
        options = WriteOptions()
        options.no_slowdown = True
        begin = time.perf_counter()
        while True:
            try:
                self._database.write(_joined(batches), options)
            except Exception as error:
                if "Write stall" not in str(error):
                    raise
                time.sleep(_STALL_SECONDS)
            else:
                self.times["write"].observe(time.perf_counter() - begin)
                return

    def _sync(self) -> None:
        if not self._is_synced:
            begin = time.perf_counter()
            self._database.flush_wal(sync=True)
            self.times["sync"].observe(time.perf_counter() - begin)
            self._is_synced = True
            self._synced_at = self._clock.now()
        with self._changed:
            self._synced = self._written
            answered = _pop_until(self._sync_waiters, self._synced)
        _resolve(answered, None)

    def _is_sync_awaited(self) -> bool:
        with self._changed:
            return bool(self._sync_waiters) and self._sync_waiters[0].batch_number <= self._written

    def _answer(self, batches: Sequence[_Batch]) -> None:
        with self._changed:
            self._committed += len(batches)
            self._queued_bytes -= sum(batch.size_bytes for batch in batches)
            answered = _pop_until(self._waiters, self._committed)
        _resolve(answered, None)

    def _fail(self, error: Exception) -> None:
        failure = f"{self.directory} cannot be written: {error}; nothing is accepted any more, free space and restart"
        with self._changed:
            self._failure = failure
            answered = [*self._waiters, *self._sync_waiters]
            self._waiters.clear()
            self._sync_waiters.clear()
            self._queue.clear()
        _resolve(answered, failure)
        self._on_failure(failure)


def _joined(batches: Sequence[_Batch]) -> WriteBatch:
    joined = WriteBatch(raw_mode=True)
    put, delete = joined.put, joined.delete
    for prefixes, rows, _ in batches:
        for prefix in prefixes:
            joined.delete_range(prefix, _prefix_end(prefix))
        for key, value in rows:
            if value is None:
                delete(key)
            else:
                put(key, value)
    return joined


def _pop_until(waiters: deque[_Waiter], batch_number: int) -> list[_Waiter]:
    popped = []
    while waiters and waiters[0].batch_number <= batch_number:
        popped.append(waiters.popleft())
    return popped


def _resolve(waiters: Sequence[_Waiter], failure: str | None) -> None:
    for loop in {waiter.loop for waiter in waiters}:
        futures = [waiter.done for waiter in waiters if waiter.loop is loop]
        with suppress(RuntimeError):  # the loop is closed, so no call waits
            loop.call_soon_threadsafe(_finish, futures, failure)


def _finish(futures: Sequence[asyncio.Future[None]], failure: str | None) -> None:
    for future in futures:
        if future.done():  # its caller was cancelled
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(StorageIOError(failure))


# How documents lie in a RocksDB.
#
# ::
#
#     row of a document    "t" · length of the table's name (1 byte) · table's name · document's name
#     its value            due time (float64, big endian) · document

DOCUMENTS: Final = b"t"
_DUE: Final = Struct(">d")
_NAME_CHARACTERS: Final = 6


class DocumentRow(NamedTuple):
    """One document.

    Attributes:
        table: its name.
        name: of the document.
        due: unix seconds when it becomes due, 0 for never.
        document: the bytes.
    """

    table: str
    name: str
    due: float
    document: bytes


def _row_prefix(table: str) -> bytes:
    """Return how the keys of a table's rows begin."""
    return DOCUMENTS + bytes((len(table),)) + table.encode()


def _encode_value(due: float, document: bytes) -> bytes:
    """Return the value of a row."""
    return _DUE.pack(due) + document


def decode_row(key: bytes, value: bytes) -> DocumentRow:
    """Read a row.

    Raises:
        StorageIOError: it is damaged; the message says how.
    """
    table, name = _parts(key)
    if not table:
        raise StorageIOError("its key names no table")
    if len(value) < _DUE.size:
        raise StorageIOError(f"it has {len(value)} bytes, its due time alone takes {_DUE.size}")
    (due,) = _DUE.unpack_from(value)
    if math.isnan(due):
        raise StorageIOError("its due time is no number")
    try:
        return DocumentRow(table.decode(), name.decode(), due, value[_DUE.size :])
    except UnicodeDecodeError as error:
        raise StorageIOError("its name is no UTF-8") from error


def row_title(row: Row) -> str:
    """Return what a row, damaged or not, is of, for people."""
    key, _ = row
    table, name = _parts(key)
    if not table:
        return f"document row {key.hex()}"
    shown = name.decode(errors="backslashreplace")
    if table != b"registry":  # the id of a session or a lease is the right to end it
        shown = f"{shown[:_NAME_CHARACTERS]}…"
    return f"document {shown!r} of table {table.decode(errors='backslashreplace')!r}"


def _parts(key: bytes) -> Row:
    """Return the names of table and document; no table where the key is too short for one."""
    end = 2 + key[1] if len(key) > 1 else 2
    return (key[2:end], key[end:]) if len(key) >= end else (b"", b"")


# Documents that outlive the process: tables in memory, made durable by the commit log.
#
# Outcomes of the documents of a table lie in rows of a table of its own, due when they expire, which
# older releases load and never look at. Blocks lie in the same database (kvcm/index/backends/rocks.py), so that a
# session and its blocks reach the disk in the order in which they were stored.

_ENDED: Final = ".ended"  # behind a table's name; no other table's name has a dot


class RocksTable:
    """One table: reads are those of the memory table, changes go to the log in the same step."""

    def __init__(self, log: CommitLog, name: str, memory: MemoryTable) -> None:
        self._log = log
        self._prefix = _row_prefix(name)
        self._ended_prefix = _row_prefix(name + _ENDED)
        self._memory = memory
        self._outcomes = Outcomes()

    async def get(self, name: str) -> bytes | None:
        return await self._memory.get(name)

    async def all(self) -> Mapping[str, bytes]:
        return await self._memory.all()

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        self._log.admit()
        is_replaced = await self._memory.replace(name, old, new, due)
        if is_replaced:
            self._log.append([self._row(name, new, due)])
        return is_replaced

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        self._log.admit()
        are_replaced = await self._memory.replace_together(replacements)
        if are_replaced:  # what one `append` brings is on the disk as a whole or not at all
            self._log.append([self._row(each.name, each.new, 0.0) for each in replacements])
        return are_replaced

    async def finish(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        self._log.admit()
        if not await self._memory.replace(name, old, None):
            return False
        until = now + seconds
        forgotten = self._outcomes.store(name, outcome, until, now)
        rows = [self._row(name, None, 0.0), *((self._ended_prefix + each.encode(), None) for each in forgotten)]
        self._log.append([*rows, (self._ended_prefix + name.encode(), _encode_value(until, outcome))])
        return True

    async def outcome(self, name: str, now: float) -> bytes | None:
        return self._outcomes.get(name, now)

    def _row(self, name: str, document: bytes | None, due: float) -> RowChange:
        return self._prefix + name.encode(), _encode_value(due, document) if document is not None else None

    def restore(self, row: DocumentRow) -> None:
        """Put a document in memory as its row has it."""
        work = self._memory.replace(name=row.name, old=None, new=row.document, due=row.due)
        with suppress(StopIteration):
            work.send(None)  # to its end: no method of the memory table suspends

    def restore_outcome(self, row: DocumentRow) -> None:
        """Put an outcome in memory as its row has it; those that are over first go first."""
        self._outcomes.store(row.name, row.document, row.due, -inf)

    async def due(self, now: float, most: int) -> list[str]:
        return await self._memory.due(now, most)

    async def version(self) -> int:
        return await self._memory.version()


class RocksStore:
    """The store of one manager alone, in a directory of its own. Opening it blocks.

    Args:
        directory: created if missing; no other process may have it open.
        fsync: when changes are synced to the disk: always, everysec or never.
        clock: time source of the policy.
        on_failure: receives the reason, on a thread of the store, when writing fails for good: the process has to end.

    Attributes:
        log: what makes changes durable; blocks are written through it too.

    Raises:
        StorageIOError: the directory is in use, was written by another release, or is damaged.
    """

    is_shared = False

    def __init__(
        self, directory: Path, fsync: str, clock: Clock, on_failure: _OnFailure = lambda _reason: None
    ) -> None:
        self.log = CommitLog(directory, Fsync(fsync), clock, on_failure)
        self._tables: dict[str, RocksTable] = {}
        try:
            self._load()
        except BaseException:
            self.log.close_at_once()
            raise

    def table(self, name: str, shard_count: int = 1) -> RocksTable:
        """Return the table of that name, the same one every time; parts make no difference in one memory."""
        if name not in self._tables:
            self._tables[name] = RocksTable(self.log, name, MemoryTable())
        return self._tables[name]

    async def parts(self) -> Sequence[str]:
        """Return one name: all changes are in one log."""
        return (PART,)

    async def flush(self) -> None:
        await self.log.flush()

    async def sync(self) -> None:
        await self.log.sync()

    async def close(self) -> None:
        await self.log.close()

    def _load(self) -> None:
        ended: list[DocumentRow] = []
        for key, value in self.log.read(DOCUMENTS):
            try:
                row = decode_row(key, value)
            except StorageIOError as error:
                raise StorageIOError(
                    f"{self.log.directory}: {row_title((key, value))} cannot be read: {error}; "
                    "run `kvcm index verify --repair --drop-unreadable`"
                ) from error
            if row.table.endswith(_ENDED):
                ended.append(row)
            else:
                self.table(row.table).restore(row)
        for row in sorted(ended, key=lambda each: each.due):
            self.table(row.table.removesuffix(_ENDED)).restore_outcome(row)
