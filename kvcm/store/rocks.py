"""The embedded store: one RocksDB in the data directory makes the documents and blocks in memory durable.

`CommitLog` is the only writer of the database. `RocksTable` and the RocksDB index backend change memory and append the
same change to the log in one step, so that reads never touch the disk.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from weakref import WeakSet

import structlog
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
from kvcm.store.reserve import MetadataReserve, is_no_space
from kvcm.store.rocks_check import (
    STATE_KEY,
    UNKNOWN,
    DamagedStoreError,
    StoredState,
    StoreMark,
    check_database,
    manifest_number,
    read_marked,
)
from kvcm.store.rocks_copy import COPY, DocumentCopy, read_copy
from kvcm.store.store import PART, Replacement, Revision
from kvcm.telemetry.metrics import Histogram

__all__ = [
    "BEGUN",
    "DOCUMENTS",
    "FORMAT_KEY",
    "FORMAT_VERSION",
    "REGISTRY",
    "CommitLog",
    "DocumentRow",
    "Fsync",
    "PutRows",
    "RocksStore",
    "RocksTable",
    "Row",
    "RowChange",
    "database_options",
    "decode_row",
    "encode_row",
    "make_private",
    "open_database",
    "row_prefix",
    "row_title",
    "unopened",
]

_log = structlog.get_logger("kvcm.store")

# Opening the RocksDB of one directory, and reading what it holds.

Row = tuple[bytes, bytes]
"""Key and value."""
FORMAT_VERSION: Final = 1
FORMAT_KEY: Final = b"format"
_MEBIBYTE: Final = 1 << 20


def open_database(directory: Path) -> Rdict:
    """Open the database in `directory`, or make one there, readable by this user only. Blocks.

    Raises:
        StorageIOError: another process has it open, another release wrote it, or it cannot be read.
    """
    database = _open_files(directory)
    try:
        _check_format(directory, database)
    except BaseException:
        database.close()
        raise
    return database


def _open_files(directory: Path) -> Rdict:
    try:
        make_private(directory)
        return Rdict(str(directory), database_options())
    except Exception as error:  # RocksDB's errors have no type of their own
        raise unopened(directory, error) from error


def _open_undamaged(directory: Path) -> tuple[Rdict, StoreMark]:
    """Open a database that holds everything that it has to, and its mark.

    Raises:
        StorageIOError: it cannot be opened.
        DamagedStoreError: it lost something.
    """
    try:
        make_private(directory)
        mark = StoreMark(directory)
    except OSError as error:
        raise unopened(directory, error) from error
    try:
        check_database(directory, database_options)
        return _open_files(directory), mark
    except StorageIOError:
        mark.close()
        raise
    except Exception as error:
        mark.close()
        raise unopened(directory, error) from error


def _read_rows(database: Rdict, prefix: bytes) -> Generator[Row]:
    """Yield the rows whose key begins with `prefix`, ascending.

    Raises:
        StorageIOError: a row is damaged.
    """
    options = ReadOptions()
    if prefix:
        options.set_iterate_upper_bound(_prefix_end(prefix))
    options.set_readahead_size(4 * _MEBIBYTE)
    # The cache would keep up to 32 MiB that are never read again. The stub lacks the argument.
    options.fill_cache(False)  # type: ignore[call-arg]
    rows = database.iter(options)
    try:
        rows.seek(prefix)
        while rows.valid():
            yield rows.key(), rows.value()
            rows.next()
        rows.status()  # an iterator ends at a damaged block as if it had come to the end
    except Exception as error:
        raise DamagedStoreError(Path(database.path()), " ".join(str(error).split())) from error
    finally:
        del rows  # it would keep the database open, for example from the frames of a traceback


def _prefix_end(prefix: bytes) -> bytes:
    """Return the least key above all keys that begin with `prefix`, unless all its bytes are 255."""
    return (int.from_bytes(prefix) + 1).to_bytes(len(prefix))


def make_private(directory: Path) -> None:
    """Make a directory, readable by this user only, or make it so.

    Raises:
        OSError: it cannot be made.
    """
    if not directory.is_dir():
        directory.mkdir(mode=0o700, parents=True)
        parent = os.open(directory.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    directory.chmod(0o700)


# What to do, by what the system says. Only damage is mended by a repair or a backup.
_ADVICE: Final = {
    errno.EACCES: "let user {user} own it: `chown -R {user} {directory}`",
    errno.EPERM: "let user {user} own it: `chown -R {user} {directory}`",
    errno.EROFS: "mount its file system for writing, or choose another data directory",
    errno.ENOSPC: "free space on its file system, and start again",
    errno.EDQUOT: "raise the disk quota of user {user} or free space, and start again",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or free space, and start again",
    errno.ENOTDIR: "something on the path is no directory: correct the path of the data directory",
    errno.EEXIST: "something on the path is no directory: correct the path of the data directory",
    errno.ELOOP: "a link on the path leads nowhere: correct the path of the data directory",
    errno.ENAMETOOLONG: "choose a shorter path for the data directory",
    errno.ENOENT: "correct the path of the data directory",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`), and start again",
    errno.ENFILE: "raise the limit of open files of the host, and start again",
    errno.ENOMEM: "give the process more memory, and start again",
    errno.EIO: "its disk or mount fails: look into the log of the kernel; what is on the disk may be whole",
    errno.ESTALE: "its mount is gone: mount it again, and start again",
}
_DAMAGE_SIGNS: Final = ("Corruption", "No such file or directory", "truncated", "corrupt")


def unopened(directory: Path, error: Exception) -> StorageIOError:
    """Return the text about a directory that cannot be opened, with advice that fits."""
    text = " ".join(str(error).split())
    if f"{directory}/LOCK" in text and "No such file" not in text and _reason_of(error) in (None, errno.EAGAIN):
        return StorageIOError(f"{directory} is in use by another process: stop it, or choose another data directory")
    reason = _reason_of(error)
    if reason is not None and not (reason == errno.ENOENT and not isinstance(error, OSError)):
        return StorageIOError(f"{directory} cannot be opened: {_with_advice(directory, text, reason)}")
    if any(sign in text for sign in _DAMAGE_SIGNS):
        return DamagedStoreError(directory, text)
    return StorageIOError(f"{directory} cannot be opened: {text}")


def _with_advice(directory: Path, text: str, reason: int | None) -> str:
    advice = _ADVICE.get(reason, "") if reason is not None else ""
    return f"{text}; {advice.format(user=os.geteuid(), directory=directory)}" if advice else text


def _reason_of(error: Exception) -> int | None:
    """Return the system's number of an error; RocksDB gives its text alone."""
    if isinstance(error, OSError):
        return error.errno
    text = str(error)
    return next((number for number in _ADVICE if os.strerror(number) in text), None)


def _check_format(directory: Path, database: Rdict) -> None:
    written = database.get(FORMAT_KEY)
    ours = str(FORMAT_VERSION).encode()
    if written is None and next(_read_rows(database, b""), None) is None:
        made = WriteBatch(raw_mode=True)  # with a state, as every batch
        made.put(STATE_KEY, StoredState(database.latest_sequence_number() + 2, 0).encoded())
        made.put(FORMAT_KEY, ours)
        database.write(made)
    elif written != ours:
        found = written.decode(errors="replace") if written else "missing"
        raise StorageIOError(
            f"{directory} has format version {found}, this release reads version {FORMAT_VERSION}: start the release "
            "that wrote it, or move the index with its `kvcm index export` and our `kvcm index import`"
        )


def database_options() -> Options:
    """Return how a database is opened."""
    # The default recovery, up to the first damaged record of the log, is what a power failure needs: its tail may be
    # torn, and nothing of it was acknowledged. Damage was excluded before (`check_database`).
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # Small tables in memory, and many of their files before they are merged: rows are read only at start, so files cost
    # nothing, and a merge handles as much at a time as with large tables.
    # RocksDB keeps these options with a directory, and other releases open it with them.
    options.set_write_buffer_size(4 * _MEBIBYTE)
    options.set_max_write_buffer_number(32)
    options.set_level_zero_file_num_compaction_trigger(48)
    options.set_level_zero_slowdown_writes_trigger(256)
    options.set_level_zero_stop_writes_trigger(384)
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
# * A round begins when a call waits for it, and not with the first of the changes that a call makes one after the
#   other: each round costs both threads some tenths of a millisecond. Urgent changes begin one, too: bytes of storages
#   are deleted after blocks were marked, and no call waits for that. All others (blocks were read) are written within a
#   tenth of a second, or when they are a megabyte.
# * A round that fails is the last one. Memory is then ahead of the disk, and only a restart can repair that.
# * A round that finds no space is not failed: it is tried again with the disk's reserve (`reserve.py`), and then until
#   there is space. Meanwhile memory is ahead of the disk by what is queued, and nothing more is taken.
#
# Rejected: RocksDB's own synced write, which holds Python's global lock while the disk works (measured: the event loop
# stood still for the whole sync of 20 ms); an unsynced write followed by a sync of the log of RocksDB does not. A
# write that RocksDB would stall, because compaction is behind, would hold it too: it is refused by RocksDB and tried
# again. Rejected, too: a batch built by the event loop, since two batches cannot be joined.

RowChange = tuple[bytes, bytes | None]
"""Key of a row and its new value, None to delete it."""
PutRows = tuple[Sequence[bytes], Sequence[bytes]]
"""Keys and values of rows to put: without an object for each of many rows."""
_OnFailure = Callable[[str], None]
"""Receives, on the writing thread, the reason why a round failed: the process has to end."""
_SYNC_SECONDS: Final = 1.0
_GATHER_SECONDS: Final = 0.1
_GATHERED_BYTES: Final = 1 << 20
_STALL_SECONDS: Final = 0.005
_FULL_SECONDS: Final = 0.5
_ROUND_ROWS: Final = 8192  # the global lock is held about 0.4 µs per row


class Fsync(StrEnum):
    """When changes are synced to the disk. Until then they survive the death of the process, not that of the host."""

    ALWAYS = "always"
    EVERYSEC = "everysec"
    NEVER = "never"


class _Batch(NamedTuple):
    prefixes: Sequence[bytes]
    puts: Sequence[PutRows]
    rows: Sequence[RowChange]
    size_bytes: int
    blocks: int  # that there are with it, UNKNOWN where they were not counted
    documents: int
    is_copied: bool

    @property
    def row_count(self) -> int:
        return len(self.rows) + sum([len(keys) for keys, _ in self.puts])


class _Waiter(NamedTuple):
    batch_number: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


def _open_with_space(directory: Path, reserve: MetadataReserve) -> tuple[Rdict, StoreMark]:
    """Open the database and its mark, with as much of the reserve as that takes."""
    while True:
        try:
            return _open_undamaged(directory)
        except StorageIOError as error:
            if not is_no_space(error) or not reserve.give_up():
                raise


class CommitLog:
    """The log of one directory. Opening blocks; stored rows can be read until the first `append`.

    Args:
        directory: where the database is, or is made.
        fsync: when changes are synced.
        clock: time source of the policy.
        on_failure: receives, on the writing thread, the reason why a round failed: the process has to end.
        most_queued_bytes: how far memory may run ahead of the disk before changes are refused.
        reserve: of the disk, given up where the database finds no space.

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
        reserve: MetadataReserve | None = None,
    ) -> None:
        self.reserve = reserve if reserve is not None else MetadataReserve(directory, 0)
        earlier = manifest_number(directory)
        self._database, self._mark = _open_with_space(directory, self.reserve)
        self.reserve.make()
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
        self._shortage = ""  # why nothing can be written at the moment
        self._closing = False
        self._is_idle = self._is_urgent = False
        self._rounds = 0
        self._written = 0  # batches; as the two below only the writer's thread changes it
        self._synced_at = clock.now()
        self._is_synced = True
        self._marked_at = -inf
        self._blocks = self._documents = UNKNOWN
        self._readers: WeakSet[Generator[Row]] = WeakSet()
        self._written_counts = (UNKNOWN, UNKNOWN)
        self._copy: DocumentCopy | None = None
        self._sequence = self._synced_sequence = self._database.latest_sequence_number()
        self._stored = self._begin(earlier)
        self.times = {op: Histogram() for op in ("write", "sync", "flush")}  # each written by one thread alone
        self._thread = threading.Thread(target=self._run, name="commit-log", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the log failed for good; None while it works."""
        return self._failure

    @property
    def shortage(self) -> str:
        """Why changes are refused until the disk has space again; "" while it has."""
        return self._shortage

    @property
    def appended(self) -> int:
        """Changes that were queued so far."""
        return self._appended

    @property
    def rounds(self) -> int:
        """Rounds written so far."""
        return self._rounds

    def read(self, prefix: bytes) -> Iterator[Row]:
        """Yield the rows on disk whose key begins with `prefix`, ascending, without queued changes.

        Raises:
            StorageIOError: a row is damaged.
        """
        reader = _read_rows(self._database, prefix)
        self._readers.add(reader)
        return reader

    def estimated_rows(self) -> int:
        """Return about how many rows there are."""
        return self._database.property_int_value("rocksdb.estimate-num-keys") or 0

    def admit(self) -> None:
        """Return if a change can be appended now; to be called before memory changes.

        Raises:
            StorageIOError: the log failed or is closed, the disk is too far behind, or full.
        """
        with self._changed:
            self._check()
            if self._shortage:
                raise StorageIOError(self._shortage)
            if self._queued_bytes >= self._most_queued_bytes:
                raise StorageIOError(
                    f"{self.directory}: {self._queued_bytes} bytes wait to be written, the disk is too slow; try again"
                )

    def count_blocks(self, found: int) -> None:
        """Compare the number of blocks that were read with the stored one, and count from there.

        Raises:
            DamagedStoreError: blocks are missing, or some are back that were deleted.
        """
        self._blocks = found
        self._compare("blocks", found, self._stored.blocks)
        self._note_counts()

    def count_documents(self, found: int) -> None:
        """Do the same for documents."""
        self._documents = found
        self._compare("documents", found, self._stored.documents)
        self._note_counts()

    def begin_copy(self, rows: Iterable[Row]) -> None:
        """Copy rows to a file beside the database, from which a repair takes them; nothing was appended yet.

        Raises:
            StorageIOError: the disk failed.
        """
        try:
            if self._copy is not None:
                self._copy.close()
            self._copy = DocumentCopy(self.directory, manifest_number(self.directory), rows)
        except OSError as error:
            raise unopened(self.directory, error) from error

    def append(
        self,
        rows: Sequence[RowChange],
        prefixes: Sequence[bytes] = (),
        *,
        puts: Sequence[PutRows] = (),
        blocks: int = 0,
        documents: int = 0,
        is_copied: bool = False,
        is_urgent: bool = False,
    ) -> None:
        """Queue a change, to be written as a whole after all that was appended before.

        Args:
            rows: rows to put and to delete.
            prefixes: all rows whose key begins with one of these are deleted first.
            puts: further rows to put, before the others.
            blocks: how many more blocks there are with it.
            documents: how many more documents there are with it.
            is_copied: whether the rows are among those that `begin_copy` copied.
            is_urgent: whether to write them now, although no call may wait for that.

        Raises:
            StorageIOError: the log failed or is closed.
        """
        size_bytes = sum([len(key) + (len(value) if value is not None else 0) for key, value in rows])
        size_bytes += sum([sum(map(len, keys)) + sum(map(len, values)) for keys, values in puts])
        with self._changed:
            self._check()
            self._blocks += blocks if self._blocks != UNKNOWN else 0
            self._documents += documents if self._documents != UNKNOWN else 0
            self._queue.append(
                _Batch(
                    prefixes=prefixes,
                    puts=puts,
                    rows=rows,
                    size_bytes=size_bytes,
                    blocks=self._blocks,
                    documents=self._documents,
                    is_copied=is_copied,
                )
            )
            self._queued_bytes += size_bytes
            self._appended += 1
            self._is_urgent |= is_urgent
            if self._is_idle or self._is_urgent or self._queued_bytes >= _GATHERED_BYTES:
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
            if self._shortage:
                raise StorageIOError(self._shortage)
            waiter = self._new_waiter()
            self._waiters.append(waiter)
            self._changed.notify()
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
            if self._shortage:
                raise StorageIOError(self._shortage)
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
        self._let_go()
        self._check_failure()

    def _begin(self, earlier_manifest: int) -> StoredState:
        try:
            return self._go_on(earlier_manifest)
        except StorageIOError:
            self._let_go()
            raise
        except Exception as error:  # RocksDB's errors have no type of their own
            self._let_go()
            raise unopened(self.directory, error) from error

    def _go_on(self, earlier_manifest: int) -> StoredState:
        """Go on with the mark and the copy of the earlier opening, and return the state of the database."""
        self._sequence = self._database.latest_sequence_number()
        state = self._find_state()
        manifest = manifest_number(self.directory)
        self._mark.begin(manifest, state)
        copied = read_copy(self.directory, earlier_manifest)
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        if copied is not None and copied.is_whole:
            self._copy = self._copied(manifest, copied.rows)
        _check_format(self.directory, self._database)
        self._sequence = self._synced_sequence = self._database.latest_sequence_number()
        return state

    def _copied(self, manifest: int, rows: Mapping[bytes, bytes]) -> DocumentCopy | None:
        """Return a new copy of the registry; none where a full disk has no space for it."""
        try:
            return DocumentCopy(self.directory, manifest, rows.items())
        except OSError as error:
            if not is_no_space(error):
                raise
            (self.directory / f"{COPY}.new").unlink(missing_ok=True)
            return None

    def _let_go(self) -> None:
        for reader in list(self._readers):
            reader.close()
        with suppress(Exception if self._failure else DbClosedError):  # the failure is reported, not what follows
            self._database.close()
        self._mark.close()
        if self._copy is not None:
            self._copy.close()

    def _find_state(self) -> StoredState:
        """Return the state of the last batch, without numbers where another release wrote it."""
        state, marked = None, read_marked(self.directory)
        with suppress(Exception):  # in a damaged block; the rows are read soon
            state = StoredState.decoded(self._database.get(STATE_KEY))
        if state is not None and state.sequence == self._sequence:
            return state
        if marked is not None and marked.written == self._sequence:
            return StoredState(self._sequence, self._sequence, marked.blocks, marked.documents)
        return StoredState(self._sequence, self._sequence)

    def _note_counts(self) -> None:
        self._written_counts = (self._blocks, self._documents)
        self._note()

    def _compare(self, what: str, found: int, stored: int) -> None:
        if stored not in (found, UNKNOWN):
            raise DamagedStoreError(self.directory, f"{found:,} {what} are there, {stored:,} were stored")

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
            if not self._is_awaited() and not self._changed.wait(_GATHER_SECONDS) and self._has_nothing_to_do():
                self._is_idle = True  # so that the next change ends this, and others are gathered with it
                self._changed.wait()
                self._is_idle = False
                if not self._is_awaited():
                    self._changed.wait(_GATHER_SECONDS)
            return bool(self._queue) or not self._closing

    def _is_awaited(self) -> bool:
        """Return whether a round has to begin now."""
        awaited = self._waiters or self._sync_waiters or self._closing or self._is_urgent
        return bool(awaited) or self._queued_bytes >= _GATHERED_BYTES

    def _has_nothing_to_do(self) -> bool:
        is_synced = self._is_synced or self._fsync is not Fsync.EVERYSEC
        return is_synced and not (self._queue or self._is_awaited())

    def _run_round(self) -> None:
        batches = self._pop_batches()
        if batches:
            self._write(batches)
            self._is_synced = False
            self._rounds += 1
            self._written += len(batches)
        if self._fsync is Fsync.ALWAYS or self._is_sync_awaited():
            self._sync()
        elif batches:
            self._note()
        self._answer(batches)
        self._sync_mark()
        if self._fsync is Fsync.EVERYSEC and self._clock.now() >= self._synced_at + _SYNC_SECONDS:
            self._sync()

    def _note(self) -> None:
        self._mark.note(StoredState(self._sequence, self._synced_sequence, *self._written_counts))

    def _copying(self, copy: Callable[[], None]) -> None:
        """Change the copy of the registry; where that fails there is none until the next start."""
        try:
            copy()
        except OSError:
            assert self._copy is not None
            self._copy.close()
            self._copy = None
            (self.directory / COPY).unlink(missing_ok=True)

    def _sync_mark(self) -> None:
        """Sync the mark once a second at most, when nothing waits for it."""
        if self._clock.now() >= self._marked_at + _SYNC_SECONDS:
            self._marked_at = self._clock.now()
            with suppress(OSError):  # an older mark knows less, and nothing wrong
                self._mark.sync()

    def _pop_batches(self) -> list[_Batch]:
        with self._changed:
            batches: list[_Batch] = []
            rows = 0
            while self._queue and rows < _ROUND_ROWS:
                batches.append(self._queue.popleft())
                rows += batches[-1].row_count
            self._is_urgent &= bool(self._queue)
            return batches

    def _write(self, batches: Sequence[_Batch]) -> None:
        options = WriteOptions()
        options.no_slowdown = True
        last = batches[-1]
        changes = 1 + sum(each.row_count + len(each.prefixes) for each in batches)
        begin = time.perf_counter()
        while True:
            sequence = self._sequence + changes
            state = StoredState(sequence, self._synced_sequence, last.blocks, last.documents)
            try:
                self._database.write(_joined(batches, state), options)
            except Exception as error:
                if is_no_space(error):
                    self._reopen_with_space(error)
                elif "Write stall" in str(error):
                    time.sleep(_STALL_SECONDS)
                else:
                    raise
            else:
                self._sequence, self._written_counts = sequence, (last.blocks, last.documents)
                copied = [row for each in batches if each.is_copied for row in each.rows]
                if self._copy is not None and copied:
                    self._copying(partial(self._copy.append, copied))
                self.times["write"].observe(time.perf_counter() - begin)
                return

    def _reopen_with_space(self, full: Exception) -> None:
        """Return when the database was opened again, with a part of the reserve or with space that came back: after a
        write that found none it takes no other. All that was acknowledged lies in its log, whose torn end was not."""
        while True:
            if not self.reserve.give_up():
                self._wait_for_space(full)
            with suppress(Exception):  # its writer has a previous error
                self._database.close()
            earlier = manifest_number(self.directory)
            try:
                self._database = open_database(self.directory)
                self._go_on(earlier)
            except (StorageIOError, OSError) as error:
                if not is_no_space(error):
                    raise
            else:
                if self._shortage:
                    _log.info("metadata_disk_has_space", directory=str(self.directory))
                self._shortage = ""
                return

    def _wait_for_space(self, full: Exception) -> None:
        """Wait a moment. What is queued stays queued, calls that wait for it are answered with the reason."""
        if not self._shortage:
            _log.error("metadata_disk_full", directory=str(self.directory), reason=str(full))
        with self._changed:
            self._shortage = (
                f"the disk of the metadata ({self.directory}) is full and its reserve is used up: free space on it; "
                "changes are refused until then, reads go on"
            )
            if self._closing:
                raise full
            answered = [*self._waiters, *self._sync_waiters]
            self._waiters.clear()
            self._sync_waiters.clear()
            _resolve(answered, self._shortage)
            self._changed.wait(_FULL_SECONDS)

    def _sync(self) -> None:
        if not self._is_synced:
            begin = time.perf_counter()
            self._database.flush_wal(sync=True)
            self.times["sync"].observe(time.perf_counter() - begin)
            self._is_synced = True
            if self._copy is not None:
                self._copying(self._copy.sync)
            self._synced_sequence = self._sequence
            self._note()
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
        text = _with_advice(self.directory, " ".join(str(error).split()), _reason_of(error))
        failure = f"{self.directory} cannot be written: {text}; nothing is accepted any more, until a restart"
        with self._changed:
            self._failure = failure
            answered = [*self._waiters, *self._sync_waiters]
            self._waiters.clear()
            self._sync_waiters.clear()
            self._queue.clear()
        _resolve(answered, failure)
        self._on_failure(failure)


def _joined(batches: Sequence[_Batch], state: StoredState) -> WriteBatch:
    joined = WriteBatch(raw_mode=True)
    put, delete = joined.put, joined.delete
    put(STATE_KEY, state.encoded())  # first, where a reader of the log finds it
    for prefixes, puts, rows, *_ in batches:
        for prefix in prefixes:
            joined.delete_range(prefix, _prefix_end(prefix))
        for keys, values in puts:
            deque(map(put, keys, values), maxlen=0)  # a loop in C
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
REGISTRY: Final = "registry"
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


def row_prefix(table: str) -> bytes:
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


def encode_row(row: DocumentRow) -> Row:
    """Return the row of a document."""
    return row_prefix(row.table) + row.name.encode(), _encode_value(row.due, row.document)


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
# session and its blocks reach the disk in the order in which they were stored. Blocks that are beginning to be written
# are documents, too, of a table that older releases load and never look at.

BEGUN: Final = "blocks.begun"
"""Name of that table; the index reads and writes it (`kvcm/index/backends/rocks.py`)."""
_ENDED: Final = ".ended"  # behind a table's name; no other table's name ends like this


class RocksTable:
    """One table: reads are those of the memory table, changes go to the log in the same step."""

    def __init__(self, log: CommitLog, name: str, memory: MemoryTable) -> None:
        self._log = log
        self._prefix = row_prefix(name)
        self._ended_prefix = row_prefix(name + _ENDED)
        self._memory = memory
        self._is_copied = name == REGISTRY
        self._outcomes = Outcomes()

    async def get(self, name: str) -> bytes | None:
        return await self._memory.get(name)

    async def all(self) -> Mapping[str, bytes]:
        return await self._memory.all()

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        self._log.admit()
        is_replaced = await self._memory.replace(name, old, new, due)
        if is_replaced:
            self._log.append([self._row(name, new, due)], documents=_more(old, new), is_copied=self._is_copied)
        return is_replaced

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        self._log.admit()
        are_replaced = await self._memory.replace_together(replacements)
        if are_replaced:  # what one `append` brings is on the disk as a whole or not at all
            rows = [self._row(each.name, each.new, 0.0) for each in replacements]
            more = sum(_more(each.old, each.new) for each in replacements)
            self._log.append(rows, documents=more, is_copied=self._is_copied)
        return are_replaced

    async def finish(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        self._log.admit()
        if not await self._memory.replace(name, old, None):
            return False
        until = now + seconds
        forgotten = self._outcomes.store(name, outcome, until, now)
        rows = [self._row(name, None, 0.0), *((self._ended_prefix + each.encode(), None) for each in forgotten)]
        rows.append((self._ended_prefix + name.encode(), _encode_value(until, outcome)))
        self._log.append(rows, documents=-1, is_copied=self._is_copied)
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

    @property
    def due_from(self) -> float:
        return self._memory.due_from

    @property
    def revision(self) -> Revision:
        return self._memory.revision

    async def version(self) -> int:
        return await self._memory.version()


def _more(old: bytes | None, new: bytes | None) -> int:
    return (new is not None) - (old is not None)


class RocksStore:
    """The store of one manager alone, in a directory of its own. Opening it blocks.

    Args:
        directory: created if missing; no other process may have it open.
        fsync: when changes are synced to the disk: always, everysec or never.
        clock: time source of the policy.
        on_failure: receives the reason, on a thread of the store, when writing fails for good: the process has to end.
        reserve_bytes: of its disk, for metadata alone.

    Attributes:
        log: what makes changes durable; blocks are written through it too.
        begun: documents of the table `BEGUN`, as they were when the store was opened; the index takes them.

    Raises:
        StorageIOError: the directory is in use, was written by another release, or is damaged.
    """

    is_shared = False

    def __init__(
        self,
        directory: Path,
        fsync: str,
        clock: Clock,
        on_failure: _OnFailure = lambda _reason: None,
        reserve_bytes: int = 0,
    ) -> None:
        reserve = MetadataReserve(directory, reserve_bytes)
        self.log = CommitLog(directory, Fsync(fsync), clock, on_failure, reserve=reserve)
        self.begun: list[DocumentRow] = []
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
        count, registry = 0, list[Row]()
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
                continue
            count += 1
            if row.table == BEGUN:
                self.begun.append(row)
                continue
            if row.table == REGISTRY:
                registry.append((key, value))
            self.table(row.table).restore(row)
        self.log.count_documents(count)
        self.log.begin_copy(registry)
        for row in sorted(ended, key=lambda each: each.due):
            self.table(row.table.removesuffix(_ENDED)).restore_outcome(row)
