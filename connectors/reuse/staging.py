"""Host memory that parts are loaded into before they reach an engine's memory.

Why not load straight into the engine's blocks: a storage that hangs may write to the memory that it was given at any
later time. The engine cannot wait for that, and gives its blocks to the next request. Here a tray that a storage may
still write to is left to it, and the next load gets another one, as long as not too many are lost that way. It comes
back once nothing hangs any more in the engine that moved its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["StagingTrays", "Tray"]

Bytes = npt.NDArray[np.uint8]


class Tray:
    """Memory that is lent to one load at a time.

    Args:
        memory: all of it.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory

    def rows(self, row_bytes: int, most: int) -> Bytes:
        """Return up to `most` rows of `row_bytes` bytes, [row, byte], without a copy; at least as many as fit."""
        count = min(most, self._memory.nbytes // row_bytes)
        return self._memory[: count * row_bytes].reshape(count, row_bytes)


class _Lost(NamedTuple):
    tray: Tray
    may_change: Callable[[], bool]


class StagingTrays:
    """A bounded number of trays, made when they are first needed; safe to use from several threads.

    Args:
        tray_bytes: of each.
        trays: most that are lent at once.
        most_lost: trays that are replaced while storages hang on to them; more than these are missing until then.
        allocate: makes memory, page-locked for an accelerator.
    """

    def __init__(
        self,
        tray_bytes: int,
        trays: int,
        most_lost: int = 4,
        allocate: Callable[[int], Bytes] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.tray_bytes = tray_bytes
        self._allocate = allocate
        self._changed = threading.Condition()
        self._free: list[Tray] = []
        self._left_to_make = trays
        self._left_to_replace = most_lost
        self._replaced = 0
        self._lost: list[_Lost] = []

    @property
    def lost(self) -> int:
        """Trays that storages hang on to."""
        return len(self._lost)

    def take(self, timeout_seconds: float) -> Tray | None:
        """Lend a tray; None when there is none in time."""
        with self._changed:
            self._recover()
            if not self._changed.wait_for(lambda: self._free or self._left_to_make, max(0.0, timeout_seconds)):
                return None
            if self._free:
                return self._free.pop()
            self._left_to_make -= 1
        return Tray(self._allocate(self.tray_bytes))

    def give_back(self, tray: Tray) -> None:
        """Take a tray back that nothing is written to any more."""
        with self._changed:
            self._free.append(tray)
            self._changed.notify()

    def lose(self, tray: Tray, may_change: Callable[[], bool]) -> None:
        """Leave a tray to a storage that may still write to it; another one is made while that is allowed.

        Args:
            tray: it.
            may_change: whether that is still so; asked before the next tray is lent.
        """
        with self._changed:
            self._lost.append(_Lost(tray, may_change))
            if self._left_to_replace > 0:
                self._left_to_replace -= 1
                self._replaced += 1
                self._left_to_make += 1
                self._changed.notify()

    def _recover(self) -> None:
        lost, self._lost = self._lost, []
        for each in lost:
            if each.may_change():
                self._lost.append(each)
            elif self._replaced:  # there is another one in its place
                self._replaced -= 1
                self._left_to_replace += 1
            else:
                self._free.append(each.tray)
                self._changed.notify()
