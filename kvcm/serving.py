"""The listeners of a manager: bound and answering probes before metadata is loaded, closed in steps at the end."""

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

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvcm import __version__
from kvcm.cache.prefix_match import CombinedObserver
from kvcm.components import Components
from kvcm.config import DEBUG_PORT_OFFSET, ConfigError, Settings, is_exposed
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.nodes import Endpoint
from kvcm.model.principals import ANONYMOUS, UNRESTRICTED
from kvcm.optimizer.live.bytes_needed import BytesNeeded
from kvcm.registry.leadership import Leadership, VitalsTable
from kvcm.service.access import Access, AccessMetrics, KeyedAccess, OpenAccess
from kvcm.service.access_api import AccessApi
from kvcm.service.admin_api import AdminApi, ConfigApi, SettingChange
from kvcm.service.admission import REASONS, AdmissionSettings, GuardedAdmission, Phase, RequestQueue, ServingGate
from kvcm.service.call_schema import OPENAPI_PATH, CallsPage
from kvcm.service.calls import AccessLog, AuditCalls, Call, Caller, CallObserver, CallRecorder
from kvcm.service.capacity_api import CapacityApi
from kvcm.service.debug_api import DebugApi, Faults
from kvcm.service.grpc_server import GrpcLimits, GrpcServer
from kvcm.service.http_connections import ConnectionLimits
from kvcm.service.http_server import HttpApp, HttpServer, LazyResources, LineStream, PageRoute, Resources
from kvcm.service.insight_api import InsightApi
from kvcm.service.meta_api import MetaApi
from kvcm.service.metrics_page import ManagerState, MetricsPage, needed_readings
from kvcm.service.metrics_series import CapacitySeries
from kvcm.service.pin_api import PinApi
from kvcm.service.probes import Probes
from kvcm.service.request_limits import BodyReader, RequestLimits, RequestSizes
from kvcm.service.storage_api import DrainView, PoolApi, StorageApi
from kvcm.service.tls import (
    ServerTls,
    TlsMaterial,
    certificate_ends,
    certificate_readings,
    describe_certificate,
    read_certificates,
)
from kvcm.service.usage_report import UsageView
from kvcm.service.vitals import VitalsReader, VitalsWatch
from kvcm.storage.prober import Prober
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

# Certificates and keys in files: checked as a whole, and read anew when they change.
#
# Orchestrators replace them while the manager runs, some by swapping a symbolic link above them. Nothing is taken over
# that does not fit together: a certificate may be seen before its key is there, and then the next look finds both.

_POLL_SECONDS: Final = 2.0
_CERT: Final = "kvcm.tls.cert_file"
_KEY: Final = "kvcm.tls.key_file"
_CLIENT_CA: Final = "kvcm.tls.client_ca_file"
_log = structlog.get_logger("kvcm")
_Stamp = tuple[int, int, int, int] | None


def open_tls(settings: Settings) -> TlsFiles | None:
    """Read what the settings name; None where ports do not speak TLS.

    Raises:
        ConfigError: a file cannot be used, or they do not fit together.
    """
    return TlsFiles(settings) if settings.tls_cert_file else None


class TlsFiles:
    """Keeps what ports use the same as what files hold.

    Args:
        settings: names them.

    Attributes:
        tls: what is in force.

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
        """Look for changes for good."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self.poll()

    async def poll(self) -> None:
        """Take over what has changed, once."""
        stamps = await asyncio.to_thread(self._stamps)
        if stamps != self._seen:
            self._seen = stamps  # taken before they are read: what changes meanwhile is found by the next look
            await self.reload()

    async def reload(self) -> None:
        """Take over what the files hold. What cannot be used is logged, and what was in force stays."""
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
            _pem(chain),
            key_pem,
            _pem(cas),
            self._requires_client,
            describe_certificate(chain[0]),
            tuple(map(describe_certificate, cas)),
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
        except Exception:  # the text may hold parts of what was read
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
    """Return what changes with a file, also when a link on its way is turned to another one."""
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


# Settings of a running manager read anew: checked as a whole first, then the hot ones are in force together.
#
# Hot is what the table in docs/configuration.md says; what else changed is told, and needs a restart. What was changed
# at runtime by other means (UpdateLogger) stays until its setting changes.

Apply = Callable[[Settings, Container[str]], None]
"""Takes the settings that are in force from now on, and the names of those that changed. Neither waits nor fails."""
Refresh = Callable[[], Awaitable[None]]
"""Takes over what files hold that settings name. Does not fail."""


class SettingsReloader:
    """Keeps the settings in force.

    Args:
        settings: those of the start.
        reread: reads them anew; raises ConfigError.
    """

    def __init__(self, settings: Settings, reread: Callable[[], Settings]) -> None:
        self.settings = settings
        self._reread = reread
        self._appliers: list[Apply] = []
        self._refreshers: list[Refresh] = []
        self._reading = asyncio.Lock()

    def subscribe(self, apply: Apply) -> None:
        """Have something called with every new state of the settings."""
        self._appliers.append(apply)

    def refresh(self, refresh: Refresh) -> None:
        """Have something called whenever somebody asks for a reload: files that settings name may have changed."""
        self._refreshers.append(refresh)

    async def reload(self) -> Sequence[SettingChange]:
        """Read the settings anew, put those in force that can be, and return what changed, ordered by key.

        Raises:
            InvalidArgumentError: they cannot be used; nothing is changed.
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
    """Reloads for a signal, which waits for nothing.

    Args:
        reloader: does it.
        may: whether the manager is where it can reload.
    """

    def __init__(self, reloader: SettingsReloader, may: Callable[[], bool]) -> None:
        self._reloader = reloader
        self._may = may
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Reload soon; the log has the outcome."""
        if not self._may():
            _log.warning("reload_refused", reason="the manager is starting or stopping")
            return
        task = asyncio.get_running_loop().create_task(self._reload())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reload(self) -> None:
        try:
            await self._reloader.reload()
        except InvalidArgumentError:
            pass  # it is logged
        except Exception:
            _log.exception("reload_failed")


def _is_hot(field: dataclasses.Field[object], old: Settings, new: Settings) -> bool:
    if field.name == "probe_interval_ms" and not (old.probe_interval_ms and new.probe_interval_ms):
        return False  # whether storages are probed at all is decided at start
    return bool(field.metadata["hot"])


# What a manager serves: its calls by plane, wired to the rooms that answer them, and who is told of each call.


class ManagerAddress(NamedTuple):
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
class ManagerApi:
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
        rooms: Components,
        settings: Settings,
        reloader: SettingsReloader,
        place: ManagerAddress,
        spans: SpanExport | None = None,
        tls: ServerTls | None = None,
    ) -> ManagerApi:
        """Wire the calls to the rooms, and what can be changed at runtime to its settings."""
        limits = RequestLimits(settings.max_keys_per_request, settings.max_tokens_per_request, settings.max_body_bytes)
        metrics = ApiMetrics()
        view, needed = rooms.view, BytesNeeded(settings.sampled_keys)
        refresh = rooms.registry.refresh if rooms.metadata.store.is_shared else _no_op
        access_log = AccessLog(Random().random)  # noqa: S311 - a sample, no secret
        reading = RequestQueue(time.monotonic, 1, settings.queued_long_requests, settings.max_queue_ms / 1000)
        admission = GuardedAdmission(_admission(settings), lambda: limits.max_keys, rooms.counts.lag.delay)
        access_log.set(settings.access_log_sample, settings.slow_request_ms / 1000)
        recorder = CallRecorder(
            metrics,
            [Phase.CLOSED.value, *REASONS, "unauthenticated", "forbidden"],
            access_log=access_log,
            audit=AuditCalls(rooms.audit),
            tracing=_tracing(settings, reloader, spans),
        )
        access = _access(rooms, settings)
        check_sizes = RequestSizes(limits).check
        caller = Caller(
            recorder,
            rooms.refuse_unless_leading,
            rooms.labels,
            refresh,
            admission=admission,
            check_sizes=check_sizes,
            access=access,
            wants_trace_parents=spans is not None,
        )
        recent = RecentAccesses(settings.recent_keys)
        data, admin = _data_calls(rooms, limits, recent), _admin_calls(rooms, limits, metrics, view)
        admin += ConfigApi(reloader.reload).calls() + _insight(rooms, limits, needed).calls()
        admin += AccessApi(rooms.registry, is_required=settings.is_auth_required).calls()
        faults = Faults()
        debug = DebugApi(faults).calls() if settings.enable_debug_service else []
        data = faults.breakable(data) if debug else data
        reloader.subscribe(_Adjustable(limits, admission, reading, access_log, rooms.prober).apply)
        for call in (*data, *admin):
            recorder.declare(call)
        others = (AccessMetrics(access).readings, partial(certificate_readings, tls), _estimates(rooms, needed))
        rooms.alerts.certificates = partial(certificate_ends, tls)
        metrics_page = MetricsPage(recorder, rooms.counts, _state(rooms, view), others)
        pages: dict[str, PageRoute] = {"/metrics": metrics_page, OPENAPI_PATH: CallsPage(admin)}
        streams, watch = {"/api/events": rooms.events.subscribe}, _vitals(rooms, place, data, recorder)
        rooms.alerts.managers = watch.managers
        resources = _resources([*data, *admin], caller, recent, watch)
        return cls(
            *(data, admin, caller, BodyReader(limits, reading), streams, watch, pages, debug),
            data_pages={OPENAPI_PATH: CallsPage(data)},
            resources=resources,
            console=_console(resources, caller),
        )


def _access(rooms: Components, settings: Settings) -> Access:
    if not settings.is_auth_required:
        return OpenAccess()
    return KeyedAccess(rooms.registry.keys, rooms.registry.instances.group_of)


def _insight(rooms: Components, limits: RequestLimits, needed: BytesNeeded) -> InsightApi:
    return InsightApi(
        rooms.cache, rooms.registry, rooms.storages, limits, rooms.alerts, rooms.view, needed, rooms.clock
    )


def _estimates(rooms: Components, needed: BytesNeeded) -> Callable[[], Iterator[Reading]]:
    """Let lookups be counted; return what is estimated of them."""
    counts = rooms.counts
    rooms.cache.set_observer(CombinedObserver(counts.cache, needed) if needed.is_on else counts.cache)
    return lambda: needed_readings(needed, counts.groups, [group.name for group in rooms.registry.groups.all()])


def _vitals(rooms: Components, place: ManagerAddress, calls: list[Call], recorder: CallRecorder) -> VitalsWatch:
    groups, leadership = rooms.registry.groups, rooms.leadership
    signs = VitalsReader(
        *(place.endpoint, place.clock, place.phase, calls, recorder, rooms.counts),
        *(rooms.cache, groups, rooms.reclaimer.stats, leadership),
    )
    store = rooms.metadata.store if rooms.metadata.store.is_shared else MemoryStore()  # else nobody else hears it
    return VitalsWatch(signs, VitalsTable(place.clock, store.table("vitals")), leadership, groups, place.clock)


def _resources(calls: list[Call], caller: Caller, recent: RecentAccesses, watch: VitalsWatch) -> Resources:
    def make() -> Resources:
        from kvcm.service.rest.app import Resource, RestApp
        from kvcm.service.rest.history_resource import EventResource, HistoryResource
        from kvcm.service.rest.manager_resource import ManagerResource

        others: list[Resource] = [EventResource(recent), ManagerResource(watch), HistoryResource(watch)]
        return RestApp(calls, caller, __version__, others)

    return LazyResources(make)


def _console(resources: Resources, caller: Caller) -> Resources:
    def make() -> Resources:
        from kvcm.console.app import ConsoleApp

        return ConsoleApp(resources, caller, __version__)

    return LazyResources(make)


@dataclass(frozen=True, slots=True)
class _Adjustable:
    """What settings change while it is at work."""

    limits: RequestLimits
    admission: GuardedAdmission
    reading: RequestQueue
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


def _tracing(settings: Settings, reloader: SettingsReloader, spans: SpanExport | None) -> CallObserver | None:
    if spans is None:
        return None
    from kvcm.service.call_tracing import CallTracing  # needs the extra that made the export possible

    tracing = CallTracing(spans.tracer, Random().random)  # noqa: S311 - a sample, no secret
    tracing.set(settings.trace_sample)
    reloader.subscribe(lambda new, _changed: tracing.set(new.trace_sample))
    return tracing


def _data_calls(rooms: Components, limits: RequestLimits, recent: RecentAccesses) -> list[Call]:
    meta = MetaApi(rooms.cache, rooms.registry, rooms.leadership, limits, rooms.events, recent)
    pins, pools = PinApi(rooms.cache, limits), PoolApi(rooms.registry, rooms.storages)
    return [*meta.calls(), *pins.calls(), *pools.calls()]


def _admin_calls(rooms: Components, limits: RequestLimits, metrics: ApiMetrics, view: UsageView) -> list[Call]:
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


def _state(rooms: Components, view: UsageView) -> ManagerState:
    return ManagerState(
        *(rooms.cache, rooms.registry, view, rooms.reclaimer, rooms.deletions, rooms.garbage, rooms.scrubber),
        *(rooms.storages, rooms.prober, rooms.leadership, rooms.metadata.kind, rooms.metadata.times),
    )


def _apply_to_logs(settings: Settings, changed: Container[str]) -> None:
    if "log_format" in changed:
        set_format(settings.log_format)
    if "log_level" in changed:  # else UpdateLogger's stays
        set_level(LEVELS[settings.log_level_name])


async def _no_op() -> bool:
    return False


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
        of_grpc = GrpcLimits(body, settings.max_connections, settings.max_streams, settings.receive_timeout_ms)
        of_http = self._connections
        self._rpc = GrpcServer(host, settings.rpc_port, of_grpc, gate, tls, of_http)
        self._admin_rpc = None if shared else GrpcServer(host, settings.admin_rpc_port, of_grpc, gate, tls, of_http)
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
        """Return where this manager is, with the ports that are really bound."""
        admin_rpc = self._admin_rpc if self._admin_rpc is not None else self._rpc
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - every address is served: other hosts need a name
            host = socket.gethostname()
        return Endpoint(node_id, host, self._rpc.port, self._http.port, admin_rpc.port, self._admin_http.port)

    @property
    def debug_http_port(self) -> int | None:
        """Port of the debug service, None when it is off."""
        return None if self._debug_http is None else self._debug_http.port

    async def start(self) -> None:
        """Answer probes, and turn calls away for now."""
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
        has_reflection = self._settings.reflection and not self._settings.is_auth_required  # it asks nobody
        if self._admin_rpc is None:
            await self._rpc.serve([*data, *admin], caller, bodies, has_reflection=has_reflection)
        else:
            await self._rpc.serve(data, caller, bodies, has_reflection=has_reflection)
            await self._admin_rpc.serve(admin, caller, bodies, has_reflection=has_reflection)
        self._data.serve(data, caller, pages=interface.data_pages, bodies=bodies)
        self._admin.serve(
            *(interface.admin, caller, interface.streams, interface.pages),
            bodies=bodies,
            resources=interface.resources,
            console=interface.console,
        )
        self._debug.serve(interface.debug, caller, bodies=bodies)

    def apply(self, settings: Settings) -> None:
        """Take over what can be changed of a running manager."""
        new = _connection_limits(settings)
        for each in dataclasses.fields(new):
            setattr(self._connections, each.name, getattr(new, each.name))

    def stop_accepting(self, drain_seconds: float) -> None:
        """Take no new connections; requests in flight may go on for so long."""
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
        settings.receive_timeout_ms / 1000,
        settings.send_timeout_ms / 1000,
        settings.idle_timeout_ms / 1000,
        settings.max_connections,
    )


def _debug_port(settings: Settings) -> int:
    return settings.http_port + DEBUG_PORT_OFFSET if settings.http_port else 0


# How a manager ends, in the order that clients and load balancers can follow (security_ops.md 4).
#
# 1. It is not ready: `/readyz` and gRPC health say so. Requests are served on.
# 2. It gives up the lease, so that another manager takes over the background duties.
# 3. It waits, for those who send requests to notice. Answers close their HTTP connections.
# 4. Requests are turned away; then it accepts no connections.
# 5. What is in flight is finished, within a time.
#
# Whoever calls then stops the duties, closes the listeners, writes down what is left and closes the store. At the very
# end nothing may be running any more: a task that is left was forgotten by whoever began it.

_TURNS = 3  # of the event loop, for tasks that have just ended
_MAX_LOGGED = 10


async def drain(
    gate: ServingGate, leadership: Leadership, listeners: Listeners, delay_seconds: float, timeout_seconds: float
) -> None:
    """Bring a manager to where no request is in flight.

    Args:
        gate: what requests are let in by.
        leadership: to be given up.
        listeners: to be closed to newcomers.
        delay_seconds: how long to serve on after telling that this manager is not ready.
        timeout_seconds: how long what is in flight may take.
    """
    await gate.enter_phase(Phase.LEAVING)
    await leadership.withdraw()
    await asyncio.sleep(delay_seconds)
    await gate.enter_phase(Phase.CLOSED)
    # gRPC cancels what comes in the moment in which it stops to accept, and clients do not retry that as they do what
    # is turned away: so they are told first.
    await gate.wait_until_quiet()
    listeners.stop_accepting(timeout_seconds)
    if not await gate.wait_until_idle(timeout_seconds):
        _log.warning("requests_cut_off", in_flight=gate.in_flight, after_seconds=timeout_seconds)


class ShutdownWatch:
    """Logs what a manager that does not come to its end waits for, again and again. Around its life.

    Args:
        after_seconds: how long that may take unsaid.
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
        """Nothing is in flight any more: what is left takes moments."""
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
    """Log the tasks that are still there although everything is closed."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _log.warning("tasks_left", count=len(left), tasks=sorted(map(_name, left))[:_MAX_LOGGED])


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())


def _place(task: asyncio.Task[Any]) -> str:
    """Return what a task is and, from the outside in, the functions it stands in."""
    inner: Any = task.get_coro()
    names = []
    while inner is not None:
        names.append(getattr(inner, "__qualname__", type(inner).__name__))
        inner = getattr(inner, "cr_await", None)
    return " > ".join(names)
