"""Access recording: which blocks were read when, written down in batches (design.md decision 18).

A request appends one entry and goes on; the entries are merged and drained in the background, so a read costs no write
to the store. What is read again before that, as a prompt by the engines of many users and by a scheduler that asks at
every step, only counts once more. What a crash loses is bounded: the reads since the last drain, which change an order
of eviction and nothing else. When reads come faster than they drain, the newest are not recorded.

What is drained is in the order of the last reads, the least recent first: request after request, and within a request
the tail before the head, since the head of a prefix must outlive its continuations (invariant 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.observer import UNOBSERVED
from kvcm.cache.pages import PAGE_KEYS
from kvcm.model.clock import Clock
from kvcm.model.groups import EvictionPolicy

__all__ = ["AccessRecorder", "PolicyOf"]

_MOST_KEYS = 1 << 20
_SLICE_KEYS = 256  # worked on without giving way
_ONE_IN = 64  # blocks, a power of two, whose reads are compared with their last one
_SPREAD = 0x9E3779B97F4A7C15  # keys need not be well mixed
_MASK = (1 << 64) - 1

PolicyOf = Callable[[InstanceCache], EvictionPolicy]
"""Finds the policy in force for an instance."""


class _Entry(NamedTuple):
    """Requests for the same blocks in the same order."""

    cache: InstanceCache
    keys: Sequence[int]
    times: int


class AccessRecorder:
    """Gathers reads until they are drained.

    Args:
        clock: time source.
        policy_of: finds the policy of an instance: whether reads move its blocks, or only count.
    """

    def __init__(self, clock: Clock, policy_of: PolicyOf = lambda _cache: EvictionPolicy()) -> None:
        self._clock = clock
        self._policy_of = policy_of
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._waiting = 0
        self.dropped = 0
        self.observer = UNOBSERVED

    @property
    def waiting_count(self) -> int:
        """Blocks of requests whose reads are not written down yet."""
        return self._waiting

    def record(self, cache: InstanceCache, keys: Sequence[int]) -> None:
        """Note that blocks were read just now."""
        if not keys:
            return
        place: tuple[int, ...] = (
            cache.placement.uid,
            len(keys),
            keys[-1],
        )  # a key stands for the prefix before it, too
        entry = self._entries.get(place)
        if entry is not None and entry.keys == keys:
            del self._entries[place]  # to the end: what was read last is written down last
            self._entries[place] = _Entry(cache, keys, entry.times + 1)
        elif self._waiting + len(keys) > _MOST_KEYS:
            self.dropped += len(keys)
        else:
            self._waiting += len(keys)
            self._entries[place if entry is None else (*place, self._waiting)] = _Entry(cache, keys, 1)

    async def drain(self) -> None:
        """Write down what was gathered, giving way to requests in between.

        Raises:
            StorageIOError: the store cannot be asked; what was gathered is lost.
        """
        entries, self._entries, self._waiting = self._entries.values(), {}, 0
        at = self._clock.now()
        caches = {entry.cache.placement.uid: entry.cache for entry in entries}
        counts: dict[int, dict[int, int]] = {uid: {} for uid in caches}
        taken = 0
        for cache, keys, times in entries:
            of_cache = counts[cache.placement.uid]
            for end in range(len(keys), 0, -_SLICE_KEYS):
                part = keys[max(0, end - _SLICE_KEYS) : end]
                _count(of_cache, part, times)
                taken += len(part)
                if taken >= _SLICE_KEYS:
                    taken = 0
                    await asyncio.sleep(0)
        for uid, cache in caches.items():
            await self._write_down(cache, counts[uid], at)

    async def _write_down(self, cache: InstanceCache, counts: dict[int, int], at: float) -> None:
        moves = not self._policy_of(cache).orders_by_write
        # A shared store gives way by itself, and is asked in fewer and larger calls.
        size = PAGE_KEYS if cache.index.is_shared else _SLICE_KEYS
        items = iter(counts.items())
        while page := dict(islice(items, size)):
            if moves:
                await self._tell_revisits(cache, page, at)
            await cache.index.touch(page, at, moves=moves)
            await asyncio.sleep(0)

    async def _tell_revisits(self, cache: InstanceCache, page: Mapping[int, int], at: float) -> None:
        """Tell how long ago some of the blocks were read before; to be asked before they are touched."""
        sampled = list(filter(_is_sampled, page))
        for access in await cache.index.accesses(sampled) if sampled else ():
            if access is not None and access.reads:
                self.observer.revisited(cache.instance, max(0.0, at - access.at))


def _is_sampled(key: int) -> bool:
    return (key * _SPREAD & _MASK) >> 32 & (_ONE_IN - 1) == 0


def _count(counts: dict[int, int], keys: Sequence[int], times: int) -> None:
    """Count the reads of a request, whose head is read last; a key stands where its last read does."""
    for key in reversed(keys):
        counts[key] = counts.pop(key, 0) + times
