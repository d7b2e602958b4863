"""Rules of every resource: names, lists, documents, statuses of HTTP, and any input."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from rest_client import RestClient, component
from test_transport_drivers import SERVICES, Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import unique

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin
from kvcm.service.admission import Phase, ServingGate
from kvcm.service.calls import Arrival
from kvcm.service.http_server import ARRIVAL, HttpApp, LazyResources
from kvcm.service.rejections import ProblemError
from kvcm.service.rest import key_resource
from kvcm.service.rest.account_resource import AccountDocument, PasswordDocument
from kvcm.service.rest.calls import apply_patch
from kvcm.service.rest.conversion import decode_name, encode_name
from kvcm.service.rest.documents import Document, Page, PageQuery, page_of
from kvcm.service.rest.group_resource import GroupDocument
from kvcm.service.rest.instance_resource import InstanceDocument
from kvcm.service.rest.pin_resource import MadePinDocument, NewPinDocument, PinDocument
from kvcm.service.rest.storage_resource import StorageDocument, StorageStatusDocument
from kvcm.service.rest.task_resource import GarbageReport, ScrubReport, TaskDocument
from kvcm.service.rest.usage_resource import UsageReportDocument

DOC = {"storage_candidates": ["nfs_01"], "global_quota_group_name": "quota"}
PROBLEM = "application/problem+json"


def test_an_unknown_path_is_a_404_problem(rest: RestClient) -> None:
    missing = rest.get("/v1/nothing")
    assert (missing.status, missing.headers["content-type"], missing.body["status"]) == (404, PROBLEM, 404)
    assert (missing.body["type"], missing.body["title"]) == ("about:blank", "Not Found")
    assert rest.get("/v1").raw == b"404 Not Found"


def test_the_data_port_has_the_resource_of_routers_alone(server: ManagerProcess) -> None:
    data = RestClient(server.address.http)
    assert data.get("/v1/groups").status == 404
    assert list(data.get("/v1/openapi.json").body["paths"]) == ["/v1/score"]
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
def test_a_method_a_path_lacks_is_405_with_those_it_has(rest: RestClient, method: str, path: str, allowed: str) -> None:
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


_NO_OBJECTS = [b"", b"{", b"[]", b"null", b'"x"', b"\xff"]


@pytest.mark.parametrize(
    "body",
    [
        *_NO_OBJECTS,
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


@pytest.mark.parametrize(
    "make",
    [
        lambda text: {text: 1},
        lambda text: {"storage_candidates": [text]},
        lambda text: {"quota": {"quota_config": [{"storage_type": text}]}},
        lambda text: {"quota": {"capacity": text}},
    ],
)
def test_a_long_document_is_not_sent_back(rest: RestClient, make: Callable[[str], dict[str, Any]]) -> None:
    refused = rest.put("/v1/groups/long", {**DOC, **make("x" * 200_000)})
    assert refused.status == 400
    assert len(refused.raw) + len(str(refused.headers)) < 4000


def test_a_body_beyond_2_mib_is_413(rest: RestClient) -> None:
    refused = rest.put("/v1/groups/large", b" " * ((2 << 20) + 1))
    assert (refused.status, refused.headers["content-type"]) == (413, PROBLEM)
    assert "2097152" in refused.body["detail"]


@pytest.mark.parametrize(("method", "header"), [("GET", "accept_language"), ("PUT", "origin")])
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
    gate = ServingGate()
    app = HttpApp(gate, 1000)
    for phase in (Phase.STARTING, Phase.CLOSED):
        await gate.enter_phase(phase)
        sent = _Sent()
        await app(_scope(method), _nothing, sent)
        headers = dict(sent[0]["headers"])
        assert (sent[0]["status"], headers[b"content-type"], headers[b"retry-after"]) == (503, PROBLEM.encode(), b"1")


async def test_resources_are_reported_how_a_request_came_and_made_once() -> None:
    gate, made, seen = ServingGate(), [], []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope[ARRIVAL], gate.in_flight, (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def make() -> Any:
        made.append(1)
        return answer

    app = HttpApp(gate, 1000)
    app.serve([], None, bodies=None, resources=LazyResources(make))  # type: ignore[arg-type]
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


NAMES = [
    "../etc/passwd", "..", "a?b=c", "100%", "%2F", "two words", "‮evil", "a#b", "Qwen/Qwen3-8B", "a\\b", "+", "'\"",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_any_name_is_reached_by_it_alone(rest: RestClient, apis: dict[str, Api], name: str) -> None:
    path = f"/v1/groups/{encode_name(name)}"
    made = rest.put(path, DOC)
    assert (made.status, made.body["name"]) == (201, name)
    assert rest.get(made.headers["location"]).body == made.body
    assert apis["grpc"].ok("AdminService.GetInstanceGroup", name=name).instance_group.name == name
    assert name in [group["name"] for group in rest.items("/v1/groups")]
    assert rest.patch(path, {"user_data": "x"}).body["version"] == 2
    assert rest.delete(path).status == 204


@pytest.mark.parametrize("path", ["%FF", "%C3", "a%00b", "%0A", component("ä" * 129), "%7F"])
def test_a_name_that_nothing_can_have_is_400_and_names_the_path(rest: RestClient, path: str) -> None:
    refused = rest.get(f"/v1/groups/{path}")
    assert (refused.status, refused.body["errors"][0]["field"]) == (400, "path.name")


@pytest.mark.parametrize(
    "path", ["/v1/groups/", "/v1/groups//", "/v1/groups/a/b", "/v1/", "/v1/groups/a/", "/v1//groups"]
)
def test_more_and_fewer_steps_than_a_resource_has_are_404(rest: RestClient, path: str) -> None:
    missing = rest.get(path)
    assert (missing.status, missing.headers["content-type"]) == (404, "application/problem+json")


@given(st.text(min_size=1))
def test_a_name_comes_back_from_its_component(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    path = encode_name(name)
    assert decode_name(path) == name
    assert "/" not in path
    assert path not in {".", ".."}


def test_pages_go_on_while_entries_come_and_go() -> None:
    def page(names: list[str], token: str) -> Any:
        return page_of(names, lambda name: (name,), PageQuery(limit=2, page_token=token), str)

    first = page(["a", "b", "d"], "")
    assert first["items"] == ["a", "b"]
    second = page(["a", "c", "d", "e"], first["next_page_token"])
    assert second["items"] == ["c", "d"]
    assert page(["e"], second["next_page_token"]) == {"items": ["e"], "next_page_token": None}


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "limit=1.5", "page_token=!", "page_token=bnVsbA", "page_token=WzFd", "grp=a"],
)
def test_a_query_that_makes_no_sense_is_400(rest: RestClient, query: str) -> None:
    rest.put("/v1/accounts/somebody", {"password": "p"})
    refused = rest.get(f"/v1/accounts?{query}")
    assert (refused.status, refused.body["errors"][0]["field"].startswith("query.")) == (400, True)


@given(st.sets(st.text()), st.integers(1, 5))
def test_pages_hold_every_entry_once_in_order(names: set[str], limit: int) -> None:
    seen: list[str] = []
    token: str | None = ""
    while token is not None:
        page = page_of(names, lambda name: (name,), PageQuery(limit=limit, page_token=token), str)
        seen += page["items"]
        token = page["next_page_token"]
    assert seen == sorted(names)


@given(st.text(max_size=50))
def test_no_token_breaks_a_list(token: str) -> None:
    with contextlib.suppress(ProblemError):
        assert len(page_of(["a", "b"], lambda name: (name,), PageQuery(page_token=token), str)["items"]) <= 2


# Fields that stand in paths, that are no part of resources, or that only resources have.
PAIRS: list[tuple[type[BaseModel], Any, set[str], set[str]]] = [
    (GroupDocument, admin.InstanceGroup, set(), set()),
    (StorageDocument, admin.StorageConfig, {"local"}, {"is_available", "status"}),
    (StorageStatusDocument, admin.StorageStatus, set(), set()),
    (InstanceDocument, admin.InstanceInfo, set(), set()),
    (AccountDocument, admin.Account, set(), set()),
    (UsageReportDocument, capacity.GetUsageResponse, set(), set()),
    (GarbageReport, capacity.CollectGarbageResponse, set(), set()),
    (ScrubReport, capacity.ScrubStorageResponse, set(), set()),
    (PinDocument, pin.Pin, set(), set()),
    (NewPinDocument, pin.PinPrefixRequest, set(), set()),
    (MadePinDocument, pin.PinPrefixResponse, set(), set()),
    (key_resource.KeyDocument, access.Key, set(), set()),
    (key_resource.NewKeyDocument, access.CreateKeyRequest, set(), set()),
    (key_resource.RotationDocument, access.RotateKeyRequest, {"key_id"}, set()),
    (key_resource.LoginDocument, access.LoginRequest, set(), set()),
    (PasswordDocument, access.SetPasswordRequest, {"user_name"}, set()),
    (key_resource.MadeKeyDocument, access.CreateKeyResponse, set(), set()),
    (key_resource.WhoAmIDocument, access.WhoAmIResponse, set(), set()),
]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _check(model: type[BaseModel], descriptor: Any, without: set[str], more: set[str]) -> None:
    wanted = {field.name for field in descriptor.fields} - {"header", "trace_id"} - without
    assert set(model.model_fields) - more == wanted, model
    for name in wanted:
        inner = _model_in(model.model_fields[name].annotation)
        of_message = descriptor.fields_by_name[name].message_type
        is_number = of_message is None or of_message.full_name == "google.protobuf.Int64Value"
        assert (inner is None) == is_number, f"{model.__name__}.{name}"
        if inner is not None:
            _check(inner, of_message, set(), set())


@pytest.mark.parametrize(
    ("model", "message", "without", "more"), PAIRS, ids=lambda value: getattr(value, "__name__", "")
)
def test_documents_have_the_fields_of_their_messages(
    model: type[BaseModel], message: Any, without: set[str], more: set[str]
) -> None:
    _check(model, message.DESCRIPTOR, without, more)


def _names(annotation: Any) -> set[str]:
    return {value for value in get_args(annotation) if isinstance(value, str)} | {
        value for part in get_args(annotation) for value in _names(part)
    }


@pytest.mark.parametrize(("model", "message"), [(pair[0], pair[1]) for pair in PAIRS])
def test_documents_have_the_names_of_their_enums(model: type[BaseModel], message: Any) -> None:
    for name, field in model.model_fields.items():
        known = message.DESCRIPTOR.fields_by_name.get(name)
        if known is not None and known.enum_type is not None:
            names = set(known.enum_type.values_by_name)
            assert names - _names(field.annotation) <= {each for each in names if each.endswith("UNSPECIFIED")}
            assert _names(field.annotation) <= names


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/storages", Page[StorageDocument]),
        ("/v1/storages?with_status=true", Page[StorageDocument]),
        ("/v1/groups", Page[GroupDocument]),
        ("/v1/instances", Page[InstanceDocument]),
        ("/v1/accounts", Page[AccountDocument]),
        ("/v1/tasks", Page[TaskDocument]),
        ("/v1/usage", UsageReportDocument),
        ("/v1/groups/default", GroupDocument),
        ("/v1/storages/nfs_01", StorageDocument),
    ],
)
def test_answers_match_their_documents(rest: RestClient, path: str, kind: Any) -> None:
    answer = rest.get(path)
    assert answer.status == 200
    TypeAdapter(kind).validate_python(answer.body)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [item] if key == "$ref" else _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _check_whole(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    references = set(_references(document))
    assert references == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    identities = [operation["operationId"] for operation in operations]
    assert len(identities) == len(set(identities))
    assert all(operation["description"] and operation["tags"] for operation in operations)
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_the_document_of_the_resources_is_whole(rest: RestClient) -> None:
    document = rest.get("/v1/openapi.json").body
    _check_whole(document)
    for path, item in document["paths"].items():
        for operation in item.values():
            parameters = operation.get("parameters", [])
            in_path = {each["name"] for each in parameters if each["in"] == "path"}
            assert in_path == set(re.findall(r"\{(\w+)\}", path))
            assert all(each["description"] for each in parameters)
            errors = {status for status in operation["responses"] if int(status) >= 400}
            assert {"400", "401", "403", "429", "500", "503"} <= errors
            assert "422" not in errors
            assert all(list(operation["responses"][each]["content"]) == ["application/problem+json"] for each in errors)


def test_each_port_describes_its_calls(server: ManagerProcess) -> None:
    described = []
    for address in (server.address.http, server.address.admin_http):
        client = RestClient(address)
        document = client.get("/openapi.json").body
        client.connection.close()
        _check_whole(document)
        described.append(document)
    data, admin_port = ({path.removeprefix("/api/").lower() for path in document["paths"]} for document in described)
    on_data = {"MetaService", "LeaseService", "PinService", "PoolService", "ResidencyService"}
    for name, service in SERVICES.items():
        methods = {method.name.lower() for method in service.methods}
        assert methods <= (data if name in on_data else admin_port)
    for document in described:
        for item in document["paths"].values():
            assert {"200", "400", "413", "429", "503"} <= set(item["post"]["responses"])


def test_schemas_of_calls_follow_the_rules_of_their_json(server: ManagerProcess) -> None:
    client = RestClient(server.address.http)
    schemas = client.get("/openapi.json").body["components"]["schemas"]
    client.connection.close()
    meta = "kv_cache_manager.proto.meta"
    asked = schemas[f"{meta}.GetCacheLocationRequest.request"]
    assert "required" not in asked
    key = asked["properties"]["block_keys"]["anyOf"][0]["items"]["anyOf"]
    assert [each["type"] for each in key] == ["integer", "string"]
    assert key[0]["minimum"] == -(2**63)
    assert {"type": "null"} in asked["properties"]["query_type"]["anyOf"]
    mask = schemas[f"{meta}.BlockMask.request"]
    assert mask["allOf"] == [{"not": {"required": ["offset", "bool_masks"]}}]
    answered = schemas[f"{meta}.GetCacheLocationResponse.answer"]
    assert "locations" in answered["required"]
    assert "header" not in answered["required"]
    spec = schemas[f"{meta}.InstanceInfo.answer"]["properties"]["location_spec_infos"]["items"]["$ref"]
    assert schemas[spec.rpartition("/")[2]]["properties"]["size"]["type"] == "string"


class Any_(Document):  # noqa: N801 - a document of anything
    """Anything."""

    a: Any = 0
    b: Any = 0


RFC_EXAMPLES = [
    ({"a": "b"}, {"a": "c"}, {"a": "c", "b": 0}),
    ({"a": "b"}, {"a": None}, {"a": 0, "b": 0}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c", "b": 0}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}, "b": 0}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1], "b": 0}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}, "b": 0}),
]


@pytest.mark.parametrize(("document", "patch", "expected"), RFC_EXAMPLES)
def test_examples_of_the_rfc(document: Any, patch: Any, expected: Any) -> None:
    assert apply_patch(Any_, document, patch).model_dump() == expected
