"""The composition root: the only place that wires rooms, and the life story of a manager."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from random import Random

import structlog

from kvcm import __version__
from kvcm.admin_key import keep_admin_key
from kvcm.config import ConfigError, Settings
from kvcm.draining import SlowEnd, drain, tell_left_tasks
from kvcm.freed_memory import collect_seldom, give_back_freed_memory, keep_freed_memory, limit_arenas
from kvcm.interface import Interface, Place
from kvcm.metadata import open_metadata
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.errors import DuplicateEntityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.hosts import AllowedHosts, HostRule
from kvcm.model.mooncake import mooncake_hosts
from kvcm.model.nodes import Endpoint
from kvcm.model.storages import MooncakeStorageSpec, PathStorageSpec, StorageType
from kvcm.model.tasks import end_tasks
from kvcm.registry.audit_trail import AuditTrail
from kvcm.registry.documents import StartupDocument, builtin_document, parse_startup_document
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry, kept_cluster_id
from kvcm.registry.schema import keep_schema
from kvcm.reload import BackgroundReload, Reloader
from kvcm.rooms import Duty, Rooms
from kvcm.service.gate import Gate, Phase
from kvcm.serving import Listeners
from kvcm.storage.directory import OPENERS, Opener, StorageDirectory
from kvcm.storage.mempool import PoolOpener
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks.progress import LoadProgress
from kvcm.telemetry.audit_log import AuditLog
from kvcm.telemetry.tracing import SpanExport, TracingMissingError, open_export
from kvcm.tls_files import open_tls

__all__ = ["Manager"]

_ENDING = (signal.SIGTERM, signal.SIGINT)
_PAUSE_SECONDS = 0.5
_POOL_SHARDS = 16

_log = structlog.get_logger("kvcm")


class Manager:
    """A metadata manager: opens its store, builds its rooms, then starts, serves and stops.

    Args:
        settings: how it is configured.
        clock: time source.
        progress: shows rows read and rows there are, inside its block, while metadata is loaded.
        reread: reads the settings anew, when somebody asks for that; raises ConfigError.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        progress: Callable[[], AbstractContextManager[LoadProgress]] = lambda: nullcontext(_unseen),
        reread: Callable[[], Settings] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock if clock is not None else SystemClock()
        self._progress = progress
        self._reloader = Reloader(settings, reread if reread is not None else lambda: settings)
        self._gate = Gate()
        self._tell_rows: LoadProgress = _unseen
        self._stopping = asyncio.Event()
        self._is_starting = True
        self._failure = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends the process at once. SIGHUP reads
        the settings anew.

        Raises:
            KvcmError: the store or a storage of the startup document cannot be opened, or an address not be bound.
            ConfigError: a file or directory that the settings name cannot be used.
        """
        limit_arenas()  # before there are threads
        with contextlib.ExitStack() as signals:
            self._handle_signals(signals)
            try:
                await self._live()
            except asyncio.CancelledError:
                if not self._stopping.is_set():  # else it was told to stop before it served
                    raise
        await tell_left_tasks()
        if self._failure:
            raise StorageIOError(self._failure)
        _log.info("stopped")

    async def _live(self) -> None:
        async with self.running() as endpoint:
            collect_seldom()
            keep_freed_memory()
            _log.info("serving", **_addresses(endpoint))
            _tell_risks(self._settings)
            await self._stopping.wait()

    def _handle_signals(self, until: contextlib.ExitStack) -> None:
        loop, life = asyncio.get_running_loop(), asyncio.current_task()
        assert life is not None

        def stop() -> None:
            self._stopping.set()
            for number in _ENDING:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)  # the next one ends the process at once
            if self._is_starting:
                life.cancel()

        for number in _ENDING:
            loop.add_signal_handler(number, stop)
        reloads = BackgroundReload(self._reloader, lambda: self._gate.phase is Phase.SERVING)
        loop.add_signal_handler(signal.SIGHUP, reloads.begin)
        until.callback(loop.remove_signal_handler, signal.SIGHUP)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Endpoint]:
        """Serve inside the block. Yields the endpoint with the ports that are really bound."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                endpoint = await self._start(stack)
            finally:
                self._is_starting = False  # what was opened is closed, whatever anybody signals meanwhile
            yield endpoint

    async def _start(self, stack: contextlib.AsyncExitStack) -> Endpoint:
        """Begin to serve; the stack ends it."""
        files, spans = open_tls(self._settings), _opened_spans(self._settings)
        slow_end = stack.enter_context(SlowEnd())
        if spans is not None:
            stack.push_async_callback(spans.close)
        listeners = Listeners(self._settings, self._gate, files.tls if files is not None else None)
        stack.push_async_callback(listeners.stop)
        await listeners.start()
        self._reloader.follow(lambda new, _changed: listeners.apply(new))
        self._tell_rows = listeners.probes.note_rows
        _log.info("listening", **_addresses(listeners.endpoint("", self._settings.bind_address)))
        rooms = await stack.enter_async_context(self.opened())
        stack.push_async_callback(rooms.settle)
        stack.push_async_callback(listeners.stop)  # before the rooms close, whatever is still in flight
        endpoint = listeners.endpoint(rooms.leadership.node_id, self._settings.bind_address)
        place = Place(endpoint, self._clock, lambda: self._gate.phase.value)
        tls = files.tls if files is not None else None
        interface = Interface.of(rooms, self._settings, self._reloader, place, spans, tls)
        stack.push_async_callback(interface.vitals.withdraw)
        duties: list[asyncio.Task[None]] = []
        stack.push_async_callback(end_tasks, duties)
        stack.callback(slow_end.begin)
        stack.push_async_callback(self._drain, rooms, listeners)
        await rooms.leadership.publish(endpoint)
        await rooms.leadership.tick()
        await rooms.reclaimer.begin()  # reads every block once: nobody waits for that yet
        ask = rooms.metadata.store.table("registry").version
        watch: Duty = ("store_watch", partial(listeners.probes.watch_store, ask))
        trim: Duty = ("freed_memory", give_back_freed_memory)
        certificates: list[Duty] = [("certificates", files.run)] if files is not None else []
        vitals: Duty = ("vitals", interface.vitals.run)
        every = (*rooms.duties(), watch, trim, vitals, *certificates)
        duties += [asyncio.create_task(_keep_running(*duty)) for duty in every]
        if files is not None:
            self._reloader.refresh(files.reread)
        self._gate.follow(interface.vitals.wake)
        await listeners.serve(interface)
        await self._gate.enter_phase(Phase.SERVING)
        return endpoint

    async def _drain(self, rooms: Rooms, listeners: Listeners) -> None:
        settings = self._reloader.settings
        if self._gate.phase is Phase.SERVING:
            sessions = rooms.cache.endings.open_count
            _log.info("draining", open_write_sessions=sessions, in_flight=self._gate.in_flight)
        # Who never served is in nobody's list, and memory that is ahead of the disk is not to be served from.
        is_quick = self._failure or self._gate.phase is Phase.STARTING
        delay_seconds = 0.0 if is_quick else settings.drain_delay_ms / 1000
        await drain(self._gate, rooms.leadership, listeners, delay_seconds, settings.drain_timeout_ms / 1000)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Rooms]:
        """Open the store and build the rooms, which are closed at the end of the block; nothing is served."""
        settings, self._loop = self._settings, asyncio.get_running_loop()
        document = _startup_document(settings)
        node_id = settings.node_id or f"{socket.gethostname()}:{settings.admin_http_port}_{secrets.token_hex(8)}"
        async with contextlib.AsyncExitStack() as stack:
            with self._progress() as progress:
                metadata = await open_metadata(settings, self._clock, node_id, self._told(progress), self._fail)
            stack.push_async_callback(metadata.close)
            store, table = metadata.store, metadata.store.table("registry")
            await keep_schema(table, store.flush)
            cluster_id = settings.cluster_id or await kept_cluster_id(table, _new_cluster_id(settings), store.flush)
            pools = PoolOpener(store.table("pools", _POOL_SHARDS), self._clock, Random(), is_shared=store.is_shared)  # noqa: S311
            openers: dict[StorageType, Opener] = {**OPENERS, StorageType.ST_TAIRMEMPOOL: pools}
            storages = StorageDirectory(
                *(cluster_id, _allowed_roots(settings, document), openers),
                allowed_hosts=_allowed_hosts(settings, document),
            )
            stack.callback(storages.close_all)
            audit_log = AuditLog(settings.audit_log_file)
            audit = AuditTrail(audit_log.record, self._clock)
            stack.push_async_callback(audit_log.flushed)
            flush = partial(_flushed, store.flush, audit_log.flushed)
            uses = store.table("uses")
            registry = Registry(
                *(storages, table, flush, metadata.kind, self._clock, uses, audit.changed),
            )
            await registry.load()
            await keep_admin_key(registry, settings)
            await _add_missing(registry, document)
            leadership = Leadership(
                node_id,
                self._clock,
                settings.lease_ms / 1000,
                metadata.lease,
                store.table("nodes"),
                margin_seconds=settings.loop_interval_ms / 1000,
            )
            rooms = Rooms.build(metadata, registry, storages, leadership, self._clock, settings, audit, audit_log)
            await rooms.cache.load()
            stack.push_async_callback(rooms.events.close)
            yield rooms

    def _told(self, progress: LoadProgress) -> LoadProgress:
        """Also tell the probes, and end the loading when the manager is told to stop. Called on a thread."""

        def tell(done: int, estimated: int) -> None:
            if self._stopping.is_set():
                raise StorageIOError("the manager was told to stop while it loaded metadata")
            self._tell_rows(done, estimated)
            progress(done, estimated)

        return tell

    def _fail(self, reason: str) -> None:
        """Memory is ahead of the disk: only a restart makes them agree. Called on a thread of the store."""
        _log.error("metadata_store_failed", reason=reason)
        self._failure = reason
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stopping.set)


def _tell_risks(settings: Settings) -> None:
    """Say at start who can reach what."""
    if not settings.is_auth_required:
        log, who = (_log.info, "is on this host") if settings.is_loopback else (_log.warning, "reaches these ports")
        log("not_authenticated", reason=f"kvcm.auth.mode is off: whoever {who} may do everything")
    elif not settings.is_loopback and not settings.tls_cert_file:
        _log.warning("not_encrypted", reason="keys and prompts can be read on the way: set kvcm.tls.cert_file")


async def _flushed(*flushes: Callable[[], Awaitable[None]]) -> None:
    for flush in flushes:
        await flush()


def _opened_spans(settings: Settings) -> SpanExport | None:
    """Return where spans go, None for that calls are not traced."""
    if not settings.otlp_endpoint:
        return None
    instance = settings.node_id or f"{socket.gethostname()}:{settings.admin_http_port}"
    try:
        return open_export(settings.otlp_endpoint, __version__, instance)
    except TracingMissingError as error:
        raise ConfigError(f"kvcm.tracing.otlp_endpoint is set: {error}") from None


async def _keep_running(name: str, duty: Callable[[], Awaitable[None]]) -> None:
    """Run a background duty for good: a defect in one round is logged and does not end it."""
    while True:
        try:
            await duty()
        except KvcmError as error:  # the store cannot be asked: the next round tries again
            _log.warning("duty_interrupted", duty=name, reason=str(error))
            await asyncio.sleep(_PAUSE_SECONDS)
        except Exception:
            _log.exception("duty_failed", duty=name)
            await asyncio.sleep(_PAUSE_SECONDS)


def _new_cluster_id(settings: Settings) -> str:
    """What a store that has no id yet is given: the name of a shared one, else something new (design.md decision 1)."""
    if settings.registry_storage_uri.startswith("redis"):
        return parse_redis_uri(settings.registry_storage_uri).cluster_name
    return secrets.token_hex(8)


async def _add_missing(registry: Registry, document: StartupDocument) -> None:
    """Add what the startup document names and the store does not know yet."""
    try:
        await registry.storages.add(document.storage)
    except DuplicateEntityError:
        pass
    except NotReadyError as error:  # it was removed, and its name is not free yet
        _log.warning("storage_not_added", storage=document.storage.global_unique_name, reason=str(error))
    with contextlib.suppress(DuplicateEntityError):
        await registry.groups.create(document.group)
    _log.info("configured", storage=document.storage.global_unique_name, group=document.group.name)


def _unseen(_done: int, _estimated: int) -> None:
    """Nobody looks."""


def _allowed_roots(settings: Settings, document: StartupDocument) -> tuple[Path, ...] | None:
    """Any root while only this host can reach the server, else what is configured (design.md decision 12).

    The startup document comes from the operator's own files, not through the API: its root is always allowed.
    """
    if settings.allowed_roots is None and settings.is_loopback:
        return None
    spec = document.storage.spec
    own = (Path(spec.root),) if isinstance(spec, PathStorageSpec) else ()
    return (*(settings.allowed_roots or ()), *own)


def _allowed_hosts(settings: Settings, document: StartupDocument) -> AllowedHosts:
    """The same for hosts that storages name."""
    if settings.allowed_hosts is None and settings.is_loopback:
        return AllowedHosts()
    spec = document.storage.spec
    own = mooncake_hosts(spec) if isinstance(spec, MooncakeStorageSpec) else []
    return AllowedHosts((*(settings.allowed_hosts or ()), *(HostRule.parse(str(host)) for _, host in own)))


def _default_root(settings: Settings) -> Path:
    return Path(settings.data_dir or tempfile.gettempdir()).resolve() / "nfs"


def _startup_document(settings: Settings) -> StartupDocument:
    if not settings.startup_config:
        return builtin_document(_default_root(settings))
    try:
        text = Path(settings.startup_config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kvcm.startup_config {settings.startup_config!r} cannot be read: {error}") from error
    return parse_startup_document(text)


def _addresses(endpoint: Endpoint) -> dict[str, str]:
    return {
        "grpc": f"{endpoint.host}:{endpoint.meta_rpc_port}",
        "http": f"{endpoint.host}:{endpoint.meta_http_port}",
        "admin_grpc": f"{endpoint.host}:{endpoint.admin_rpc_port}",
        "admin_http": f"{endpoint.host}:{endpoint.admin_http_port}",
    }
