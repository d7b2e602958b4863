"""Policies at capacities, estimated from samples of a trace instead of replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcm.optimizer.capacities import parse_capacities
from kvcm.optimizer.curves import MOST_RATE, MOST_REPEATS, SampledCurve, sampled_curves
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.study.options import Progress, StudyOptions
from kvcm.optimizer.trace import Trace

__all__ = ["Estimate", "Sampling", "estimates_of", "parse_sampling"]

_RANGES = {"repeats": (2, MOST_REPEATS), "seed": (0, (1 << 32) - 1)}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How samples are drawn.

    Attributes:
        rate: share of the blocks in each.
        repeats: samples.
        seed: of the first.
    """

    rate: float
    repeats: int = 8
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """One policy at one capacity.

    Attributes:
        policy: its label.
        capacity_blocks: of the cache.
        hit_rate: hits per block read.
        error: how far the true rate may lie from it, as far as samples that differ tell (`SampledCurve.errors`).
        of: which hits: `prefix`, those of leading resident blocks, or `object`, those of resident blocks wherever they
            stand, of which a sample cannot tell the leading ones.
        rate: share of the blocks in each sample.
        repeats: samples.
    """

    policy: str
    capacity_blocks: int
    hit_rate: float
    error: float
    of: Literal["prefix", "object"]
    rate: float
    repeats: int

    def row(self) -> dict[str, str | int | float]:
        """Return what `--json` writes."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "hit_rate": self.hit_rate,
            "low": max(0.0, self.hit_rate - self.error),
            "high": min(1.0, self.hit_rate + self.error),
            "of": self.of,
            "rate": self.rate,
            "repeats": self.repeats,
        }


def parse_sampling(text: str) -> Sampling:
    """Return how to sample, from a rate and options behind colons, such as `0.05:repeats=8:seed=3`.

    Raises:
        OptionError: the text says something else.
    """
    rate, *options = text.split(":")
    whole = dict(_whole(option) for option in options)
    try:
        number = float(rate)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_RATE:
        raise OptionError(f"--sample: rate {rate!r} is out of range; allowed: above 0, up to {MOST_RATE}")
    return Sampling(number, **whole)


def _whole(option: str) -> tuple[str, int]:
    name, _, value = option.partition("=")
    if name not in _RANGES:
        raise OptionError(f"--sample: there is no {option!r}; allowed: {', '.join(f'{each}=N' for each in _RANGES)}")
    least, most = _RANGES[name]
    if not value.isdecimal() or not least <= int(value) <= most:
        raise OptionError(f"--sample: {option!r} is out of range; allowed: {name}={least} to {most}")
    return name, int(value)


def estimates_of(trace: Trace, options: StudyOptions, sampling: Sampling, progress: Progress) -> tuple[Estimate, ...]:
    """Return estimates of each policy at each capacity, policies first.

    Raises:
        OptionError: mode request, a capacity that is none, or a trace or capacity too small for such samples.
    """
    if options.mode != "block":
        raise OptionError(f"--mode is {options.mode!r}; allowed with --sample: block")
    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    try:
        curves = sampled_curves(
            trace,
            options.policies,
            rate=sampling.rate,
            repeats=sampling.repeats,
            seed=sampling.seed,
            capacities=capacities,
            workers=options.workers,
            progress=lambda done, total: progress("samples", done, total),
        )
    except OptionError as error:
        raise OptionError(f"--sample: {trace.name}: {error}") from None
    return tuple(estimate for curve in curves for estimate in _estimates(curve, capacities))


def _estimates(curve: SampledCurve, capacities: Sequence[int]) -> list[Estimate]:
    """Return those at capacities in the order in which they were asked for."""
    places = {capacity: place for place, capacity in enumerate(curve.capacities.tolist())}
    return [_estimate(curve, places[capacity]) for capacity in capacities]


def _estimate(curve: SampledCurve, place: int) -> Estimate:
    return Estimate(
        curve.policy,
        int(curve.capacities[place]),
        float(curve.hit_rates[place]),
        float(curve.errors[place]),
        "prefix" if curve.is_prefix_rate else "object",
        curve.rate,
        curve.repeats,
    )
