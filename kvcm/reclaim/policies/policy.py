"""What the reclaimer and the simulator ask of an eviction policy.

Blocks are named by *slots*: small dense numbers, so that a policy keeps its order in arrays instead of in objects. The
live reclaimer uses the rows of the index, which change when blocks are removed (`moved`); the simulator numbers the ids
of its trace; on a shared store slots are positions in a window of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

__all__ = ["IsLeaf", "Policy", "Summary"]

IsLeaf = Callable[[int], bool]
"""Whether no resident block follows the block in a slot."""


class Summary(NamedTuple):
    """What a store remembers of a block: enough to put it back into an order after a restart.

    Attributes:
        written_at: unix seconds.
        read_at: unix seconds of the last read; that of the write if it was never read.
        reads: since it was written.
    """

    written_at: float
    read_at: float
    reads: int


class Policy(Protocol):
    """An order of eviction over resident blocks."""

    def __len__(self) -> int:
        """Return the number of resident blocks."""

    def __contains__(self, slot: int) -> bool:
        """Return whether a slot is resident."""

    def insert(self, slot: int, key: int) -> None:
        """Add a block that was just written. `key` is its name for ever, a slot only while it is resident."""

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks that were written together: what `insert` does with one after the other."""

    def touch(self, slot: int, reads: int = 1) -> None:
        """Count reads of a resident block, the last of them just now."""

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Count reads of blocks: what `touch` does with one after the other."""

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out. `evicted` is False when it was removed for another reason than want of room."""

    def moved(self, slot: int, to: int) -> None:
        """The block in `slot` is called `to` from now on; nothing was called so."""

    def victims(self) -> Iterator[int]:
        """Yield blocks in the order in which they are to be evicted.

        Whoever iterates may evict the block just yielded, or other ones, before it asks for the next. A block that is
        still resident then is passed over, and does not come again in this iteration unless it was touched.
        """

    def rank(self, summary: Summary) -> tuple[float, ...]:
        """Return where a block stands by its summary alone: what is smaller is evicted first. Used to put blocks back
        into the order they came from, and to choose among candidates of a shared store."""

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before; called in ascending `rank`."""
