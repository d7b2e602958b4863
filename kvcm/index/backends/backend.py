"""What MetaIndex asks of a place that keeps the records of one instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from kvcm.model.locations import BlockRecord
from kvcm.model.storages import StorageType

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
        usage: difference of the bytes used, by storage type, of the keys that were changed.
    """

    lost: Collection[int]
    usage: Mapping[StorageType, int]


NOTHING_WRITTEN = Written((), {})


class Access(NamedTuple):
    """When a block was last read, and how often.

    Attributes:
        at: unix seconds; of a block never read, when it was stored.
        reads: may saturate.
    """

    at: int
    reads: int


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
    def usage_bytes(self) -> Mapping[StorageType, int]:
        """Bytes of all locations by storage type; of a shared store as last heard."""

    async def refresh(self) -> None:
        """Hear from the store how many records there are and what they use."""

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order; None where there is none."""

    async def write_many(self, changes: Sequence[Change]) -> Written:
        """Compare and set: where a record still is `old`, store `new`, or remove it if that is None.

        Each key by itself; keys of one lock shard become visible together. `old` is what `get_many` returned.
        Usage, children, due times and access order change in the same step.
        """

    async def children(self, key: int) -> list[int]:
        """Return the keys whose parent is `key`, found without a scan."""

    async def due(self, now: float, most: int) -> list[int]:
        """Return keys of blocks with a location that is writing or deleting and whose deadline is not after `now`,
        the earliest first, at most so many."""

    async def touch(self, counts: Mapping[int, int], at: float) -> None:
        """Record that blocks were read at unix time `at`: number of reads by key. Keys without a record are left."""

    async def accesses(self, keys: Sequence[int]) -> list[Access | None]:
        """Return when each block was last read, None where there is no record."""

    def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        """Yield every key that exists during the whole scan at least once, in pages.

        Only a shared store may yield a key twice, while others write.
        """

    async def random_sample(self, count: int, random: Random) -> list[int]:
        """Return up to `count` distinct keys, each equally likely, in time that does not grow with the index."""

    async def drop(self) -> None:
        """Forget everything, records included: the instance is gone."""


def usage_difference(changes: Iterable[Change]) -> Counter[StorageType]:
    """Return by how many bytes changes raise usage, by storage type (invariant 4)."""
    difference: Counter[StorageType] = Counter()
    for _, old, new, _ in changes:
        before = old.locations if old is not None else ()
        after = new.locations if new is not None else ()
        if len(before) == len(after) and all(a.id == b.id for a, b in zip(before, after, strict=True)):
            continue
        for location in after:
            difference[location.storage_type] += location.size_bytes
        for location in before:
            difference[location.storage_type] -= location.size_bytes
    return difference
