"""Documents that outlive the process: tables in memory, made durable by the commit log.

Rows: document_rows.py. How documents of a table ended lies in rows of a table of its own, due when it is over, which
older releases load and never look at. Blocks lie in the same database (kvcm/index/backends/rocks.py), so that a session
and its blocks reach the disk in the order in which they were stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.store.memory import MemoryTable
from kvcm.store.outcomes import Outcomes
from kvcm.store.rocks.document_rows import DOCUMENTS, DocumentRow, decode_row, encode_value, row_prefix, row_title
from kvcm.store.rocks.log import CommitLog, Fsync, OnFailure, RowChange
from kvcm.store.store import Replacement

__all__ = ["RocksStore", "RocksTable"]

_ENDED: Final = ".ended"  # behind a table's name; no other table's name has a dot


class RocksTable:
    """One table: reads are those of the memory table, changes go to the log in the same step."""

    def __init__(self, log: CommitLog, name: str, memory: MemoryTable) -> None:
        self._log = log
        self._prefix = row_prefix(name)
        self._ended_prefix = row_prefix(name + _ENDED)
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

    async def conclude(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        self._log.admit()
        if not await self._memory.replace(name, old, None):
            return False
        until = now + seconds
        forgotten = self._outcomes.keep(name, outcome, until, now)
        rows = [self._row(name, None, 0.0), *((self._ended_prefix + each.encode(), None) for each in forgotten)]
        self._log.append([*rows, (self._ended_prefix + name.encode(), encode_value(until, outcome))])
        return True

    async def outcome(self, name: str, now: float) -> bytes | None:
        return self._outcomes.get(name, now)

    def _row(self, name: str, document: bytes | None, due: float) -> RowChange:
        return self._prefix + name.encode(), encode_value(due, document) if document is not None else None

    def restore(self, row: DocumentRow) -> None:
        """Put a document in memory as its row has it."""
        work = self._memory.replace(row.name, None, row.document, row.due)
        with suppress(StopIteration):
            work.send(None)  # to its end: no method of the memory table suspends

    def restore_outcome(self, row: DocumentRow) -> None:
        """Put an outcome in memory as its row has it; those that are over first go first."""
        self._outcomes.keep(row.name, row.document, row.due, -inf)

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
            self._tables[name] = RocksTable(self.log, name, MemoryTable())
        return self._tables[name]

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
