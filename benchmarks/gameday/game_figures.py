"""What the samples of a game say: availability outside and inside the windows of faults, recovery, hits."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Availability", "Sample", "Window", "availability", "hit_rate", "merged", "recovery_seconds", "summary"]


class Sample(NamedTuple):
    """A call of the prober.

    Attributes:
        at: unix seconds, when it began.
        seconds: until it was answered, or given up.
        is_good: whether it was answered with OK in time.
        call: which one.
        reason: why not.
    """

    at: float
    seconds: float
    is_good: bool
    call: str
    reason: str

    @property
    def until(self) -> float:
        """When it ended."""
        return self.at + self.seconds


class Window(NamedTuple):
    """A fault as it happened.

    Attributes:
        number: of the step.
        kind: of the fault.
        began: unix seconds.
        ended: unix seconds.
        recovery_seconds: that are stated for it.
    """

    number: int
    kind: str
    began: float
    ended: float
    recovery_seconds: float

    @property
    def until(self) -> float:
        """When recovery must be over."""
        return self.ended + self.recovery_seconds


@dataclass(frozen=True, slots=True)
class Availability:
    """How calls ended.

    Attributes:
        good: calls answered with OK in time.
        bad: the others.
        examples: of bad calls.
    """

    good: int
    bad: int
    examples: tuple[Sample, ...] = ()

    @property
    def percent(self) -> float:
        """Share of good calls; 100 without calls."""
        return 100.0 * self.good / max(1, self.good + self.bad) if self.good + self.bad else 100.0


def merged(windows: Iterable[Window]) -> list[tuple[float, float]]:
    """Return begin and end of what windows cover together."""
    spans: list[tuple[float, float]] = []
    for window in sorted(windows, key=lambda window: window.began):
        if spans and window.began <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], window.until)
        else:
            spans.append((window.began, window.until))
    return spans


def availability(samples: Iterable[Sample], windows: Sequence[Window]) -> tuple[Availability, Availability]:
    """Return how calls ended outside and inside windows; one that touches a window counts as inside."""
    spans = merged(windows)
    outside, inside = [], []
    for sample in samples:
        touches = any(begin <= sample.until and sample.at <= end for begin, end in spans)
        (inside if touches else outside).append(sample)
    return _counted(outside), _counted(inside)


def _counted(samples: Sequence[Sample]) -> Availability:
    bad = [sample for sample in samples if not sample.is_good]
    return Availability(len(samples) - len(bad), len(bad), tuple(bad[:20]))


def recovery_seconds(samples: Iterable[Sample], windows: Sequence[Window], window: Window) -> float:
    """Return how long after the end of a fault the last call failed that no other fault can be blamed for."""
    others = [(each.began, each.until) for each in windows if each.number != window.number]
    late = [
        sample.until - window.ended
        for sample in samples
        if not sample.is_good
        and window.ended <= sample.until
        and sample.at <= window.until
        and not any(begin <= sample.until and sample.at <= end for begin, end in others)
    ]
    return max(late, default=0.0)


def hit_rate(results: Iterable[dict[str, object]]) -> float:
    """Return the percentage of the prompts' tokens that were loaded."""
    counts: Counter[str] = Counter()
    for result in results:
        counts["loaded"] += int(str(result.get("loaded_tokens", 0)))
        counts["asked"] += int(str(result.get("prompt_tokens", 0)))
    return 100.0 * counts["loaded"] / counts["asked"] if counts["asked"] else 0.0


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Return median and maximum, 0 of nothing."""
    return (statistics.median(values), max(values)) if values else (0.0, 0.0)
