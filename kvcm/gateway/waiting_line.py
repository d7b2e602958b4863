"""A line in which requests wait for their turn, first come first served, until a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["LineFullError", "WaitingLine"]

T = TypeVar("T")


class LineFullError(Exception):
    """Too many wait already."""


class WaitingLine(Generic[T]):
    """Hands out turns. A turn is what `try_begin` of the waiter returns: it is called when its turn may have come, and
    returns None while it has not.

    Invariants: no waiter begins before one that came earlier; a turn that was handed out to a waiter that went away
    in the same moment is undone.

    Args:
        most: how many may wait.
        undo: gives a turn back.
    """

    def __init__(self, most: int, undo: Callable[[T], None]) -> None:
        self._most = most
        self._undo = undo
        self._waiting: deque[tuple[Callable[[], T | None], asyncio.Future[T]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def turn(self, try_begin: Callable[[], T | None], deadline: float) -> T:
        """Return a turn.

        Args:
            try_begin: returns it, or None for not yet; what it raises is raised here.
            deadline: on the loop's clock.

        Raises:
            LineFullError: too many wait already.
            TimeoutError: the turn did not come in time.
        """
        if not self._waiting and (begun := try_begin()) is not None:
            return begun
        if len(self._waiting) >= self._most:
            raise LineFullError
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = (try_begin, future)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif future.done() and not future.cancelled() and future.exception() is None:
                self._undo(future.result())
            self.advance()  # the next one may have waited behind this one only
            raise

    def advance(self) -> None:
        """Hand out the turns that have come."""
        while self._waiting:
            try_begin, future = self._waiting[0]
            if not future.done():
                try:
                    begun = try_begin()
                except Exception as error:
                    future.set_exception(error)
                else:
                    if begun is None:
                        return
                    future.set_result(begun)
            # A future that is done without us is cancelled: its waiter has not run yet and finds itself removed.
            if self._waiting and self._waiting[0][1] is future:
                self._waiting.popleft()
