"""The rows of a RocksDB, looked at one by one, also those from which nothing can be loaded.

Layout: rocks.py, and kvcm/store/rocks/document_rows.py.

Everything that is derived from a record is made anew when an index is loaded, so rows can only be unreadable, or be
left over from a block or an instance that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.rocks_rows import ADDRESS, BLOCKS, READS
from kvcm.index.codec import decode_payload
from kvcm.model.errors import StorageIOError
from kvcm.model.instances import Placement
from kvcm.store.rocks.database import Row
from kvcm.store.rocks.document_rows import DOCUMENTS, decode_row, row_title
from kvcm.store.rocks.log import CommitLog
from kvcm.store.rocks.progress import LoadProgress

__all__ = ["BadRow", "LoadedBlocks", "RowsFound", "drop_rows", "look_at_rows"]

_ACCESS_BYTES: Final = 6
_PAGE_ROWS: Final = 4096
_MOST_BAD: Final = 100_000  # what is beyond is found by the next look


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is of no use.

    Attributes:
        key: of the row.
        where: what it is of, for people.
        reason: what is wrong with it.
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


def look_at_rows(log: CommitLog, on_progress: LoadProgress = lambda _done, _estimated: None) -> RowsFound:
    """Look at every row. Blocks the thread.

    Args:
        log: to which nothing was appended yet.
        on_progress: told after each page how many blocks were looked at, and about how many rows there are.

    Raises:
        StorageIOError: the database itself is damaged.
    """
    found, estimated, done = RowsFound(), log.estimated_rows(), 0
    _look_at_documents(log, found)
    reads = _Reads(log.read(READS), found)
    for key, value in log.read(BLOCKS):
        if len(found.bad) >= _MOST_BAD:
            return found
        reads.skip_to(key)
        _look_at_record(key, value, found)
        done += 1
        if done % _PAGE_ROWS == 0:
            on_progress(done, estimated)
    reads.skip_to(None)
    on_progress(done, estimated)
    return found


def drop_rows(log: CommitLog, rows: Sequence[BadRow]) -> None:
    """Delete rows."""
    for start in range(0, len(rows), _PAGE_ROWS):
        log.append([(row.key, None) for row in rows[start : start + _PAGE_ROWS]])


def _look_at_documents(log: CommitLog, found: RowsFound) -> None:
    for key, value in log.read(DOCUMENTS):
        if len(found.bad) >= _MOST_BAD:
            return
        try:
            decode_row(key, value)
        except StorageIOError as error:
            where = row_title((key, value))
            found.bad.append(BadRow(key, where, str(error), holds_data=True, stops_loading=True))


def _look_at_record(key: bytes, value: bytes, found: RowsFound) -> None:
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


class _Reads:
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
        """Yield nothing: what was loaded is found by scans."""
        for nothing in list[tuple[int, int, list[int]]]():
            yield nothing

    async def drop(self, uids: Container[int]) -> None:
        """Forget every record of these registrations."""
        for uid in self._records:
            if uid in uids:
                await self._new_backend(Placement(uid, 1)).drop()
