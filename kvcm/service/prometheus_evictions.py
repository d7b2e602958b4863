"""Counts evicted blocks that are asked for again: those that should have stayed.

What was evicted is remembered for one block in `_ONE_IN`, and the latest `_MOST` of those: some megabytes, however many
blocks there are. Only the block at which a prefix match ends is looked for, which costs a lookup a look into a dict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from kvcm.reclaim.evicted import Evicted
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_values import AGES, Histogram, Reading

__all__ = ["EvictionMetrics"]

_ONE_IN: Final = 8  # a power of two
_MOST: Final = 32_768
_SPREAD: Final = 0x9E3779B97F4A7C15  # keys need not be well mixed
_MASK: Final = (1 << 64) - 1


class EvictionMetrics:
    """Is told of evictions and of misses.

    Args:
        now: seconds, never running backwards.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._gone: dict[tuple[str, int], float] = {}  # the oldest first
        self._gaps = Histogram(AGES)

    def evicted(self, evicted: Evicted) -> None:
        """Remember what went."""
        instance_id, now, gone = evicted.instance.instance_id, self._now(), self._gone
        for change in evicted.changes:
            if (change.key * _SPREAD & _MASK) >> 32 & (_ONE_IN - 1) == 0:
                gone.pop((instance_id, change.key), None)
                gone[instance_id, change.key] = now
        while len(gone) > _MOST:
            del gone[next(iter(gone))]

    def missed(self, instance_id: str, key: int) -> None:
        """A prefix match ended in front of a block."""
        at = self._gone.pop((instance_id, key), None)
        if at is not None:
            self._gaps.observe(self._now() - at)

    def readings(self) -> Iterator[Reading]:
        """Yield what was counted."""
        yield Reading(catalog.EVICT_REUSE_GAP, self._gaps.read())
