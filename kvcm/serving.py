"""How a manager serves: its ports, certificates and API, the reload of its settings, and the drain at its end.

`Listeners` binds the ports and answers probes before metadata is loaded. `ManagerApi.of` wires the calls of both planes
to the components. `SettingsReloader` puts changed settings in force; `TlsFiles` does so for certificates. `drain` ends
it all in an order that clients and load balancers can follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Self
from uuid import uuid4

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvcm import __version__
from kvcm.cache.prefix_match import CombinedObserver
from kvcm.components import Components
from kvcm.config import DEBUG_PORT_OFFSET, ConfigError, Settings, is_exposed
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import unmixed
from kvcm.model.nodes import Endpoint
from kvcm.model.principals import ANONYMOUS, UNRESTRICTED
from kvcm.optimizer.live.bytes_needed import BytesNeeded
from kvcm.registry.assignment import Assignment
from kvcm.registry.leadership import Leadership, VitalsTable
from kvcm.residency.index_dialects import Dialect
from kvcm.residency.scoring import Costs
from kvcm.service.access import Access, AccessMetrics, KeyedAccess, OpenAccess
from kvcm.service.access_api import AccessApi
from kvcm.service.admin_api import AdminApi, ConfigApi, SettingChange
from kvcm.service.admission import REASONS, AdmissionSettings, GuardedAdmission, Phase, RequestQueue, ServingGate
from kvcm.service.call_schema import OPENAPI_PATH, CallsPage
from kvcm.service.calls import AccessLog, AuditCalls, Call, Caller, CallObserver, CallRecorder
from kvcm.service.capacity_api import CapacityApi
from kvcm.service.debug_api import DebugApi, Faults
from kvcm.service.event_report_api import EventReportApi
from kvcm.service.group_store_api import GroupStoreApi
from kvcm.service.grpc_server import GrpcLimits, GrpcServer
from kvcm.service.http_connections import ConnectionLimits
from kvcm.service.http_server import (
    HttpApp,
    HttpServer,
    IndexResources,
    LazyResources,
    LineStream,
    PageRoute,
    Resources,
)
from kvcm.service.index_api import IndexApi
from kvcm.service.insight_api import InsightApi
from kvcm.service.meta_api import MetaApi
from kvcm.service.metrics_page import ManagerState, MetricsPage, needed_readings
from kvcm.service.metrics_series import CapacitySeries
from kvcm.service.pin_api import PinApi
from kvcm.service.probes import Probes
from kvcm.service.request_limits import BodyReader, RequestLimits, RequestSizes
from kvcm.service.residency_api import ResidencyApi
from kvcm.service.rest.index_resource import IndexApp
from kvcm.service.storage_api import DrainView, PoolApi, StorageApi
from kvcm.service.tls import (
    ServerTls,
    TlsMaterial,
    certificate_ends,
    certificate_readings,
    describe_certificate,
    read_certificates,
)
from kvcm.service.vitals import VitalsReader, VitalsWatch
from kvcm.store.memory import MemoryStore
from kvcm.telemetry.events import RecentAccesses
from kvcm.telemetry.logs import LEVELS, set_format, set_level
from kvcm.telemetry.metrics import ApiMetrics, Reading
from kvcm.telemetry.tracing import SpanExport

__all__ = [
    "BackgroundReload",
    "Listeners",
    "ManagerAddress",
    "ManagerApi",
    "SettingsReloader",
    "ShutdownWatch",
    "TlsFiles",
    "drain",
    "log_unfinished_tasks",
    "open_tls",
]

_log = structlog.get_logger("kvcm")

# The ports.


class Listeners:
    """The ports. The admin plane shares the data plane's gRPC port unless it has its own.

    Args:
        settings: addresses and limits.
        gate: whether calls are served.
        tls: what connections use; None for plain text.

    Raises:
        StorageIOError: an address cannot be bound.
    """

    def __init__(self, settings: Settings, gate: ServingGate, tls: ServerTls | None = None) -> None:
        host, body = settings.bind_address, settings.max_body_bytes
        self._settings = settings
        self._connections = _connection_limits(settings)
        self.probes = Probes(gate, self._update_readiness)
        shared = settings.admin_rpc_port in {0, settings.rpc_port}
        of_grpc = GrpcLimits(
            max_body_bytes=body,
            max_connections=settings.max_connections,
            max_streams=settings.max_streams,
            handshake_ms=settings.receive_timeout_ms,
        )
        of_http = self._connections
        self._rpc = GrpcServer(host=host, port=settings.rpc_port, limits=of_grpc, gate=gate, tls=tls, patience=of_http)
        self._admin_rpc = (
            None
            if shared
            else GrpcServer(
                host=host, port=settings.admin_rpc_port, limits=of_grpc, gate=gate, tls=tls, patience=of_http
            )
        )
        self._http = HttpServer(host, settings.http_port, of_http, tls)
        self._admin_http = HttpServer(host, settings.admin_http_port, of_http, tls)
        has_debug, debug_port = settings.enable_debug_service, _debug_port(settings)
        self._debug_http = HttpServer(host, debug_port, of_http, tls) if has_debug else None
        visitor = ANONYMOUS if settings.is_auth_required else UNRESTRICTED
        self._data = HttpApp(gate, body, self.probes.pages(has_detail=False), visitor)
        self._admin = HttpApp(gate, body, self.probes.pages(has_detail=True), visitor)
        self._debug = HttpApp(gate, body)
        self._close_by = 0.0

    def endpoint(self, node_id: str, host: str) -> Endpoint:
        """Return where this manager is, with the bound ports."""
        admin_rpc = self._admin_rpc if self._admin_rpc is not None else self._rpc
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - every address is served: other hosts need a name
            host = socket.gethostname()
        return Endpoint(
            node_id=node_id,
            host=host,
            meta_rpc_port=self._rpc.port,
            meta_http_port=self._http.port,
            admin_rpc_port=admin_rpc.port,
            admin_http_port=self._admin_http.port,
        )

    def advertised(self, node_id: str) -> Endpoint:
        """Return where others reach this manager: as configured, else the bound address and ports."""
        bound, settings = self.endpoint(node_id, self._settings.bind_address), self._settings
        return dataclasses.replace(
            bound,
            host=settings.advertised_host or bound.host,
            meta_rpc_port=settings.advertised_rpc_port or bound.meta_rpc_port,
            meta_http_port=settings.advertised_http_port or bound.meta_http_port,
        )

    @property
    def debug_http_port(self) -> int | None:
        """Port of the debug service, None when it is off."""
        return None if self._debug_http is None else self._debug_http.port

    async def start(self) -> None:
        """Answer probes, and reject calls for now."""
        for rpc in self._rpcs:
            await rpc.start()
        await self._http.start(self._data)
        await self._admin_http.start(self._admin)
        if self._debug_http is not None:
            await self._debug_http.start(self._debug)

    async def serve(self, interface: ManagerApi) -> None:
        """Answer calls from now on, as far as the gate is open."""
        data, caller, bodies = interface.data, interface.caller, interface.bodies
        admin = [*interface.admin, *interface.debug]
        has_reflection = self._settings.reflection and not self._settings.is_auth_required  # it has no authentication
        if self._admin_rpc is None:
            await self._rpc.serve([*data, *admin], caller, bodies, has_reflection=has_reflection)
        else:
            await self._rpc.serve(data, caller, bodies, has_reflection=has_reflection)
            await self._admin_rpc.serve(admin, caller, bodies, has_reflection=has_reflection)
        self._data.serve(
            data,
            caller,
            pages=interface.data_pages,
            bodies=bodies,
            resources=interface.data_resources,
            index=interface.index,
        )
        self._admin.serve(
            interface.admin,
            caller,
            streams=interface.streams,
            pages=interface.pages,
            bodies=bodies,
            resources=interface.resources,
            console=interface.console,
            index=interface.index,
        )
        self._debug.serve(interface.debug, caller, bodies=bodies)

    def apply(self, settings: Settings) -> None:
        """Put changed limits of connections in force."""
        new = _connection_limits(settings)
        for each in dataclasses.fields(new):
            setattr(self._connections, each.name, getattr(new, each.name))

    def stop_accepting(self, drain_seconds: float) -> None:
        """Accept no new connections; requests in flight may run for so long."""
        self._close_by = time.monotonic() + drain_seconds
        for rpc in self._rpcs:
            rpc.stop_accepting(drain_seconds)
        for http in self._https:
            http.stop_accepting()

    async def stop(self) -> None:
        """Close everything."""
        left_seconds = self._close_by - time.monotonic()
        servers: list[GrpcServer | HttpServer] = [*self._rpcs, *self._https]
        await asyncio.gather(*(server.stop(left_seconds) for server in servers))

    @property
    def _rpcs(self) -> list[GrpcServer]:
        return [rpc for rpc in (self._rpc, self._admin_rpc) if rpc is not None]

    @property
    def _https(self) -> list[HttpServer]:
        return [http for http in (self._http, self._admin_http, self._debug_http) if http is not None]

    async def _update_readiness(self, is_ready: bool) -> None:
        for rpc in self._rpcs:
            await rpc.health.set_serving(is_ready)


def _connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        receive_seconds=settings.receive_timeout_ms / 1000,
        send_seconds=settings.send_timeout_ms / 1000,
        idle_seconds=settings.idle_timeout_ms / 1000,
        most=settings.max_connections,
    )


def _debug_port(settings: Settings) -> int:
    return settings.http_port + DEBUG_PORT_OFFSET if settings.http_port else 0


# The API of a manager: its calls by plane, wired to the components that answer them, and the observers of each call.


class ManagerAddress(NamedTuple):
    """Where a manager serves, and its phase.

    Attributes:
        endpoint: where others reach it.
        clock: time source.
        phase: returns the manager's phase.
    """

    endpoint: Endpoint
    clock: Clock
    phase: Callable[[], str]


@dataclass(frozen=True, slots=True)
class ManagerApi:
    """The calls, pages and resources of a manager.

    Attributes:
        data: calls of engines.
        admin: calls of operators.
        caller: runs them.
        bodies: reads requests.
        streams: streams of the admin port by path.
        vitals: vitals of all managers.
        pages: pages of the admin port by path, beside probes.
        debug: calls that make others fail; none unless they are enabled.
        data_pages: pages of the data port by path, beside probes.
        data_resources: the resources under /v1 of the data port, for routers.
        resources: the resources under /v1 of the admin port.
        console: the console on the admin port.
        index: the index API of both ports.
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
    data_resources: Resources | None = None
    resources: Resources | None = None
    console: Resources | None = None
    index: IndexResources | None = None

    @classmethod
    def of(
        cls,
        components: Components,
        settings: Settings,
        reloader: SettingsReloader,
        place: ManagerAddress,
        spans: SpanExport | None = None,
        tls: ServerTls | None = None,
    ) -> ManagerApi:
        """Wire the calls to the components, and hot settings to the objects that they change."""
        limits = RequestLimits(settings.max_keys_per_request, settings.max_tokens_per_request, settings.max_body_bytes)
        metrics = ApiMetrics()
        access_log = AccessLog(Random().random)  # noqa: S311 - a sample, no secret
        access_log.set(settings.access_log_sample, settings.slow_request_ms / 1000)
        most_wait = settings.max_queue_ms / 1000
        reading = RequestQueue(
            time.monotonic, slots=1, places=settings.queued_long_requests, most_wait_seconds=most_wait
        )
        admission = GuardedAdmission(_admission(settings), components.counts.lag.delay)
        reloader.subscribe(_Adjustable(limits, admission, reading, access_log, components).apply)
        recorder = _recorder(components, metrics, access_log, _tracing(settings, reloader, spans))
        access = _access(components, settings)
        caller = _caller(components, recorder, limits, admission=admission, access=access, is_traced=spans is not None)
        recent, needed = RecentAccesses(settings.recent_keys, original=unmixed), BytesNeeded(settings.sampled_keys)
        assignment = Assignment(components.leadership.node_id, components.registry.instances.by_id)
        data = _data_calls(components, limits, recent, assignment, address=place.endpoint)
        admin = [
            *_admin_calls(components, limits, metrics, assignment, board := _board(components, place)),
            *ConfigApi(reloader.reload).calls(),
            *_insight(components, limits, needed).calls(),
            *AccessApi(components.registry, is_required=settings.is_auth_required).calls(),
        ]
        debug, data = _debug_calls(settings, data)
        for call in (*data, *admin):
            recorder.declare(call)
        announced = None if components.serves_only_as_leader else assignment
        watch = _vitals(components, place, board, calls=data, recorder=recorder, assignment=announced)
        components.alerts.managers, components.alerts.certificates = watch.managers, partial(certificate_ends, tls)
        estimates, of_residency = _estimates(components, needed), components.residency_readings
        readings = AccessMetrics(access).readings, partial(certificate_readings, tls), estimates, of_residency
        metrics_page = MetricsPage(recorder, components.counts, _state(components), readings)
        resources, bodies = _resources([*data, *admin], caller, recent, watch), BodyReader(limits, reading)
        return cls(
            data=data,
            admin=admin,
            caller=caller,
            bodies=bodies,
            streams={"/api/events": components.events.subscribe},
            vitals=watch,
            pages={"/metrics": metrics_page, OPENAPI_PATH: CallsPage(admin)},
            debug=debug,
            data_pages={OPENAPI_PATH: CallsPage(data)},
            data_resources=_data_resources(data, caller),
            resources=resources,
            console=_console(resources, caller),
            index=IndexApp(data, caller, bodies, limits, dialect=Dialect(settings.query_dialect)),
        )


def _recorder(
    components: Components, metrics: ApiMetrics, access_log: AccessLog, tracing: CallObserver | None
) -> CallRecorder:
    return CallRecorder(
        metrics,
        [Phase.CLOSED.value, *REASONS, "unauthenticated", "forbidden"],
        access_log=access_log,
        audit=AuditCalls(components.audit),
        tracing=tracing,
    )


def _debug_calls(settings: Settings, data: list[Call]) -> tuple[list[Call], list[Call]]:
    """Return the calls of the debug service, and those of engines that it can make fail."""
    if not settings.enable_debug_service:
        return [], data
    faults = Faults()
    return DebugApi(faults).calls(), faults.breakable(data)


def _caller(
    components: Components,
    recorder: CallRecorder,
    limits: RequestLimits,
    *,
    admission: GuardedAdmission,
    access: Access,
    is_traced: bool,
) -> Caller:
    return Caller(
        recorder,
        components.refuse_unless_leading,
        components.labels,
        refresh=components.registry.refresh if components.metadata.store.is_shared else _no_op,
        admission=admission,
        check_sizes=RequestSizes(limits).check,
        access=access,
        wants_trace_parents=is_traced,
    )


def _access(components: Components, settings: Settings) -> Access:
    if not settings.is_auth_required:
        return OpenAccess()
    return KeyedAccess(components.registry.keys, components.registry.instances.group_of)


def _insight(components: Components, limits: RequestLimits, needed: BytesNeeded) -> InsightApi:
    return InsightApi(
        cache=components.cache,
        registry=components.registry,
        storages=components.storages,
        limits=limits,
        alerts=components.alerts,
        view=components.view,
        curves=needed,
        clock=components.clock,
    )


def _estimates(components: Components, needed: BytesNeeded) -> Callable[[], Iterator[Reading]]:
    """Connect the counters of lookups; return the estimates that are made from them."""
    counts = components.counts
    components.cache.set_observer(CombinedObserver(counts.cache, needed) if needed.is_on else counts.cache)
    return lambda: needed_readings(needed, counts.groups, [group.name for group in components.registry.groups.all()])


def _board(components: Components, place: ManagerAddress) -> VitalsTable:
    store = components.metadata.store
    return VitalsTable(
        place.clock, (store if store.is_shared else MemoryStore()).table("vitals")
    )  # else only this one's


def _vitals(
    components: Components,
    place: ManagerAddress,
    board: VitalsTable,
    *,
    calls: list[Call],
    recorder: CallRecorder,
    assignment: Assignment | None,
) -> VitalsWatch:
    groups, leadership = components.registry.groups, components.leadership
    reader = VitalsReader(
        place.endpoint,
        place.clock,
        place.phase,
        calls=calls,
        answered=recorder,
        counts=components.counts,
        cache=components.cache,
        groups=groups,
        stats=components.reclaimer.stats,
        leadership=leadership,
        block_stores=sorted(components.metadata.block_stores),
    )
    return VitalsWatch(reader, board, leadership, groups, clock=place.clock, assignment=assignment)


def _resources(calls: list[Call], caller: Caller, recent: RecentAccesses, watch: VitalsWatch) -> Resources:
    def make() -> Resources:
        from kvcm.service.rest.app import Resource, RestApp
        from kvcm.service.rest.history_resource import EventResource, HistoryResource
        from kvcm.service.rest.manager_resource import ManagerResource

        others: list[Resource] = [EventResource(recent), ManagerResource(watch), HistoryResource(watch)]
        return RestApp(calls, caller, __version__, others)

    return LazyResources(make)


def _data_resources(calls: list[Call], caller: Caller) -> Resources:
    def make() -> Resources:
        from kvcm.service.rest.app import RestApp
        from kvcm.service.rest.residency_resource import ScoreResource

        return RestApp(calls, caller, __version__, kinds=[ScoreResource])

    return LazyResources(make)


def _console(resources: Resources, caller: Caller) -> Resources:
    def make() -> Resources:
        from kvcm.console.app import ConsoleApp

        return ConsoleApp(resources, caller, __version__)

    return LazyResources(make)


@dataclass(frozen=True, slots=True)
class _Adjustable:
    """The objects that hot settings change."""

    limits: RequestLimits
    admission: GuardedAdmission
    reading: RequestQueue
    access_log: AccessLog
    components: Components

    def apply(self, new: Settings, changed: Container[str]) -> None:
        self.components.cache.missing.corruption.most_per_minute = new.corrupt_reports_per_minute
        self.limits.max_keys, self.limits.max_tokens = new.max_keys_per_request, new.max_tokens_per_request
        self.admission.set(_admission(new))
        self.reading.set(1, new.queued_long_requests, new.max_queue_ms / 1000)
        self.access_log.set(new.access_log_sample, new.slow_request_ms / 1000)
        self.components.prober.set_times(new.probe_interval_ms / 1000, new.probe_timeout_ms / 1000)
        _apply_to_logs(new, changed)


def _admission(settings: Settings) -> AdmissionSettings:
    return AdmissionSettings(
        keys_per_second=settings.keys_per_second,
        burst_keys=settings.burst_keys,
        most_wait_seconds=settings.max_queue_ms / 1000,
        long_keys=settings.long_request_keys,
        long_slots=settings.long_requests,
        long_places=settings.queued_long_requests,
        long_seconds=settings.long_request_ms / 1000,
        most_keys=settings.max_keys_per_request,
    )


def _tracing(settings: Settings, reloader: SettingsReloader, spans: SpanExport | None) -> CallObserver | None:
    if spans is None:
        return None
    from kvcm.service.call_tracing import CallTracing  # needs the extra that made the export possible

    tracing = CallTracing(spans.tracer, Random().random)  # noqa: S311 - a sample, no secret
    tracing.set(settings.trace_sample)
    reloader.subscribe(lambda new, _changed: tracing.set(new.trace_sample))
    return tracing


def _data_calls(
    components: Components,
    limits: RequestLimits,
    recent: RecentAccesses,
    assignment: Assignment,
    *,
    address: Endpoint,
) -> list[Call]:
    meta = MetaApi(
        cache=components.cache,
        registry=components.registry,
        leadership=components.leadership,
        limits=limits,
        events=components.events,
        recent=recent,
        assignment=assignment,
    )
    pins, pools = PinApi(components.cache, limits), PoolApi(components.registry, components.storages)
    residency = ResidencyApi(
        components.cache, components.residency, limits, costs=_costs(components.settings), assignment=assignment
    )
    index = IndexApi(
        components.cache,
        components.registry,
        components.residency,
        residency,
        limits,
        run_id=uuid4().hex,
        manager=f"{address.host}:{address.meta_rpc_port}",
    )
    events = EventReportApi(components.cache, components.registry, components.residency, limits)
    return [*meta.calls(), *events.calls(), *pins.calls(), *pools.calls(), *residency.calls(), *index.calls()]


def _costs(settings: Settings) -> Costs:
    return Costs(
        compute_tokens_per_second=settings.compute_tokens_per_second,
        host_bytes_per_second=settings.host_bytes_per_second,
        disk_bytes_per_second=settings.disk_bytes_per_second,
        storage_bytes_per_second=settings.storage_bytes_per_second,
    )


def _admin_calls(
    components: Components, limits: RequestLimits, metrics: ApiMetrics, assignment: Assignment, board: VitalsTable
) -> list[Call]:
    series = CapacitySeries(
        components.view,
        components.registry,
        components.reclaimer,
        deletions=components.deletions,
        garbage=components.garbage,
        scrubber=components.scrubber,
        storages=components.storages,
    )
    admin = AdminApi(
        components.cache,
        components.registry,
        components.leadership,
        metrics=metrics,
        limits=limits,
        drains=components.drains,
        capacity=series,
        storages=components.storages,
        assignment=assignment,
    )
    drains = DrainView(components.drains, components.storages, components.deletions, components.leadership)
    storages = StorageApi(components.drains, drains)
    capacity = CapacityApi(components.view, components.registry.quotas, components.garbage, components.scrubber)
    group_stores = GroupStoreApi(components.registry, components.group_stores, board)
    return [*admin.calls(), *group_stores.calls(), *capacity.calls(), *storages.calls()]


def _state(components: Components) -> ManagerState:
    return ManagerState(
        cache=components.cache,
        registry=components.registry,
        view=components.view,
        reclaimer=components.reclaimer,
        deletions=components.deletions,
        garbage=components.garbage,
        scrubber=components.scrubber,
        storages=components.storages,
        prober=components.prober,
        leadership=components.leadership,
        store_kind=components.metadata.kind,
        store_times=components.metadata.times,
        store_health=components.metadata.health,
        store_lost=components.metadata.lost,
        group_stores=components.group_stores,
    )


def _apply_to_logs(settings: Settings, changed: Container[str]) -> None:
    if "log_format" in changed:
        set_format(settings.log_format)
    if "log_level" in changed:  # else UpdateLogger's stays
        set_level(LEVELS[settings.log_level_name])


async def _no_op() -> bool:
    return False


# Reload of the settings of a running manager: they are checked as a whole, then the hot ones come into force together.
#
# The table in docs/configuration.md says which ones are hot; a change of another one is reported, and needs a restart.
# A value that was set at runtime by other means (UpdateLogger) stays until its setting changes.

Apply = Callable[[Settings, Container[str]], None]
"""Called with the settings in force from now on, and the names of those that changed. Neither waits nor fails."""
Refresh = Callable[[], Awaitable[None]]
"""Reloads files that settings name. Does not fail."""


class SettingsReloader:
    """Keeps the settings in force.

    Args:
        settings: those of the start.
        reread: reads them again; raises ConfigError.
    """

    def __init__(self, settings: Settings, reread: Callable[[], Settings]) -> None:
        self.settings = settings
        self._reread = reread
        self._appliers: list[Apply] = []
        self._refreshers: list[Refresh] = []
        self._reading = asyncio.Lock()

    def subscribe(self, apply: Apply) -> None:
        """Call `apply` with every later state of the settings."""
        self._appliers.append(apply)

    def on_reload(self, refresh: Refresh) -> None:
        """Call `refresh` at every reload: files that settings name may have changed."""
        self._refreshers.append(refresh)

    async def reload(self) -> Sequence[SettingChange]:
        """Read the settings again, put the hot ones in force, and return the changes, ordered by key.

        Raises:
            InvalidArgumentError: they cannot be used; nothing changed.
        """
        async with self._reading:
            try:
                new = await asyncio.to_thread(self._reread)
            except ConfigError as error:
                _log.warning("reload_refused", reason=str(error))
                raise InvalidArgumentError(f"nothing is changed: {error}") from error
            changes = self._apply(new)
            for refresh in self._refreshers:
                await refresh()
        _log.info("reloaded", changes=[change.text() for change in changes])
        return changes

    def _apply(self, new: Settings) -> list[SettingChange]:
        old = self.settings
        changed = old.changed_fields(new)
        hot = {f.name: getattr(new, f.name) for f in changed if _is_hot(f, old, new)}
        if hot:
            self.settings = dataclasses.replace(old, **hot)
            for apply in self._appliers:
                apply(self.settings, hot)
        before, after = old.described(), new.described()
        keys = sorted((f.metadata["key"], f.name in hot) for f in changed)
        return [SettingChange(key, before[key], after[key], needs_restart=not applied) for key, applied in keys]


class BackgroundReload:
    """Reloads on a signal, in a task.

    Args:
        reloader: reloads.
        is_serving: whether the manager neither starts nor stops.
    """

    def __init__(self, reloader: SettingsReloader, is_serving: Callable[[], bool]) -> None:
        self._reloader = reloader
        self._is_serving = is_serving
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Reload soon; the log has the outcome."""
        if not self._is_serving():
            _log.warning("reload_refused", reason="the manager is starting or stopping")
            return
        task = asyncio.get_running_loop().create_task(self._reload())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reload(self) -> None:
        try:
            await self._reloader.reload()
        except InvalidArgumentError:
            pass  # the reloader has logged it
        except Exception:
            _log.exception("reload_failed")


def _is_hot(field: dataclasses.Field[object], old: Settings, new: Settings) -> bool:
    if field.name == "probe_interval_ms" and not (old.probe_interval_ms and new.probe_interval_ms):
        return False  # the prober starts with the manager, or never
    return bool(field.metadata["hot"])


# Certificates and keys in files: checked as a whole, and reloaded when they change.
#
# Orchestrators replace them while the manager runs, some by swapping a symbolic link above them. Only files that fit
# together come into force: a certificate may appear before its key, and then the next poll finds both.

_POLL_SECONDS: Final = 2.0
_CERT: Final = "kvcm.tls.cert_file"
_KEY: Final = "kvcm.tls.key_file"
_CLIENT_CA: Final = "kvcm.tls.client_ca_file"
_Stamp = tuple[int, int, int, int] | None


def open_tls(settings: Settings) -> TlsFiles | None:
    """Read the files that the settings name; None if ports do not speak TLS.

    Raises:
        ConfigError: a file cannot be used, or they do not fit together.
    """
    return TlsFiles(settings) if settings.tls_cert_file else None


class TlsFiles:
    """Keeps the certificates of the ports the same as those in the files.

    Args:
        settings: names the files.

    Attributes:
        tls: the certificates in force.

    Raises:
        ConfigError: a file cannot be used, or they do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        self._paths = {
            key: Path(path)
            for key, path in (
                (_CERT, settings.tls_cert_file),
                (_KEY, settings.tls_key_file),
                (_CLIENT_CA, settings.tls_client_ca_file),
            )
            if path
        }
        self._requires_client = settings.tls_client_auth == "required"
        self._seen = self._stamps()
        material = self._read()
        try:
            self.tls = ServerTls(material)
        except ValueError as error:
            raise self._refused(error) from None
        self._log_certificates(material)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self.poll()

    async def poll(self) -> None:
        """Reload the files if they changed."""
        stamps = await asyncio.to_thread(self._stamps)
        if stamps != self._seen:
            self._seen = stamps  # of before they are read: the next poll finds later changes
            await self.reload()

    async def reload(self) -> None:
        """Put the files in force. Files that cannot be used are logged, and change nothing."""
        try:
            material = await asyncio.to_thread(self._read)
            if material == self.tls.material:
                return
            try:
                self.tls.replace(material)
            except ValueError as error:
                raise self._refused(error) from None
        except ConfigError as error:
            _log.error("certificate_refused", reason=str(error), in_force=_format_time(self.tls.material))
            return
        self._log_certificates(material)

    def _stamps(self) -> Mapping[str, _Stamp]:
        return {key: _stamp(path) for key, path in self._paths.items()}

    def _read(self) -> TlsMaterial:
        chain_pem, key_pem = self._bytes(_CERT), self._bytes(_KEY)
        chain = self._certificates(_CERT, chain_pem)
        self._check_key(key_pem, chain[0])
        cas = self._certificates(_CLIENT_CA, self._bytes(_CLIENT_CA)) if _CLIENT_CA in self._paths else ()
        return TlsMaterial(
            chain_pem=_pem(chain),
            key_pem=key_pem,
            client_ca_pem=_pem(cas),
            requires_client=self._requires_client,
            certificate=describe_certificate(chain[0]),
            client_cas=tuple(map(describe_certificate, cas)),
        )

    def _bytes(self, key: str) -> bytes:
        try:
            return self._paths[key].read_bytes()
        except OSError as error:
            raise self._bad(key, f"cannot be read: {error.strerror}") from None

    def _certificates(self, key: str, pem: bytes) -> tuple[x509.Certificate, ...]:
        try:
            return read_certificates(pem)
        except ValueError:
            raise self._bad(key, "holds no certificate: it must be PEM, BEGIN CERTIFICATE") from None

    def _check_key(self, pem: bytes, certificate: x509.Certificate) -> None:
        try:
            key = load_pem_private_key(pem, None)
        except TypeError:
            raise self._bad(_KEY, "holds a key with a password: it must be without one") from None
        except Exception:  # its text may hold parts of the key
            raise self._bad(_KEY, "holds no private key: it must be PEM, BEGIN PRIVATE KEY") from None
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
            raise self._bad(_KEY, f"is not the key of the certificate in {_CERT} {str(self._paths[_CERT])!r}")

    def _bad(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{key} {str(self._paths[key])!r} {text}")

    def _refused(self, error: ValueError) -> ConfigError:
        return self._bad(_CERT, f"cannot be used with its key and authorities: {error}")

    def _log_certificates(self, material: TlsMaterial) -> None:
        shown = material.certificate
        _log.info(
            "certificate_loaded",
            file=str(self._paths[_CERT]),
            subject=shown.subject,
            names=list(shown.names),
            not_after=_format_time(material),
            client_ca=[ca.subject for ca in material.client_cas],
        )
        now = datetime.now(UTC).timestamp()
        if not shown.not_before <= now <= shown.not_after:
            _log.warning("certificate_not_valid_now", file=str(self._paths[_CERT]), not_after=_format_time(material))
        self._warn_if_exposed(self._paths[_KEY])

    def _warn_if_exposed(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if is_exposed(path):
                _log.warning("tls_key_readable", file=str(path), reason="others on this host can read it: chmod 600")


def _stamp(path: Path) -> _Stamp:
    """Return a value that changes with a file, also when a link above it changes its target."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _pem(certificates: tuple[x509.Certificate, ...]) -> bytes:
    """Return certificates without the text that files have between them."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def _format_time(material: TlsMaterial) -> str:
    return datetime.fromtimestamp(material.certificate.not_after, UTC).isoformat()


# The drain of a manager, in an order that clients and load balancers can follow (security_ops.md 4).
#
# 1. It is not ready: `/readyz` and gRPC health say so. It still serves requests.
# 2. It releases the lease, so that another manager takes over the background tasks.
# 3. It waits until clients have noticed. Answers close their HTTP connections.
# 4. It rejects requests; then it accepts no connections.
# 5. Requests in flight finish, within a time limit.
#
# The caller then stops the background tasks, closes the listeners, flushes and closes the store. At the very end no
# task may be left: one that is was leaked by the code that started it.

_TURNS = 3  # of the event loop, for tasks that have just ended
_MAX_LOGGED = 10


async def drain(
    gate: ServingGate, leadership: Leadership, listeners: Listeners, delay_seconds: float, timeout_seconds: float
) -> None:
    """Bring a manager to where no request is in flight.

    Args:
        gate: admits requests.
        leadership: to be released.
        listeners: to be closed to new connections.
        delay_seconds: how long to serve after readiness has ended.
        timeout_seconds: how long requests in flight may take.
    """
    await gate.enter_phase(Phase.LEAVING)
    await leadership.withdraw()
    await asyncio.sleep(delay_seconds)
    await gate.enter_phase(Phase.CLOSED)
    # gRPC cancels requests that arrive at the moment in which it stops to accept (grpc/grpc#41785). Clients retry a
    # rejection, but most not a cancellation: so requests are rejected first.
    await gate.wait_until_quiet()
    listeners.stop_accepting(timeout_seconds)
    if not await gate.wait_until_idle(timeout_seconds):
        _log.warning("requests_cut_off", in_flight=gate.in_flight, after_seconds=timeout_seconds)


class ShutdownWatch:
    """Logs, again and again, the tasks that a manager waits for which should have ended.

    Args:
        after_seconds: how long the end may take before that is logged.
    """

    def __init__(self, after_seconds: float = 10.0) -> None:
        self._after_seconds = after_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._begin = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self) -> None:
        """Start to watch: no request is in flight, and the remaining steps take moments."""
        self._begin = time.monotonic()
        self._again()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._after_seconds, self._log)

    def _log(self) -> None:
        places = sorted(map(_place, asyncio.all_tasks()))
        seconds = round(time.monotonic() - self._begin)
        _log.warning("ending_is_slow", seconds=seconds, count=len(places), tasks=places[:_MAX_LOGGED])
        self._again()


async def log_unfinished_tasks() -> None:
    """Log the tasks that still exist although everything is closed."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _log.warning("tasks_left", count=len(left), tasks=sorted(map(_name, left))[:_MAX_LOGGED])


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())


def _place(task: asyncio.Task[Any]) -> str:
    """Return the function of a task and, from the outside in, the functions that it is waiting in."""
    inner: Any = task.get_coro()
    names = []
    while inner is not None:
        names.append(getattr(inner, "__qualname__", type(inner).__name__))
        inner = getattr(inner, "cr_await", None)
    return " > ".join(names)
