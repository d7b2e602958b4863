"""Vitals of the managers of a deployment: read, exchanged through the store, and kept as a history."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvcm import __version__
from kvcm.cache.manager import CacheManager
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.model.nodes import METHODS, Endpoint, GroupTotals, Vitals
from kvcm.reclaim.reclaimer import ReclaimStats
from kvcm.registry.assignment import Assignment
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.leadership import Leadership, VitalsTable
from kvcm.service.admission import Phase
from kvcm.service.calls import Call, CallRecorder
from kvcm.service.metrics import Counts
from kvcm.service.vitals_history import History, HistoryRange, Rates

__all__ = ["ManagerView", "VitalsReader", "VitalsWatch"]

# Reads the vitals of this manager from what it counts anyway: nothing of it is on the path of a request.

_METHODS = {
    "GetCacheLocation": "match",
    "GetCacheLocationLen": "match",
    "StartWriteCache": "start",
    "FinishWriteCache": "finish",
}


class VitalsReader:
    """How this manager is.

    Args:
        endpoint: where it is.
        clock: time source.
        phase: returns the stage of its life.
        calls: of engines.
        answered: counters of calls.
        counts: other counters.
        cache: blocks.
        groups: as configured.
        stats: of evictions.
        leadership: of this manager.
        block_stores: names of its further metadata stores, in order.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        phase: Callable[[], str],
        calls: Sequence[Call],
        answered: CallRecorder,
        counts: Counts,
        cache: CacheManager,
        groups: GroupRegistry,
        stats: ReclaimStats,
        leadership: Leadership,
        block_stores: Sequence[str] = (),
    ) -> None:
        self.endpoint = endpoint
        self._block_stores = tuple(block_stores)
        self.started_at = clock.now()
        self._clock, self._phase = clock, phase
        self._calls, self._answered, self._counts = calls, answered, counts
        self._cache, self._groups, self._stats, self._leadership = cache, groups, stats, leadership
        self._matches = answered.durations(next(call for call in calls if call.name == "GetCacheLocation"))

    async def read(self) -> Vitals:
        """Return the present vitals. The leader reads the usage of groups from the store."""
        is_leader = self._leadership.is_leader
        used_bytes = await self._used_bytes() if is_leader else {}
        requests, errors = self._requests()
        return Vitals(
            endpoint=self.endpoint,
            version=__version__,
            started_at=self.started_at,
            at=self._clock.now(),
            phase=self._phase(),
            is_leader=is_leader,
            requests=requests,
            errors=errors,
            match_bounds=self._matches.bounds,
            match_counts=self._matches.counts,
            groups=self._totals(),
            loop_lag_seconds=self._counts.lag.pop_peak_seconds(),
            open_sessions=self._cache.endings.open_count,
            used_bytes=used_bytes,
            block_stores=self._block_stores,
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
        name_of = self._counts.groups.label
        evicted: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        for (group, _, _), size in self._stats.evicted_bytes.items():
            evicted[name_of(group)] += size
        for group, count in self._cache.usage.rejections.items():
            refused[name_of(group)] += count
        keys = self._counts.cache.keys()
        return {
            name: GroupTotals(*keys.get(name, (0, 0)), evicted[name], refused[name])
            for name in keys.keys() | evicted.keys() | refused.keys()
        }

    async def _used_bytes(self) -> Mapping[str, Mapping[str, int]]:
        groups = self._groups.all()
        with suppress(KvcmError):  # then as last read
            await self._cache.usage.refresh_groups([group.name for group in groups])
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for group in groups:
            tiers = found[self._counts.groups.label(group.name)]
            for place, size in self._cache.group_usage_bytes(group.name).items():
                tiers[place.storage_type.kind] += size
        return found


# The background task that exchanges vitals with the other managers and keeps their history.
#
# Every manager reads all vitals, so that each of them answers for the whole deployment. While the store is away, it
# goes on with its own.

_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ManagerView:
    """A manager as this one knows it.

    Attributes:
        endpoint: where it is.
        seen_at: unix seconds when it last said that it lives.
        is_leader: whether it runs the background duties.
        is_self: whether it is the one that answers.
        vitals: None of managers that publish none: those of earlier releases, and those that died a moment ago.
        rates: None where they are not known yet.
        instances: how many are assigned to it; None if that is not counted.
    """

    endpoint: Endpoint
    seen_at: float
    is_leader: bool
    is_self: bool
    vitals: Vitals | None
    rates: Rates | None
    instances: int | None


class VitalsWatch:
    """Vitals of all managers, and their history.

    Args:
        signs: of this manager.
        board: shared by all managers.
        leadership: the leader and the addresses of managers.
        groups: as configured.
        clock: time source.
        assignment: is updated after each exchange; None while only the leader serves.
    """

    def __init__(
        self,
        signs: VitalsReader,
        board: VitalsTable,
        leadership: Leadership,
        groups: GroupRegistry,
        clock: Clock,
        assignment: Assignment | None = None,
    ) -> None:
        self._signs, self._board, self._leadership = signs, board, leadership
        self._groups, self._clock, self._assignment = groups, clock, assignment
        self._nodes: Mapping[str, tuple[Endpoint, float]] = {}
        self._vitals: Mapping[str, Vitals] = {}
        self._wake = asyncio.Event()
        self._history = History(signs.started_at)

    async def run(self) -> None:
        """Exchange vitals for good."""
        while True:
            self._wake.clear()
            await self.exchange()
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_SECONDS):
                    await self._wake.wait()

    async def exchange(self) -> None:
        """Exchange vitals once."""
        own = await self._signs.read()
        vitals: Mapping[str, Vitals] = {}
        with suppress(KvcmError):
            await self._board.publish(own)
            vitals = await self._board.all()
            self._nodes = {each.node_id: (each, seen_at) for each, seen_at in await self._leadership.nodes()}
        self._vitals = {**vitals, own.endpoint.node_id: own}
        if vitals and self._assignment is not None:  # else the store is away: the managers of before serve, too
            self._assignment.set_managers(_serving(self._vitals.values()))
        quotas = {group.name: group.quota.capacity for group in self._groups.all()}
        self._history.add(self._clock.now(), self._vitals, quotas)

    async def publish_now(self) -> None:
        """Publish at once: the phase has changed."""
        self._wake.set()

    async def withdraw(self) -> None:
        """Let the others forget this manager."""
        with suppress(KvcmError):
            await self._board.withdraw(self._signs.endpoint.node_id)

    async def range(self, seconds: int, group: str = "", groups: Collection[str] | None = None) -> HistoryRange:
        """Return the last seconds of the history; see `History.span`."""
        return await self._history.range(self._clock.now(), seconds, group, groups)

    def has_group(self, name: str) -> bool:
        """Return whether there is a group of that name."""
        return self._groups.find(name) is not None

    def managers(self) -> list[ManagerView]:
        """Return every manager that lives, by node id."""
        vitals, own = self._vitals, self._signs.endpoint
        nodes = {own.node_id: (own, self._signs.started_at), **self._nodes}
        nodes |= {name: (each.endpoint, each.at) for name, each in vitals.items()}
        return [self._view(*nodes[name], vitals.get(name)) for name in sorted(nodes)]

    def _view(self, endpoint: Endpoint, seen_at: float, vitals: Vitals | None) -> ManagerView:
        name = endpoint.node_id
        is_leader, is_self = name == self._leadership.leader_node_id, name == self._signs.endpoint.node_id
        rates = self._history.rates.get(name) if vitals is not None else None
        counts = self._assignment.counts() if self._assignment is not None else None
        return ManagerView(
            endpoint=endpoint,
            seen_at=seen_at,
            is_leader=is_leader,
            is_self=is_self,
            vitals=vitals,
            rates=rates,
            instances=None if counts is None else counts.get(name, 0),
        )


def _serving(vitals: Iterable[Vitals]) -> list[Endpoint]:
    """Return the managers that serve. One that was killed is among them until its vitals end: clients leave it at the
    first call that fails."""
    return [each.endpoint for each in vitals if each.phase == Phase.SERVING.value]
