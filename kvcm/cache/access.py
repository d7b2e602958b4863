"""Access recording: which blocks were read when, written down in batches (design.md decision 18).

A request appends one entry and goes on; the entries are merged and drained in the background, so a read costs no write
to the store. What a crash loses is bounded: the reads since the last drain, which change an order of eviction and
nothing else. When reads come faster than they drain, the newest are not recorded.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import PAGE_KEYS
from kvcm.model.clock import Clock

__all__ = ["AccessRecorder"]

_MOST_KEYS = 1 << 20


class AccessRecorder:
    """Gathers reads until they are drained.

    Args:
        clock: time source.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: list[tuple[InstanceCache, Sequence[int]]] = []
        self._waiting = 0
        self.dropped = 0

    @property
    def waiting_count(self) -> int:
        """Reads of blocks that are not written down yet."""
        return self._waiting

    def record(self, cache: InstanceCache, keys: Sequence[int]) -> None:
        """Note that blocks were read just now."""
        if self._waiting + len(keys) > _MOST_KEYS:
            self.dropped += len(keys)
        elif keys:
            self._waiting += len(keys)
            self._entries.append((cache, keys))

    async def drain(self) -> None:
        """Write down what was gathered, giving way to requests in between.

        Raises:
            StorageIOError: the store cannot be asked; what was gathered is lost.
        """
        entries, self._entries, self._waiting = self._entries, [], 0
        at = self._clock.now()
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        caches: dict[int, InstanceCache] = {}
        for cache, keys in entries:
            caches[cache.placement.uid] = cache
            counts[cache.placement.uid].update(keys)
            await asyncio.sleep(0)
        for uid, reads in counts.items():
            items = iter(reads.items())
            while page := dict(islice(items, PAGE_KEYS)):
                await caches[uid].index.touch(page, at)
                await asyncio.sleep(0)
