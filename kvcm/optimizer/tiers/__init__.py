"""Hierarchies of caches: what each level holds, serves, moves and costs."""

from __future__ import annotations

from kvcm.optimizer.tiers.budgets import BestSplit, best_split
from kvcm.optimizer.tiers.outcome import LoadTimes, TierReplay, TierSeries, TierUse
from kvcm.optimizer.tiers.replaying import KV_BYTES_PER_TOKEN, block_bytes_of, replay_tiers
from kvcm.optimizer.tiers.splits import SplitCurve, SplitHits, split_curve
from kvcm.optimizer.tiers.tier import ASSUMED_TIERS, Tier, parse_tiers

__all__ = [
    "ASSUMED_TIERS",
    "KV_BYTES_PER_TOKEN",
    "BestSplit",
    "LoadTimes",
    "SplitCurve",
    "SplitHits",
    "Tier",
    "TierReplay",
    "TierSeries",
    "TierUse",
    "best_split",
    "block_bytes_of",
    "parse_tiers",
    "replay_tiers",
    "split_curve",
]
