"""Metrics beside those of calls: lookups by group, write sessions by outcome, reuse of evicted blocks, loop lag."""

from __future__ import annotations

import asyncio
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvcm import __version__
from kvcm.cache.prefix_match import Match, MatchMode, MatchQuery, WriteEnd
from kvcm.model.instances import Instance
from kvcm.model.keys import NO_MASK
from kvcm.reclaim.reclaimer import EvictionRecord
from kvcm.service.admission import LoopDelay
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.metrics import AGES, KEYS, BoundedLabels, Histogram, Reading

__all__ = ["CacheMetrics", "Counts", "EvictionMetrics"]

_SESSION_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class _Count:
    """Keys, and the tokens in them."""

    __slots__ = ("keys", "tokens")

    def __init__(self) -> None:
        self.keys = self.tokens = 0

    def add(self, keys: int, block_size: int) -> None:
        self.keys += keys
        self.tokens += keys * max(0, block_size)


class _Lookups:
    """The counters of one group."""

    __slots__ = ("error", "filtered", "hit", "miss", "prefix", "revisits")

    def __init__(self) -> None:
        self.hit, self.miss, self.filtered, self.error = _Count(), _Count(), _Count(), _Count()
        self.prefix = Histogram(KEYS)
        self.revisits = Histogram(AGES)


class CacheMetrics:
    """A `CacheObserver` that counts; a microsecond or two per lookup.

    Args:
        groups: bounds the names of groups that become labels.
        on_miss: called with the instance and the key at which a prefix match ended.
    """

    def __init__(
        self, groups: BoundedLabels, on_miss: Callable[[str, int], None] = lambda _instance_id, _key: None
    ) -> None:
        self._on_miss = on_miss
        self._names = groups
        self._groups: dict[str, _Lookups] = {}
        self._modes = [0] * (max(MatchMode) + 1)  # by number: an enum takes long to hash
        self._ends = dict.fromkeys(WriteEnd, 0)
        self._session_seconds = Histogram(_SESSION_SECONDS)
        self._masked_keys = 0

    def declare(self, group_name: str) -> None:
        """Make the series of a group exist before its first lookup."""
        self._of(group_name)

    def _of(self, group_name: str) -> _Lookups:
        lookups = self._groups.get(group_name)
        if lookups is None:
            name = self._names.label(group_name)
            lookups = self._groups.get(name)
            if lookups is None:
                lookups = self._groups[name] = _Lookups()
        return lookups

    def on_lookup(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        """Count a lookup."""
        group_name = instance.instance_group_name
        lookups = self._groups.get(group_name) or self._of(group_name)
        asked, hit = len(query.keys), len(found.keys)
        filtered = 0 if query.mask is NO_MASK else _masked(query)
        tokens = max(0, instance.block_size)
        self._modes[query.mode] += 1
        lookups.hit.keys += hit
        lookups.hit.tokens += hit * tokens
        missed = asked - filtered - hit
        lookups.miss.keys += missed
        lookups.miss.tokens += missed * tokens
        if filtered:
            lookups.filtered.add(filtered, instance.block_size)
        if query.mode is MatchMode.PREFIX_MATCH or query.mode is MatchMode.PREFIX_MATCH_WITH_MAMBA:
            lookups.prefix.observe(hit)
            if filtered + hit < asked and query.mask.flags is None:
                self._on_miss(instance.instance_id, query.keys[filtered + hit])

    def on_lookup_failed(self, instance: Instance, query: MatchQuery) -> None:
        """Count a lookup that could not be answered."""
        lookups = self._of(instance.instance_group_name)
        self._modes[query.mode] += 1
        lookups.error.add(len(query.keys), instance.block_size)

    def on_revisits(self, instance: Instance, seconds: float) -> None:
        """Count a read of a block that was read before."""
        self._of(instance.instance_group_name).revisits.observe(seconds)

    def on_write_started(self, masked_keys: int) -> None:
        """Count keys that need not be written."""
        self._masked_keys += masked_keys

    def on_write_ended(self, end: WriteEnd, seconds: float | None) -> None:
        """Count a session."""
        self._ends[end] += 1
        if seconds is not None:
            self._session_seconds.observe(seconds)

    def keys(self) -> Mapping[str, tuple[int, int]]:
        """Return the block keys of lookups by group: those handed out, and those that were not there."""
        return {name: (each.hit.keys, each.miss.keys) for name, each in self._groups.items()}

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics."""
        for name, each in list(self._groups.items()):
            results = {"hit": each.hit, "miss": each.miss, "filtered": each.filtered, "error": each.error}
            for result, count in results.items():
                yield Reading(catalog.LOOKUP_KEYS, count.keys, (name, result))
                yield Reading(catalog.LOOKUP_TOKENS, count.tokens, (name, result))
            yield Reading(catalog.LOOKUP_PREFIX_BLOCKS, each.prefix.read(), (name,))
            yield Reading(catalog.REVISIT_INTERVAL, each.revisits.read(), (name,))
        for mode in MatchMode:
            yield Reading(catalog.LOOKUP_MODE, self._modes[mode], (mode.name.lower(),))
        for end, sessions in self._ends.items():
            yield Reading(catalog.WRITE_SESSIONS, sessions, (end.value,))
        yield Reading(catalog.WRITE_SESSION_SECONDS, self._session_seconds.read())
        yield Reading(catalog.WRITE_MASKED_KEYS, self._masked_keys)


def _masked(query: MatchQuery) -> int:
    mask, count = query.mask, len(query.keys)
    if mask.offset is not None:
        return min(mask.offset, count) if mask.offset >= 0 else count
    return sum(mask.flags[:count]) if mask.flags is not None else 0


# Evicted blocks that are read again: those that should have stayed.
#
# One evicted block in `_ONE_IN` is remembered, and the latest `_MAX_TRACKED` of those: some megabytes, however many
# blocks there are. Only the block at which a prefix match ends is looked up: one access to a dict per lookup.

_ONE_IN: Final = 8  # a power of two
_MAX_TRACKED: Final = 32_768
_SPREAD: Final = 0x9E3779B97F4A7C15  # keys need not be well mixed
_MASK: Final = (1 << 64) - 1


class EvictionMetrics:
    """Measures the time from evictions to misses of the same block.

    Args:
        now: seconds, never running backwards.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._gone: dict[tuple[str, int], float] = {}  # the oldest first
        self._gaps = Histogram(AGES)

    def on_evicted(self, evicted: EvictionRecord) -> None:
        """Remember evicted blocks."""
        instance_id, now, gone = evicted.instance.instance_id, self._now(), self._gone
        for key in evicted.keys:
            if (key * _SPREAD & _MASK) >> 32 & (_ONE_IN - 1) == 0:
                gone.pop((instance_id, key), None)
                gone[instance_id, key] = now
        while len(gone) > _MAX_TRACKED:
            del gone[next(iter(gone))]

    def on_missed(self, instance_id: str, key: int) -> None:
        """A prefix match ended in front of a block."""
        at = self._gone.pop((instance_id, key), None)
        if at is not None:
            self._gaps.observe(self._now() - at)

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics."""
        yield Reading(catalog.EVICT_REUSE_GAP, self._gaps.read())


# The lag of the event loop, and all of these metrics together.

_LAG_SECONDS: Final = 0.1
_BLOCKED_AFTER_LAGS: Final = 3


class _LoopLag:
    """Measures the delay of wakeups in the event loop."""

    def __init__(self) -> None:
        self._histogram = Histogram()
        self._latest_seconds = deque([0.0], maxlen=_BLOCKED_AFTER_LAGS)
        self._peak_seconds = 0.0
        self.delay = LoopDelay()

    async def run(self) -> None:
        """Measure for good."""
        while True:
            due = time.perf_counter() + _LAG_SECONDS  # the loop's own clock has milliseconds
            await asyncio.sleep(_LAG_SECONDS)
            late_seconds = max(0.0, time.perf_counter() - due)
            self._histogram.observe(late_seconds)
            self._latest_seconds.append(late_seconds)
            self.delay.seconds = min(self._latest_seconds)
            self._peak_seconds = max(self._peak_seconds, late_seconds)

    def pop_peak_seconds(self) -> float:
        """Return how late it was at most since this was asked before."""
        peak, self._peak_seconds = self._peak_seconds, 0.0
        return peak

    def blocked_seconds(self) -> float:
        """Return by how much every latest wakeup was late. One large request delays only one."""
        return self.delay.seconds

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics."""
        yield Reading(catalog.LOOP_LAG, self._histogram.read())


class Counts:
    """Counters of one manager.

    Attributes:
        groups: bounds the names of groups that become labels.
        cache: observer of lookups and write sessions.
        evictions: observer of evictions.
        lag: of the event loop; to be run.
    """

    def __init__(self) -> None:
        self.groups = BoundedLabels()
        self.evictions = EvictionMetrics()
        self.cache = CacheMetrics(self.groups, self.evictions.on_missed)
        self.lag = _LoopLag()

    def readings(self) -> Iterator[Reading]:
        """Yield all metrics."""
        yield from self.cache.readings()
        yield from self.evictions.readings()
        yield from self.lag.readings()
        yield Reading(catalog.BUILD_INFO, 1, (__version__, platform.python_version()))
