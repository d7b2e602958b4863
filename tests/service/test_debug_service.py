"""DebugService (wire.md 7): off by default; which calls fail on purpose, and for how long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from probe_clients import ask
from test_cli_start import _refusal as refusal_of
from test_transport_drivers import Api, post
from test_transport_process import ManagerProcess, free_port, manager

from kvcm.config import DEBUG_PORT_OFFSET
from kvcm.protocol import debug_service_pb2 as pb
from kvcm.protocol.debug_service_pb2_grpc import DebugServiceStub

CALLS = ["GetCacheLocation", "StartWriteCache", "FinishWriteCache"]


class Debugged:
    """A manager with its debug service."""

    def __init__(self, process: ManagerProcess, api: Api, stub: DebugServiceStub) -> None:
        self.process = process
        self.api = api
        self.stub = stub

    def outcome(self, rpc: str, **fields: Any) -> tuple[int, str]:
        answer = getattr(self.stub, rpc)(getattr(pb, f"{rpc}Request")(**fields), timeout=10)
        assert answer.header.request_id == ""
        return answer.header.status.code, answer.header.status.message

    def ok(self, rpc: str, **fields: Any) -> None:
        assert self.outcome(rpc, **fields) == (pb.OK, "")

    def fails(self, rpc: str, trace_id: str = "") -> bool:
        status = self.api.call(rpc, instance_id="nobody", trace_id=trace_id).header.status
        if status.code == pb.INTERNAL_ERROR:
            assert "injected" in status.message
            return True
        return False


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with manager(tmp_path_factory.mktemp("debug"), "kvcm.service.enable_debug_service=true") as process:
        yield process


@pytest.fixture
def debugged(started: ManagerProcess) -> Iterator[Debugged]:
    with started.api("grpc") as api, grpc.insecure_channel(started.address.admin_rpc) as channel:
        made = Debugged(started, api, DebugServiceStub(channel))
        made.ok("ClearFaults")
        yield made


@pytest.mark.parametrize("rpc", CALLS)
def test_a_fault_makes_every_call_of_its_api_fail_until_it_is_removed(debugged: Debugged, rpc: str) -> None:
    debugged.ok("InjectFault", api_name=rpc)
    assert [debugged.fails(name) for name in CALLS] == [name == rpc for name in CALLS]
    assert debugged.fails(rpc)
    debugged.ok("RemoveFault", api_name=rpc)
    assert not debugged.fails(rpc)


def test_other_calls_and_unknown_ones_do_not_fail(debugged: Debugged) -> None:
    for name in ("GetCacheMeta", "Nothing"):
        debugged.ok("InjectFault", api_name=name)
    assert not debugged.fails("GetCacheMeta")
    assert debugged.api.ok("GetClusterInfo").self_node_id


def test_once_means_trace_ids_that_end_in_the_number(debugged: Debugged) -> None:
    debugged.ok("InjectFault", api_name=CALLS[0], fault_trigger_strategy="ONCE", trigger_at_call=7)
    hits = {"a_7": True, "_7": True, "a_b_07": True, "a_17": False, "7": False, "a_7x": False, "a_": False, "": False}
    assert {trace_id: debugged.fails(CALLS[0], trace_id) for trace_id in hits} == hits
    assert debugged.fails(CALLS[0], "a_7"), "each time"
    debugged.ok("InjectFault", api_name=CALLS[0])
    assert debugged.fails(CALLS[0], "x"), "replaced"


def test_clear_ends_all(debugged: Debugged) -> None:
    for name in CALLS:
        debugged.ok("InjectFault", api_name=name)
    debugged.ok("ClearFaults")
    assert not any(map(debugged.fails, CALLS))


@pytest.mark.parametrize(
    ("rpc", "fields", "text"),
    [
        ("InjectFault", {}, "api_name"),
        ("InjectFault", {"api_name": "x", "fault_type": 9}, "fault_type is 9"),
        ("InjectFault", {"api_name": "x", "fault_trigger_strategy": 9}, "fault_trigger_strategy is 9"),
        ("RemoveFault", {}, "api_name"),
        ("RemoveFault", {"api_name": "StartWriteCache"}, "has no fault"),
    ],
)
def test_refusals(debugged: Debugged, rpc: str, fields: dict[str, Any], text: str) -> None:
    code, message = debugged.outcome(rpc, **fields)
    assert (code, text in message) == (pb.INVALID_ARGUMENT, True)


def test_over_http_it_has_a_port_of_its_own(tmp_path: Path) -> None:
    port = free_port(DEBUG_PORT_OFFSET)
    settings = ("kvcm.service.enable_debug_service=true", f"kvcm.service.http_port={port}")
    with manager(tmp_path, *settings) as process, process.api("http") as api:
        answer = ask(f"127.0.0.1:{port + DEBUG_PORT_OFFSET}", "/api/clearFaults", "POST")
        assert (answer.status, json.loads(answer.body)["header"]["status"]["code"]) == (200, "OK")
        for address in (process.address.http, process.address.admin_http):
            assert ask(address, "/api/clearFaults", "POST").status == 404
        driver: Any = api.driver
        assert post(driver.admin, "/api/checkHealth", b"{}").status == 200


def test_it_is_off_by_default(server: ManagerProcess) -> None:
    with grpc.insecure_channel(server.address.admin_rpc) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            DebugServiceStub(channel).ClearFaults(pb.ClearFaultsRequest(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_it_is_refused_where_others_could_reach_it(tmp_path: Path) -> None:
    options = ["-e", "kvcm.service.enable_debug_service=true", "-e", "kvcm.service.host=0.0.0.0"]
    line = refusal_of(tmp_path, *options)
    assert ("enable_debug_service" in line, "--insecure" in line) == (True, True)


def test_a_port_that_leaves_no_room_for_it_is_refused(tmp_path: Path) -> None:
    options = ["-e", "kvcm.service.enable_debug_service=true", "-e", "kvcm.service.http_port=62536"]
    assert "62535" in refusal_of(tmp_path, *options)
