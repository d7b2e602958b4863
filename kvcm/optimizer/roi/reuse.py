"""What hits spare and what their loads cost, at each capacity; only hits that are worth loading are loaded.

Whether a hit is worth it depends on its length, so on the hits of single requests. Three sources know them:

1. a curve, when even the shortest hit that the trace can have is worth loading and tokens cost the same everywhere;
2. a curve of lru or leaf_lru, always: the depths of its accesses are found when they are needed;
3. replays that kept their requests, always, at their capacities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.recency import leaf_lru_depths, lru_depths
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi.deployment import Deployment
from kvcm.optimizer.roi.formulas import Floats
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["Reuse", "hit_tokens", "loaded_tokens", "reuse_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """Hits of a trace at M capacities, of which the first is 0.

    Attributes:
        policy: label.
        capacity_blocks: [M] ascending.
        hit_tokens: [M] of prefix hits.
        loaded_tokens: [M] of those that are worth loading.
        spared_seconds: [M] that a node would have computed for these.
        computed_seconds: that a node computes for the whole trace without a cache.
    """

    policy: str
    capacity_blocks: Int64Column
    hit_tokens: Floats
    loaded_tokens: Floats
    spared_seconds: Floats
    computed_seconds: float


def hit_tokens(trace: Trace, hit_blocks: Int32Column) -> Floats:
    """Return [R] tokens of the first k blocks of each request, no more than it has."""
    tokens: Int64Column = np.minimum(hit_blocks * trace.tokens_per_block(), trace.input_tokens)
    return tokens.astype(np.float64)


def loaded_tokens(tokens: Floats, deployment: Deployment) -> Floats:
    """Return the tokens of hits that are worth loading, 0 for the others."""
    return np.where(tokens > deployment.threshold_tokens, tokens, 0.0)


def reuse_of(hits: Curve | Sequence[Replay], trace: Trace, deployment: Deployment) -> Reuse:
    """Return what a curve, or replays that kept their requests, are worth loading.

    Args:
        hits: of `trace`; replays are of one policy.
        trace: that they are hits of.
        deployment: what loads and prefills cost.

    Raises:
        OptionError: whether hits are worth loading does not follow from what is given.
    """
    if not isinstance(hits, Curve):
        return _of_replays(hits, trace, deployment)
    threshold = deployment.threshold_tokens
    if deployment.profile is not None or _shortest_hit(trace) <= threshold < math.inf:
        return _of_depths(hits, trace, deployment, _depths(hits, trace))
    tokens = hits.prefix_tokens.astype(np.float64)
    loaded = tokens if threshold < math.inf else np.zeros_like(tokens)
    spared = deployment.prefill.saved_seconds(loaded)
    return Reuse(hits.policy, np.arange(len(tokens)), tokens, loaded, spared, _computed_seconds(trace, deployment))


def _depths(curve: Curve, trace: Trace) -> Int32Column:
    if curve.policy == "lru":
        return lru_depths(trace.blocks, trace.unique_blocks)
    if curve.policy == "leaf_lru":
        return leaf_lru_depths(trace.blocks, trace.offsets, trace.unique_blocks)
    raise OptionError(
        f"curve: that of {curve.policy} does not tell how long hits are, on which it depends whether they are worth"
        " loading; allowed: lru, leaf_lru, or replays that kept their requests"
    )


def _computed_seconds(trace: Trace, deployment: Deployment) -> float:
    tokens = trace.input_tokens[trace.read_blocks > 0].astype(np.float64)
    return float(deployment.prefill.seconds(tokens, np.zeros_like(tokens)).sum())


def _shortest_hit(trace: Trace) -> float:
    tokens = np.minimum(trace.tokens_per_block(), trace.input_tokens)[trace.read_blocks > 0]
    return float(tokens.min()) if len(tokens) else math.inf


def _of_depths(curve: Curve, trace: Trace, deployment: Deployment, depths: Int32Column) -> Reuse:
    prefill = deployment.prefill
    more = _more_at_each(
        depths,
        trace.offsets,
        trace.read_blocks,
        trace.input_tokens,
        trace.tokens_per_block(),
        trace.unique_blocks,
        deployment.threshold_tokens,
        prefill.linear,
        prefill.quadratic,
    )
    loaded, spared = np.cumsum(more, axis=1)
    tokens = curve.prefix_tokens.astype(np.float64)
    return Reuse(curve.policy, np.arange(len(tokens)), tokens, loaded, spared, _computed_seconds(trace, deployment))


@compiled
def _more_at_each(
    depths: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    input_tokens: Int64Column,
    tokens_per_block: Int64Column,
    unique_blocks: int,
    threshold: float,
    linear: float,
    quadratic: float,
) -> Floats:
    """Return [2, U + 1] how many more tokens each capacity loads than the one below it, and the seconds they spare.

    A block is a prefix hit at the greatest of the depths up to it. The first one above the threshold brings all before
    it along.
    """
    more = np.zeros((2, unique_blocks + 1))
    for request in range(len(offsets) - 1):
        greatest, loaded = 0, 0.0
        for place in range(read_blocks[request]):
            depth = depths[offsets[request] + place]
            if depth == 0:
                break
            greatest = max(greatest, depth)
            tokens = float(min((place + 1) * tokens_per_block[request], input_tokens[request]))
            if tokens > threshold:
                more[0, greatest] += tokens - loaded
                more[1, greatest] += linear * (tokens - loaded) + quadratic * (tokens * tokens - loaded * loaded) / 2
                loaded = tokens
    return more


def _of_replays(replays: Sequence[Replay], trace: Trace, deployment: Deployment) -> Reuse:
    ordered = sorted(replays, key=lambda each: each.capacity_blocks)
    tokens, loaded, spared = [0.0], [0.0], [0.0]
    for replay in ordered:
        if replay.request_hits is None:
            raise OptionError(f"replays: {replay.policy} kept no requests; allowed: replays with keep_requests")
        hit = hit_tokens(trace, replay.request_hits)
        worth = loaded_tokens(hit, deployment)
        tokens.append(float(hit.sum()))
        loaded.append(float(worth.sum()))
        spared.append(float(deployment.prefill.saved_seconds(worth).sum()))
    return Reuse(
        ordered[0].policy if ordered else "none",
        np.array([0, *(each.capacity_blocks for each in ordered)]),
        np.array(tokens),
        np.array(loaded),
        np.array(spared),
        _computed_seconds(trace, deployment),
    )
