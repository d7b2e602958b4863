"""What makes changes durable: an ordered log of row changes into one RocksDB.

Whoever changes memory appends the same change here in the same step, and waits for `flush` before it tells anybody.

Invariants:

* Changes reach the disk in the order of their `append`. What one `append` brings is there as a whole or not at all.
* One thread writes. A round takes what is queued, writes it as one atomic batch, makes it as durable as the policy says
  and then answers every `flush` that waits for it (group commit): any number of requests share one sync. So do those
  that call `sync`, which is on the disk under every policy.
* A round that fails is the last one. Memory is then ahead of the disk, and only loading anew can mend that.

Rejected: RocksDB's own synced write, which holds Python's global lock while the disk works (measured: the event loop
stood still for the whole sync of 20 ms); an unsynced write followed by a sync of the log of RocksDB does not. A write
that RocksDB would stall, because compaction is behind, would hold it too: it is refused by RocksDB and tried again.
Rejected, too: a batch built by the event loop, since two batches cannot be joined.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from rocksdict import DbClosedError, WriteBatch, WriteOptions

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.store.rocks.database import Row, open_database, prefix_end, read_rows
from kvcm.telemetry.metrics_values import Histogram

__all__ = ["CommitLog", "Fsync", "OnFailure", "RowChange"]

RowChange = tuple[bytes, bytes | None]
"""Key of a row and its new value, None to delete it."""

OnFailure = Callable[[str], None]
"""Told, on the thread that writes, why a round failed: the process has to end."""

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
    """The log of one directory. Opening blocks; what is there can be read until the first `append`.

    Args:
        directory: where the database is, or is made.
        fsync: when changes are synced.
        clock: tells when a second has passed.
        on_failure: told, on the thread that writes, why a round failed: the process has to end.
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
        on_failure: OnFailure = lambda _reason: None,
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
        self.times = {op: Histogram() for op in ("write", "sync", "flush")}  # each told by one thread alone
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
        """Yield the rows whose key begins with `prefix`, ascending: what is on disk, not what is queued.

        Raises:
            StorageIOError: a row is damaged.
        """
        return read_rows(self._database, prefix)

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
        size_bytes = sum(len(key) + (len(value) if value is not None else 0) for key, value in rows)
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
        batches = self._take()
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

    def _take(self) -> list[_Batch]:
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
        failure = f"{self.directory} cannot be written: {error}; nothing is accepted any more, make room and restart"
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
            joined.delete_range(prefix, prefix_end(prefix))
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
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(_finish, futures, failure)


def _finish(futures: Sequence[asyncio.Future[None]], failure: str | None) -> None:
    for future in futures:
        if future.done():  # its caller was cancelled
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(StorageIOError(failure))
