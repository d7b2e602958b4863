"""Requests to engines, by aiohttp: the ones that are passed on, probes, and tokenization.

Nothing is followed, decoded, remembered or taken from the environment: an engine's redirect, encoding and cookies are
its client's, and a proxy of this host is none of an engine.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from kvcm.gateway.openai_api import tokens_of_answer

__all__ = ["AttemptError", "EngineAnswer", "EngineClient", "EngineTimeouts", "Outgoing"]

# uvicorn, which engines run on, closes connections after 5 s without a request. One that is taken in that moment fails.
_IDLE_CONNECTION_SECONDS: Final = 3.0
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
_MOST_TOKENIZED_BYTES: Final = 64 << 20
_OWN_HEADERS: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long engines may take, in seconds.

    Attributes:
        connect: for a connection.
        first_byte: until the answer's body begins.
        idle: between two pieces of the body.
        probe: for a probe.
        tokenize: for a tokenization.
    """

    connect: float = 2.0
    first_byte: float = 600.0
    idle: float = 120.0
    probe: float = 5.0
    tokenize: float = 0.2


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as engines get it.

    Attributes:
        method: of HTTP.
        path: below /v1.
        query: behind the question mark, as it came.
        headers: lower-case names and values, those of the connection left out.
        body: all of it.
    """

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class AttemptError(Exception):
    """An engine gave no answer.

    Args:
        message: what happened.
        reason: one of few words, a label of metrics: connect, first_byte_timeout, idle_timeout or broken.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def was_sent(self) -> bool:
        """Whether the engine may have begun with the request."""
        return self.reason != "connect"


class EngineAnswer:
    """An answer whose body has begun.

    Args:
        response: of aiohttp.
        first: first piece of the body, empty for an empty body.
        idle_seconds: how long to wait for each further piece.
    """

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, idle_seconds: float) -> None:
        self._response = response
        self._idle_seconds = idle_seconds
        self.status = response.status
        self.first = first

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Lower-case names and values, those of the connection left out."""
        return end_to_end(self._response.raw_headers)

    async def next(self) -> bytes:
        """Return the next piece of the body, empty at its end.

        Raises:
            AttemptError: the engine broke it off, or sends nothing.
        """
        return await _next_piece(self._response, self._idle_seconds, "idle_timeout")

    def close(self) -> None:
        """End it: a complete one leaves its connection to others; else the engine sees it closed, and stops."""
        self._response.close()


def end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers with lower-case names, without those that belong to one connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lowered if name == b"connection" for part in value.split(b",")}
    dropped = _HOP_BY_HOP | named
    return [(name, value) for name, value in lowered if name not in dropped]


class EngineClient:
    """Calls engines; a context manager on a running loop.

    Args:
        timeouts: of all calls.
    """

    def __init__(self, timeouts: EngineTimeouts) -> None:
        self._timeouts = timeouts
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._timeouts.connect),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=_OWN_HEADERS,
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def open(self, url: str, outgoing: Outgoing) -> EngineAnswer:
        """Send a request, and return its answer when the first byte of the body is there: before that, another engine
        can still be asked.

        Raises:
            AttemptError: there is no answer.
        """
        # aiohttp encodes values as UTF-8, so valid UTF-8 stays as it came.
        decoded = ((name.decode("ascii"), value.decode("utf-8", "replace")) for name, value in outgoing.headers)
        assert self._session is not None
        deadline = asyncio.get_running_loop().time() + self._timeouts.first_byte
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._session.request(
                    outgoing.method,
                    _engine_url(url, outgoing.path, outgoing.query),
                    headers=CIMultiDict(decoded),
                    data=io.BytesIO(outgoing.body) if outgoing.body else None,
                    allow_redirects=False,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise AttemptError(f"no connection: {_text(error)}", "connect") from error
        except TimeoutError as error:
            raise AttemptError("no answer in time", "first_byte_timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise AttemptError(f"the connection broke: {_text(error)}", "broken") from error
        try:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            first = await _next_piece(response, left, "first_byte_timeout")
        except BaseException:
            response.close()
            raise
        return EngineAnswer(response, first, self._timeouts.idle)

    async def is_healthy(self, url: str, headers: Mapping[str, str]) -> bool:
        """Return whether an engine says that it is healthy."""
        assert self._session is not None
        try:
            async with asyncio.timeout(self._timeouts.probe):
                request = self._session.get(_engine_url(url, "/health"), headers=headers, allow_redirects=False)
                async with request as response:
                    return response.status == 200
        except (aiohttp.ClientError, OSError):  # a time-out is an OSError
            return False

    async def tokenize(self, url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> Sequence[int] | None:
        """Return the tokens of a prompt, None where the engine does not say them in time."""
        assert self._session is not None
        data = io.BytesIO(msgspec.json.encode(body))
        sent = {**headers, "content-type": "application/json"}
        try:
            async with asyncio.timeout(self._timeouts.tokenize):
                request = self._session.post(
                    _engine_url(url, "/tokenize"), headers=sent, data=data, allow_redirects=False
                )
                async with request as response:
                    return await _tokens(response) if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None


async def _tokens(response: aiohttp.ClientResponse) -> Sequence[int] | None:
    parts: list[bytes] = []
    size = 0
    while piece := await response.content.readany():
        parts.append(piece)
        size += len(piece)
        if size > _MOST_TOKENIZED_BYTES:
            return None
    return tokens_of_answer(b"".join(parts))


async def _next_piece(response: aiohttp.ClientResponse, seconds: float, late: str) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await response.content.readany()
    except TimeoutError as error:
        raise AttemptError("no answer in time" if late != "idle_timeout" else "the answer stopped", late) from error
    except (aiohttp.ClientError, OSError) as error:
        raise AttemptError(f"the answer broke off: {_text(error)}", "broken") from error


def _engine_url(url: str, path: str, query: bytes = b"") -> URL:
    # As the client wrote it, and on this engine: nothing is joined, resolved or quoted again.
    return URL(f"{url}{path}{'?' if query else ''}{query.decode('latin-1')}", encoded=True)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
