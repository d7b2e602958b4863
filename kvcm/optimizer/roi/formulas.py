"""What a hit is worth, as formulas (optimizer.md, ROI); each is one line of the model.

Symbols, and the names they have here:

* P `prefill_tokens_per_second` and g `gpus` of a node; b `kv_bytes` of a token;
* BW `bandwidth` of a node's link in bytes per second, of which the share u `usable` arrives; L0 `latency` in seconds;
* η `utilisation` that is planned for; λ `offered` tokens per second;
* h, the share of the offered tokens that is loaded instead of computed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = [
    "GIB",
    "HOURS_PER_MONTH",
    "Floats",
    "gpus_saved",
    "load_seconds",
    "load_threshold_tokens",
    "loaded_part",
    "prefill_seconds",
    "saturation_share",
    "storage_price_per_hour",
    "whole_nodes",
]

GIB = 1 << 30
HOURS_PER_MONTH = 730.0
"""A twelfth of a year of 365 days."""

Floats = npt.NDArray[np.float64]
_ROUNDING = 1e-9


def prefill_seconds(linear: float, quadratic: float, tokens: Floats, cached: Floats) -> Floats:
    """Return T(n, k) = a(n − k) + q(n² − k²)/2, the seconds that a node computes for n tokens of which k are loaded.

    Args:
        linear: a, seconds per token; 1/P where the cost of a token does not depend on its position.
        quadratic: q, seconds per token and token before it.
        tokens: n.
        cached: k.
    """
    return linear * (tokens - cached) + quadratic * (tokens * tokens - cached * cached) / 2


def load_seconds(tokens: Floats, *, kv_bytes: float, bandwidth: float, usable: float, latency: float) -> Floats:
    """Return L(k) = L0 + k·b/(BW·u), the seconds that loading k tokens takes over a link that nothing else uses."""
    return latency + tokens * (kv_bytes / (bandwidth * usable))


def load_threshold_tokens(linear: float, quadratic: float, *, link_seconds: float, latency: float) -> float:
    """Return the number of tokens above which loading a prefix takes less time than computing it.

    It is the k at which L(k) = T(n, 0) − T(n, k) = a·k + q·k²/2. With q = 0 that is L0 / (1/P − b/(BW·u)), and
    loading pays only over a link with BW·u > b·P.

    Args:
        linear: a, seconds.
        quadratic: q, seconds.
        link_seconds: b/(BW·u), seconds that the link takes per token.
        latency: L0, seconds.

    Returns:
        tokens; infinite where loading never pays.
    """
    gain = linear - link_seconds
    if quadratic == 0:
        return latency / gain if gain > 0 else math.inf
    root = math.sqrt(gain * gain + 2 * quadratic * latency)
    # The same root twice, each time without the difference of two numbers that are nearly equal.
    return 2 * latency / (root + gain) if gain > 0 else (root - gain) / quadratic


def saturation_share(prefill_tokens_per_second: float, *, kv_bytes: float, bandwidth: float, usable: float) -> float:
    """Return h* = BW·u/(BW·u + P·b), the share of loaded tokens at which a node's link is as busy as its GPUs."""
    return bandwidth * usable / (bandwidth * usable + prefill_tokens_per_second * kv_bytes)


def loaded_part(without: float, relieved: Floats, links: Floats) -> Floats:
    """Return which part of the loads to make, so that the fewest nodes are needed.

    Nodes are max(D − x·S, x·L) when the part x is loaded. Where links are not the bottleneck x is 1; otherwise it is
    where both are equally busy: a link that is saturated makes more hits worth nothing, but never less than nothing.
    The part is one of every load; which loads would best be left out is not asked.

    Args:
        without: D, nodes without a cache, or node-seconds.
        relieved: S, fewer for their GPUs when everything is loaded.
        links: L, that have links for all loads.
    """
    most = np.maximum(relieved + links, without)
    return np.where(most > 0, without / np.where(most > 0, most, 1.0), 1.0)


def whole_nodes(nodes: Floats) -> Floats:
    """Return nodes that can be bought; a billionth of one counts as rounding."""
    return np.ceil(nodes * (1 - _ROUNDING))


def gpus_saved(gpus: float, nodes_without: float, nodes_with: Floats) -> Floats:
    """Return g(N(0) − N(h))."""
    return gpus * (nodes_without - nodes_with)


def storage_price_per_hour(stored_bytes: Floats, price_per_gib_month: float) -> Floats:
    """Return what it costs to hold so many bytes for an hour."""
    return stored_bytes * (price_per_gib_month / (GIB * HOURS_PER_MONTH))
