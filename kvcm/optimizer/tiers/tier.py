"""A level of a hierarchy of caches as it is asked for, such as `host:5%:bandwidth=50e9:latency=1e-5:price=2.5`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from kvcm.optimizer.capacities import parse_capacities
from kvcm.optimizer.errors import OptionError

__all__ = ["ASSUMED_TIERS", "Tier", "parse_tiers"]


@dataclass(frozen=True, slots=True)
class Tier:
    """One level, from the engine's point of view.

    Attributes:
        name: for people.
        capacity_blocks: 0 means that the level is not there.
        bandwidth_bytes_per_second: shared by reads and writes; infinite where nothing has to be moved.
        latency_seconds: from the request to the first byte, once per request that loads anything from here.
        price_per_gib_month: of the room.

    Raises:
        OptionError: a field is out of its range.
    """

    name: str
    capacity_blocks: int
    bandwidth_bytes_per_second: float = math.inf
    latency_seconds: float = 0.0
    price_per_gib_month: float = 0.0

    def __post_init__(self) -> None:
        ranges: tuple[tuple[str, float, bool, str], ...] = (
            ("capacity_blocks", self.capacity_blocks, 0 <= self.capacity_blocks < 1 << 31, "0 to 2^31 - 1"),
            ("bandwidth", self.bandwidth_bytes_per_second, self.bandwidth_bytes_per_second > 0, "bytes/s above 0"),
            ("latency", self.latency_seconds, 0 <= self.latency_seconds < math.inf, "seconds from 0 on"),
            (
                "price",
                self.price_per_gib_month,
                0 <= self.price_per_gib_month < math.inf,
                "per GiB and month, 0 or more",
            ),
        )
        if not self.name:
            raise OptionError("tiers: a tier has no name; allowed: any text")
        for field, value, is_right, allowed in ranges:
            if not is_right:
                raise OptionError(f"tiers: {self.name}: {field} is {value}; allowed: {allowed}")

    def load_seconds(self, size_bytes: float) -> float:
        """Return how long it takes to load so many bytes from here; nothing takes no time."""
        return self.latency_seconds + size_bytes / self.bandwidth_bytes_per_second if size_bytes else 0.0

    def price_per_month(self, block_bytes: int) -> float:
        """Return what the room costs in a month."""
        return self.capacity_blocks * block_bytes / 2**30 * self.price_per_gib_month


ASSUMED_TIERS: Mapping[str, Tier] = {
    "gpu": Tier("gpu", 0),
    "host": Tier("host", 0, 50e9, 10e-6, 2.5),
    "ssd": Tier("ssd", 0, 6e9, 100e-6, 0.1),
    "pool": Tier("pool", 0, 20e9, 1e-3, 2.5),
}
"""What is taken for granted of tiers of these names until told otherwise. Blocks that lie in the GPU's own memory need
no loading, and that memory is paid for with the GPU; host memory is reached over PCIe 5, an SSD over four lanes of
PCIe 4; the pool has the 20 GB/s between machines of optimizer.md. Prices are round figures: replace them."""

_OPTIONS = {
    "bandwidth": "bandwidth_bytes_per_second",
    "latency": "latency_seconds",
    "price": "price_per_gib_month",
}


def parse_tiers(text: str, unique_blocks: int) -> tuple[Tier, ...]:
    """Return the tiers of a list with commas, the fastest first; each is `name:capacity` and options behind colons.

    Raises:
        OptionError: one of them is none.
    """
    tiers = tuple(_tier(part.strip(), unique_blocks) for part in text.split(","))
    if len({tier.name for tier in tiers}) < len(tiers):
        raise OptionError(f"tiers: {text!r} names a tier twice; allowed: each once")
    return tiers


def _tier(text: str, unique_blocks: int) -> Tier:
    name, *rest = text.split(":")
    if not rest:
        raise OptionError(f"tiers: {text!r} has no capacity; allowed: name:capacity, such as host:10%")
    capacity, *options = rest
    blocks = 0 if capacity == "0" else parse_capacities(capacity, unique_blocks)[0]
    tier = replace(ASSUMED_TIERS.get(name, Tier(name, 0)), capacity_blocks=blocks)
    for option in options:
        tier = _with_option(tier, option)
    return tier


def _with_option(tier: Tier, option: str) -> Tier:
    key, _, value = option.partition("=")
    if key not in _OPTIONS:
        near = get_close_matches(key, _OPTIONS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"tiers: {tier.name} has no option {key!r}; allowed: {', '.join(_OPTIONS)}{hint}")
    try:
        number = float(value)
    except ValueError:
        raise OptionError(f"tiers: {tier.name}: {key} is {value!r}; allowed: a number") from None
    changes: dict[str, float] = {_OPTIONS[key]: number}
    return replace(tier, **changes)  # type: ignore[arg-type]
