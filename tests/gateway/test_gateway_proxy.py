"""Requests on their way: answers byte for byte, retries, broken answers, clients that leave, limits."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from gateway_rig import CHAT, FakeEngine, engines, eventually, gateway, metric

EVENTS = [b'data: {"a": 1}\n\n', b": comment\r\n\r\n", "data: ü€\n\n".encode(), b"data: [DONE]\n\n"]


async def test_a_request_reaches_the_engine_as_it_was_sent() -> None:
    body = b'{ "messages" : [ ],  "x":1.50, "x": 2 }'
    async with engines(1) as (engine,), gateway([engine]) as rig:
        answered = await rig.post(body, "/v1/chat/completions?a=%2F&b", connection="x-secret", x_secret="1", x_own="2")
        seen = engine.seen[0]
    assert answered.status == 200
    assert (seen.method, seen.target, seen.body) == ("POST", "/v1/chat/completions?a=%2F&b", body)
    assert seen.headers["x-own"] == "2"
    assert seen.headers["host"] == engine.address
    assert "x-secret" not in seen.headers


async def test_an_answer_names_its_engine_and_request() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        engine.answer = engine.status(404, **{"X-Request-Id": "the engine's", "x-kept": "1", "Date": "never"})
        own = await rig.post(x_request_id="mine-1")
        made = await rig.post(x_request_id="with space")
        assert [each.headers["x-request-id"] for each in engine.seen] == ["mine-1", "made-here"]
    assert (own.status, own.body) == (404, b"a says 404")
    assert own.headers["x-kvcm-engine"] == engine.address
    assert own.headers["x-request-id"] == "mine-1"
    assert own.headers["x-kept"] == "1"
    assert made.headers["x-request-id"] == "made-here"


async def test_headers_that_are_not_ascii_stay_as_they_are() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += "x-own: ü€\r\n".encode() + b"x-odd: \xff\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.port)
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert engine.seen[0].headers["x-own"] == "ü€"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org/a.model:b@1"])
async def test_lists_of_models_are_passed_on(path: str) -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        assert (await rig.get(path)).engine == "a"
        assert (engine.seen[0].method, engine.seen[0].target) == ("GET", path)


async def test_other_calls_below_v1_are_passed_on_with_bodies_that_are_not_json() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        answered = await rig.post(b"\0\xff", "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
    assert answered.status == 200
    assert engine.seen[0].body == b"\0\xff"


async def test_a_stream_comes_through_byte_for_byte_as_it_comes() -> None:
    last = asyncio.Event()
    async with engines(1) as (engine,), gateway([engine]) as rig:
        engine.answer = engine.stream(EVENTS, wait=last)
        async with rig.client.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            early = await response.content.readexactly(len(b"".join(EVENTS[:-1])))
            assert rig.in_flight() == 1
            last.set()
            late = await response.content.read()
    assert early + late == b"".join(EVENTS)
    assert rig.in_flight() == 0


async def test_an_encoded_answer_stays_encoded() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:

        async def answer(_request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"not really gzip", headers={"content-encoding": "gzip"})

        engine.answer = answer
        async with rig.client.request(
            "POST", "/v1/completions", json={"prompt": "x"}, headers={"accept-encoding": "gzip"}
        ) as response:
            assert response.headers["content-encoding"] == "gzip"
            assert response.headers["content-length"] == "15"
        assert engine.seen[0].headers["accept-encoding"] == "gzip"


async def test_cookies_and_redirects_of_engines_are_for_the_client_alone() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        engine.answer = engine.status(302, **{"location": "http://169.254.169.254/", "set-cookie": "a=b"})
        answered = await rig.post()
        assert (answered.status, answered.headers["set-cookie"]) == (302, "a=b")
        engine.answer = engine.plain
        await rig.post()
        assert "cookie" not in {name.lower() for name in engine.seen[1].headers}


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_an_engine_that_says_it_cannot_is_replaced_by_another(status: int) -> None:
    async with engines(2) as (one, other), gateway([one, other]) as rig:
        one.answer = one.status(status)
        assert (await rig.post()).engine == "b"
        assert metric(rig, "kvcm_gateway_retries_total", reason=str(status)) == 1
        assert rig.in_flight() == 0
    assert one.seen[0].body == other.seen[0].body


async def test_an_engine_that_is_not_reached_is_replaced_by_another() -> None:
    async with engines(2) as (one, other), gateway([one, other]) as rig:
        await one.stop()
        assert (await rig.post()).engine == "b"
        assert metric(rig, "kvcm_gateway_retries_total", reason="connect") == 1


async def test_no_engine_is_asked_twice_and_the_last_answer_counts() -> None:
    async with engines(3) as found, gateway(found) as rig:
        for engine in found:
            engine.answer = engine.status(503, **{"retry-after": "7"})
        answered = await rig.post()
        assert (answered.status, answered.body, answered.headers["retry-after"]) == (503, b"c says 503", "7")
        assert [len(each.seen) for each in found] == [1, 1, 1]


async def test_no_more_engines_are_asked_than_allowed() -> None:
    async with engines(3) as found, gateway(found, max_attempts=2) as rig:
        for engine in found:
            engine.answer = engine.status(429)
        assert (await rig.post()).body == b"b says 429"
        assert sum(len(each.seen) for each in found) == 2


async def test_the_only_engine_that_is_not_reached_is_502() -> None:
    async with engines(1) as (engine,), gateway([engine]) as rig:
        await engine.stop()
        answered = await rig.post()
        assert (answered.status, answered.error["code"], answered.error["type"]) == (502, "connect", "server_error")
        assert rig.in_flight() == 0


@pytest.mark.parametrize("status", [400, 404, 422, 500, 504])
async def test_other_answers_are_not_tried_again(status: int) -> None:
    async with engines(2) as (one, other), gateway([one, other]) as rig:
        one.answer = one.status(status)
        assert (await rig.post()).status == status
        assert other.seen == []


async def test_a_connection_that_breaks_before_the_answer_is_not_tried_again() -> None:
    """The engine may have begun, and what it does need not be a completion."""
    async with engines(2) as (one, other), gateway([one, other]) as rig:
        one.answer = one.abort()
        answered = await rig.post()
        assert (answered.status, answered.error["code"]) == (502, "broken")
        assert other.seen == []


@pytest.mark.parametrize("length", [0, 1000])
async def test_an_answer_that_breaks_after_its_first_byte_ends_for_the_client_too(length: int) -> None:
    async with engines(2) as (one, other), gateway([one, other]) as rig:
        one.answer = one.stream(EVENTS[:2], breaks=True, length=length)
        async with rig.client.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
            got = await response.content.readexactly(len(b"".join(EVENTS[:2])))
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert got == b"".join(EVENTS[:2])
        assert other.seen == []
        await eventually(lambda: metric(rig, "kvcm_gateway_requests_total", **_labels(one, "broken")) == 1)
        assert rig.in_flight() == 0


def _labels(engine: FakeEngine | None, outcome: str, policy: str = "round_robin") -> dict[str, str]:
    return {"engine": engine.address if engine else "none", "policy": policy, "outcome": outcome}


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_ends_the_request_to_the_engine(has_begun: bool) -> None:
    never = asyncio.Event()
    async with engines(1) as (engine,), gateway([engine]) as rig:
        engine.answer = engine.stream(EVENTS, wait=never) if has_begun else engine.hang(never)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{rig.gateway.port}") as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await eventually(lambda: engine.seen)
            if has_begun:
                (await asking).close()
            else:
                asking.cancel()
        await eventually(lambda: engine.cancelled == 1)
        await eventually(lambda: metric(rig, "kvcm_gateway_requests_total", **_labels(engine, "client_gone")) == 1)
        assert rig.in_flight() == 0
        assert rig.state(engine) == "healthy"


async def test_an_engine_that_gives_no_first_byte_in_time_is_504() -> None:
    async with engines(2) as (one, other), gateway([one, other], first_byte_timeout_ms=50) as rig:
        one.answer = one.hang(asyncio.Event())
        answered = await rig.post()
        assert (answered.status, answered.error["code"]) == (504, "timeout")
        assert other.seen == []
        await eventually(lambda: one.cancelled == 1)


async def test_headers_without_a_first_byte_are_no_answer() -> None:
    async with engines(1) as (engine,), gateway([engine], first_byte_timeout_ms=50) as rig:
        engine.answer = engine.stream([b"", b"late"], wait=asyncio.Event())
        assert (await rig.post()).status == 504


async def test_an_answer_that_stops_is_ended() -> None:
    async with engines(1) as (engine,), gateway([engine], idle_timeout_ms=50) as rig:
        engine.answer = engine.stream(EVENTS, wait=asyncio.Event())
        with pytest.raises(aiohttp.ClientPayloadError):
            await rig.post()
        await eventually(lambda: metric(rig, "kvcm_gateway_requests_total", **_labels(engine, "timeout")) == 1)


async def test_a_request_waits_for_an_engine_and_gets_it_in_order() -> None:
    release = asyncio.Event()
    async with engines(1) as (engine,), gateway([engine], max_in_flight_per_engine=1) as rig:
        engine.answer = engine.hang(release)
        first = asyncio.create_task(rig.post(x_request_id="first"))
        await eventually(lambda: engine.seen)
        second = asyncio.create_task(rig.post(x_request_id="second"))
        await eventually(lambda: metric(rig, "kvcm_gateway_queued") == 1)
        third = asyncio.create_task(rig.post(x_request_id="third"))
        await eventually(lambda: metric(rig, "kvcm_gateway_queued") == 2)
        assert len(engine.seen) == 1
        release.set()
        assert [(await each).status for each in (first, second, third)] == [200, 200, 200]
        assert [each.headers["x-request-id"] for each in engine.seen] == ["first", "second", "third"]
        assert rig.in_flight() == 0


async def test_a_full_line_is_429_and_a_long_wait_503() -> None:
    never = asyncio.Event()
    async with engines(2) as found, gateway(found, max_in_flight=1, max_queued=1, queue_timeout_ms=300) as rig:
        for engine in found:
            engine.answer = engine.hang(never)
        first = asyncio.create_task(rig.post())
        await eventually(lambda: rig.in_flight() == 1)
        second = asyncio.create_task(rig.post())
        await eventually(lambda: metric(rig, "kvcm_gateway_queued") == 1 or second.done())
        third, waited = await rig.post(), await second
        # Where the machine is slow, the second one's wait is over before the third one comes.
        assert third.error["code"] in ("queue_full", "queue_timeout")
        assert third.status == (429 if third.error["code"] == "queue_full" else 503)
        assert (waited.status, waited.error["code"]) == (503, "queue_timeout")
        assert third.headers["retry-after"] == waited.headers["retry-after"] == "1"
        never.set()
        assert (await first).status == 200


async def test_a_client_that_leaves_the_line_lets_the_next_one_on() -> None:
    release = asyncio.Event()
    async with engines(1) as (engine,), gateway([engine], max_in_flight_per_engine=1) as rig:
        engine.answer = engine.hang(release)
        first = asyncio.create_task(rig.post())
        await eventually(lambda: engine.seen)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{rig.gateway.port}") as client:
            second = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await eventually(lambda: metric(rig, "kvcm_gateway_queued") == 1)
            second.cancel()
        await eventually(lambda: metric(rig, "kvcm_gateway_queued") == 0)
        third = asyncio.create_task(rig.post())
        release.set()
        assert [(await first).status, (await third).status] == [200, 200]
        assert len(engine.seen) == 2


async def test_bodies_in_memory_are_bounded() -> None:
    release = asyncio.Event()
    async with engines(1) as (engine,), gateway([engine], max_buffered_bytes=1500) as rig:
        engine.answer = engine.hang(release)
        body = json.dumps({"prompt": "x" * 1000}).encode()
        first = asyncio.create_task(rig.post(body, "/v1/completions"))
        await eventually(lambda: engine.seen)
        refused = await rig.post(body, "/v1/completions")
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "memory", "1")
        release.set()
        assert (await first).status == 200
        assert (await rig.post(body, "/v1/completions")).status == 200
