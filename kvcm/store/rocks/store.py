"""Documents that outlive the process: tables in memory, made durable by the commit log.

Rows: document_rows.py. Blocks lie in the same database (kvcm/index/backends/rocks.py), so that a session and its blocks
reach the disk in the order in which they were stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.store.memory import MemoryTable
from kvcm.store.rocks.document_rows import DOCUMENTS, DocumentRow, decode_row, encode_value, row_prefix, row_title
from kvcm.store.rocks.log import CommitLog, Fsync, OnFailure, RowChange
from kvcm.store.store import Replacement

__all__ = ["RocksStore", "RocksTable"]


class RocksTable:
    """One table: reads are those of the memory table, changes go to the log in the same step."""

    def __init__(self, log: CommitLog, prefix: bytes, memory: MemoryTable) -> None:
        self._log = log
        self._prefix = prefix
        self._memory = memory

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

    def _row(self, name: str, document: bytes | None, due: float) -> RowChange:
        return self._prefix + name.encode(), encode_value(due, document) if document is not None else None

    def restore(self, row: DocumentRow) -> None:
        """Put a document in memory as its row has it."""
        work = self._memory.replace(row.name, None, row.document, row.due)
        with suppress(StopIteration):
            work.send(None)  # to its end: no method of the memory table suspends

    async def due(self, now: float, most: int) -> list[str]:
        return await self._memory.due(now, most)

    async def version(self) -> int:
        return await self._memory.version()


class RocksStore:
    """The store of one manager alone, in a directory of its own. Opening it blocks.

    Args:
        directory: made if it is not there; nobody else may have it open.
        fsync: when changes are synced to the disk: always, everysec or never.
        clock: tells when a second has passed.
        on_failure: told why, on a thread of the store, when nothing can be written any more: the process has to end.

    Attributes:
        log: what makes changes durable; blocks are written through it too.

    Raises:
        StorageIOError: the directory is in use, was written by another release, or is damaged.
    """

    is_shared = False

    def __init__(self, directory: Path, fsync: str, clock: Clock, on_failure: OnFailure = lambda _reason: None) -> None:
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
            self._tables[name] = RocksTable(self.log, row_prefix(name), MemoryTable())
        return self._tables[name]

    async def flush(self) -> None:
        await self.log.flush()

    async def sync(self) -> None:
        await self.log.sync()

    async def close(self) -> None:
        await self.log.close()

    def _load(self) -> None:
        for key, value in self.log.read(DOCUMENTS):
            try:
                row = decode_row(key, value)
            except StorageIOError as error:
                raise StorageIOError(
                    f"{self.log.directory}: {row_title((key, value))} cannot be read: {error}; "
                    "run `kvcm index verify --repair --drop-unreadable`"
                ) from error
            self.table(row.table).restore(row)
