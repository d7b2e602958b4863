"""What N engines with caches of their own gave, against one pool that they share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvcm.optimizer.pooling.router import Router
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import Int64Column, Totals

__all__ = ["PoolingRow", "PoolingStudy", "Topology"]


class Topology(StrEnum):
    """Where blocks are kept."""

    LOCAL = "local"
    POOL = "pool"
    BOTH = "local+pool"


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRow:
    """One router over one topology; E engines.

    Attributes:
        router: that spread the requests.
        topology: where blocks are kept.
        local_blocks: capacity of each engine's own cache, 0 if it has none.
        pool_blocks: capacity of the pool, 0 if there is none.
        hits: of local caches and pool together.
        local_hit_blocks: prefix hits in the engine's own cache.
        pool_hit_blocks: prefix hits that only the pool had.
        local_hit_tokens, pool_hit_tokens: the same in tokens.
        totals: that hits are relative to.
        routed_requests: [E] requests of each engine that read.
        routed_tokens: [E] tokens of their prompts.
        prefill_tokens: [E] of them, those that had to be computed.
        migrations: requests that went elsewhere because their engine was overloaded.
        mean_wait_seconds: outstanding prefill of the chosen engine at the arrival of a request.
        longest_wait_seconds: the longest of these.
        mean_duplicate_blocks: copies of a block in local caches besides the first, on average over the requests.
        most_duplicate_blocks: the largest number of them.
        block_bytes: of each block.
        seconds: the replay took.
        accesses: that were replayed.
    """

    router: Router
    topology: Topology
    local_blocks: int
    pool_blocks: int
    hits: Hits
    local_hit_blocks: int
    pool_hit_blocks: int
    local_hit_tokens: int
    pool_hit_tokens: int
    totals: Totals
    routed_requests: Int64Column
    routed_tokens: Int64Column
    prefill_tokens: Int64Column
    migrations: int
    mean_wait_seconds: float
    longest_wait_seconds: float
    mean_duplicate_blocks: float
    most_duplicate_blocks: int
    block_bytes: int
    seconds: float
    accesses: int

    @property
    def block_hit_rate(self) -> float:
        """Return prefix hits per block read."""
        return self.hits.block_rate(self.totals)

    @property
    def token_hit_rate(self) -> float:
        """Return tokens of prefix hits per token of the prompts."""
        return self.hits.token_rate(self.totals)

    @property
    def imbalance(self) -> float:
        """Return the tokens computed by the busiest engine per token computed by the average one, 1 being even."""
        total = int(self.prefill_tokens.sum())
        return float(self.prefill_tokens.max()) * len(self.prefill_tokens) / total if total else 1.0

    @property
    def mean_duplicate_bytes(self) -> float:
        """Return the room that copies of a block besides the first take up."""
        return self.mean_duplicate_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PoolingStudy:
    """Every router over every topology.

    Attributes:
        engines: E.
        rows: in the order in which routers and topologies were asked for.
    """

    engines: int
    rows: tuple[PoolingRow, ...]
