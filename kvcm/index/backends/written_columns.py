"""The two changes that nearly all writes consist of, for many blocks at once: that their writing begins, and that they
serve. Row by row each costs twice as much."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby

from kvcm.index.backends.access import whole_seconds
from kvcm.index.backends.columns import NO_ROW, BlockColumns
from kvcm.index.backends.packed import Chunks, Header
from kvcm.model.locations import BlockRecord, LocationStatus

__all__ = ["WrittenColumns"]

_SERVING = LocationStatus.SERVING
_WRITING = LocationStatus.WRITING


class WrittenColumns(BlockColumns):
    """Blocks in columns that are written many at a time."""

    __slots__ = ()

    def begin(self, keys: Sequence[int], records: Sequence[BlockRecord]) -> list[Header] | None:
        """Add blocks that are beginning to be written: what a loop over `insert` does, in half the time.

        Args:
            keys: of the blocks, distinct.
            records: of each, with one location that is being written.

        Returns:
            The header of each, equal ones the same object; None, and nothing is done, where a key has a record or a
            record is of another kind.
        """
        rows, last, at = self._rows, None, 0
        if not rows.keys().isdisjoint(keys):
            return None
        headers: list[Header] = []
        chunks: list[Chunks] = []
        parents, depths, read_at = array("q"), array("i"), array("I")
        for parent, depth, locations in records:
            location = locations[0]
            header = location[:5] + location[6:]
            if header != last:
                if header[3] is not _WRITING:
                    return None
                last, at = self._pool.share(header), whole_seconds(header[6])
            if len(locations) != 1:
                return None
            headers.append(last)
            chunks.append(location[5])
            parents.append(parent or 0)
            depths.append(~depth if parent is None else depth)
            read_at.append(at)
        first, none = len(self._keys), array("i", (NO_ROW,)) * len(keys)
        self._keys.extend(array("q", keys))
        rows.update(zip(keys, range(first, first + len(keys)), strict=True))
        self._parents.extend(parents)
        self._depths.extend(depths)
        self._headers += headers
        self._chunks += chunks
        self._first_child.extend([self._orphans.pop(key, NO_ROW) for key in keys] if self._orphans else none)
        self._next.extend(none)
        self._previous.extend(none)
        self._read_at.extend(read_at)
        self._reads.extend(array("H", bytes(2 * len(keys))))
        for row, record in enumerate(records, first):
            if record[0] is not None:
                self._link(row, record[0])
        return headers

    def serve(self, keys: Sequence[int], olds: Sequence[BlockRecord], news: Sequence[BlockRecord]) -> bool:
        """Let blocks serve whose writing is done: what a loop over `swap` does, in half the time.

        Args:
            keys: of the blocks, distinct.
            olds: record of each, with one location, which is being written.
            news: the same with that location serving; where it is and what it takes stays as it was.

        Returns:
            Whether that is what all of them are; otherwise nothing is done.
        """
        all_headers, all_chunks = self._headers, self._chunks
        last = last_stored = None
        served: list[tuple[int, Header, bytes]] = []
        for key, old, new in zip(keys, olds, news, strict=True):
            row = self._rows.get(key)
            if row is None or len(old[2]) != 1 or len(new[2]) != 1 or old[:2] != new[:2]:
                return False
            before, after = old[2][0], new[2][0]
            stored, header = all_headers[row], after[:5] + after[6:]
            if header != last or stored is not last_stored:
                if stored[3] is not _WRITING or header[3] is not _SERVING:
                    return False
                if header[1:3] != stored[1:3] or header[5] != stored[5]:
                    return False
                last, last_stored = self._pool.share(header), stored
            if stored != before[:5] + before[6:] or all_chunks[row] != before[5]:
                return False
            if self._depths[row] != (~old[1] if old[0] is None else old[1]) or self._parents[row] != (old[0] or 0):
                return False
            served.append((row, last, after[5]))
        self._put_served(served)
        return True

    def _put_served(self, served: Sequence[tuple[int, Header, bytes]]) -> None:
        for row, header, chunk in served:
            self._headers[row], self._chunks[row] = header, chunk
            self._read_at[row], self._reads[row] = whole_seconds(header[6]), 0
        if self._observer is not None:
            for priority, alike in groupby(served, key=_priority):
                self._observer.added_together([row for row, _, _ in alike], priority)


def _priority(served: tuple[int, Header, bytes]) -> int:
    return served[1][9]
