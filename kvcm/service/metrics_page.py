"""Readings as text: Prometheus' own format or OpenMetrics, whichever the scraper asks for.

Written in slices, with time for requests between them: a thousand groups make tens of thousands of lines. Rejected: a
thread, which takes the interpreter from the event loop for 5 ms at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Final, Protocol

import structlog
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import KvcmError
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import StorageKey
from kvcm.model.storages import StorageConfig
from kvcm.reclaim.deletion_executor import Backlog, DeletionExecutor
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.needs import Reason
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.calls import CallRecorder
from kvcm.service.group_store_api import GroupStoreView
from kvcm.service.http_server import Page, PageRequest
from kvcm.service.metrics import Counts
from kvcm.service.usage_report import UsageView
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.prober import Prober
from kvcm.store.store import StoreHealth
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.metrics import METRICS, OTHER, BoundedLabels, Distribution, Histogram, Kind, Metric, Reading

__all__ = ["FamilyTable", "GroupNeeds", "ManagerState", "MetricsPage", "needed_readings", "written"]

_SLICE_SAMPLES: Final = 64  # a millisecond
_END: Final = b"# EOF\n"


class FamilyTable:
    """Families of prometheus-client, filled from readings; every metric is there, with or without series."""

    def __init__(self) -> None:
        self._families: dict[Metric, Any] = {metric: _family(metric) for metric in METRICS}

    def add(self, reading: Reading) -> None:
        """Add a series."""
        family, value = self._families[reading.metric], reading.value
        if isinstance(value, Distribution):
            buckets = list(zip(_bucket_labels(tuple(value.bounds)), value.counts, strict=True))
            family.add_metric(reading.labels, buckets, value.total)
        else:
            family.add_metric(reading.labels, value)

    def pop_all(self) -> Iterator[Family]:
        """Yield the families in the order of the catalogue, and let go of each: freeing all at once takes long."""
        for metric in list(self._families):
            yield self._families.pop(metric)


@cache
def _bucket_labels(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the label of each bucket; there are few kinds of histograms."""
    return (*map(floatToGoString, bounds), "+Inf")


def _family(metric: Metric) -> Family:
    arguments = (metric.name, metric.about)
    if metric.kind is Kind.COUNTER:
        return CounterMetricFamily(*arguments, labels=metric.labels)
    if metric.kind is Kind.GAUGE:
        return GaugeMetricFamily(*arguments, labels=metric.labels)
    return HistogramMetricFamily(*arguments, labels=metric.labels)


async def written(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Return the text of families and its content type.

    Args:
        families: what to write.
        accept: header of the request, "" for none.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is none
        encode, content_type = choose_encoder("")
    parts: list[bytes] = []
    is_open = False
    for family in families:
        for piece, is_first in _pieces(family):
            text: bytes = encode(_SingleFamilyCollector(piece))
            is_open = text.endswith(_END)
            parts.append(_body(text.removesuffix(_END), is_first=is_first))
            await asyncio.sleep(0)
    if is_open:
        parts.append(_END)
    return b"".join(parts), content_type


def _pieces(family: Family) -> Iterator[tuple[Family, bool]]:
    samples = family.samples
    for begin in range(0, max(1, len(samples)), _SLICE_SAMPLES):
        piece = Family(family.name, family.documentation, family.type, family.unit)
        piece.samples = samples[begin : begin + _SLICE_SAMPLES]
        yield piece, begin == 0


def _body(text: bytes, *, is_first: bool) -> bytes:
    """Leave out the lines of a family's name and type, but for its first piece."""
    while not is_first and text.startswith(b"# "):
        text = text.partition(b"\n")[2]
    return text


class _SingleFamilyCollector:
    """Stands for a registry of one family."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


# The state of the manager at the moment of a scrape: usage, limits, deletions, storages, leadership.
#
# State that managers share is read from the store in the background, one read at a time. A scrape waits for it a moment
# and then shows the last state, so that it is answered while the store is away. Sums over instances are made in slices.

_REFRESH_TIMEOUT_SECONDS: Final = 1.0  # scrapers give up after ten
_SLICE_INSTANCES: Final = 50
_TOTAL: Final = "total"
_PINS: Final = "pin"
_MODIFY: Final = "modify"  # nothing else takes locks
_log = structlog.get_logger("kvcm.service")


@dataclass(frozen=True, slots=True)
class ManagerState:
    """The parts of a manager that have metrics."""

    cache: CacheManager
    registry: Registry
    view: UsageView
    reclaimer: Reclaimer
    deletions: DeletionExecutor
    garbage: GarbageCollector
    scrubber: StorageScrubber
    storages: StorageDirectory
    prober: Prober
    leadership: Leadership
    store_kind: str
    store_times: Mapping[str, Histogram]
    store_health: Callable[[], StoreHealth]
    store_lost: Mapping[str, int]
    group_stores: GroupStoreView


@dataclass(slots=True)
class _Sums:
    """Over all instances, by group."""

    keys: Counter[str] = field(default_factory=Counter)
    used: defaultdict[str, Counter[StorageKey]] = field(default_factory=lambda: defaultdict(Counter))


class _StateMetrics:
    """Reads the state for scrapes.

    Args:
        state: of what.
        groups: bounds the names of groups that become labels.
    """

    def __init__(self, state: ManagerState, groups: BoundedLabels) -> None:
        self._state = state
        self._names = groups
        self._sums = _Sums()
        self._hearing: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Hear from the store, for a moment at most, and sum up what the instances use."""
        if self._hearing is None or self._hearing.done():
            self._hearing = asyncio.create_task(self._refresh_usage())
        await asyncio.wait([self._hearing], timeout=_REFRESH_TIMEOUT_SECONDS)
        sums = _Sums()
        for number, handle in enumerate(list(self._state.cache.indexes())):
            if number % _SLICE_INSTANCES == 0:
                await asyncio.sleep(0)
            group_name, index = handle.instance.instance_group_name, handle.meta_index
            sums.keys[group_name] += index.key_count
            sums.used[group_name].update(index.usage_bytes)
        self._sums = sums

    async def _refresh_usage(self) -> None:
        try:
            await self._state.view.refresh()
        except KvcmError as error:
            _log.info("usage_not_heard", reason=str(error))

    def readings(self) -> Iterator[Reading]:
        """Yield the state as of the last look."""
        yield from self._bounded(self._of_groups())
        yield from self._bounded(self._of_evictions())
        yield from self._bounded(self._of_mismatches())
        yield from self._of_index()
        yield from self._of_storages()
        yield from self._of_leadership()
        for kind, count in sorted({**self._state.garbage.found, **self._state.scrubber.found}.items()):
            yield Reading(catalog.ORPHANS, count, (kind,))

    def _bounded(self, readings: Iterable[tuple[Metric, float, tuple[str, ...]]]) -> Iterator[Reading]:
        """Bound the first label, which is a group; groups beyond the bound are summed up."""
        sums: dict[tuple[Metric, tuple[str, ...]], float] = {}
        for metric, value, (group_name, *others) in readings:
            labels = (self._names.label(group_name), *others)
            if labels[0] != OTHER:
                yield Reading(metric, value, labels)
            else:
                sums[metric, labels] = sums.get((metric, labels), 0) + value
        for (metric, labels), value in sums.items():
            yield Reading(metric, value, labels)

    def _of_groups(self) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
        configured = {group.name: group for group in self._state.registry.groups.all()}
        pinned, refused = self._state.view.pinned, self._state.cache.usage.rejections
        for name in sorted(configured.keys() | self._sums.keys.keys()):
            group, used = configured.get(name), self._sums.used.get(name, Counter())
            yield catalog.INDEX_KEYS, self._sums.keys[name], (name,)
            for tier, size in self._by_tier(group, used).items():
                yield catalog.GROUP_USED, size, (name, tier)
            for tier, size in _quotas(group).items():
                yield catalog.GROUP_QUOTA, size, (name, tier)
            yield catalog.PINNED, pinned.get(name, 0), (name, _PINS)
            yield catalog.WRITES_REFUSED, refused.get(name, 0), (name,)

    def _by_tier(self, group: InstanceGroup | None, used: Mapping[StorageKey, int]) -> dict[str, int]:
        """Return what a group uses by kind of storage, also of kinds that it may use and does not yet."""
        candidates = self._state.registry.storages.existing(group.storage_candidates) if group is not None else ()
        sizes: Counter[str] = Counter({config.storage_type.kind: 0 for config in candidates})
        for place, size in used.items():
            sizes[place.storage_type.kind] += size
        return {_TOTAL: sum(used.values()), **sizes}

    def _of_evictions(self) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
        stats, policies = self._state.reclaimer.stats, {}
        for group in self._state.registry.groups.all():
            policy = policies[group.name] = group.policy_of("").name
            for reason in Reason:
                labels = (group.name, policy, reason.value)
                yield catalog.EVICTED_KEYS, stats.evicted_keys[labels], labels
                yield catalog.EVICTED_BYTES, stats.evicted_bytes[labels], labels
        for labels in list(stats.evicted_keys):
            if policies.get(labels[0]) != labels[1]:  # of another policy, or a group that is gone
                yield catalog.EVICTED_KEYS, stats.evicted_keys[labels], labels
                yield catalog.EVICTED_BYTES, stats.evicted_bytes[labels], labels

    def _of_mismatches(self) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
        groups = self._state.registry.groups.all()
        known = {(group.name, storage): 0 for group in groups for storage in group.storage_candidates}
        for labels, count in {**known, **self._state.cache.missing.mismatches}.items():
            yield catalog.CHECKSUM_MISMATCH, count, labels

    def _of_index(self) -> Iterator[Reading]:
        cache = self._state.cache
        yield Reading(catalog.INDEX_BYTES, sum(sum(used.values()) for used in self._sums.used.values()))
        yield Reading(catalog.WRITE_SESSIONS_OPEN, cache.endings.open_count)
        yield Reading(catalog.INDEX_LOCK_WAIT, cache.open_caches.lock_waits.read(), (_MODIFY,))
        for op, times in self._state.store_times.items():
            yield Reading(catalog.STORE_OP, times.read(), (self._state.store_kind, op))
        yield Reading(catalog.STORE_BACKLOG, cache.accesses.pending_count)
        yield Reading(catalog.STORE_DROPPED, cache.accesses.dropped)
        store = self._state.store_health()
        yield Reading(catalog.STORE_UNSOUND, bool(store.closed), ("closed",))
        yield Reading(catalog.STORE_UNSOUND, bool(store.evicts), ("evicts",))
        for name, is_usable in self._state.group_stores.usable_stores().items():
            yield Reading(catalog.BLOCK_STORE_USABLE, is_usable, (name,))
        yield Reading(catalog.MISPLACED_INSTANCES, self._state.group_stores.misplaced_count)
        yield Reading(catalog.STORE_RESTORATIONS, store.restorations)
        yield Reading(catalog.STORE_LOSSES, store.losses)
        yield Reading(catalog.STORE_NEW_SERVERS, store.new_servers)
        yield Reading(catalog.STORE_EVICTED, store.evicted_keys)
        for what, lost in self._state.store_lost.items():
            yield Reading(catalog.STORE_LOST, lost, (what,))
        yield Reading(catalog.STORE_LOST, store.missing_blocks, ("blocks_without_bytes",))
        yield Reading(catalog.EVICTION_AGE, self._state.reclaimer.stats.ages.read())
        yield Reading(catalog.RECLAIM_ROUND, self._state.reclaimer.stats.rounds.read())
        for reason in Reason:
            yield Reading(catalog.RECLAIM_UNMET, self._state.reclaimer.stats.unmet[reason.value], (reason.value,))

    def _of_storages(self) -> Iterator[Reading]:
        used: Counter[str] = Counter()
        for places in self._sums.used.values():
            for place, size in places.items():
                used[place.storage] += size
        backlogs = self._state.deletions.backlogs()
        storages = self._state.registry.storages.all()
        configured = {config.global_unique_name: config for config in storages if not config.is_event_report}
        for name in sorted(configured.keys() | used.keys()):
            backlog = backlogs.get(name, Backlog())
            yield Reading(catalog.BACKEND_USED, used[name], (name,))
            yield Reading(catalog.RECLAIM_PENDING, backlog.waiting + backlog.executing, (name,))
            yield Reading(catalog.DELETE_FAILURES, backlog.failures, (name,))
            if name in configured:
                yield from self._of_storage(name, configured[name])

    def _of_storage(self, name: str, config: StorageConfig) -> Iterator[Reading]:
        health = self._state.storages.health(name)
        yield Reading(catalog.BACKEND_UP, health is not None and health.is_usable, (name,))
        yield Reading(catalog.BACKEND_FULL, health is not None and health.is_full, (name,))
        yield Reading(catalog.BACKEND_PROBE, self._state.prober.durations(name), (name,))
        space = health.space if health is not None else None
        if capacity := config.limit_bytes or (space.capacity_bytes if space is not None else 0):
            yield Reading(catalog.BACKEND_CAPACITY, capacity, (name,))

    def _of_leadership(self) -> Iterator[Reading]:
        leadership = self._state.leadership
        yield Reading(catalog.LEADER, leadership.is_leader)
        yield Reading(catalog.LEADER_TRANSITIONS, leadership.terms)
        yield Reading(catalog.LEASE_REMAINING, leadership.remaining_seconds)


def _quotas(group: InstanceGroup | None) -> dict[str, int]:
    """Return the limits of a group; one that was removed may use nothing."""
    if group is None:
        return {_TOTAL: 0}
    kinds = {quota.storage_type.kind: quota.capacity for quota in group.quota.quota_config}
    return {_TOTAL: group.quota.capacity, **kinds}


# `GET /metrics`: everything that is counted, for Prometheus and what reads its formats.

_SLICE_READINGS: Final = 32
Source = Callable[[], Iterable[Reading]]


class MetricsPage:
    """Answers scrapes, one at a time: another one in between waits for its turn.

    Args:
        calls: counters of calls.
        counts: other counters.
        state: what there is to look at.
        others: what else there is to read.
    """

    def __init__(self, calls: CallRecorder, counts: Counts, state: ManagerState, others: Sequence[Source] = ()) -> None:
        self._state = _StateMetrics(state, counts.groups)
        self._registry, self._counts = state.registry, counts
        self._sources: tuple[Source, ...] = (calls.readings, *others, counts.readings, self._state.readings)
        self._turn = asyncio.Lock()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    async def __call__(self, request: PageRequest) -> Page:
        """Answer a scrape."""
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        async with self._turn:
            for group in self._registry.groups.all():
                self._counts.cache.declare(group.name)
            await self._state.refresh()
            body, content_type = await written(await self._families(), accept)
        return Page(200, body, ((b"content-type", content_type.encode("latin-1")),))

    async def _families(self) -> Iterator[Family]:
        table = FamilyTable()
        for source in self._sources:
            for number, reading in enumerate(source()):
                table.add(reading)
                if number % _SLICE_READINGS == 0:
                    await asyncio.sleep(0)
        # Of the system, which is asked through files.
        return chain(table.pop_all(), await asyncio.to_thread(lambda: list(self._process.collect())))


# Series of the capacity that groups need, as estimated from lookups.


class GroupNeeds(Protocol):
    """Estimates what groups need."""

    parts: Sequence[float]

    def attainable_ratio(self, group_name: str) -> float:
        """Return which part of the blocks asked for an unlimited cache would find; 0 while that is not known."""

    def bytes_needed(self, group_name: str) -> Sequence[int]:
        """Return the bytes that give each of the parts of that; 0 while that is not known."""


def needed_readings(needed: GroupNeeds, names: BoundedLabels, group_names: Iterable[str]) -> Iterator[Reading]:
    """Yield the estimates of groups that have series of their own."""
    for name in group_names:
        if names.label(name) != OTHER:
            yield Reading(catalog.OPTIMIZER_ATTAINABLE, needed.attainable_ratio(name), (name,))
            for part, size in zip(needed.parts, needed.bytes_needed(name), strict=True):
                yield Reading(catalog.OPTIMIZER_BYTES_NEEDED, size, (name, f"{part:g}"))
