"""Approximate LRU: of some blocks drawn at random the oldest goes, as in Redis. Seeded, hence repeatable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcm.reclaim.policies import Summary

__all__ = ["RandomLru", "splitmix64"]

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """Return the next state and the next number, both of 64 bits (Steele, Lea and Flood 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return state, mixed ^ mixed >> 31


class RandomLru:
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

    def rank(self, summary: Summary) -> tuple[float, ...]:
        """Return the time of the last read."""
        return (summary.read_at,)

    def restore(self, slot: int, key: int, summary: Summary) -> None:
        """Add a block that was resident before."""
        self.insert(slot, key)

    def _draw(self) -> int:
        self._state, number = splitmix64(self._state)
        return self._slots[(number >> 32) * len(self._slots) >> 32]
