"""The best split of a budget among tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, prod
from typing import NamedTuple

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.tiers.outcome import FloatColumn
from kvcm.optimizer.tiers.splits import SplitCurve
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.trace import Int64Column

__all__ = ["BestSplit", "best_split"]

_MOST_SPLITS = 3000

_ROUNDING = 1 + 1e-12
"""So that money for ten blocks buys ten."""


class _Worth(NamedTuple):
    """What is compared: seconds saved first."""

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

    Tiers without a price get all the room they may have. Where there are at most `most_splits` ways to buy blocks, all
    are tried. Otherwise the budget is cut into equal parts, and every way to hand them out, or to keep some, is tried;
    from the best of these money is moved between tiers in ever smaller amounts, as long as that helps. So the result is
    the best of that grid or better, though a better split may still lie between.

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
    search = _Search(curve, tiers, budget_per_month, block_bytes, recompute_seconds_per_token, most_splits)
    every = search.every()
    capacities, worth = search.best(every) if len(every) else search.refined()
    hits = curve.at(capacities[None])
    return BestSplit(
        tuple(capacities.tolist()),
        -worth.kept,
        worth.saved_seconds,
        tuple(hits.prefix_blocks[0].tolist()),
        tuple(hits.prefix_tokens[0].tolist()),
        search.tried,
    )


def _check(
    tiers: Sequence[Tier],
    budget_per_month: float,
    block_bytes: int,
    recompute_seconds_per_token: float,
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
    for giver in range(len(shares)):
        for taker in range(len(shares)):
            moved = shares.copy()
            given = min(amount, float(shares[giver]))
            moved[giver] -= given
            moved[taker] += given
            yield moved
