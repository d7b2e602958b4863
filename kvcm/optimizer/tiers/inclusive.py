"""The replay of an inclusive hierarchy, compiled: a block in a level has a place in the levels below, as a rule.

Every level is a ring of blocks from the oldest to the newest, a row of `older` and `newer` that begins and ends at U.
Bit t of `present[b]` says whether block b is in level t, bit t of `written[b]` whether its bytes are there: with
write-back a place is reserved first. The kernel is one long function for the reason given in exclusive.py.

Invariants:

* A block is written in the fastest level that holds it.
* With back-invalidation all bits of `present` from the lowest set one on are set.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.tiers.moving import ARRIVED, DEMOTED, DROPPED, HITS, INSERTED, OBJECTS, PROMOTED, TOKENS, Moves
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column

__all__ = ["replay_inclusive"]


@compiled
def replay_inclusive(  # noqa: C901 - one loop over all blocks, see above
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
    older = np.empty((levels, unique_blocks + 1), np.int32)
    newer = np.empty((levels, unique_blocks + 1), np.int32)
    older[:, unique_blocks] = newer[:, unique_blocks] = unique_blocks
    present, written = np.zeros(unique_blocks, np.int32), np.zeros(unique_blocks, np.int32)
    seen = np.zeros(unique_blocks, np.int8)
    sizes = np.zeros(levels, np.int64)
    full = 0
    for request in range(writes.size):
        begin, count = offsets[request], offsets[request + 1] - offsets[request]
        reads, size, prompt = read_blocks[request], block_tokens[request], input_tokens[request]
        prefix, is_prefix = 0, True
        looks = count if writes[request] else reads
        # The order of looks and touches is that of exclusive.py.
        for step in range(looks + count if moves.tail_first else looks):
            place = step if step < looks else looks + count - 1 - step
            if step >= looks and not (writes[request] or place < prefix):
                continue
            block = blocks[begin + place]
            mask, found = present[block], 0
            while found < levels and not (mask >> found) & 1:
                found += 1
            if step < looks:
                if place < reads:
                    is_prefix &= found < levels
                    if found < levels:
                        sums[OBJECTS, found] += 1
                    if is_prefix:
                        prefix += 1
                        moved[HITS, request, found] += 1
                        sums[TOKENS, found] += min((place + 1) * size, prompt) - min(place * size, prompt)
                if moves.tail_first or not (writes[request] or is_prefix):
                    continue
            if found < levels:
                for level in range(found, levels if moves.lower_sees_hits else found + 1):
                    if moves.touches and (mask >> level) & 1:
                        before, after = older[level, block], newer[level, block]
                        newer[level, before] = after
                        older[level, after] = before
                        before = older[level, unique_blocks]
                        older[level, block], newer[level, block] = before, unique_blocks
                        newer[level, before] = older[level, unique_blocks] = block
                seen[block] += found > 0 and moves.promote_at <= 2
                if found == 0 or seen[block] < moves.promote_at:
                    continue
                sums[PROMOTED, found] += 1
            else:
                sums[INSERTED, 0] += 1
                if moves.through:
                    sums[INSERTED, 1:] += 1
            # From below, so that no level holds what the one below does not.
            for lowest in range(found - 1, -1, -1):
                level, comes, writing = lowest, block, moves.through or lowest == 0 or found < levels
                while comes >= 0:
                    victim = -1
                    if sizes[level] == capacities[level]:
                        victim = newer[level, unique_blocks]
                        for upper in range(0 if moves.back_invalidates else level, level + 1):
                            if (present[victim] >> upper) & 1:
                                before, after = older[upper, victim], newer[upper, victim]
                                newer[upper, before] = after
                                older[upper, after] = before
                                sizes[upper] -= 1
                                present[victim] &= ~(1 << upper)
                                written[victim] &= ~(1 << upper)
                    before = older[level, unique_blocks]
                    older[level, comes], newer[level, comes] = before, unique_blocks
                    newer[level, before] = older[level, unique_blocks] = comes
                    sizes[level] += 1
                    present[comes] |= 1 << level
                    seen[comes] = 0
                    if writing:
                        written[comes] |= 1 << level
                        moved[ARRIVED, request, level] += 1
                    comes = -1
                    if victim < 0 or present[victim] & ((1 << level) - 1):
                        continue
                    # It is in no faster level any more: its bytes were here alone, or are below already.
                    lower = level + 1
                    while lower < levels and not (present[victim] >> lower) & 1:
                        lower += 1
                    if lower < levels:
                        if not (written[victim] >> lower) & 1:
                            written[victim] |= 1 << lower
                            moved[DEMOTED, request, level] += 1
                            moved[ARRIVED, request, lower] += 1
                    elif level + 1 < levels and moves.demote:
                        moved[DEMOTED, request, level] += 1
                        comes, level, writing = victim, level + 1, True
                    else:
                        sums[DROPPED, level] += 1
        full += reads > 0 and prefix == reads
    return full
