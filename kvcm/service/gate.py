"""Whether requests are served now, and how many are: the one place that starting and stopping are told to.

Both transports ask before they read a request, and tell when its answer is sent. A request that was let in is carried
out whatever happens to the gate afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

from kvcm.service.turned_away import TurnedAwayError

__all__ = ["Gate", "Phase"]

_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_MOST_LOOKS = 10


class Phase(Enum):
    """Stages of a manager's life, in their order."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"  # still serves, and wants nobody new to come
    CLOSED = "draining"


_TURNED_AWAY = {
    Phase.STARTING: "the manager is starting; retry shortly",
    Phase.CLOSED: "the manager is stopping; retry, another one may answer",
}


class Gate:
    """Lets requests in while the manager serves. To be made inside the event loop."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turned_away = 0
        self._followers: list[Callable[[], Awaitable[None]]] = []

    @property
    def is_leaving(self) -> bool:
        """Whether the end has begun: connections are not worth keeping."""
        return self.phase in {Phase.LEAVING, Phase.CLOSED}

    def follow(self, told: Callable[[], Awaitable[None]]) -> None:
        """Have something awaited whenever the phase has changed."""
        self._followers.append(told)

    async def enter_phase(self, phase: Phase) -> None:
        """Go on to a phase; returns when everybody was told."""
        self.phase = phase
        for told in self._followers:
            await told()

    def refusal(self) -> TurnedAwayError | None:
        """Return why a request that has come is not let in, None while everybody is."""
        text = _TURNED_AWAY.get(self.phase)
        if text is None:
            return None
        self._turned_away += 1
        return TurnedAwayError(text, self.phase.value, _RETRY_SECONDS)

    def enter(self) -> None:
        """Count a request that is let in."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Its answer is sent, or nobody waits for it any more."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def calmed(self) -> None:
        """Wait until nobody has been turned away for a moment, but not for long."""
        for _ in range(_MOST_LOOKS):
            before = self._turned_away
            await asyncio.sleep(_LOOK_SECONDS)
            if self._turned_away == before:
                return

    async def emptied(self, seconds: float) -> bool:
        """Wait until nothing is in flight, for so long at most, and return whether that is so."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
