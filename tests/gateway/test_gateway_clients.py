"""What clients may do: keys, paths, bodies, and what hostile ones try; the gateway's own pages."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from gateway_rig import CHAT, Rig, engines, eventually, gateway, metric
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvcm.gateway.openai_api import BadRequestError, is_api_path, read_facts, tokenize_request, tokens_of_answer
from kvcm.gateway.settings import GatewaySecrets

KEY = GatewaySecrets(api_key="sk-own")


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer sk-other", "Basic sk-own", "sk-own", "Bearer sk-own x"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/engines", "/metrics", "/nowhere"])
async def test_without_the_key_nothing_is_answered(sent: str, path: str) -> None:
    async with engines(1) as (engine,), gateway([engine], secrets=KEY) as rig:
        headers = {"authorization": sent} if sent else {}
        answered = await (rig.post(path=path, **headers) if "chat" in path else rig.get(path, **headers))
    assert (answered.status, answered.headers["www-authenticate"]) == (401, "Bearer")
    assert (answered.error["code"], answered.error["type"]) == ("invalid_api_key", "authentication_error")
    assert engine.seen == []


async def test_with_the_key_requests_are_answered_and_the_key_stays_here() -> None:
    async with engines(1) as (engine,), gateway([engine], secrets=KEY) as rig:
        assert (await rig.post(authorization="Bearer sk-own")).status == 200
        assert (await rig.post(authorization="bearer  sk-own")).status == 200
        assert (await rig.get("/engines", authorization="Bearer sk-own")).status == 200
        for path in ("/livez", "/readyz"):
            assert (await rig.get(path)).status == 200
    assert "authorization" not in engine.seen[0].headers


async def test_a_key_of_the_client_is_for_the_engine_where_the_gateway_has_none() -> None:
    async with engines(1) as (engine,):
        async with gateway([engine]) as rig:
            await rig.post(authorization="Bearer the-engine-s")
        async with gateway([engine], secrets=GatewaySecrets(engine_key="put-here")) as rig:
            await rig.post(authorization="Bearer the-client-s")
    assert [each.headers["authorization"] for each in engine.seen] == ["Bearer the-engine-s", "Bearer put-here"]


async def test_pages_in_browsers_need_a_key() -> None:
    async with engines(1) as (engine,):
        async with gateway([engine]) as rig:
            assert (await rig.post(origin="http://evil.example")).error["code"] == "web_page"
        async with gateway([engine], secrets=KEY) as rig:
            assert (await rig.post(origin="http://ours.example", authorization="Bearer sk-own")).status == 200


PATHS = ["/v1", "/v1/", "/v1//models", "/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/a/../../health", "/v1/..%2fhealth"]
MORE_PATHS = [
    "/v1/a\\b",
    "/v1/a%00",
    "/health",
    "/tokenize",
    "/",
    "/v1@evil/x",
    "//evil/v1/models",
    "/V1/models",
    "/v1/./x",
]


@pytest.mark.parametrize("path", PATHS + MORE_PATHS)
async def test_other_paths_are_not_passed_on(path: str) -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        answered = await rig.get(path)
    assert (answered.status, answered.error["code"]) == (404, "not_found")
    assert engine.seen == []


@given(st.text("/.v1ab%\\@:?#", max_size=20))
def test_a_path_that_is_passed_on_is_below_v1_however_it_is_read(path: str) -> None:
    if is_api_path(path):
        assert path.startswith("/v1/")
        assert not {"", ".", ".."} & set(path.split("/")[1:])
        assert not set(path) & set("%\\?#")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
async def test_other_methods_are_not_passed_on(method: str) -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        async with rig.client.request(method, "/v1/models") as response:
            assert response.status == 405
    assert engine.seen == []


async def _raw(rig: Rig, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.port)
    writer.write(data)
    async with asyncio.timeout(60):
        answered = await reader.read()
    writer.close()
    return answered


async def test_the_target_of_a_request_names_no_other_host() -> None:
    async with engines(2) as (one, other), gateway([one]) as rig:
        head = f"GET {other.url}/v1/models HTTP/1.1\r\nhost: {other.address}\r\nconnection: close\r\n\r\n"
        assert b'{"engine": "a"}' in await _raw(rig, head.encode())
        for target in (f"{other.address}/v1/models", f"http://a@{other.address}", "*"):
            await _raw(rig, f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        connect = f"CONNECT {other.address} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert not (await _raw(rig, connect.encode())).startswith(b"HTTP/1.1 200")
    assert other.seen == []
    assert one.seen[0].headers["host"] == one.address


async def test_a_head_that_is_too_large_is_431() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-big: " + b"x" * (1 << 17) + b"\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.port)
        writer.write(head)
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()
    assert engine.seen == []


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_is_too_large_is_413(is_chunked: bool) -> None:
    async def pieces() -> object:
        for _ in range(20):
            yield b"x" * 100

    async with engines(1) as (engine,), gateway([engine], max_body_bytes=1024) as rig:
        data = pieces() if is_chunked else b"x" * 2000
        async with rig.client.post("/v1/chat/completions", data=data) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "too_large"
    assert engine.seen == []


BAD = [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"messages": 1}', b"{}", b"[" * 100_000, b'{"messages": {"a": 1}}']


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
async def test_a_body_that_cannot_be_read_is_400(body: bytes) -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        answered = await rig.post(body)
        assert (answered.status, answered.error["code"]) == (400, "bad_request")
        assert answered.error["type"] == "invalid_request_error"
        assert answered.headers["x-request-id"] == "made-here"
        assert (await rig.post()).status == 200, "the connection is not spoiled"
    assert len(engine.seen) == 1


@given(st.binary(max_size=60), st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]))
def test_any_body_is_read_or_refused(body: bytes, path: str) -> None:
    with contextlib.suppress(BadRequestError):
        tokenize_request(read_facts(path, "application/json", "", body, prefix_characters=10))
    tokens_of_answer(body)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = ("messages", "prompt", "user", "stream", "model", "cache_salt", "tools", "tokens")


@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES), st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_fields_of_any_type_are_read_or_refused(fields: dict[str, object], path: str) -> None:
    body = json.dumps(fields).encode()
    tokens = tokens_of_answer(body)
    assert tokens is None or all(type(each) is int and each >= 0 for each in tokens)
    with contextlib.suppress(BadRequestError):
        facts = read_facts(path, "", "", body, prefix_characters=10)
        assert isinstance(facts.cache_salt, str)
        assert len(facts.affinity) <= 40 or isinstance(fields.get("user"), str)
        tokenize_request(facts)


async def test_headers_cannot_be_smuggled_into_logs_or_answers() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        engine.answer = engine.plain
        for text in ("a" * 129, "ä", "a b"):
            answered = await rig.post(x_request_id=text, x_kvcm_engine="evil", x_session_id=text)
            assert answered.headers["x-request-id"] == "made-here"
            assert answered.headers["x-kvcm-engine"] == engine.address
        assert all("x-kvcm-engine" not in each.headers for each in engine.seen)


async def test_engines_are_listed() -> None:
    release = asyncio.Event()
    async with engines(2) as (one, other), gateway([one, other], eject_after=1, instance_a="x") as rig:
        other.is_healthy = False
        one.answer = one.hang(release)
        await rig.gateway.probe_all()
        asking = asyncio.create_task(rig.post({**CHAT, "stream": True}))
        await eventually(lambda: one.seen)
        found = json.loads((await rig.get("/engines")).body)["engines"]
        release.set()
        await asking
    assert found[0] == {
        "engine": one.address,
        "url": one.url,
        "instance": "x",
        "state": "healthy",
        "in_flight": 1,
        "tokens_in_flight": len(one.seen[0].body) // 4,
        "failures": 0,
        "ejected_seconds": 0,
    }
    assert (found[1]["state"], found[1]["ejected_seconds"]) == ("ejected", 5.0)


async def test_metrics_are_what_prometheus_reads() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        await rig.post()
        await rig.post(b"{")
        await eventually(
            lambda: metric(
                rig, "kvcm_gateway_requests_total", engine="none", policy="round_robin", outcome="bad_request"
            )
        )
        answered = await rig.get("/metrics", accept="text/plain;version=0.0.4")
        odd = await rig.get("/metrics", accept="application/openmetrics-text;version=x")
    families = {each.name: each for each in text_string_to_metric_families(answered.body.decode())}
    assert {name for name in families if not name.endswith("_created")} == {
        each.name for each in rig.gateway.metrics.registry.collect()
    }
    outcomes = {each.labels["outcome"]: each.value for each in families["kvcm_gateway_requests"].samples}
    assert outcomes == {"ok": 1, "bad_request": 1}
    assert odd.status == 200
