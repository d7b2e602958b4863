"""A level of a hierarchy of caches as it is asked for, such as `host:5%:bandwidth=50e9:latency=1e-5:price=2.5`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import parse_capacities
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import Int32Column, Totals

__all__ = ["ASSUMED_TIERS", "FloatColumn", "LoadTimes", "Tier", "TierReplay", "TierSeries", "TierUse", "parse_tiers"]


@dataclass(frozen=True, slots=True)
class Tier:
    """One level, from the engine's point of view.

    Attributes:
        name: for people.
        capacity_blocks: 0 means that the level is not there.
        bandwidth_bytes_per_second: shared by reads and writes; infinite where nothing has to be moved.
        latency_seconds: from the request to the first byte, once per request that loads anything from here.
        price_per_gib_month: of the capacity.

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
        """Return the price of the capacity for a month."""
        return self.capacity_blocks * block_bytes / 2**30 * self.price_per_gib_month


ASSUMED_TIERS: Mapping[str, Tier] = {
    "gpu": Tier("gpu", 0),
    "host": Tier(
        name="host", capacity_blocks=0, bandwidth_bytes_per_second=50e9, latency_seconds=10e-6, price_per_gib_month=2.5
    ),
    "ssd": Tier(
        name="ssd", capacity_blocks=0, bandwidth_bytes_per_second=6e9, latency_seconds=100e-6, price_per_gib_month=0.1
    ),
    "pool": Tier(
        name="pool", capacity_blocks=0, bandwidth_bytes_per_second=20e9, latency_seconds=1e-3, price_per_gib_month=2.5
    ),
}
"""Defaults of tiers of these names. Blocks that lie in the GPU's own memory need
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


# What a hierarchy of caches gave: hits, transfers and times of each level.

FloatColumn = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TierUse:
    """One level over a whole trace.

    Attributes:
        tier: the level.
        block_bytes: of each block.
        prefix_blocks: of the matched prefixes that lay here (and in no faster level).
        prefix_tokens: the same in tokens.
        object_blocks: accesses to a block that lay here, wherever it stands in its request.
        inserted_blocks: written here because an engine had computed them.
        promoted_blocks: that went from here to faster levels because they were asked for.
        demoted_blocks: that were read here to be written to a slower level.
        dropped_blocks: that left the hierarchy from here.
        read_blocks: all blocks read: of prefixes and of demotions.
        written_blocks: all that was written: insertions, promotions from below, demotions from above.
        saturated_seconds: of the windows in which more was to be moved than the bandwidth allows.
    """

    tier: Tier
    block_bytes: int
    prefix_blocks: int
    prefix_tokens: int
    object_blocks: int
    inserted_blocks: int
    promoted_blocks: int
    demoted_blocks: int
    dropped_blocks: int
    read_blocks: int
    written_blocks: int
    saturated_seconds: float

    @property
    def read_bytes(self) -> int:
        """Return all that was read."""
        return self.read_blocks * self.block_bytes

    @property
    def written_bytes(self) -> int:
        """Return all that was written."""
        return self.written_blocks * self.block_bytes

    @property
    def price_per_month(self) -> float:
        """Return the price of the level's capacity."""
        return self.tier.price_per_month(self.block_bytes)


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds that loading takes the requests that load anything, without waiting for one another.

    Attributes:
        requests: that loaded.
        total, mean, median, p90, p99, longest: seconds; 0 where none loaded.
    """

    requests: int
    total: float
    mean: float
    median: float
    p90: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True, eq=False)
class TierSeries:
    """T levels over W windows of time.

    Attributes:
        window_seconds: their width.
        starts_seconds: [W] since the first request.
        hit_rate: [T, W] blocks of prefixes that lay in a level, per block read; 0 where nothing was read.
        read_bytes_per_second: [T, W].
        written_bytes_per_second: [T, W].
        utilisation: [T, W] bytes moved against the bandwidth; above 1 means that the level cannot keep up.
    """

    window_seconds: float
    starts_seconds: FloatColumn
    hit_rate: FloatColumn
    read_bytes_per_second: FloatColumn
    written_bytes_per_second: FloatColumn
    utilisation: FloatColumn


@dataclass(frozen=True, slots=True, eq=False)
class TierReplay:
    """A hierarchy replayed.

    Attributes:
        tiers: the fastest first.
        hits: of all levels together.
        totals: that they are relative to.
        load_times: of the prefixes.
        series: over time.
        request_hits: [R, T] blocks of each request's prefix, by the level they lay in.
        load_seconds: [R] it takes to load each request's prefix.
        seconds: the replay took.
        accesses: that were replayed.
    """

    tiers: tuple[TierUse, ...]
    hits: Hits
    totals: Totals
    load_times: LoadTimes
    series: TierSeries
    request_hits: Int32Column
    load_seconds: FloatColumn
    seconds: float
    accesses: int

    @property
    def block_hit_rate(self) -> float:
        """Return prefix hits of all levels per block read."""
        return self.hits.block_rate(self.totals)

    @property
    def token_hit_rate(self) -> float:
        """Return tokens of prefix hits of all levels per token of the prompts."""
        return self.hits.token_rate(self.totals)

    @property
    def price_per_month(self) -> float:
        """Return what all levels cost."""
        return sum(use.price_per_month for use in self.tiers)
