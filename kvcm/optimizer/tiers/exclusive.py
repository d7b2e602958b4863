"""The replay of an exclusive LRU hierarchy, compiled: a block lies in one level at most.

A new block, and one that is hit in a lower level, goes to the fastest level; what a level evicts moves to the next one.

Every level is a ring of blocks from the oldest to the newest that begins and ends at node U + t; a block is in one ring
at most, so all rings share two arrays. The kernel is one long function: split up, its parts hand a dozen arrays to one
another for every block, each with atomic counts of references, and the replay takes fifteen times as long.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.tiers.moving import ARRIVED, DEMOTED, DROPPED, HITS, INSERTED, OBJECTS, PROMOTED, TOKENS
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column

__all__ = ["replay_exclusive"]


@compiled
def replay_exclusive(  # noqa: C901 - one loop over all blocks, see above
    blocks: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    writes: BoolColumn,
    input_tokens: Int64Column,
    block_tokens: Int64Column,
    capacities: Int64Column,
    unique_blocks: int,
    moved: Int32Column,
    sums: Int64Column,
) -> int:
    """Replay R requests through T levels, of which none is empty, and return how many found every block.

    Args:
        blocks, offsets, read_blocks, writes, input_tokens: of the trace.
        block_tokens: [R] tokens per block of each request.
        capacities: [T].
        unique_blocks: U.
        moved: [len(MOVED), R, T] counted here.
        sums: [len(SUMS), T] counted here.
    """
    levels = capacities.size
    older, newer = np.empty(unique_blocks + levels, np.int32), np.empty(unique_blocks + levels, np.int32)
    for level in range(levels):
        older[unique_blocks + level] = newer[unique_blocks + level] = unique_blocks + level
    level_of = np.full(unique_blocks, levels, np.int8)
    sizes = np.zeros(levels, np.int64)
    full = 0
    for request in range(writes.size):
        begin, count = offsets[request], offsets[request + 1] - offsets[request]
        reads, size, prompt = read_blocks[request], block_tokens[request], input_tokens[request]
        prefix, is_prefix = 0, True
        for place in range(count if writes[request] else reads):
            block = blocks[begin + place]
            level = level_of[block]
            if place < reads:
                is_prefix &= level < levels
                if level < levels:
                    sums[OBJECTS, level] += 1
                if is_prefix:
                    prefix += 1
                    moved[HITS, request, level] += 1
                    sums[TOKENS, level] += min((place + 1) * size, prompt) - min(place * size, prompt)
            if not (writes[request] or is_prefix):
                continue
            if level < levels:
                before, after = older[block], newer[block]
                newer[before] = after
                older[after] = before
                if level == 0:
                    before = older[unique_blocks]
                    older[block], newer[block] = before, unique_blocks
                    newer[before] = older[unique_blocks] = block
                    continue
                sizes[level] -= 1
                sums[PROMOTED, level] += 1
            else:
                sums[INSERTED, 0] += 1
            level = 0
            while block >= 0:
                end, victim = unique_blocks + level, -1
                if sizes[level] == capacities[level]:
                    victim = newer[end]
                    after = newer[victim]
                    newer[end] = after
                    older[after] = end
                else:
                    sizes[level] += 1
                before = older[end]
                older[block], newer[block] = before, end
                newer[before] = older[end] = block
                level_of[block] = level
                moved[ARRIVED, request, level] += 1
                if victim >= 0 and level + 1 == levels:
                    level_of[victim] = levels
                    sums[DROPPED, level] += 1
                    victim = -1
                elif victim >= 0:
                    moved[DEMOTED, request, level] += 1
                block, level = victim, level + 1
        full += reads > 0 and prefix == reads
    return full
