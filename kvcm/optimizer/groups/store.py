"""What one instance holds while a trace is replayed: its blocks, the specs of each, and their order of eviction.

The order is kept by the classes of the live reclaimer. Requests of `leaf_lru`, and of groups that evict the tail of a
chain before its head, are written as a whole and from the tail: every block is then newer than those that follow it,
so the order hardly ever names a block that others follow, as in a live cache (docs/eviction.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from kvcm.optimizer.groups.layout import InstanceLayout, QuotaGroup, SpecKind, SpecLayout
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.replay.policies import policy_of
from kvcm.optimizer.trace import Int32Column

__all__ = ["MOST_FOLLOWERS", "Store"]

MOST_FOLLOWERS = 1024
"""A victim that more than so many blocks follow is passed over, as in the live reclaimer."""

_MOST_THINNING_LOOKS = 512  # as there


class Store:
    """The blocks of one instance, by their numbers in it.

    Args:
        instance: what it is.
        group: that it belongs to.
        parents: the block before each block.
        is_tree: whether blocks follow no other than those.

    Attributes:
        instance: what it is.
        here: the specs that are resident of each block, as bits; 0 for none.
        from_tail: whether requests are written as a whole and from their tail.
        expires: whether blocks leave at an age.
        used: of the quota, in its unit.
        written, refused, evicted: blocks so far.
    """

    __slots__ = (
        "_amounts", "_children", "_followed", "_full", "_has_ages", "_is_guarded", "_masks", "_parents", "_policy",
        "_read_at", "_since", "_states", "evicted", "expires", "from_tail", "here", "instance", "refused", "used",
        "written",
    )  # fmt: skip

    def __init__(self, instance: InstanceLayout, group: QuotaGroup, parents: Int32Column, *, is_tree: bool) -> None:
        policy, count = instance.policy, len(parents)
        names_leaves = policy.name == "leaf_lru" and is_tree
        self.instance = instance
        self.here = bytearray(count)
        self.from_tail = group.tail_first or policy.name == "leaf_lru"
        self.expires = policy.name == "ttl"
        self.used = self.written = self.refused = self.evicted = 0
        self._parents: list[int] = parents.tolist()
        self._is_guarded = group.tail_first and not names_leaves
        self._children = _children_of(self._parents) if self._is_guarded else []
        self._followed = array("i", [0]) * (count + 1 if names_leaves or self._is_guarded or group.thins_states else 0)
        self._has_ages = self.expires or self._is_guarded or len(group.instances) > 1
        self._read_at = array("q", [0]) * (count if self._has_ages else 0)
        counts_from_write = self.expires and not policy.ttl_sliding
        self._since = array("q", [0]) * count if counts_from_write else self._read_at
        self._masks = b""
        self._full = _bits(instance, SpecKind.FULL)
        self._states = _bits(instance, SpecKind.STATE) if group.thins_states else 0
        self._amounts = [_amount(instance, group, mask) for mask in range(1 << len(instance.specs))]
        capacity = group.high // max(1, self._amounts[-1]) if len(group.instances) == 1 else None
        # Where blocks are no tree there are no leaves: then it is an LRU that is touched from the tail.
        spec = policy if policy.name != "leaf_lru" or is_tree else PolicySpec("lru")
        self._policy = policy_of(spec, capacity, lambda slot: not self._followed[slot])

    def __len__(self) -> int:
        return len(self._policy)

    def masks_of(self, length: int) -> bytes:
        """Return the specs that each block of a write of so many blocks has."""
        specs = self.instance.specs
        if length > len(self._masks):
            masks = [_mask(specs, depth, 1 << 62) for depth in range(2 * length)]
            self._masks = bytes(masks)
        if not length or not any(spec.at_end for spec in specs):
            return self._masks[:length]
        return self._masks[: length - 1] + bytes([_mask(specs, length - 1, length)])

    def growth(self, block: int, mask: int) -> int:
        """Return what writing specs of a block takes of the quota, beyond what it takes now."""
        return self._amounts[self.here[block] | mask] - self._amounts[self.here[block]]

    def read_at(self, block: int) -> int:
        """Return when a resident block was last read or written, in microseconds."""
        return self._read_at[block]

    def touch(self, blocks: Sequence[int], now: int) -> None:
        """Read resident blocks, one after the other."""
        if not blocks:
            return
        if len(set(blocks)) == len(blocks):
            self._policy.touch_all(blocks, [1] * len(blocks))
        else:
            for block in blocks:
                self._policy.touch(block)
        if self._has_ages:
            for block in blocks:
                self._read_at[block] = now

    def insert(self, block: int, mask: int, now: int) -> int:
        """Write a block that is not there; return what that takes of the quota."""
        self._policy.insert(block, block)
        return self._keep(block, mask, now)

    def insert_all(self, blocks: Sequence[int], masks: Sequence[int], now: int) -> int:
        """Write distinct blocks that are not there, one after the other."""
        self._policy.insert_all(blocks, blocks)
        return sum([self._keep(block, mask, now) for block, mask in zip(blocks, masks, strict=True)])

    def add(self, block: int, mask: int) -> int:
        """Write specs that a resident block lacks; return what that takes of the quota."""
        more = self.growth(block, mask)
        self.here[block] |= mask
        self.used += more
        return more

    def evict(self, block: int, *, for_room: bool = True) -> int:
        """Take a block out; return what that frees of the quota."""
        self._policy.remove(block, evicted=for_room)
        amount = self._amounts[self.here[block]]
        self.here[block] = 0
        self.used -= amount
        self.evicted += 1
        if self._followed:
            self._followed[self._parents[block]] -= 1
        return amount

    def victims(self) -> Iterator[tuple[int, int]]:
        """Yield the block that is to go next, and the one that goes in its place. Whoever iterates evicts the latter
        before asking for the next."""
        if self._is_guarded:
            yield from self._guarded()
            return
        while self._policy:
            block = next(self._policy.victims())
            yield block, block

    def thin(self, amount: int) -> int:
        """Take states of blocks that have exactly one follower, until so much of the quota is free; return how much is.

        Looks at blocks that would go next, and at those that they follow, since some policies name ends of chains only.
        """
        freed, seen = 0, set[int]()
        for block in self._policy.victims() if self._states else ():
            while block >= 0 and self.here[block] and block not in seen:
                if freed >= amount or len(seen) >= _MOST_THINNING_LOOKS:
                    return freed
                seen.add(block)
                freed += self._thin_block(block)
                block = self._parents[block]
        return freed

    def _thin_block(self, block: int) -> int:
        here = self.here[block]
        rest = here & ~self._states
        if rest == here or not rest or rest & self._full != self._full or self._followed[block] != 1:
            return 0
        self.here[block] = rest
        freed = self._amounts[here] - self._amounts[rest]
        self.used -= freed
        return freed

    def drop_aged(self, now: int) -> int:
        """Take out what is older than the policy allows; return what that frees of the quota."""
        oldest = now - round(self.instance.policy.ttl_seconds * 1e6)
        freed = 0
        while self._policy and self._since[block := next(self._policy.victims())] < oldest:
            freed += self.evict(block, for_room=False)
        return freed

    def _keep(self, block: int, mask: int, now: int) -> int:
        amount = self._amounts[mask]
        self.here[block] = mask
        self.used += amount
        self.written += 1
        if self._followed:
            self._followed[self._parents[block]] += 1
        if self._has_ages:
            self._read_at[block] = self._since[block] = now
        return amount

    def _guarded(self) -> Iterator[tuple[int, int]]:
        crowded: set[int] = set()  # blocks that too many follow; so they do what is before such a block
        for block in self._policy.victims():
            if not self._followed[block]:
                yield block, block
            elif not crowded.isdisjoint(self._children[block]) or (depths := self._depths_below(block)) is None:
                crowded.add(block)
            else:
                for victim in self._from_coldest_leaf(block, depths):
                    yield block, victim

    def _depths_below(self, root: int) -> dict[int, int] | None:
        """Return how far behind a block everything is that follows it, and itself; None where too many follow."""
        depths = {root: 0}
        for block in (order := [root]):
            for child in self._children[block]:
                if self.here[child]:
                    depths[child] = depths[block] + 1
                    order.append(child)
            if len(depths) > MOST_FOLLOWERS + 1:
                return None
        return depths

    def _from_coldest_leaf(self, root: int, depths: Mapping[int, int]) -> Iterator[int]:
        """Yield what follows a block in the order in which it is to go, and the block itself at last: each time the
        leaf that was not read for longest, of equals the deepest, then the smallest."""
        leaves = [(self._read_at[each], -depth, each) for each, depth in depths.items() if not self._followed[each]]
        heapify(leaves)
        while leaves:
            _, _, block = heappop(leaves)
            yield block
            parent = self._parents[block]
            if block != root and not self._followed[parent]:
                heappush(leaves, (self._read_at[parent], -depths[parent], parent))


def _children_of(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for block, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(block)
    return children


def _bits(instance: InstanceLayout, kind: SpecKind) -> int:
    return sum(1 << bit for bit, spec in enumerate(instance.specs) if spec.kind is kind)


def _amount(instance: InstanceLayout, group: QuotaGroup, mask: int) -> int:
    if group.unit == "blocks":
        return int(mask > 0)
    return sum(spec.bytes for bit, spec in enumerate(instance.specs) if mask >> bit & 1)


def _mask(specs: Sequence[SpecLayout], depth: int, length: int) -> int:
    return sum(1 << bit for bit, spec in enumerate(specs) if spec.is_written(depth, length))
