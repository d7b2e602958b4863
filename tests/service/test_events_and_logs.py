"""Events, recent accesses, tracing and the access log."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from fake_clock import FakeClock
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from ports import free_port
from probe_clients import ask
from structlog.testing import capture_logs
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager, manager_of_module
from test_transport_sites import Site

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import ErrorCode
from kvcm.model.groups import CacheConfig, CacheReclaimStrategy, InstanceGroup, InstanceGroupQuota
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.optimizer.readers import read_trace
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.service import http_server
from kvcm.service.calls import AccessLog, Arrival, Call, Caller, CallRecorder, Outcome, Plane, Reply
from kvcm.service.meta_api import MetaApi
from kvcm.service.request_limits import RequestLimits
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryLease, MemoryTable
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.metrics import ApiMetrics

INSTANCE = Instance("", "g", "inst", 2, (LocationSpecInfo("tp0", 8),), ModelDeployment("m", "bf16"))
ENVELOPE = {"id", "source", "component", "type", "trigger_time_us"}


class Node:
    """A manager without servers, and the events that it published."""

    def __init__(self) -> None:
        self.clock = FakeClock(5000.0)
        self.log = EventLog(now=self.clock.now)
        self.storages = StorageDirectory("cluster")
        self.registry = Registry(self.storages)
        leadership = Leadership("n", self.clock, 10.0, MemoryLease(self.clock), MemoryTable())
        self.cache = CacheManager(self.registry, self.storages, self.clock, events=self.log)
        self.executor = DeletionExecutor(self.storages, self.clock, events=self.log)
        self.executor.serve(self.cache)
        self.calls = MetaApi(self.cache, self.registry, leadership, RequestLimits(), self.log).calls()
        self.caller = Caller(CallRecorder(ApiMetrics()), lambda _plane: None, lambda _instance: {})

    async def begin(self) -> None:
        await self.registry.storages.add(StorageConfig("s", DummyStorageSpec()))
        strategy = CacheReclaimStrategy("s", delay_before_delete_ms=1500)
        config = CacheConfig(strategy)
        await self.registry.groups.create(InstanceGroup("g", ("s",), "", 10, InstanceGroupQuota(1 << 30), config))
        await self.cache.register_instance(INSTANCE)

    async def ask(self, name: str, **fields: Any) -> Any:
        (call,) = [call for call in self.calls if call.name == name]
        reply = await self.caller.answer(call, call.request_type(instance_id="inst", **fields))
        return reply.complete()

    async def write(self, keys: list[int]) -> Any:
        started = await self.ask("StartWriteCache", block_keys=keys)
        finish = {"write_session_id": started.write_session_id, "success_blocks": pb.BlockMask(offset=len(keys))}
        assert (await self.ask("FinishWriteCache", **finish)).header.status.code == ErrorCode.OK
        return started


@pytest.fixture
async def node() -> Node:
    node = Node()
    await node.begin()
    return node


@asynccontextmanager
async def published(node: Node) -> AsyncIterator[list[dict[str, Any]]]:
    """The events published inside the block, filled in at its end."""
    listener = node.log.subscribe()
    events: list[dict[str, Any]] = []
    yield events
    await node.log.close()
    events += [json.loads(line) for line in b"".join(listener.pop_pending()).splitlines()]


def fields(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ENVELOPE}


async def test_the_calls_of_an_engine_are_reported_as_the_original_reports_them(node: Node) -> None:
    async with published(node) as events:
        started = await node.write([-3, 7])
        query = {"query_type": pb.QT_PREFIX_MATCH, "block_keys": [-3, 7, 9], "location_spec_names": ["tp0"]}
        await node.ask("GetCacheLocation", **query, block_mask=pb.BlockMask(offset=1))
    assert [(event["component"], event["type"]) for event in events] == [
        ("cache_manager", name) for name in ("StartWriteCache", "FinishWriteCache", "GetCacheLocation")
    ]
    for event in events:
        assert event.keys() >= ENVELOPE
        assert (event["source"], len(event["id"]), event["trigger_time_us"]) == ("inst", 32, 5000000000)
    start, finish, read = map(fields, events)
    session = {"write_session_id": started.write_session_id}
    written = {"keys": [-3, 7], "tokens": [], "block_mask": 0}
    assert start == {**session, **written, "location_spec_group_names": [], "write_timeout_seconds": 0}
    assert finish == {**session, "success_block": 2}
    asked = {"keys": [-3, 7, 9], "tokens": [], "block_mask": 1}
    assert read == {**asked, "query_type": "prefix_match", "sw_size": 0, "location_spec_names": ["tp0"]}


async def test_query_types_have_the_names_of_the_original(node: Node) -> None:
    names = ("batch_get", "prefix_match", "reverse_roll_sw_match")
    async with published(node) as events:
        for mode in (pb.QT_BATCH_GET, pb.QT_PREFIX_MATCH, pb.QT_REVERSE_ROLL_SW_MATCH):
            await node.ask("GetCacheLocation", query_type=mode, block_keys=[1, 2], sw_size=1)
    assert tuple(event["query_type"] for event in events) == names


async def test_keys_are_those_made_from_tokens_and_masks_keep_their_form(node: Node) -> None:
    flags = pb.BlockMask(bool_masks=pb.BoolMasksType(values=[False, True]))
    async with published(node) as events:
        await node.ask("GetCacheLocation", query_type=pb.QT_BATCH_GET, token_ids=[1, 2, 3, 4], block_mask=flags)
        await node.write([5])
        await node.ask("StartWriteCache", block_keys=[4, 5, 6])
    read, start = events[0], events[-1]
    assert (len(read["keys"]), read["tokens"], read["block_mask"]) == (2, [1, 2, 3, 4], [False, True])
    assert start["block_mask"] == [False, True, False]


async def test_failed_calls_and_peeks_are_not_reported(node: Node) -> None:
    async with published(node) as events:
        await node.ask("GetCacheLocation", query_type=77, block_keys=[1])
        await node.ask("GetCacheLocation", query_type=pb.QT_PREFIX_MATCH, block_keys=[1], peek=True)
        await node.ask("FinishWriteCache", write_session_id="none", success_blocks=pb.BlockMask(offset=0))
        await node.ask("RemoveCache", block_keys=[404])
    assert events == []


async def test_removals_are_reported_with_the_call_that_asked_for_them(node: Node) -> None:
    for keys in ([1, 2], [3], [4], [5]):
        await node.write(keys)
    async with published(node) as events:
        await node.ask("RemoveCache", block_keys=[1, 2])
        node.clock.time += 10
        await node.ask("TrimCache", strategy=pb.TS_TIMESTAMP, begin_timestamp=0, end_timestamp=1)
        await node.ask("TrimCache", strategy=pb.TS_REMOVE_ALL_CACHE)
        await node.executor.run_due()
        await node.write([6])
        await node.ask("TrimCache", strategy=pb.TS_REMOVE_ALL_META)
        await node.write([7])
        await node.cache.remove_instance("inst")
    removed = [fields(event) for event in events if event["type"] == "removed"]
    assert [(event["reason"], sorted(event["keys"]), event["bytes"]) for event in removed] == [
        ("RemoveCache", [1, 2], 16),
        ("TrimCache", [3, 4, 5], 24),
        ("TrimCache", [6], 8),  # without bytes; the others were reported already
        ("RemoveInstance", [7], 8),
    ]
    assert {(event["group"], event["storage"]) for event in removed} == {("g", "s")}
    assert all(len(ids) == 1 and len(ids[0]) > 0 for event in removed for ids in event["location_ids"])


async def test_a_write_session_that_expires_is_reported_once(node: Node) -> None:
    await node.ask("StartWriteCache", block_keys=[1, 2], write_timeout_seconds=5)
    async with published(node) as events:
        node.clock.time += 5
        await node.cache.expire()
        await node.cache.expire()
        await node.executor.run_due()
    (event,) = events
    assert (event["type"], event["reason"], event["keys"], event["bytes"]) == ("expired", "session", [2, 1], 16)


def test_events_are_streamed_as_they_happen_until_the_manager_stops(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        instance = site.instance()
        connection = http.client.HTTPConnection(process.address.admin_http, timeout=30)
        connection.request("GET", "/api/events")
        stream = connection.getresponse()
        assert (stream.status, stream.headers["content-type"]) == (200, "application/x-ndjson")
        for key in (1, 2):
            site.write(instance, [key])
            types = [json.loads(stream.readline())["type"] for _ in range(2)]
            assert types == ["StartWriteCache", "FinishWriteCache"]
        process.signal(signal.SIGTERM)
        assert (stream.read(), process.wait()) == (b"", 0)
        connection.close()


async def test_a_listener_that_goes_away_is_forgotten(node: Node) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(_event: Any) -> None:
        """Drop the event: the client is gone."""

    listener = node.log.subscribe()
    assert node.log.is_active
    async with asyncio.timeout(30):
        await http_server._send_lines(listener, lambda: True, receive, send)
    assert not node.log.is_active


keeping = manager_of_module("kvcm.optimizer.recent_keys=20000", "kvcm.optimizer.sampled_keys=4096")


@pytest.fixture
def kept_api(keeping: ManagerProcess) -> Iterator[Api]:
    with keeping.api("grpc") as api:
        yield api


def page(server: ManagerProcess, path: str) -> bytes:
    answer = ask(server.address.admin_http, path)
    assert answer.status == 200
    return answer.body


def recent(server: ManagerProcess, instance: str) -> list[dict[str, Any]]:
    """Return the kept events of an instance."""
    lines = [json.loads(line) for line in page(server, "/v1/events/recent").splitlines()]
    assert lines[0]["type"] == "recent"
    assert lines[0]["kept_events"] == len(lines) - 1
    return [line for line in lines if line["source"] == instance]


def needed(server: ManagerProcess, group: str) -> list[float]:
    """Return the bytes that a group is said to need."""
    lines = page(server, "/metrics").decode().splitlines()
    found = [line for line in lines if line.startswith("kvcm_optimizer_bytes_needed{") and f'"{group}"' in line]
    return [float(line.rpartition(" ")[2]) for line in found]


def test_reads_and_writes_are_kept_with_their_outcome(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance()
    site.write(instance, [1, 2])
    assert len(site.match(instance, [1, 2, 3])) == 2
    site.match(instance, [1, 2, 3], peek=True)
    events = recent(keeping, instance)
    assert [event["type"] for event in events] == ["StartWriteCache", "FinishWriteCache", "GetCacheLocation"]
    started, finished, read = events
    assert (started["keys"], started["refused_keys"], started["block_mask"]) == ([1, 2], 0, 0)
    assert finished["write_session_id"] == started["write_session_id"]
    assert (read["query_type"], read["keys"], read["hit_keys"], read["tokens"]) == ("prefix_match", [1, 2, 3], 2, [])


def test_tokens_of_prompts_are_not_kept(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance()
    kept_api.ok("GetCacheLocation", instance_id=instance, query_type="QT_PREFIX_MATCH", token_ids=list(range(640)))
    (read,) = recent(keeping, instance)
    assert read["keys"]
    assert read["tokens"] == []


def test_what_groups_need_is_in_a_scrape(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    group = site.group()
    instance = site.instance(group)
    for _ in range(4):
        site.match(instance, list(range(5000)))  # some are in the sample
    sizes = needed(keeping, group)
    assert len(sizes) == 5
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


def test_nothing_is_kept_or_estimated_unless_a_setting_says_so(server: ManagerProcess, api: Api) -> None:
    site = Site(api)
    group = site.group()
    site.match(site.instance(group), list(range(5000)))
    (summary,) = page(server, "/v1/events/recent").splitlines()
    assert json.loads(summary)["most_keys"] == 0
    assert needed(server, group) == [0] * 5


def test_a_write_that_is_refused_as_a_whole_is_kept(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance(site.group(quota={"capacity": 1}))
    kept_api.refused("StartWriteCache", instance_id=instance, block_keys=[1, 2])
    (refused,) = recent(keeping, instance)
    assert (refused["type"], refused["write_session_id"], refused["refused_keys"]) == ("StartWriteCache", "", 2)


def test_recent_accesses_are_read_as_a_trace_of_events(keeping: ManagerProcess, kept_api: Api, tmp_path: Path) -> None:
    site = Site(kept_api)
    instance = site.instance()
    site.match(instance, [1, 2, 3])
    site.write(instance, [1, 2, 3])
    site.match(instance, [1, 2, 4])
    path = tmp_path / "recent.jsonl"
    path.write_bytes(page(keeping, "/v1/events/recent"))
    trace = read_trace(path, format="publisher_log", block_tokens=16, use_cache=False)
    assert trace.bad_line_count == 0
    number = trace.instance_names.index(instance)
    own = [request for request in range(len(trace)) if trace.instances[request] == number]
    assert [int(trace.read_blocks[each]) for each in own] == [3, 0, 3]
    assert [bool(trace.writes[each]) for each in own] == [False, True, False]


_SERVICE = "kv_cache_manager.proto.meta.MetaService"
_MATCH, _START = f"{_SERVICE}/GetCacheLocation", f"{_SERVICE}/StartWriteCache"
_TRACE, _SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_KEYS = [7_777_777_001, 7_777_777_002]


class Collector:
    """A collector that keeps the spans it is sent over OTLP/HTTP.

    Attributes:
        spans: in the order in which they came.
        sources: path of each request, and the service that sent it.
    """

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.spans: list[Span] = []
        self.sources: set[tuple[str, Any]] = set()

    def take(self, path: str, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.sources.add((path, _attributes(resource.resource)["service.name"]))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def of(self, name: str) -> list[Span]:
        """Return the spans of a name."""
        return [span for span in self.spans if span.name == name]


def _attributes(described: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in described.attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.take(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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


def _match(process: ManagerProcess, instance: str, parent: str, trace_id: str = "") -> Any:
    """Look blocks up over gRPC in the trace of a client, if there is one."""
    query = {"instance_id": instance, "block_keys": _KEYS, "query_type": pb.QT_PREFIX_MATCH, "trace_id": trace_id}
    metadata = [("traceparent", parent)] if parent else None
    with grpc.insecure_channel(process.address.rpc) as channel:
        body = channel.unary_unary(f"/{_MATCH}")(pb.GetCacheLocationRequest(**query).SerializeToString(), 30, metadata)
    return pb.GetCacheLocationResponse.FromString(body)


def _instance(api: Api) -> str:
    site = Site(api)
    instance = site.instance("default")
    site.write(instance, _KEYS)
    return instance


def _below(found: Collector, span: Span) -> list[Span]:
    return [each for each in found.spans if each.parent_span_id == span.span_id]


def test_a_call_over_grpc_is_a_span_of_its_clients_trace(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
        assert len(_match(world.process, instance, _parent(), "t1").locations) == 2
    (span,) = eventually(lambda: world.collector.of(_MATCH), 30)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.status.code) == (
        _TRACE,
        _SPAN,
        Status.STATUS_CODE_UNSET,
    )
    assert world.collector.sources == {("/v1/traces", "kvcm")}
    expected = {
        **{"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": "GetCacheLocation"},
        **{"rpc.grpc.status_code": 0, "kvcm.code": "OK", "kvcm.keys": 2},
        **{"kvcm.trace_id": "t1", "kvcm.instance_id": instance},
    }
    assert expected.items() <= _attributes(span).items()
    (below,) = _below(world.collector, span)
    assert (below.name, {"kvcm.keys": 2, "kvcm.hits": 2}.items() <= _attributes(below).items()) == ("match", True)
    times = [span.start_time_unix_nano, below.start_time_unix_nano, below.end_time_unix_nano, span.end_time_unix_nano]
    assert times == sorted(times)
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
    assert _attributes(span)["rpc.system"] == "http"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (_TRACE, _SPAN)
    stages = sorted(_below(world.collector, span), key=lambda each: each.start_time_unix_nano)
    assert [stage.name for stage in stages] == ["plan", "allocate", "store"]


def test_the_client_decides_whether_its_call_is_sampled(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
    for parent in ("", _parent("00"), "nonsense", f"00-{'0' * 32}-{_SPAN}-01", _parent()):
        _match(world.process, instance, parent)
    world.process.signal(signal.SIGTERM)
    assert world.process.wait() == 0  # the manager sends the remaining spans before it ends
    assert [span.trace_id.hex() for span in world.collector.of(_MATCH)] == [_TRACE]
    assert world.collector.of(_START) == []


def test_log_lines_carry_the_ids_of_the_request_and_of_its_trace(world: World) -> None:
    with world.process.api() as api:
        instance = _instance(api)
    parents = {"unsampled": _parent("00"), "sampled": _parent(), "alone": ""}
    for trace_id, parent in parents.items():
        _match(world.process, instance, parent, trace_id)
    eventually(lambda: sum(event["method"] == "GetCacheLocation" for event in world.process.events("request")) == 3)
    lines = [event for event in world.process.events("request") if event["method"] == "GetCacheLocation"]
    assert [(line["trace_id"], line.get("w3c_trace_id")) for line in lines] == [
        *(("unsampled", _TRACE), ("sampled", _TRACE), ("alone", None))
    ]


def test_whatever_becomes_of_the_collector_calls_are_answered(tmp_path: Path) -> None:
    endpoint = f"kvcm.tracing.otlp_endpoint=http://127.0.0.1:{free_port()}"
    with manager(tmp_path, endpoint, "kvcm.tracing.sample=1") as process, process.api() as api:
        instance = _instance(api)
        for _ in range(20):
            assert len(Site(api).match(instance, _KEYS)) == 2
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


FIELDS = {
    *("method", "code", "keys", "instance", "duration_ms", "transport", "peer", "trace_id", "is_slow"),
    *("event", "level", "timestamp"),
}


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_logged_request_has_its_fields_and_no_keys(tmp_path: Path, transport: str) -> None:
    settings = ("kvcm.logger.access_log_sample=1", "kvcm.logger.slow_request_ms=3600000")
    with manager(tmp_path, *settings) as process, process.api(transport) as api:
        instance = Site(api).instance("default")
        keys = [7_777_777_001, 7_777_777_002]
        query = {"block_keys": keys, "query_type": "QT_PREFIX_MATCH", "trace_id": "trace-1"}
        api.ok("GetCacheLocation", instance_id=instance, **query)
        (event,) = eventually(lambda: [e for e in process.events("request") if e.get("trace_id") == "trace-1"])
        assert set(event) == FIELDS
        expected = {"method": "GetCacheLocation", "code": "OK", "keys": 2, "instance": instance, "is_slow": False}
        assert {**expected, "transport": transport, "peer": "127.0.0.1"}.items() <= event.items()
        assert event["duration_ms"] > 0
        assert "7777777" not in process.log_text()


def test_lines_of_a_request_have_its_trace_id_and_served_ones_are_not_logged_by_default(tmp_path: Path) -> None:
    settings = ("kvcm.logger.log_level=DEBUG", "kvcm.logger.slow_request_ms=3600000")
    with manager(tmp_path, *settings) as process, process.api() as api:
        api.ok("GetClusterInfo")
        api.refused("GetInstanceInfo", instance_id="nobody", trace_id="t" * 1000)
        api.refused("GetInstanceInfo", instance_id="nobody")
        first, second = eventually(lambda: process.events("refused")[1:] and process.events("refused"))
        assert first["trace_id"] == "t" * 256
        assert "trace_id" not in second
        assert "trace_id" not in process.events("serving")[0]
        assert not process.events("request")


CALL = Call("s", "GetCacheLocation", Plane.DATA, meta.GetCacheLocationRequest, meta.GetCacheLocationResponse, Reply)


class _Request:
    """Fails on every access."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked at")


def _end(log: AccessLog, seconds: float, request: Any) -> list[dict[str, Any]]:
    arrival = Arrival("grpc", "10.0.0.1")
    with capture_logs() as lines:
        log.end(CALL, request, arrival, Outcome(ErrorCode.OK, "", seconds, {}))
    return [dict(line) for line in lines]


@pytest.mark.parametrize(("drawn", "logged"), [(0.0, True), (0.2499, True), (0.25, False), (0.99, False)])
def test_the_sample_decides_by_the_number_drawn(drawn: float, logged: bool) -> None:
    log = AccessLog(lambda: drawn)
    log.set(sample=0.25, slow_seconds=1.0)
    assert bool(_end(log, 0.5, meta.GetCacheLocationRequest())) is logged


def test_slow_requests_are_always_logged_unless_there_is_no_limit() -> None:
    log = AccessLog(lambda: 0.999)
    log.set(sample=0.0, slow_seconds=1.0)
    assert _end(log, 1.0, _Request()) == []
    (line,) = _end(log, 1.001, meta.GetCacheLocationRequest(block_keys=[1, 2, 3]))
    assert (line["event"], line["is_slow"], line["keys"], line["duration_ms"]) == ("request", True, 3, 1001.0)
    log.set(sample=0.0, slow_seconds=0.0)
    assert _end(log, 1e9, _Request()) == []


def test_a_name_that_no_instance_can_have_is_cut() -> None:
    log = AccessLog(lambda: 0.0)
    log.set(sample=1.0, slow_seconds=0.0)
    (line,) = _end(log, 1.0, meta.GetCacheLocationRequest(instance_id="i" * 1000))
    assert line["instance"] == "i" * 256


def test_turned_away_requests_are_drawn_like_others() -> None:
    log = AccessLog(lambda: 0.5)
    arrival = Arrival("http", "10.0.0.1")
    for sample, expected in ((0.4, []), (0.6, ["turned_away"])):
        log.set(sample, 1.0)
        with capture_logs() as lines:
            log.rejected(CALL, arrival, "draining")
        assert [line["event"] for line in lines] == expected
