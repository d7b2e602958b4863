"""What the wave buffer counts, on the host: its control knows everything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_tier.manager.wave_control import Change, Stat

__all__ = ["WaveCounters", "WaveTotals"]


@dataclass(frozen=True, slots=True)
class WaveCounters:
    """What happened so far, over all layers, rows and heads.

    Attributes:
        clusters: selected clusters that are not empty.
        cluster_hits: those that were cached.
        blocks: their blocks.
        block_hits: those that were cached.
        tokens: their tokens.
        token_hits: those that were cached.
        host_bytes: bytes read from host memory, exactly.
        admissions: clusters taken into the cache.
        evictions: clusters given up.
    """

    clusters: int
    cluster_hits: int
    blocks: int
    block_hits: int
    tokens: int
    token_hits: int
    host_bytes: int
    admissions: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Cached tokens per selected token; 1 when nothing was selected."""
        return self.token_hits / self.tokens if self.tokens else 1.0


class WaveTotals:
    """Adds up what lookups and updates say of their lines.

    Args:
        token_bytes: bytes of a token of one head, all parts.
    """

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._looked_up = np.zeros(len(Stat), np.int64)
        self._changed = np.zeros(len(Change), np.int64)

    def count_lookup(self, stats: npt.NDArray[np.int64]) -> None:
        """Add a lookup, ``int64 [B·H, Stat]``."""
        self._looked_up += stats.sum(0)

    def count_update(self, counts: npt.NDArray[np.int64]) -> None:
        """Add an update, ``int64 [B·H, Change]``."""
        self._changed += counts.sum(0)

    def read(self) -> WaveCounters:
        """Return what was added."""
        clusters, cluster_hits, blocks, block_hits, tokens, token_hits = (
            int(number) for number in self._looked_up[Stat.CLUSTERS : Stat.BAD]
        )
        return WaveCounters(
            clusters, cluster_hits, blocks, block_hits, tokens, token_hits, (tokens - token_hits) * self._token_bytes,
            int(self._changed[Change.ADMISSIONS]), int(self._changed[Change.EVICTIONS]),
        )  # fmt: skip
