"""gRPC and HTTP as transports (wire.md 2): statuses, sizes, ports, keepalive, JSON as raw bytes."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from probe_clients import ask
from test_transport_drivers import (
    DEADLINE_SECONDS,
    ON_ADMIN_PORT,
    SERVICES,
    Address,
    Api,
    GrpcDriver,
    HttpAnswer,
    HttpDriver,
    post,
)
from test_transport_process import ManagerProcess, manager, manager_of_module
from test_transport_sites import Site

from kvcm.model.errors import StorageIOError
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.service.admission import ServingGate
from kvcm.service.grpc_server import GrpcLimits, GrpcServer, WakeupSocket, coalesced_wakeups

_META = "/kv_cache_manager.proto.meta.MetaService"
_ADMIN = "/kv_cache_manager.proto.admin.AdminService"


def _status(channel: grpc.Channel, method: str, body: bytes = b"") -> tuple[grpc.StatusCode, str]:
    try:
        channel.unary_unary(method)(body, timeout=DEADLINE_SECONDS)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.fixture
def driver(server: ManagerProcess) -> Iterator[GrpcDriver]:
    found = GrpcDriver(server.address)
    yield found
    found.close()


@pytest.mark.parametrize("method", [f"{_META}/Nothing", "/grpc.health.v1.Health/Nothing", f"{_ADMIN}/CheckHealth"])
def test_a_method_that_a_port_does_not_serve_is_unimplemented(driver: GrpcDriver, method: str) -> None:
    assert _status(driver.channels["MetaService"], method)[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_request_of_more_than_4_mib_is_accepted(apis: dict[str, Api]) -> None:
    site = Site(apis["grpc"])
    tokens = [-1] * 500_000  # ten bytes each
    query = {"instance_id": site.instance(), "query_type": "QT_PREFIX_MATCH", "token_ids": tokens}
    assert not site.api.ok("GetCacheLocation", **query).locations


shared = manager_of_module("kvcm.service.admin_rpc_port=0", "kvcm.limits.max_body_bytes=2000")
"""A manager with one gRPC port and small requests."""


def test_without_an_admin_port_the_rpc_port_serves_all_services(shared: ManagerProcess) -> None:
    assert shared.address.rpc == shared.address.admin_rpc
    with shared.api() as api:
        assert api.ok("GetClusterInfo").self_node_id == api.ok("AdminService.GetManagerClusterInfo").self_node_id


def test_a_request_beyond_the_limit_is_resource_exhausted(shared: ManagerProcess) -> None:
    with grpc.insecure_channel(shared.address.rpc, [("grpc.enable_http_proxy", 0)]) as channel:
        fits = admin.CheckHealthRequest(trace_id="x" * 1900).SerializeToString()
        assert _status(channel, f"{_ADMIN}/CheckHealth", fits)[0] is grpc.StatusCode.OK
        larger = admin.CheckHealthRequest(trace_id="x" * 2000).SerializeToString()
        assert _status(channel, f"{_ADMIN}/CheckHealth", larger)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


# ── Keepalive pings of idle clients ──────────────────────────────────────────────────────────────────────────────────

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _GOAWAY = 4, 6, 7
_ACK = 1
_PINGS = 20


def _frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload


def _read(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size and (part := connection.recv(size - len(parts))):
        parts += part
    return parts


def _pings_answered(address: str) -> int:
    """Ping from an idle connection again and again; return how many pings were answered before a GOAWAY."""
    host, _, port = address.rpartition(":")
    answered = 0
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(_PREFACE + _frame(_SETTINGS))
        while answered < _PINGS:
            connection.sendall(_frame(_PING, payload=bytes(8)))
            while header := _read(connection, 9):
                kind, flags = header[3], header[4]
                _read(connection, int.from_bytes(header[:3], "big"))
                if kind == _SETTINGS and not flags & _ACK:
                    connection.sendall(_frame(_SETTINGS, _ACK))
                if kind == _GOAWAY:
                    return answered
                if kind == _PING and flags & _ACK:
                    answered += 1
                    break
            else:
                return answered
    return answered


def test_pings_of_an_idle_client_are_answered_on_both_ports(server: ManagerProcess) -> None:
    assert _pings_answered(server.address.rpc) == _PINGS
    assert _pings_answered(server.address.admin_rpc) == _PINGS


Connection = http.client.HTTPConnection


@pytest.fixture
def http_driver(apis: dict[str, Api]) -> HttpDriver:
    found = apis["http"].driver
    assert isinstance(found, HttpDriver)
    return found


@pytest.fixture
def http_site(apis: dict[str, Api]) -> Site:
    return Site(apis["http"])


def _json(http_driver: HttpDriver, rpc: str, body: str, *, admin: bool = False) -> Any:
    answer = post(http_driver.admin if admin else http_driver.data, f"/api/{rpc}", body.encode())
    assert answer.status == 200, answer
    return json.loads(answer.body)


def _path(rpc: str) -> str:
    return f"/api/{rpc[0].lower()}{rpc[1:]}"


def _paths(*services: str) -> set[str]:
    return {_path(method.name) for name in services for method in SERVICES[name].methods}


# ── Paths and statuses ───────────────────────────────────────────────────────────────────────────────────────────────


def _assert_not_found(answer: HttpAnswer) -> None:
    assert (answer.status, answer.body) == (404, b"404 Not Found")
    assert "content-type" not in answer.headers


@pytest.mark.parametrize(
    "path", ["/", "/api", "/api/", "/api/nothing", "/api/GetInstanceInfo", "/api/getInstanceInfo/"]
)
def test_an_unknown_path_is_404_with_a_plain_text(http_driver: HttpDriver, path: str) -> None:
    for connection in (http_driver.data, http_driver.admin):
        _assert_not_found(post(connection, path, b"{}"))


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_any_method_but_post_is_404(http_driver: HttpDriver, method: str) -> None:
    _assert_not_found(post(http_driver.data, "/api/getInstanceInfo", b"", method))
    _assert_not_found(post(http_driver.admin, "/api/checkHealth", b"", method))


def test_the_meta_port_serves_the_meta_calls_and_the_admin_port_the_others(http_driver: HttpDriver) -> None:
    data, admin = _paths("MetaService", "LeaseService"), _paths("AdminService", "GroupService")
    for path in admin - data:
        _assert_not_found(post(http_driver.data, path, b"{}"))
    for path in data - admin:
        _assert_not_found(post(http_driver.admin, path, b"{}"))


@pytest.mark.parametrize(
    "body", ['{"sw_size":"\\r\\nSet-Cookie: a"}', '{"ü\u2028\\r\\nx":1,"ü\u2028\\r\\nx":2}', '{"block_keys":[0,"x"]}']
)
def test_the_reason_of_a_400_is_one_printable_header(http_driver: HttpDriver, body: str) -> None:
    answer = post(http_driver.data, "/api/getCacheLocation", body.encode())
    assert (answer.status, answer.body, "set-cookie" in answer.headers) == (400, b"{}", False)
    assert answer.headers["x-kvcm-error"].isprintable()
    if "block_keys" in body:
        assert "block_keys[1]" in answer.headers["x-kvcm-error"]


def test_the_content_type_of_a_request_is_not_looked_at(http_driver: HttpDriver) -> None:
    http_driver.admin.request("POST", "/api/checkHealth", b"{}", {"content-type": "text/plain; charset=latin-1"})
    response = http_driver.admin.getresponse()
    assert (response.status, json.loads(response.read())["is_health"]) == (200, True)


def test_connections_are_kept_alive_through_refusals_of_every_kind(http_driver: HttpDriver) -> None:
    connection = http_driver.data
    post(connection, "/api/getClusterInfo", b"{}")
    kept = connection.sock
    for path, body, status in (
        ("/api/getClusterInfo", b"{}", 200),
        ("/api/getClusterInfo", b"{", 400),
        ("/api/nothing", b"x" * 100_000, 404),
        ("/api/getClusterInfo", b"{}", 200),
    ):
        assert post(connection, path, body).status == status
        assert connection.sock is kept


def test_a_chunked_request_is_served(server: ManagerProcess) -> None:
    connection = Connection(server.address.admin_http, timeout=30)
    connection.request(
        "POST", "/api/checkHealth", iter([b"{", b"}"]), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    response = connection.getresponse()
    assert json.loads(response.read())["is_health"] is True
    connection.close()


# ── Size of a body ───────────────────────────────────────────────────────────────────────────────────────────────────


small = manager_of_module("kvcm.limits.max_body_bytes=2000")
"""A manager that takes bodies of 2,000 bytes at most."""


@pytest.fixture
def small_connection(small: ManagerProcess) -> Iterator[Connection]:
    connection = Connection(small.address.admin_http, timeout=30)
    yield connection
    connection.close()


def test_a_body_of_the_limit_is_served_and_one_byte_more_is_413(small_connection: Connection) -> None:
    assert post(small_connection, "/api/checkHealth", b"{}".ljust(2000)).status == 200
    answer = post(small_connection, "/api/checkHealth", b"{}".ljust(2001))
    assert answer.status == 413
    assert "2000" in answer.headers["x-kvcm-error"]


def test_an_announced_body_beyond_the_limit_is_413_before_it_is_sent(small_connection: Connection) -> None:
    small_connection.putrequest("POST", "/api/checkHealth")
    small_connection.putheader("content-length", str(1 << 40))
    small_connection.endheaders()
    assert small_connection.getresponse().status == 413


def test_a_body_of_more_than_4_mib_is_served_by_default(http_driver: HttpDriver, http_site: Site) -> None:
    tokens = ",".join(["-9007199254740993"] * 300_000)
    body = f'{{"instance_id":"{http_site.instance()}","query_type":"QT_PREFIX_MATCH","token_ids":[{tokens}]}}'
    assert len(body) > 4 << 20
    assert _json(http_driver, "getCacheLocation", body)["header"]["status"]["code"] == "OK"


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


# ── Requests of real clients ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:6492"])
def test_a_request_of_a_web_page_is_refused(server: ManagerProcess, origin: str) -> None:
    for address, path in ((server.address.admin_http, "/api/listStorage"), (server.address.http, "/api/trimCache")):
        answer = ask(address, path, "POST", {"Origin": origin, "Content-Type": "text/plain"})
        assert (answer.status, answer.body) == (403, b"{}")
        assert answer.headers["x-kvcm-error"] == "requests from web pages are not served"


def test_the_same_request_of_a_program_is_served(server: ManagerProcess) -> None:
    assert ask(server.address.admin_http, "/api/listStorage", "POST").status == 200


OURS = {"data": set(SERVICES) - ON_ADMIN_PORT, "admin": ON_ADMIN_PORT}
ITS_OWN = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def _ask(address: str, **fields: str) -> reflection_pb2.ServerReflectionResponse:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**fields)]), timeout=30)
    return answer


def _listed(address: str) -> set[str]:
    return {service.name for service in _ask(address, list_services="*").list_services_response.service}


def _port(address: Address, plane: str) -> str:
    return address.rpc if plane == "data" else address.admin_rpc


@pytest.mark.parametrize("plane", OURS)
def test_each_port_lists_every_service_that_it_serves(server: ManagerProcess, plane: str) -> None:
    names = {SERVICES[name].full_name for name in OURS[plane]}
    assert _listed(_port(server.address, plane)) == names | ITS_OWN


def test_a_port_that_serves_both_planes_lists_both(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.admin_rpc_port=0", "kvcm.service.enable_debug_service=true") as process:
        names = {service.full_name for service in SERVICES.values()}
        debug = "kv_cache_manager.proto.debug.DebugService"
        assert _listed(process.address.rpc) == names | ITS_OWN | {debug}


@pytest.mark.parametrize("plane", OURS)
def test_every_service_is_described(server: ManagerProcess, plane: str) -> None:
    for name in OURS[plane]:
        symbol = SERVICES[name].full_name
        answer = _ask(_port(server.address, plane), file_containing_symbol=symbol)
        files = map(
            descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto
        )
        described = {f"{file.package}.{service.name}": service for file in files for service in file.service}
        assert {method.name for method in described[symbol].method} == set(SERVICES[name].methods_by_name)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.reflection=false") as process:
        with pytest.raises(grpc.RpcError) as refused:
            _listed(process.address.rpc)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "Cannot register" not in process.log_text()


_MANY = GrpcLimits(1 << 20, 4096, 100, 10_000)
_FEW = GrpcLimits(1 << 20, 8, 100, 10_000)

_SERVES = """
import asyncio, gc
from kvcm.service.admission import ServingGate
from kvcm.service.grpc_server import GrpcLimits, GrpcServer, WakeupSocket

async def main():
    server = GrpcServer("127.0.0.1", 0, GrpcLimits(1 << 20, 4096, 100, 10_000), ServingGate())
    await server.start()
    print(sum(type(each) is WakeupSocket for each in gc.get_objects()))
    await server.stop()

asyncio.run(main())
"""


def test_all_wakeups_are_taken_at_once() -> None:
    plain = socket.socketpair
    with coalesced_wakeups():
        reads, writes = socket.socketpair()
    assert socket.socketpair is plain
    with reads, writes:
        assert isinstance(reads, WakeupSocket)
        reads.setblocking(False)
        for _ in range(100):
            writes.send(b"1")
        assert reads.recv(1) == b"1" * 100
        with pytest.raises(BlockingIOError):
            reads.recv(1)


def test_grpc_is_woken_so() -> None:
    """gRPC makes the pair itself, in a way that is nowhere promised: a release that changes it is noticed here."""
    ran = subprocess.run([sys.executable, "-c", _SERVES], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "1\n"


async def test_a_port_with_several_servers_is_taken_for_everybody_else() -> None:
    server = GrpcServer("127.0.0.1", 0, _MANY, ServingGate())
    with pytest.raises(StorageIOError, match=f"127.0.0.1:{server.port} cannot be bound"):
        GrpcServer("127.0.0.1", server.port, _MANY, ServingGate())
    with pytest.raises(StorageIOError, match=f"127.0.0.1:{server.port} cannot be bound"):
        GrpcServer("127.0.0.1", server.port, _FEW, ServingGate())
    await server.stop()


@pytest.mark.parametrize("limits", [_MANY, _FEW])
async def test_every_connection_is_served_until_the_end(limits: GrpcLimits) -> None:
    server = GrpcServer("127.0.0.1", 0, limits, ServingGate())
    await server.start()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) for _ in range(8)]
    request = health_pb2.HealthCheckRequest()

    async def asked() -> list[int]:
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        return [answer.status for answer in await asyncio.gather(*(stub.Check(request, timeout=60) for stub in stubs))]

    assert await asked() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 8
    await server.health.set_serving(is_serving=True)
    assert await asked() == [health_pb2.HealthCheckResponse.SERVING] * 8
    await server.stop()
    for channel in channels:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
