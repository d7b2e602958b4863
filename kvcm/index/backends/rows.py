"""Blocks by row, for whoever keeps an order over an index that is in this process's memory.

Rows are dense numbers from 0. A block is *resident* while it has a serving location; only resident blocks are told of.
Everything here is synchronous: between two calls without an await nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvcm.index.backends.access import Access
from kvcm.model.locations import Location

__all__ = ["RowObserver", "Rows"]


class RowObserver(Protocol):
    """Told of every change of residence, in the step in which it happens."""

    def added(self, row: int) -> None:
        """The block became resident."""

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        """The blocks of these keys became resident, one after the other; the serving location of each has this
        priority."""

    def removed(self, row: int) -> None:
        """The block is not resident any more; its row may be about to be given to another one.

        Key and depth of the row are still those of the block. A dropped index says this of each of its blocks.
        """

    def changed(self, row: int) -> None:
        """The record of a resident block changed, and it still is resident."""

    def moved(self, row: int, to: int) -> None:
        """A resident block is in row `to` from now on, which was free."""

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        """Blocks, not all of them resident, were read, each so many times; in the order of their last reads, the least
        recent first."""


class Rows(Protocol):
    """The blocks of one index by row."""

    def __len__(self) -> int:
        """Return the number of rows, also of blocks that are not resident."""

    def row(self, key: int) -> int | None:
        """Return the row of a block, None when there is no record of it."""

    def key(self, row: int) -> int:
        """Return the key of the block in a row."""

    def depth(self, row: int) -> int:
        """Return the depth of the block in its chain."""

    def locations(self, row: int) -> Sequence[Location]:
        """Return the locations of the block."""

    def priority(self, row: int) -> int:
        """Return the highest priority of the block's serving locations, 0 where none serves."""

    def access(self, row: int) -> Access:
        """Return when the block was last read and how often."""

    def is_resident(self, row: int) -> bool:
        """Return whether the block has a serving location."""

    def children(self, row: int) -> Iterator[int]:
        """Yield the rows of the blocks that directly follow."""
