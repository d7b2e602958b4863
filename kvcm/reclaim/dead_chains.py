"""Blocks whose prefix is gone: found from their parents, and marked from the tail to the head (invariant 7).

The parent of such a block has no location that serves or is being written, or no record at all; all blocks behind it
are as useless as itself. A block stays as long as a writer is at it, a pin holds it, or a block behind it stays.
The prefix may come back at any time: it is looked at again right before every step, and on an index of this process's
memory nothing happens in between. On a shared store a writer may slip in, and finds blocks gone that it could have
kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvcm.index.meta_index import Change, MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.reclaim.marking import went

__all__ = ["Chain", "Freed", "orphans"]

_STEP: Final = 32  # blocks that are marked without a pause
_MOST_FETCHED: Final = 256  # families that are fetched at once


class Freed(NamedTuple):
    """What was marked, or would be: blocks and bytes."""

    blocks: int
    size_bytes: int


async def orphans(index: MetaIndex, keys: Sequence[int]) -> dict[int, bool]:
    """Return for every serving block whether its prefix is gone; blocks that do not serve are left out."""
    records = dict(zip(keys, await index.get(keys), strict=True))
    serving = {key: record.parent for key, record in records.items() if record is not None and _serving(record)}
    above = {parent for parent in serving.values() if parent is not None} - records.keys()
    records |= dict(zip(above, await index.get(list(above)), strict=True)) if above else {}
    return {key: parent is not None and not _is_living(records[parent]) for key, parent in serving.items()}


class Chain:
    """A block whose prefix is gone, and all blocks behind it.

    Args:
        index: the index.
        top: the block.
        clock: time source.
        delay_seconds: how long what is marked stays readable for those who were given it.
    """

    def __init__(self, index: MetaIndex, top: int, clock: Clock, delay_seconds: float) -> None:
        self._index = index
        self._top = top
        self._clock = clock
        self._delay_seconds = delay_seconds
        self._gone: set[int] = set()

    async def mark(self) -> AsyncIterator[list[Change]]:
        """Mark the blocks as deleting, from the tail to the head; yield the changes of each step."""
        async for step in self._steps():
            if not await self._is_orphan():
                return
            chosen = list(await self._choose(step))
            changes = await self._index.read_modify_write(chosen, lambda _key, old: self._marked(old))
            self._gone -= {change.key for change in changes if not went(change.old, change.new)}
            if changes:
                yield changes
            await asyncio.sleep(0)

    async def count(self) -> Freed:
        """Return what `mark` would mark now, and change nothing."""
        blocks = size_bytes = 0
        async for step in self._steps():
            if not await self._is_orphan():
                break
            chosen = await self._choose(step)
            blocks += len(chosen)
            size_bytes += sum(each.size_bytes for record in chosen.values() for each in _serving(record))
            await asyncio.sleep(0)
        return Freed(blocks, size_bytes)

    async def _is_orphan(self) -> bool:
        (record,) = await self._index.get((self._top,))
        if record is None or record.parent is None:
            return False  # what is behind it is found by itself, and has a grace of its own
        (parent,) = await self._index.get((record.parent,))
        return not _is_living(parent)

    async def _choose(self, keys: Sequence[int]) -> dict[int, BlockRecord]:
        """Return which of these blocks go now; whatever is behind a block comes before it."""
        families = dict(zip(keys, await self._index.families(keys), strict=True))
        wanted = [*keys, *(key for family in families.values() for key in family)]
        records = dict(zip(wanted, await self._index.get(wanted), strict=True))
        chosen: dict[int, BlockRecord] = {}
        for key in keys:
            behind = [child for child in families[key] if child != self._top]
            has_living = any(child not in self._gone and _is_living(records[child]) for child in behind)
            self._gone.difference_update(behind)
            record = records[key]
            if record is not None and not has_living and _may_go(record, self._clock.now()):
                chosen[key] = record
                self._gone.add(key)
        return chosen

    def _marked(self, old: BlockRecord | None) -> BlockRecord | None:
        now = self._clock.now()
        if old is None or not _may_go(old, now):
            return old
        return old._replace(locations=tuple(_deleting(each, now + self._delay_seconds) for each in old.locations))

    async def _steps(self) -> AsyncIterator[list[int]]:
        step: list[int] = []
        async for key in self._tail_first():
            step.append(key)
            if len(step) == _STEP:
                yield step
                step = []
        if step:
            yield step

    async def _tail_first(self) -> AsyncIterator[int]:
        """Yield the blocks, each after all that are behind it. Memory: one family per block of one chain."""
        fetched: dict[int, Sequence[int]] = {}
        path: list[tuple[int, Iterator[int]]] = [(self._top, iter(await self._family(self._top, fetched)))]
        steps = 0
        while path:
            key, rest = path[-1]
            child = next(rest, None)
            if child is None:
                path.pop()
                yield key
            elif child != self._top:  # keys that are no hashes can make a ring
                path.append((child, iter(await self._family(child, fetched))))
                steps += 1
                if steps % _STEP == 0:
                    await asyncio.sleep(0)

    async def _family(self, key: int, fetched: dict[int, Sequence[int]]) -> Sequence[int]:
        family = fetched.pop(key, None)
        if family is None:
            (family,) = await self._index.families((key,))
        if len(family) > 1:  # their own families in one go, for an index that is asked over the network
            some = list(islice(family, _MOST_FETCHED))
            fetched.update(zip(some, await self._index.families(some), strict=True))
        return family


def _serving(record: BlockRecord) -> list[Location]:
    return [each for each in record.locations if each.status is LocationStatus.SERVING]


def _is_living(record: BlockRecord | None) -> bool:
    return record is not None and any(each.status is not LocationStatus.DELETING for each in record.locations)


def _may_go(record: BlockRecord, now: float) -> bool:
    """Whether a block serves, and neither a writer nor a pin holds it."""
    serving = _serving(record)
    is_written = any(each.status is LocationStatus.WRITING for each in record.locations)
    return bool(serving) and not is_written and all(each.pinned_until <= now for each in serving)


def _deleting(location: Location, due: float) -> Location:
    if location.status is not LocationStatus.SERVING:
        return location
    return location._replace(status=LocationStatus.DELETING, deadline=due)
