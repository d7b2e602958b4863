"""One group at work: writes into its instances, and room for that, taken from the instance whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvcm.optimizer.groups.layout import QuotaGroup, ReplayMode
from kvcm.optimizer.groups.store import Store
from kvcm.reclaim.policies.sharing import Sharing

__all__ = ["Pool", "Write"]


class Write(NamedTuple):
    """What is written at once.

    Attributes:
        store: of the instance.
        blocks: in the order of their chain.
        masks: specs that each of them gets.
        now: microseconds.
    """

    store: Store
    blocks: Sequence[int]
    masks: Sequence[int]
    now: int


class Pool:
    """The instances of a group and what they use together.

    Args:
        group: its quota and rules.
        stores: of its instances, in their order.
        mode: when room is made.
    """

    def __init__(self, group: QuotaGroup, stores: Sequence[Store], mode: ReplayMode) -> None:
        self._stores = stores
        self._expiring = [store for store in stores if store.expires]
        self._share = group.share
        self._weights = {uid: store.instance.weight for uid, store in enumerate(stores)}
        self._high, self._low = group.high, group.low
        self._by_request = mode == "request"
        self._used = 0

    @property
    def used(self) -> int:
        """Return what is used of the quota."""
        return self._used

    def drop_aged(self, now: int) -> None:
        """Take out what is older than a policy allows."""
        for store in self._expiring:
            self._used -= store.drop_aged(now)

    def write(self, write: Write) -> bytes:
        """Write blocks; return what was there of each when its turn came."""
        if self._by_request or write.store.from_tail:
            there = self._write_whole(write)
            if self._used > self._high:
                self._shrink(self._low, write.now)
            return there
        return self._write_each(write)

    def _write_whole(self, write: Write) -> bytes:
        """Write all blocks, whatever they take. Blocks that are there, or are not, go together."""
        store, blocks, masks, now = write
        here = store.here
        if len(set(blocks)) < len(blocks):
            return self._write_twice(write)
        there = bytes([here[block] for block in blocks])
        places = range(len(blocks))
        order = reversed(places) if store.from_tail else places
        for is_there, run in groupby(order, key=lambda place: there[place] > 0):
            written = [place for place in run if masks[place] or is_there]
            chosen = [blocks[place] for place in written]
            if is_there:
                store.touch(chosen, now)
                self._add_specs(write, written)
            else:
                self._used += store.insert_all(chosen, [masks[place] for place in written], now)
        return there

    def _write_twice(self, write: Write) -> bytes:
        """Write blocks of which some are named twice, one by one."""
        store, blocks, masks, now = write
        there = bytearray([store.here[block] for block in blocks])
        places = range(len(blocks))
        for place in reversed(places) if store.from_tail else places:
            if not store.from_tail:
                there[place] = store.here[blocks[place]]
            if store.here[blocks[place]]:
                store.touch([blocks[place]], now)
                self._add_specs(write, [place])
            elif masks[place]:
                self._used += store.insert(blocks[place], masks[place], now)
        return bytes(there)

    def _add_specs(self, write: Write, places: Sequence[int]) -> None:
        store, blocks, masks, _ = write
        for place in places:
            if masks[place] & ~store.here[blocks[place]]:
                self._used += store.add(blocks[place], masks[place])

    def _write_each(self, write: Write) -> bytes:
        """Make room before each block, as a cache does that is never larger than its quota."""
        store, blocks, masks, now = write
        here = store.here
        there = bytearray(len(blocks))
        run: list[int] = []
        for place, block in enumerate(blocks):
            mask = masks[place]
            there[place] = here[block]
            if there[place]:
                run.append(block)
                if not mask & ~there[place]:
                    continue
            store.touch(run, now)
            run.clear()
            self._write_one(store, block, mask, now)
        store.touch(run, now)
        return bytes(there)

    def _write_one(self, store: Store, block: int, mask: int, now: int) -> None:
        size = store.growth(block, mask)
        if self._used + size > self._high >= size:
            self._shrink(max(0, self._low - size), now)
        size = store.growth(block, mask)  # the block may itself have left for its own specs
        if self._used + size > self._high:
            store.refused += 1
        elif store.here[block]:
            self._used += store.add(block, mask)
        elif mask:
            self._used += store.insert(block, mask, now)

    def _shrink(self, target: int, now: int) -> None:
        """Evict until no more than `target` is used, or nothing is left."""
        for store in self._stores:
            self._used -= store.thin(self._used - target)
        if self._used <= target:
            return
        if len(self._stores) > 1:
            self._shrink_in_turns(target, now)
            return
        store = self._stores[0]
        for _, victim in store.victims():
            self._used -= store.evict(victim)
            if self._used <= target:
                return

    def _shrink_in_turns(self, target: int, now: int) -> None:
        used = {uid: store.used for uid, store in enumerate(self._stores)}
        sharing = Sharing(self._share, used, self._weights, self._used - target)
        walks = [store.victims() for store in self._stores]
        heads = {uid: head for uid, walk in enumerate(walks) if (head := next(walk, None)) is not None}

        def turn(uid: int) -> tuple[tuple[float, float], int]:
            age = (now - self._stores[uid].read_at(heads[uid][0])) / 1e6
            return sharing.turn(uid, age), uid

        while heads and self._used > target:
            uid = min(heads, key=turn)
            freed = self._stores[uid].evict(heads.pop(uid)[1])
            self._used -= freed
            sharing.took(uid, freed)
            if (head := next(walks[uid], None)) is not None:
                heads[uid] = head
