"""Series of what groups need, as somebody estimates it who is told of lookups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_values import OTHER, BoundedNames, Reading

__all__ = ["Needed", "needed_readings"]


class Needed(Protocol):
    """Estimates what groups need."""

    parts: Sequence[float]

    def attainable_ratio(self, group_name: str) -> float:
        """Return which part of the blocks asked for an unlimited cache would find; 0 while that is not known."""

    def bytes_needed(self, group_name: str) -> Sequence[int]:
        """Return the bytes that give each of the parts of that; 0 while that is not known."""


def needed_readings(needed: Needed, names: BoundedNames, group_names: Iterable[str]) -> Iterator[Reading]:
    """Yield what is estimated of groups that have series of their own."""
    for name in group_names:
        if names.of(name) != OTHER:
            yield Reading(catalog.OPTIMIZER_ATTAINABLE, needed.attainable_ratio(name), (name,))
            for part, size in zip(needed.parts, needed.bytes_needed(name), strict=True):
                yield Reading(catalog.OPTIMIZER_BYTES_NEEDED, size, (name, f"{part:g}"))
