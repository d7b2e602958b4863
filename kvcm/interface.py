"""What a manager serves: its calls by plane, wired to the rooms that answer them, and who is told of each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from kvcm import __version__
from kvcm.cache.observer import WithReader
from kvcm.config import Settings
from kvcm.model.clock import Clock
from kvcm.model.nodes import Endpoint
from kvcm.optimizer.live.bytes_needed import BytesNeeded
from kvcm.registry.vitals import VitalsBoard
from kvcm.reload import Reloader
from kvcm.rooms import Rooms
from kvcm.service.access import Access, KeyedAccess, OpenAccess
from kvcm.service.access_api import AccessApi
from kvcm.service.access_log import AccessLog
from kvcm.service.access_metrics import AccessMetrics
from kvcm.service.admin_api import AdminApi
from kvcm.service.admission import REASONS, AdmissionSettings, GuardedAdmission
from kvcm.service.audit_calls import AuditCalls
from kvcm.service.bodies import BodyReader
from kvcm.service.bytes_needed_series import needed_readings
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.call_schema import OPENAPI_PATH, CallsPage
from kvcm.service.calls import Call, Caller, CallObserver
from kvcm.service.capacity_api import CapacityApi
from kvcm.service.capacity_series import CapacitySeries
from kvcm.service.capacity_view import CapacityView
from kvcm.service.config_api import ConfigApi
from kvcm.service.debug_api import DebugApi
from kvcm.service.drain_view import DrainView
from kvcm.service.faults import Faults
from kvcm.service.gate import Phase
from kvcm.service.http_app import Resources
from kvcm.service.http_pages import PageRoute
from kvcm.service.insight_api import InsightApi
from kvcm.service.lanes import Lane
from kvcm.service.limits import RequestLimits
from kvcm.service.line_streams import LineStream
from kvcm.service.meta_api import MetaApi
from kvcm.service.pin_api import PinApi
from kvcm.service.pool_api import PoolApi
from kvcm.service.prometheus_page import MetricsPage
from kvcm.service.prometheus_state import ManagerState
from kvcm.service.request_context import RequestContext
from kvcm.service.request_sizes import RequestSizes
from kvcm.service.rest.late import LateResources
from kvcm.service.storage_api import StorageApi
from kvcm.service.tls import ServerTls, certificate_ends, certificate_readings
from kvcm.service.vitals.gather import VitalSigns
from kvcm.service.vitals.watch import VitalsWatch
from kvcm.storage.prober import Prober
from kvcm.store.memory import MemoryStore
from kvcm.telemetry.logs import LEVELS, set_format, set_level
from kvcm.telemetry.metrics import ApiMetrics
from kvcm.telemetry.metrics_values import Reading
from kvcm.telemetry.recent_accesses import RecentAccesses
from kvcm.telemetry.tracing import SpanExport

__all__ = ["Interface", "Place"]


class Place(NamedTuple):
    """Where and when a manager serves.

    Attributes:
        endpoint: the ports that are really bound.
        clock: time source.
        phase: returns the stage of its life.
    """

    endpoint: Endpoint
    clock: Clock
    phase: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Interface:
    """What is served.

    Attributes:
        data: calls of engines.
        admin: calls of operators.
        caller: runs them.
        bodies: reads requests.
        streams: what GET of a path of the admin port begins to listen to.
        vitals: how the managers are.
        pages: what GET of a path of the admin port answers, beside probes.
        debug: calls that make others fail; none unless they are switched on.
        data_pages: what GET of a path of the data port answers, beside probes.
        resources: answers what is below /v1 of the admin port.
        console: answers browsers on the admin port.
    """

    data: list[Call]
    admin: list[Call]
    caller: Caller
    bodies: BodyReader
    streams: Mapping[str, Callable[[], LineStream]]
    vitals: VitalsWatch
    pages: Mapping[str, PageRoute] = field(default_factory=dict)
    debug: list[Call] = field(default_factory=list)
    data_pages: Mapping[str, PageRoute] = field(default_factory=dict)
    resources: Resources | None = None
    console: Resources | None = None

    @classmethod
    def of(
        cls,
        rooms: Rooms,
        settings: Settings,
        reloader: Reloader,
        place: Place,
        spans: SpanExport | None = None,
        tls: ServerTls | None = None,
    ) -> Interface:
        """Wire the calls to the rooms, and what can be changed at runtime to its settings."""
        limits = RequestLimits(settings.max_keys_per_request, settings.max_tokens_per_request, settings.max_body_bytes)
        metrics = ApiMetrics()
        view, needed = rooms.view, BytesNeeded(settings.sampled_keys)
        refresh = rooms.registry.refresh if rooms.metadata.store.is_shared else _nothing_new
        access_log = AccessLog(Random().random)  # noqa: S311 - a sample, no secret
        reading = Lane(time.monotonic, 1, settings.queued_long_requests, settings.max_queue_ms / 1000)
        counted = CallMetrics(metrics, [Phase.CLOSED.value, *REASONS, "unauthenticated", "forbidden"])
        admission = GuardedAdmission(_admission(settings), lambda: limits.max_keys, rooms.counts.lag.standing_seconds)
        access_log.set(settings.access_log_sample, settings.slow_request_ms / 1000)
        audited, tracing = AuditCalls(rooms.audit), _tracing(settings, reloader, spans)
        observers: list[CallObserver] = [counted, access_log, audited, *tracing, RequestContext()]
        access = _access(rooms, settings)
        check_sizes = RequestSizes(limits).check
        caller = Caller(
            *(observers, rooms.refuse_unless_leading, rooms.labels, refresh, admission, check_sizes, access),
            wants_trace_parents=spans is not None,
        )
        recent = RecentAccesses(settings.recent_keys)
        data, admin = _data_calls(rooms, limits, recent), _admin_calls(rooms, limits, metrics, view)
        admin += ConfigApi(reloader.reload).calls() + _insight(rooms, limits, needed).calls()
        admin += AccessApi(rooms.registry, is_required=settings.is_auth_required).calls()
        faults = Faults()
        debug = DebugApi(faults).calls() if settings.enable_debug_service else []
        data = faults.breakable(data) if debug else data
        reloader.follow(_Adjustable(limits, admission, reading, access_log, rooms.prober).apply)
        for call in (*data, *admin):
            counted.declare(call)
        others = (AccessMetrics(access).readings, partial(certificate_readings, tls), _estimates(rooms, needed))
        rooms.alerts.certificates = partial(certificate_ends, tls)
        metrics_page = MetricsPage(counted, rooms.counts, _state(rooms, view), others)
        pages: dict[str, PageRoute] = {"/metrics": metrics_page, OPENAPI_PATH: CallsPage(admin)}
        streams, watch = {"/api/events": rooms.events.subscribe}, _vitals(rooms, place, data, counted)
        rooms.alerts.managers = watch.managers
        resources = _resources([*data, *admin], caller, recent, watch)
        return cls(
            *(data, admin, caller, BodyReader(limits, reading), streams, watch, pages, debug),
            data_pages={OPENAPI_PATH: CallsPage(data)},
            resources=resources,
            console=_console(resources, caller),
        )


def _access(rooms: Rooms, settings: Settings) -> Access:
    if not settings.is_auth_required:
        return OpenAccess()
    return KeyedAccess(rooms.registry.keys, rooms.registry.instances.group_of)


def _insight(rooms: Rooms, limits: RequestLimits, needed: BytesNeeded) -> InsightApi:
    return InsightApi(
        rooms.cache, rooms.registry, rooms.storages, limits, rooms.alerts, rooms.view, needed, rooms.clock
    )


def _estimates(rooms: Rooms, needed: BytesNeeded) -> Callable[[], Iterator[Reading]]:
    """Let lookups be counted; return what is estimated of them."""
    counts = rooms.counts
    rooms.cache.observe(WithReader(counts.cache, needed) if needed.is_on else counts.cache)
    return lambda: needed_readings(needed, counts.groups, [group.name for group in rooms.registry.groups.all()])


def _vitals(rooms: Rooms, place: Place, calls: list[Call], counted: CallMetrics) -> VitalsWatch:
    groups, leadership = rooms.registry.groups, rooms.leadership
    signs = VitalSigns(
        *(place.endpoint, place.clock, place.phase, calls, counted, rooms.counts),
        *(rooms.cache, groups, rooms.reclaimer.stats, leadership),
    )
    store = rooms.metadata.store if rooms.metadata.store.is_shared else MemoryStore()  # else nobody else hears it
    return VitalsWatch(signs, VitalsBoard(place.clock, store.table("vitals")), leadership, groups, place.clock)


def _resources(calls: list[Call], caller: Caller, recent: RecentAccesses, watch: VitalsWatch) -> Resources:
    def make() -> Resources:
        from kvcm.service.rest.app import Resource, RestApp
        from kvcm.service.rest.event_resource import EventResource
        from kvcm.service.rest.history_resource import HistoryResource
        from kvcm.service.rest.manager_resource import ManagerResource

        others: list[Resource] = [EventResource(recent), ManagerResource(watch), HistoryResource(watch)]
        return RestApp(calls, caller, __version__, others)

    return LateResources(make)


def _console(resources: Resources, caller: Caller) -> Resources:
    def make() -> Resources:
        from kvcm.console.app import ConsoleApp

        return ConsoleApp(resources, caller, __version__)

    return LateResources(make)


@dataclass(frozen=True, slots=True)
class _Adjustable:
    """What settings change while it is at work."""

    limits: RequestLimits
    admission: GuardedAdmission
    reading: Lane
    access_log: AccessLog
    prober: Prober

    def apply(self, new: Settings, changed: Container[str]) -> None:
        self.limits.max_keys, self.limits.max_tokens = new.max_keys_per_request, new.max_tokens_per_request
        self.admission.set(_admission(new))
        self.reading.set(1, new.queued_long_requests, new.max_queue_ms / 1000)
        self.access_log.set(new.access_log_sample, new.slow_request_ms / 1000)
        self.prober.set_times(new.probe_interval_ms / 1000, new.probe_timeout_ms / 1000)
        _apply_to_logs(new, changed)


def _admission(settings: Settings) -> AdmissionSettings:
    return AdmissionSettings(
        settings.keys_per_second,
        settings.burst_keys,
        settings.max_queue_ms / 1000,
        settings.long_request_keys,
        settings.long_requests,
        settings.queued_long_requests,
    )


def _tracing(settings: Settings, reloader: Reloader, spans: SpanExport | None) -> list[CallObserver]:
    if spans is None:
        return []
    from kvcm.service.call_tracing import CallTracing  # needs the extra that made the export possible

    tracing = CallTracing(spans.tracer, Random().random)  # noqa: S311 - a sample, no secret
    tracing.set(settings.trace_sample)
    reloader.follow(lambda new, _changed: tracing.set(new.trace_sample))
    return [tracing]


def _data_calls(rooms: Rooms, limits: RequestLimits, recent: RecentAccesses) -> list[Call]:
    meta = MetaApi(rooms.cache, rooms.registry, rooms.leadership, limits, rooms.events, recent)
    pins, pools = PinApi(rooms.cache, limits), PoolApi(rooms.registry, rooms.storages)
    return [*meta.calls(), *pins.calls(), *pools.calls()]


def _admin_calls(rooms: Rooms, limits: RequestLimits, metrics: ApiMetrics, view: CapacityView) -> list[Call]:
    series = CapacitySeries(
        *(view, rooms.registry, rooms.reclaimer, rooms.deletions, rooms.garbage, rooms.scrubber, rooms.storages)
    )
    admin = AdminApi(
        *(rooms.cache, rooms.registry, rooms.leadership, metrics, limits, rooms.drains, series, rooms.storages)
    )
    drains = DrainView(rooms.drains, rooms.storages, rooms.deletions, rooms.leadership)
    storages = StorageApi(rooms.drains, drains)
    capacity = CapacityApi(view, rooms.registry.quotas, rooms.garbage, rooms.scrubber)
    return [*admin.calls(), *capacity.calls(), *storages.calls()]


def _state(rooms: Rooms, view: CapacityView) -> ManagerState:
    return ManagerState(
        *(rooms.cache, rooms.registry, view, rooms.reclaimer, rooms.deletions, rooms.garbage, rooms.scrubber),
        *(rooms.storages, rooms.prober, rooms.leadership, rooms.metadata.kind, rooms.metadata.times),
    )


def _apply_to_logs(settings: Settings, changed: Container[str]) -> None:
    if "log_format" in changed:
        set_format(settings.log_format)
    if "log_level" in changed:  # else UpdateLogger's stays
        set_level(LEVELS[settings.log_level_name])


async def _nothing_new() -> bool:
    return False
