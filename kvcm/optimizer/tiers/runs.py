"""Stack distances of what may be part of a prefix, by runs.

What one request touched in a row mostly comes again in a row, with one distance (lru) or with distances that grow by
one (leaf_lru). Such runs are fewer than accesses by one or two orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.recency import leaf_lru_depths, lru_depths
from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["Runs", "StackPolicy", "runs_of"]

StackPolicy = Literal["lru", "leaf_lru"]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """K runs, by request and place.

    Attributes:
        requests: [K] whose blocks they are.
        counts: [K] blocks.
        distances: [K] stack distance of the first block.
        furthest: [K] the largest distance in the request up to that block.
        block_tokens: [K] tokens of the prompt in each block.
        step: by how much `distances` and `furthest` grow from block to block: 0 for lru, 1 for leaf_lru.
        misses: [U + 1] accesses that do not find their block in the newest so many, whether they read or write.
    """

    requests: Int64Column
    counts: Int64Column
    distances: Int64Column
    furthest: Int64Column
    block_tokens: Int64Column
    step: int
    misses: Int64Column

    def __len__(self) -> int:
        return len(self.requests)


def runs_of(trace: Trace, policy: StackPolicy) -> Runs:
    """Return the runs of a trace; one pass.

    Raises:
        OptionError: the policy keeps no stack.
        TraceError: requests read otherwise than a prefix or do not write what they read, so that what they touch
            depends on the capacity; or (leaf_lru) blocks are no prefix tree.
    """
    if policy not in get_args(StackPolicy):
        raise OptionError(f"tiers: policy is {policy!r}; allowed for splits: {', '.join(get_args(StackPolicy))}")
    if not (trace.is_plain and trace.writes.all()):
        raise TraceError(f"{trace.name}: has requests that do not read and write plain prefixes; splits need only such")
    if policy == "leaf_lru" and not trace.has_one_parent:
        raise TraceError(f"{trace.name}: has blocks that follow several others; splits of leaf_lru need a prefix tree")
    step = 1 if policy == "leaf_lru" else 0
    if step:
        depths = leaf_lru_depths(trace.blocks, trace.offsets, trace.unique_blocks)
    else:
        depths = lru_depths(trace.blocks, trace.unique_blocks)
    table = np.empty((trace.accesses, 5), np.int64)
    rows = _runs(depths, trace.offsets, trace.read_blocks, trace.input_tokens, trace.tokens_per_block(), step, table)
    requests, counts, distances, furthest, tokens = table[:rows].T.copy()
    misses = _misses(depths, trace.offsets, step, trace.unique_blocks)
    return Runs(requests, counts, distances, furthest, tokens, step, misses)


def _misses(depths: Int32Column, offsets: Int64Column, step: int, unique_blocks: int) -> Int64Column:
    if step:
        # Touched from the last to the first, a block that was found comes after the older ones that follow it.
        ends = np.repeat(offsets[1:], np.diff(offsets))
        depths = np.where(depths > 0, depths + (ends - 1 - np.arange(len(depths))), 0).astype(np.int32)
    found = np.bincount(depths, minlength=unique_blocks + 1)[: unique_blocks + 1]
    found[0] = 0
    misses: Int64Column = len(depths) - np.cumsum(found)
    return misses


@compiled
def _runs(
    depths: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    input_tokens: Int64Column,
    block_tokens: Int64Column,
    step: int,
    table: Int64Column,
) -> int:
    """Fill rows of (request, count, distance, furthest, tokens per block) and return how many there are."""
    rows = 0
    for request in range(read_blocks.size):
        size, prompt = block_tokens[request], input_tokens[request]
        first, furthest = rows, 0
        for place in range(read_blocks[request]):
            depth = depths[offsets[request] + place]
            if depth == 0:
                break
            furthest = max(furthest, depth)
            tokens = min((place + 1) * size, prompt) - min(place * size, prompt)
            # What continues the distances continues the furthest ones: it is no further than those (lru), or the
            # furthest itself (leaf_lru, where children are older than their parents).
            if (
                rows > first
                and depth == table[rows - 1, 2] + table[rows - 1, 1] * step
                and tokens == table[rows - 1, 4]
            ):
                table[rows - 1, 1] += 1
                continue
            table[rows, 0], table[rows, 1], table[rows, 2] = request, 1, depth
            table[rows, 3], table[rows, 4] = furthest, tokens
            rows += 1
    return rows
