"""The access log: which requests it has, what it says of them, and that trace ids are in every line of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from test_transport_drivers import eventually
from test_transport_process import manager
from test_transport_sites import Site

from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.service.access_log import AccessLog
from kvcm.service.calls import Arrival, Call, Outcome, Plane, Reply

FIELDS = {
    *("method", "code", "keys", "instance", "duration_ms", "transport", "peer", "trace_id", "is_slow"),
    *("event", "level", "timestamp"),
}


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_logged_request_has_its_fields_and_no_keys(tmp_path: Path, transport: str) -> None:
    with manager(tmp_path, "kvcm.logger.access_log_sample=1") as process, process.api(transport) as api:
        instance = Site(api).instance("default")
        keys = [7_777_777_001, 7_777_777_002]
        query = {"block_keys": keys, "query_type": "QT_PREFIX_MATCH", "trace_id": "trace-1"}
        api.ok("GetCacheLocation", instance_id=instance, **query)
        (event,) = eventually(lambda: [e for e in process.events("request") if e.get("trace_id") == "trace-1"])
        assert set(event) == FIELDS
        assert (
            event["method"],
            event["code"],
            event["keys"],
            event["instance"],
            event["transport"],
            event["peer"],
        ) == (
            *("GetCacheLocation", "OK", 2, instance),
            *(transport, "127.0.0.1"),
        )
        assert event["duration_ms"] > 0
        assert event["is_slow"] is False
        assert "7777777" not in process.log_text()


def test_by_default_requests_are_not_logged(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        Site(api).instance("default")
        api.ok("AdminService.UpdateLogger", log_level="DEBUG")
        api.refused("GetInstanceInfo", instance_id="nobody")
        eventually(lambda: process.events("refused"))
        assert not process.events("request")


def test_lines_of_a_request_have_its_trace_id_and_others_have_none(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.logger.log_level=DEBUG") as process, process.api() as api:
        api.refused("GetInstanceInfo", instance_id="nobody", trace_id="t" * 1000)
        api.refused("GetInstanceInfo", instance_id="nobody")
        first, second = eventually(lambda: process.events("refused")[1:] and process.events("refused"))
        assert first["trace_id"] == "t" * 256
        assert "trace_id" not in second
        assert "trace_id" not in process.events("serving")[0]


CALL = Call("s", "GetCacheLocation", Plane.DATA, meta.GetCacheLocationRequest, meta.GetCacheLocationResponse, Reply)


class _Request:
    """Fails when anybody looks at it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked at")


def _end(log: AccessLog, seconds: float, request: Any) -> list[dict[str, Any]]:
    arrival = Arrival("grpc", "10.0.0.1")
    with capture_logs() as lines:
        log.end(log.begin(CALL, request, arrival), CALL, request, arrival, Outcome(ErrorCode.OK, "", seconds, {}))
    return [dict(line) for line in lines]


@pytest.mark.parametrize(("drawn", "logged"), [(0.0, True), (0.2499, True), (0.25, False), (0.99, False)])
def test_the_sample_decides_by_what_is_drawn(drawn: float, logged: bool) -> None:
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


def test_of_what_is_dropped_nothing_is_looked_at() -> None:
    log = AccessLog(lambda: 0.5)
    log.set(sample=0.5, slow_seconds=0.0)
    assert _end(log, 1.0, _Request()) == []


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
            log.turned_away(CALL, arrival, "draining")
        assert [line["event"] for line in lines] == expected
