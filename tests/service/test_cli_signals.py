"""How a manager ends: SIGTERM and Ctrl-C drain it and exit with 0, also with requests in flight."""

from __future__ import annotations

import http.client
import signal
import socket
from pathlib import Path

import grpc
import pytest
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

BOTH_SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


@BOTH_SIGNALS
def test_an_idle_manager_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with manager(tmp_path) as process:
        process.signal(number)
        assert process.wait() == 0
        assert "Traceback" not in process.log_text()
        assert process.events("stopped")


def test_open_connections_and_sessions_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api("http") as over_http, process.api("grpc") as over_grpc:
        site = Site(over_grpc)
        site.start(site.instance(), [1])
        over_http.ok("GetClusterInfo")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.events("draining")[0]["open_write_sessions"] == 1
        with pytest.raises(grpc.RpcError):
            over_grpc.ok("GetClusterInfo")


def _start_slow_request(process: ManagerProcess) -> socket.socket:
    """Send all of a request but its last byte; return when the manager waits for that."""
    host, _, port = process.address.admin_http.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = "POST /api/checkHealth HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
    connection.sendall(head.encode())
    assert b"100 Continue" in connection.recv(1000)
    connection.sendall(b"{")
    return connection


@BOTH_SIGNALS
def test_a_request_in_flight_is_answered_before_the_end(tmp_path: Path, number: signal.Signals) -> None:
    with manager(tmp_path) as process, _start_slow_request(process) as connection:
        process.signal(number)
        eventually(lambda: process.events("draining"))
        connection.sendall(b"}")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, b'"is_health":true' in response.read()) == (200, True)
        assert process.wait() == 0


def test_while_draining_nobody_new_is_accepted(tmp_path: Path) -> None:
    with manager(tmp_path) as process, _start_slow_request(process) as connection:
        process.signal(signal.SIGTERM)
        eventually(lambda: process.events("draining"))
        for address in process.address:
            eventually(lambda address=address: _refuses(address))
        connection.sendall(b"}")
        assert process.wait() == 0


def _refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_signal_ends_a_manager_that_is_still_draining(tmp_path: Path) -> None:
    with manager(tmp_path) as process, _start_slow_request(process):
        process.signal(signal.SIGTERM)
        eventually(lambda: process.events("draining"))
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_a_port_is_free_for_the_next_manager_at_once(tmp_path: Path) -> None:
    with manager(tmp_path / "first") as process, process.api("http") as api:
        api.ok("GetClusterInfo")
        ports = [address.rpartition(":")[2] for address in process.address]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    names = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
    settings = [f"kvcm.service.{name}={port}" for name, port in zip(names, ports, strict=True)]
    with manager(tmp_path / "second", *settings) as process, process.api("http") as api:
        assert [address.rpartition(":")[2] for address in process.address] == ports
        assert api.ok("GetClusterInfo").self_node_id
