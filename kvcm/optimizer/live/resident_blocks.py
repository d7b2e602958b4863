"""Which blocks of a rehearsal are there, and how they follow one another."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from kvcm.optimizer.live.recording import Recording

__all__ = ["MOST_FOLLOWERS", "ResidentBlocks"]

MOST_FOLLOWERS = 1024
"""Blocks behind a victim that are looked through for the coldest leaf, as by the live guard."""


class ResidentBlocks:
    """The state of every block; *living* is what is resident or being written.

    Args:
        recording: whose blocks they are.
    """

    def __init__(self, recording: Recording) -> None:
        count = len(recording.parents)
        self.parents: Sequence[int] = recording.parents
        self.depths: Sequence[int] = recording.depths
        self.is_resident = bytearray(count)
        self.is_writing = bytearray(count)
        self.read_at = array("d", bytes(8 * count))
        self.written_at = array("d", bytes(8 * count))
        self._resident_children = array("i", bytes(4 * count))
        self._writing_children = array("i", bytes(4 * count))
        self._children: dict[int, list[int]] = {}
        for block, parent in enumerate(recording.parents):
            if parent >= 0:
                self._children.setdefault(parent, []).append(block)

    def begin_writing(self, block: int) -> None:
        """A block is being written."""
        self.is_writing[block] = 1
        if self.parents[block] >= 0:
            self._writing_children[self.parents[block]] += 1

    def end_writing(self, block: int) -> None:
        """It is not, any more."""
        self.is_writing[block] = 0
        if self.parents[block] >= 0:
            self._writing_children[self.parents[block]] -= 1

    def add(self, block: int, at: float) -> None:
        """A block is resident from now on."""
        self.is_resident[block] = 1
        self.read_at[block] = self.written_at[block] = at
        if self.parents[block] >= 0:
            self._resident_children[self.parents[block]] += 1

    def remove(self, block: int) -> None:
        """A block is gone."""
        self.is_resident[block] = 0
        if self.parents[block] >= 0:
            self._resident_children[self.parents[block]] -= 1

    def has_no_resident_child(self, block: int) -> bool:
        """Return what policies call a leaf."""
        return not self._resident_children[block]

    def is_leaf(self, block: int) -> bool:
        """Return whether nothing living follows a block."""
        return not (self._resident_children[block] or self._writing_children[block])

    def _is_living(self, block: int) -> bool:
        return bool(self.is_resident[block] or self.is_writing[block])

    def ancestors_missing(self, block: int) -> list[int]:
        """Return the blocks before one that are not living, the first of the chain first."""
        missing = []
        parent = self.parents[block]
        while parent >= 0 and not self._is_living(parent):
            missing.append(parent)
            parent = self.parents[parent]
        return missing[::-1]

    def tail_first(self, root: int) -> Iterator[int]:
        """Yield what follows a block in the order in which it is to go, the block itself at last, as the live guard
        does: always the coldest leaf, of equals the deepest. Nothing where more than `MOST_FOLLOWERS` follow.

        Whoever iterates removes a block before asking for the next, or does not: then nothing before it is named.
        """
        found, open_children = self._living_below(root)
        if len(found) > MOST_FOLLOWERS:
            return
        leaves = [self._coldness(block) for block in found if block not in open_children]
        heapify(leaves)
        while leaves:
            block = heappop(leaves)[2]
            yield block
            parent = self.parents[block]
            if self._is_living(block) or block == root or parent not in open_children:
                continue
            open_children[parent] -= 1
            if not open_children[parent]:
                del open_children[parent]
                heappush(leaves, self._coldness(parent))

    def _coldness(self, block: int) -> tuple[float, int, int]:
        return self.read_at[block], -self.depths[block], block

    def _living_below(self, root: int) -> tuple[list[int], dict[int, int]]:
        """Return a block with what follows it, and of those that are followed how many directly do."""
        found, open_children = [root], dict[int, int]()
        for block in found:  # which grows meanwhile
            children = [child for child in self._children.get(block, ()) if self._is_living(child)]
            if children:
                open_children[block] = len(children)
                found += children
            if len(found) > MOST_FOLLOWERS:
                break
        return found, open_children
