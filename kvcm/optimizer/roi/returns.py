"""What a cache returns at each capacity: nodes, GPUs and money, and the capacity that returns most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi.deployment import Deployment
from kvcm.optimizer.roi.formulas import (
    GIB,
    HOURS_PER_MONTH,
    Floats,
    gpus_saved,
    loaded_part,
    saturation_share,
    storage_price_per_hour,
    whole_nodes,
)
from kvcm.optimizer.roi.reuse import Reuse, reuse_of
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["NEARLY", "Returns", "block_bytes", "offered_tokens_per_second", "returns"]

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
    """Return λ: what is said, or the tokens of all prompts over the span of the trace; times the load factor."""
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
        OptionError: whether hits are worth loading does not follow from what is given.
    """
    reuse = reuse_of(hits, trace, deployment)
    tokens = max(1, trace.totals.tokens)
    offered = offered_tokens_per_second(trace, deployment)
    # Seconds of nodes for the whole trace; what is offered decides only how often a second that is.
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
        turning_share=_turning_share(reuse, tokens, deployment),
        nodes_without=without * traces_per_second,
        capacity_blocks=reuse.capacity_blocks,
        hit_share=reuse.hit_tokens / tokens,
        loaded_share=part * reuse.loaded_tokens / tokens,
        nodes=np.maximum(without - part * relieved, part * links) * traces_per_second,
        node_seconds_saved=part * reuse.spared_seconds,
        saturated=int(np.argmax(part < 1)) if (part < 1).any() else None,
    )


def _turning_share(reuse: Reuse, tokens: int, deployment: Deployment) -> float:
    mean = reuse.computed_seconds / tokens
    throughput = 1 / mean if mean > 0 else deployment.prefill_tokens_per_second
    return saturation_share(
        throughput * deployment.utilisation,
        kv_bytes=deployment.kv_bytes_per_token,
        bandwidth=deployment.bandwidth_bytes_per_second,
        usable=deployment.usable_share,
    )
