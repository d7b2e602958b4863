"""Reads the vitals of this manager from what it counts anyway: nothing of it is on the path of a request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvcm import __version__
from kvcm.cache.manager import CacheManager
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.nodes import Endpoint
from kvcm.model.vitals import METHODS, GroupTotals, Vitals
from kvcm.reclaim.evicted import ReclaimStats
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.leadership import Leadership
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.calls import Call
from kvcm.service.prometheus_counts import Counts

__all__ = ["VitalSigns"]

_METHODS = {
    "GetCacheLocation": "match",
    "GetCacheLocationLen": "match",
    "StartWriteCache": "start",
    "FinishWriteCache": "finish",
}


class VitalSigns:
    """How this manager is.

    Args:
        endpoint: where it is.
        clock: time source.
        phase: returns the stage of its life.
        calls: of engines.
        answered: what is counted of calls.
        counts: what is counted beside calls.
        cache: blocks.
        groups: as configured.
        stats: of evictions.
        leadership: who leads.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        phase: Callable[[], str],
        calls: Sequence[Call],
        answered: CallMetrics,
        counts: Counts,
        cache: CacheManager,
        groups: GroupRegistry,
        stats: ReclaimStats,
        leadership: Leadership,
    ) -> None:
        self.endpoint = endpoint
        self.started_at = clock.now()
        self._clock, self._phase = clock, phase
        self._calls, self._answered, self._counts = calls, answered, counts
        self._cache, self._groups, self._stats, self._leadership = cache, groups, stats, leadership
        self._matches = answered.durations(next(call for call in calls if call.name == "GetCacheLocation"))

    async def take(self) -> Vitals:
        """Return how it is now. Whoever leads asks the store what groups use."""
        is_leader = self._leadership.is_leader
        used_bytes = await self._used_bytes() if is_leader else {}
        requests, errors = self._requests()
        return Vitals(
            self.endpoint,
            __version__,
            self.started_at,
            self._clock.now(),
            self._phase(),
            is_leader,
            requests,
            errors,
            self._matches.bounds,
            self._matches.counts,
            self._totals(),
            self._counts.lag.take_peak_seconds(),
            self._cache.endings.open_count,
            used_bytes,
        )

    def _requests(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        requests, errors = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0)
        for call in self._calls:
            answered, failed = self._answered.answers(call.name)
            method = _METHODS.get(call.name, "other")
            requests[method] += answered
            errors[method] += failed
        return requests, errors

    def _totals(self) -> Mapping[str, GroupTotals]:
        name_of = self._counts.groups.of
        evicted: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        for (group, _, _), size in self._stats.evicted_bytes.items():
            evicted[name_of(group)] += size
        for group, count in self._cache.usage.refusals.items():
            refused[name_of(group)] += count
        keys = self._counts.cache.keys()
        return {
            name: GroupTotals(*keys.get(name, (0, 0)), evicted[name], refused[name])
            for name in keys.keys() | evicted.keys() | refused.keys()
        }

    async def _used_bytes(self) -> Mapping[str, Mapping[str, int]]:
        groups = self._groups.all()
        with suppress(KvcmError):  # then as last heard
            await self._cache.usage.hear_groups([group.name for group in groups])
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for group in groups:
            tiers = found[self._counts.groups.of(group.name)]
            for place, size in self._cache.group_usage_bytes(group.name).items():
                tiers[place.storage_type.kind] += size
        return found
