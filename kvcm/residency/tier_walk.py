"""How much of a prompt each engine's rank holds by tier, as the index API (RFC 1403) counts it.

Two ways of counting exist, and one pass over the prompt's blocks serves both.

*Ordered* (Conductor, Dynamo): a rank consumes the prompt's beginning that lies in GPU memory, goes on in host memory at
the first block that is missing there, then on disk, and never goes back up. This is how an engine loads: what follows
its own prefix comes from the next tier, and a block that lies in GPU memory behind a gap is computed again.

*Independent* (RFC 1403): the matched prefix ends at the first block that lies nowhere, and each medium counts the
blocks of this prefix that it holds.

Storages are shared: each rank can load from them, so that their blocks count as blocks on its disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["IN_GPU", "IN_HOST", "ON_DISK", "Runs", "TierMatches", "TierWalk", "windows"]

IN_GPU: Final = 1
"""Flag of a block that lies in GPU memory."""
IN_HOST: Final = 2
"""Flag of a block that lies in host memory."""
ON_DISK: Final = 4
"""Flag of a block that lies on disk or in a storage."""
_ORDER: Final = (IN_GPU, IN_HOST, ON_DISK)

_FIRST_WINDOW: Final = 64  # blocks; many ranks hold no more
_WINDOW: Final = 4096
_FLAGS_OF_WINDOW: Final = 1 << 22  # blocks x ranks: some milliseconds of work

Counts = NDArray[np.int64]


class Runs(NamedTuple):
    """Consecutive blocks, in runs that lie in the same media for every rank.

    Attributes:
        lengths: blocks of each run.
        flags: by run and rank, flags of the media.
    """

    lengths: Counts
    flags: NDArray[np.uint8]


class TierMatches(NamedTuple):
    """Blocks; a number for each rank.

    Attributes:
        gpu: from the start in GPU memory.
        host: from there on in host memory, those before included.
        disk: from there on on disk, those before included.
        matched: up to the first that lies nowhere.
        matched_gpu: of these, in GPU memory.
        matched_host: of these, in host memory.
        matched_disk: of these, on disk.
    """

    gpu: Counts
    host: Counts
    disk: Counts
    matched: Counts
    matched_gpu: Counts
    matched_host: Counts
    matched_disk: Counts


def windows(blocks: int, ranks: int) -> Iterator[slice]:
    """Yield windows of a prompt, each of which is a few milliseconds of work."""
    most = max(1, min(_WINDOW, _FLAGS_OF_WINDOW // max(1, ranks)))
    start, size = 0, min(_FIRST_WINDOW, most)
    while start < blocks:
        yield slice(start, min(start + size, blocks))
        start, size = start + size, most


class TierWalk:
    """Counts while the blocks of a prompt come, window by window.

    Args:
        ranks: of engines.
    """

    def __init__(self, ranks: int) -> None:
        self._blocks = 0
        self._tier = np.zeros(ranks, np.int64)  # in which each rank consumes; behind the last one when it is done
        self._ends = np.zeros((len(_ORDER), ranks), np.int64)
        self._is_matching = np.ones(ranks, np.bool_)
        self._matched = np.zeros((1 + len(_ORDER), ranks), np.int64)

    @property
    def is_going(self) -> bool:
        """Whether later blocks can count."""
        return bool(self._is_matching.any())  # a rank that consumes in order has found every block so far

    def extend(self, runs: Runs) -> None:
        """Count the next blocks."""
        if len(runs.lengths):
            self._extend_ordered(runs)
            self._extend_matched(runs)
            self._blocks += int(runs.lengths.sum())

    def matches(self) -> TierMatches:
        """Return the counts so far."""
        ordered = np.maximum.accumulate(
            self._ends, axis=0
        )  # a tier that a rank has not reached ends with the one before
        return TierMatches(*ordered, *self._matched)

    def _extend_ordered(self, runs: Runs) -> None:
        ends = np.concatenate(([0], np.cumsum(runs.lengths)))
        places = np.zeros(len(self._tier), np.int64)  # the first run that each rank has not consumed
        for tier, flag in enumerate(_ORDER):
            inside = np.flatnonzero(self._tier == tier)
            if not len(inside):
                continue
            is_missing = (runs.flags[:, inside] & flag) == 0
            is_missing &= np.arange(len(runs.lengths))[:, None] >= places[inside]
            has_left = is_missing.any(axis=0)
            places[inside] = np.where(has_left, is_missing.argmax(axis=0), len(runs.lengths))
            self._ends[tier, inside] = self._blocks + ends[places[inside]]
            self._tier[inside[has_left]] += 1

    def _extend_matched(self, runs: Runs) -> None:
        is_held = runs.flags != 0
        is_held[0] &= self._is_matching
        np.logical_and.accumulate(is_held, axis=0, out=is_held)
        self._is_matching = is_held[-1].copy()
        self._matched[0] += runs.lengths @ is_held
        for row, flag in enumerate(_ORDER, start=1):
            self._matched[row] += runs.lengths @ (is_held & ((runs.flags & flag) != 0))
