"""The listeners of a manager: bound and answering probes before metadata is loaded, closed in steps at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time

from kvcm.config import DEBUG_PORT_OFFSET, Settings
from kvcm.interface import Interface
from kvcm.model.nodes import Endpoint
from kvcm.model.principals import EVERYBODY, STRANGER
from kvcm.service.gate import Gate
from kvcm.service.grpc_server import GrpcLimits, GrpcServer
from kvcm.service.http_app import HttpApp
from kvcm.service.http_connection import ConnectionLimits
from kvcm.service.http_server import HttpServer
from kvcm.service.probes import Probes
from kvcm.service.tls import ServerTls

__all__ = ["Listeners"]


class Listeners:
    """The ports. The admin plane shares the data plane's gRPC port unless it has its own.

    Args:
        settings: addresses and limits.
        gate: whether calls are served.
        tls: what connections use; None for plain text.

    Raises:
        StorageIOError: an address cannot be bound.
    """

    def __init__(self, settings: Settings, gate: Gate, tls: ServerTls | None = None) -> None:
        host, body = settings.bind_address, settings.max_body_bytes
        self._settings = settings
        self._connections = _connection_limits(settings)
        self.probes = Probes(gate, self._note_readiness)
        shared = settings.admin_rpc_port in {0, settings.rpc_port}
        of_grpc = GrpcLimits(body, settings.max_connections, settings.max_streams, settings.receive_timeout_ms)
        of_http = self._connections
        self._rpc = GrpcServer(host, settings.rpc_port, of_grpc, gate, tls, of_http)
        self._admin_rpc = None if shared else GrpcServer(host, settings.admin_rpc_port, of_grpc, gate, tls, of_http)
        self._http = HttpServer(host, settings.http_port, of_http, tls)
        self._admin_http = HttpServer(host, settings.admin_http_port, of_http, tls)
        has_debug, debug_port = settings.enable_debug_service, _debug_port(settings)
        self._debug_http = HttpServer(host, debug_port, of_http, tls) if has_debug else None
        visitor = STRANGER if settings.is_auth_required else EVERYBODY
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

    async def serve(self, interface: Interface) -> None:
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
        for field in dataclasses.fields(new):
            setattr(self._connections, field.name, getattr(new, field.name))

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

    async def _note_readiness(self, is_ready: bool) -> None:
        for rpc in self._rpcs:
            await rpc.health.note(is_ready)


def _connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        settings.receive_timeout_ms / 1000,
        settings.send_timeout_ms / 1000,
        settings.idle_timeout_ms / 1000,
        settings.max_connections,
    )


def _debug_port(settings: Settings) -> int:
    return settings.http_port + DEBUG_PORT_OFFSET if settings.http_port else 0
