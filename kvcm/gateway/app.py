"""The HTTP side of a gateway, as a bare ASGI application: paths below /v1 go to engines, some others are its own.

`/livez` and `/readyz` answer everybody. Everything else needs the gateway's API key where it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

import msgspec
import structlog

from kvcm.gateway.engine_client import Outgoing, end_to_end
from kvcm.gateway.engines import Engine
from kvcm.gateway.metrics import GatewayMetrics
from kvcm.gateway.openai_api import ApiError, RequestFacts, error_body, is_api_path, read_facts
from kvcm.gateway.proxy import ENGINE_HEADER, REQUEST_ID_HEADER, BrokenAnswerError, Proxy, Record
from kvcm.gateway.settings import GatewaySecrets, GatewaySettings
from kvcm.model.clock import Clock
from kvcm.model.tasks import end_tasks
from kvcm.service.http_server import Receive, Send

__all__ = ["GatewayApp"]

_log = structlog.get_logger("kvcm.gateway")
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")
_SESSION_HEADER: Final = b"x-session-id"
_AUTHORIZATION: Final = b"authorization"
_NOT_FORWARDED: Final = frozenset({b"host", b"content-length", b"expect", REQUEST_ID_HEADER, ENGINE_HEADER})
_JSON: Final = (b"content-type", b"application/json")
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_CLOSE: Final = (b"connection", b"close")


class GatewayApp:
    """Answers requests.

    Args:
        settings: of the gateway.
        secrets: of the gateway.
        engines: all of them.
        proxy: passes requests on.
        metrics: of the gateway.
        clock: for the pages.
        new_id: makes ids of requests.

    Attributes:
        is_draining: whether new requests are refused.
        active_requests: requests in progress, also those whose bodies are still arriving.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        secrets: GatewaySecrets,
        *,
        engines: Sequence[Engine],
        proxy: Proxy,
        metrics: GatewayMetrics,
        clock: Clock,
        new_id: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._key_digest = _digest(secrets.api_key.encode()) if secrets.api_key else b""
        self._engine_authorization = f"Bearer {secrets.engine_key}".encode() if secrets.engine_key else b""
        self._engines = engines
        self._proxy = proxy
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._buffered_bytes = 0
        self._running: set[asyncio.Task[Any]] = set()
        self.active_requests = 0
        self._is_cut_off = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def check_head(self, scope: MutableMapping[str, Any]) -> bytes | None:
        """Return None: requests are refused when they are answered."""
        return None

    async def wait_until_idle(self, seconds: float) -> bool:
        """Return whether no request is left, at once or within so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return not self.active_requests

    async def cut_off(self) -> None:
        """End the requests that are left, and begin no other."""
        self._is_cut_off = True
        await end_tasks(list(self._running))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID_HEADER, b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else self._new_id()
        if self.is_draining:
            send = _closing(send)
        try:
            await self._route(scope, headers, request_id, receive=receive, send=send)
        except ApiError as error:
            await _respond_error(send, error, request_id)
        except BrokenAnswerError as error:
            # Returning without the answer's end closes the connection as the engine's was.
            _log.debug("answer_broken", request_id=request_id, reason=str(error))

    async def _route(
        self,
        scope: MutableMapping[str, Any],
        headers: Mapping[bytes, bytes],
        request_id: str,
        *,
        receive: Receive,
        send: Send,
    ) -> None:
        # As it came: a server that decoded it first might see another path than the engine.
        path, method = scope.get("raw_path", b"").decode("latin-1"), scope["method"]
        if path in ("/livez", "/readyz") and method == "GET":
            await self._respond_probe(send, path)
            return
        self._check_client(headers)
        if path in ("/metrics", "/engines") and method == "GET":
            await self._respond_page(send, path, headers)
        elif not is_api_path(path):
            raise ApiError(f"there is no {path[:100]}: engines are asked below /v1", status=404, code="not_found")
        elif method not in ("GET", "POST"):
            raise ApiError(f"method {method} is not passed on, must be GET or POST", status=405, code="bad_method")
        elif self.is_draining:
            raise ApiError("the gateway is stopping", status=503, code="draining", retry_after_seconds=1)
        else:
            await self._pass_on(scope, path, request_id, receive=receive, send=send)

    def _check_client(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise unless a client may ask."""
        if self._key_digest:
            scheme, _, key = headers.get(_AUTHORIZATION, b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(_digest(key.strip()), self._key_digest):
                raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        elif b"origin" in headers:
            # Any page that is open in a browser on this host could use the engines.
            raise ApiError("web pages are served only with an API key", status=403, code="web_page")

    async def _pass_on(
        self, scope: MutableMapping[str, Any], path: str, request_id: str, *, receive: Receive, send: Send
    ) -> None:
        begin = time.perf_counter()
        record, held = Record(), _Held(self)
        self.active_requests += 1  # from here on: a body that is still arriving is waited for, too
        self._idle.clear()
        try:
            body = await self._read(scope, receive, held)
            if body is None:
                return
            self._check_end()
            facts = self._facts(path, scope, body)
            outgoing = self._outgoing(scope, path, body, request_id)
            await self._answer(outgoing, facts, request_id, receive=receive, send=send, record=record)
        except ApiError as error:
            record.outcome, record.status = error.code, error.status
            raise
        except BrokenAnswerError:
            raise
        except Exception:
            _log.exception("request_failed", request_id=request_id)
            record.outcome = "error"
            if record.status:  # its answer has begun
                raise BrokenAnswerError("the gateway failed") from None
            record.status = 500
            raise ApiError("the gateway failed: its log says why", status=500, code="error") from None
        finally:
            held.release()
            self.active_requests -= 1
            if not self.active_requests:
                self._idle.set()
            self._metrics.requests.labels(record.engine, self._metrics.policy, record.outcome).inc()
            _log.info(
                "request",
                request_id=request_id,
                path=path,
                engine=record.engine,
                status=record.status,
                outcome=record.outcome,
                attempts=record.attempts,
                sent_bytes=record.sent_bytes,
                seconds=round(time.perf_counter() - begin, 4),
            )

    def _check_end(self) -> None:
        if self._is_cut_off:
            raise ApiError("the gateway ends: send it to another one", status=503, code="draining")

    async def _answer(
        self,
        outgoing: Outgoing,
        facts: RequestFacts,
        request_id: str,
        *,
        receive: Receive,
        send: Send,
        record: Record,
    ) -> None:
        """Answer, unless the client goes away first: then the request to the engine ends, too."""
        answering = asyncio.create_task(self._proxy.answer(outgoing, facts, request_id, send=send, record=record))
        leaving = asyncio.create_task(_disconnected(receive))
        self._running.add(answering)
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await end_tasks([answering])
            if answering.cancelled():
                if not leaving.done():
                    record.outcome = "cut_off"  # by the end of the gateway
                raise BrokenAnswerError("the request was ended before its answer")
            answering.result()
        finally:
            await end_tasks([answering, leaving])
            self._running.discard(answering)

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive, held: _Held) -> bytes | None:
        """Return the body of a request, None where its client goes away."""
        most = self._settings.max_body_bytes
        too_large = ApiError(f"the body is larger than {most} bytes", status=413, code="too_large")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                return None  # what came of it may look like a whole body
            part = event.get("body", b"")
            parts.append(part)
            size += len(part)
            held.add(len(part))
            if size > most:
                raise too_large
            if not event.get("more_body"):
                return b"".join(parts)

    def hold(self, count: int) -> None:
        """Count bytes of bodies that are in memory.

        Raises:
            ApiError: they are too many.
        """
        if count > 0 and self._buffered_bytes + count > self._settings.max_buffered_bytes:
            raise ApiError(
                "bodies of requests fill the gateway's memory: try again later",
                status=503,
                code="memory",
                retry_after_seconds=1,
            )
        self._buffered_bytes += count

    def _facts(self, path: str, scope: MutableMapping[str, Any], body: bytes) -> RequestFacts:
        headers = dict(scope["headers"])
        return read_facts(
            path,
            headers.get(b"content-type", b"").decode("latin-1"),
            headers.get(_SESSION_HEADER, b"").decode("latin-1"),
            body,
            prefix_characters=self._settings.hash_prefix_characters,
            is_post=scope["method"] == "POST",
        )

    def _outgoing(self, scope: MutableMapping[str, Any], path: str, body: bytes, request_id: str) -> Outgoing:
        """Return the request as engines get it: the gateway's own key stays here, an engine's key takes the place of
        the client's."""
        dropped = set(_NOT_FORWARDED)
        if self._key_digest or self._engine_authorization:
            dropped.add(_AUTHORIZATION)
        headers = [each for each in end_to_end(scope["headers"]) if each[0] not in dropped]
        headers.append((REQUEST_ID_HEADER, request_id.encode()))
        if self._engine_authorization:
            headers.append((_AUTHORIZATION, self._engine_authorization))
        return Outgoing(scope["method"], path, scope["query_string"], headers, body)

    async def _respond_probe(self, send: Send, path: str) -> None:
        is_ready = not self.is_draining and any(engine.is_usable for engine in self._engines)
        is_ok = is_ready or path == "/livez"
        await _respond(send, 200 if is_ok else 503, b"ok" if is_ok else b"not ready", [_TEXT])

    async def _respond_page(self, send: Send, path: str, headers: Mapping[bytes, bytes]) -> None:
        if path == "/metrics":
            body, content_type = self._metrics.written(headers.get(b"accept", b"").decode("latin-1"))
            await _respond(send, 200, body, [(b"content-type", content_type.encode())])
        else:
            body = msgspec.json.encode({"engines": [self._described(engine) for engine in self._engines]})
            await _respond(send, 200, body, [_JSON])

    def _described(self, engine: Engine) -> Mapping[str, object]:
        left = engine.ejected_until - self._clock.now()
        return {
            "engine": engine.name,
            "url": engine.url,
            "instance": engine.instance,
            "state": engine.state.value,
            "in_flight": engine.in_flight,
            "tokens_in_flight": round(engine.tokens_in_flight),
            "failures": engine.failures,
            "ejected_seconds": round(max(0.0, left), 3),
        }


class _Held:
    """Bytes of a request's body that count as in memory."""

    def __init__(self, app: GatewayApp) -> None:
        self._app = app
        self._bytes = 0

    def add(self, count: int) -> None:
        self._app.hold(count)
        self._bytes += count

    def release(self) -> None:
        self._app.hold(-self._bytes)
        self._bytes = 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _closing(send: Send) -> Send:
    async def closing(event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            event["headers"] = [*event["headers"], _CLOSE]
        await send(event)

    return closing


async def _respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _respond_error(send: Send, error: ApiError, request_id: str) -> None:
    headers = [_JSON, (REQUEST_ID_HEADER, request_id.encode())]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _respond(send, error.status, error_body(error), headers)
