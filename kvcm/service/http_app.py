"""The calls on HTTP: POST /api/<call> with JSON bodies (wire.md 2.2), as a bare ASGI application; and streams of lines.

What cannot be parsed is answered with 400 and `{}` as clients of the original expect; the header `x-kvcm-error` says
what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final

from kvcm.model.principals import EVERYBODY, Principal
from kvcm.service.asgi import Headers, Receive, Send
from kvcm.service.bodies import BodyReader, most_body_bytes
from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.gate import Gate, Phase
from kvcm.service.http_connection import BODY_BYTES, CAME
from kvcm.service.http_credentials import credentials_of
from kvcm.service.http_pages import PageRequest, PageRoute
from kvcm.service.json_codec import MalformedBody
from kvcm.service.json_locations import LocationTexts, print_reply
from kvcm.service.line_streams import LineStream, send_lines
from kvcm.service.rest.problem import MEDIA_TYPE, Problem, problem_of_refusal
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["ARRIVAL", "HttpApp", "Resources"]

Resources = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
"""Answers requests below /v1, as an ASGI application."""

ARRIVAL: Final = "kvcm.arrival"
"""Key of the scope of a request for a resource: how it came."""

_RESOURCES: Final = b"/v1/"
_CONSOLE: Final = b"/console/"
_MOST_RESOURCE_BYTES: Final = 1 << 21  # is read on the event loop
_JSON: Headers = [(b"content-type", b"application/json")]
_CLOSE = (b"connection", b"close")
_NO_PAGES: Final = "requests from web pages are not served"
_NO_ENCODINGS: Final = "a body with a content-encoding is not understood"


class _BodyTooLargeError(Exception):
    pass


class _ClientGoneError(Exception):
    pass


class HttpApp:
    """ASGI application for one port: answers pages at once, and calls when it is told of them.

    Args:
        gate: whether calls are served.
        max_body_bytes: largest body.
        pages: what GET of a path answers, whether calls are served or not.
        visitor: who asks for pages before calls are served.
    """

    def __init__(
        self,
        gate: Gate,
        max_body_bytes: int,
        pages: Mapping[str, PageRoute] | None = None,
        visitor: Principal = EVERYBODY,
    ) -> None:
        self._gate = gate
        self._visitor = visitor
        self._max_body_bytes = max_body_bytes
        self._texts = LocationTexts()
        self._pages = dict(pages or {})
        self._streams: dict[str, Callable[[], LineStream]] = {}
        self._calls: dict[str, Call] = {}
        self._caller: Caller | None = None
        self._bodies: BodyReader | None = None
        self._resources: Resources | None = None
        self._console: Resources | None = None

    def serve(
        self,
        calls: Iterable[Call],
        caller: Caller,
        streams: Mapping[str, Callable[[], LineStream]] | None = None,
        pages: Mapping[str, PageRoute] | None = None,
        *,
        bodies: BodyReader,
        resources: Resources | None = None,
        console: Resources | None = None,
    ) -> None:
        """Answer calls from now on, as far as the gate is open.

        Args:
            calls: what to serve.
            caller: runs them.
            streams: what GET of a path begins to listen to.
            pages: further pages.
            bodies: reads requests.
            resources: answers what is below /v1.
            console: answers browsers, at / and below /console.
        """
        self._resources, self._console = resources, console
        self._calls.update((call.path, call) for call in calls)
        self._caller, self._bodies = caller, bodies
        self._streams.update(streams or {})
        self._pages.update(pages or {})

    def knock(self, scope: MutableMapping[str, Any]) -> bytes | None:
        """Return the whole answer to a request that is not let in, by its head; None where it is."""
        call = self._calls.get(scope["path"]) if scope["method"] == "POST" else None
        if call is None or self._caller is None or self._gate.phase is not Phase.SERVING:
            return None
        length = dict(scope["headers"]).get(b"content-length", b"")
        body_bytes = int(length) if length.isdigit() else 0
        error = self._caller.knock(call, self._arrival(scope), body_bytes)
        if error is None:
            scope[BODY_BYTES] = body_bytes
            return None
        return _whole(error.http_status, [*_turned_away(error), _length(b"{}")], b"{}")

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._gate.is_leaving:
            send = _closing(send, self._gate)
        path = scope.get("raw_path", b"")
        is_page = path.startswith(_CONSOLE) or (path == b"/" and scope["method"] == "GET")
        if path.startswith(_RESOURCES):
            await self._resource(scope, receive, send)
        elif self._console is not None and is_page:
            await self._page(self._console, scope, receive, send)
        elif scope["method"] == "POST":
            try:
                await self._post(scope, receive, send)
            finally:
                self._gone(scope)
        elif scope["method"] == "GET":
            await self._get(scope, receive, send)
        else:
            await _not_found(send)

    def _gone(self, scope: MutableMapping[str, Any]) -> None:
        body_bytes, call = scope.get(BODY_BYTES), self._calls.get(scope["path"])
        if body_bytes is not None and call is not None and self._caller is not None:
            self._caller.gone(call, body_bytes)

    async def _post(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        call, headers = self._calls.get(scope["path"]), dict(scope["headers"])
        arrival = self._arrival(scope)
        if self._caller is not None and self._caller.wants_trace_parents:
            arrival = arrival._replace(trace_parent=headers.get(b"traceparent", b"").decode("latin-1"))
        if b"origin" in headers:
            await _refuse_page(send)
        elif (refusal := self._refusal(call, arrival)) is not None:
            await _respond(send, refusal.http_status, b"{}", _turned_away(refusal))
        elif call is None:
            await _not_found(send)
        elif headers.get(b"content-encoding", b"identity").lower() != b"identity":
            await _respond(send, 415, b"{}", _reason(_NO_ENCODINGS))
        else:
            self._gate.enter()
            try:
                await self._recognised(call, headers, arrival, scope, receive, send)
            finally:
                self._gate.leave()

    def _arrival(self, scope: MutableMapping[str, Any]) -> Arrival:
        return Arrival("http", scope["client"][0] if scope["client"] else "", came=scope.get(CAME))

    def _refusal(self, call: Call | None, arrival: Arrival) -> TurnedAwayError | None:
        """Return why a request is not to be read; the observers are told."""
        refusal = self._gate.refusal()
        if call is None or self._caller is None:
            return refusal
        if refusal is None:
            return self._caller.refusal(call, arrival)
        self._caller.tell_turned_away(call, arrival, refusal)
        return refusal

    async def _resource(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        problem = self._problem(scope["method"], dict(scope["headers"]))
        if problem is not None:
            await _respond_problem(send, problem)
            return
        if self._resources is None:
            await _not_found(send)
            return
        self._gate.enter()
        try:
            principal = self._principal(scope)
            arrival = self._arrival(scope)._replace(principal=principal)
            most = most_body_bytes(principal, min(_MOST_RESOURCE_BYTES, self._max_body_bytes))
            body = await self._read(dict(scope["headers"]), receive, most)
            leaving = _closing(send, self._gate)
            await self._resources({**scope, ARRIVAL: arrival}, _already_read(body, receive), leaving)
        except _BodyTooLargeError as error:
            await _respond_problem(send, Problem(413, str(error)))
        except TurnedAwayError as error:
            await _respond_problem(send, problem_of_refusal(error))
        except _ClientGoneError:
            pass
        finally:
            self._gate.leave()

    async def _page(self, console: Resources, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a browser: the console knows which of them may come in, and who they are."""
        if (refusal := self._gate.refusal()) is not None:
            await _respond(send, refusal.http_status, str(refusal).encode(), _turned_away(refusal))
            return
        self._gate.enter()
        try:
            body = await self._read(dict(scope["headers"]), receive, min(_MOST_RESOURCE_BYTES, self._max_body_bytes))
            leaving = _closing(send, self._gate)
            await console({**scope, ARRIVAL: self._arrival(scope)}, _already_read(body, receive), leaving)
        except _BodyTooLargeError as error:
            await _respond(send, 413, str(error).encode(), _reason(str(error)))
        except _ClientGoneError:
            pass
        finally:
            self._gate.leave()

    def _problem(self, method: str, headers: Mapping[bytes, bytes]) -> Problem | None:
        """Return why a request for a resource is not let in, None where it is."""
        if b"origin" in headers or (method in {"GET", "HEAD"} and b"accept-language" in headers):
            return Problem(403, _NO_PAGES)
        if (refusal := self._gate.refusal()) is not None:
            return problem_of_refusal(refusal)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return Problem(415, _NO_ENCODINGS)
        return None

    async def _get(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        page, stream = self._pages.get(scope["path"]), self._streams.get(scope["path"])
        headers = dict(scope["headers"])
        if page is None and stream is None:
            await _not_found(send)
        elif b"origin" in headers or b"accept-language" in headers:
            await _refuse_page(send)
        else:
            try:
                principal = self._principal(scope)
            except TurnedAwayError as error:
                await _respond(send, error.http_status, b"{}", _turned_away(error))
                return
            if page is not None:
                answer = await page(PageRequest(scope["query_string"], headers, principal))
                await _respond(send, answer.status, answer.body, list(answer.headers))
            elif stream is not None:
                assert self._caller is not None
                await send_lines(stream(), partial(self._caller.access.holds, principal), receive, send)

    def _principal(self, scope: MutableMapping[str, Any]) -> Principal:
        if self._caller is None:
            return self._visitor
        return self._caller.visitor(scope["path"], credentials_of(scope))

    async def _recognised(
        self,
        call: Call,
        headers: dict[bytes, bytes],
        arrival: Arrival,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        assert self._caller is not None
        if self._caller.access.asks:
            try:
                arrival = self._caller.recognised(call, arrival, credentials_of(scope))
            except TurnedAwayError as error:
                await _respond(send, error.http_status, b"{}", _turned_away(error))
                return
        await self._answer(call, headers, arrival, receive, send)

    async def _answer(
        self, call: Call, headers: dict[bytes, bytes], arrival: Arrival, receive: Receive, send: Send
    ) -> None:
        try:
            body = await self._read(headers, receive, most_body_bytes(arrival.principal, self._max_body_bytes))
        except _BodyTooLargeError as error:
            await _respond(send, 413, b"{}", _reason(str(error)))
            return
        except _ClientGoneError:
            return
        assert self._caller is not None
        assert self._bodies is not None
        try:
            request = await self._bodies.json(call, body)
        except MalformedBody as error:
            await _respond(send, 400, b"{}", _reason(str(error)))
            return
        except TurnedAwayError as error:
            self._caller.tell_turned_away(call, arrival, error)
            await _respond(send, error.http_status, b"{}", _turned_away(error))
            return
        try:
            reply = await self._caller.answer(call, request, arrival)
        except TurnedAwayError as error:
            await _respond(send, error.http_status, b"{}", _turned_away(error))
            return
        body = await print_reply(reply, self._texts)
        await _respond(_closing(send, self._gate) if self._gate.is_leaving else send, 200, body, _JSON)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
        if int(headers.get(b"content-length", b"0")) > most:
            raise _BodyTooLargeError(f"the body is larger than {most} bytes")
        parts: list[bytes] = []
        size = 0
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise _ClientGoneError  # what came of the body may look like a whole one
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _BodyTooLargeError(f"the body is larger than {most} bytes")
            if not event.get("more_body"):
                return b"".join(parts)


def _reason(text: str) -> Headers:
    return [(b"x-kvcm-error", _header_text(text))]


@lru_cache(256)  # of those who are turned away there are many, and few reasons
def _header_text(text: str) -> bytes:
    """Header values are latin-1 without control characters; what the client sent may be quoted in the text."""
    printable = "".join(character if character.isprintable() else "?" for character in text)[:500]
    return printable.encode("latin-1", "replace")


def _turned_away(error: TurnedAwayError) -> Headers:
    return [*_reason(str(error)), *((name.encode(), value.encode()) for name, value in error.headers)]


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


def _whole(status: int, headers: Headers, body: bytes) -> bytes:
    """Return an answer as it is sent, for where there is no time for more."""
    lines = b"".join([b"%s: %s\r\n" % header for header in headers])
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, HTTPStatus(status).phrase.encode(), lines, body)


async def _not_found(send: Send) -> None:
    await _respond(send, 404, b"404 Not Found", [])


async def _refuse_page(send: Send) -> None:
    """Refuse a browser: only those send an origin, with everything but a GET of what they take for the page's own site,
    and only those send languages. Nobody is authenticated: a page that somebody on this host looks at must neither act
    nor listen here."""
    await _respond(send, 403, b"{}", _reason(_NO_PAGES))


def _closing(send: Send, gate: Gate) -> Send:
    """Have the connection closed behind the answer, perhaps because the end has begun since the request came: the
    client's next request finds another manager."""

    async def closing(event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start" and gate.is_leaving:
            event["headers"] = [*(each for each in event["headers"] if each != _CLOSE), _CLOSE]
        await send(event)

    return closing


async def _respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, _length(body)]})
    await send({"type": "http.response.body", "body": body})


async def _respond_problem(send: Send, problem: Problem) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in problem.headers]
    await _respond(send, problem.status, problem.body(), [(b"content-type", MEDIA_TYPE.encode()), *headers])


def _already_read(body: bytes, receive: Receive) -> Receive:
    """Receive a body that was read, and what comes behind it."""
    waiting = [body]

    async def receive_again() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False} if waiting else await receive()

    return receive_again
