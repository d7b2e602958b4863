"""The async client called from plain tests, so that one test can run with both clients."""

from __future__ import annotations

import asyncio
from typing import Any

from kvcm.connectors.client import AsyncManagerClient


class BlockingClient:
    """Runs every coroutine of an async client to its end."""

    def __init__(self, *arguments: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncManagerClient(*arguments)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(method):
            return method
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
