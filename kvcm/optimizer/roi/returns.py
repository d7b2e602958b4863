"""What a cache returns at each capacity: nodes, GPUs and money, and the capacity that returns most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.recency import leaf_lru_depths, lru_depths
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi.deployment import (
    GIB,
    HOURS_PER_MONTH,
    RANGES,
    Deployment,
    Floats,
    gpus_saved,
    loaded_part,
    saturation_share,
    storage_price_per_hour,
    whole_nodes,
)
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = [
    "NEARLY",
    "Grid",
    "Returns",
    "Reuse",
    "Swing",
    "block_bytes",
    "grid",
    "hit_tokens",
    "loaded_tokens",
    "offered_tokens_per_second",
    "returns",
    "reuse_of",
    "sensitivity",
]

# What hits spare and what their loads cost, at each capacity; only hits that are worth loading are loaded.
#
# Whether a hit is worth it depends on its length, so on the hits of single requests. Three sources know them:
#
# 1. a curve, when even the shortest hit that the trace can have is worth loading and tokens cost the same everywhere;
# 2. a curve of lru or leaf_lru, always: the depths of its accesses are found when they are needed;
# 3. replays that kept their requests, always, at their capacities.


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
        OptionError: whether hits are worth loading does not follow from the arguments.
    """
    if not isinstance(hits, Curve):
        return _of_replays(hits, trace, deployment)
    threshold = deployment.threshold_tokens
    if deployment.profile is not None or _shortest_hit(trace) <= threshold < math.inf:
        return _of_depths(hits, trace, deployment, _depths(hits, trace))
    tokens = hits.prefix_tokens.astype(np.float64)
    loaded = tokens if threshold < math.inf else np.zeros_like(tokens)
    spared = deployment.prefill.saved_seconds(loaded)
    return Reuse(
        policy=hits.policy,
        capacity_blocks=np.arange(len(tokens)),
        hit_tokens=tokens,
        loaded_tokens=loaded,
        spared_seconds=spared,
        computed_seconds=_computed_seconds(trace, deployment),
    )


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
    return Reuse(
        policy=curve.policy,
        capacity_blocks=np.arange(len(tokens)),
        hit_tokens=tokens,
        loaded_tokens=loaded,
        spared_seconds=spared,
        computed_seconds=_computed_seconds(trace, deployment),
    )


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
        policy=ordered[0].policy if ordered else "none",
        capacity_blocks=np.array([0, *(each.capacity_blocks for each in ordered)]),
        hit_tokens=np.array(tokens),
        loaded_tokens=np.array(loaded),
        spared_seconds=np.array(spared),
        computed_seconds=_computed_seconds(trace, deployment),
    )


NEARLY = 0.01
"""How much less than the best a capacity may return to be nearly the best."""


@dataclass(frozen=True, slots=True, eq=False)
class Returns:
    """One policy at M capacities, of which the first is 0.

    Attributes:
        policy: label.
        deployment: that it is relative to.
        block_bytes: KV of a block; of the largest one where instances differ.
        offered_tokens_per_second: λ, with the load factor; 0 for a trace without a span.
        turning_share: h above which more loads spare nothing: h* of nodes that prefill at η of their throughput, which
            is the mean over the trace where it depends on the length.
        nodes_without: N(0).
        capacity_blocks: [M] ascending.
        hit_share: [M] of the offered tokens that are hits.
        loaded_share: [M] h, of the offered tokens that are loaded: hits that are worth it, and that links carry.
        nodes: [M] N(h) in fractions of nodes.
        node_seconds_saved: [M] of prefill, over the trace as it was recorded.
        saturated: index of the smallest capacity whose hits links do not carry; None where they always do.
    """

    policy: str
    deployment: Deployment
    block_bytes: float
    offered_tokens_per_second: float
    turning_share: float
    nodes_without: float
    capacity_blocks: Int64Column
    hit_share: Floats
    loaded_share: Floats
    nodes: Floats
    node_seconds_saved: Floats
    saturated: int | None

    @property
    def gpus_saved(self) -> Floats:
        """Return [M] g(N(0) − N(h)) in fractions of GPUs."""
        return gpus_saved(self.deployment.gpus_per_node, self.nodes_without, self.nodes)

    @property
    def whole_gpus_saved(self) -> Floats:
        """Return [M] GPUs saved when nodes are bought whole, without and with the cache."""
        without = float(whole_nodes(np.array([self.nodes_without]))[0])
        return gpus_saved(self.deployment.gpus_per_node, without, whole_nodes(self.nodes))

    @property
    def saved_per_hour(self) -> Floats:
        """Return [M] money for `gpus_saved`."""
        return self.gpus_saved * self.deployment.price_per_gpu_hour

    @property
    def storage_per_hour(self) -> Floats:
        """Return [M] money for the capacity."""
        stored = self.capacity_blocks.astype(np.float64) * self.block_bytes
        return storage_price_per_hour(stored, self.deployment.price_per_gib_month)

    @property
    def net_per_hour(self) -> Floats:
        """Return [M] money that the cache returns over what it costs."""
        return self.saved_per_hour - self.storage_per_hour

    @property
    def best(self) -> int:
        """Return the index of the largest net value, of the smallest capacity among equals."""
        return int(np.argmax(self.net_per_hour))

    @property
    def nearly_best(self) -> int:
        """Return the index of the smallest capacity within `NEARLY` of the best."""
        net = self.net_per_hour
        return int(np.argmax(net >= net.max() * (1 - NEARLY)))

    @property
    def break_even_gib_month(self) -> float:
        """Return the price of a GiB and month at which the best capacity returns nothing; 0 where none is best."""
        return float(self._saved_per_gib_month[self.best])

    @property
    def _saved_per_gib_month(self) -> Floats:
        gib = self.capacity_blocks * (self.block_bytes / GIB)
        return np.where(gib > 0, self.saved_per_hour * HOURS_PER_MONTH / np.where(gib > 0, gib, 1.0), 0.0)

    def row(self, place: int) -> dict[str, float]:
        """Return the figures of one capacity, by index."""
        return {
            "capacity_blocks": int(self.capacity_blocks[place]),
            "capacity_gib": float(self.capacity_blocks[place] * (self.block_bytes / GIB)),
            "hit_share": float(self.hit_share[place]),
            "loaded_share": float(self.loaded_share[place]),
            "nodes": float(self.nodes[place]),
            "gpus_saved": float(self.gpus_saved[place]),
            "whole_gpus_saved": float(self.whole_gpus_saved[place]),
            "node_seconds_saved": float(self.node_seconds_saved[place]),
            "saved_per_hour": float(self.saved_per_hour[place]),
            "storage_per_hour": float(self.storage_per_hour[place]),
            "net_per_hour": float(self.net_per_hour[place]),
        }


def offered_tokens_per_second(trace: Trace, deployment: Deployment) -> float:
    """Return λ: the given one, or the tokens of all prompts over the span of the trace; times the load factor."""
    offered = deployment.offered_tokens_per_second
    if offered is None:
        span = trace.span_seconds
        offered = trace.totals.tokens / span if span > 0 else 0.0
    return offered * deployment.load_factor


def block_bytes(trace: Trace, deployment: Deployment) -> float:
    """Return the KV bytes of a block; of the largest one where instances differ."""
    tokens = trace.block_tokens or max(trace.instance_block_tokens, default=0)
    return tokens * deployment.kv_bytes_per_token


def returns(hits: Curve | Sequence[Replay], trace: Trace, deployment: Deployment) -> Returns:
    """Return what a cache of each capacity returns.

    A trace whose requests all come at once offers no tokens per second: nothing is saved unless λ is said.

    Args:
        hits: a curve, or replays of one policy that kept their requests.
        trace: that they are hits of.
        deployment: what they are worth in.

    Raises:
        OptionError: whether hits are worth loading does not follow from the arguments.
    """
    reuse = reuse_of(hits, trace, deployment)
    tokens = max(1, trace.totals.tokens)
    offered = offered_tokens_per_second(trace, deployment)
    # Seconds of nodes for the whole trace; the load decides only how often a second that is.
    without = reuse.computed_seconds / deployment.utilisation
    relieved = reuse.spared_seconds / deployment.utilisation
    links = reuse.loaded_tokens * deployment.link_seconds_per_token
    part = loaded_part(without, relieved, links)
    traces_per_second = offered / tokens
    return Returns(
        policy=reuse.policy,
        deployment=deployment,
        block_bytes=block_bytes(trace, deployment),
        offered_tokens_per_second=offered,
        turning_share=_break_even_share(reuse, tokens, deployment),
        nodes_without=without * traces_per_second,
        capacity_blocks=reuse.capacity_blocks,
        hit_share=reuse.hit_tokens / tokens,
        loaded_share=part * reuse.loaded_tokens / tokens,
        nodes=np.maximum(without - part * relieved, part * links) * traces_per_second,
        node_seconds_saved=part * reuse.spared_seconds,
        saturated=int(np.argmax(part < 1)) if (part < 1).any() else None,
    )


def _break_even_share(reuse: Reuse, tokens: int, deployment: Deployment) -> float:
    mean = reuse.computed_seconds / tokens
    throughput = 1 / mean if mean > 0 else deployment.prefill_tokens_per_second
    return saturation_share(
        throughput * deployment.utilisation,
        kv_bytes=deployment.kv_bytes_per_token,
        bandwidth=deployment.bandwidth_bytes_per_second,
        usable=deployment.usable_share,
    )


# How much of the answer hangs on each input: what the cache returns, and which capacity is best, when one is off.

_CHANGE = 0.2


@dataclass(frozen=True, slots=True)
class Swing:
    """What one input does at a low and at a high value, all others as they are.

    Attributes:
        input: name of the field of `Deployment`.
        low, high: its values; no further than its range goes.
        low_net, high_net: money per hour at the capacity that is best then.
        low_blocks, high_blocks: the capacity that is best then.
    """

    input: str
    low: float
    high: float
    low_net: float
    high_net: float
    low_blocks: int
    high_blocks: int

    @property
    def width(self) -> float:
        """Return how far apart the net values are."""
        return abs(self.high_net - self.low_net)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The best capacity for each of I bandwidths and J prices of storage.

    Attributes:
        bandwidths: [I] bytes per second of a node's link.
        prices: [J] of a GiB and month.
        best_blocks: [I, J] the best capacity.
        net_per_hour: [I, J] money that it returns.
    """

    bandwidths: tuple[float, ...]
    prices: tuple[float, ...]
    best_blocks: Int64Column
    net_per_hour: Floats


def sensitivity(
    hits: Curve | Sequence[Replay],
    trace: Trace,
    deployment: Deployment,
) -> tuple[Swing, ...]:
    """Return the swing of each input that is a fifth off in both directions, the widest first.

    Args:
        hits, trace, deployment: see `returns`.
    """
    swings = []
    for name, allowed in RANGES.items():
        value = getattr(deployment, name)
        ends = allowed.clamp(value * (1 - _CHANGE)), allowed.clamp(value * (1 + _CHANGE))
        found = [returns(hits, trace, _changed(deployment, name, end)) for end in ends]
        swings.append(_swing(name, ends, found))
    return tuple(sorted(swings, key=lambda each: -each.width))


def _changed(deployment: Deployment, name: str, value: float) -> Deployment:
    changes: dict[str, Any] = {name: value}
    return replace(deployment, **changes)


def _swing(name: str, ends: tuple[float, float], found: Sequence[Returns]) -> Swing:
    (low, low_net), (high, high_net) = ((each, each.net_per_hour) for each in found)
    return Swing(
        input=name,
        low=ends[0],
        high=ends[1],
        low_net=float(low_net.max()),
        high_net=float(high_net.max()),
        low_blocks=int(low.capacity_blocks[low.best]),
        high_blocks=int(high.capacity_blocks[high.best]),
    )


def grid(
    hits: Curve | Sequence[Replay],
    trace: Trace,
    deployment: Deployment,
    *,
    bandwidths: Sequence[float],
    prices: Sequence[float],
) -> Grid:
    """Return the best capacity for each bandwidth and price of storage.

    Args:
        hits, trace, deployment: see `returns`.
        bandwidths: bytes per second.
        prices: of a GiB and month.

    Raises:
        OptionError: one of them is out of its range.
    """
    best = np.zeros((len(bandwidths), len(prices)), np.int64)
    net = np.zeros(best.shape)
    for row, bandwidth in enumerate(bandwidths):
        wired = replace(deployment, bandwidth_bytes_per_second=bandwidth)
        found = returns(hits, trace, wired)
        for column, price in enumerate(prices):
            # The price of storage changes no node.
            priced = replace(found, deployment=replace(wired, price_per_gib_month=price))
            best[row, column] = priced.capacity_blocks[priced.best]
            net[row, column] = priced.net_per_hour[priced.best]
    return Grid(tuple(bandwidths), tuple(prices), best, net)
