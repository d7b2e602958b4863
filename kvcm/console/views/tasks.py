"""Reports of tasks in words: what a look found, and what was done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcm.console.formats import count, size

__all__ = ["Outcome", "outcome_of"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task that was carried out found.

    Attributes:
        headline: in one sentence.
        rows: what is counted, with its number.
        has_work: whether there is something to do for real.
    """

    headline: str
    rows: Sequence[tuple[str, str]]
    has_work: bool


_GARBAGE: Final = (
    ("blocks", "Blocks looked at"),
    ("without_bytes", "Locations whose bytes are missing"),
    ("without_prefix", "Blocks whose prefix is gone"),
    ("expired_sessions", "Overdue write sessions"),
)
_SCRUB: Final = (
    ("objects", "Objects looked at"),
    ("orphans", "Objects that no metadata knows"),
    ("too_young", "Those too young to be sure"),
    ("deleted", "Objects deleted"),
    ("failed", "Objects that could not be looked at or deleted"),
)


def outcome_of(document: Any, *, is_dry: bool) -> Outcome:
    """Return the report of garbage collection or of a scrub.

    Args:
        document: as `/v1/tasks` answers.
        is_dry: whether nothing was changed.
    """
    report = document["report"]
    if document["kind"] == "collect_garbage":
        found = sum(report[name] for name in ("without_bytes", "without_prefix", "expired_sessions"))
        return _outcome(report, _GARBAGE, found, report["freed_bytes"], is_dry=is_dry)
    found = report["orphans"] - report["too_young"] if is_dry else report["deleted"]
    outcome = _outcome(report, _SCRUB, found, report["orphan_bytes"], is_dry=is_dry)
    return Outcome(outcome.headline, (*outcome.rows, ("Bytes looked at", size(report["bytes"]))), outcome.has_work)


def _outcome(report: Any, names: Sequence[tuple[str, str]], found: int, freed: int, *, is_dry: bool) -> Outcome:
    rows = [(label, count(report[name])) for name, label in names]
    rows.append(("Bytes that would be freed" if is_dry else "Bytes freed", size(freed)))
    if not found:
        return Outcome("There is nothing to free.", rows, has_work=False)
    verb = "would be freed; nothing was changed" if is_dry else "were freed"
    return Outcome(f"{count(found)} of them, {size(freed)}, {verb}.", rows, has_work=is_dry)
