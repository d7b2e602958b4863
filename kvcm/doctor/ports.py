"""Ports: free, or held by a manager of ours."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import grpc

from kvcm.config import DEBUG_PORT_OFFSET, Settings
from kvcm.doctor.findings import Finding, fail, ok

__all__ = ["check_ports"]

_CHECK = "ports"
_SECONDS = 2.0
_OURS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_CLUSTER_INFO = (
    "/kv_cache_manager.proto.meta.MetaService/GetClusterInfo",
    "/kv_cache_manager.proto.admin.AdminService/GetManagerClusterInfo",
)
"""Both are asked nothing; the port of one need not be that of the other."""


def check_ports(settings: Settings) -> Iterator[Finding]:
    """Yield for each port of the settings whether a manager can have it, or has it."""
    host = settings.bind_address
    ports = {
        "kvcm.service.http_port": settings.http_port,
        "kvcm.service.admin_http_port": settings.admin_http_port,
        "kvcm.service.rpc_port": settings.rpc_port,
        "kvcm.service.admin_rpc_port": settings.admin_rpc_port,
    }
    if settings.enable_debug_service and settings.http_port:
        ports["debug service"] = settings.http_port + DEBUG_PORT_OFFSET
    seen: dict[int, str] = {}
    for key, port in ports.items():
        if not port:
            continue
        if port in seen:
            if {key, seen[port]} != {"kvcm.service.rpc_port", "kvcm.service.admin_rpc_port"}:
                yield fail(_CHECK, f"{key} and {seen[port]} are both {port}", "give each a port of its own")
            continue
        seen[port] = key
        yield _check_port(key, host, port, is_rpc="rpc" in key, is_closed=settings.tls_client_auth == "required")


def _check_port(key: str, host: str, port: int, *, is_rpc: bool, is_closed: bool) -> Finding:
    trouble = _bind_trouble(host, port)
    if not trouble:
        return ok(_CHECK, f"{key} {port} is free on {host}")
    if trouble != errno.EADDRINUSE:
        reason = f"{key} {port} cannot be taken on {host}: {errno.errorcode.get(trouble, trouble)}"
        return fail(_CHECK, reason, "choose an address of this host and a port that this user may take")
    near = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - an address to bind, not to connect to
    if _is_grpc_of_ours(near, port) if is_rpc else _is_http_of_ours(near, port, is_closed=is_closed):
        return ok(_CHECK, f"{key} {port} is held by a manager")
    return fail(
        _CHECK,
        f"{key} {port} is held by something that does not answer as a manager",
        f"stop it (`ss -ltnp 'sport = :{port}'` names it), or set {key} to another port",
    )


def _bind_trouble(host: str, port: int) -> int:
    """Return the number of the error with which an address cannot be bound, 0 when it can."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return error.errno or -1
    return 0


def _is_http_of_ours(host: str, port: int, *, is_closed: bool) -> bool:
    """Whether /livez is answered, in the clear or encrypted; whose certificate it is, is checked elsewhere. Where a
    manager is closed to whoever has no certificate, it is enough that it encrypts."""
    trusting = ssl._create_unverified_context()  # noqa: S323 - nothing is sent, and the answer is not used
    plain = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    encrypted = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=trusting)
    is_alive = any(_is_alive(connection) for connection in (plain, encrypted))
    return is_alive or (is_closed and _speaks_tls(host, port, "http/1.1"))


def _is_alive(connection: http.client.HTTPConnection) -> bool:
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().read(64).strip() == b"ok"
        except (OSError, http.client.HTTPException):
            return False


def _is_grpc_of_ours(host: str, port: int) -> bool:
    shown = f"[{host}]" if ":" in host else host
    with grpc.insecure_channel(f"{shown}:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
        return any(_is_answered(channel, method) for method in _CLUSTER_INFO) or _speaks_tls(host, port, "h2")


def _is_answered(channel: grpc.Channel, method: str) -> bool:
    call: Any = channel.unary_unary(method)  # bytes as they are: an empty request, and any answer will do
    try:
        return bool(call(b"", timeout=_SECONDS))
    except grpc.RpcError as error:
        return error.code() in _OURS


def _speaks_tls(host: str, port: int, protocol: str) -> bool:
    """Whether a protocol is spoken there in encrypted form: that is as much as can be told without a key."""
    trusting = ssl._create_unverified_context()  # noqa: S323 - nothing is sent
    trusting.set_alpn_protocols([protocol])
    try:
        with socket.create_connection((host, port), _SECONDS) as raw, trusting.wrap_socket(raw) as encrypted:
            return encrypted.selected_alpn_protocol() == protocol
    except OSError:
        return False
