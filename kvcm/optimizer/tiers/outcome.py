"""What a hierarchy of caches gave: hits, transfers and times of each level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.results import Hits
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.trace import Int32Column, Totals

__all__ = ["FloatColumn", "LoadTimes", "TierReplay", "TierSeries", "TierUse"]

FloatColumn = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TierUse:
    """One level over a whole trace.

    Attributes:
        tier: the level.
        block_bytes: of each block.
        prefix_blocks: of the matched prefixes that lay here (and in no faster level).
        prefix_tokens: the same in tokens.
        object_blocks: accesses to a block that lay here, wherever it stands in its request.
        inserted_blocks: written here because an engine had computed them.
        promoted_blocks: that went from here to faster levels because they were asked for.
        demoted_blocks: that were read here to be written to a slower level.
        dropped_blocks: that left the hierarchy from here.
        read_blocks: all that was read: prefixes, and what was demoted.
        written_blocks: all that was written: insertions, promotions from below, demotions from above.
        saturated_seconds: of the windows in which more was to be moved than the bandwidth allows.
    """

    tier: Tier
    block_bytes: int
    prefix_blocks: int
    prefix_tokens: int
    object_blocks: int
    inserted_blocks: int
    promoted_blocks: int
    demoted_blocks: int
    dropped_blocks: int
    read_blocks: int
    written_blocks: int
    saturated_seconds: float

    @property
    def read_bytes(self) -> int:
        """Return all that was read."""
        return self.read_blocks * self.block_bytes

    @property
    def written_bytes(self) -> int:
        """Return all that was written."""
        return self.written_blocks * self.block_bytes

    @property
    def price_per_month(self) -> float:
        """Return what the level's room costs."""
        return self.tier.price_per_month(self.block_bytes)


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds that loading takes the requests that load anything, without waiting for one another.

    Attributes:
        requests: that loaded.
        total, mean, median, p90, p99, longest: seconds; 0 where none loaded.
    """

    requests: int
    total: float
    mean: float
    median: float
    p90: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True, eq=False)
class TierSeries:
    """T levels over W windows of time.

    Attributes:
        window_seconds: their width.
        starts_seconds: [W] since the first request.
        hit_rate: [T, W] blocks of prefixes that lay in a level, per block read; 0 where nothing was read.
        read_bytes_per_second: [T, W].
        written_bytes_per_second: [T, W].
        utilisation: [T, W] bytes moved against the bandwidth; above 1 means that the level cannot keep up.
    """

    window_seconds: float
    starts_seconds: FloatColumn
    hit_rate: FloatColumn
    read_bytes_per_second: FloatColumn
    written_bytes_per_second: FloatColumn
    utilisation: FloatColumn


@dataclass(frozen=True, slots=True, eq=False)
class TierReplay:
    """A hierarchy replayed.

    Attributes:
        tiers: the fastest first.
        hits: of all levels together.
        totals: that they are relative to.
        load_times: of the prefixes.
        series: over time.
        request_hits: [R, T] blocks of each request's prefix, by the level they lay in.
        load_seconds: [R] it takes to load each request's prefix.
        seconds: the replay took.
        accesses: that were replayed.
    """

    tiers: tuple[TierUse, ...]
    hits: Hits
    totals: Totals
    load_times: LoadTimes
    series: TierSeries
    request_hits: Int32Column
    load_seconds: FloatColumn
    seconds: float
    accesses: int

    @property
    def block_hit_rate(self) -> float:
        """Return prefix hits of all levels per block read."""
        return self.hits.block_rate(self.totals)

    @property
    def token_hit_rate(self) -> float:
        """Return tokens of prefix hits of all levels per token of the prompts."""
        return self.hits.token_rate(self.totals)

    @property
    def price_per_month(self) -> float:
        """Return what all levels cost."""
        return sum(use.price_per_month for use in self.tiers)
