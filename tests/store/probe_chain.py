"""Block keys that are chosen against Python's dictionaries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["probe_chain"]

KEYS = 65_536
Numbers = npt.NDArray[np.int64]


def probe_chain(random: np.random.Generator, bits: int = 17, count: int = KEYS) -> list[int]:
    """Return keys whose dictionary of 2^bits slots is searched from end to end for nearly each of them.

    CPython goes from slot i to (5 i + p + 1) mod 2^bits, p being what is left of the hash, 5 bits less each time. The
    first keys fill the slots that follow one another where p is 0, one step each; the others enter among them.
    """
    mask, filled = (1 << bits) - 1, int(0.3 * (1 << bits))
    slots = [0]
    while len(slots) < filled:
        slots.append((5 * slots[-1] + 1) & mask)
    place = np.full(1 << bits, -1, np.int64)
    place[slots] = np.arange(filled)
    walkers: Numbers = np.empty(0, np.int64)
    while len(walkers) < count - filled:
        hashes = random.integers(1 << bits, 1 << (bits + 13), 1 << 20)
        walkers = np.unique(np.concatenate([walkers, _entering(hashes, place, mask)]))
    return [*slots, *walkers[: count - filled].tolist()]


def _entering(hashes: Numbers, place: Numbers, mask: int) -> Numbers:
    """Return the hashes that pass filled slots only, and come to the first half of those."""
    slot, left = hashes & mask, hashes
    while True:
        inside = place[slot] >= 0
        hashes, slot, left = hashes[inside], slot[inside], left[inside]
        if not left.any():
            return hashes[place[slot] < place.max() // 2]
        left = left >> 5
        slot = (5 * slot + left + 1) & mask
