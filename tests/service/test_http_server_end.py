"""Connections that have just come when the HTTP server ends are answered: nobody can know whether to repeat a request
whose connection closes without a word."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvcm.service import http_server
from kvcm.service.gate import Gate
from kvcm.service.http_app import HttpApp
from kvcm.service.http_pages import Page, PageRequest
from kvcm.service.http_server import HttpServer

REQUEST = b"GET /page HTTP/1.1\r\nhost: x\r\n\r\n"


async def _page(_request: PageRequest) -> Page:
    return Page(200, b"here")


async def _started() -> HttpServer:
    server = HttpServer("127.0.0.1", 0)
    await server.start(HttpApp(Gate(), 1000, {"/page": _page}))
    return server


async def _answer(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    async with asyncio.timeout(30):
        return await asyncio.get_running_loop().sock_recv(connection, 1000)


async def test_what_the_system_has_accepted_already_is_answered() -> None:
    server = await _started()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as waiting:
        waiting.sendall(REQUEST)
        server.stop_accepting()  # the loop has had no turn to accept it
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=30)
        assert (await _answer(waiting)).startswith(b"HTTP/1.1 200")
    await server.stop()


async def test_a_connection_whose_request_is_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAR_LOOKS", 6000)
    server = await _started()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as late:
        stop = asyncio.create_task(server.stop())
        await asyncio.wait([stop], timeout=0.3)  # without the wait it ends within that
        assert not stop.done()
        late.sendall(REQUEST)
        assert (await _answer(late)).startswith(b"HTTP/1.1 200")
        await stop


async def test_who_never_sends_a_request_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAR_LOOKS", 2)
    server = await _started()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
        await server.stop()
        assert await _answer(silent) == b""
