"""Hierarchies of caches: what each level holds, serves, moves and costs."""

from __future__ import annotations

from kvcm.optimizer.tiers.replaying import KV_BYTES_PER_TOKEN, block_bytes_of, replay_tiers
from kvcm.optimizer.tiers.splits import BestSplit, SplitCurve, SplitHits, best_split, split_curve
from kvcm.optimizer.tiers.tier import ASSUMED_TIERS, LoadTimes, Tier, TierReplay, TierSeries, TierUse, parse_tiers

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
