"""The calls on HTTP: POST /api/<call> with JSON bodies (wire.md 2.2), as a bare ASGI application; and streams of lines.

What cannot be parsed is answered with 400 and `{}` as clients of the original expect; the header `x-kvcm-error` says
what is wrong with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.http_pages import PageRequest, PageRoute
from kvcm.service.json_codec import MalformedBody, parse_request
from kvcm.service.json_locations import LocationTexts, print_reply
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["HttpApp"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]
_LINES: Headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class LineStream(Protocol):
    """Lines as they come, to be closed by whoever reads them."""

    def __aiter__(self) -> LineStream: ...

    async def __anext__(self) -> bytes: ...

    def close(self) -> None:
        """Want no more."""


class _BodyTooLargeError(Exception):
    pass


class HttpApp:
    """ASGI application for one plane.

    Args:
        calls: what it serves.
        caller: runs them.
        max_body_bytes: largest body.
        streams: what GET of a path begins to listen to.
        pages: what GET of a path answers.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        caller: Caller,
        max_body_bytes: int,
        streams: Mapping[str, Callable[[], LineStream]] | None = None,
        pages: Mapping[str, PageRoute] | None = None,
    ) -> None:
        self._streams = streams if streams is not None else {}
        self._pages = pages if pages is not None else {}
        self._calls = {call.path: call for call in calls}
        self._caller = caller
        self._max_body_bytes = max_body_bytes
        self._texts = LocationTexts()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        call = self._calls.get(path) if method == "POST" else None
        stream = self._streams.get(path) if method == "GET" else None
        page = self._pages.get(path) if method == "GET" else None
        if call is None and stream is None and page is None:
            await _respond(send, 404, b"404 Not Found", [])
            return
        headers = dict(scope["headers"])
        if b"origin" in headers or (call is None and b"accept-language" in headers):
            # Only browsers send these, the first with everything but a GET of what they take for the page's own site.
            # Nobody is authenticated: a page that somebody on this host looks at must neither act nor listen here.
            await _respond(send, 403, b"{}", _reason("requests from web pages are not served"))
            return
        if stream is not None:
            await _stream(stream(), receive, send)
        elif page is not None:
            answer = await page(PageRequest(scope["query_string"], headers))
            await _respond(send, answer.status, answer.body, list(answer.headers))
        elif call is not None:
            peer = scope["client"]
            await self._answer(call, headers, Arrival("http", peer[0] if peer else ""), receive, send)

    async def _answer(
        self, call: Call, headers: dict[bytes, bytes], arrival: Arrival, receive: Receive, send: Send
    ) -> None:
        try:
            body = await self._read(headers, receive)
        except _BodyTooLargeError:
            await _respond(send, 413, b"{}", _reason(f"the body is larger than {self._max_body_bytes} bytes"))
            return
        try:
            request = parse_request(body, call.request_type)
        except MalformedBody as error:
            await _respond(send, 400, b"{}", _reason(str(error)))
            return
        try:
            reply = await self._caller.answer(call, request, arrival)
        except TurnedAwayError as error:
            await _respond(send, error.http_status, b"{}", _turned_away(error))
            return
        await _respond(send, 200, await print_reply(reply, self._texts), _JSON)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        if int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            raise _BodyTooLargeError
        parts: list[bytes] = []
        size = 0
        while True:
            event = await receive()
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise _BodyTooLargeError
            if not event.get("more_body"):
                return b"".join(parts)


def _reason(text: str) -> Headers:
    # Header values are latin-1 without control characters; what the client sent may be quoted in the text.
    printable = "".join(character if character.isprintable() else "?" for character in text)[:500]
    return [(b"x-kvcm-error", printable.encode("latin-1", "replace"))]


def _turned_away(error: TurnedAwayError) -> Headers:
    return [*_reason(str(error)), (b"retry-after", str(max(1, round(error.retry_after_seconds))).encode())]


async def _respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _stream(lines: LineStream, receive: Receive, send: Send) -> None:
    """Send lines until they end or the client goes away."""
    gone = asyncio.create_task(_disconnected(receive))
    gone.add_done_callback(lambda _task: lines.close())
    try:
        await send({"type": "http.response.start", "status": 200, "headers": _LINES})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async for line in lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        lines.close()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
