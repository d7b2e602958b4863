"""The resources, made when the first request for one comes: what they are made of takes a second to import, and tens
of MiB, which managers that nobody asks for resources are spared. A thread makes them, so that others are answered
meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from kvcm.service.asgi import Receive, Send
from kvcm.service.http_app import Resources

__all__ = ["LateResources"]


class LateResources:
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
