"""What a cache is set against: the nodes that would compute what it holds, their links and all prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi.formulas import load_threshold_tokens, saturation_share
from kvcm.optimizer.roi.length_profile import LengthProfile

__all__ = ["RANGES", "Deployment", "Range"]


@dataclass(frozen=True, slots=True)
class Range:
    """The values that an input may have.

    Attributes:
        least: the smallest.
        most: the largest.
        above: whether `least` itself is none of them.
    """

    least: float
    most: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        return f"{'above' if self.above else 'from'} {self.least:g}, up to {self.most:g}"

    def clamp(self, value: float) -> float:
        """Return the value, or the end of the range that is nearest to it."""
        return min(max(value, math.nextafter(self.least, math.inf) if self.above else self.least), self.most)


_POSITIVE = Range(0, 1e18, above=True)
_NOT_NEGATIVE = Range(0, 1e18)
_SHARE = Range(0, 1, above=True)

RANGES = {
    "prefill_tokens_per_second": _POSITIVE,
    "gpus_per_node": Range(0, 1e6, above=True),
    "kv_bytes_per_token": _POSITIVE,
    "bandwidth_bytes_per_second": _POSITIVE,
    "latency_seconds": Range(0, 1e6),
    "usable_share": _SHARE,
    "utilisation": _SHARE,
    "price_per_gpu_hour": _NOT_NEGATIVE,
    "price_per_gib_month": _NOT_NEGATIVE,
    "load_factor": _POSITIVE,
}
"""What each number may be; `offered_tokens_per_second` is None or one of those of `load_factor`."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Nodes that prefill, and what they and the cache cost; in any one currency.

    Attributes:
        prefill_tokens_per_second: P of a node.
        kv_bytes_per_token: b.
        gpus_per_node: g.
        bandwidth_bytes_per_second: BW of a node's link to the cache.
        latency_seconds: L0 of a load, whatever its size.
        usable_share: u of the bandwidth that loads get.
        utilisation: η of their prefill throughput that nodes are planned to be used at.
        price_per_gpu_hour: of a GPU.
        price_per_gib_month: of what the cache is stored in.
        offered_tokens_per_second: λ; None is that of the trace.
        load_factor: times as much is offered.
        profile: replaces P by a time that depends on the length.

    Raises:
        OptionError: a number is out of its range.
    """

    prefill_tokens_per_second: float
    kv_bytes_per_token: float
    gpus_per_node: float = 8.0
    bandwidth_bytes_per_second: float = 20e9
    latency_seconds: float = 0.0
    usable_share: float = 1.0
    utilisation: float = 1.0
    price_per_gpu_hour: float = 2.0
    price_per_gib_month: float = 0.1
    offered_tokens_per_second: float | None = None
    load_factor: float = 1.0
    profile: LengthProfile | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            _check(name, getattr(self, name), allowed)
        if self.offered_tokens_per_second is not None:
            _check("offered_tokens_per_second", self.offered_tokens_per_second, _POSITIVE)

    @property
    def prefill(self) -> LengthProfile:
        """Return the time that prefills take; T(n, k) = (n − k)/P without a profile."""
        return self.profile or LengthProfile(1 / self.prefill_tokens_per_second)

    @property
    def link_seconds_per_token(self) -> float:
        """Return b/(BW·u)."""
        return self.kv_bytes_per_token / (self.bandwidth_bytes_per_second * self.usable_share)

    @property
    def threshold_tokens(self) -> float:
        """Return the length above which a prefix is worth loading; infinite where none is."""
        prefill = self.prefill
        return load_threshold_tokens(
            prefill.linear,
            prefill.quadratic,
            link_seconds=self.link_seconds_per_token,
            latency=self.latency_seconds,
        )

    @property
    def saturation_share(self) -> float:
        """Return h*, of nodes whose prefill runs at P."""
        return saturation_share(
            self.prefill_tokens_per_second,
            kv_bytes=self.kv_bytes_per_token,
            bandwidth=self.bandwidth_bytes_per_second,
            usable=self.usable_share,
        )


def _check(name: str, value: float, allowed: Range) -> None:
    if value not in allowed:
        raise OptionError(f"deployment: {name} is {value}; allowed: {allowed}")
