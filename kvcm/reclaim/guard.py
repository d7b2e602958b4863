"""The guard of prefix chains: the tail goes before the head (invariant 7).

A policy names a victim; while other blocks still follow it, its coldest descendant leaf goes in its place (design.md
decision 18). *Coldest* is the leaf that was not read for the longest time; of equals the deepest, then the one of the
smallest key: the same for every policy and every store.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvcm.model.locations import BlockRecord
from kvcm.reclaim.chains import Chains

__all__ = ["MOST_FOLLOWERS", "TailFirst"]

MOST_FOLLOWERS = 1024
"""Blocks behind a victim that are looked through for the coldest leaf: some milliseconds. A system prompt that more
than that follow is passed over: what follows it has its own turn."""

_Leaf = tuple[float, int, int]
"""When it was read, its depth with the sign turned, its key."""


class TailFirst:
    """The living descendants of a block in the order in which they are to go, and the block itself at last.

    None where more than `MOST_FOLLOWERS` blocks follow.

    Whoever asks chooses a block (`Chains.choose`) before asking for the next, or does not: then nothing before it in
    its chain is named either, since that block would be left without its prefix.

    Args:
        chains: the blocks.
        key: of the block.

    Attributes:
        seen: the block and what follows it, once the first was named.
    """

    def __init__(self, chains: Chains, key: int) -> None:
        self._chains = chains
        self._root = key
        self._leaves: list[_Leaf] = []
        self._open: dict[int, int] = {}  # living children that are left, of blocks that are no leaves
        self.seen: set[int] = set()
        self._named: tuple[int, BlockRecord] | None = None

    async def next(self) -> tuple[int, BlockRecord] | None:
        """Return the next block, None when there is none."""
        if not self.seen:
            await self._grow_from(self._root)
        if self._named is not None:
            await self._shrink(*self._named)
        self._named = await self._pop()
        return self._named

    async def _grow_from(self, key: int) -> None:
        """Find the leaves at and below a block, level by level."""
        self.seen.add(key)
        leaves: list[tuple[int, BlockRecord]] = []
        level = await self._chains.living([key])
        while level:
            await self._chains.families([key for key, _ in level])
            below: list[tuple[int, BlockRecord]] = []
            for parent, record in level:
                self.seen.add(parent)
                children = await self._chains.living(await self._chains.children(parent))
                children = [child for child in children if child[0] not in self.seen]
                if children:
                    self._open[parent] = len(children)
                    below += children
                else:
                    leaves.append((parent, record))
            level = below
            if len(self.seen) + len(below) > MOST_FOLLOWERS:
                return
        await self._push(leaves)

    async def _push(self, leaves: list[tuple[int, BlockRecord]]) -> None:
        # A single leaf is the coldest whenever it was read, and most victims are just that.
        read_at = await self._chains.read_at([key for key, _ in leaves]) if len(leaves) > 1 or self._leaves else {}
        for key, record in leaves:
            heappush(self._leaves, (read_at.get(key, 0.0), -record.depth, key))

    async def _pop(self) -> tuple[int, BlockRecord] | None:
        while self._leaves:
            _, _, key = heappop(self._leaves)
            record = await self._chains.record(key)
            if record is not None and self._chains.is_living(key, record):
                return key, record
        return None

    async def _shrink(self, key: int, record: BlockRecord) -> None:
        """A leaf was named: if it was chosen, its parent may be a leaf now."""
        if self._chains.is_living(key, record) or key == self._root or record.parent is None:
            return
        parent = record.parent
        if parent not in self._open:
            return
        self._open[parent] -= 1
        if not self._open[parent]:
            del self._open[parent]
            await self._push(await self._chains.living([parent]))
