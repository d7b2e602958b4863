"""The interface of `kvcm index verify` to a backend that keeps the records of one instance.

Beside its record, a store keeps five things of a block: its place in the access order, its deadline, its place among
its parent's children, and its part of the sums (bytes by place, those being deleted, number of blocks). `StoredBlock`
holds all of one block, and `faults` says where the parts disagree.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcm.index.backends.backend import IndexBackend, Sum, is_resident, sums_of
from kvcm.model.keys import unmixed, unmixed_key
from kvcm.model.locations import BlockRecord

__all__ = ["AuditedIndex", "Claims", "PlainAudit", "StoredBlock", "faults"]

Claims = Mapping[int, frozenset[int]]
"""Blocks to look at, with the keys that are said to be their parents."""
BATCH_KEYS = 1024
_FOR_EVER = float("inf")
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """All that a store holds of one block.

    Attributes:
        key: the block.
        record: None when there is none, or when it cannot be read.
        damage: why the record cannot be read, "" when it can.
        version: what a write of the record changes; empty for no record.
        is_listed: whether scans find it.
        due: its deadline as the store keeps it for the search for due blocks.
        parents: whose child the store says it is; of those that were asked for and of its record's.
        is_evictable: whether it stands among the blocks that can be evicted, None where the store keeps none apart.
    """

    key: int
    record: BlockRecord | None
    damage: str
    version: bytes
    is_listed: bool
    due: float | None
    parents: frozenset[int]
    is_evictable: bool | None = None


class AuditedIndex(Protocol):
    """One instance's records with everything that is derived from them."""

    @property
    def can_mend(self) -> bool:
        """Whether derived data is stored, so that it has to be repaired; else it is rebuilt at every start."""

    @property
    def shards(self) -> range:
        """Parts that are looked at one after the other."""

    def listed(self, shard: int) -> AsyncIterator[Claims]:
        """Yield the blocks that scans find, page by page; some may come twice."""

    def unlisted(self, shard: int) -> AsyncIterator[Claims]:
        """Yield the blocks that the derived things name."""

    async def read_blocks(self, shard: int, claims: Claims) -> list[StoredBlock]:
        """Return all that is stored of blocks."""

    async def usage(self, shard: int) -> Mapping[Sum, int]:
        """Return the sums that are kept with the records, without those that are 0."""

    async def mend(self, shard: int, view: StoredBlock) -> bool:
        """Make all that is derived agree with the record, if that still is the one in the view."""

    async def drop_record(self, shard: int, view: StoredBlock) -> bool:
        """Forget a record that cannot be read, if it still is the one in the view, and all that is derived from it."""

    async def add_usage(self, shard: int, difference: Mapping[Sum, int]) -> None:
        """Correct the sums that are kept with the records."""


def faults(view: StoredBlock) -> list[str]:
    """Return in what the parts of a block disagree; nothing for a sound block."""
    if view.damage:
        return [f"the record cannot be read: {view.damage}"]
    if view.record is None:
        return _of_nothing(view)
    found = [] if view.is_listed else ["the record is missing in the access order: scans do not find it"]
    if view.due != view.record.due:
        found.append(f"the pending set says {view.due}, the record {view.record.due}")
    if view.is_evictable not in (None, is_resident(view.record)):
        what = "among the blocks that can be evicted" if view.is_evictable else "behind the blocks that can be evicted"
        found.append(f"the access order has it {what}")
    parent = view.record.parent
    if parent is not None and parent not in view.parents:
        found.append(f"the record is missing among the children of {unmixed_key(parent)}")
    others = sorted(unmixed(list(view.parents - {parent})))
    return found + [f"it stands among the children of {other}" for other in others]


def _of_nothing(view: StoredBlock) -> list[str]:
    found = ["the access order names a block that has no record"] if view.is_listed else []
    if view.due is not None:
        found.append("the pending set names a block that has no record")
    parents = sorted(unmixed(list(view.parents)))
    return found + [f"the children of {other} name a block that has no record" for other in parents]


class PlainAudit:
    """An index in this process: derived data was built when it was loaded, and is never stored.

    Args:
        backend: the index, which must not change meanwhile.
    """

    can_mend = False
    shards = range(1)

    def __init__(self, backend: IndexBackend) -> None:
        self._backend = backend
        self._pending: frozenset[int] | None = None

    async def listed(self, shard: int) -> AsyncIterator[Claims]:
        async for batch in self._backend.scan(BATCH_KEYS):
            yield dict.fromkeys(batch, frozenset())

    async def unlisted(self, shard: int) -> AsyncIterator[Claims]:
        pending = sorted(await self._all_pending())
        for start in range(0, len(pending), BATCH_KEYS):
            yield dict.fromkeys(pending[start : start + BATCH_KEYS], frozenset())

    async def read_blocks(self, shard: int, claims: Claims) -> list[StoredBlock]:
        keys = list(claims)
        records = await self._backend.get_many(keys)
        pending = await self._all_pending()
        families = {parent: await self._children(parent) for parent in _parents(claims, records)}
        views = []
        for key, record in zip(keys, records, strict=True):
            parents_to_check = claims[key] | (
                {record.parent} if record is not None and record.parent is not None else set()
            )
            parents = frozenset(parent for parent in parents_to_check if key in families[parent])
            due = (record.due if record is not None and record.due is not None else 0.0) if key in pending else None
            views.append(
                StoredBlock(
                    key, record=record, damage="", version=b"", is_listed=record is not None, due=due, parents=parents
                )
            )
        return views

    async def _children(self, parent: int) -> frozenset[int]:
        return frozenset(await self._backend.children(parent))

    async def _all_pending(self) -> frozenset[int]:
        if self._pending is None:
            self._pending = frozenset(await self._backend.due(_FOR_EVER, _ALL))
        return self._pending

    async def usage(self, shard: int) -> Mapping[Sum, int]:
        return sums_of(self._backend.usage_bytes, self._backend.deleting_bytes, self._backend.deleting_keys)

    async def mend(self, shard: int, view: StoredBlock) -> bool:
        return False

    async def drop_record(self, shard: int, view: StoredBlock) -> bool:
        return False

    async def add_usage(self, shard: int, difference: Mapping[Sum, int]) -> None:
        raise AssertionError("rebuilt at every start")


def _parents(claims: Claims, records: Sequence[BlockRecord | None]) -> set[int]:
    of_records = {record.parent for record in records if record is not None and record.parent is not None}
    return of_records.union(*claims.values())
