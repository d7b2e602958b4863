"""Policies as they are asked for: a name, and options behind colons, such as `ttl:seconds=300:fixed`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches

from kvcm.optimizer.errors import OptionError

__all__ = [
    "ALLOWED_CAPACITIES",
    "DEFAULT_CAPACITIES",
    "POLICY_NAMES",
    "PolicySpec",
    "parse_capacities",
    "parse_policies",
    "parse_policy",
]

POLICY_NAMES = ("lru", "leaf_lru", "belady", "lfu", "lfu_aging", "fifo", "sieve", "s3fifo", "ttl", "random_lru")


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy with its options; those of other policies have no effect.

    Attributes:
        name: one of `POLICY_NAMES`.
        ttl_seconds: of `ttl`: age above which blocks are dropped at each arrival.
        ttl_sliding: of `ttl`: whether age counts from the last access instead of the insertion.
        sample: of `random_lru`: uniform draws, of which the oldest goes.
        seed: of `random_lru`.
        warmup: of `s3fifo`: until the first eviction ever, new blocks go to main once small is full.
        bypass: of `belady`: a missed block whose next access is the farthest is not inserted.
    """

    name: str
    ttl_seconds: float = 600.0
    ttl_sliding: bool = True
    sample: int = 16
    seed: int = 1
    warmup: bool = False
    bypass: bool = True

    @property
    def label(self) -> str:
        """Return the shortest text that parses to this."""
        parts = [self.name]
        if self.name == "ttl":
            parts += [] if self.ttl_seconds == 600.0 else [f"seconds={self.ttl_seconds:.12g}"]
            parts += [] if self.ttl_sliding else ["fixed"]
        if self.name == "random_lru":
            parts += [] if self.sample == 16 else [f"sample={self.sample}"]
            parts += [] if self.seed == 1 else [f"seed={self.seed}"]
        if self.name == "s3fifo" and self.warmup:
            parts.append("warmup")
        if self.name == "belady" and not self.bypass:
            parts.append("forced")
        return ":".join(parts)


_Change = Callable[[PolicySpec, str], PolicySpec]


def _whole(value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdigit() and least <= int(value) <= most):
        raise ValueError
    return int(value)


def _seconds(spec: PolicySpec, value: str) -> PolicySpec:
    seconds = float(value)
    if not 1e-6 <= seconds < 1e12:
        raise ValueError
    return replace(spec, ttl_seconds=seconds)


def _sample(spec: PolicySpec, value: str) -> PolicySpec:
    return replace(spec, sample=_whole(value, 1, 4096))


def _seed(spec: PolicySpec, value: str) -> PolicySpec:
    return replace(spec, seed=_whole(value, 0, (1 << 32) - 1))


_OPTIONS: dict[str, dict[str, tuple[str, _Change]]] = {
    "ttl": {
        "seconds": ("a number from 1e-6 on", _seconds),
        "sliding": ("", lambda spec, _: replace(spec, ttl_sliding=True)),
        "fixed": ("", lambda spec, _: replace(spec, ttl_sliding=False)),
    },
    "random_lru": {"sample": ("1 to 4096", _sample), "seed": ("0 to 2^32 - 1", _seed)},
    "s3fifo": {"warmup": ("", lambda spec, _: replace(spec, warmup=True))},
    "belady": {
        "bypass": ("", lambda spec, _: replace(spec, bypass=True)),
        "forced": ("", lambda spec, _: replace(spec, bypass=False)),
    },
}


def parse_policies(text: str) -> tuple[PolicySpec, ...]:
    """Return the policies of a list with commas, each once; `all` is every one there is.

    Raises:
        OptionError: one of them is none.
    """
    if text.strip() == "all":
        return tuple(PolicySpec(name) for name in POLICY_NAMES)
    return tuple(dict.fromkeys(parse_policy(part) for part in text.split(",")))


def parse_policy(text: str) -> PolicySpec:
    """Return one policy.

    Raises:
        OptionError: it is none.
    """
    name, *options = text.strip().split(":")
    if name not in POLICY_NAMES:
        near = get_close_matches(name, POLICY_NAMES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"policies: {name!r} is no policy; there are {', '.join(POLICY_NAMES)}{hint}")
    spec = PolicySpec(name)
    for option in options:
        spec = _with_option(spec, option)
    return spec


def _with_option(spec: PolicySpec, option: str) -> PolicySpec:
    known = _OPTIONS.get(spec.name, {})
    key, _, value = option.partition("=")
    if key not in known:
        allowed = ", ".join(f"{each}={range_}" if range_ else each for each, (range_, _) in known.items()) or "none"
        raise OptionError(f"policies: {spec.name} has no option {option!r}; allowed: {allowed}")
    allowed, change = known[key]
    with suppress(ValueError, OverflowError):
        if bool(allowed) == bool(value):
            return change(spec, value)
    wanted = f"{key}={allowed}" if allowed else f"{key} without a value"
    raise OptionError(f"policies: {spec.name}:{option} is out of range; allowed: {wanted}")


# Capacities as they are asked for: blocks, or per cent of a trace's unique blocks.

DEFAULT_CAPACITIES = "1%,2%,5%,10%,20%,50%,100%"
ALLOWED_CAPACITIES = "blocks such as 5000, or a share of the unique blocks such as 10%"


def _percent_of(unique_blocks: int, percent: Decimal) -> int:
    """Return C(p%) = max(1, floor(U·p/100)) (optimizer.md, Counting)."""
    return max(1, int(unique_blocks * percent / 100))


def parse_capacities(text: str, unique_blocks: int) -> tuple[int, ...]:
    """Return the capacities of a list with commas, in blocks, as they stand there, each once.

    Raises:
        OptionError: one of them is none.
    """
    return tuple(dict.fromkeys(_capacity(part.strip(), unique_blocks) for part in text.split(",")))


def _capacity(text: str, unique_blocks: int) -> int:
    number = Decimal("NaN")
    if text.isascii() and "_" not in text:  # both of which Decimal takes for digits
        with suppress(InvalidOperation):
            number = Decimal(text.removesuffix("%"))
    is_whole = number.is_finite() and number == number.to_integral_value()
    if number.is_finite() and text.endswith("%") and 0 < number <= 100_000:
        return _percent_of(unique_blocks, number)
    if is_whole and not text.endswith("%") and 1 <= number < 1 << 31:
        return int(number)
    raise OptionError(f"capacities: {text!r} is none; allowed: {ALLOWED_CAPACITIES}")
