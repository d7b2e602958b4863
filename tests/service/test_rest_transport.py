"""What holds for every resource: statuses of HTTP, media types, limits, browsers, starting and stopping."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from rest_client import RestClient
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import unique

from kvcm.service.calls import Arrival
from kvcm.service.gate import Gate, Phase
from kvcm.service.http_app import ARRIVAL, HttpApp
from kvcm.service.rest.late import LateResources

DOC = {"storage_candidates": ["nfs_01"], "global_quota_group_name": "quota"}
PROBLEM = "application/problem+json"


def test_an_unknown_path_is_a_404_problem_on_the_admin_port_alone(rest: RestClient, server: ManagerProcess) -> None:
    missing = rest.get("/v1/nothing")
    assert (missing.status, missing.headers["content-type"], missing.body["status"]) == (404, PROBLEM, 404)
    assert (missing.body["type"], missing.body["title"]) == ("about:blank", "Not Found")
    data = RestClient(server.address.http)
    assert (data.get("/v1/groups").status, data.get("/v1/groups").raw) == (404, b"404 Not Found")
    assert rest.get("/v1").raw == b"404 Not Found"
    data.connection.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/groups/default", "DELETE, GET, HEAD, PATCH, PUT"),
        ("PUT", "/v1/groups", "GET, HEAD"),
        ("OPTIONS", "/v1/usage", "GET, HEAD"),
        ("GET", "/v1/storages/nfs_01/drain", "DELETE, POST"),
        ("DELETE", "/v1/openapi.json", "GET, HEAD"),
        ("TRACE", "/v1/pins", "GET, HEAD, POST"),
    ],
)
def test_a_method_that_a_path_has_not_is_405_with_those_it_has(
    rest: RestClient, method: str, path: str, allowed: str
) -> None:
    refused = rest.ask(method, path)
    assert (refused.status, refused.headers["allow"], refused.headers["content-type"]) == (405, allowed, PROBLEM)


@pytest.mark.parametrize("path", ["/v1/groups", "/v1/groups/default", "/v1/usage", "/v1/openapi.json", "/v1/nothing"])
def test_head_is_the_head_of_get(rest: RestClient, path: str) -> None:
    got, head = rest.get(path), rest.ask("HEAD", path)
    changing = {"date", "x-request-id"}
    assert (head.status, head.raw) == (got.status, b"")
    if path == "/v1/usage":  # how full disks are has a digit more or less from one moment to the next
        changing.add("content-length")
        assert int(head.headers["content-length"]) > 0
    assert {each: head.headers[each] for each in head.headers if each not in changing} == {
        each: got.headers[each] for each in got.headers if each not in changing
    }


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_body_of_another_kind_is_415(rest: RestClient, kind: str) -> None:
    path = f"/v1/groups/{unique('group')}"
    refused = rest.ask("PUT", path, b'{"storage_candidates":["a"],"global_quota_group_name":"q"}', content_type=kind)
    assert (refused.status, refused.headers["content-type"]) == (415, PROBLEM)
    assert rest.get(path).status == 404
    merge = "application/merge-patch+json"
    assert rest.put(path, DOC, content_type=merge).status == 415
    assert rest.put(path, DOC, content_type="Application/JSON; charset=utf-8").status == 201
    assert rest.patch(path, {}, content_type="application/json").status == 200
    assert rest.patch(path, {}, content_encoding="gzip").status == 415


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b'{"storage_candidates": ["a"], "storage_candidates": ["b"], "global_quota_group_name": "q"}',
        b'{"storage_candidates": ["a"], "global_quota_group_name": "q", "pin_budget_bytes": NaN}',
        b'{"storage_candidates": ["\\ud800"], "global_quota_group_name": "q"}',
        b'{"storage_candidates": ["a"], "global_quota_group_name": "q", "max_instance_count": 1' + b"0" * 5000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 100_000,
    ],
    ids=range(12),
)
@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_a_body_that_is_no_document_is_a_400_problem(rest: RestClient, method: str, body: bytes) -> None:
    refused = rest.ask(method, f"/v1/groups/{'default' if method == 'PATCH' else unique('group')}", body)
    assert (refused.status, refused.headers["content-type"], refused.body["status"]) == (400, PROBLEM, 400)


def test_a_body_beyond_2_mib_is_413(rest: RestClient) -> None:
    refused = rest.put("/v1/groups/large", b" " * ((2 << 20) + 1))
    assert (refused.status, refused.headers["content-type"]) == (413, PROBLEM)
    assert "2097152" in refused.body["detail"]


@pytest.mark.parametrize(
    ("method", "header"),
    [
        ("GET", "origin"),
        ("GET", "accept_language"),
        ("HEAD", "accept_language"),
        ("DELETE", "origin"),
        ("PUT", "origin"),
    ],
)
def test_requests_of_web_pages_are_refused(rest: RestClient, method: str, header: str) -> None:
    refused = rest.ask(method, "/v1/groups/default", None, **{header: "de"})
    assert (refused.status, refused.headers["content-type"]) == (403, PROBLEM)


def test_the_calls_behind_resources_are_logged_and_counted_as_calls(tmp_path: Path) -> None:
    with manager(tmp_path / "manager", "kvcm.logger.access_log_sample=1") as process:
        rest = RestClient(process.address.admin_http)
        assert rest.put("/v1/groups/a", DOC, x_request_id="mine").status == 201
        wanted = ["GetInstanceGroup", "CreateInstanceGroup", "GetInstanceGroup"]
        logged = eventually(lambda: process.events("request") if len(process.events("request")) >= 3 else [])
        assert [event["method"] for event in logged] == wanted
        assert {(event["transport"], event["peer"], event["trace_id"]) for event in logged} == {
            ("http", "127.0.0.1", "mine")
        }
        counted = rest.get("/metrics").raw.decode()
        assert 'kvcm_rpc_requests_total{code="OK",method="CreateInstanceGroup"} 1' in counted
        rest.connection.close()


def test_a_request_id_that_is_not_fit_for_logs_is_not_taken(rest: RestClient) -> None:
    assert rest.get("/v1/groups/default", x_request_id="a b").headers["x-request-id"].startswith("rest_")
    assert rest.get("/v1/groups/default", x_request_id="a" * 129).headers["x-request-id"].startswith("rest_")


class _Sent(list[MutableMapping[str, Any]]):
    async def __call__(self, event: MutableMapping[str, Any]) -> None:
        self.append(event)


async def _nothing() -> MutableMapping[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def _scope(method: str = "GET") -> dict[str, Any]:
    path = "/v1/groups"
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    return {**scope, "headers": [], "client": ("10.0.0.9", 1)}


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_manager_that_starts_or_stops_sends_clients_away(method: str) -> None:
    gate = Gate()
    app = HttpApp(gate, 1000)
    for phase in (Phase.STARTING, Phase.CLOSED):
        await gate.enter_phase(phase)
        sent = _Sent()
        await app(_scope(method), _nothing, sent)
        headers = dict(sent[0]["headers"])
        assert (sent[0]["status"], headers[b"content-type"], headers[b"retry-after"]) == (503, PROBLEM.encode(), b"1")


async def test_resources_are_told_how_a_request_came_and_made_once() -> None:
    gate, made, seen = Gate(), [], []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope[ARRIVAL], gate.in_flight, (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def make() -> Any:
        made.append(1)
        return answer

    app = HttpApp(gate, 1000)
    app.serve([], None, bodies=None, resources=LateResources(make))  # type: ignore[arg-type]
    await gate.enter_phase(Phase.SERVING)
    assert made == []
    for phase, closing in ((Phase.SERVING, []), (Phase.LEAVING, [(b"connection", b"close")])):
        await gate.enter_phase(phase)
        sent = _Sent()
        await app(_scope(), _nothing, sent)
        assert sent[0]["headers"] == closing
    assert made == [1]
    assert seen == [(Arrival("http", "10.0.0.9"), 1, b"")] * 2
    assert gate.in_flight == 0


@pytest.mark.parametrize("path", ["/v1/storages/nfs_01?dry_run=true", "/v1/groups/default?x=", "/v1/tasks/a?force=1"])
def test_a_parameter_that_would_be_passed_over_is_400(rest: RestClient, path: str) -> None:
    refused = rest.delete(path)
    assert (refused.status, refused.body["errors"][0]["allowed"]) == (400, "no parameter")


@pytest.mark.parametrize("part", ["{},", '"a":1,', "0,", "[],"])
def test_a_body_that_is_made_to_be_slow_to_read_is_not_read(rest: RestClient, part: str) -> None:
    refused = rest.put("/v1/groups/large", f"[{part * ((2 << 20) // len(part) - 2)}0]".encode())
    assert (refused.status, "more than" in refused.body["detail"]) == (400, True)


def test_a_manager_does_not_load_what_resources_need_before_they_are_asked_for() -> None:
    program = "import sys, kvcm.cli, kvcm.app; print(sorted({'fastapi', 'pydantic', 'starlette'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
