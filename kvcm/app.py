"""The composition root and the life of a manager: open the store, build the components, serve, drain, close.

`Manager.serve` is that life. `ensure_admin_key` makes the first API key, and the last section sets up the C library's
allocator and Python's garbage collector for a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
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
from kvcm.components import BackgroundTask, Components, Metadata, open_metadata
from kvcm.config import ConfigError, Settings, is_exposed
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.mooncake import AllowedHosts, HostRule, mooncake_hosts
from kvcm.model.nodes import Endpoint
from kvcm.model.principals import ALL_GROUPS, ApiKey, PresentedKey, Role, new_key
from kvcm.model.storages import MooncakeStorageSpec, PathStorageSpec, StorageType
from kvcm.model.tasks import end_tasks
from kvcm.registry.audit_trail import AuditTrail
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry, Schema, ensure_cluster_id, ensure_schema
from kvcm.registry.startup_document import StartupDocument, builtin_document, parse_startup_document
from kvcm.registry.without_effect import group_values_without_effect, storage_values_without_effect
from kvcm.service.admission import Phase, ServingGate
from kvcm.serving import (
    BackgroundReload,
    Listeners,
    ManagerAddress,
    ManagerApi,
    SettingsReloader,
    ShutdownWatch,
    drain,
    log_unfinished_tasks,
    open_tls,
)
from kvcm.storage.directory import OPENERS, Opener, StorageDirectory
from kvcm.storage.mempool import PoolOpener
from kvcm.store.load_progress import LoadProgress
from kvcm.store.numbers import DeletionNumbers
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.store import Store
from kvcm.telemetry.logs import AuditLog
from kvcm.telemetry.tracing import SpanExport, TracingMissingError, open_export

__all__ = [
    "Manager",
    "configure_allocator",
    "configure_garbage_collector",
    "ensure_admin_key",
    "limit_arenas",
    "trim_memory",
]

_log = structlog.get_logger("kvcm")
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PAUSE_SECONDS = 0.5
_POOL_SHARDS = 16


class Manager:
    """A metadata manager: opens its store, builds its components, serves and stops.

    Args:
        settings: its settings.
        clock: time source.
        progress: shows, inside its block, how many rows of how many are loaded.
        reread: reads the settings again, for a reload; raises ConfigError.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        progress: Callable[[], AbstractContextManager[LoadProgress]] = lambda: nullcontext(_show_nothing),
        reread: Callable[[], Settings] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock if clock is not None else SystemClock()
        self._progress = progress
        self._reloader = SettingsReloader(settings, reread if reread is not None else lambda: settings)
        self._gate = ServingGate()
        self._on_loaded_rows: LoadProgress = _show_nothing
        self._stopping = asyncio.Event()
        self._is_starting = True
        self._failure = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends the process at once. SIGHUP
        reloads the settings.

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
                if not self._stopping.is_set():  # else a signal stopped it before it served
                    raise
        await log_unfinished_tasks()
        if self._failure:
            raise StorageIOError(self._failure)
        _log.info("stopped")

    async def _live(self) -> None:
        async with self.running() as endpoint:
            configure_garbage_collector()
            configure_allocator()
            _log.info("serving", **_addresses(endpoint))
            _warn_of_risks(self._settings)
            await self._stopping.wait()

    def _handle_signals(self, until: contextlib.ExitStack) -> None:
        loop, life = asyncio.get_running_loop(), asyncio.current_task()
        assert life is not None

        def stop() -> None:
            self._stopping.set()
            for number in _END_SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)  # the next one ends the process at once
            if self._is_starting:
                life.cancel()

        for number in _END_SIGNALS:
            loop.add_signal_handler(number, stop)
        reloads = BackgroundReload(self._reloader, lambda: self._gate.phase is Phase.SERVING)
        loop.add_signal_handler(signal.SIGHUP, reloads.start)
        until.callback(loop.remove_signal_handler, signal.SIGHUP)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Endpoint]:
        """Serve inside the block. Yields the endpoint with the bound ports."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                endpoint = await self._start(stack)
            finally:
                self._is_starting = False  # signals no longer interrupt the closing
            yield endpoint

    async def _start(self, stack: contextlib.AsyncExitStack) -> Endpoint:
        """Start to serve; the stack stops it."""
        files, spans = open_tls(self._settings), _open_tracing(self._settings)
        shutdown = stack.enter_context(ShutdownWatch())
        if spans is not None:
            stack.push_async_callback(spans.close)
        listeners = Listeners(self._settings, self._gate, files.tls if files is not None else None)
        stack.push_async_callback(listeners.stop)
        await listeners.start()
        self._reloader.subscribe(lambda new, _changed: listeners.apply(new))
        self._on_loaded_rows = listeners.probes.set_loaded_rows
        _log.info("listening", **_addresses(listeners.endpoint("", self._settings.bind_address)))
        components = await stack.enter_async_context(self.opened())
        stack.push_async_callback(components.flush)
        stack.push_async_callback(listeners.stop)  # before the components close, even with requests in flight
        node_id = components.leadership.node_id
        endpoint, advertised = listeners.endpoint(node_id, self._settings.bind_address), listeners.advertised(node_id)
        place = ManagerAddress(advertised, self._clock, lambda: self._gate.phase.value)
        tls = files.tls if files is not None else None
        interface = ManagerApi.of(components, self._settings, self._reloader, place, spans=spans, tls=tls)
        stack.push_async_callback(interface.vitals.withdraw)
        for each in components.storage_events.sockets:
            each.open()
            stack.callback(each.close)
        tasks: list[asyncio.Task[None]] = []
        stack.push_async_callback(end_tasks, tasks)
        stack.callback(shutdown.begin)
        stack.push_async_callback(self._drain, components, listeners)
        await components.leadership.publish(advertised)
        await components.leadership.tick()
        await components.reclaimer.begin()  # reads every block once, before any request waits
        background: list[BackgroundTask] = [
            *components.background_tasks(),
            ("store_watch", partial(listeners.probes.watch_store, components.metadata.check)),
            ("freed_memory", _trim_memory_periodically),
            ("vitals", interface.vitals.run),
        ]
        if files is not None:
            background.append(("certificates", files.run))
            self._reloader.on_reload(files.reload)
        tasks += [asyncio.create_task(_keep_running(name, run)) for name, run in background]
        self._gate.on_phase_change(interface.vitals.publish_now)
        await listeners.serve(interface)
        await self._gate.enter_phase(Phase.SERVING)
        return endpoint

    async def _drain(self, components: Components, listeners: Listeners) -> None:
        settings = self._reloader.settings
        if self._gate.phase is Phase.SERVING:
            sessions = components.cache.endings.open_count
            _log.info("draining", open_write_sessions=sessions, in_flight=self._gate.in_flight)
        # No client knows a manager that never served, and one whose memory is ahead of the disk must not serve.
        is_quick = self._failure or self._gate.phase is Phase.STARTING
        delay_seconds = 0.0 if is_quick else settings.drain_delay_ms / 1000
        await drain(self._gate, components.leadership, listeners, delay_seconds, settings.drain_timeout_ms / 1000)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Components]:
        """Open the store and build the components, without ports; the end of the block closes them."""
        settings, self._loop = self._settings, asyncio.get_running_loop()
        document = _startup_document(settings)
        node_id = settings.node_id or f"{socket.gethostname()}:{settings.admin_http_port}_{secrets.token_hex(8)}"
        async with contextlib.AsyncExitStack() as stack:
            with self._progress() as progress:
                metadata = await open_metadata(settings, self._clock, node_id, self._status_line(progress), self._fail)
            stack.push_async_callback(metadata.close)
            store, table = metadata.store, metadata.registry_table
            if metadata.guard is not None:
                await metadata.guard.open()
                await metadata.check_block_stores()
            elif metadata.journal is not None:
                await metadata.journal.open()
            schema = await ensure_schema(table, store.flush, metadata.first_schema)
            cluster_id = settings.cluster_id or await ensure_cluster_id(table, _new_cluster_id(settings), store.flush)
            storages = self._storage_directory(store, cluster_id, document)
            stack.callback(storages.close_all)
            audit_log = AuditLog(settings.audit_log_file)
            audit = AuditTrail(audit_log.record, self._clock)
            stack.push_async_callback(audit_log.flushed)
            registry = self._registry(metadata, storages, schema, audit, audit_log)
            await registry.load()
            await ensure_admin_key(registry, settings)
            await _add_missing(registry, document)
            _report_without_effect(registry)
            leadership = Leadership(
                node_id,
                self._clock,
                settings.lease_ms / 1000,
                metadata.lease,
                store.table("nodes"),
                margin_seconds=settings.loop_interval_ms / 1000,
            )
            components = Components.build(
                metadata=metadata,
                registry=registry,
                storages=storages,
                leadership=leadership,
                clock=self._clock,
                settings=settings,
                audit=audit,
                audit_log=audit_log,
            )
            await components.cache.load()
            await components.verification.check()
            if components.times is not None:  # before anything is written there, or this manager's end
                await components.times.keep(is_leader=False)
            stack.push_async_callback(components.events.close)
            stack.push_async_callback(components.cache.endings.concluded)
            yield components

    def _registry(
        self, metadata: Metadata, storages: StorageDirectory, schema: Schema, audit: AuditTrail, audit_log: AuditLog
    ) -> Registry:
        return Registry(
            storages,
            metadata.registry_table,
            flush=partial(_flush_all, metadata.store.flush, audit_log.flushed),
            store_kind=metadata.kind,
            clock=self._clock,
            uses=metadata.store.table("uses"),
            listener=audit.changed,
            tags=metadata.tags_with(schema),
            block_stores=metadata.tags_in_block_stores,
        )

    def _storage_directory(self, store: Store, cluster_id: str, document: StartupDocument) -> StorageDirectory:
        pools = PoolOpener(store.table("pools", _POOL_SHARDS), self._clock, Random(), is_shared=store.is_shared)  # noqa: S311
        openers: dict[StorageType, Opener] = {**OPENERS, StorageType.ST_TAIRMEMPOOL: pools}
        roots, hosts = _allowed_roots(self._settings, document), _allowed_hosts(self._settings, document)
        storages = StorageDirectory(cluster_id, roots, openers, allowed_hosts=hosts)
        storages.slot_reuse.numbers = DeletionNumbers(store)
        return storages

    def _status_line(self, progress: LoadProgress) -> LoadProgress:
        """Return progress that also informs the probes, and ends the loading after a signal. Called on a thread."""

        def show(done: int, estimated: int) -> None:
            if self._stopping.is_set():
                raise StorageIOError("the manager was told to stop while it loaded metadata")
            self._on_loaded_rows(done, estimated)
            progress(done, estimated)

        return show

    def _fail(self, reason: str) -> None:
        """Stop, since memory is ahead of the disk and only a restart makes them agree. Called on a thread."""
        _log.error("metadata_store_failed", reason=reason)
        self._failure = reason
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stopping.set)


def _warn_of_risks(settings: Settings) -> None:
    """Log at start which clients have access without authentication or encryption."""
    if not settings.is_auth_required:
        log, clients = (_log.info, "on this host") if settings.is_loopback else (_log.warning, "that reach these ports")
        log("not_authenticated", reason=f"kvcm.auth.mode is off: all clients {clients} may do everything")
    elif not settings.is_loopback and not settings.tls_cert_file:
        _log.warning("not_encrypted", reason="keys and prompts can be read on the way: set kvcm.tls.cert_file")


async def _flush_all(*flushes: Callable[[], Awaitable[None]]) -> None:
    for flush in flushes:
        await flush()


def _open_tracing(settings: Settings) -> SpanExport | None:
    """Return the export of spans, None if calls are not traced."""
    if not settings.otlp_endpoint:
        return None
    instance = settings.node_id or f"{socket.gethostname()}:{settings.admin_http_port}"
    try:
        return open_export(settings.otlp_endpoint, __version__, instance)
    except TracingMissingError as error:
        raise ConfigError(f"kvcm.tracing.otlp_endpoint is set: {error}") from None


async def _keep_running(name: str, task: Callable[[], Awaitable[None]]) -> None:
    """Run a background task until cancelled: an error in one round is logged and does not end it."""
    while True:
        try:
            await task()
            await asyncio.sleep(0)  # one that ends at once would hold up all others
        except KvcmError as error:  # the store is unavailable: the next round retries
            _log.warning("duty_interrupted", duty=name, reason=str(error))
            await asyncio.sleep(_PAUSE_SECONDS)
        except Exception:
            _log.exception("duty_failed", duty=name)
            await asyncio.sleep(_PAUSE_SECONDS)


def _new_cluster_id(settings: Settings) -> str:
    """Return the id of a store that has none yet: the name of a shared one, else a random id (design.md decision 1)."""
    if settings.registry_storage_uri.startswith("redis"):
        return parse_redis_uri(settings.registry_storage_uri).cluster_name
    return secrets.token_hex(8)


async def _add_missing(registry: Registry, document: StartupDocument) -> None:
    """Add the storage and the group of the startup document if the store does not have them."""
    try:
        await registry.storages.add(document.storage)
    except DuplicateEntityError:
        pass
    except NotReadyError as error:  # it was removed, and its name is not free yet
        _log.warning("storage_not_added", storage=document.storage.global_unique_name, reason=str(error))
    with contextlib.suppress(DuplicateEntityError):
        await registry.groups.create(document.group)
    _log.info("configured", storage=document.storage.global_unique_name, group=document.group.name)


def _show_nothing(_done: int, _estimated: int) -> None:
    """Show no progress."""


def _allowed_roots(settings: Settings, document: StartupDocument) -> tuple[Path, ...] | None:
    """Return the roots that storages may have: any while only this host can reach the server, else the configured ones
    (design.md decision 12).

    The startup document comes from the operator's own files, not through the API: its root is always allowed.
    """
    if settings.allowed_roots is None and settings.is_loopback:
        return None
    spec = document.storage.spec
    own = (Path(spec.root),) if isinstance(spec, PathStorageSpec) else ()
    return (*(settings.allowed_roots or ()), *own)


def _allowed_hosts(settings: Settings, document: StartupDocument) -> AllowedHosts:
    """Return the hosts that storages may name, by the same rule."""
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
    return parse_startup_document(text, partial(_log_without_effect, settings.startup_config))


def _log_without_effect(name: str, text: str) -> None:
    _log.warning("without_effect", name=name, reason=text)


def _report_without_effect(registry: Registry) -> None:
    """Log the stored values that have no effect."""
    for group in registry.groups.all():
        for text in group_values_without_effect(group):
            _log_without_effect(f"group {group.name}", text)
    for config in registry.storages.all():
        for text in storage_values_without_effect(config):
            _log_without_effect(f"storage {config.global_unique_name}", text)


def _addresses(endpoint: Endpoint) -> dict[str, str]:
    return {
        "grpc": f"{endpoint.host}:{endpoint.meta_rpc_port}",
        "http": f"{endpoint.host}:{endpoint.meta_http_port}",
        "admin_grpc": f"{endpoint.host}:{endpoint.admin_rpc_port}",
        "admin_http": f"{endpoint.host}:{endpoint.admin_http_port}",
    }


# The first API key, with which an administrator makes others.
#
# If keys are required, an administrator's key is in a file of the manager's host that only its owner can read. The
# manager adopts a key that is in the file already, so that secrets of an orchestrator can be mounted; else it makes
# one, unless the deployment has an administrator. An adopted key that was revoked or rotated since does not come back:
# the operator has to remove it from the file. The manager never overwrites a file, and never logs the secret.

_ADMIN_KEY_NAME = "admin"


async def ensure_admin_key(registry: Registry, settings: Settings) -> None:
    """Ensure that a deployment that requires keys has an administrator's key.

    Raises:
        ConfigError: the file cannot be used, or there is neither an administrator nor a file for a new key.
        StorageIOError: the store is unavailable.
    """
    if not settings.is_auth_required:
        return
    path, administrators = _admin_key_path(settings), _administrators(registry, settings)
    if path is not None and path.exists():
        await _adopt_admin_key(registry, settings, path)
    elif path is not None and all(key.expires_at for key in administrators):
        await registry.taken_keys.import_key(_ADMIN_KEY_NAME, _write_admin_key(path))
        _log.warning("admin_key_made", file=str(path))
    elif not administrators:
        raise ConfigError(
            "kvcm.auth.mode is required and there is no administrator's key: set kvcm.auth.admin_key_file, or "
            "give --data-dir, or make a key while kvcm.auth.mode is off"
        )


def _admin_key_path(settings: Settings) -> Path | None:
    if settings.admin_key_file:
        return Path(settings.admin_key_file)
    return Path(settings.data_dir) / "admin.key" if settings.data_dir else None


def _administrators(registry: Registry, settings: Settings) -> list[ApiKey]:
    """Return the keys that suffice for administration: of all groups, of no account (others may remove it), and of a
    certificate only if the ports request certificates."""
    return [
        key
        for key in registry.keys.all()
        if key.role is Role.ROLE_ADMIN
        and ALL_GROUPS in key.groups
        and not key.account
        and (key.digest or settings.tls_client_ca_file)
    ]


async def _adopt_admin_key(registry: Registry, settings: Settings, path: Path) -> None:
    try:
        key = await registry.taken_keys.import_key(_ADMIN_KEY_NAME, _read_admin_key(path))
    except InvalidArgumentError as error:
        raise ConfigError(f"kvcm.auth.admin_key_file {str(path)!r} cannot be used: {error}") from error
    administrators = _administrators(registry, settings)
    if key in administrators:
        return
    reason = "the key in it has ended, or is no administrator's: remove the file, or put a new key into it"
    if not administrators:
        raise ConfigError(
            f"kvcm.auth.admin_key_file {str(path)!r} is of no use, and there is no other administrator: {reason}. "
            "If there is no file, the manager makes a new key and writes it there"
        )
    _log.warning("admin_key_ended", file=str(path), reason=reason)


def _read_admin_key(path: Path) -> PresentedKey:
    try:
        text = path.read_text(encoding="ascii").strip()
        exposed = is_exposed(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kvcm.auth.admin_key_file {str(path)!r} cannot be read: {type(error).__name__}") from None
    key = PresentedKey.parse(text)
    if key is None:
        raise ConfigError(
            f"kvcm.auth.admin_key_file {str(path)!r} holds no key: it must be one line, kvcm_<id>_<secret>"
        )
    if exposed:
        _log.warning("admin_key_readable", file=str(path), reason="others on this host can read it: chmod 600")
    return key


def _write_admin_key(path: Path) -> PresentedKey:
    key = new_key()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{key.text}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"kvcm.auth.admin_key_file {str(path)!r} cannot be written: {error.strerror}") from error
    return key


# Memory of the process: the C library's allocator, and Python's garbage collector.
#
# Answers take 100 kB and more, and live for a millisecond. By default glibc returns such chunks to the system when they
# are freed and requests new ones, whose pages the system zeroes first: a tenth of the CPU time of a lookup of 1,024
# blocks, more for answers in JSON. So freed memory stays with the process, for the next answer. But free memory between
# chunks that are in use grows with every peak, and would never be returned: twice a minute the process returns all of
# it, at the price of ten thousand page faults.
#
# By default glibc also makes eight arenas per core, and gives each new thread one of its own, which keeps the memory of
# its busiest moment. Threads here mostly wait for the disk or for Python's global lock, and never allocate at the
# same time in such numbers: a few arenas suffice. Other C libraries keep their defaults.
#
# Records live long and form no cycles: collecting as often as Python does by default costs a quarter of a write. But
# gRPC leaves a cycle of five objects behind with every request, with its path and metadata. Garbage and the pause for
# its collection have to stay small: 20,000 objects are some 4,000 requests, 2 MB, and a millisecond or two. Each live
# object is traversed twice, however small the first generation is; traversing all of them again is the expensive part.

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_CHUNK = 32 << 20  # glibc allows no more; larger ones are mapped and returned each time
_TRIM_THRESHOLD_BYTES = 64 << 20
_TOP_PAD_BYTES = 4 << 20
_MAX_ARENAS = 4
_TRIM_SECONDS = 30.0
_YOUNG_OBJECTS, _YOUNG_ROUNDS, _OLD_ROUNDS = 20_000, 50, 100


def configure_allocator() -> bool:
    """Let the allocator keep up to 64 MiB at the end of its heap; return whether it supports that."""
    return _mallopt(
        (_M_MMAP_THRESHOLD, _LARGEST_CHUNK), (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES)
    )


def limit_arenas() -> bool:
    """Let threads that start from now on share a few arenas; return whether the allocator supports that."""
    return _mallopt((_M_ARENA_MAX, _MAX_ARENAS))


def trim_memory() -> bool:
    """Return free pages to the system; return whether the allocator supports that. Blocks for milliseconds, without
    Python's global lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(_TOP_PAD_BYTES))
    return True


async def _trim_memory_periodically() -> None:
    """Trim until cancelled, on a thread; at once, since loading metadata leaves much free."""
    while True:
        await asyncio.to_thread(trim_memory)
        await asyncio.sleep(_TRIM_SECONDS)


def configure_garbage_collector() -> None:
    """Exempt all present objects from collection, and collect later ones less often."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _OLD_ROUNDS)


def _mallopt(*wanted: tuple[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [mallopt(option, size) for option, size in wanted]
    return all(done)
