"""Clocks: deadlines, leases and pins mean the same time on every host only where the clocks agree."""

from __future__ import annotations

from kvcm.doctor.findings import Finding, ok, warn
from kvcm.spans import shown_span

__all__ = ["check_skew"]

_CHECK = "clocks"
_MOST_SECONDS = 1.0


def check_skew(whose: str, ahead_seconds: float) -> Finding:
    """Return whether a clock agrees with ours."""
    if abs(ahead_seconds) <= _MOST_SECONDS:
        return ok(_CHECK, f"that of {whose} agrees with this host's")
    word = "ahead of" if ahead_seconds > 0 else "behind"
    return warn(_CHECK, f"that of {whose} is {shown_span(abs(ahead_seconds))} {word} this host's", "let NTP set both")
