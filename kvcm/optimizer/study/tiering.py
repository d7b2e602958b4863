"""What a hierarchy of caches gives, and how to split room and money among its levels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from kvcm.optimizer.errors import OptimizerError
from kvcm.optimizer.study.options import StudyOptions
from kvcm.optimizer.tiers import (
    BestSplit,
    SplitCurve,
    SplitHits,
    Tier,
    TierReplay,
    best_split,
    block_bytes_of,
    parse_tiers,
    replay_tiers,
    split_curve,
)  # fmt: skip
from kvcm.optimizer.tiers.outcome import FloatColumn
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["DEFAULT_TIERS", "Splits", "Tiering", "tiering_of"]

DEFAULT_TIERS = "host:5%,ssd:20%,pool:25%"
_SHARES = 41
_BUDGETS = 7
_MOST_SPLITS, _MOST_COUNTED_RUNS = 3000, 200_000_000  # of a search: seconds, on a trace of any length


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """T levels that share their room and money differently.

    Attributes:
        shares: [S] of the room that the fastest level has, the others sharing the rest as they do now.
        hits: of these splits, [S, T] each.
        saved_seconds: [S] of prefill, less loading.
        budgets: per month, ascending; none where no level has a price.
        best: the best split of each.
    """

    shares: FloatColumn
    hits: SplitHits
    saved_seconds: FloatColumn
    budgets: tuple[float, ...]
    best: tuple[BestSplit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tiering:
    """A hierarchy.

    Attributes:
        replay: of the levels as they are.
        splits: of their room; None where requests read without writing, of which one pass does not tell it.
    """

    replay: TierReplay
    splits: Splits | None


def tiering_of(trace: Trace, options: StudyOptions) -> Tiering:
    """Replay the hierarchy that is asked for.

    Raises:
        OptionError: a tier is none.
        TraceError: requests read otherwise than a prefix.
    """
    tiers = parse_tiers(options.tiers or DEFAULT_TIERS, trace.unique_blocks)
    kv_bytes = max(1, round(options.deployment.kv_bytes_per_token))
    found = replay_tiers(trace, tiers, kv_bytes_per_token=kv_bytes)
    try:
        curve = split_curve(trace)
    except OptimizerError:
        return Tiering(found, None)
    per_token = 1 / options.deployment.prefill_tokens_per_second
    return Tiering(found, _splits(trace, curve, tiers, block_bytes_of(trace, kv_bytes), per_token, options.workers))


def _splits(
    trace: Trace,
    curve: SplitCurve,
    tiers: tuple[Tier, ...],
    block_bytes: int,
    per_token: float,
    workers: int | None,
) -> Splits:
    shares = np.linspace(0, 1, _SHARES)
    rooms = _rooms(tiers, shares)
    saved = curve.saved_seconds(tiers, rooms, block_bytes=block_bytes, recompute_seconds_per_token=per_token)
    budgets = _budgets(trace, tiers, block_bytes)
    with ThreadPoolExecutor(workers) as pool:
        best = tuple(pool.map(lambda budget: _best(curve, tiers, budget, block_bytes, per_token), budgets))
    return Splits(shares, curve.at(rooms), saved, budgets, best)


def _rooms(tiers: tuple[Tier, ...], shares: FloatColumn) -> Int64Column:
    total = sum(tier.capacity_blocks for tier in tiers)
    slower = np.array([tier.capacity_blocks for tier in tiers[1:]], np.float64)
    first = np.floor(shares * total)
    if not slower.sum():
        return first[:, None].astype(np.int64)
    rest = np.floor((total - first)[:, None] * (slower / slower.sum()))
    return np.column_stack([first, rest]).astype(np.int64)


def _budgets(trace: Trace, tiers: tuple[Tier, ...], block_bytes: int) -> tuple[float, ...]:
    """Return budgets up to what it costs to hold everything in the dearest level."""
    dearest = max(replace(tier, capacity_blocks=trace.unique_blocks).price_per_month(block_bytes) for tier in tiers)
    return tuple(np.geomspace(dearest / 4 ** (_BUDGETS - 1), dearest, _BUDGETS).tolist()) if dearest else ()


def _best(curve: SplitCurve, tiers: tuple[Tier, ...], budget: float, block_bytes: int, per_token: float) -> BestSplit:
    # Without capacities of their own levels may have as much as the budget pays for; free ones stay as they are.
    open_ended = [replace(tier, capacity_blocks=0) if tier.price_per_gib_month else tier for tier in tiers]
    most = max(30, min(_MOST_SPLITS, _MOST_COUNTED_RUNS // max(1, len(curve.runs.counts))))
    return best_split(
        curve, open_ended, budget, block_bytes=block_bytes, recompute_seconds_per_token=per_token, most_splits=most
    )
