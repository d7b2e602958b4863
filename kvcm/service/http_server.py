"""The HTTP ports: calls as JSON, pages, streams of lines, resources and the console, by uvicorn.

uvicorn runs beside gRPC in one event loop: it must not touch signals (design.md decision 21).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

import uvicorn

from kvcm.model.errors import StorageIOError
from kvcm.model.principals import UNRESTRICTED, Principal
from kvcm.model.tasks import end_tasks
from kvcm.service.access import INDEX_PATHS, credentials_of
from kvcm.service.admission import Phase, ServingGate
from kvcm.service.calls import Arrival, Call, Caller
from kvcm.service.http_connections import (
    BODY_BYTES,
    RECEIVED_AT,
    ConnectionLimits,
    ConnectionWatch,
    TlsListener,
    WatchedConnection,
)
from kvcm.service.json_codec import LocationTexts, MalformedBody, print_reply
from kvcm.service.rejections import MEDIA_TYPE, Problem, RejectedError, problem_of_refusal
from kvcm.service.request_limits import BodyReader, max_body_bytes
from kvcm.service.tls import ServerTls

__all__ = [
    "ARRIVAL",
    "Headers",
    "HttpApp",
    "HttpApplication",
    "HttpServer",
    "IndexResources",
    "LazyResources",
    "LineStream",
    "Page",
    "PageRequest",
    "PageRoute",
    "Receive",
    "Resources",
    "Send",
]

# Types of ASGI, the interface between HTTP servers and applications.

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
"""Lower-case names and values."""

# Pages, answers to GET of a path: probes, metrics and the like. Small, made on the spot, and not one of the calls.


class PageRequest(NamedTuple):
    """A GET.

    Attributes:
        query: the text behind the question mark, as it came.
        headers: by lower-case name, as they came.
        principal: of the client.
    """

    query: bytes
    headers: Mapping[bytes, bytes]
    principal: Principal = UNRESTRICTED


class Page(NamedTuple):
    """The answer.

    Attributes:
        status: of HTTP.
        body: its bytes; content-length follows from them.
        headers: lower-case names and values.
    """

    status: int
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"text/plain; charset=utf-8"),)


PageRoute = Callable[[PageRequest], Awaitable[Page]]
"""Answers GET of one path. It is asked on the event loop, so it does little or awaits."""

# Lines as they come, as the body of an HTTP answer that goes on until one side ends it.

_HEADERS: Final[Headers] = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
_RECHECK_SECONDS: Final = 1.0  # while no line comes


class LineStream(Protocol):
    """Lines as they come; the reader closes it."""

    def __aiter__(self) -> LineStream: ...

    async def __anext__(self) -> bytes: ...

    def close(self) -> None:
        """Want no more lines."""


async def _send_lines(lines: LineStream, may_listen: Callable[[], bool], receive: Receive, send: Send) -> None:
    """Send lines until they end, the client goes away, or it may not listen any more: then its body ends as when there
    are no more lines, and the next request gets the reason.

    Args:
        lines: to send; closed at the end.
        may_listen: called before every line, and now and then while none comes.
        receive: of ASGI.
        send: of ASGI.
    """
    ends = [asyncio.create_task(_disconnected(receive)), asyncio.create_task(_revoked(may_listen))]
    for end in ends:
        end.add_done_callback(lambda _task: lines.close())
    try:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async for line in lines:
            if not may_listen():
                break
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        lines.close()
        for end in ends:
            end.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _revoked(may_listen: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(_RECHECK_SECONDS)
        if not may_listen():
            return


# The calls on HTTP: POST /api/<call> with JSON bodies (wire.md 2.2), as a bare ASGI application; and streams of lines.
#
# A body that cannot be parsed is answered with 400 and `{}` as clients of the original expect; the header
# `x-kvcm-error` has the error.

Resources = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
"""Answers requests below /v1, as an ASGI application."""


class IndexResources(Protocol):
    """The index API, as an ASGI application that writes its refusals itself. Its requests are admitted as its calls."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None: ...

    async def refuse(self, scope: MutableMapping[str, Any], send: Send, problem: Problem) -> None:
        """Refuse a request that is not read."""

    def call_of(self, path: str) -> Call:
        """Return the call that requests of a path become."""


ARRIVAL: Final = "kvcm.arrival"
"""Key of the scope of a request for a resource: how it came."""
Refuse = Callable[[MutableMapping[str, Any], Send, Problem], Awaitable[None]]
"""Writes a refusal."""
_RESOURCES: Final = b"/v1/"
_CONSOLE: Final = b"/console/"
_MAX_RESOURCE_BYTES: Final = 1 << 21  # is read on the event loop
_MAX_INDEX_BYTES: Final = 1 << 23  # as of Dynamo's index: a million tokens, which a thread reads
_INDEX: Final = frozenset(path.encode() for path in INDEX_PATHS)
_JSON: Headers = [(b"content-type", b"application/json")]
_CLOSE = (b"connection", b"close")
_NO_PAGES: Final = "requests from web pages are not served"
_NO_ENCODINGS: Final = "a body with a content-encoding is not understood"


class _BodyTooLargeError(Exception):
    pass


class _ClientGoneError(Exception):
    pass


class HttpApp:
    """ASGI application for one port: answers pages at once, and calls after `serve`.

    Args:
        gate: whether calls are served.
        max_body_bytes: largest body.
        pages: what GET of a path answers, whether calls are served or not.
        visitor: principal of pages before calls are served.
    """

    def __init__(
        self,
        gate: ServingGate,
        max_body_bytes: int,
        pages: Mapping[str, PageRoute] | None = None,
        visitor: Principal = UNRESTRICTED,
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
        self._index: IndexResources | None = None

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
        index: IndexResources | None = None,
    ) -> None:
        """Answer calls from now on, while the gate is open.

        Args:
            calls: what to serve.
            caller: runs them.
            streams: what GET of a path begins to listen to.
            pages: further pages.
            bodies: reads requests.
            resources: answers paths below /v1.
            console: answers browsers, at / and below /console.
            index: answers the paths of the index API.
        """
        self._resources, self._console, self._index = resources, console, index
        self._calls.update((call.path, call) for call in calls)
        self._caller, self._bodies = caller, bodies
        self._streams.update(streams or {})
        self._pages.update(pages or {})

    def check_head(self, scope: MutableMapping[str, Any]) -> bytes | None:
        """Return the whole answer to a request that is rejected by its head; None if it is admitted."""
        call = self._calls.get(scope["path"]) if scope["method"] == "POST" else None
        if call is None or self._caller is None or self._gate.phase is not Phase.SERVING:
            return None
        error = self._head_rejection(self._caller, call, scope)
        if error is None:
            return None
        return _complete_response(error.http_status, [*_rejection_response(error), _length(b"{}")], b"{}")

    def _head_rejection(self, caller: Caller, call: Call, scope: MutableMapping[str, Any]) -> RejectedError | None:
        """Return why a request is rejected by its head, and record that; note the bytes of one that is admitted."""
        length = dict(scope["headers"]).get(b"content-length", b"")
        body_bytes = int(length) if length.isdigit() else 0
        error = caller.admission.check_head(call, body_bytes)
        if error is None:
            scope[BODY_BYTES] = body_bytes
        else:
            caller.report_rejection(call, self._arrival(scope), error)
        return error

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._gate.is_draining:
            send = _closing(send, self._gate)
        path = scope.get("raw_path", b"")
        is_page = path.startswith(_CONSOLE) or (path == b"/" and scope["method"] == "GET")
        if path.startswith(_RESOURCES):
            await self._resource(self._resources, _refuse_resource, scope, receive, send)
        elif self._index is not None and path in _INDEX:
            await self._resource(self._index, self._index.refuse, scope, receive, send)
        elif self._console is not None and is_page:
            await self._page(self._console, scope, receive, send)
        elif scope["method"] == "POST":
            try:
                await self._post(scope, receive, send)
            finally:
                self._release_body(scope, self._calls.get(scope["path"]))
        elif scope["method"] == "GET":
            await self._get(scope, receive, send)
        else:
            await _not_found(send)

    def _release_body(self, scope: MutableMapping[str, Any], call: Call | None) -> None:
        body_bytes = scope.get(BODY_BYTES)
        if body_bytes is not None and call is not None and self._caller is not None:
            self._caller.release_body(call, body_bytes)

    async def _post(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        call, headers = self._calls.get(scope["path"]), dict(scope["headers"])
        arrival = self._arrival(scope)
        if self._caller is not None and self._caller.wants_trace_parents:
            arrival = arrival._replace(trace_parent=headers.get(b"traceparent", b"").decode("latin-1"))
        if b"origin" in headers:
            await _refuse_page(send)
        elif (refusal := self._refusal(call, arrival)) is not None:
            await _respond(send=send, status=refusal.http_status, body=b"{}", headers=_rejection_response(refusal))
        elif call is None:
            await _not_found(send)
        elif headers.get(b"content-encoding", b"identity").lower() != b"identity":
            await _respond(send=send, status=415, body=b"{}", headers=_reason(_NO_ENCODINGS))
        else:
            self._gate.enter()
            try:
                await self._answer(call=call, headers=headers, arrival=arrival, scope=scope, receive=receive, send=send)
            finally:
                self._gate.leave()

    def _arrival(self, scope: MutableMapping[str, Any]) -> Arrival:
        client = scope["client"]
        return Arrival("http", client[0] if client else "", None, "", scope.get(RECEIVED_AT))

    def _refusal(self, call: Call | None, arrival: Arrival) -> RejectedError | None:
        """Return why a request is not to be read, and record that."""
        refusal = self._gate.rejection()
        if call is None or self._caller is None:
            return refusal
        if refusal is None:
            return self._caller.rejection(call, arrival)
        self._caller.report_rejection(call, arrival, refusal)
        return refusal

    async def _resource(
        self,
        resources: Resources | None,
        refuse: Refuse,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        problem = self._problem(scope["method"], dict(scope["headers"]))
        if problem is not None:
            await refuse(scope, send, problem)
            return
        if resources is None:
            await _not_found(send)
            return
        call = self._index.call_of(scope["path"]) if self._index is not None and resources is self._index else None
        self._gate.enter()
        try:
            arrival = self._admitted(call, scope)
            most = _MAX_RESOURCE_BYTES if call is None else _MAX_INDEX_BYTES
            most = max_body_bytes(arrival.principal, min(most, self._max_body_bytes))
            body = await self._read(dict(scope["headers"]), receive, most)
            leaving = _closing(send, self._gate)
            await resources({**scope, ARRIVAL: arrival}, _empty_receive(body, receive), leaving)
        except _BodyTooLargeError as error:
            await refuse(scope, send, Problem(413, str(error)))
        except RejectedError as error:
            await refuse(scope, send, problem_of_refusal(error))
        except _ClientGoneError:
            pass
        finally:
            self._release_body(scope, call)
            self._gate.leave()

    def _admitted(self, call: Call | None, scope: MutableMapping[str, Any]) -> Arrival:
        """Return how a request for a resource came, before its body is read.

        Args:
            call: that it becomes; None where the resource makes its calls itself, with their checks.
            scope: of the request.

        Raises:
            RejectedError: it is not to be read; where it is of a call, that is recorded.
        """
        arrival = self._arrival(scope)
        if call is None or self._caller is None:
            return arrival._replace(principal=self._principal(scope))
        error = self._head_rejection(self._caller, call, scope) or self._caller.rejection(call, arrival)
        if error is not None:
            raise error
        return self._caller.authenticate(call, arrival, credentials_of(scope))

    async def _page(self, console: Resources, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a browser: the console authenticates it."""
        if (refusal := self._gate.rejection()) is not None:
            await _respond(send, refusal.http_status, str(refusal).encode(), _rejection_response(refusal))
            return
        self._gate.enter()
        try:
            body = await self._read(dict(scope["headers"]), receive, min(_MAX_RESOURCE_BYTES, self._max_body_bytes))
            leaving = _closing(send, self._gate)
            await console({**scope, ARRIVAL: self._arrival(scope)}, _empty_receive(body, receive), leaving)
        except _BodyTooLargeError as error:
            await _respond(send=send, status=413, body=str(error).encode(), headers=_reason(str(error)))
        except _ClientGoneError:
            pass
        finally:
            self._gate.leave()

    def _problem(self, method: str, headers: Mapping[bytes, bytes]) -> Problem | None:
        """Return why a request for a resource is rejected, None where it is admitted."""
        if b"origin" in headers or (method in {"GET", "HEAD"} and b"accept-language" in headers):
            return Problem(403, _NO_PAGES)
        if (refusal := self._gate.rejection()) is not None:
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
            except RejectedError as error:
                await _respond(send=send, status=error.http_status, body=b"{}", headers=_rejection_response(error))
                return
            if page is not None:
                answer = await page(PageRequest(scope["query_string"], headers, principal))
                await _respond(send, answer.status, answer.body, list(answer.headers))
            elif stream is not None:
                assert self._caller is not None
                await _send_lines(stream(), partial(self._caller.access.is_key_valid, principal), receive, send)

    def _principal(self, scope: MutableMapping[str, Any]) -> Principal:
        if self._caller is None:
            return self._visitor
        return self._caller.authenticate_page(scope["path"], credentials_of(scope))

    async def _answer(
        self,
        call: Call,
        headers: dict[bytes, bytes],
        arrival: Arrival,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        assert self._caller is not None
        assert self._bodies is not None
        if self._caller.access.requires_credentials:
            try:
                arrival = self._caller.authenticate(call, arrival, credentials_of(scope))
            except RejectedError as error:
                await _respond(send=send, status=error.http_status, body=b"{}", headers=_rejection_response(error))
                return
        try:
            body = await self._read(headers, receive, max_body_bytes(arrival.principal, self._max_body_bytes))
        except _BodyTooLargeError as error:
            await _respond(send=send, status=413, body=b"{}", headers=_reason(str(error)))
            return
        except _ClientGoneError:
            return
        try:
            request = await self._bodies.json(call, body)
        except MalformedBody as error:
            await _respond(send=send, status=400, body=b"{}", headers=_reason(str(error)))
            return
        except RejectedError as error:
            self._caller.report_rejection(call, arrival, error)
            await _respond(send=send, status=error.http_status, body=b"{}", headers=_rejection_response(error))
            return
        try:
            reply = await self._caller.answer(call, request, arrival)
        except RejectedError as error:
            await _respond(send=send, status=error.http_status, body=b"{}", headers=_rejection_response(error))
            return
        body = await print_reply(reply, self._texts)
        await _respond(
            send=_closing(send, self._gate) if self._gate.is_draining else send, status=200, body=body, headers=_JSON
        )

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


@lru_cache(256)  # there may be many rejections, and few reasons
def _header_text(text: str) -> bytes:
    """Header values are latin-1 without control characters; what the client sent may be quoted in the text."""
    printable = "".join(character if character.isprintable() else "?" for character in text)[:500]
    return printable.encode("latin-1", "replace")


def _rejection_response(error: RejectedError) -> Headers:
    return [*_reason(str(error)), *((name.encode(), value.encode()) for name, value in error.headers)]


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


def _complete_response(status: int, headers: Headers, body: bytes) -> bytes:
    """Return an answer as it is sent, for where there is no time for more."""
    lines = b"".join([b"%s: %s\r\n" % header for header in headers])
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, HTTPStatus(status).phrase.encode(), lines, body)


async def _not_found(send: Send) -> None:
    await _respond(send=send, status=404, body=b"404 Not Found", headers=[])


async def _refuse_page(send: Send) -> None:
    """Reject a browser: only browsers send an origin, with everything but a GET of the page's own site, and only they
    send languages. While authentication is disabled, a page in a browser on this host must neither act nor listen
    here."""
    await _respond(send=send, status=403, body=b"{}", headers=_reason(_NO_PAGES))


def _closing(send: Send, gate: ServingGate) -> Send:
    """Have the connection closed behind the answer, perhaps because the end has begun since the request came: the
    client's next request finds another manager."""

    async def closing(event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start" and gate.is_draining:
            event["headers"] = [*(each for each in event["headers"] if each != _CLOSE), _CLOSE]
        await send(event)

    return closing


async def _respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, _length(body)]})
    await send({"type": "http.response.body", "body": body})


async def _refuse_resource(_scope: MutableMapping[str, Any], send: Send, problem: Problem) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in problem.headers]
    await _respond(send, problem.status, problem.body(), [(b"content-type", MEDIA_TYPE.encode()), *headers])


def _empty_receive(body: bytes, receive: Receive) -> Receive:
    """Receive a body that was read, and what comes behind it."""
    waiting = [body]

    async def receive_again() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False} if waiting else await receive()

    return receive_again


class HttpApplication(Protocol):
    """What a listener serves: an ASGI application that may reject a request by its head."""

    def check_head(self, scope: MutableMapping[str, Any]) -> bytes | None:
        """Return the whole answer to a request that is rejected by its head; None if it is admitted."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None: ...


_CLOSE_SECONDS = 1
_MAX_POLLS = 30  # for the first request of connections that have just come
_POLL_SECONDS = 0.01


class _SignallessServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One HTTP listener, bound at once.

    Args:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        limits: of its connections.
        tls: what they use; None for plain text.

    Raises:
        StorageIOError: the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, limits: ConnectionLimits | None = None, tls: ServerTls | None = None
    ) -> None:
        self._limits = limits if limits is not None else ConnectionLimits()
        self._tls = tls
        self._secure: TlsListener | None = None
        # asyncio's own loop sends small answers at once (TCP_NODELAY) only where the socket names its protocol; uvloop
        # always does.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise StorageIOError(f"HTTP address {host}:{port} cannot be bound: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server: _SignallessServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._late: list[asyncio.Task[Any]] = []

    async def start(self, app: HttpApplication) -> None:
        """Begin to serve; returns when requests are accepted."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,  # a client's address is what it connects from, not what it says
            http=partial(WatchedConnection, self._limits, app.check_head),  # type: ignore[arg-type]
        )
        self._server = _SignallessServer(config)
        # uvicorn listens to none where connections are accepted for it.
        sockets = [self._socket] if self._tls is None else []
        self._task = asyncio.create_task(self._server.serve(sockets=sockets))
        while not self._server.started:
            if self._task.done():
                return await self._task
            await asyncio.sleep(0.005)
        if self._tls is not None:
            inside = self._server.server_state.connections
            self._secure = TlsListener(self._socket, self._tls, self._limits, _maker(self._server), inside)
        watch = ConnectionWatch(self._server.server_state.connections, self._limits)
        self._watch = asyncio.create_task(watch.run())
        return None

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on, also those that the system has accepted already."""
        if self._socket.fileno() < 0:
            return
        if self._server is not None and self._server.started:
            self._accept_backlog(self._server)
            for listener in self._server.servers:
                listener.close()
            if self._secure is not None:
                self._secure.close()
        self._socket.close()

    def _accept_backlog(self, server: _SignallessServer) -> None:
        """Accept clients that have connected and perhaps sent a request: closing the socket would cut them off."""
        loop, protocol = asyncio.get_running_loop(), _maker(server)
        with contextlib.suppress(OSError):  # no client waits
            while True:
                connection, _ = self._socket.accept()
                if self._secure is not None:
                    self._secure.handshake(connection)
                else:
                    self._late.append(loop.create_task(loop.connect_accepted_socket(protocol, connection)))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # now, and not in the loop's next turn: more are refused

    async def stop(self, seconds: float = 0.0) -> None:
        """Close everything; requests in flight have so long to end."""
        self.stop_accepting()
        if self._server is not None and self._task is not None:
            await asyncio.gather(*self._late, return_exceptions=True)
            await self._wait_for_first_requests(self._server)
            if self._secure is not None:
                await self._secure.stop()
            self._server.config.timeout_graceful_shutdown = max(_CLOSE_SECONDS, round(seconds))
            self._server.should_exit = True
            await self._task
        if self._watch is not None:
            await end_tasks([self._watch])

    async def _wait_for_first_requests(self, server: _SignallessServer) -> None:
        """Wait a moment for the requests of connections that have just come: uvicorn closes those that sent none."""
        connections: set[Any] = server.server_state.connections
        for _ in range(_MAX_POLLS):
            is_greeting = self._secure is not None and self._secure.is_handshaking
            if not is_greeting and all(connection.cycle is not None for connection in connections):
                return
            await asyncio.sleep(_POLL_SECONDS)


def _maker(server: _SignallessServer) -> Callable[[], asyncio.Protocol]:
    """Return what makes connections as uvicorn does."""
    config, state = server.config, server.server_state
    kind: Any = config.http_protocol_class

    def make() -> asyncio.Protocol:
        made: asyncio.Protocol = kind(config=config, server_state=state, app_state={})
        return made

    return make


# The resources, made when the first request for one comes: their imports take a second and tens of MiB, which a manager
# without such requests is spared. A thread makes them, so that other requests are answered meanwhile.


class LazyResources:
    """Resources that are made when they are needed.

    Args:
        make: makes them; called in a thread.
    """

    def __init__(self, make: Callable[[], Resources]) -> None:
        self._make = make
        self._making: asyncio.Task[Resources] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(self._make))
        resources = await asyncio.shield(self._making)
        await resources(scope, receive, send)
