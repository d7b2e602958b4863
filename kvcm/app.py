"""The composition root: the only place that wires rooms, and the life story of a manager."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import structlog

from kvcm.cache.manager import CacheManager
from kvcm.config import ConfigError, Settings
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.errors import DuplicateEntityError, NotLeaderError, UnknownInstanceError
from kvcm.model.storages import NfsStorageSpec
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.registry.documents import StartupDocument, builtin_document, parse_startup_document
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service.admin_api import AdminApi
from kvcm.service.calls import Call, Caller
from kvcm.service.grpc_server import GrpcServer
from kvcm.service.http_app import HttpApp
from kvcm.service.http_server import HttpServer
from kvcm.service.limits import RequestLimits
from kvcm.service.meta_api import MetaApi
from kvcm.service.node import Endpoint
from kvcm.storage.directory import StorageDirectory
from kvcm.telemetry.metrics import ApiMetrics

__all__ = ["Manager"]

_DRAIN_SECONDS = 10.0

_log = structlog.get_logger("kvcm")


class Manager:
    """A metadata manager: builds its rooms, then starts, serves and stops.

    Args:
        settings: how it is configured.
        clock: time source.

    Raises:
        KvcmError: a storage of the startup document cannot be opened, or the document is malformed.
        ConfigError: a file or directory that the settings name cannot be used.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        clock = clock if clock is not None else SystemClock()
        document = _startup_document(settings)
        self.storages = StorageDirectory(_cluster_id(settings), _allowed_roots(settings, document))
        self.registry = Registry(self.storages)
        self.deletions = DeletionExecutor(self.storages, clock)
        self.cache = CacheManager(self.registry, self.storages, self.deletions, clock)
        self.deletions.hold_while(self.cache.held_until)
        self.metrics = ApiMetrics()
        node_id = settings.node_id or f"{socket.gethostname()}:{settings.admin_http_port}_{secrets.token_hex(8)}"
        self.leadership = Leadership(node_id, clock, settings.lease_ms / 1000)
        self._load(document)

    def _load(self, document: StartupDocument) -> None:
        with contextlib.suppress(DuplicateEntityError):
            self.registry.storages.add(document.storage)
        with contextlib.suppress(DuplicateEntityError):
            self.registry.groups.create(document.group)
        _log.info("configured", storage=document.storage.global_unique_name, group=document.group.name)

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends the process at once.

        Raises:
            StorageIOError: an address cannot be bound.
        """
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        # Records live long and form no cycles: collecting as often as Python does by default costs a quarter of a
        # write.
        gc.freeze()
        gc.set_threshold(200_000, 20, 100)

        def stop(number: signal.Signals) -> None:
            stopping.set()
            loop.remove_signal_handler(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        async with self.running() as endpoint:
            _log.info("serving", **_addresses(endpoint))
            await stopping.wait()
            _log.info("draining", open_write_sessions=self.cache.sessions.open_count)
        _log.info("stopped")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Endpoint]:
        """Serve inside the block. Yields the endpoint with the ports that are really bound."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.storages.close_all)
            servers = await self._bind(stack)
            endpoint = servers.endpoint(self.leadership.node_id, self._settings.bind_address)
            duties = (("keep_time", self._keep_time), ("deletions", self.deletions.run))
            stack.push_async_callback(_cancel, [asyncio.create_task(_keep_running(*duty)) for duty in duties])
            self.leadership.tick()
            await self._start(servers, endpoint)
            yield endpoint

    async def _bind(self, stack: contextlib.AsyncExitStack) -> _Servers:
        servers = _Servers(self._settings)
        stack.push_async_callback(servers.stop)
        return servers

    async def _start(self, servers: _Servers, endpoint: Endpoint) -> None:
        limits = RequestLimits(
            self._settings.max_keys_per_request, self._settings.max_tokens_per_request, self._settings.max_body_bytes
        )
        meta = MetaApi(self.cache, self.registry, self.leadership, endpoint, limits)
        admin = AdminApi(self.cache, self.registry, self.leadership, endpoint, self.metrics, limits)
        caller = Caller(self.metrics, lambda: self._refuse_unless_leading(endpoint), self._labels)
        data_calls, admin_calls = meta.calls(), admin.calls()
        for call in (*data_calls, *admin_calls):
            self.metrics.declare(call.name)
        await servers.start(data_calls, admin_calls, caller, self._settings.max_body_bytes)

    def _refuse_unless_leading(self, endpoint: Endpoint) -> None:
        if self._settings.require_leader and not self.leadership.is_leader:
            raise NotLeaderError(f"node {endpoint.node_id} does not lead and no other node does; retry shortly")

    def _labels(self, instance_id: str) -> Mapping[str, str]:
        try:
            instance = self.registry.instances.get(instance_id)
        except UnknownInstanceError:
            return {}
        return {"instance_group": instance.instance_group_name, "instance_id": instance_id}

    async def _keep_time(self) -> None:
        """Renew the lease and end what is overdue, every loop interval."""
        while True:
            await asyncio.sleep(self._settings.loop_interval_ms / 1000)
            self.leadership.tick()
            await self.cache.expire()


class _Servers:
    """The listeners of a manager. The admin plane shares the data plane's gRPC port unless it has its own."""

    def __init__(self, settings: Settings) -> None:
        host, body = settings.bind_address, settings.max_body_bytes
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

    async def start(self, data: list[Call], admin: list[Call], caller: Caller, max_body_bytes: int) -> None:
        if self._admin_rpc is None:
            await self._rpc.start([*data, *admin], caller)
        else:
            await self._rpc.start(data, caller)
            await self._admin_rpc.start(admin, caller)
        await self._http.start(HttpApp(data, caller, max_body_bytes))
        await self._admin_http.start(HttpApp(admin, caller, max_body_bytes))

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
        except Exception:
            _log.exception("duty_failed", duty=name)
            await asyncio.sleep(1)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _cluster_id(settings: Settings) -> str:
    """The configured id, else the one kept in the data directory, else a new one (design.md decision 1)."""
    if settings.cluster_id:
        return settings.cluster_id
    new = secrets.token_hex(8)
    if not settings.data_dir:
        return new
    kept = Path(settings.data_dir) / "cluster_id"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), kept.open("x", encoding="ascii") as file:
            file.write(new)
        return kept.read_text(encoding="ascii").strip() or new
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data directory {settings.data_dir!r} cannot be used: {error}") from error


def _allowed_roots(settings: Settings, document: StartupDocument) -> tuple[Path, ...] | None:
    """Any root while only this host can reach the server, else what is configured (design.md decision 12).

    The startup document comes from the operator's own files, not through the API: its root is always allowed.
    """
    if settings.allowed_roots is None and settings.is_loopback:
        return None
    spec = document.storage.spec
    own = (Path(spec.root_path),) if isinstance(spec, NfsStorageSpec) else ()
    return (*(settings.allowed_roots or ()), *own)


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
