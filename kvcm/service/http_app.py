"""The calls on HTTP: POST /api/<call> with JSON bodies (wire.md 2.2), as a bare ASGI application.

What cannot be parsed is answered with 400 and `{}` as clients of the original expect; the header `x-kvcm-error` says
what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from kvcm.service.calls import Call, Caller
from kvcm.service.json_codec import MalformedBody, parse_request, print_response

__all__ = ["HttpApp"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]


class _BodyTooLargeError(Exception):
    pass


class HttpApp:
    """ASGI application for one plane.

    Args:
        calls: what it serves.
        caller: runs them.
        max_body_bytes: largest body.
    """

    def __init__(self, calls: Iterable[Call], caller: Caller, max_body_bytes: int) -> None:
        self._calls = {call.path: call for call in calls}
        self._caller = caller
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = self._calls.get(scope["path"]) if scope["method"] == "POST" else None
        if call is None:
            await _respond(send, 404, b"404 Not Found", [])
            return
        headers = dict(scope["headers"])
        if b"origin" in headers:
            # Only browsers send it. Nobody is authenticated: a page that somebody on this host looks at must not act
            # here.
            await _respond(send, 403, b"{}", _reason("requests from web pages are not served"))
            return
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
        reply = await self._caller.answer(call, request)
        await _respond(send, 200, print_response(reply.complete()), _JSON)

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


async def _respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
