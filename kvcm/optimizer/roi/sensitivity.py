"""How much of the answer hangs on each input: what the cache returns, and which capacity is best, when one is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi.deployment import RANGES, Deployment
from kvcm.optimizer.roi.formulas import Floats
from kvcm.optimizer.roi.returns import Returns, returns
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["Grid", "Swing", "grid", "sensitivity"]


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
