"""The replay of engines behind a router, compiled.

Bit e of `present[b]` says whether the local cache of engine e holds block b. Every cache is a ring of blocks from the
oldest to the newest that begins and ends at U: a row of `older` and `newer` for each engine, and one more for the pool.
The kernel is one long function: split up, its parts hand a dozen arrays to one another for every block, each with
atomic counts of references, and the replay takes many times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column

__all__ = ["COUNTS", "Cluster", "replay_engines"]

COUNTS = (
    "local_hit_blocks",
    "pool_hit_blocks",
    "local_hit_tokens",
    "pool_hit_tokens",
    "object_blocks",
    "full_requests",
    "migrations",
    "duplicates_summed",
    "most_duplicate_blocks",
)
_BLOCKS, _TOKENS, _OBJECTS, _FULL, _MIGRATIONS, _DUPLICATES, _MOST = 0, 2, 4, 5, 6, 7, 8


class Cluster(NamedTuple):
    """Engines, caches and how requests are spread, as numbers.

    Attributes:
        local_blocks, pool_blocks: capacities; 0 means that there is none.
        by_load: whether the least loaded engine is taken.
        by_prefix: whether only those are considered whose caches hold the longest prefix.
        migrates: whether the least loaded engine is taken when the one found is overloaded.
        least_match: share of a request's blocks from which on a prefix counts.
        tokens_per_us: prefill of an engine.
        overload_factor: times the mean of outstanding tokens, and
        overload_tokens: outstanding tokens above which an engine is overloaded.
    """

    local_blocks: int
    pool_blocks: int
    by_load: bool
    by_prefix: bool
    migrates: bool
    least_match: float
    tokens_per_us: float
    overload_factor: float
    overload_tokens: float


@compiled
def replay_engines(  # noqa: C901 - one loop over all blocks, see above
    times_us: Int64Column,
    blocks: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    writes: BoolColumn,
    input_tokens: Int64Column,
    block_tokens: Int64Column,
    homes: Int32Column,
    unique_blocks: int,
    cluster: Cluster,
    counts: Int64Column,
    engine_counts: Int64Column,
) -> tuple[float, float]:
    """Replay R requests on E engines and return the sum and the maximum of what they find outstanding, in tokens.

    Args:
        times_us, blocks, offsets, read_blocks, writes, input_tokens: of the trace.
        block_tokens: [R] tokens per block of each request.
        homes: [R] engine each request belongs to; among equally loaded ones the first from there on is taken.
        unique_blocks: U.
        cluster: what it runs on.
        counts: [len(COUNTS)] counted here.
        engine_counts: [3, E] requests, tokens of their prompts and tokens computed, counted here.
    """
    engines = engine_counts.shape[1]
    has_local, has_pool = cluster.local_blocks > 0, cluster.pool_blocks > 0
    end = unique_blocks
    older = np.empty((engines + 1, end + 1), np.int32)
    newer = np.empty((engines + 1, end + 1), np.int32)
    older[:, end] = newer[:, end] = end
    sizes = np.zeros(engines + 1, np.int64)
    present, in_pool = np.zeros(unique_blocks, np.int64), np.zeros(unique_blocks, np.bool_)
    outstanding = np.zeros(engines)
    duplicates, now = 0, times_us[0] if times_us.size else 0
    waits, longest_wait = 0.0, 0.0
    for request in range(writes.size):
        begin, count = offsets[request], offsets[request + 1] - offsets[request]
        reads, size, prompt = read_blocks[request], block_tokens[request], input_tokens[request]

        drained = max(0, times_us[request] - now) * cluster.tokens_per_us
        now = max(now, times_us[request])
        total = 0.0
        for each in range(engines):
            outstanding[each] = max(0.0, outstanding[each] - drained)
            total += outstanding[each]

        candidates, length, matched = np.int64(-1), reads if reads > 0 else count, 0
        while cluster.by_prefix and matched < length and candidates & present[blocks[begin + matched]]:
            candidates &= present[blocks[begin + matched]]
            matched += 1
        if matched < cluster.least_match * length:
            candidates = np.int64(-1)
        engine = homes[request]
        least, chosen = engine, -1
        for step in range(engines):
            each = (homes[request] + step) % engines
            if outstanding[each] < outstanding[least]:
                least = each
            if (candidates >> each) & 1 and (chosen < 0 or outstanding[each] < outstanding[chosen]):
                chosen = each
        if cluster.by_load or cluster.by_prefix:
            engine = chosen
        if (
            cluster.migrates
            and outstanding[engine] > cluster.overload_tokens
            and outstanding[engine] * engines > cluster.overload_factor * total
        ):
            engine = least
            counts[_MIGRATIONS] += 1

        prefix, prefix_tokens, is_prefix = 0, 0, True
        for place in range(count if writes[request] else reads):
            block = blocks[begin + place]
            is_local = (present[block] >> engine) & 1
            is_pooled = in_pool[block]
            if place < reads:
                is_prefix &= is_local or is_pooled
                counts[_OBJECTS] += is_local or is_pooled
                if is_prefix:
                    source = 0 if is_local else 1
                    tokens = min((place + 1) * size, prompt) - min(place * size, prompt)
                    prefix += 1
                    prefix_tokens += tokens
                    counts[_BLOCKS + source] += 1
                    counts[_TOKENS + source] += tokens
            if not (writes[request] or is_prefix):
                continue
            for cache in range(engine, engines + 1, max(1, engines - engine)):
                is_here = is_local if cache < engines else is_pooled
                if not (has_local if cache < engines else has_pool) or not (is_here or writes[request]):
                    continue
                if is_here:
                    before, after = older[cache, block], newer[cache, block]
                    newer[cache, before] = after
                    older[cache, after] = before
                else:
                    if sizes[cache] == (cluster.local_blocks if cache < engines else cluster.pool_blocks):
                        victim = newer[cache, end]
                        after = newer[cache, victim]
                        newer[cache, end] = after
                        older[cache, after] = end
                        if cache < engines:
                            present[victim] &= ~(np.int64(1) << cache)
                            duplicates -= present[victim] != 0
                        else:
                            in_pool[victim] = False
                    else:
                        sizes[cache] += 1
                    if cache < engines:
                        duplicates += present[block] != 0
                        present[block] |= np.int64(1) << cache
                    else:
                        in_pool[block] = True
                before = older[cache, end]
                older[cache, block], newer[cache, block] = before, end
                newer[cache, before] = older[cache, end] = block

        counts[_DUPLICATES] += duplicates
        counts[_MOST] = max(counts[_MOST], duplicates)
        if reads > 0:
            counts[_FULL] += prefix == reads
            waits += outstanding[engine]
            longest_wait = max(longest_wait, outstanding[engine])
            outstanding[engine] += prompt - prefix_tokens
            engine_counts[0, engine] += 1
            engine_counts[1, engine] += prompt
            engine_counts[2, engine] += prompt - prefix_tokens
    return waits, longest_wait
