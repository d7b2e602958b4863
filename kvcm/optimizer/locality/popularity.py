"""How unequally blocks are used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.locality.distribution import FloatColumn
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["Popularity", "popularity_of"]

_POINTS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Blocks by the number of their accesses.

    Attributes:
        ranks: 1 for the most accessed block; spaced evenly on a logarithmic scale.
        accesses: of the block of that rank.
        shares: part of all accesses that go to the blocks up to that rank.
        zipf_exponent: s of accesses ~ rank^-s, by least squares on both logarithms over blocks accessed more than once,
            each of these points weighing the same; 0 where fewer than two ranks have such blocks.
        once_share: part of the blocks that are accessed once only: a cache keeps them in vain.
    """

    ranks: Int64Column
    accesses: Int64Column
    shares: FloatColumn
    zipf_exponent: float
    once_share: float


def popularity_of(trace: Trace) -> Popularity:
    """Return how unequally the blocks of a trace are used."""
    counts = np.sort(np.bincount(trace.blocks, minlength=trace.unique_blocks))[::-1].astype(np.int64)
    if not len(counts):
        return Popularity(counts, counts, np.zeros(0), 0.0, 0.0)
    ranks = np.unique(np.geomspace(1, len(counts), _POINTS).round().astype(np.int64))
    shares = np.cumsum(counts)[ranks - 1] / counts.sum()
    once_share = float((counts == 1).mean())
    return Popularity(ranks, counts[ranks - 1], shares, _zipf_exponent(ranks, counts[ranks - 1]), once_share)


def _zipf_exponent(ranks: Int64Column, counts: Int64Column) -> float:
    again = counts > 1
    if again.sum() < 2:
        return 0.0
    slope, _ = np.polyfit(np.log(ranks[again]), np.log(counts[again]), 1)
    return max(0.0, -float(slope))
