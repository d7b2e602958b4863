"""Runs the kernel over the levels that are there, and returns its counts by level and request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.tiers.exclusive import replay_exclusive
from kvcm.optimizer.tiers.moving import MOVED, SUMS
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["Counted", "count"]

_Number = TypeVar("_Number", np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What moved where; R requests, T levels.

    Attributes:
        hits: [R, T] blocks of prefixes.
        arrived: [R, T] blocks written.
        demoted: [R, T] blocks read to be written to a lower level.
        sums: [T] each, by the names of `SUMS`.
        full_requests: of which every block was there.
        seconds: the replay took.
    """

    hits: Int32Column
    arrived: Int32Column
    demoted: Int32Column
    sums: dict[str, Int64Column]
    full_requests: int
    seconds: float


def count(trace: Trace, tiers: Sequence[Tier]) -> Counted:
    """Replay a plain trace."""
    real = [level for level, tier in enumerate(tiers) if tier.capacity_blocks]
    moved = np.zeros((len(MOVED), len(trace), len(real)), np.int32)
    sums = np.zeros((len(SUMS), len(real)), np.int64)
    started = time.perf_counter()
    full = 0
    if real:
        full = replay_exclusive(
            trace.blocks,
            trace.offsets,
            trace.read_blocks,
            trace.writes,
            trace.input_tokens,
            trace.tokens_per_block(),
            np.array([tiers[level].capacity_blocks for level in real], np.int64),
            trace.unique_blocks,
            moved,
            sums,
        )
    seconds = time.perf_counter() - started
    hits, arrived, demoted = (_spread(layer, real, len(tiers)) for layer in moved)
    by_level = _spread(sums, real, len(tiers))
    return Counted(hits, arrived, demoted, dict(zip(SUMS, by_level, strict=True)), full, seconds)


def _spread(counts: npt.NDArray[_Number], real: list[int], tiers: int) -> npt.NDArray[_Number]:
    """Return counts of the levels that are there as counts of all, with nothing for the others."""
    if len(real) == tiers:
        return counts
    spread = np.zeros((len(counts), tiers), counts.dtype)
    spread[:, real] = counts
    return spread
