"""Every split of capacity among the levels of an exclusive LRU hierarchy, from one pass over the trace.

All levels together are one stack (identity 5 of optimizer.md), so the level in which a request finds a block follows
from the block's stack distance d: the first level whose capacity, together with that of all faster ones, is at least d.
The block is part of the prefix if no block before it has a distance above the capacity of all levels. So any split is
counted exactly from the runs of distances, in no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, prod
from typing import NamedTuple

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.recency import lru_depths
from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.tiers.tier import FloatColumn, Tier
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["BestSplit", "Runs", "SplitCurve", "SplitHits", "best_split", "split_curve"]

# Stack distances of what may be part of a prefix, by runs.
#
# What one request touched in a row mostly comes again in a row, with one distance. Such runs are fewer than accesses
# by one or two orders of magnitude.


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """K runs, by request and place.

    Attributes:
        requests: [K] whose blocks they are.
        counts: [K] blocks.
        distances: [K] stack distance of each block.
        furthest: [K] the largest distance in the request up to those blocks.
        block_tokens: [K] tokens of the prompt in each block.
        misses: [U + 1] accesses that do not find their block in the newest so many, whether they read or write.
    """

    requests: Int64Column
    counts: Int64Column
    distances: Int64Column
    furthest: Int64Column
    block_tokens: Int64Column
    misses: Int64Column

    def __len__(self) -> int:
        return len(self.requests)


def _runs_of(trace: Trace) -> Runs:
    """Return the runs of a trace; one pass.

    Raises:
        TraceError: requests read otherwise than a prefix or do not write what they read, so that what they touch
            depends on the capacity.
    """
    if not (trace.is_plain and trace.writes.all()):
        raise TraceError(f"{trace.name}: has requests that do not read and write plain prefixes; splits need only such")
    depths = lru_depths(trace.blocks, trace.unique_blocks)
    table = np.empty((trace.accesses, 5), np.int64)
    rows = _runs(depths, trace.offsets, trace.read_blocks, trace.input_tokens, trace.tokens_per_block(), table)
    requests, counts, distances, furthest, tokens = table[:rows].T.copy()
    return Runs(
        requests=requests,
        counts=counts,
        distances=distances,
        furthest=furthest,
        block_tokens=tokens,
        misses=_misses(depths, trace.unique_blocks),
    )


def _misses(depths: Int32Column, unique_blocks: int) -> Int64Column:
    found = np.bincount(depths, minlength=unique_blocks + 1)[: unique_blocks + 1]
    found[0] = 0
    misses: Int64Column = len(depths) - np.cumsum(found)
    return misses


@compiled
def _runs(
    depths: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    input_tokens: Int64Column,
    block_tokens: Int64Column,
    table: Int64Column,
) -> int:
    """Fill rows of (request, count, distance, furthest, tokens per block) and return how many there are."""
    rows = 0
    for request in range(read_blocks.size):
        size, prompt = block_tokens[request], input_tokens[request]
        first, furthest = rows, 0
        for place in range(read_blocks[request]):
            depth = depths[offsets[request] + place]
            if depth == 0:
                break
            furthest = max(furthest, depth)
            tokens = min((place + 1) * size, prompt) - min(place * size, prompt)
            # What has the same distance is no further than the furthest so far.
            if rows > first and depth == table[rows - 1, 2] and tokens == table[rows - 1, 4]:
                table[rows - 1, 1] += 1
                continue
            table[rows, 0], table[rows, 1], table[rows, 2] = request, 1, depth
            table[rows, 3], table[rows, 4] = furthest, tokens
            rows += 1
    return rows


Table = Sequence[Sequence[int]] | Int64Column


@dataclass(frozen=True, slots=True, eq=False)
class SplitHits:
    """What S splits among T levels give, [S, T] each.

    Attributes:
        prefix_blocks: blocks of prefixes that lie in a level.
        prefix_tokens: the same in tokens.
        loading_requests: that find any of their prefix in a level.
        read_blocks: of prefixes, and of demotions.
        written_blocks: that are inserted, promoted from below or demoted from above.
    """

    prefix_blocks: Int64Column
    prefix_tokens: Int64Column
    loading_requests: Int64Column
    read_blocks: Int64Column
    written_blocks: Int64Column


@dataclass(frozen=True, slots=True, eq=False)
class SplitCurve:
    """What any split gives.

    Attributes:
        runs: of stack distances.
        unique_blocks: U; more capacity is of no use.
    """

    runs: Runs
    unique_blocks: int

    def at(self, capacities: Table) -> SplitHits:
        """Return exactly what replays at [S, T] capacities, the fastest level first, would count.

        Raises:
            OptionError: they are no table of numbers from 0 on.
        """
        checked = _check_capacities(capacities)
        nothing = np.zeros(checked.shape[1])
        return self._measure(capacities=checked, latency=nothing, per_block=nothing, per_token=0.0)[0]

    def saved_seconds(
        self, tiers: Sequence[Tier], capacities: Table, *, block_bytes: int, recompute_seconds_per_token: float
    ) -> FloatColumn:
        """Return [S] seconds of prefill that T tiers of [S, T] capacities save, less those of loading.

        A request whose prefix takes longer to load than to compute computes it. Requests do not wait for each other:
        whether the bandwidth suffices for all requests together, a replay of the split says (`TierReplay.series`).

        Args:
            tiers: that give latency and bandwidth; their own capacities do not matter.
            capacities: in blocks, the fastest level first.
            block_bytes: of a block.
            recompute_seconds_per_token: 1/P.

        Raises:
            OptionError: capacities are no table of numbers from 0 on, one for each tier.
        """
        checked = _check_capacities(capacities)
        if checked.shape[1] != len(tiers):
            raise OptionError(
                f"capacities: rows have {checked.shape[1]} numbers; allowed: {len(tiers)}, one for each tier"
            )
        latency = np.array([tier.latency_seconds for tier in tiers])
        per_block = np.array([block_bytes / tier.bandwidth_bytes_per_second for tier in tiers])
        return self._measure(checked, latency, per_block, recompute_seconds_per_token)[1]

    def _measure(
        self, capacities: Int64Column, latency: FloatColumn, per_block: FloatColumn, per_token: float
    ) -> tuple[SplitHits, FloatColumn]:
        blocks, tokens, loading = (np.zeros(capacities.shape, np.int64) for _ in range(3))
        saved, cuts = np.zeros(len(capacities)), np.cumsum(capacities, axis=1)
        _split(
            self.runs.requests,
            self.runs.counts,
            self.runs.distances,
            self.runs.furthest,
            self.runs.block_tokens,
            cuts,
            latency,
            per_block,
            per_token,
            blocks,
            tokens,
            loading,
            saved,
        )
        demoted, written = self._moved(capacities, cuts)
        return SplitHits(blocks, tokens, loading, blocks + demoted, written), saved

    def _moved(self, capacities: Int64Column, cuts: Int64Column) -> tuple[Int64Column, Int64Column]:
        """Return [S, T] blocks demoted from a level, and blocks written to it."""
        held = np.minimum(cuts, self.unique_blocks)
        missed = self.runs.misses[held]
        # What came to a level and all faster ones, and is not there in the end, has gone down.
        gone = missed - held
        from_above = np.concatenate([np.zeros_like(gone[:, :1]), gone[:, :-1]], axis=1)
        written = np.where(capacities == 0, 0, np.where(cuts == capacities, missed, from_above))
        demoted = np.where((capacities == 0) | (cuts == cuts[:, -1:]), 0, gone)
        return demoted, written


def split_curve(trace: Trace) -> SplitCurve:
    """Return what any split of an exclusive hierarchy gives; one pass.

    Raises:
        TraceError: as `_runs_of` says.
    """
    return SplitCurve(_runs_of(trace), trace.unique_blocks)


def _check_capacities(capacities: Table) -> Int64Column:
    try:
        checked = np.array(capacities, np.int64)
    except (TypeError, ValueError, OverflowError):
        checked = np.zeros(0, np.int64)
    if checked.ndim != 2 or not checked.shape[1] or (checked < 0).any() or (checked >= 1 << 31).any():
        raise OptionError("capacities: are no rows of equally many numbers; allowed: numbers from 0 to 2^31 - 1")
    return checked


@compiled
def _split(
    requests: Int64Column,
    counts: Int64Column,
    distances: Int64Column,
    furthest: Int64Column,
    block_tokens: Int64Column,
    cuts: Int64Column,
    latency: FloatColumn,
    per_block: FloatColumn,
    per_token: float,
    blocks: Int64Column,
    tokens: Int64Column,
    loading: Int64Column,
    saved: FloatColumn,
) -> None:
    """Count S splits; `cuts` are [S, T] the capacity of a level and all faster ones."""
    levels = cuts.shape[1]
    found = np.zeros(levels, np.int64)
    for split in range(len(cuts)):
        total = cuts[split, levels - 1]
        run = 0
        while run < requests.size:
            request, prefix_tokens = requests[run], 0
            found[:] = 0
            while run < requests.size and requests[run] == request:
                if furthest[run] <= total:
                    level = 0
                    while distances[run] > cuts[split, level]:
                        level += 1
                    found[level] += counts[run]
                    tokens[split, level] += counts[run] * block_tokens[run]
                    prefix_tokens += counts[run] * block_tokens[run]
                run += 1
            seconds = 0.0
            for level in range(levels):
                if found[level]:
                    blocks[split, level] += found[level]
                    loading[split, level] += 1
                    seconds += latency[level] + found[level] * per_block[level]
            saved[split] += max(0.0, prefix_tokens * per_token - seconds)


# The best split of a budget among tiers.

_MOST_SPLITS = 3000
_ROUNDING = 1 + 1e-12
"""So that money for ten blocks buys ten."""


class _Worth(NamedTuple):
    """The order of splits: seconds saved first."""

    saved_seconds: float
    kept: float


@dataclass(frozen=True, slots=True)
class BestSplit:
    """The split that saves most.

    Attributes:
        capacities: blocks of each tier.
        price_per_month: of them; at most the budget.
        saved_seconds: prefill over the trace, less loading.
        prefix_blocks: of each tier.
        prefix_tokens: of each tier.
        tried: splits that were looked at.
    """

    capacities: tuple[int, ...]
    price_per_month: float
    saved_seconds: float
    prefix_blocks: tuple[int, ...]
    prefix_tokens: tuple[int, ...]
    tried: int


def best_split(
    curve: SplitCurve,
    tiers: Sequence[Tier],
    budget_per_month: float,
    *,
    block_bytes: int,
    recompute_seconds_per_token: float,
    most_splits: int = _MOST_SPLITS,
) -> BestSplit:
    """Return how to spend a monthly budget on tiers so that most seconds are saved (`SplitCurve.saved_seconds`).

    Tiers without a price get all the capacity they may have. Where there are at most `most_splits` ways to buy blocks,
    all are tried. Otherwise the budget is cut into equal parts, and every way to hand them out, or to keep some, is
    tried; from the best of these money is moved between tiers in ever smaller amounts, as long as that helps. So the
    result is the best of that grid or better, though a better split may still lie between.

    Args:
        curve: of the trace.
        tiers: the fastest first; a capacity is the most that a tier may have, 0 being no limit.
        budget_per_month: in the currency of the tiers' prices.
        block_bytes: of a block.
        recompute_seconds_per_token: 1/P.
        most_splits: that are tried before the best of them is refined, which tries some twice as many; each takes time
            that grows with the runs of the curve.

    Raises:
        OptionError: there are no tiers, or a number is out of its range.
    """
    _check(tiers, budget_per_month, block_bytes, recompute_seconds_per_token)
    search = _Search(
        curve=curve,
        tiers=tiers,
        budget=budget_per_month,
        block_bytes=block_bytes,
        recompute_seconds_per_token=recompute_seconds_per_token,
        most_splits=most_splits,
    )
    every = search.every()
    capacities, worth = search.best(every) if len(every) else search.refined()
    hits = curve.at(capacities[None])
    return BestSplit(
        capacities=tuple(capacities.tolist()),
        price_per_month=-worth.kept,
        saved_seconds=worth.saved_seconds,
        prefix_blocks=tuple(hits.prefix_blocks[0].tolist()),
        prefix_tokens=tuple(hits.prefix_tokens[0].tolist()),
        tried=search.tried,
    )


def _check(
    tiers: Sequence[Tier], budget_per_month: float, block_bytes: int, recompute_seconds_per_token: float
) -> None:
    if not tiers:
        raise OptionError("tiers: there are none to split a budget among; allowed: one or more")
    for field, value in (
        ("budget_per_month", budget_per_month),
        ("block_bytes", block_bytes),
        ("recompute_seconds_per_token", recompute_seconds_per_token),
    ):
        if not 0 <= value < 1e18:
            raise OptionError(f"{field} is {value}; allowed: 0 or more, below 1e18")


class _Search:
    """Tries splits; money that is kept is the last of the shares."""

    def __init__(
        self,
        curve: SplitCurve,
        tiers: Sequence[Tier],
        budget: float,
        block_bytes: int,
        recompute_seconds_per_token: float,
        most_splits: int,
    ) -> None:
        self._curve = curve
        self._tiers = tiers
        self._budget = budget
        self._block_bytes = block_bytes
        self._recompute_seconds_per_token = recompute_seconds_per_token
        self.block_prices = np.array([tier.price_per_gib_month * block_bytes / 2**30 for tier in tiers])
        self._limits = np.array(
            [min(tier.capacity_blocks or curve.unique_blocks, curve.unique_blocks) for tier in tiers]
        )
        self._priced = np.flatnonzero(self.block_prices)
        self._most = most_splits
        self._parts = _parts_of(len(self._priced), most_splits)
        self.tried = 0

    def every(self) -> Int64Column:
        """Return [S, T] all capacities that the budget pays; none if there are too many."""
        least, most = self._limits.copy(), self._limits.copy()
        least[self._priced] = 0
        bought = np.floor(self._budget / self.block_prices[self._priced] * _ROUNDING)
        most[self._priced] = np.minimum(most[self._priced], bought)
        if prod((most - least + 1).tolist()) > self._most:
            return np.zeros((0, len(most)), np.int64)
        ranges = [np.arange(low, high + 1) for low, high in zip(least, most, strict=True)]
        table = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(ranges))
        affordable: Int64Column = table[table @ self.block_prices <= self._budget * _ROUNDING]
        return affordable

    def refined(self) -> tuple[Int64Column, _Worth]:
        """Return capacities from which moving money between two tiers does not help any more, and their worth."""
        shares, capacities, worth = self._best_shares(self._hand_outs())
        amount = self._budget / self._parts
        least = self.block_prices[self._priced].min()
        while amount >= least and self.tried < 3 * self._most:
            moved, bought, better = self._best_shares(np.array(list(_moves(shares, amount))))
            if better > worth:
                shares, capacities, worth = moved, bought, better
            else:
                amount /= 2
        return capacities, worth

    def best(self, capacities: Int64Column) -> tuple[Int64Column, _Worth]:
        """Return the capacities among [S, T] that save most, the cheapest of several, and their worth."""
        place, worth = self._best_of(capacities)
        return capacities[place], worth

    def _best_shares(self, shares: FloatColumn) -> tuple[FloatColumn, Int64Column, _Worth]:
        blocks = np.tile(self._limits, (len(shares), 1))
        bought = np.floor(shares[:, :-1] / self.block_prices[self._priced] * _ROUNDING)
        blocks[:, self._priced] = np.minimum(bought, self._limits[self._priced]).astype(np.int64)
        place, worth = self._best_of(blocks)
        return shares[place], blocks[place], worth

    def _hand_outs(self) -> FloatColumn:
        """Return [S, P + 1] money for tiers with a price, the last being kept: each way to hand out equal parts."""
        ends = len(self._priced) + self._parts
        rows = [np.diff([-1, *bars, ends]) - 1 for bars in combinations(range(ends), len(self._priced))]
        return np.array(rows) * (self._budget / self._parts)

    def _best_of(self, capacities: Int64Column) -> tuple[int, _Worth]:
        saved = self._curve.saved_seconds(
            self._tiers,
            capacities,
            block_bytes=self._block_bytes,
            recompute_seconds_per_token=self._recompute_seconds_per_token,
        )
        self.tried += len(capacities)
        prices = capacities @ self.block_prices
        best = int(np.lexsort((prices, -saved))[0])
        return best, _Worth(float(saved[best]), -float(prices[best]))


def _parts_of(priced: int, most_splits: int) -> int:
    """Return into how many parts a budget is cut, so that there are at most so many ways to hand them out."""
    parts = 1
    while parts < 256 and comb(parts + 1 + priced, priced) <= most_splits:
        parts += 1
    return parts


def _moves(shares: FloatColumn, amount: float) -> Iterator[FloatColumn]:
    for source in range(len(shares)):
        for target in range(len(shares)):
            moved = shares.copy()
            given = min(amount, float(shares[source]))
            moved[source] -= given
            moved[target] += given
            yield moved
