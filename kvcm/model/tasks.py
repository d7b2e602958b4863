"""How background tasks are brought to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

__all__ = ["end_tasks"]

_RETRY_SECONDS = 2.0


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when all of them have ended, however.

    Cancels again those that go on: what a task waits for may come in the moment in which it is cancelled, and not every
    wait hands the cancellation on then (`asyncio.wait_for` of Python 3.11 does not). A task that goes round for ever
    would never end.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_RETRY_SECONDS)
    for task in tasks:
        task.cancelled() or task.exception()  # retrieved, so that asyncio does not warn of it
