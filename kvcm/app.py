"""The composition root: the only place that wires rooms, and the life story of a manager."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random

import structlog

from kvcm.config import ConfigError, Settings
from kvcm.metadata import open_metadata
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.errors import DuplicateEntityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.hosts import AllowedHosts, HostRule
from kvcm.model.mooncake import mooncake_hosts
from kvcm.model.nodes import Endpoint
from kvcm.model.storages import MooncakeStorageSpec, PathStorageSpec, StorageType
from kvcm.registry.documents import StartupDocument, builtin_document, parse_startup_document
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry, kept_cluster_id
from kvcm.rooms import Rooms
from kvcm.service.admin_api import AdminApi
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.calls import Call, Caller
from kvcm.service.capacity_api import CapacityApi
from kvcm.service.capacity_series import CapacitySeries
from kvcm.service.capacity_view import CapacityView
from kvcm.service.drain_view import DrainView
from kvcm.service.grpc_server import GrpcServer
from kvcm.service.http_app import HttpApp, LineStream
from kvcm.service.http_server import HttpServer
from kvcm.service.limits import RequestLimits
from kvcm.service.meta_api import MetaApi
from kvcm.service.pin_api import PinApi
from kvcm.service.pool_api import PoolApi
from kvcm.service.storage_api import StorageApi
from kvcm.storage.directory import OPENERS, Opener, StorageDirectory
from kvcm.storage.mempool import PoolOpener
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks.progress import LoadProgress
from kvcm.telemetry.metrics import ApiMetrics

__all__ = ["Manager"]

_DRAIN_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
_POOL_SHARDS = 16

_log = structlog.get_logger("kvcm")


class Manager:
    """A metadata manager: opens its store, builds its rooms, then starts, serves and stops.

    Args:
        settings: how it is configured.
        clock: time source.
        progress: shows rows read and rows there are, inside its block, while metadata is loaded.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        progress: Callable[[], AbstractContextManager[LoadProgress]] = lambda: nullcontext(_unseen),
    ) -> None:
        self._settings = settings
        self._clock = clock if clock is not None else SystemClock()
        self._progress = progress
        self._stopping = asyncio.Event()
        self._failure = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends the process at once.

        Raises:
            KvcmError: the store or a storage of the startup document cannot be opened, or an address not be bound.
            ConfigError: a file or directory that the settings name cannot be used.
        """
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            self._stopping.set()
            loop.remove_signal_handler(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        async with self.running() as endpoint:
            # Records live long and form no cycles: collecting as often as Python does by default costs a quarter of a
            # write.
            gc.freeze()
            gc.set_threshold(200_000, 20, 100)
            _log.info("serving", **_addresses(endpoint))
            await self._stopping.wait()
        if self._failure:
            raise StorageIOError(self._failure)
        _log.info("stopped")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Endpoint]:
        """Serve inside the block. Yields the endpoint with the ports that are really bound."""
        async with contextlib.AsyncExitStack() as stack:
            rooms = await stack.enter_async_context(self.opened())
            stack.push_async_callback(rooms.settle)
            servers = _Servers(self._settings)
            stack.push_async_callback(servers.stop)
            endpoint = servers.endpoint(rooms.leadership.node_id, self._settings.bind_address)
            stack.push_async_callback(rooms.leadership.withdraw)
            await rooms.leadership.publish(endpoint)
            await rooms.leadership.tick()
            rooms.reclaimer.follow()  # reads every block once: nobody waits for that yet
            stack.push_async_callback(_cancel, [asyncio.create_task(_keep_running(*duty)) for duty in rooms.duties()])
            await self._start(servers, rooms)
            yield endpoint
            _log.info("draining", open_write_sessions=rooms.cache.endings.open_count)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Rooms]:
        """Open the store and build the rooms, which are closed at the end of the block; nothing is served."""
        settings, self._loop = self._settings, asyncio.get_running_loop()
        document = _startup_document(settings)
        node_id = settings.node_id or f"{socket.gethostname()}:{settings.admin_http_port}_{secrets.token_hex(8)}"
        async with contextlib.AsyncExitStack() as stack:
            with self._progress() as progress:
                metadata = await open_metadata(settings, self._clock, node_id, progress, self._fail)
            stack.push_async_callback(metadata.close)
            store, table = metadata.store, metadata.store.table("registry")
            cluster_id = settings.cluster_id or await kept_cluster_id(table, _new_cluster_id(settings), store.flush)
            pools = PoolOpener(store.table("pools", _POOL_SHARDS), self._clock, Random(), is_shared=store.is_shared)  # noqa: S311
            openers: dict[StorageType, Opener] = {**OPENERS, StorageType.ST_TAIRMEMPOOL: pools}
            storages = StorageDirectory(
                *(cluster_id, _allowed_roots(settings, document), openers),
                allowed_hosts=_allowed_hosts(settings, document),
            )
            stack.callback(storages.close_all)
            registry = Registry(storages, table, store.flush, metadata.kind)
            await registry.load()
            await _add_missing(registry, document)
            leadership = Leadership(
                node_id,
                self._clock,
                settings.lease_ms / 1000,
                metadata.lease,
                store.table("nodes"),
                margin_seconds=settings.loop_interval_ms / 1000,
            )
            rooms = Rooms.build(metadata, registry, storages, leadership, self._clock, settings)
            await rooms.cache.load()
            stack.push_async_callback(rooms.events.close)
            yield rooms

    async def _start(self, servers: _Servers, rooms: Rooms) -> None:
        settings = self._settings
        limits = RequestLimits(settings.max_keys_per_request, settings.max_tokens_per_request, settings.max_body_bytes)
        metrics = ApiMetrics()
        meta = MetaApi(rooms.cache, rooms.registry, rooms.leadership, limits, rooms.events)
        pins = PinApi(rooms.cache, limits)
        pools = PoolApi(rooms.registry, rooms.storages)
        view = CapacityView(rooms.cache, rooms.registry, rooms.deletions)
        series = CapacitySeries(
            *(view, rooms.registry, rooms.reclaimer, rooms.deletions, rooms.garbage, rooms.scrubber, rooms.storages)
        )
        admin = AdminApi(
            *(rooms.cache, rooms.registry, rooms.leadership, metrics, limits, rooms.drains, series, rooms.storages)
        )
        drains = DrainView(rooms.drains, rooms.storages, rooms.deletions, rooms.leadership)
        storages = StorageApi(rooms.drains, drains)
        capacity = CapacityApi(view, rooms.registry.quotas, rooms.garbage, rooms.scrubber)
        refresh = rooms.registry.refresh if rooms.metadata.store.is_shared else _nothing_new
        caller = Caller([CallMetrics(metrics)], rooms.refuse_unless_leading, rooms.labels, refresh)
        data_calls = [*meta.calls(), *pins.calls(), *pools.calls()]
        admin_calls = [*admin.calls(), *capacity.calls(), *storages.calls()]
        for call in (*data_calls, *admin_calls):
            metrics.declare(call.name)
        await servers.start(data_calls, admin_calls, caller, rooms.events.subscribe)

    def _fail(self, reason: str) -> None:
        """Memory is ahead of the disk: only a restart makes them agree. Called on a thread of the store."""
        _log.error("metadata_store_failed", reason=reason)
        self._failure = reason
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stopping.set)


class _Servers:
    """The listeners of a manager. The admin plane shares the data plane's gRPC port unless it has its own."""

    def __init__(self, settings: Settings) -> None:
        host, body = settings.bind_address, settings.max_body_bytes
        self._max_body_bytes = body
        self._rpc = GrpcServer(host, settings.rpc_port, body)
        shared = settings.admin_rpc_port in {0, settings.rpc_port}
        self._admin_rpc = None if shared else GrpcServer(host, settings.admin_rpc_port, body)
        self._http = HttpServer(host, settings.http_port)
        self._admin_http = HttpServer(host, settings.admin_http_port)

    def endpoint(self, node_id: str, host: str) -> Endpoint:
        admin_rpc = self._admin_rpc if self._admin_rpc is not None else self._rpc
        if host in {"0.0.0.0", "::"}:  # noqa: S104 - every address is served: other hosts need a name
            host = socket.gethostname()
        return Endpoint(node_id, host, self._rpc.port, self._http.port, admin_rpc.port, self._admin_http.port)

    async def start(
        self, data: list[Call], admin: list[Call], caller: Caller, events: Callable[[], LineStream]
    ) -> None:
        if self._admin_rpc is None:
            await self._rpc.start([*data, *admin], caller)
        else:
            await self._rpc.start(data, caller)
            await self._admin_rpc.start(admin, caller)
        await self._http.start(HttpApp(data, caller, self._max_body_bytes))
        await self._admin_http.start(HttpApp(admin, caller, self._max_body_bytes, {"/api/events": events}))

    async def stop(self) -> None:
        servers: list[GrpcServer | HttpServer] = [self._rpc, self._http, self._admin_http]
        if self._admin_rpc is not None:
            servers.append(self._admin_rpc)
        await asyncio.gather(*(server.stop(_DRAIN_SECONDS) for server in servers))


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


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


async def _nothing_new() -> bool:
    return False


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
