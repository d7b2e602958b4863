"""One request on its way: to an engine, perhaps to another one, and its answer back as it comes.

Invariants:

1. A request never goes to an engine twice.
2. Another engine is asked only before the first byte of an answer was sent to the client, and only where the first one
   cannot have begun: it was not reached, or says so itself (429, 502, 503).
3. Everything that is counted for a request is uncounted, however it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvcm.gateway.engine_client import AttemptError, EngineAnswer, EngineClient, Outgoing
from kvcm.gateway.engines import Engine
from kvcm.gateway.metrics import NO_ENGINE, GatewayMetrics
from kvcm.gateway.openai_api import ApiError, RequestFacts
from kvcm.gateway.routing import Choice, Router, Studied
from kvcm.gateway.waiting_line import LineFullError, WaitingLine
from kvcm.service.http_server import Send

__all__ = ["ENGINE_HEADER", "REQUEST_ID_HEADER", "BrokenAnswerError", "Proxy", "ProxyLimits", "Record"]

ENGINE_HEADER: Final = b"x-kvcm-engine"
"""Header of an answer: the engine that gave it."""
REQUEST_ID_HEADER: Final = b"x-request-id"
_RANK_HEADER: Final = b"x-data-parallel-rank"
_ELSEWHERE: Final = frozenset({429, 502, 503})  # the engine says that it has not begun
_AT_FAULT: Final = frozenset({502, 503, 504})
_SERVER_ERRORS: Final = 500
_RETRY_SECONDS: Final = 1
_SET_HERE: Final = frozenset({ENGINE_HEADER, REQUEST_ID_HEADER, b"date"})  # the server of the gateway writes a date


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """How much is done at a time.

    Attributes:
        in_flight: requests.
        in_flight_per_engine: requests on one engine.
        queued: requests that wait for one of these.
        queue_seconds: how long they wait.
        attempts: engines that a request goes to.
    """

    in_flight: int = 1024
    in_flight_per_engine: int = 256
    queued: int = 1024
    queue_seconds: float = 10.0
    attempts: int = 3


@dataclass(slots=True)
class Record:
    """What became of a request, for metrics and the log.

    Attributes:
        engine: the last one that was asked.
        outcome: ok, client_error, engine_error, broken, timeout, client_gone, or the code of a rejection.
        status: of the answer, 0 for none.
        attempts: engines that were asked.
        sent_bytes: of the answer's body.
    """

    engine: str = NO_ENGINE
    outcome: str = "client_gone"
    status: int = 0
    attempts: int = 0
    sent_bytes: int = 0


class BrokenAnswerError(Exception):
    """The answer ended before its end, after its first byte was sent: so must the client's connection."""


class Proxy:
    """Passes requests on.

    Args:
        engines: all of them.
        router: chooses one.
        client: calls it.
        metrics: of the gateway.
        limits: of requests at a time.
        timer: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        router: Router,
        client: EngineClient,
        metrics: GatewayMetrics,
        *,
        limits: ProxyLimits,
        line: WaitingLine[Choice],
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engines = engines
        self._router = router
        self._client = client
        self._metrics = metrics
        self._limits = limits
        self._line = line
        self._timer = timer

    @property
    def in_flight(self) -> int:
        """Requests on engines."""
        return sum(engine.in_flight for engine in self._engines)

    async def answer(
        self, outgoing: Outgoing, facts: RequestFacts, request_id: str, *, send: Send, record: Record
    ) -> None:
        """Answer a request.

        Args:
            outgoing: the request as engines get it.
            facts: of the request.
            request_id: of the request.
            send: of ASGI.
            record: filled with what becomes of it.

        Raises:
            ApiError: no engine answers; nothing was sent.
            BrokenAnswerError: the answer is not complete.
        """
        begin = self._timer()
        usable = [engine for engine in self._engines if engine.is_usable]
        studied = await self._router.study(facts, usable, request_id, _authorization(outgoing))
        choice = await self._first_choice(studied)
        try:
            choice, opened = await self._opened(choice, studied, outgoing, record)
            try:
                self._metrics.first_byte_seconds.labels(self._metrics.policy).observe(self._timer() - begin)
                choice.flight.begin_answer()
                if choice.score is not None:
                    self._router.record_promise(studied, choice.score)
                await self._pass_on(opened, choice.engine, request_id, send=send, record=record)
            finally:
                opened.close()
        finally:
            choice.flight.end()

    async def _first_choice(self, studied: Studied) -> Choice:
        deadline = asyncio.get_running_loop().time() + self._limits.queue_seconds
        try:
            return await self._line.turn(partial(self._try_begin, studied), deadline)
        except LineFullError:
            raise ApiError(
                f"{self._limits.queued} requests wait for an engine already: try again later",
                status=429,
                code="queue_full",
                retry_after_seconds=_RETRY_SECONDS,
            ) from None
        except TimeoutError:
            raise ApiError(
                f"no engine took the request within {self._limits.queue_seconds:g} s: try again later",
                status=503,
                code="queue_timeout",
                retry_after_seconds=_RETRY_SECONDS,
            ) from None

    def _try_begin(self, studied: Studied, tried: frozenset[str] = frozenset()) -> Choice | None:
        """Return the choice for a request that goes to an engine now, None while none takes it.

        Raises:
            ApiError: no engine is healthy.
        """
        if not any(engine.is_usable for engine in self._engines):
            raise ApiError(
                "no engine is healthy: try again later; GET /engines has their states",
                status=503,
                code="no_healthy_engine",
                retry_after_seconds=_RETRY_SECONDS,
            )
        if not tried and self.in_flight >= self._limits.in_flight:  # a request that is asked again is one of them
            return None
        most = self._limits.in_flight_per_engine
        open_engines = [each for each in self._engines if each.name not in tried and each.takes_more(most)]
        return self._router.choose(studied, open_engines) if open_engines else None

    async def _opened(
        self, choice: Choice, studied: Studied, outgoing: Outgoing, record: Record
    ) -> tuple[Choice, EngineAnswer]:
        """Return the first answer of an engine that is to be passed on, with the choice that is in force then.

        Raises:
            ApiError: there is none.
        """
        tried: frozenset[str] = frozenset()
        while True:
            engine = choice.engine
            tried |= {engine.name}
            record.engine, record.attempts = engine.name, len(tried)
            try:
                opened = await self._client.open(engine.url, _for_rank(outgoing, choice))
            except AttemptError as error:
                engine.record_failure(error.reason)
                following = None if error.was_sent else self._other(studied, tried)
                if following is None:
                    choice.flight.end()
                    raise _unanswered(engine, error) from error
                reason = error.reason
            except BaseException:
                choice.flight.end()
                raise
            else:
                self._judge(engine, opened.status)
                following = self._other(studied, tried) if opened.status in _ELSEWHERE else None
                if following is None:
                    return choice, opened
                opened.close()
                reason = str(opened.status)
            choice.flight.end()
            choice = following
            self._metrics.retries.labels(reason).inc()

    def _other(self, studied: Studied, tried: frozenset[str]) -> Choice | None:
        """Return a choice among engines that were not asked, None if there is none. A retry does not wait: the client
        gets the answer that there is."""
        if len(tried) >= self._limits.attempts:
            return None
        try:
            return self._try_begin(studied, tried)
        except ApiError:  # the last one has just been ejected
            return None

    @staticmethod
    def _judge(engine: Engine, status: int) -> None:
        if status in _AT_FAULT:
            engine.record_failure(str(status))
        elif status < _SERVER_ERRORS:  # another error of the server says neither that it works nor that it does not
            engine.record_success()

    async def _pass_on(
        self, opened: EngineAnswer, engine: Engine, request_id: str, *, send: Send, record: Record
    ) -> None:
        own = [(ENGINE_HEADER, engine.name.encode()), (REQUEST_ID_HEADER, request_id.encode())]
        kept = [(name, value) for name, value in opened.headers if name not in _SET_HERE]
        record.status = opened.status
        await send({"type": "http.response.start", "status": opened.status, "headers": [*kept, *own]})
        piece = opened.first
        try:
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                record.sent_bytes += len(piece)
                piece = await opened.next()
        except AttemptError as error:
            engine.record_failure(error.reason)
            record.outcome = "timeout" if error.reason == "idle_timeout" else "broken"
            raise BrokenAnswerError(str(error)) from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        record.outcome = outcome_of(opened.status)


def outcome_of(status: int) -> str:
    """Return the outcome of a complete answer."""
    return "engine_error" if status >= 500 else "client_error" if status >= 400 else "ok"


def _unanswered(engine: Engine, error: AttemptError) -> ApiError:
    is_late = error.reason == "first_byte_timeout"
    return ApiError(
        f"engine {engine.name} gave no answer: {'none came in time' if is_late else 'its connection failed'}",
        status=504 if is_late else 502,
        code="timeout" if is_late else "broken" if error.was_sent else "connect",
    )


def _authorization(outgoing: Outgoing) -> Mapping[str, str]:
    kept = (b"authorization", REQUEST_ID_HEADER)
    return {name.decode(): value.decode("latin-1") for name, value in outgoing.headers if name in kept}


def _for_rank(outgoing: Outgoing, choice: Choice) -> Outgoing:
    """Return the request for the data-parallel rank that has the prompt's blocks, where an engine has several ranks."""
    if choice.score is None or choice.score.rank is None:
        return outgoing
    others: list[Any] = [each for each in outgoing.headers if each[0] != _RANK_HEADER]
    headers = [*others, (_RANK_HEADER, str(choice.score.rank).encode())]
    return Outgoing(outgoing.method, outgoing.path, outgoing.query, headers, outgoing.body)
