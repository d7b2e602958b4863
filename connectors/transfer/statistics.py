"""Statistics of an engine: per storage and direction, items and bytes by outcome, and time of the storage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvcm.connectors.transfer.breaker import BreakerState
from kvcm.connectors.transfer.mover import Failure

__all__ = [
    "BUCKETS_SECONDS",
    "OK",
    "DirectionCounts",
    "DirectionStatistics",
    "EngineStatistics",
    "ItemCount",
    "StorageStatistics",
]

OK = "ok"
BUCKETS_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper ends of the histogram's buckets; one more bucket holds what took longer."""


@dataclass(frozen=True, slots=True)
class ItemCount:
    """Items and the bytes that they are, whether or not these moved."""

    items: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class DirectionStatistics:
    """Loads or saves of one storage since the engine was made.

    Attributes:
        outcomes: by `OK` or the value of a `Failure`; saves that are CANCELLED were dropped.
        accesses: storage calls that have ended; items of one object share one.
        seconds: that they took together, checksums included.
        buckets: accesses by how long they took, see `BUCKETS_SECONDS`.
        breaker: what calls meet now.
    """

    outcomes: Mapping[str, ItemCount]
    accesses: int
    seconds: float
    buckets: tuple[int, ...]
    breaker: BreakerState

    def count(self, outcome: Failure | None = None) -> ItemCount:
        """Return how many items ended so; None for those that moved."""
        return self.outcomes.get(outcome or OK, ItemCount())


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """One storage.

    Attributes:
        loads: of it.
        saves: of it.
        waiting_bytes: that have not begun.
        in_flight_bytes: that it is busy with now, those of callers that have left included.
        hung_accesses: storage calls whose callers have left. As many as there are threads: nothing more is begun.
    """

    loads: DirectionStatistics
    saves: DirectionStatistics
    waiting_bytes: int
    in_flight_bytes: int
    hung_accesses: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Snapshot of an engine.

    Attributes:
        storages: by name.
        misaddressed_items: refused because they name no storage of this engine.
    """

    storages: Mapping[str, StorageStatistics]
    misaddressed_items: int


class DirectionCounts:
    """Counts behind a `DirectionStatistics`. Not locked: its owner does that."""

    def __init__(self) -> None:
        self._outcomes: dict[str, ItemCount] = {}
        self._buckets = [0] * (len(BUCKETS_SECONDS) + 1)
        self._seconds = 0.0

    def add_items(self, outcomes: Mapping[str, tuple[int, int]]) -> None:
        """Count items and bytes by outcome."""
        for outcome, (items, size_bytes) in outcomes.items():
            before = self._outcomes.get(outcome, ItemCount())
            self._outcomes[outcome] = ItemCount(before.items + items, before.bytes + size_bytes)

    def add_access(self, seconds: float) -> None:
        """Count one storage call."""
        self._seconds += seconds
        self._buckets[bisect_left(BUCKETS_SECONDS, seconds)] += 1

    def snapshot(self, breaker: BreakerState) -> DirectionStatistics:
        """Return the counts so far."""
        outcomes = MappingProxyType(dict(self._outcomes))
        return DirectionStatistics(
            outcomes, accesses=sum(self._buckets), seconds=self._seconds, buckets=tuple(self._buckets), breaker=breaker
        )
