"""Whether others get their turn while a call holds the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def turns_of_others(awaitable: Awaitable[Any]) -> tuple[Any, int]:
    """Return what a call returns, and how often others had their turn until then."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    result = await awaitable
    other.cancel()
    return result, turns
