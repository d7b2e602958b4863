"""The two changes that nearly all writes consist of, for many blocks at once: that their writing begins, and that they
serve. Both work on whole columns: row by row they cost ten times as much.

Invariant: what is done here is what `insert` and `swap` do with the same blocks one after the other, also for whoever
follows; or nothing is done and the caller is told.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby

from kvcm.index.backends.access import whole_seconds
from kvcm.index.backends.alike import Alike, Ending
from kvcm.index.backends.columns import NO_ROW, BlockColumns
from kvcm.index.backends.packed import header_of, unpack
from kvcm.model.locations import Location, LocationStatus
from kvcm.model.runs import BlockRun

__all__ = ["WrittenColumns"]

_SERVING = LocationStatus.SERVING
_WRITING = LocationStatus.WRITING


class WrittenColumns(BlockColumns):
    """Blocks in columns that are written many at a time."""

    __slots__ = ()

    def begin(self, run: BlockRun) -> bool:
        """Add blocks that are beginning to be written.

        Returns:
            Whether none of them had a record; otherwise nothing is done.
        """
        assert run.location.status is _WRITING
        keys, count, first = run.keys, len(run.keys), len(self._keys)
        if not self._rows.keys().isdisjoint(keys):
            return False
        depths = array("i", range(run.depth, run.depth + count))  # a number that is too large changes nothing
        self._keys.extend(array("q", keys))
        self._rows.update(zip(keys, range(first, first + count), strict=True))
        self._parents.append(run.parent or 0)
        self._parents.extend(self._keys[first:-1])
        self._depths.extend(depths)
        if run.parent is None:
            self._depths[first] = ~run.depth
        self._headers += [self._pool.share(header_of(run.location))] * count
        self._chunks += run.chunks
        self._read_at.extend(array("I", (whole_seconds(run.location.written_at),)) * count)
        self._reads.extend(array("H", bytes(2 * count)))
        self._link_run(keys, first)
        if run.parent is not None:
            self._link(first, run.parent)
        return True

    def _link_run(self, keys: Sequence[int], first: int) -> None:
        """Link the rows of a chain from `first` on, each to the one before; the first to nothing."""
        count = len(keys)
        none = array("i", (NO_ROW,)) * count
        self._next.extend(none)
        self._previous.extend(none)
        if self._orphans.keys().isdisjoint(keys):
            self._first_child.extend(array("i", range(first + 1, first + count)))
            self._first_child.append(NO_ROW)
            return
        self._first_child.extend([self._orphans.pop(key, NO_ROW) for key in keys])  # some are waited for by children
        for row in range(first + 1, first + count):
            self._link(row, self._parents[row])

    def serve(self, keys: Sequence[int], ending: Ending) -> list[Alike] | None:
        """Let blocks serve whose writing is done.

        Args:
            keys: of the blocks, distinct.
            ending: what becomes of them.

        Returns:
            The blocks as they serve, in their order. None, and nothing is done, where one has no record or several
            locations, is not being written, or does not end like this.
        """
        rows = [row for row in map(self._rows.get, keys) if row is not None]
        chunks = [chunk for row in rows if type(chunk := self._chunks[row]) is bytes]
        if not len(keys) == len(rows) == len(chunks):
            return None
        served: list[Alike] = []
        at = 0
        for header, alike in groupby(map(self._headers.__getitem__, rows)):
            end = at + len(list(alike))
            before = unpack(header, b"")[0]
            after = ending(Alike(keys[at:end], before, chunks[at:end])) if before.status is _WRITING else None
            if after is None:
                return None
            assert _is_same_place(before, after.location)
            served.append(after)
            at = end
        self._put_served(rows, served)
        return served

    def _put_served(self, rows: Sequence[int], served: Sequence[Alike]) -> None:
        headers, chunks, read_at, reads = self._headers, self._chunks, self._read_at, self._reads
        told: list[tuple[Sequence[int], Sequence[int], int]] = []
        at = 0
        for keys, location, new_chunks in served:
            header, seconds = self._pool.share(header_of(location)), whole_seconds(location.written_at)
            of_these, at = rows[at : at + len(keys)], at + len(keys)
            for row, chunk in zip(of_these, new_chunks, strict=True):
                headers[row], chunks[row], read_at[row], reads[row] = header, chunk, seconds, 0
            told.append((of_these, keys, location.priority))
        if self._observer is not None:
            for of_these, keys, priority in told:
                self._observer.added_together(of_these, keys, priority)


def _is_same_place(writing: Location, serving: Location) -> bool:
    """Return whether a location serves as it was written: nothing changed but what an end decides."""
    decided = serving._replace(
        status=_WRITING,
        session_id=writing.session_id,
        deadline=writing.deadline,
        priority=writing.priority,
        pinned_until=writing.pinned_until,
    )
    return serving.status is _SERVING and decided == writing
