"""How much of the answer hangs on each input: what the cache returns, and which capacity is best, when one is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi.deployment import RANGES, Deployment
from kvcm.optimizer.roi.formulas import Floats
from kvcm.optimizer.roi.returns import Returns, returns
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["Grid", "Swing", "grid", "sensitivity"]


@dataclass(frozen=True, slots=True)
class Swing:
    """What one input does at a low and at a high value, all others as they are.

    Attributes:
        input: name of the field of `Deployment`.
        low, high: its values; no further than its range goes.
        low_net, high_net: money per hour at the capacity that is best then.
        low_kept, high_kept: money per hour at the capacity that is best now, bought on the wrong value.
        low_blocks, high_blocks: the capacity that is best then.
    """

    input: str
    low: float
    high: float
    low_net: float
    high_net: float
    low_kept: float
    high_kept: float
    low_blocks: int
    high_blocks: int

    @property
    def width(self) -> float:
        """Return how far apart the net values are."""
        return abs(self.high_net - self.low_net)

    def as_json(self) -> dict[str, object]:
        """Return the figures by name."""
        return asdict(self)


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

    def as_json(self) -> dict[str, object]:
        """Return the figures by name."""
        return {
            "bandwidths": list(self.bandwidths),
            "prices": list(self.prices),
            "best_blocks": self.best_blocks.tolist(),
            "net_per_hour": self.net_per_hour.tolist(),
        }


def sensitivity(
    hits: Curve | Sequence[Replay],
    trace: Trace,
    deployment: Deployment,
    *,
    change: float = 0.2,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    depths: Int32Column | None = None,
) -> tuple[Swing, ...]:
    """Return the swing of each input, the widest first.

    Args:
        hits, trace, deployment, depths: see `returns`.
        change: share by which each input is off in both directions, above 0 and below 1.
        ranges: (low, high) of inputs whose range is known better.

    Raises:
        OptionError: `change` is out of its range, or `ranges` names no input.
    """
    if not 0 < change < 1:
        raise OptionError(f"change: {change}; allowed: above 0, below 1")
    unknown = set(ranges or {}) - set(RANGES)
    if unknown:
        raise OptionError(f"ranges: {min(unknown)!r} is no input; there are {', '.join(RANGES)}")
    now = returns(hits, trace, deployment, depths=depths).best
    swings = []
    for name, allowed in RANGES.items():
        value = getattr(deployment, name)
        low, high = (ranges or {}).get(name, (value * (1 - change), value * (1 + change)))
        ends = allowed.clamp(low), allowed.clamp(high)
        found = [returns(hits, trace, _changed(deployment, name, end), depths=depths) for end in ends]
        swings.append(_swing(name, ends, found, now))
    return tuple(sorted(swings, key=lambda each: -each.width))


def _changed(deployment: Deployment, name: str, value: float) -> Deployment:
    changes: dict[str, Any] = {name: value}
    return replace(deployment, **changes)


def _swing(name: str, ends: tuple[float, float], found: Sequence[Returns], now: int) -> Swing:
    (low, low_net), (high, high_net) = ((each, each.net_per_hour) for each in found)
    return Swing(
        input=name,
        low=ends[0],
        high=ends[1],
        low_net=float(low_net.max()),
        high_net=float(high_net.max()),
        low_kept=float(low_net[now]),
        high_kept=float(high_net[now]),
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
    depths: Int32Column | None = None,
) -> Grid:
    """Return the best capacity for each bandwidth and price of storage.

    Args:
        hits, trace, deployment, depths: see `returns`.
        bandwidths: bytes per second.
        prices: of a GiB and month.

    Raises:
        OptionError: one of them is out of its range.
    """
    best = np.zeros((len(bandwidths), len(prices)), np.int64)
    net = np.zeros(best.shape)
    for row, bandwidth in enumerate(bandwidths):
        wired = replace(deployment, bandwidth_bytes_per_second=bandwidth)
        found = returns(hits, trace, wired, depths=depths)
        for column, price in enumerate(prices):
            # The price of storage changes no node.
            priced = replace(found, deployment=replace(wired, price_per_gib_month=price))
            best[row, column] = priced.capacity_blocks[priced.best]
            net[row, column] = priced.net_per_hour[priced.best]
    return Grid(tuple(bandwidths), tuple(prices), best, net)
