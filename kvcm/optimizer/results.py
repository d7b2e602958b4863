"""What a replay counts (optimizer.md, Counting), at one capacity or at every one."""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.optimizer.trace import Int32Column, Int64Column, Totals

__all__ = ["Curve", "Hits", "Replay"]


@dataclass(frozen=True, slots=True)
class Hits:
    """Sums over the requests of a trace.

    Attributes:
        prefix_blocks: leading resident blocks.
        prefix_tokens: the same in tokens, no more than the prompt has.
        object_blocks: accesses to a resident block, wherever it stands.
        full_requests: requests of which every block was there.
    """

    prefix_blocks: int
    prefix_tokens: int
    object_blocks: int
    full_requests: int

    def block_rate(self, totals: Totals) -> float:
        """Return prefix hits per block read."""
        return self.prefix_blocks / max(1, totals.blocks)

    def token_rate(self, totals: Totals) -> float:
        """Return tokens of prefix hits per token of the prompts."""
        return self.prefix_tokens / max(1, totals.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One policy at one capacity.

    Attributes:
        policy: label of its `PolicySpec`.
        capacity_blocks: of the cache.
        hits: that were counted.
        totals: that they are relative to.
        seconds: the replay took, without loading.
        accesses: block accesses that were replayed.
        request_hits: [R] leading resident blocks of each request; None unless asked for.
        request_resident: [R] blocks resident after each request; None unless asked for.
    """

    policy: str
    capacity_blocks: int
    hits: Hits
    totals: Totals
    seconds: float
    accesses: int
    request_hits: Int32Column | None = None
    request_resident: Int32Column | None = None

    @property
    def block_hit_rate(self) -> float:
        """Return prefix hits per block read."""
        return self.hits.block_rate(self.totals)

    @property
    def token_hit_rate(self) -> float:
        """Return tokens of prefix hits per token of the prompts."""
        return self.hits.token_rate(self.totals)

    def row(self) -> dict[str, str | int | float]:
        """Return what `--json` writes."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "prefix_hit_blocks": self.hits.prefix_blocks,
            "prefix_hit_tokens": self.hits.prefix_tokens,
            "object_hit_blocks": self.hits.object_blocks,
            "full_hit_requests": self.hits.full_requests,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "accesses_per_second": self.accesses / self.seconds if self.seconds else 0.0,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One policy at every capacity from 0 to U blocks, in mode block.

    Attributes:
        policy: its label.
        prefix_blocks, prefix_tokens, object_blocks, full_requests: [U + 1] `Hits` at each capacity.
        totals: that they are relative to.
        seconds: the pass took, without loading.
        accesses: block accesses that were replayed.
    """

    policy: str
    prefix_blocks: Int64Column
    prefix_tokens: Int64Column
    object_blocks: Int64Column
    full_requests: Int64Column
    totals: Totals
    seconds: float
    accesses: int

    def at(self, capacity_blocks: int) -> Replay:
        """Return what a replay at this capacity would count; more than U blocks give no more."""
        place = min(capacity_blocks, len(self.prefix_blocks) - 1)
        hits = Hits(
            int(self.prefix_blocks[place]),
            int(self.prefix_tokens[place]),
            int(self.object_blocks[place]),
            int(self.full_requests[place]),
        )
        return Replay(
            policy=self.policy,
            capacity_blocks=capacity_blocks,
            hits=hits,
            totals=self.totals,
            seconds=self.seconds,
            accesses=self.accesses,
        )
