"""What engines saw in each phase of an outage: values that travel as JSON and add up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["AWAY", "GROUPS", "STAYS", "EngineFigures", "TokenFigures", "added"]

AWAY, STAYS = "away", "stays"
"""Names of the two storages."""

GROUPS = {"away-first": [AWAY, STAYS], "stays-first": [STAYS, AWAY]}
"""Groups and where their blocks go, best first: together they spread what is written over both."""

_Figures = TypeVar("_Figures", "EngineFigures", "TokenFigures")


@dataclass(slots=True)
class EngineFigures:
    """What engines that move bytes saw in one phase. A block counts where its operation began.

    Attributes:
        requests: to the manager.
        failed_requests: those that were not answered as they should.
        slowest_request_seconds: that one took.
        overrun_seconds: most that a caller, of the manager or of the engine's transfers, was held beyond its deadline.
        asked: blocks that should be readable, by the storages that have them.
        hit: of them, those that were found, loaded, and the right bytes.
        served: blocks that were loaded, by storage.
        unmoved: parts that were not moved, by storage and why.
        offered: blocks that the manager gave a place for.
        accepted: blocks that were written and confirmed, by storage.
        lost_parts: that were reported as missing.
        removed_locations: that the manager removed for that.
        wrong: other bytes than were written.
        errors: exceptions, and items that were refused: what no outage explains.
    """

    requests: int = 0
    failed_requests: list[str] = field(default_factory=list)
    slowest_request_seconds: float = 0.0
    overrun_seconds: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)
    hit: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    unmoved: dict[str, int] = field(default_factory=dict)
    offered: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    lost_parts: int = 0
    removed_locations: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TokenFigures:
    """What an engine that generates tokens saw in one phase.

    Attributes:
        generations: prompts that were answered.
        loaded_tokens: whose KV was not computed.
        blocks_saved: that were published.
        slowest_seconds: that a prompt took.
        wrong: prompts with other tokens than without the manager.
        errors: exceptions.
    """

    generations: int = 0
    loaded_tokens: int = 0
    blocks_saved: int = 0
    slowest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def added(one: _Figures, other: _Figures) -> _Figures:
    """Return both together: counts and lists are joined, of seconds the greater counts."""
    pairs = ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    return type(one)(**{name: _joined(first, second) for name, first, second in pairs})


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, dict):
        return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}
    return max(first, second) if isinstance(first, float) else first + second
