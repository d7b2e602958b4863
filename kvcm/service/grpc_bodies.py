"""Bodies of requests over gRPC: taken when it is known who sends them, and given up where they do not come in time.

gRPC takes the body of a plain call, whatever its size, before it asks anybody, and waits for its rest for ever. So
every call is served as one whose client streams requests, of which one is read.

Rejected: cancelling what waits for a body. gRPC goes on to write to what that held; a request that is answered ends
its own wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import grpc
import grpc.aio

from kvcm.model.principals import STRANGER, Principal
from kvcm.service.bodies import most_body_bytes
from kvcm.service.http_connection import ConnectionLimits

__all__ = ["BodyWatch"]

_STRANGERS: Final = 8  # whose bodies are taken at a time
_TOO_SLOW: Final = "the request did not arrive in time"
_TOO_LARGE: Final = "the body is larger than one of a request without a key may be"
_CUT: Final = "the request ended before its body did"


class BodyWatch:
    """Reads bodies, and ends requests whose body is too slow. A timer for each of them would cost more than this.

    Args:
        limits: looked at all the time: they may change.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._since: dict[Any, float] = {}
        self._strangers = asyncio.Semaphore(_STRANGERS)
        self._ending: set[asyncio.Task[None]] = set()

    async def read(self, context: Any, principal: Principal) -> bytes:
        """Return the body of a request; aborts it where there is none, or a larger one than the principal may send."""
        if principal is STRANGER:  # of whom any number may come, with bodies as large as those of engines
            async with self._strangers:
                body = await self._arrived(context)
        else:
            body = await self._arrived(context)
        if body is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _CUT)
        if len(body) > most_body_bytes(principal, len(body)):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_LARGE)
        return bytes(body)

    async def _arrived(self, context: Any) -> Any:
        self._since[context] = time.monotonic()
        try:
            return await context.read()
        finally:
            self._since.pop(context, None)

    async def run(self) -> None:
        """Look now and then, for good."""
        while True:
            await asyncio.sleep(self._limits.look_seconds)
            latest = time.monotonic() - self._limits.receive_seconds
            for context in [context for context, since in self._since.items() if since < latest]:
                del self._since[context]
                task = asyncio.create_task(_end(context))  # its client may not even take the answer
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)


async def _end(context: Any) -> None:
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):  # of which the second says that it has ended
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_SLOW)
