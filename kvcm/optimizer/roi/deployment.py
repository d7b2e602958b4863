"""What a cache is set against: the nodes that would compute what it holds, their links and all prices."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.errors import OptionError

__all__ = [
    "GIB",
    "HOURS_PER_MONTH",
    "INPUTS",
    "PRESETS",
    "RANGES",
    "Deployment",
    "Floats",
    "LengthProfile",
    "fit_profile",
    "gpus_saved",
    "load_seconds",
    "load_threshold_tokens",
    "loaded_part",
    "parse_deployment",
    "prefill_seconds",
    "read_profile",
    "saturation_share",
    "storage_price_per_hour",
    "whole_nodes",
]

# What a hit is worth, as formulas (optimizer.md, ROI); each is one line of the model.
#
# Symbols, and the names they have here:
#
# * P `prefill_tokens_per_second` and g `gpus` of a node; b `kv_bytes` of a token;
# * BW `bandwidth` of a node's link in bytes per second, of which the share u `usable` arrives; L0 `latency` in
#   seconds;
# * η `utilisation` that is planned for; λ `offered` tokens per second;
# * h, the share of the offered tokens that is loaded instead of computed.

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


# How long a prefill takes by its length: attention to the tokens before makes later tokens dearer.

Point = tuple[float, float]
_COLUMNS = ("tokens", "seconds")
_ALLOWED = "CSV with the columns tokens,seconds or a JSON list of [tokens, seconds]"


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """T(n, k) = a(n − k) + q(n² − k²)/2.

    Attributes:
        linear: a, seconds per token.
        quadratic: q, seconds per token and token before it.
        largest_error_seconds: how far it is from a point that it was fitted to.

    Raises:
        OptionError: a coefficient is below zero, or both are zero.
    """

    linear: float
    quadratic: float = 0.0
    largest_error_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.linear < 1e12 and 0 <= self.quadratic < 1e12 and self.linear + self.quadratic > 0):
            raise OptionError(
                f"profile: linear {self.linear:g}, quadratic {self.quadratic:g}; allowed: from 0, one of them above 0"
            )

    def seconds(self, tokens: Floats, cached: Floats) -> Floats:
        """Return the seconds of a prefill of `tokens`, of which `cached` are loaded."""
        return prefill_seconds(self.linear, self.quadratic, tokens, cached)

    def saved_seconds(self, cached: Floats) -> Floats:
        """Return T(n, 0) − T(n, k), the same for every n."""
        return self.seconds(cached, np.zeros_like(cached))


def fit_profile(points: Sequence[Point]) -> LengthProfile:
    """Return the profile with a, q ≥ 0 whose squared errors are least.

    Args:
        points: (tokens, seconds) of prefills without a cached prefix.

    Raises:
        OptionError: no point, or one that is not above zero.
    """
    for point in points:
        if not all(0 < each < 1e12 for each in point):
            raise OptionError(f"profile: {point} is no point; allowed: tokens and seconds above 0")
    if not points:
        raise OptionError("profile: it has no points; allowed: at least one of tokens and seconds")
    measured = np.array(points, np.float64)
    tokens, seconds = measured[:, 0], measured[:, 1]
    columns = np.stack([tokens, tokens * tokens / 2], axis=1)
    linear, quadratic = _least_squares_above_zero(columns, seconds)
    errors = np.abs(columns @ np.array([linear, quadratic]) - seconds)
    return LengthProfile(linear, quadratic, float(errors.max()))


def _least_squares_above_zero(columns: Floats, target: Floats) -> tuple[float, float]:
    # With two coefficients there are three candidates: both free, or either at zero.
    scale = np.linalg.norm(columns, axis=0)
    scaled = columns / scale
    both = np.linalg.lstsq(scaled, target, rcond=None)[0]
    candidates = [both] if (both >= 0).all() else []
    candidates += [np.array([scaled[:, 0] @ target, 0.0]), np.array([0.0, scaled[:, 1] @ target])]
    best = min(candidates, key=lambda each: float(np.square(scaled @ each - target).sum()))
    linear, quadratic = best / scale
    return float(linear), float(quadratic)


def read_profile(path: Path) -> LengthProfile:
    """Return the profile of measured points in a file.

    Raises:
        OptionError: the file cannot be read or holds no points.
    """
    try:
        text = path.read_text()
        points = _json_points(text) if text.lstrip().startswith("[") else _csv_points(text)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f"profile: {str(path)!r} holds no points ({error}); allowed: {_ALLOWED}") from error
    return fit_profile(points)


def _json_points(text: str) -> list[Point]:
    rows = [[row[name] for name in _COLUMNS] if isinstance(row, dict) else row for row in json.loads(text)]
    return [(float(tokens), float(seconds)) for tokens, seconds in rows]


def _csv_points(text: str) -> list[Point]:
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    return [(float(row["tokens"]), float(row["seconds"])) for row in rows]


@dataclass(frozen=True, slots=True)
class _Range:
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


_POSITIVE = _Range(0, 1e18, above=True)
_NOT_NEGATIVE = _Range(0, 1e18)
_SHARE = _Range(0, 1, above=True)
_OUTPUT_TOKEN = _Range(0, 1e6)
RANGES = {
    "prefill_tokens_per_second": _POSITIVE,
    "gpus_per_node": _Range(0, 1e6, above=True),
    "kv_bytes_per_token": _POSITIVE,
    "bandwidth_bytes_per_second": _POSITIVE,
    "latency_seconds": _Range(0, 1e6),
    "usable_share": _SHARE,
    "utilisation": _SHARE,
    "price_per_gpu_hour": _NOT_NEGATIVE,
    "price_per_gib_month": _NOT_NEGATIVE,
    "load_factor": _POSITIVE,
}
"""What each number may be by which hits are valued; `offered_tokens_per_second` is None or one of `load_factor`."""


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
        output_token_seconds: of a token of an answer, while which a request is in flight (`kvcm.optimizer.pooling`).
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
    output_token_seconds: float = 0.02
    profile: LengthProfile | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            _check(name, getattr(self, name), allowed)
        _check("output_token_seconds", self.output_token_seconds, _OUTPUT_TOKEN)
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


def _check(name: str, value: float, allowed: _Range) -> None:
    if value not in allowed:
        raise OptionError(f"deployment: {name} is {value}; allowed: {allowed}")


# Deployments as they are asked for: a preset, and inputs that differ from it, such as `deepseek_v3,gpu_hour=2.5`.

PRESETS: Mapping[str, Deployment] = MappingProxyType(
    {
        "deepseek_v3": Deployment(prefill_tokens_per_second=32_200, kv_bytes_per_token=61 * 576 * 2),
        "qwen3_coder_480b": Deployment(prefill_tokens_per_second=10_000, kv_bytes_per_token=62 * 2 * 8 * 128 * 2),
    }
)
"""Published throughput of nodes with 8 GPUs and a link of 20 GB/s; layers · width · 2 bytes of KV per token.

DeepSeek-V3 keeps the latent of multi-head latent attention in bf16, Qwen3-Coder-480B keys and values of 8 heads of 128.
Prices are examples: those that others pay are not published.
"""
INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "prefill_tokens_per_second",
        "kv_bytes": "kv_bytes_per_token",
        "gpus": "gpus_per_node",
        "bandwidth": "bandwidth_bytes_per_second",
        "latency": "latency_seconds",
        "usable": "usable_share",
        "utilisation": "utilisation",
        "gpu_hour": "price_per_gpu_hour",
        "gib_month": "price_per_gib_month",
        "offered": "offered_tokens_per_second",
        "load_factor": "load_factor",
        "output_token": "output_token_seconds",
        "profile": "profile",
    }
)
"""What an input is called in a text, and its field."""


def parse_deployment(text: str) -> Deployment:
    """Return the deployment of a text: a preset's name, inputs as `name=number`, or both, with commas between.

    `profile=FILE` reads measured points. A text without a preset starts from the first one.

    Raises:
        OptionError: there is no such preset or input, or a value is out of its range.
    """
    first, *rest = (part.strip() for part in text.split(","))
    is_preset = "=" not in first
    deployment = _preset(first) if is_preset else next(iter(PRESETS.values()))
    changes: dict[str, Any] = {}
    for part in rest if is_preset else [first, *rest]:
        changes |= _input(part)
    return replace(deployment, **changes)


def _preset(name: str) -> Deployment:
    if name not in PRESETS:
        raise OptionError(f"deployment: {name!r} is no preset; there are {', '.join(PRESETS)}{_hint(name, PRESETS)}")
    return PRESETS[name]


def _input(part: str) -> dict[str, Any]:
    name, _, value = (each.strip() for each in part.partition("="))
    if name not in INPUTS:
        raise OptionError(f"deployment: {name!r} is no input; there are {', '.join(INPUTS)}{_hint(name, INPUTS)}")
    if name == "profile":
        return {"profile": read_profile(Path(value))}
    try:
        return {INPUTS[name]: float(value)}
    except ValueError as error:
        raise OptionError(f"deployment: {name} is {value!r}; allowed: a number") from error


def _hint(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
