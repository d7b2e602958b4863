"""Work that a cancelled caller must not cut in two: what the store holds and what is counted of it have to agree.

A client that hangs up cancels the task of its request at whatever point it waits. The work runs on to its end in a task
of its own, the caller waits for it (locks stay held), and only then is the cancellation delivered.

Rejected: `asyncio.shield` alone, which lets the caller go and release its locks while the work still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["uninterrupted"]

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end whatever happens to the caller, and return or raise what it does.

    Raises:
        CancelledError: the caller was cancelled meanwhile; the work is done, well or badly.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        task.cancelled() or task.exception()  # seen, so that nobody warns of it
        raise cancellation
    return task.result()
