"""Open write sessions at one glance: how many, what they hold, which of them are late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Sessions", "sessions_of"]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Open write sessions.

    Attributes:
        items: the first to end first.
        blocks: of all of them.
        bytes: that those take.
        overdue: how many should have ended.
        oldest_ms: when the oldest began, 0 where that is not known.
    """

    items: Sequence[Any]
    blocks: int
    bytes: int
    overdue: int
    oldest_ms: int


def sessions_of(items: Sequence[Any]) -> Sessions:
    """Return sessions with their sums."""
    return Sessions(
        items,
        sum(each["blocks"] for each in items),
        sum(each["bytes"] for each in items),
        sum(each["is_overdue"] for each in items),
        min((each["begun_at_ms"] for each in items if each["begun_at_ms"]), default=0),
    )
