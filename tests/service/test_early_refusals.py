"""Requests that are turned away by their heads: at once, without harm to the connection or to the count of the work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from authorities import Authority

from kvcm.config import Settings
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as residency
from kvcm.service.admission import (
    AdmissionSettings,
    BacklogEstimate,
    GuardedAdmission,
    Phase,
    RequestQueue,
    ServingGate,
)
from kvcm.service.calls import Arrival, Call, Caller, Plane, Reply
from kvcm.service.http_connections import WatchedConnection
from kvcm.service.http_server import HttpApp, HttpServer
from kvcm.service.request_limits import BodyReader, RequestLimits
from kvcm.service.rest.index_resource import IndexApp
from kvcm.service.tls import ServerTls
from kvcm.serving import TlsFiles

RESIDENCY = "kvcm.v1.ResidencyService"
PACE = 5e-5
OF_NONE = 10_000 * PACE
"""Seconds of work that a request without a body counts as."""
BODY = json.dumps({"instance_id": "i", "block_keys": ["1"]}).encode()
MOST_BYTES = 1 << 20
UNREAD_BYTES = 8 << 20


class TurnedAway:
    """A `CallObserver` that records rejected calls."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, str, str]] = []

    def begin(self, _call: Call, _request: Any, _arrival: Arrival) -> None:
        pass

    def end(self, *_: Any) -> None:
        pass

    def rejected(self, call: Call, arrival: Arrival, reason: str) -> None:
        self.reasons.append((call.name, arrival.peer, reason))


class Site:
    """An HTTP listener whose calls wait until they are let go; while one does, it rejects all others."""

    tls: ClassVar[ServerTls | None] = None
    secure: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.ahead = BacklogEstimate(lambda: 0.0, lambda: 0.0)
        self.ahead.seconds_per_byte = PACE
        self.observer, self.gate, self.let_go, self.begun = TurnedAway(), ServingGate(), asyncio.Event(), 0
        admission = GuardedAdmission(AdmissionSettings(most_wait_seconds=OF_NONE / 2), ahead=self.ahead)
        caller = Caller(self.observer, lambda _plane: None, lambda _instance: {}, admission=admission)
        calls = [
            self._call("GetCacheLocation", meta.GetCacheLocationRequest, Plane.DATA),
            self._call("CheckHealth", admin.CheckHealthRequest, Plane.ADMIN),
        ]
        self.app = HttpApp(self.gate, MOST_BYTES)
        limits = RequestLimits(1000, 1000, MOST_BYTES)
        bodies = BodyReader(limits, RequestQueue(time.monotonic, 1, 64, 0.0))
        names = ("MatchModel", "RegisterPublisher", "UnregisterPublisher", "DescribeIndex")
        of_index = [
            replace(self._call(name, getattr(residency, f"{name}Request"), Plane.DATA), service=RESIDENCY)
            for name in names
        ]
        self.app.serve(calls, caller, bodies=bodies, index=IndexApp(of_index, caller, bodies, limits))
        self.server = HttpServer("127.0.0.1", 0, tls=Site.tls)

    def _call(self, name: str, request_type: type[Any], plane: Plane) -> Call:
        return Call("s", name, plane, request_type, meta.CommonResponse, self._answer, is_traced=False)

    async def _answer(self, _request: Any) -> Reply:
        self.begun += 1
        await self.let_go.wait()
        return Reply(meta.CommonResponse())

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, **Site.secure)
        async with asyncio.timeout(60):
            yield reader, writer
        writer.close()
        with contextlib.suppress(ssl.SSLError):  # answers that were not read
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """One request is in hand inside the block, and answered behind it."""
        async with self.connected() as (reader, writer):
            writer.write(post(BODY))
            await until(lambda: self.begun == 1)
            yield
            self.let_go.set()
            assert (await answer(reader))[0] == 200


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.ci)], autouse=True)
def transport(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test on a port in plain text, and on one that speaks TLS."""
    if request.param == "tls":
        authority = Authority.make(tmp_path)
        pair = authority.server()
        files = TlsFiles(Settings(tls_cert_file=str(pair.cert), tls_key_file=str(pair.key)))
        context = ssl.create_default_context(cafile=str(authority.file))
        monkeypatch.setattr(Site, "tls", files.tls)
        monkeypatch.setattr(Site, "secure", {"ssl": context, "server_hostname": "localhost"})


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()
    await site.server.start(site.app)
    await site.gate.enter_phase(Phase.SERVING)
    try:
        yield site
    finally:
        site.let_go.set()
        await site.server.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.001)


def post(body: bytes, path: str = "getCacheLocation", *headers: str) -> bytes:
    lines = [f"POST /api/{path} HTTP/1.1", "host: x", *headers]
    if not any(line.startswith("transfer-encoding") for line in headers):
        lines.append(f"content-length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def test_while_much_is_ahead_a_request_is_turned_away_by_its_head_and_its_connection_stays() -> None:
    async with serving() as site, site.connected() as (reader, writer):
        async with site.busy():
            writer.write(post(BODY)[:-5])  # the rest of the body comes behind the answer
            status, headers, body = await answer(reader)
            assert (status, body, headers["retry-after"]) == (503, b"{}", "1")
            assert "overloaded" in headers["x-kvcm-error"]
            assert site.observer.reasons == [("GetCacheLocation", "127.0.0.1", "overload")]
            writer.write(BODY[-5:] + post(BODY) + post(BODY))
            assert [(await answer(reader))[0] for _ in range(2)] == [503, 503]
        writer.write(post(BODY))
        assert (await answer(reader))[0] == 200
        assert site.begun == 2
        assert site.ahead.seconds == 0


@pytest.mark.parametrize("path", ["query", "query_by_hash", "register", "unregister"])
async def test_a_request_of_the_index_api_is_turned_away_before_its_body_comes(path: str) -> None:
    async with serving() as site, site.connected() as (reader, writer):
        async with site.busy():
            head = post(BODY, "").replace(b"/api/", f"/{path}".encode())[: -len(BODY)]
            writer.write(head)
            status, headers, body = await answer(reader)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "overloaded" in json.loads(body)["error"]
            assert [(name, why) for name, _, why in site.observer.reasons] == [(NAMES[path], "overload")]
        await until(lambda: site.ahead.seconds == 0)


async def test_requests_of_the_index_api_count_until_they_are_answered() -> None:
    async with serving() as site, site.connected() as (reader, writer):
        head = post(BODY, "").replace(b"/api/", b"/query")[: -len(BODY)]
        writer.write(head)
        await until(lambda: site.ahead.seconds > 0)
        writer.write(BODY)
        assert (await answer(reader))[0] == 400
        await until(lambda: site.ahead.seconds == 0)


NAMES = {
    "query": "MatchModel",
    "query_by_hash": "MatchModel",
    "register": "RegisterPublisher",
    "unregister": "UnregisterPublisher",
}


async def test_operators_are_never_turned_away_nor_counted() -> None:
    async with serving() as site, site.connected() as (reader, writer), site.busy():
        before = site.ahead.seconds
        writer.write(post(b"{}", "checkHealth"))
        await until(lambda: site.begun == 2)
        assert site.ahead.seconds == before
        site.let_go.set()
        assert (await answer(reader))[0] == 200


async def test_an_unread_body_in_chunks_does_not_harm_the_next_request() -> None:
    async with serving() as site, site.connected() as (reader, writer):
        async with site.busy():
            writer.write(post(b"", "getCacheLocation", "transfer-encoding: chunked") + b"3\r\nabc\r\n")
            assert (await answer(reader))[0] == 503
            writer.write(b"5\r\nPOST \r\n0\r\n\r\n")
            writer.write(post(BODY))
            assert (await answer(reader))[0] == 503
        writer.write(post(BODY))
        assert (await answer(reader))[0] == 200


async def test_a_request_that_cannot_be_refused_at_once_is_served() -> None:
    """Behind another request on its connection, or before it sends its body, or if the connection is to be closed."""
    async with serving() as site, site.busy():
        for header in ("connection: close", "expect: 100-continue"):
            async with site.connected() as (_, writer):
                before = site.begun
                writer.write(post(BODY, "getCacheLocation", header))
                await until(lambda before=before: site.begun == before + 1)
        assert site.observer.reasons == []


async def test_a_client_that_does_not_read_refusals_gets_no_more_of_them() -> None:
    async with serving() as site, site.busy():
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", site.server.port))
            reader, writer = await asyncio.open_connection(sock=connection, limit=1024, **Site.secure)
            for _ in range(2000):  # ten times the capacity of the buffers of the system
                writer.write(post(BODY) * 500)
                await asyncio.sleep(0)
                if writer.transport.get_write_buffer_size() > UNREAD_BYTES:
                    break
            assert writer.transport.get_write_buffer_size() > UNREAD_BYTES  # the server reads no more
            assert not reader.at_eof()  # it was not cut off either
            writer.transport.abort()


async def test_every_way_in_which_a_request_can_end_ends_its_count() -> None:
    async with serving() as site:
        site.let_go.set()
        for request in (post(BODY), post(b"no json"), post(b" " * (MOST_BYTES + 1))):
            async with site.connected() as (reader, writer):
                writer.write(request)
                await answer(reader)
            await until(lambda: site.ahead.seconds == 0)
        async with site.connected() as (_, writer):
            writer.write(post(BODY)[:-1])
            await until(lambda: site.ahead.seconds > 0)
            writer.close()  # before it said all
        await until(lambda: site.ahead.seconds == 0)


async def test_a_connection_that_is_just_being_lost_can_be_looked_at() -> None:
    """TLS forgets its socket a turn of the loop before the protocol learns that the connection is lost."""
    async with serving() as site, site.connected() as (reader, writer):
        writer.write(post(BODY)[:-1])
        await until(lambda: site.ahead.seconds > 0)
        assert site.server._server is not None
        (connection,) = site.server._server.server_state.connections
        assert isinstance(connection, WatchedConnection)
        connection.transport.abort()
        while connection in site.server._server.server_state.connections:
            connection.check(0.0)
            await asyncio.sleep(0)
        assert await reader.read() == b""


def test_long_requests_count_no_more_than_others_wait_for_them() -> None:
    ahead = BacklogEstimate(lambda: 0.0, lambda: 0.0)
    ahead.add(1 << 16)
    of_long = ahead.seconds
    ahead.add(1 << 24)
    assert ahead.seconds == 2 * of_long
    ahead.remove(1 << 24)
    ahead.remove(1 << 16)
    assert ahead.seconds == 0


def test_the_pace_is_learnt_while_the_loop_is_busy_and_a_step_at_a_time() -> None:
    wall, busy = [0.0], [0.0]
    ahead = BacklogEstimate(lambda: wall[0], lambda: busy[0])
    known = ahead.seconds_per_byte

    def work(requests: int, wall_seconds: float, busy_seconds: float) -> float:
        for _ in range(requests):
            ahead.add(10_000)
            ahead.remove(10_000)  # 20,000 bytes count
        wall[0] += wall_seconds
        busy[0] += busy_seconds
        ahead.add(10_000)
        ahead.remove(10_000)
        return ahead.seconds_per_byte

    assert work(99, 10.0, 1.0) == known  # hardly these requests
    assert work(98, 1.0, 1.0) == known  # not enough yet
    assert work(0, 0.0, 0.0) == 2 * known  # 5e-7 measured
    for _ in range(5):
        work(99, 1.0, 0.8)
    assert ahead.seconds_per_byte == pytest.approx(0.8 / 2_000_000)
