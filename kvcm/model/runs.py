"""Runs: blocks one behind the other in a prefix chain that are written alike.

Nearly every write is one run: fresh blocks, the same parts of each, all of them on one storage. What differs from block
to block is the key and the encoded location; all the rest is said once. So a run goes through a write as a few columns,
and no object is made per block. Whoever needs blocks one by one gets them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kvcm.model.locations import BlockRecord, Location

__all__ = ["BlockRun"]

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)
_new_record = cast("Callable[[type[BlockRecord], tuple[object, ...]], BlockRecord]", tuple.__new__)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks with one location each.

    Attributes:
        keys: of the blocks, distinct, each the parent of the next; one at least.
        parent: of the first, None at the head of a chain.
        depth: of the first.
        location: what the locations have in common; its `chunk` is empty.
        chunks: of the locations, by block.
    """

    keys: Sequence[int]
    parent: int | None
    depth: int
    location: Location
    chunks: Sequence[bytes]

    def cut(self, begin: int, end: int) -> BlockRun:
        """Return the run of its blocks from `begin` to before `end`."""
        parent = self.keys[begin - 1] if begin else self.parent
        return BlockRun(self.keys[begin:end], parent, self.depth + begin, self.location, self.chunks[begin:end])

    def locations(self) -> list[Location]:
        """Return the location of every block."""
        before, after = self.location[:5], self.location[6:]
        return [_new_location(Location, (*before, chunk, *after)) for chunk in self.chunks]

    def records(self) -> list[BlockRecord]:
        """Return every block as the index knows it when it has this location only."""
        parents = (self.parent, *self.keys[:-1])
        links = zip(parents, range(self.depth, self.depth + len(self.keys)), self.locations(), strict=True)
        return [_new_record(BlockRecord, (parent, depth, (location,))) for parent, depth, location in links]
