"""Health as load balancers and Kubernetes ask for it: /livez, /readyz, /startupz, and grpc.health.v1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from probe_clients import ask, health, starting_manager, watched
from redis_servers import Standalone, standalone
from test_transport_drivers import ON_ADMIN_PORT, SERVICES, eventually
from test_transport_process import ManagerProcess, free_port, manager

PROBES = ["/livez", "/readyz", "/startupz"]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Standalone]:
    """A server that tests may stop."""
    with standalone(tmp_path / "redis") as made:
        yield made
        made.server.resume()


@pytest.mark.parametrize("path", PROBES)
def test_a_serving_manager_is_well_on_both_ports(server: ManagerProcess, path: str) -> None:
    for address in (server.address.http, server.address.admin_http):
        answer = ask(address, path)
        assert (answer.status, answer.body) == (200, b"ok")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("path", PROBES)
def test_reasons_are_told_on_the_admin_port_alone(server: ManagerProcess, path: str) -> None:
    assert ask(server.address.http, f"{path}?verbose").body == b"ok"
    told = ask(server.address.admin_http, f"{path}?verbose").body.decode().splitlines()
    assert told[-1] == f"{path[1:]} check passed"
    assert [line for line in told[:-1] if not line.startswith("[+]")] == []
    assert len(told) > 1


def test_probes_are_pages_and_nothing_else(server: ManagerProcess) -> None:
    assert ask(server.address.http, "/readyz", "POST").status == 404
    assert ask(server.address.http, "/readyz/").status == 404


def test_grpc_tells_the_health_of_each_service_where_it_is_served(server: ManagerProcess) -> None:
    for name, service in SERVICES.items():
        here, there = server.address.rpc, server.address.admin_rpc
        assert health(there if name in ON_ADMIN_PORT else here, service.full_name) == "SERVING"
        with watched(here if name in ON_ADMIN_PORT else there, service.full_name) as elsewhere:
            assert elsewhere.seen == ["SERVICE_UNKNOWN"]
    assert [health(address) for address in (server.address.rpc, server.address.admin_rpc)] == ["SERVING"] * 2


def test_while_the_metadata_store_is_slow_a_starting_manager_lives_and_turns_calls_away(
    tmp_path: Path, redis: Standalone
) -> None:
    redis.server.pause()
    uri = redis.uri("slow", timeout_ms=60_000, connect_timeout_ms=60_000)
    with starting_manager(tmp_path, f"kvcm.registry_storage.uri={uri}") as process:
        address = process.address
        for port in (address.http, address.admin_http):
            assert [ask(port, path).status for path in PROBES] == [200, 503, 503]
            assert ask(port, "/readyz").body == b"not ready"
        assert b"[-]started failed: loading metadata" in ask(address.admin_http, "/startupz?verbose").body
        for port, path in ((address.http, "/api/getClusterInfo"), (address.admin_http, "/api/checkHealth")):
            refused = ask(port, path, "POST")
            assert (refused.status, refused.body) == (503, b"{}")
            assert int(refused.headers["retry-after"]) >= 1
            assert "starting" in refused.headers["x-kvcm-error"]
        with watched(address.rpc) as watch, process.api("grpc") as api:
            assert watch.seen == ["NOT_SERVING"]
            with pytest.raises(Exception, match="starting"):
                api.ok("GetClusterInfo")
            assert not process.events("serving")
            redis.server.resume()
            eventually(lambda: process.events("serving"), 20)
            eventually(lambda: watch.seen == ["NOT_SERVING", "SERVING"])
            assert api.ok("GetClusterInfo").self_node_id
        assert [ask(address.http, path).status for path in PROBES] == [200, 200, 200]


def test_a_manager_whose_store_is_gone_is_not_ready_until_it_is_back(tmp_path: Path, redis: Standalone) -> None:
    uri = redis.uri("gone", timeout_ms=200)
    with manager(tmp_path, f"kvcm.registry_storage.uri={uri}") as process, watched(process.address.rpc) as watch:
        assert ask(process.address.http, "/readyz").status == 200
        redis.server.pause()
        eventually(lambda: ask(process.address.http, "/readyz").status == 503)
        assert b"[-]metadata-store failed: " in ask(process.address.admin_http, "/readyz?verbose").body
        assert ask(process.address.http, "/livez").status == 200
        assert ask(process.address.http, "/startupz").status == 200
        redis.server.resume()
        eventually(lambda: ask(process.address.http, "/readyz").status == 200)
        eventually(lambda: watch.seen == ["SERVING", "NOT_SERVING", "SERVING"])


def test_a_port_that_is_taken_ends_the_start_before_metadata_is_touched(tmp_path: Path) -> None:
    port = free_port()
    with manager(tmp_path / "first", f"kvcm.service.http_port={port}"):
        second = tmp_path / "second"
        with pytest.raises(AssertionError, match="cannot be bound"), manager(second, f"kvcm.service.http_port={port}"):
            pass
        assert not (second / "data").exists()
        (line,) = [line for line in (second / "log").read_text().splitlines() if not line.startswith("{")]
        assert str(port) in line
        assert [json.loads(text) for text in (second / "log").read_text().splitlines() if text.startswith("{")]
