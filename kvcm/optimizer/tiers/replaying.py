"""Replays a trace through a hierarchy of caches."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.results import Hits
from kvcm.optimizer.tiers.counting import Counted, count
from kvcm.optimizer.tiers.loading import load_seconds_of, load_times
from kvcm.optimizer.tiers.outcome import TierReplay, TierUse
from kvcm.optimizer.tiers.tier import Tier
from kvcm.optimizer.tiers.windows import series_of
from kvcm.optimizer.trace import Trace

__all__ = ["KV_BYTES_PER_TOKEN", "block_bytes_of", "replay_tiers"]

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
    series = series_of(trace, tiers, counted, block_bytes)
    saturated = (series.utilisation > 1).sum(axis=1) * series.window_seconds
    uses = tuple(_use(tier, level, counted, block_bytes, float(saturated[level])) for level, tier in enumerate(tiers))
    load_seconds = load_seconds_of(counted.hits, tiers, block_bytes)
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
