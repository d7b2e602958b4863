"""Prefix chains of one index, as the choice of victims sees them: records and families, without what was chosen.

On an index of this process's memory nothing here suspends, so what is read is the truth until the next await of whoever
asked. On a shared store it is a recent picture; the compare-and-set that marks victims decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, Location, LocationStatus

__all__ = ["Chains"]

_NOTHING: frozenset[str] = frozenset()

_MOST_FOLLOWERS = 4096  # that are read ahead: a block may have a million


class Chains:
    """A look at one index.

    Args:
        index: the index.
        known: records that were read a moment ago, for an index that is asked over the network.
    """

    def __init__(self, index: MetaIndex, known: Mapping[int, BlockRecord] | None = None) -> None:
        self._index = index
        self._records: dict[int, BlockRecord | None] = dict(known or {})
        self._families: dict[int, Sequence[int]] = {}
        self._chosen: dict[int, frozenset[str]] = {}
        self._around: Collection[int] = ()
        self._looked = 0

    def looked(self) -> int:
        """Return how many blocks were looked at to see whether they are living, since this was asked last."""
        looked, self._looked = self._looked, 0
        return looked

    @property
    def is_shared(self) -> bool:
        """Whether the index is asked over the network."""
        return self._index.is_shared

    async def look_around(self, keys: Collection[int]) -> None:
        """Read blocks and what directly follows them, all at once: asked one by one over the network, each costs
        journeys to every shard of the store."""
        self._around = keys
        await self.records(list(keys))
        await self.families(keys)
        followers = [child for key in keys for child in self._families[key]]
        await self.records(followers[:_MOST_FOLLOWERS])

    async def renew(self) -> None:
        """Others may have changed what was read."""
        self._records.clear()
        self._families.clear()
        if self._around:
            await self.look_around(self._around)

    async def record(self, key: int) -> BlockRecord | None:
        """Return the record of a block."""
        if key not in self._records:
            await self.records((key,))
        return self._records[key]

    async def records(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Return the records of blocks."""
        missing = [key for key in keys if key not in self._records]
        if missing:
            self._records.update(zip(missing, await self._index.get(missing), strict=True))
        return [self._records[key] for key in keys]

    async def families(self, keys: Collection[int]) -> None:
        """Fetch the children of blocks at once."""
        missing = [key for key in keys if key not in self._families]
        if missing:
            self._families.update(zip(missing, await self._index.families(missing), strict=True))

    async def children(self, key: int) -> Sequence[int]:
        """Return the keys of the blocks that directly follow."""
        if key not in self._families:
            await self.families((key,))
        return self._families[key]

    async def is_leaf(self, key: int) -> bool:
        """Return whether no living block directly follows."""
        children = await self.children(key)
        return not children or not await self.living(children)

    async def living(self, keys: Sequence[int]) -> list[tuple[int, BlockRecord]]:
        """Return those of the blocks that are still there for readers or writers."""
        self._looked += len(keys)
        records = zip(keys, await self.records(keys), strict=True)
        return [(key, record) for key, record in records if record is not None and self.is_living(key, record)]

    async def family(self, key: int, most: int) -> list[BlockRecord] | None:
        """Return the records of a block and of everything living that follows it, None where that is more."""
        found: list[BlockRecord] = []
        level, seen = await self.living([key]), {key}
        while level:
            found += [record for _, record in level]
            await self.families([parent for parent, _ in level])
            below = [child for parent, _ in level for child in await self.children(parent) if child not in seen]
            seen.update(below)
            if len(seen) > most:
                return None
            level = await self.living(below)
        return found

    def is_living(self, key: int, record: BlockRecord) -> bool:
        """Return whether something of a block is serving or being written that was not chosen."""
        chosen = self._chosen.get(key, _NOTHING)
        for each in record.locations:
            if each.status is LocationStatus.WRITING:
                return True
            if each.status is LocationStatus.SERVING and each.id not in chosen:
                return True
        return False

    def keeps_some(self, key: int, record: BlockRecord, going: Collection[Location]) -> bool:
        """Return whether something of a block stays when some locations go."""
        going_ids = {each.id for each in going} | self._chosen.get(key, _NOTHING)
        return any(each.status is not LocationStatus.DELETING and each.id not in going_ids for each in record.locations)

    def serving(self, key: int, record: BlockRecord) -> list[Location]:
        """Return the locations of a block that can be read and were not chosen."""
        chosen = self._chosen.get(key, _NOTHING)
        return [each for each in record.locations if each.status is LocationStatus.SERVING and each.id not in chosen]

    def choose(self, key: int, location_ids: Iterable[str]) -> None:
        """From now on these locations of a block count as gone."""
        self._chosen[key] = self._chosen.get(key, _NOTHING) | frozenset(location_ids)

    async def read_at(self, keys: Sequence[int]) -> dict[int, float]:
        """Return when blocks were last read, 0 for those that are gone."""
        accesses = zip(keys, await self._index.accesses(keys), strict=True)
        return {key: access.at if access is not None else 0.0 for key, access in accesses}
