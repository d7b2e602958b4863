"""Victims of one choice, gathered and marked together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcm.index.meta_index import Change, MetaIndex
from kvcm.reclaim.marking import Eviction
from kvcm.reclaim.needs import Holding, Need
from kvcm.reclaim.victims import Source, Victim

__all__ = ["Batch", "Marker"]

_BLOCKS = 32  # the longest that requests wait for
_SHARED_BLOCKS = 256


class Marker(Protocol):
    """Marks victims, and tells of that."""

    def indexes(self) -> dict[int, MetaIndex]:
        """Return the indexes by uid."""

    async def mark(
        self, source: Source, index: MetaIndex, evictions: Mapping[int, Eviction]
    ) -> list[tuple[str, Change]]:
        """Mark victims of one instance by compare-and-set; return what changed, each with the policy that chose it."""

    def tell(self, need: Need, holding: Holding, marked_blocks: Sequence[tuple[str, Change]]) -> int:
        """Count and publish what was marked; return the number of blocks."""


class Batch:
    """Victims of one choice, which are marked together: over a shared store every compare-and-set is a journey, and in
    memory, too, a few at a time cost half of one by one.

    Args:
        reclaimer: marks them.
        need: what they are for.

    Attributes:
        indexes: by uid.
        is_shared: whether other managers change an index too.
        most: blocks of a batch.
    """

    def __init__(self, reclaimer: Marker, need: Need) -> None:
        self._reclaimer = reclaimer
        self._need = need
        self.indexes = reclaimer.indexes()
        self.is_shared = any(self.indexes[holding.uid].is_shared for holding in need.holdings)
        self.most = _SHARED_BLOCKS if self.is_shared else _BLOCKS
        self._gathered: dict[int, tuple[Source, dict[int, Eviction]]] = {}
        self._marked: dict[int, tuple[Source, list[tuple[str, Change]]]] = {}

    def take(self, victim: Victim) -> None:
        """Keep a victim for the end."""
        source, eviction, _ = victim
        _, evictions = self._gathered.setdefault(source.holding.uid, (source, {}))
        known = evictions.get(eviction.key, eviction)  # a block may give one copy after another
        evictions[eviction.key] = eviction._replace(location_ids=known.location_ids | eviction.location_ids)

    async def rest(self) -> None:
        """Let requests run. Of an index of this process what was chosen is marked before: its order has let go of it.
        What others share changes under the choice anyway, and the compare-and-set decides."""
        if not self.is_shared:
            await self._mark_gathered()
        await asyncio.sleep(0)

    async def _mark_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        try:
            for uid, (source, evictions) in gathered.items():
                _, blocks = self._marked.setdefault(uid, (source, []))
                blocks += await self._reclaimer.mark(source, self.indexes[uid], evictions)
        finally:
            for source, _ in gathered.values():
                await source.order.settle()

    async def end(self) -> int:
        """Mark what was gathered; return how many blocks were marked in all."""
        try:
            await self._mark_gathered()
        finally:  # what was marked before a failure is told as well
            blocks = [
                self._reclaimer.tell(self._need, source.holding, marked_blocks)
                for source, marked_blocks in self._marked.values()
            ]
        return sum(blocks)
