"""What MetaIndex asks of a place that keeps the records of one instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from kvcm.index.backends.access import Access
from kvcm.index.backends.alike import Alike, Ending
from kvcm.index.backends.rows import RowObserver, Rows
from kvcm.index.backends.tally import PlaceTally
from kvcm.model.locations import BlockRecord, Place
from kvcm.model.runs import BlockRun

__all__ = ["NOTHING_WRITTEN", "Access", "Change", "IndexBackend", "Written", "usage_difference"]


class Change(NamedTuple):
    """Outcome of a read-modify-write for one key.

    Attributes:
        key: the block.
        old: record before, None if there was none.
        new: record after, None if there is none.
        refused: the key is new and the index is full; `new` is None then.
    """

    key: int
    old: BlockRecord | None
    new: BlockRecord | None
    refused: bool = False


class Written(NamedTuple):
    """Outcome of `write_many`.

    Attributes:
        lost: keys whose record was not `old` any more; nothing is changed for them.
        usage: difference of the bytes used, by place, of the keys that were changed.
    """

    lost: Collection[int]
    usage: Mapping[Place, int]


NOTHING_WRITTEN = Written((), {})


class IndexBackend(Protocol):
    """Keeps the records of one instance; knows nothing of locks, answers or limits.

    Every method that awaits raises StorageIOError when the store cannot be asked.
    """

    @property
    def awaits(self) -> bool:
        """Whether reads and writes may suspend. Those of a backend that never suspends are atomic on one loop."""

    @property
    def is_shared(self) -> bool:
        """Whether other managers change the records too."""

    @property
    def key_count(self) -> int:
        """Number of records; of a shared store as last heard."""

    @property
    def usage_bytes(self) -> Mapping[Place, int]:
        """Bytes of all locations by place; of a shared store as last heard."""

    @property
    def deleting_bytes(self) -> Mapping[Place, int]:
        """Bytes of the locations that are being deleted, which `usage_bytes` counts too; as last heard."""

    @property
    def deleting_keys(self) -> int:
        """Number of records all of whose locations are being deleted; as last heard."""

    @property
    def due_from(self) -> float:
        """Unix seconds before which `due` finds nothing; 0 where only the store knows."""

    async def refresh(self) -> None:
        """Hear from the store how many records there are and what they use."""

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order; None where there is none."""

    async def write_many(self, changes: Sequence[Change]) -> Written:
        """Compare and set: where a record still is `old`, store `new`, or remove it if that is None.

        Each key by itself; keys of one lock shard become visible together. `old` is what `get_many` returned.
        Usage, children, due times and access order change in the same step.
        """

    def begin(self, run: BlockRun) -> Mapping[Place, int] | None:
        """Add blocks that are beginning to be written, none of which has a record, in one step that never suspends:
        what `write_many` does with their records.

        Returns:
            By how many bytes usage grows, by place. None, and nothing is done, where a key has a record, or a store has
            to be asked.

        Raises:
            StorageIOError: the store failed.
        """

    def serve(self, keys: Sequence[int], ending: Ending) -> Sequence[Alike] | None:
        """Let distinct blocks serve whose writing is done, in one step that never suspends: what `write_many` does with
        their records. Usage stays as it is.

        Returns:
            The blocks as they serve, in their order. None, and nothing is done, where one of them is not the only
            location of a block that ends like this, or a store has to be asked.

        Raises:
            StorageIOError: the store failed.
        """

    async def children(self, key: int) -> list[int]:
        """Return the keys whose parent is `key`, found without a scan."""

    async def families(self, keys: Sequence[int]) -> list[list[int]]:
        """Return the children of every key, in order of the keys asked for."""

    async def due(self, now: float, most: int) -> list[int]:
        """Return keys of blocks for which something has to be done (`BlockRecord.due`) not after `now`, the earliest
        first, at most so many."""

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        """Record that blocks were read. Keys without a record are left.

        Args:
            counts: number of reads by key, those first whose last read was first.
            at: unix time.
            moves: whether the blocks get the time, which nevertheless never goes back, or only more reads.
        """

    async def requeue(self, counts: Mapping[int, int], at: float) -> None:
        """Set the access of blocks to unix time `at` and to a number of reads by key, as if that was all that is known
        of them: a second chance is used up. Keys that are not resident are left."""

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        """Return when each block was last read, None where there is no record."""

    async def coldest(self, count: int, offset: int = 0) -> list[tuple[int, Access]]:
        """Return resident blocks in the order of the seconds of their accesses, the coldest first.

        Args:
            count: at most so many.
            offset: position in the order to begin at. A shared store keeps to it about: blocks near the cut may be
                left out although they are colder, or come again.
        """

    def follow(self, observer: RowObserver | None) -> Rows | None:
        """Tell an observer of changes from now on, in the place of the one before; None for nobody.

        Returns:
            The blocks by row; None, and nobody is told, where they are not in this process's memory.
        """

    def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        """Yield every key that exists during the whole scan at least once, in pages.

        Only a shared store may yield a key twice, while others write.
        """

    async def random_sample(self, count: int, random: Random) -> list[int]:
        """Return up to `count` distinct keys, each equally likely, in time that does not grow with the index."""

    async def drop(self) -> None:
        """Forget everything, records included: the instance is gone."""


def usage_difference(changes: Iterable[Change]) -> Counter[Place]:
    """Return by how many bytes changes raise usage, by place (invariant 4)."""
    tally = PlaceTally()
    for _, old, new, _ in changes:
        tally.change(old, new)
    return tally.used
