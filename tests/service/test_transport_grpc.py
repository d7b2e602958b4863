"""gRPC as a transport (wire.md 2.3): statuses, sizes, ports, keepalive pings."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from test_transport_drivers import DEADLINE_SECONDS, Address, Api, GrpcDriver
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta

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


@pytest.mark.parametrize(
    "body",
    [b"\xff", b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x12\x05ab", b'{"instance_id":"x"}'],
    ids=["cut tag", "cut length", "not UTF-8", "cut text", "JSON"],
)
def test_bytes_that_are_no_request_are_invalid_argument_and_name_the_message(driver: GrpcDriver, body: bytes) -> None:
    code, details = _status(driver.channels["MetaService"], f"{_META}/GetInstanceInfo", body)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "GetInstanceInfoRequest" in details


def test_a_refusal_ends_with_grpc_ok_and_its_code_in_the_header(driver: GrpcDriver) -> None:
    call = driver.channels["MetaService"].unary_unary(f"{_META}/GetInstanceInfo")
    answer = meta.GetInstanceInfoResponse.FromString(call(b"", timeout=DEADLINE_SECONDS))
    assert answer.header.status.code == meta.INSTANCE_NOT_EXIST


@pytest.mark.parametrize("method", [f"{_META}/Nothing", "/grpc.health.v1.Health/Nothing", f"{_ADMIN}/CheckHealth"])
def test_what_a_port_does_not_serve_is_unimplemented(driver: GrpcDriver, method: str) -> None:
    assert _status(driver.channels["MetaService"], method)[0] is grpc.StatusCode.UNIMPLEMENTED


def test_the_admin_port_does_not_serve_the_meta_calls(driver: GrpcDriver) -> None:
    code, _ = _status(driver.channels["AdminService"], f"{_META}/GetClusterInfo")
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_a_request_of_more_than_4_mib_is_accepted(apis: dict[str, Api]) -> None:
    site = Site(apis["grpc"])
    tokens = [-1] * 500_000  # ten bytes each
    query = {"instance_id": site.instance(), "query_type": "QT_PREFIX_MATCH", "token_ids": tokens}
    assert not site.api.ok("GetCacheLocation", **query).locations


def test_unknown_fields_are_ignored(driver: GrpcDriver) -> None:
    assert _status(driver.channels["MetaService"], f"{_META}/GetClusterInfo", b"\xfa\x3f\x01x")[0] is grpc.StatusCode.OK


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager with one gRPC port and small requests."""
    settings = ("kvcm.service.admin_rpc_port=0", "kvcm.limits.max_body_bytes=2000")
    with manager(tmp_path_factory.mktemp("shared"), *settings) as process:
        yield process


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


def test_a_server_without_our_options_throws_such_a_client_out() -> None:
    """The control of the test above: what it sees is due to options, not to the client."""
    plain = grpc.server(ThreadPoolExecutor(1))
    port = plain.add_insecure_port("127.0.0.1:0")
    plain.start()
    try:
        assert _pings_answered(f"127.0.0.1:{port}") < _PINGS
    finally:
        plain.stop(None).wait(DEADLINE_SECONDS)


def test_a_second_manager_on_the_same_grpc_port_does_not_share_its_requests(
    server: ManagerProcess, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="cannot be bound"):
        with manager(tmp_path, f"kvcm.service.rpc_port={server.address.rpc.rpartition(':')[2]}"):
            pass


def test_calls_of_many_channels_are_answered_side_by_side(server: ManagerProcess) -> None:
    def ask(address: Address) -> str:
        driver = GrpcDriver(address)
        try:
            return str(Api(driver).ok("GetClusterInfo").self_node_id)
        finally:
            driver.close()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, [server.address] * 32))) == 1
