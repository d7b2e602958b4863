"""The policies as a simulator runs them: those of the live reclaimer, and two that no live cache runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.trace import Trace
from kvcm.reclaim.policies import Fifo, IsLeaf, LeafLru, Lfu, Lru, Policy, S3Fifo, Sieve, Summary, by_age
from kvcm.reclaim.policies.policy import Summaries, restore_each

__all__ = ["Belady", "Future", "policy_of", "splitmix64"]

# Belady's algorithm: the block that is needed last goes first. It knows the future, so no live cache runs it.


class Future:
    """Where in a trace each block is accessed.

    Args:
        trace: what its requests neither read nor write is no access.

    Attributes:
        now: position in `trace.blocks` of the access that is being replayed.
    """

    def __init__(self, trace: Trace) -> None:
        self.now = -1
        self._never = trace.accesses
        self._positions: list[list[int]] = [[] for _ in range(trace.unique_blocks)]
        for request in range(len(trace)):
            start = int(trace.offsets[request])
            count = len(trace.request_blocks(request)) if trace.writes[request] else int(trace.read_blocks[request])
            for position in range(start, start + count):
                self._positions[trace.blocks[position]].append(position)

    def next_access(self, slot: int) -> int:
        """Return the position of a block's next access, N if there is none."""
        positions = self._positions[slot]
        place = bisect_right(positions, self.now)
        return positions[place] if place < len(positions) else self._never


class Belady:
    """Evicts the block whose next access is farthest; of those that have none, the one of the smallest slot.

    Args:
        future: of the trace that is replayed.
    """

    __slots__ = ("_future", "_resident")

    def __init__(self, future: Future) -> None:
        self._future = future
        self._resident: set[int] = set()

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, slot: int) -> bool:
        return slot in self._resident

    def insert(self, slot: int, key: int) -> None:
        """Add a block."""
        self._resident.add(slot)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks."""
        self._resident.update(slots)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Do nothing: the past is of no account."""

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Do nothing: the past is of no account."""

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out."""
        self._resident.remove(slot)

    def moved(self, slot: int, to: int) -> None:
        """Refuse: only rows of an index move, and this order is for traces alone."""
        raise NotImplementedError("blocks of a trace keep their numbers")

    def victims(self) -> Iterator[int]:
        """Yield from the farthest next access to the nearest."""
        yield from sorted(self._resident, key=lambda slot: (-self._future.next_access(slot), slot))

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return nothing to go by: a summary is of the past."""
        return ()

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before."""
        self._resident.add(slot)

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks that were resident before."""
        self._resident.update(slots.tolist())


# Approximate LRU: of some blocks drawn at random the oldest goes, as in Redis. Seeded, hence repeatable.

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """Return the next state and the next number, both of 64 bits (Steele, Lea and Flood 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return state, mixed ^ mixed >> 31


class _RandomLru:
    """Evicts the least recently accessed of a few blocks, each drawn from all with equal chances.

    Blocks stand in a list; a number x of 32 bits draws place x·n >> 32 of n, and the last block fills a gap.

    Args:
        sample: draws per victim; one block may be drawn twice.
        seed: of the draws.
    """

    __slots__ = ("_clock", "_last", "_places", "_sample", "_slots", "_state")

    def __init__(self, sample: int, seed: int) -> None:
        self._sample = sample
        self._state = seed
        self._clock = 0
        self._last: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._slots: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._places

    def insert(self, slot: int, key: int) -> None:
        """Add a block as the newest."""
        self._places[slot] = len(self._slots)
        self._slots.append(slot)
        self.touch(slot)

    def insert_all(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks, the last as the newest."""
        for slot, key in zip(slots, keys, strict=True):
            self.insert(slot, key)

    def touch(self, slot: int, reads: int = 1) -> None:
        """Make a block the newest."""
        self._clock += 1
        self._last[slot] = self._clock

    def touch_all(self, slots: Sequence[int], reads: Sequence[int]) -> None:
        """Make blocks the newest, the last of them the newest of all."""
        for slot in slots:
            self.touch(slot)

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out."""
        place, last = self._places.pop(slot), self._slots.pop()
        if last != slot:
            self._slots[place] = last
            self._places[last] = place

    def moved(self, slot: int, to: int) -> None:
        """Refuse: only rows of an index move, and this order is for traces alone."""
        raise NotImplementedError("blocks of a trace keep their numbers")

    def victims(self) -> Iterator[int]:
        """Yield one victim of each sample; a block that stays may come again."""
        for _ in range(len(self._slots)):
            yield min((self._draw() for _ in range(self._sample)), key=self._last.__getitem__)

    def rank(self, summary: Summary | Summaries) -> tuple[Any, ...]:
        """Return the time of the last read."""
        return (summary.read_at,)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before."""
        self.insert(slot, key)

    def restore_all(self, slots: NDArray[np.int64], keys: NDArray[np.int64], summaries: Summaries) -> None:
        """Add blocks one after the other."""
        restore_each(self, slots, keys, summaries)

    def _draw(self) -> int:
        self._state, number = splitmix64(self._state)
        return self._slots[(number >> 32) * len(self._slots) >> 32]


def policy_of(spec: PolicySpec, capacity: int | None, is_leaf: IsLeaf, future: Future | None = None) -> Policy:
    """Return a policy as its spec says (optimizer.md, Mode "block").

    Args:
        spec: the policy.
        capacity: of the cache in blocks; None where it has no such size of its own.
        is_leaf: asked by `leaf_lru`.
        future: that `belady` needs.
    """
    match spec.name:
        case "leaf_lru":
            return LeafLru(is_leaf)
        case "lfu" | "lfu_aging":
            return Lfu(ageing=spec.name == "lfu_aging")
        case "s3fifo":
            return S3Fifo(warmup=int(0.1 * capacity) if spec.warmup and capacity else None, blocks=capacity)
        case "ttl":
            return by_age(sliding=spec.ttl_sliding)
        case "random_lru":
            return _RandomLru(spec.sample, spec.seed)
        case "belady":
            assert future is not None
            return Belady(future)
        case "sieve":
            return Sieve()
        case "fifo":
            return Fifo()
        case "lru":
            return Lru()
        case _:
            raise AssertionError(f"policy {spec.name!r} is not replayed")
