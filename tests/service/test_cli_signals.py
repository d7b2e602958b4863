"""How a manager ends: SIGTERM and Ctrl-C drain it and exit with 0, also with requests in flight."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from test_transport_process import manager
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
