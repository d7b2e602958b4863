"""The replay of an exclusive hierarchy, compiled: a block lies in one level at most.

Every level is a ring of blocks from the oldest to the newest that begins and ends at node U + t; a block is in one ring
at most, so all rings share two arrays. The kernel is one long function: split up, its parts hand a dozen arrays to one
another for every block, each with atomic counts of references, and the replay takes fifteen times as long.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.tiers.moving import ARRIVED, DEMOTED, DROPPED, HITS, INSERTED, OBJECTS, PROMOTED, TOKENS, Moves
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
    moves: Moves,
    moved: Int32Column,
    sums: Int64Column,
) -> int:
    """Replay R requests through T levels, of which none is empty, and return how many found every block.

    Args:
        blocks, offsets, read_blocks, writes, input_tokens: of the trace.
        block_tokens: [R] tokens per block of each request.
        capacities: [T].
        unique_blocks: U.
        moves: how blocks move.
        moved: [len(MOVED), R, T] counted here.
        sums: [len(SUMS), T] counted here.
    """
    levels = capacities.size
    older, newer = np.empty(unique_blocks + levels, np.int32), np.empty(unique_blocks + levels, np.int32)
    for level in range(levels):
        older[unique_blocks + level] = newer[unique_blocks + level] = unique_blocks + level
    level_of = np.full(unique_blocks, levels, np.int8)
    seen = np.zeros(unique_blocks, np.int8)
    sizes = np.zeros(levels, np.int64)
    full = 0
    for request in range(writes.size):
        begin, count = offsets[request], offsets[request + 1] - offsets[request]
        reads, size, prompt = read_blocks[request], block_tokens[request], input_tokens[request]
        prefix, is_prefix = 0, True
        looks = count if writes[request] else reads
        # With tail_first every block is looked at, and then those that were found are touched from the last to the
        # first; otherwise each is touched right after the look.
        for step in range(looks + count if moves.tail_first else looks):
            place = step
            if step < looks:
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
                if moves.tail_first or not (writes[request] or is_prefix):
                    continue
            else:
                place = looks + count - 1 - step
                if not (writes[request] or place < prefix):
                    continue
                block = blocks[begin + place]
                level = level_of[block]
            if level < levels:
                seen[block] += level > 0 and moves.promote_at <= 2
                stays = level == 0 or seen[block] < moves.promote_at
                if stays and not moves.touches:
                    continue
                before, after = older[block], newer[block]
                newer[before] = after
                older[after] = before
                if stays:
                    end = unique_blocks + level
                    before = older[end]
                    older[block], newer[block] = before, end
                    newer[before] = older[end] = block
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
                seen[block] = 0
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
