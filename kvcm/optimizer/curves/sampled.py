"""Hit rates estimated from samples of the blocks, for policies without an exact curve and for traces too long for one.

A cache of C blocks behaves towards a share R of the blocks like one of R·C blocks that sees only them: *miniature
simulation* (Waldspurger et al. 2017); for lru it is the same as scaled stack distances (SHARDS, 2015). Every repeat
draws other blocks; the mean of the repeats is the estimate.

The estimate is of misses of blocks that were there before; the hits of an unlimited cache are counted exactly. A
few blocks that everybody reads, a system prompt, are always hits: whether they are drawn then makes no difference
(what SHARDS-adj is for).

A sample does not show where in a prefix the first missing block lies. Hence the estimate is the rate of *object
hits*. For lru, leaf_lru and belady with bypass it is the rate of prefix hits too, where every block has one parent and
all requests write: each access to a block comes right behind one to its parent, so what holds a block holds its
parents. Elsewhere prefix hits of a sample say too much, up to 0.03 for random_lru at a rate of 0.1, so they are not
offered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.curves.exact import CURVES
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Trace

__all__ = ["MOST_RATE", "MOST_REPEATS", "SampledCurve", "sample_of", "sampled_curves", "unlimited_hits"]

# Samples of a trace: some of its blocks, and the requests as far as they consist of them.


def sample_of(trace: Trace, rate: float, seed: int) -> Trace:
    """Return the accesses to one block out of each 1/rate in a row, drawn by the seed; where 1/rate is no whole number,
    two neighbours may draw the same block.

    Blocks in a row appeared together and mostly come again together, so this takes its share of every chain. Blocks
    drawn by a hash, each for itself (SHARDS, Waldspurger et al. 2015), miss the true rates by 3 to 9 times as much at
    a rate of 0.1, on each of the published traces.
    """
    kept = _drawn(trace.unique_blocks, rate, seed)
    places = np.flatnonzero(kept[trace.blocks])
    numbers = np.cumsum(kept, dtype=np.int32) - np.int32(1)
    offsets = np.searchsorted(places, trace.offsets).astype(np.int64)
    blocks = numbers[trace.blocks[places]]
    read_blocks = np.searchsorted(places, trace.offsets[:-1] + trace.read_blocks) - offsets[:-1]
    return replace(
        trace,
        offsets=offsets,
        blocks=blocks,
        read_blocks=read_blocks.astype(np.int32),
        parents=_parents(blocks, offsets, int(kept.sum())),
    )


def unlimited_hits(trace: Trace) -> int:
    """Return how many reads are of a block that was written before."""
    places = np.arange(trace.accesses)
    lengths = np.diff(trace.offsets)
    is_read = places - np.repeat(trace.offsets[:-1], lengths) < np.repeat(trace.read_blocks, lengths)
    is_written = np.repeat(trace.writes, lengths)
    first = np.full(trace.unique_blocks, trace.accesses)
    np.minimum.at(first, trace.blocks[is_written], places[is_written])
    return int(np.count_nonzero(is_read & (places > first[trace.blocks])))


def _drawn(unique_blocks: int, rate: float, seed: int) -> BoolColumn:
    strata = int(unique_blocks * rate)
    drawn = (np.arange(strata) + np.random.default_rng(seed).random(strata)) / rate
    kept = np.zeros(unique_blocks, np.bool_)
    kept[drawn.astype(np.int64)] = True
    return kept


def _parents(blocks: Int32Column, offsets: Int64Column, unique_blocks: int) -> Int32Column:
    """Return [U] the block before the first access to each, -1 where a request begins with it."""
    before = np.concatenate([np.full(1, -1, np.int32), blocks])[: len(blocks)]
    starts = offsets[:-1]
    before[starts[starts < len(blocks)]] = -1
    first = np.full(unique_blocks, len(blocks))
    np.minimum.at(first, blocks, np.arange(len(blocks)))
    return np.asarray(before[first], np.int32)


FloatColumn = npt.NDArray[np.float64]
_LEAST_BLOCKS = 100
_LEAST_SIZE = 10
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t of 95 %, both sides, by degrees of freedom from 1 on."""
MOST_RATE, MOST_REPEATS = 0.5, len(_T95) + 1


@dataclass(frozen=True, slots=True, eq=False)
class SampledCurve:
    """Estimates for one policy at some capacities.

    Attributes:
        policy: its label.
        rate: share of the blocks in each sample.
        repeats: samples.
        capacities: [P] blocks, ascending.
        hit_rates: [P] object hits per block read.
        errors: [P] the true rate lies that far from the estimate at most, with 95 % confidence: the t interval of the
            repeats, and what the distance to the sampled blocks makes at the slope between these points. A step in
            the curve may come as much too early or too late; what all samples get wrong alike is not in it.
        is_prefix_rate: whether these are the rates of prefix hits, too.
        accesses: block accesses in all samples.
        seconds: their replays took, drawing them left out.
    """

    policy: str
    rate: float
    repeats: int
    capacities: Int64Column
    hit_rates: FloatColumn
    errors: FloatColumn
    is_prefix_rate: bool
    accesses: int
    seconds: float


def sampled_curves(
    trace: Trace,
    specs: Sequence[PolicySpec],
    *,
    capacities: Sequence[int],
    rate: float = 0.1,
    repeats: int = 8,
    seed: int = 1,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SampledCurve]:
    """Return estimates for policies in mode block, all from the same samples.

    Args:
        trace: a plain one.
        specs: any policies.
        capacities: in blocks; 10 sampled blocks at least.
        rate: share of the blocks in each sample, 0.5 at most: beyond, the exact curve or replay takes no longer. Each
            sample has 100 blocks at least: below, capacities cannot be distinguished.
        repeats: samples, 2 to 31.
        seed: of the first sample; the others have the numbers behind it.
        workers: threads that replay; as many as there are processors by default.
        progress: called with the samples replayed, counted once for each policy, and all of them.

    Raises:
        OptionError: an option is out of its range, or the trace cannot be replayed.
    """
    _check_sampling(trace, rate, repeats)
    asked = _requested_points(trace, rate, capacities)
    lost = np.zeros((len(specs), repeats, len(asked.sizes)))
    seconds, accesses = [0.0] * len(specs), 0
    for number in range(repeats):
        sample = sample_of(trace, rate, seed + number)
        accesses += sample.accesses
        most = unlimited_hits(sample)
        for place, spec in enumerate(specs):
            begin = time.perf_counter()
            lost[place, number] = (most - _hits(sample, spec, asked.sizes, workers)) / sample.unique_blocks
            seconds[place] += time.perf_counter() - begin
            if progress is not None:
                progress(number * len(specs) + place + 1, repeats * len(specs))
    total = max(1, trace.totals.blocks)
    unlimited = unlimited_hits(trace) / total
    rates = unlimited - lost * (trace.unique_blocks / total)
    is_prefix_rate = trace.has_one_parent and bool(trace.writes.all())
    return [
        SampledCurve(
            policy=spec.label,
            rate=rate,
            repeats=repeats,
            capacities=asked.capacities,
            hit_rates=np.clip(rates[place].mean(axis=0), 0, unlimited),
            errors=_errors(asked, rates[place], trace.unique_blocks, unlimited),
            is_prefix_rate=is_prefix_rate and spec.label in CURVES,
            accesses=accesses,
            seconds=seconds[place],
        )
        for place, spec in enumerate(specs)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Points:
    """Capacities, and the sizes of caches of a sample that stand for them.

    Attributes:
        capacities: [P] blocks, ascending.
        sizes: [P] blocks of a sample.
        distances: [P] blocks, how far the capacity that a size stands for may be off.
    """

    capacities: Int64Column
    sizes: Int64Column
    distances: FloatColumn


def _check_sampling(trace: Trace, rate: float, repeats: int) -> None:
    least = _LEAST_BLOCKS / max(1, trace.unique_blocks)
    if not 0 < rate <= MOST_RATE or rate < least:
        allowed = f"{least:.2g} to {MOST_RATE:g}" if least <= MOST_RATE else ""
        allowed = allowed or f"none, with {trace.unique_blocks} unique blocks"
        raise OptionError(f"rate: {rate:g} is out of range; allowed: {allowed}")
    if not 2 <= repeats <= MOST_REPEATS:
        raise OptionError(f"repeats: {repeats} is out of range; allowed: 2 to {MOST_REPEATS}")


def _requested_points(trace: Trace, rate: float, capacities: Sequence[int]) -> _Points:
    """Return capacities, and the sizes that stand for something near to them."""
    asked = np.unique(np.array(capacities, np.int64))
    least = math.ceil(_sampled_capacities(np.array([_LEAST_SIZE]), rate)[0])
    if asked[0] < least:
        raise OptionError(
            f"capacities: {asked[0]} is out of range; allowed: {least} blocks or more, {_LEAST_SIZE} of each sample"
        )
    held = np.minimum(asked, trace.unique_blocks)
    sizes = np.rint((held - 1) * rate + 0.5).astype(np.int64)
    return _Points(asked, sizes, 0.5 / rate + np.abs(held - _sampled_capacities(sizes, rate)))


def _sampled_capacities(sizes: Int64Column, rate: float) -> FloatColumn:
    return np.asarray(1 + (sizes - 0.5) / rate, np.float64)


def _hits(sample: Trace, spec: PolicySpec, sizes: Int64Column, workers: int | None) -> Int64Column:
    """Return the object hits of each size: from the curve where there is one."""
    try:
        return CURVES[spec.label](sample).object_blocks[np.minimum(sizes, sample.unique_blocks)]
    except (KeyError, OptionError):
        replays = replay_all(sample, [Job(spec, int(size)) for size in sizes], workers=workers)
        return np.array([each.hits.object_blocks for each in replays], np.int64)


def _errors(points: _Points, rates: FloatColumn, unique_blocks: int, unlimited: float) -> FloatColumn:
    """Return `SampledCurve.errors`, from the [repeats, P] rates of the samples."""
    repeats = len(rates)
    interval = _T95[repeats - 2] * rates.std(axis=0, ddof=1) / math.sqrt(repeats)
    slopes = _slopes(np.minimum(points.capacities, unique_blocks), rates.mean(axis=0), unique_blocks, unlimited)
    return np.asarray(interval + points.distances * slopes, np.float64)


def _slopes(capacities: Int64Column, rates: FloatColumn, unique_blocks: int, unlimited: float) -> FloatColumn:
    """Return how steep the curve is at each capacity, by its neighbours and its known ends; flat where all is held."""
    places, firsts = np.unique(np.append(capacities, [0, unique_blocks]), return_index=True)
    slopes = np.abs(np.gradient(np.append(rates, [0, unlimited])[firsts], places))
    return np.where(capacities < unique_blocks, slopes[np.searchsorted(places, capacities)], 0.0)
