"""What MetaIndex asks of a place that keeps the records of one instance."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import NamedTuple, Protocol

from kvcm.model.locations import BlockRecord

__all__ = ["Change", "IndexBackend"]


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


class IndexBackend(Protocol):
    """Keeps the records of one instance; knows nothing of locks, answers or limits."""

    @property
    def awaits(self) -> bool:
        """Whether calls may suspend. Those of a backend that never suspends are atomic on one loop without locks."""

    @property
    def key_count(self) -> int:
        """Number of records."""

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of `keys`, in order; None where there is none."""

    async def write_many(self, changes: Sequence[Change]) -> None:
        """Store `new` for every key, remove those whose `new` is None; all changes or none."""

    async def children(self, key: int) -> list[int]:
        """Return the keys whose parent is `key`, found without a scan."""

    def scan(self, page_size: int) -> AsyncIterator[list[int]]:
        """Yield every key that exists during the whole scan exactly once, in pages."""

    async def random_sample(self, count: int, random: Random) -> list[int]:
        """Return up to `count` distinct keys, each equally likely, in time that does not grow with the index."""
