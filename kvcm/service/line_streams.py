"""Lines as they come, as the body of an HTTP answer that goes on until somebody ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from kvcm.service.asgi import Headers, Receive, Send

__all__ = ["LineStream", "send_lines"]

_HEADERS: Final[Headers] = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
_ASK_AGAIN_SECONDS: Final = 1.0  # while no line comes


class LineStream(Protocol):
    """Lines as they come, to be closed by whoever reads them."""

    def __aiter__(self) -> LineStream: ...

    async def __anext__(self) -> bytes: ...

    def close(self) -> None:
        """Want no more."""


async def send_lines(lines: LineStream, may_listen: Callable[[], bool], receive: Receive, send: Send) -> None:
    """Send lines until they end, the client goes away, or it may not listen any more: then its body ends as when there
    are no more lines, and whoever asks anew is told why.

    Args:
        lines: what to send; closed at the end.
        may_listen: asked before every line, and now and then while none comes.
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
        await asyncio.sleep(_ASK_AGAIN_SECONDS)
        if not may_listen():
            return
