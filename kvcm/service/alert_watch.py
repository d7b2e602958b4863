"""Evaluation of alerts: gathers the inputs, and remembers since when each alert is firing."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import KvcmError
from kvcm.model.principals import call_context
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.residency.residency import ReporterState, Residency
from kvcm.service.alerts import (
    RECENT_SECONDS,
    Alert,
    AlertInputs,
    SubjectKind,
    cluster_alerts,
    group_alerts,
    storage_alerts,
)
from kvcm.service.group_store_api import GroupStoreView
from kvcm.service.storage_api import DrainView
from kvcm.service.usage_report import UsageView
from kvcm.service.usage_values import DrainStatus, StorageStatus
from kvcm.service.vitals import ManagerView
from kvcm.storage.directory import StorageDirectory
from kvcm.store.store import StoreHealth

__all__ = ["AlertSources", "AlertWatch", "RecentGrowth"]

Key = TypeVar("Key", bound=Hashable)


class RecentGrowth(Generic[Key]):
    """Remembers counters as they were over some time.

    Args:
        seconds: that count as of late; the true time is up to one interval between notes longer.
        are_known: whether a counter that was not there yet stood at 0 then; else it is counted from when it was first
            noted.
    """

    def __init__(self, seconds: float, *, are_known: bool = True) -> None:
        self._seconds = seconds
        self._are_known = are_known
        self._noted: deque[tuple[float, dict[Key, int]]] = deque()

    def record(self, counts: Mapping[Key, int], now: float) -> None:
        """Remember the counters, and drop older records than are needed."""
        self._noted.append((now, dict(counts)))
        while len(self._noted) > 1 and self._noted[1][0] <= now - self._seconds:
            self._noted.popleft()

    def growth(self, counts: Mapping[Key, int]) -> Counter[Key]:
        """Return by how much each counter is above what it was; without those that did not grow."""
        return +Counter({key: count - self._count_before(key, count) for key, count in counts.items()})

    def _count_before(self, key: Key, count: int) -> int:
        if self._are_known:
            return self._noted[0][1].get(key, 0) if self._noted else 0
        return next((counts[key] for _, counts in self._noted if key in counts), count)


# Evaluates the alerts of a manager, and remembers since when each is firing.
#
# Every ten seconds it evaluates the state in memory, so that it knows the beginning without any request; over a shared
# store, which other managers change, it reads the store now and then. A request reads it, too, at most once in two
# seconds for all requests. An alert with a delay must have been firing at every evaluation in it.

_CHECK_INTERVAL_SECONDS = 10.0
_STORE_CACHE_SECONDS = 2.0
_SHARED_STATE_SECONDS = 30.0  # changes of other managers are read so often at least
_OVERDUE_SECONDS = 15.0  # the leader ends sessions within a second or two
_DELAY_SECONDS = {
    "KvcmReclaimStuck": 30.0,
    "KvcmGroupNearlyFull": 30.0,
    "KvcmNoLeader": 5.0,
    "KvcmBlockMoveFails": 300.0,  # a store may be away for a moment
    "KvcmSeveralLeaders": 20.0,  # vitals are some seconds old: in a failover they may name both
}


AlertKey = tuple[str, str, str]
"""As `Alert.key`."""


@dataclass(frozen=True, slots=True)
class AlertSources:
    """The inputs of alerts.

    Attributes:
        lag_seconds: by which the event loop is late all the time.
        is_shared: whether other managers work on the store.
        store_health: faults of the store beside that.
        group_stores: metadata stores of groups, None where there is one.
        shortage: returns why the store refuses changes for lack of space, "" while it does not.
        residency: reports of engines to this manager, None without any.
    """

    cache: CacheManager
    registry: Registry
    view: UsageView
    storages: StorageDirectory
    deletions: DeletionExecutor
    drains: DrainView
    leadership: Leadership
    lag_seconds: Callable[[], float]
    is_shared: bool
    store_health: Callable[[], StoreHealth] = StoreHealth
    shortage: Callable[[], str] = str
    group_stores: GroupStoreView | None = None
    residency: Residency | None = None


@dataclass(frozen=True, slots=True)
class _StoreState:
    """The state of the store, and when it was read."""

    at: float = 0.0
    trouble: str = ""
    drains: Sequence[DrainStatus] = ()
    writing: Mapping[str, int] = field(default_factory=dict)
    overdue: int = 0


class AlertWatch:
    """Evaluates alerts.

    Args:
        sources: inputs.
        now: unix seconds.

    Attributes:
        certificates: their expiry, unix seconds, by purpose; none unless set.
        managers: all managers; none unless set.
    """

    def __init__(self, sources: AlertSources, now: Callable[[], float]) -> None:
        self.certificates: Callable[[], Mapping[str, float]] = dict
        self.managers: Callable[[], Sequence[ManagerView]] = list
        self._sources = sources
        self._now = now
        self._refused: RecentGrowth[str] = RecentGrowth(RECENT_SECONDS)
        self._refused_elsewhere: RecentGrowth[tuple[str, str]] = RecentGrowth(RECENT_SECONDS, are_known=False)
        self._dropped: RecentGrowth[str] = RecentGrowth(RECENT_SECONDS)
        self._mismatches: RecentGrowth[tuple[str, str]] = RecentGrowth(RECENT_SECONDS)
        self._since: dict[AlertKey, float] = {}
        self._shared = _StoreState()
        self._asking: asyncio.Task[_StoreState] | None = None
        self._record_counts()

    async def run(self) -> None:
        """Look now and then, for good."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Record counters and firing alerts."""
        self._record_counts()
        if self._sources.is_shared and self._now() - self._shared.at >= _SHARED_STATE_SECONDS:
            self._shared = await self._store_state()
        self._update_first_seen(_evaluate(await self._inputs(self._shared)))

    async def alerts(self, group: str = "") -> list[Alert]:
        """Return the alerts that the principal may see: the worst first, then by name and subject.

        Args:
            group: only what concerns this group; empty for everything.

        Raises:
            InvalidArgumentError: there is no such group.
        """
        wanted = self._subjects_of(group) if group else None
        self._shared = await self._store_state()
        facts = await self._inputs(self._shared)
        if call_context.get().principal.has_all_groups:
            found = self._update_first_seen(_evaluate(facts))
        else:
            found = self._persistent(group_alerts(facts))
        shown = [each for each in found if wanted is None or (each.subject_kind, each.subject_name) in wanted]
        return sorted(shown, key=lambda alert: (alert.severity, *alert.key))

    def _subjects_of(self, name: str) -> set[tuple[str, str]]:
        candidates = self._sources.registry.groups.get(name).storage_candidates
        return {(SubjectKind.GROUP, name), *((SubjectKind.STORAGE, storage) for storage in candidates)}

    async def _store_state(self) -> _StoreState:
        if self._asking is None or self._asking.done():
            if self._now() - self._shared.at < _STORE_CACHE_SECONDS:
                return self._shared
            self._asking = asyncio.create_task(self._load_store_state())
        return await asyncio.shield(self._asking)

    async def _load_store_state(self) -> _StoreState:
        sources, now = self._sources, self._now()
        try:
            await sources.view.refresh()
            overdue = await sources.cache.endings.due_count(_OVERDUE_SECONDS)
            writing: Counter[str] = Counter()
            for session in await sources.cache.open_sessions.find_all():
                writing[session.instance_group] += session.bytes
            return _StoreState(
                at=now, trouble="", drains=await sources.drains.list_drains(), writing=writing, overdue=overdue
            )
        except KvcmError as error:
            return replace(self._shared, at=now, trouble=str(error))

    async def _inputs(self, shared: _StoreState) -> AlertInputs:
        sources = self._sources
        configured = sources.registry.storages.all()
        leadership, stores = sources.leadership, sources.group_stores
        return AlertInputs(
            now=self._now(),
            usage=await sources.view.last(),
            groups={group.name: group for group in sources.registry.groups.all()},
            types={each.global_unique_name: each.storage_type for each in configured},
            storages={
                each.global_unique_name: StorageStatus.of(each, sources.storages.health(each.global_unique_name))
                for each in configured
            },
            backlogs=sources.deletions.backlogs(),
            deleting=self._deleting(),
            writing=shared.writing,
            refused=self._recent_refusals(),
            mismatches=self._mismatches.growth(sources.cache.missing.mismatches),
            drains=shared.drains,
            unverified=sources.storages.unverified,
            node_id=leadership.node_id,
            leader=leadership.leader_node_id,
            leaders=[each.endpoint.node_id for each in self.managers() if each.vitals and each.vitals.is_leader],
            overdue_sessions=shared.overdue,
            certificates=self.certificates(),
            lag_seconds=sources.lag_seconds(),
            store_trouble=shared.trouble or sources.shortage(),
            store_health=sources.store_health(),
            block_stores=stores.troubles() if stores is not None else {},
            failing_moves=stores.failing_moves() if stores is not None else (),
            dropped_accesses=self._dropped.growth({"": sources.cache.accesses.dropped})[""],
            quiet_engines=_quiet_engines(sources.residency) if sources.residency is not None else {},
        )

    def _deleting(self) -> Mapping[str, Mapping[str, int]]:
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for handle in self._sources.cache.indexes():
            for place, size in handle.meta_index.deleting_bytes.items():
                found[handle.instance.instance_group_name][place.storage] += size
        return {group: +sizes for group, sizes in found.items()}

    def _record_counts(self) -> None:
        cache, now = self._sources.cache, self._now()
        self._refused.record(cache.usage.rejections, now)
        self._refused_elsewhere.record(self._refused_by_other_managers(), now)
        self._dropped.record({"": cache.accesses.dropped}, now)
        self._mismatches.record(cache.missing.mismatches, now)

    def _refused_by_other_managers(self) -> Mapping[tuple[str, str], int]:
        """Return how many writes the other managers refused, by manager and group."""
        return {
            (each.endpoint.node_id, group): totals.refused_writes
            for each in self.managers()
            if each.vitals is not None and not each.is_self
            for group, totals in each.vitals.groups.items()
        }

    def _recent_refusals(self) -> Mapping[str, int]:
        refused = self._refused.growth(self._sources.cache.usage.rejections)
        for (_, group), count in self._refused_elsewhere.growth(self._refused_by_other_managers()).items():
            refused[group] += count
        return refused

    def _update_first_seen(self, found: Sequence[Alert]) -> list[Alert]:
        """Note since when each of these is there, and forget the others: these are all that there are."""
        keys, now = {alert.key for alert in found}, self._now()
        self._since = {key: self._since.get(key, now) for key in keys}
        return self._persistent(found)

    def _persistent(self, found: Iterable[Alert]) -> list[Alert]:
        """Return the alerts that last longer than their delay, each with its beginning."""
        now = self._now()
        dated = [replace(alert, since_ms=int(self._since.get(alert.key, now) * 1000)) for alert in found]
        return [each for each in dated if now - each.since_ms / 1000 >= _DELAY_SECONDS.get(each.name, 0.0)]


def _evaluate(facts: AlertInputs) -> list[Alert]:
    return [*group_alerts(facts), *storage_alerts(facts), *cluster_alerts(facts)]


def _quiet_engines(residency: Residency) -> Mapping[str, Sequence[str]]:
    """Return the addresses of engines of which a rank is quiet, by instance."""
    found = {}
    for each in residency.instances():
        if ReporterState.QUIET in each.states():  # the list of reporters counts the blocks of each
            quiet = (status.engine for status in each.reporters() if status.state is ReporterState.QUIET)
            found[each.instance.instance_id] = list(dict.fromkeys(engine.address for engine in quiet))
    return found
