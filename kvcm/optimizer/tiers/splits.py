"""Every split of room among the levels of an exclusive LRU hierarchy, from one pass over the trace.

All levels together are one stack (identity 5 of optimizer.md), so the level in which a request finds a block follows
from the block's stack distance d: the first level whose room, together with that of all faster ones, is at least d. The
block is part of the prefix if no block before it has a distance above the room of all levels. So any split is counted
exactly from the runs of distances, in no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.tiers.outcome import FloatColumn
from kvcm.optimizer.tiers.runs import Runs, runs_of
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["SplitCurve", "SplitHits", "split_curve"]

Table = Sequence[Sequence[int]] | Int64Column


@dataclass(frozen=True, slots=True, eq=False)
class SplitHits:
    """What S splits among T levels give, [S, T] each.

    Attributes:
        prefix_blocks: blocks of prefixes that lie in a level.
        prefix_tokens: the same in tokens.
        loading_requests: that find any of their prefix in a level.
        read_blocks: of prefixes, and of what is demoted.
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
        unique_blocks: U; more room is of no use.
    """

    runs: Runs
    unique_blocks: int

    def at(self, capacities: Table) -> SplitHits:
        """Return exactly what replays at [S, T] capacities, the fastest level first, would count.

        Raises:
            OptionError: they are no table of numbers from 0 on.
        """
        room = _rooms(capacities)
        nothing = np.zeros(room.shape[1])
        return self._measure(room, nothing, nothing, 0.0)[0]

    def saved_seconds(
        self,
        tiers: Sequence[Tier],
        capacities: Table,
        *,
        block_bytes: int,
        recompute_seconds_per_token: float,
    ) -> FloatColumn:
        """Return [S] seconds of prefill that T tiers of [S, T] capacities save, less those of loading.

        A request whose prefix takes longer to load than to compute computes it. Nobody waits for anybody: whether the
        bandwidth suffices for all requests together, a replay of the split says (`TierReplay.series`).

        Args:
            tiers: that give latency and bandwidth; their own capacities do not matter.
            capacities: in blocks, the fastest level first.
            block_bytes: of a block.
            recompute_seconds_per_token: 1/P.

        Raises:
            OptionError: capacities are no table of numbers from 0 on, one for each tier.
        """
        room = _rooms(capacities)
        if room.shape[1] != len(tiers):
            raise OptionError(
                f"capacities: rows have {room.shape[1]} numbers; allowed: {len(tiers)}, one for each tier"
            )
        latency = np.array([tier.latency_seconds for tier in tiers])
        per_block = np.array([block_bytes / tier.bandwidth_bytes_per_second for tier in tiers])
        return self._measure(room, latency, per_block, recompute_seconds_per_token)[1]

    def _measure(
        self, room: Int64Column, latency: FloatColumn, per_block: FloatColumn, per_token: float
    ) -> tuple[SplitHits, FloatColumn]:
        blocks, tokens, loading = (np.zeros(room.shape, np.int64) for _ in range(3))
        saved, cuts = np.zeros(len(room)), np.cumsum(room, axis=1)
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
        demoted, written = self._moved(room, cuts)
        return SplitHits(blocks, tokens, loading, blocks + demoted, written), saved

    def _moved(self, room: Int64Column, cuts: Int64Column) -> tuple[Int64Column, Int64Column]:
        """Return [S, T] blocks demoted from a level, and blocks written to it."""
        held = np.minimum(cuts, self.unique_blocks)
        missed = self.runs.misses[held]
        # What came to a level and all faster ones, and is not there in the end, has gone down.
        gone = missed - held
        from_above = np.concatenate([np.zeros_like(gone[:, :1]), gone[:, :-1]], axis=1)
        written = np.where(room == 0, 0, np.where(cuts == room, missed, from_above))
        demoted = np.where((room == 0) | (cuts == cuts[:, -1:]), 0, gone)
        return demoted, written


def split_curve(trace: Trace) -> SplitCurve:
    """Return what any split of an exclusive hierarchy gives; one pass.

    Raises:
        TraceError: as `runs_of` says.
    """
    return SplitCurve(runs_of(trace), trace.unique_blocks)


def _rooms(capacities: Table) -> Int64Column:
    try:
        room = np.array(capacities, np.int64)
    except (TypeError, ValueError, OverflowError):
        room = np.zeros(0, np.int64)
    if room.ndim != 2 or not room.shape[1] or (room < 0).any() or (room >= 1 << 31).any():
        raise OptionError("capacities: are no rows of equally many numbers; allowed: numbers from 0 to 2^31 - 1")
    return room


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
    """Count S splits; `cuts` are [S, T] the room of a level and all faster ones."""
    levels = cuts.shape[1]
    found = np.zeros(levels, np.int64)
    for split in range(len(cuts)):
        room = cuts[split, levels - 1]
        run = 0
        while run < requests.size:
            request, prefix_tokens = requests[run], 0
            found[:] = 0
            while run < requests.size and requests[run] == request:
                if furthest[run] <= room:
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
