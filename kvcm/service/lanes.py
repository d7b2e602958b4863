"""A lane of requests that take long: few run at a time, few wait, and none waits in vain.

1. At most `slots` requests are inside, at most `places` wait, in the order in which they came. 2. A request that
would wait for longer than it may, by the lane's measured pace, is refused at once, and so is one whose client would
have given up before its answer. 3. One whose turn did not come in time after all is refused then. 4. Whoever is
cancelled while it waits gives its place up, and its turn to the next, if it was just given one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from kvcm.service.turned_away import TurnedAwayError

__all__ = ["DEADLINE", "QUEUE", "Lane"]

QUEUE: Final = "queue"
"""Reason of what is refused since too many wait."""
DEADLINE: Final = "deadline"
"""Reason of what is refused since its client will have given up."""

_SHARE_OF_LAST: Final = 0.2  # in the pace; the last ten or so count
_LEAST_RETRY_SECONDS: Final = 0.1


class Lane:
    """To be used inside one event loop.

    Args:
        clock: seconds of a clock that never runs backwards.
        slots: requests that run at a time.
        places: requests that wait.
        most_wait_seconds: for how long; 0 = for ever.
    """

    def __init__(self, clock: Callable[[], float], slots: int, places: int, most_wait_seconds: float) -> None:
        self._clock = clock
        self._slots = slots
        self._places = places
        self._most_wait_seconds = most_wait_seconds
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pace_seconds = 0.0

    @property
    def inside(self) -> int:
        """Requests that run."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def set(self, slots: int, places: int, most_wait_seconds: float) -> None:
        """Change the sizes; who is inside or waits stays."""
        self._slots, self._places, self._most_wait_seconds = slots, places, most_wait_seconds
        self._let_in()

    async def enter(self, deadline: float | None) -> float:
        """Wait for a turn.

        Args:
            deadline: on the clock, when the client gives up; None when it does not say.

        Returns:
            When it began, for `leave`.

        Raises:
            TurnedAwayError: there is no turn for it in time.
        """
        if self._inside >= self._slots or self._waiting:
            await self._wait(deadline)
        else:
            self._inside += 1
        return self._clock()

    def leave(self, began: float) -> None:
        """Give the turn to the next."""
        took = self._clock() - began
        self._pace_seconds += (took - self._pace_seconds) * (_SHARE_OF_LAST if self._pace_seconds else 1.0)
        self._inside -= 1
        self._let_in()

    def wait_seconds(self) -> float:
        """Return how long a request that comes now will wait, by the pace so far."""
        ahead = self._inside + len(self._waiting) - self._slots + 1
        return max(0, ahead) * self._pace_seconds / self._slots

    async def _wait(self, deadline: float | None) -> None:
        wait_seconds = self.wait_seconds()
        retry_seconds = max(wait_seconds, _LEAST_RETRY_SECONDS)
        left_seconds = None if deadline is None else deadline - self._clock() - self._pace_seconds
        if left_seconds is not None and wait_seconds >= left_seconds:
            raise _no_time(retry_seconds)
        if len(self._waiting) >= self._places or 0 < self._most_wait_seconds < wait_seconds:
            raise _no_place(retry_seconds)
        most = min(left_seconds or float("inf"), self._most_wait_seconds or float("inf"))
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(None if most == float("inf") else most):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise (_no_time if most == left_seconds else _no_place)(retry_seconds) from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # its turn came in the same moment
            self._inside -= 1
            self._let_in()
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def _let_in(self) -> None:
        while self._waiting and self._inside < self._slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)


def _no_place(retry_seconds: float) -> TurnedAwayError:
    text = "many large requests are waiting; retry later, or ask for fewer keys at a time"
    return TurnedAwayError(text, QUEUE, retry_seconds)


def _no_time(retry_seconds: float) -> TurnedAwayError:
    text = "the request would be answered after its deadline; retry later, with more time or fewer keys"
    return TurnedAwayError(text, DEADLINE, retry_seconds)
