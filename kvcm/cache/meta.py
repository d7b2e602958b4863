"""GetCacheMeta: every location of a block, readable or still being written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.index.answers import StorageView
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.masks import BlockMask

__all__ = ["BlockMeta", "block_metas"]


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What is known of one block.

    Attributes:
        key: the block.
        parent: key before it in its chain, None at the head or when unknown.
        depth: position in its chain.
        locations: visible locations, best first: readable ones by speed, then those being written. What is being
            deleted has vanished from every answer. Empty when the block is not there.
    """

    key: int
    parent: int | None
    depth: int
    locations: tuple[Location, ...]


async def block_metas(cache: InstanceCache, keys: Sequence[int], mask: BlockMask, view: StorageView) -> list[BlockMeta]:
    """Return one entry per unmasked key, in order."""
    metas: list[BlockMeta] = []
    for page in pages([keys[i] for i in mask.unmasked(len(keys))], cache.page_keys):
        records = await cache.index.get(page)
        metas += [_meta(key, record, view) for key, record in zip(page, records, strict=True)]
        await asyncio.sleep(0)
    return metas


def _meta(key: int, record: BlockRecord | None, view: StorageView) -> BlockMeta:
    if record is None:
        return BlockMeta(key, None, 0, ())
    visible = [location for location in record.locations if location.status is not LocationStatus.DELETING]
    visible.sort(key=lambda location: _badness(location, view))
    return BlockMeta(key, record.parent, record.depth, tuple(visible))


def _badness(location: Location, view: StorageView) -> tuple[bool, float]:
    rank = view.rank(location.storage)
    return location.status is not LocationStatus.SERVING, float("inf") if rank is None else rank
