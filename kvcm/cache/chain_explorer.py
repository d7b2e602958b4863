"""What becomes of a chain of blocks, one by one: for people who ask why a prompt was not found.

Records are read from the store, past the search caches, and nothing of it counts as an access.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile

from kvcm.cache.instance_cache import InstanceCache, batches
from kvcm.index.backends.backend import Access
from kvcm.index.search_cache import StorageView
from kvcm.model.keys import unmixed_key
from kvcm.model.locations import BlockRecord, Location, LocationStatus

__all__ = [
    "BlockState",
    "ChainEnd",
    "ChainExplorer",
    "ChainSummary",
    "ExploredBlock",
    "ExploredLocation",
    "summarize_chain",
]

_AT_ONCE = 512


class BlockState(IntEnum):
    """What has become of a block; numbers are those of the wire."""

    BLOCK_SERVING = 1
    BLOCK_WRITING = 2
    BLOCK_DELETING = 3
    BLOCK_ABSENT = 4


class ChainEnd(IntEnum):
    """Why a prefix match ends; numbers are those of the wire."""

    CHAIN_END_NONE = 1
    CHAIN_END_ABSENT = 2
    CHAIN_END_WRITING = 3
    CHAIN_END_DELETING = 4
    CHAIN_END_STORAGE = 5


@dataclass(frozen=True, slots=True)
class ExploredLocation:
    """One place where a block lies; field names are those of the wire."""

    storage: str
    storage_type: str
    status: str
    specs: tuple[str, ...]
    size_bytes: int
    began_at_ms: int


@dataclass(frozen=True, slots=True)
class ExploredBlock:
    """The state of one block; field names are those of the wire."""

    position: int
    block_key: int
    state: BlockState
    is_readable: bool
    why_not: str
    locations: tuple[ExploredLocation, ...]
    last_access_at_ms: int
    accesses: int
    age_seconds: float
    is_pinned: bool
    parent_is_present: bool


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """How far a chain can be read; field names are those of the wire."""

    blocks: int
    tokens_per_block: int
    matched_blocks: int
    matched_tokens: int
    complete_blocks: int
    end: ChainEnd
    end_reason: str


_END_OF_STATE: Mapping[BlockState, ChainEnd] = {
    BlockState.BLOCK_ABSENT: ChainEnd.CHAIN_END_ABSENT,
    BlockState.BLOCK_WRITING: ChainEnd.CHAIN_END_WRITING,
    BlockState.BLOCK_DELETING: ChainEnd.CHAIN_END_DELETING,
    BlockState.BLOCK_SERVING: ChainEnd.CHAIN_END_STORAGE,
}


class ChainExplorer:
    """Looks at the blocks of one instance.

    Args:
        cache: the instance.
        view: which storages can be read.
        trouble_of: why a storage cannot be read, as the end of a clause that begins with its name.
        now: unix seconds.
    """

    def __init__(
        self, cache: InstanceCache, view: StorageView, trouble_of: Callable[[str], str], now: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._view = view
        self._trouble_of = trouble_of
        self._now = now

    async def explore(self, keys: Sequence[int]) -> list[ExploredBlock]:
        """Return the state of every key, in order.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        found: list[ExploredBlock] = []
        index = self._cache.index
        for page in batches(keys, _AT_ONCE):
            records, accesses = await index.get(page), await index.accesses(page)
            present = await self._present_parents(page, records)
            for key, record, access in zip(page, records, accesses, strict=True):
                found.append(self._block(len(found), key, record, access, present))
            await asyncio.sleep(0)
        return found

    async def _present_parents(self, keys: Sequence[int], records: Sequence[BlockRecord | None]) -> Set[int]:
        """Return those of the keys and of their parents that the index knows."""
        known = {key for key, record in zip(keys, records, strict=True) if record is not None}
        asked = set(keys)
        others = [
            parent
            for record in records
            if record is not None and (parent := record.parent) is not None and parent not in asked
        ]
        there = await self._cache.index.exists(others) if others else []
        return known | {key for key, is_there in zip(others, there, strict=True) if is_there}

    def _block(
        self, position: int, key: int, record: BlockRecord | None, access: Access | None, present: Set[int]
    ) -> ExploredBlock:
        locations = record.locations if record is not None else ()
        state, now = _state_of(locations), self._now()
        is_readable = any(self._can_be_read(location) for location in locations)
        parent = record.parent if record is not None else None
        return ExploredBlock(
            position=position,
            block_key=unmixed_key(key),
            state=state,
            is_readable=is_readable,
            why_not=self._lacks(locations) if is_readable else self._why_not(state, locations),
            locations=tuple(_describe_location(location) for location in locations),
            last_access_at_ms=int(access.at * 1000) if access is not None else 0,
            accesses=access.reads if access is not None else 0,
            age_seconds=max(0.0, now - min(each.written_at for each in locations)) if locations else -1.0,
            is_pinned=any(each.pinned_until > now for each in locations),
            parent_is_present=record is not None and (parent is None or parent in present),
        )

    def _can_be_read(self, location: Location) -> bool:
        return location.status is LocationStatus.SERVING and self._view.rank(location.storage) is not None

    def _lacks(self, locations: Sequence[Location]) -> str:
        """Return which specs a block that can be read has not, linear-attention state aside; "" for none."""
        has = {name for location in locations if self._can_be_read(location) for name in location.spec_names}
        lacking = [name for name in self._cache.instance.spec_names if name in self._cache.full_specs - has]
        if not lacking:
            return ""
        return f"it lacks {len(lacking)} of {len(self._cache.full_specs)} specs: {', '.join(lacking[:4])}" + (
            " …" if len(lacking) > 4 else ""
        )

    def _why_not(self, state: BlockState, locations: Sequence[Location]) -> str:
        if state is BlockState.BLOCK_ABSENT:
            return "it is not there: it was never written, or it was evicted or removed"
        if state is BlockState.BLOCK_SERVING:
            names = {each.storage: None for each in locations if each.status is LocationStatus.SERVING}
            return "; ".join(f"storage {name} {self._trouble_of(name)}" for name in names)
        is_writing = state is BlockState.BLOCK_WRITING
        status = LocationStatus.WRITING if is_writing else LocationStatus.DELETING
        left = max(0.0, max(each.deadline for each in locations if each.status is status) - self._now())
        if is_writing:
            return f"it is being written; the write session ends in {left:.0f} s unless it is finished or renewed"
        return f"it was evicted or removed; its bytes go in {left:.0f} s" if left else "it was evicted or removed"


def _state_of(locations: Sequence[Location]) -> BlockState:
    statuses = {location.status for location in locations}
    if LocationStatus.SERVING in statuses:
        return BlockState.BLOCK_SERVING
    if LocationStatus.WRITING in statuses:
        return BlockState.BLOCK_WRITING
    return BlockState.BLOCK_DELETING if statuses else BlockState.BLOCK_ABSENT


def _describe_location(location: Location) -> ExploredLocation:
    return ExploredLocation(
        storage=location.storage,
        storage_type=location.storage_type.kind,
        status=location.status.name.lower(),
        specs=location.spec_names,
        size_bytes=location.size_bytes,
        began_at_ms=int(location.written_at * 1000),
    )


def summarize_chain(blocks: Sequence[ExploredBlock], block_size: int) -> ChainSummary:
    """Return what a prefix match finds of a chain, and why it ends there.

    Args:
        blocks: the chain.
        block_size: tokens of a block.
    """
    matched = _length(block.is_readable for block in blocks)
    complete = _length(block.is_readable and not block.why_not for block in blocks)
    end, reason = ChainEnd.CHAIN_END_NONE, ""
    if matched < len(blocks):
        stopper = blocks[matched]
        end, reason = _END_OF_STATE[stopper.state], f"block {matched}: {stopper.why_not}"
    return ChainSummary(
        blocks=len(blocks),
        tokens_per_block=block_size,
        matched_blocks=matched,
        matched_tokens=matched * block_size,
        complete_blocks=complete,
        end=end,
        end_reason=reason,
    )


def _length(flags: Iterable[bool]) -> int:
    """Return how many stand before the first False."""
    return sum(1 for _ in takewhile(bool, flags))
