"""How many bytes a group needs for a given part of the hits that it could have, estimated while a manager serves.

Reuse distances of a sample of the keys (SHARDS, Waldspurger et al., FAST 2015): a key belongs to the sample if its hash
lies below a threshold, which falls as the sample fills, so that memory is bounded. The distance of an access is the
bytes of the sampled keys that were read since the key was, its own included, over the sampled share; every access
counts as one over that share in a histogram of distances. What frequent keys in or out of the sample distort is put
right by the number of all accesses, which is known (SHARDS-adj). Pure Python and numpy: a manager has no numba.

A request reads all of its keys first and then makes them the newest, the tail before the head, as the live order does
(docs/eviction.md); so a key counts as found at a capacity only where those before it do, and the estimate is that of
`lru` and `leaf_lru`.

It forgets: all counts are halved once per `HALF_LIFE_SECONDS`, and keys that were not read for `_IDLE_HALVES` halvings
leave the sample.

What it costs is measured in benchmarks/live_tuning.py: of 1,024 keys some 16 are in the sample at most. A group takes
some 300 bytes per key of its sample.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import numpy.typing as npt

__all__ = ["ATTAINABLE", "HALF_LIFE_SECONDS", "ByteOrder", "BytesNeeded", "LiveCurve", "ReuseSample"]

# Sizes in the order in which they came, whose sum since any of them is asked for: a Fenwick tree, in plain Python.


class ByteOrder:
    """Sizes at places from 0 on; taken out ones leave a gap until a restart. A query or a change takes log2(count)
    steps.

    Args:
        count: how many places there are.
    """

    def __init__(self, count: int) -> None:
        self._sizes = [0] * count
        self._sums = [0] * (count + 1)  # at i: the sum of the i & -i sizes up to the place i - 1
        self._total = 0
        self.end = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no place left."""
        return self.end == len(self._sizes)

    def size_at(self, place: int) -> int:
        """Return the size at a place, 0 in a gap."""
        return self._sizes[place]

    def append(self, size: int) -> int:
        """Put a size at the end; return its place."""
        place, self.end = self.end, self.end + 1
        self._sizes[place] = size
        self._add(place, size)
        return place

    def remove(self, place: int) -> None:
        """Leave a gap."""
        self._add(place, -self._sizes[place])
        self._sizes[place] = 0

    def _add(self, place: int, size: int) -> None:
        self._total += size
        sums, count, at = self._sums, len(self._sizes), place + 1
        while at <= count:
            sums[at] += size
            at += at & -at

    def bytes_since(self, place: int) -> int:
        """Return the sum of the sizes from a place on."""
        before, sums, at = 0, self._sums, place
        while at:
            before += sums[at]
            at &= at - 1
        return self._total - before

    def restart(self, sizes: Sequence[int]) -> None:
        """Start again with these sizes at the first places."""
        assert len(sizes) < len(self._sizes)
        self._sizes[:] = [*sizes, *[0] * (len(self._sizes) - len(sizes))]
        self._sums = [0, *self._sizes]
        for at in range(1, len(self._sums)):
            above = at + (at & -at)
            if above < len(self._sums):
                self._sums[above] += self._sums[at]
        self._total, self.end = sum(sizes), len(sizes)


ATTAINABLE = (0.6, 0.8, 0.9, 0.95, 0.99)
"""Parts of the hits of an unlimited cache."""
HALF_LIFE_SECONDS = 3600.0
_MOST_SHARE = 1 / 64
"""Of all keys, as long as the sample is not full: caches of fewer than some 10,000 blocks are estimated coarsely."""
_LEAST_RISE = 1 / 256  # of a curve, from one of its points to the next
_IDLE_HALVES = 4
_MOST_GROUPS = 64
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # keys need not be well mixed
_HASHES = 1 << 64
_PER_OCTAVE = 16  # bins of distances; each is 4 % wide
_BINS = 62 * _PER_OCTAVE
_HALF_OF_A_HASH = np.uint64(32)


@dataclass(frozen=True, slots=True)
class LiveCurve:
    """The estimate for one group.

    Attributes:
        since: unix seconds when its lookups began to be counted.
        lookups: blocks asked for, older ones counted less.
        sampled_keys: keys that are followed.
        attainable_ratio: share of them that a cache of any size would find.
        points: capacities in bytes with the share found at each, ascending: where the curve rises.
        targets: parts of the attainable hits, each with the bytes that give it; empty while nothing was found.
    """

    since: float
    lookups: int
    sampled_keys: int
    attainable_ratio: float
    points: tuple[tuple[int, float], ...]
    targets: tuple[tuple[float, int], ...]

    def ratio_at(self, size: int) -> float:
        """Return the share found with so many bytes."""
        found = bisect_right([point[0] for point in self.points], size)
        return self.points[found - 1][1] if found else 0.0


class ReuseSample:
    """Reuse distances in bytes of the accesses of one group.

    Args:
        most_keys: that are in the sample.
        share: of all keys that is sampled at most, 1 for all of them.
        since: unix seconds of now; the start of its curve.
    """

    def __init__(self, most_keys: int, share: float = _MOST_SHARE, since: float = 0.0) -> None:
        assert most_keys > 0
        assert 0 < share <= 1
        self._most_keys = most_keys
        self._below = int(_HASHES * share)
        self._places: dict[int, int] = {}  # of sampled keys, in the order of their last reads
        self._hashes: list[tuple[int, int]] = []  # of the same keys, negated: a heap with the largest first
        self._order = ByteOrder(4 * most_keys)
        self._halved_at: list[int] = []  # where the order ended at the last halvings
        self._hits = np.zeros(_BINS)
        self._misses = 0.0
        self._accesses = 0.0
        self._since = since

    def __len__(self) -> int:
        """Return the number of sampled keys."""
        return len(self._places)

    @property
    def share(self) -> float:
        """Part of all keys that is in the sample."""
        return self._below / _HASHES

    def read(self, keys: Sequence[int], block_bytes: int) -> None:
        """Count a request for a chain of blocks, each of so many bytes."""
        self._accesses += len(keys)
        sampled = self._sampled(keys)
        if not sampled:
            return
        weight = 1.0 / self.share
        farthest = 0.0
        for position, (key, _) in enumerate(sampled):
            place = self._places.get(key)
            if place is None:  # no lookup finds the blocks behind a missing one
                self._misses += weight * (len(sampled) - position)
                break
            farthest = max(farthest, self._order.bytes_since(place) * weight)
            self._hits[_bin(farthest)] += weight
        for key, hashed in reversed(sampled):
            self._renew(key, hashed, block_bytes)
        while len(self._places) > self._most_keys:
            self._lower()

    def _sampled(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Return the keys that belong to the sample, each once, in their order, with their hashes."""
        hashes: npt.NDArray[np.uint64] = np.array(keys, np.int64).view(np.uint64) * _SPREAD
        hashes ^= hashes >> _HALF_OF_A_HASH  # the low bits of a product are poor
        hashes *= _SPREAD
        found = np.flatnonzero(hashes <= np.uint64(self._below - 1)).tolist()
        return list(dict.fromkeys((keys[place], int(hashes[place])) for place in found))

    def _renew(self, key: int, hashed: int, block_bytes: int) -> None:
        place = self._places.pop(key, None)
        if place is None:
            heapq.heappush(self._hashes, (-hashed, key))
        else:
            self._order.remove(place)
        if self._order.is_full:
            self._compact()
        self._places[key] = self._order.append(block_bytes)

    def _compact(self) -> None:
        places = list(self._places.values())
        self._halved_at = np.searchsorted(places, self._halved_at).tolist()
        self._order.restart([self._order.size_at(place) for place in places])
        self._places = {key: place for place, key in enumerate(self._places)}

    def _lower(self) -> None:
        """Take the key of the largest hash out; from now on only smaller ones belong to the sample."""
        hashed, key = heapq.heappop(self._hashes)
        self._order.remove(self._places.pop(key))
        self._below = -hashed

    def halve(self) -> None:
        """Halve all counts, and forget keys that were not read for some halvings."""
        self._hits *= 0.5
        self._misses *= 0.5
        self._accesses *= 0.5
        self._halved_at.append(self._order.end)
        if len(self._halved_at) > _IDLE_HALVES:
            self._forget_before(self._halved_at.pop(0))

    def _forget_before(self, end: int) -> None:
        for key in [key for key, place in self._places.items() if place < end]:
            self._order.remove(self._places.pop(key))
        self._hashes = [each for each in self._hashes if each[1] in self._places]
        heapq.heapify(self._hashes)

    def hit_curve(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return capacities in bytes, ascending, and the share of all accesses that each would find."""
        counted = self._hits.copy()
        # What the sample counts too much or too little is due to keys that are read all the time: the nearest ones.
        counted[0] += self._accesses - self._misses - counted.sum()
        hits = np.maximum.accumulate(counted.cumsum().clip(0.0, self._accesses))
        return _CAPACITIES, hits / max(1.0, self._accesses)

    def curve(self, parts: Sequence[float] = ATTAINABLE) -> LiveCurve:
        """Return the curve with as few points as show it, and the bytes that give each of the parts."""
        capacities, hits = self.hit_curve()
        attainable = float(hits[-1])
        points: list[tuple[int, float]] = []
        shown = 0.0
        for size, ratio in zip(capacities.tolist(), hits.tolist(), strict=True):
            if ratio - shown >= _LEAST_RISE or ratio >= attainable > shown:
                points.append((int(size), ratio))
                shown = ratio
            if ratio >= attainable:
                break
        targets = tuple(zip(parts, self.bytes_for(parts), strict=True)) if attainable else ()
        return LiveCurve(
            since=self._since,
            lookups=round(self._accesses),
            sampled_keys=len(self),
            attainable_ratio=attainable,
            points=tuple(points),
            targets=targets,
        )

    def bytes_for(self, parts: Sequence[float] = ATTAINABLE) -> list[int]:
        """Return how many bytes give so much of what an unlimited cache would find; 0 while that is nothing."""
        capacities, hits = self.hit_curve()
        if hits[-1] <= 0:
            return [0] * len(parts)
        return [int(capacities[int(np.searchsorted(hits, part * hits[-1]))]) for part in parts]


class BytesNeeded:
    """The samples of all groups.

    Args:
        most_keys: of each sample; 0 for none.
        now: monotonic seconds.
        wall: unix seconds.

    Attributes:
        parts: of the hits of an unlimited cache.
    """

    parts: Sequence[float] = ATTAINABLE

    def __init__(
        self, most_keys: int, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._most_keys = most_keys
        self._now = now
        self._wall = wall
        self._samples: dict[str, ReuseSample] = {}
        self._halve_at = now() + HALF_LIFE_SECONDS

    def on_read(self, group_name: str, keys: Sequence[int], block_bytes: int) -> None:
        """Count a request for a chain of blocks; of groups the first `_MOST_GROUPS` that are read from are counted."""
        sample = self._samples.get(group_name)
        if sample is None:
            if len(self._samples) >= _MOST_GROUPS:
                return
            sample = self._samples[group_name] = ReuseSample(self._most_keys, since=self._wall())
        if self._now() >= self._halve_at:
            self._halve_at = self._now() + HALF_LIFE_SECONDS
            for each in self._samples.values():
                each.halve()
        sample.read(keys, block_bytes)

    def attainable_ratio(self, group_name: str) -> float:
        """Return which part of the blocks asked for an unlimited cache would find; 0 while nothing was asked."""
        sample = self._samples.get(group_name)
        return 0.0 if sample is None else float(sample.hit_curve()[1][-1])

    def bytes_needed(self, group_name: str) -> list[int]:
        """Return the bytes needed for each of the `parts`; 0 while nothing was found."""
        sample = self._samples.get(group_name)
        return [0] * len(self.parts) if sample is None else sample.bytes_for(self.parts)

    def curve(self, group_name: str) -> LiveCurve | None:
        """Return the estimate for a group, None while there is none."""
        sample = self._samples.get(group_name)
        return None if sample is None else sample.curve(self.parts)

    @property
    def is_on(self) -> bool:
        """Whether lookups are counted at all."""
        return self._most_keys > 0

    @property
    def is_full(self) -> bool:
        """Whether no further group is counted."""
        return len(self._samples) >= _MOST_GROUPS


def _bin(distance: float) -> int:
    return min(_BINS - 1, ceil(log2(distance) * _PER_OCTAVE)) if distance > 1 else 0


_CAPACITIES = np.exp2(np.arange(_BINS) / _PER_OCTAVE)
"""Upper bounds of the bins, in bytes."""
