"""Replays a trace through a hierarchy of caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.results import Hits
from kvcm.optimizer.tiers.tier import FloatColumn, LoadTimes, Tier, TierReplay, TierSeries, TierUse
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Trace

__all__ = [
    "KV_BYTES_PER_TOKEN",
    "MOVED",
    "TOKENS",
    "Counted",
    "block_bytes_of",
    "count",
    "load_times",
    "replay_exclusive",
    "replay_tiers",
]

# What the kernel of hierarchies counts.

_SUMS = ("prefix_tokens", "object_blocks", "inserted_blocks", "promoted_blocks", "dropped_blocks")
"""Counted for each level."""
TOKENS, _OBJECTS, _INSERTED, _PROMOTED, _DROPPED = range(5)
MOVED = ("hits", "arrived", "demoted")
"""Counted for each request and level."""
_HITS, _ARRIVED, _DEMOTED = range(3)

# The replay of an exclusive LRU hierarchy, compiled: a block lies in one level at most.
#
# A new block, and one that is hit in a lower level, goes to the fastest level; what a level evicts moves to the next
# one.
#
# Every level is a ring of blocks from the oldest to the newest that begins and ends at node U + t; a block is in one
# ring at most, so all rings share two arrays. The kernel is one long function: split up, its parts hand a dozen arrays
# to one another for every block, each with atomic counts of references, and the replay takes fifteen times as long.


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
                    sums[_OBJECTS, level] += 1
                if is_prefix:
                    prefix += 1
                    moved[_HITS, request, level] += 1
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
                sums[_PROMOTED, level] += 1
            else:
                sums[_INSERTED, 0] += 1
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
                moved[_ARRIVED, request, level] += 1
                if victim >= 0 and level + 1 == levels:
                    level_of[victim] = levels
                    sums[_DROPPED, level] += 1
                    victim = -1
                elif victim >= 0:
                    moved[_DEMOTED, request, level] += 1
                block, level = victim, level + 1
        full += reads > 0 and prefix == reads
    return full


# Runs the kernel over the levels that are there, and returns its counts by level and request.

_Number = TypeVar("_Number", np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What moved where; R requests, T levels.

    Attributes:
        hits: [R, T] blocks of prefixes.
        arrived: [R, T] blocks written.
        demoted: [R, T] blocks read to be written to a lower level.
        sums: [T] each, by the names of `_SUMS`.
        full_requests: of which every block was there.
        seconds: the replay took.
    """

    hits: Int32Column
    arrived: Int32Column
    demoted: Int32Column
    sums: dict[str, Int64Column]
    full_requests: int
    seconds: float


def count(trace: Trace, tiers: Sequence[Tier]) -> Counted:
    """Replay a plain trace."""
    real = [level for level, tier in enumerate(tiers) if tier.capacity_blocks]
    moved = np.zeros((len(MOVED), len(trace), len(real)), np.int32)
    sums = np.zeros((len(_SUMS), len(real)), np.int64)
    started = time.perf_counter()
    full = 0
    if real:
        full = replay_exclusive(
            trace.blocks,
            trace.offsets,
            trace.read_blocks,
            trace.writes,
            trace.input_tokens,
            trace.tokens_per_block(),
            np.array([tiers[level].capacity_blocks for level in real], np.int64),
            trace.unique_blocks,
            moved,
            sums,
        )
    seconds = time.perf_counter() - started
    hits, arrived, demoted = (_spread(layer, real, len(tiers)) for layer in moved)
    by_level = _spread(sums, real, len(tiers))
    return Counted(
        hits=hits,
        arrived=arrived,
        demoted=demoted,
        sums=dict(zip(_SUMS, by_level, strict=True)),
        full_requests=full,
        seconds=seconds,
    )


def _spread(counts: npt.NDArray[_Number], real: list[int], tiers: int) -> npt.NDArray[_Number]:
    """Return counts of the levels that are there as counts of all, with nothing for the others."""
    if len(real) == tiers:
        return counts
    spread = np.zeros((len(counts), tiers), counts.dtype)
    spread[:, real] = counts
    return spread


# How long it takes to load the prefixes of requests.


def _load_seconds_of(hits: Int32Column, tiers: Sequence[Tier], block_bytes: int) -> FloatColumn:
    """Return [R] seconds for [R, T] blocks, level after level; each costs its latency if anything comes from it."""
    latency = np.array([tier.latency_seconds for tier in tiers])
    bandwidth = np.array([tier.bandwidth_bytes_per_second for tier in tiers])
    each = np.where(hits > 0, latency + hits * (block_bytes / bandwidth), 0.0)
    seconds: FloatColumn = each.sum(axis=1)
    return seconds


def load_times(seconds: FloatColumn, loads: BoolColumn) -> LoadTimes:
    """Return what people want to know of [R] seconds, over the requests that load."""
    loaded = seconds[loads]
    if not loaded.size:
        return LoadTimes(requests=0, total=0.0, mean=0.0, median=0.0, p90=0.0, p99=0.0, longest=0.0)
    median, p90, p99 = np.percentile(loaded, (50, 90, 99))
    return LoadTimes(
        requests=loaded.size,
        total=float(loaded.sum()),
        mean=float(loaded.mean()),
        median=float(median),
        p90=float(p90),
        p99=float(p99),
        longest=float(loaded.max()),
    )


# What a hierarchy gave and moved over time, in windows of equal width.

_WINDOWS = 100
_LATEST = np.iinfo(np.int64).max


def _series_of(trace: Trace, tiers: Sequence[Tier], counted: Counted, block_bytes: int) -> TierSeries:
    """Return [T, W] figures; what a request moves counts for the window in which it arrives.

    A window is a hundredth of the trace's time, but at least a second.
    """
    span_seconds = float(np.ptp(trace.times_us)) / 1e6 if len(trace) else 0.0
    width = max(1.0, span_seconds / _WINDOWS)
    places = ((trace.times_us - trace.times_us.min(initial=_LATEST)) // (width * 1e6)).astype(np.int64)
    windows = int(places.max(initial=0)) + 1
    hits = _sums(counted.hits, places, windows)
    read = hits + _sums(counted.demoted, places, windows)
    written = _sums(counted.arrived, places, windows)
    asked = np.bincount(places, trace.read_blocks, windows)
    bandwidth = np.array([[tier.bandwidth_bytes_per_second] for tier in tiers])
    return TierSeries(
        window_seconds=width,
        starts_seconds=np.arange(windows, dtype=np.float64) * width,
        hit_rate=hits / np.maximum(asked, 1),
        read_bytes_per_second=read * block_bytes / width,
        written_bytes_per_second=written * block_bytes / width,
        utilisation=(read + written) * block_bytes / width / bandwidth,
    )


def _sums(counts: Int32Column, places: Int64Column, windows: int) -> FloatColumn:
    """Return [T, W] sums of [R, T] counts."""
    return np.stack([np.bincount(places, column, windows) for column in counts.T])


KV_BYTES_PER_TOKEN = 70_272
"""Of DeepSeek-V3 (MLA, bf16: 61 × 576 × 2)."""
_MOST_TIERS = 31


def replay_tiers(trace: Trace, tiers: Sequence[Tier], *, kv_bytes_per_token: int = KV_BYTES_PER_TOKEN) -> TierReplay:
    """Replay a trace in mode block (optimizer.md) through an exclusive LRU hierarchy of caches.

    All instances of the trace share the hierarchy. A request that does not write touches its prefix and inserts
    nothing. Blocks move whole.

    Args:
        trace: that only reads prefixes.
        tiers: the fastest first.
        kv_bytes_per_token: of a token in all layers.

    Raises:
        OptionError: there are no tiers, or more than 31; or a number is out of its range.
        TraceError: requests read otherwise than a prefix, or leave something out.
    """
    if not trace.is_plain:
        raise TraceError(f"{trace.name}: has requests that do not read plain prefixes; tiers replay no others")
    if not 1 <= len(tiers) <= _MOST_TIERS:
        raise OptionError(f"tiers: there are {len(tiers)}; allowed: 1 to {_MOST_TIERS}")
    block_bytes = block_bytes_of(trace, kv_bytes_per_token)
    counted = count(trace, tiers)
    series = _series_of(trace, tiers, counted, block_bytes)
    saturated = (series.utilisation > 1).sum(axis=1) * series.window_seconds
    uses = tuple(_use(tier, level, counted, block_bytes, float(saturated[level])) for level, tier in enumerate(tiers))
    load_seconds = _load_seconds_of(counted.hits, tiers, block_bytes)
    return TierReplay(
        tiers=uses,
        hits=_hits(uses, counted.full_requests),
        totals=trace.totals,
        load_times=load_times(load_seconds, counted.hits.sum(axis=1) > 0),
        series=series,
        request_hits=counted.hits,
        load_seconds=load_seconds,
        seconds=counted.seconds,
        accesses=trace.accesses,
    )


def block_bytes_of(trace: Trace, kv_bytes_per_token: int) -> int:
    """Return the bytes of a block; where instances have blocks of several sizes, of the largest.

    Raises:
        OptionError: a token has no bytes.
    """
    if not 0 < kv_bytes_per_token < 1 << 40:
        raise OptionError(f"kv_bytes_per_token is {kv_bytes_per_token}; allowed: 1 to 2^40 - 1")
    return kv_bytes_per_token * (trace.block_tokens or max(trace.instance_block_tokens, default=1))


def _use(tier: Tier, level: int, counted: Counted, block_bytes: int, saturated_seconds: float) -> TierUse:
    prefix, demoted = int(counted.hits[:, level].sum()), int(counted.demoted[:, level].sum())
    return TierUse(
        tier=tier,
        block_bytes=block_bytes,
        prefix_blocks=prefix,
        demoted_blocks=demoted,
        read_blocks=prefix + demoted,
        written_blocks=int(counted.arrived[:, level].sum()),
        saturated_seconds=saturated_seconds,
        **{name: int(sums[level]) for name, sums in counted.sums.items()},
    )


def _hits(uses: Sequence[TierUse], full_requests: int) -> Hits:
    return Hits(
        sum(use.prefix_blocks for use in uses),
        sum(use.prefix_tokens for use in uses),
        sum(use.object_blocks for use in uses),
        full_requests,
    )
