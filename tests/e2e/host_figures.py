"""What the engines of several hosts see in each phase of a run: values that travel as JSON and add up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GROUP", "INSTANCE", "SHARED", "SPECS", "HostFigures", "added", "pool_of"]

GROUP, INSTANCE, SHARED = "hosts", "hosts/chains", "shared"
SPECS = {"tp0": 1 << 14, "tp1": 15_001}
"""Parts of a block and their bytes: as many pages each, so that a pool is full at its mark and not before."""


def pool_of(node_id: str) -> str:
    """Return the name of the pool on a node."""
    return f"pool-{node_id}"


@dataclass(slots=True)
class HostFigures:
    """What an engine saw in one phase. Everything counts where its operation began.

    Attributes:
        lookups: questions where blocks are, or where to write them.
        places: addresses in the answers.
        foreign: of them, those in another host's memory, or in any for who named no host.
        failed_requests: those that were not answered as they should.
        slowest_seconds: that a request took.
        overrun_seconds: most that a caller, of the manager or of the engine's transfers, was held beyond its deadline.
        served: blocks that were loaded and are the right bytes, by storage.
        accepted: blocks that were written and confirmed, by storage.
        unmoved: parts that were not moved, by storage and why.
        lost_parts: that were reported as missing.
        wrong: parts with other bytes than were written, or than their checksum says.
        errors: exceptions, and items that were refused on loading: what no fault explains.
    """

    lookups: int = 0
    places: int = 0
    foreign: list[str] = field(default_factory=list)
    failed_requests: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0
    overrun_seconds: float = 0.0
    served: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    unmoved: dict[str, int] = field(default_factory=dict)
    lost_parts: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def added(one: HostFigures, other: HostFigures) -> HostFigures:
    """Return both together: counts and lists are joined, of seconds the greater counts."""
    names = [each.name for each in dataclasses.fields(HostFigures)]
    return HostFigures(**{name: _joined(getattr(one, name), getattr(other, name)) for name in names})


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, dict):
        return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}
    return max(first, second) if isinstance(first, float) else first + second
