"""What a replay of groups counts."""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import Int32Column, Int64Column, Totals

__all__ = ["GroupReplay", "InstanceReplay"]


@dataclass(frozen=True, slots=True, eq=False)
class InstanceReplay:
    """One instance.

    Attributes:
        instance: its name.
        group: its group's.
        hits: of blocks that it asked for (external). `prefix_blocks` are the blocks of the answers, whatever the mode
            of the query; `prefix_tokens` what the engine need not compute: up to the end of the answered prefix or
            window, or the answered blocks of a batch, and never more than the prompt has.
        internal_blocks: blocks that the engine had itself, and therefore masked, up to the first miss.
        totals: that they are relative to.
        written_blocks: that were not there before.
        refused_blocks: that found no room: the quota does not hold even one.
        evicted_blocks: for want of room, or for their age.
        blocks: resident at the end.
        used: of the quota at the end, in its unit.
    """

    instance: str
    group: str
    hits: Hits
    internal_blocks: int
    totals: Totals
    written_blocks: int
    refused_blocks: int
    evicted_blocks: int
    blocks: int
    used: int

    @property
    def block_hit_rate(self) -> float:
        """Return hits per block read, both kinds."""
        return (self.hits.prefix_blocks + self.internal_blocks) / max(1, self.totals.blocks)

    @property
    def token_hit_rate(self) -> float:
        """Return tokens that need not be computed per token of the prompts."""
        return self.hits.prefix_tokens / max(1, self.totals.tokens)

    def row(self) -> dict[str, str | int | float]:
        """Return what `--json` writes."""
        return {
            "instance": self.instance,
            "group": self.group,
            "external_hit_blocks": self.hits.prefix_blocks,
            "internal_hit_blocks": self.internal_blocks,
            "prefix_hit_tokens": self.hits.prefix_tokens,
            "object_hit_blocks": self.hits.object_blocks,
            "full_hit_requests": self.hits.full_requests,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "written_blocks": self.written_blocks,
            "refused_blocks": self.refused_blocks,
            "evicted_blocks": self.evicted_blocks,
            "blocks": self.blocks,
            "used": self.used,
        }


@dataclass(frozen=True, slots=True, eq=False)
class GroupReplay:
    """All instances.

    Attributes:
        instances: in the order of the layout; I of them.
        unknown_instances: of the trace that the layout does not have; their requests were left out.
        times_us: [S] when usage was looked at, after a request.
        used: [S, I] of the quota, in the unit of each instance's group.
        evicted: [S, I] blocks since the beginning.
        seconds: the replay took, without loading.
        accesses: block accesses that were replayed.
        request_hits: [R] blocks of the answer to each request, internal ones included; -1 where nothing was read.
            None unless asked for.
    """

    instances: tuple[InstanceReplay, ...]
    unknown_instances: tuple[str, ...]
    times_us: Int64Column
    used: Int64Column
    evicted: Int64Column
    seconds: float
    accesses: int
    request_hits: Int32Column | None = None

    def of(self, instance: str) -> InstanceReplay:
        """Return one instance.

        Raises:
            KeyError: there is none of this name.
        """
        for each in self.instances:
            if each.instance == instance:
                return each
        raise KeyError(instance)

    @property
    def hits(self) -> Hits:
        """Return the sums over all instances."""
        all_hits = [each.hits for each in self.instances]
        return Hits(
            sum(hits.prefix_blocks for hits in all_hits),
            sum(hits.prefix_tokens for hits in all_hits),
            sum(hits.object_blocks for hits in all_hits),
            sum(hits.full_requests for hits in all_hits),
        )

    @property
    def mean_used(self) -> float:
        """Return the mean usage of all instances together, over the looks; of one unit only if all groups have it."""
        return float(self.used.sum(axis=1).mean()) if len(self.used) else 0.0
