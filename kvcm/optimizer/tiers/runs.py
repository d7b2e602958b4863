"""Stack distances of what may be part of a prefix, by runs.

What one request touched in a row mostly comes again in a row, with one distance. Such runs are fewer than accesses by
one or two orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.recency import lru_depths
from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["Runs", "runs_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """K runs, by request and place.

    Attributes:
        requests: [K] whose blocks they are.
        counts: [K] blocks.
        distances: [K] stack distance of each block.
        furthest: [K] the largest distance in the request up to those blocks.
        block_tokens: [K] tokens of the prompt in each block.
        misses: [U + 1] accesses that do not find their block in the newest so many, whether they read or write.
    """

    requests: Int64Column
    counts: Int64Column
    distances: Int64Column
    furthest: Int64Column
    block_tokens: Int64Column
    misses: Int64Column

    def __len__(self) -> int:
        return len(self.requests)


def runs_of(trace: Trace) -> Runs:
    """Return the runs of a trace; one pass.

    Raises:
        TraceError: requests read otherwise than a prefix or do not write what they read, so that what they touch
            depends on the capacity.
    """
    if not (trace.is_plain and trace.writes.all()):
        raise TraceError(f"{trace.name}: has requests that do not read and write plain prefixes; splits need only such")
    depths = lru_depths(trace.blocks, trace.unique_blocks)
    table = np.empty((trace.accesses, 5), np.int64)
    rows = _runs(depths, trace.offsets, trace.read_blocks, trace.input_tokens, trace.tokens_per_block(), table)
    requests, counts, distances, furthest, tokens = table[:rows].T.copy()
    return Runs(requests, counts, distances, furthest, tokens, _misses(depths, trace.unique_blocks))


def _misses(depths: Int32Column, unique_blocks: int) -> Int64Column:
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
            # What has the same distance is no further than the furthest so far.
            if rows > first and depth == table[rows - 1, 2] and tokens == table[rows - 1, 4]:
                table[rows - 1, 1] += 1
                continue
            table[rows, 0], table[rows, 1], table[rows, 2] = request, 1, depth
            table[rows, 3], table[rows, 4] = furthest, tokens
            rows += 1
    return rows
