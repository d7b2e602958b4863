"""Spans of calls, as a collector gets them over OTLP."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from otlp_receiver import Collector, SeenSpan, collector
from ports import free_port
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm.protocol import meta_service_pb2 as pb

_SERVICE = "kv_cache_manager.proto.meta.MetaService"
_MATCH, _START = f"{_SERVICE}/GetCacheLocation", f"{_SERVICE}/StartWriteCache"
_TRACE, _SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_KEYS = [7_777_777_001, 7_777_777_002]


class World(NamedTuple):
    """A manager that sends its spans to a collector."""

    collector: Collector
    process: ManagerProcess


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Spans of those calls alone whose client wants them: nothing is sampled otherwise."""
    with collector() as found:
        address = f"kvcm.tracing.otlp_endpoint={found.address}"
        with manager(tmp_path, address, "kvcm.tracing.sample=0", "kvcm.logger.access_log_sample=1") as process:
            yield World(found, process)


def _parent(flags: str = "01") -> str:
    return f"00-{_TRACE}-{_SPAN}-{flags}"


def _grpc(process: ManagerProcess, name: str, request: Any, response: type[Any], parent: str) -> Any:
    with grpc.insecure_channel(process.address.rpc) as channel:
        call = channel.unary_unary(f"/{_SERVICE}/{name}")
        body = call(request.SerializeToString(), metadata=[("traceparent", parent)] if parent else None, timeout=30)
    return response.FromString(body)


def _match(instance: str, **fields: Any) -> Any:
    return pb.GetCacheLocationRequest(instance_id=instance, block_keys=_KEYS, query_type=pb.QT_PREFIX_MATCH, **fields)


def _instance(api: Api) -> str:
    site = Site(api)
    instance = site.instance("default")
    site.write(instance, _KEYS)
    return instance


def _below(found: Collector, span: SeenSpan) -> list[SeenSpan]:
    return [each for each in found.spans if each.parent_id == span.span_id]


def test_a_call_over_grpc_is_a_span_of_its_clients_trace(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
        answer = _grpc(
            world.process, "GetCacheLocation", _match(instance, trace_id="t1"), pb.GetCacheLocationResponse, _parent()
        )
        assert len(answer.locations) == 2
    (span,) = eventually(lambda: world.collector.of(_MATCH), 30)
    assert (span.trace_id, span.parent_id, span.service, span.is_error) == (_TRACE, _SPAN, "kvcm", False)
    assert world.collector.paths == {"/v1/traces"}
    attributes = span.attributes
    assert (attributes["rpc.system"], attributes["rpc.service"], attributes["rpc.method"]) == (
        "grpc",
        _SERVICE,
        "GetCacheLocation",
    )
    assert (attributes["rpc.grpc.status_code"], attributes["kvcm.code"], attributes["kvcm.keys"]) == (0, "OK", 2)
    assert (attributes["kvcm.trace_id"], attributes["kvcm.instance_id"]) == ("t1", instance)
    (below,) = _below(world.collector, span)
    assert (below.name, below.attributes["kvcm.keys"], below.attributes["kvcm.hits"]) == ("match", 2, 2)
    assert span.begin_ns <= below.begin_ns <= below.end_ns <= span.end_ns
    assert not any(str(key) in str(world.collector.spans) for key in _KEYS)


def test_a_write_over_http_has_its_stages(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
    connection = http.client.HTTPConnection(world.process.address.http, timeout=30)
    body = json.dumps({"trace_id": "t2", "instance_id": instance, "block_keys": ["1", "2", "3"]})
    connection.request("POST", "/api/startWriteCache", body, {"traceparent": _parent()})
    assert json.loads(connection.getresponse().read())["header"]["status"]["code"] == "OK"
    connection.close()
    (span,) = eventually(lambda: world.collector.of(_START), 30)
    assert (span.attributes["rpc.system"], span.trace_id, span.parent_id) == ("http", _TRACE, _SPAN)
    assert [below.name for below in sorted(_below(world.collector, span), key=lambda each: each.begin_ns)] == [
        "plan",
        "allocate",
        "store",
    ]


def test_the_client_decides_whether_its_call_is_sampled(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
    for parent in ("", _parent("00"), "nonsense", f"00-{'0' * 32}-{_SPAN}-01", _parent()):
        _grpc(world.process, "GetCacheLocation", _match(instance), pb.GetCacheLocationResponse, parent)
    world.process.signal(signal.SIGTERM)
    assert world.process.wait() == 0  # what is left is sent then
    assert [span.trace_id for span in world.collector.of(_MATCH)] == [_TRACE]
    assert world.collector.of(_START) == []


def test_log_lines_carry_the_ids_of_the_request_and_of_its_trace(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
    for flags, trace_id in (("00", "unsampled"), ("01", "sampled")):
        request = _match(instance, trace_id=trace_id)
        _grpc(world.process, "GetCacheLocation", request, pb.GetCacheLocationResponse, _parent(flags))
    _grpc(world.process, "GetCacheLocation", _match(instance, trace_id="alone"), pb.GetCacheLocationResponse, "")
    lines = [event for event in world.process.events("request") if event["method"] == "GetCacheLocation"]
    assert [(line["trace_id"], line.get("w3c_trace_id")) for line in lines] == [
        ("unsampled", _TRACE),
        ("sampled", _TRACE),
        ("alone", None),
    ]


def test_a_refused_call_is_no_error_of_the_server(world: World) -> None:
    _grpc(world.process, "GetCacheLocation", _match("nobody"), pb.GetCacheLocationResponse, _parent())
    (span,) = eventually(lambda: world.collector.of(_MATCH), 30)
    assert (span.attributes["kvcm.code"], span.is_error) == ("INSTANCE_NOT_EXIST", False)
    assert "kvcm.instance_id" not in span.attributes


def test_whatever_becomes_of_the_collector_calls_are_answered(tmp_path: Path) -> None:
    endpoint = f"kvcm.tracing.otlp_endpoint=http://127.0.0.1:{free_port()}"
    with manager(tmp_path, endpoint, "kvcm.tracing.sample=1") as process, process.api() as api:
        instance = _instance(api)
        for _ in range(20):
            assert len(Site(api).match(instance, _KEYS)) == 2
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_the_timing_tree_has_the_stages(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
        trace_id = "t__kvcm_need_span_tracer"
        match = api.ok(
            "GetCacheLocation", trace_id=trace_id, instance_id=instance, block_keys=_KEYS, query_type="QT_PREFIX_MATCH"
        )
        start = api.ok("StartWriteCache", trace_id=trace_id, instance_id=instance, block_keys=[5, 6])
    tree = json.loads(match.header.tracer_result)
    (handler,) = tree["meta_api.py:match"]
    (matched,) = handler["match.py:match"]
    assert 0 <= matched["span_time_us"] <= handler["span_time_us"] <= tree["span_time_us"]
    (handler,) = json.loads(start.header.tracer_result)["meta_api.py:start_write"]
    parts = ["sessions.py:_reserved_plan", "sessions.py:_allocate", "sessions.py:_store"]
    assert [name for name in handler if name != "span_time_us"] == parts
    assert sum(handler[name][0]["span_time_us"] for name in parts) <= handler["span_time_us"]
