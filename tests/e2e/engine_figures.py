"""Figures of engines in each phase of a run: values that travel as JSON and add up; and the names that runs share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

AWAY, STAYS = "away", "stays"
"""Storages of an outage."""

GROUPS = {"away-first": [AWAY, STAYS], "stays-first": [STAYS, AWAY]}
"""Groups of an outage and where their blocks go, best first: together they spread the blocks over both storages."""

GROUP, INSTANCE, SHARED = "hosts", "hosts/chains", "shared"
"""Group, instance and shared storage of the hosts."""


def pool_of(node_id: str) -> str:
    """Return the name of the pool on a node."""
    return f"pool-{node_id}"


_Figures = TypeVar("_Figures", "EngineFigures", "TokenFigures")


@dataclass(slots=True)
class EngineFigures:
    """Figures of engines that move bytes, in one phase. Everything counts where its operation began.

    Attributes:
        requests: to the manager.
        failed_requests: those without the right answer.
        slowest_request_seconds: longest time of a request.
        overrun_seconds: longest time that a caller, of the manager or of the engine's transfers, was held beyond its
            deadline.
        lookups: matches and started writes.
        places: addresses in the answers.
        foreign: addresses in another host's memory, or in any memory for an engine that names no host.
        asked: blocks that should be readable, by the storages that have them.
        hit: of them, those that were found, loaded, and the right bytes.
        served: blocks that were loaded and are the right bytes, by storage.
        unmoved: parts that were not moved, by storage and reason.
        offered: blocks that the manager gave a location for.
        accepted: blocks that were written and confirmed, by storage.
        lost_parts: that were reported as missing.
        removed_locations: that the manager removed for that.
        wrong: parts with other bytes than were written, or than their checksum says.
        errors: exceptions and rejected items: what no fault explains.
    """

    requests: int = 0
    failed_requests: list[str] = field(default_factory=list)
    slowest_request_seconds: float = 0.0
    overrun_seconds: float = 0.0
    lookups: int = 0
    places: int = 0
    foreign: list[str] = field(default_factory=list)
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
    """Figures of an engine that generates tokens, in one phase.

    Attributes:
        generations: prompts that were answered.
        loaded_tokens: whose KV was not computed.
        blocks_saved: that were published.
        slowest_seconds: longest time of a prompt.
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
