"""Decides which group may begin: the one place where the storages of an engine meet.

Invariants: (1) no group begins that the budget has no room for; (2) while a load waits for room, no save begins;
(3) whoever was turned away is woken when room is made; (4) a storage that waits for its own share holds up nobody else.
"""

from __future__ import annotations

import threading

from connectors.transfer.budget import ByteBudget
from connectors.transfer.mover import Direction

__all__ = ["Gate"]


class Gate:
    """The lock of an engine and its budget. All methods are called under the lock.

    Args:
        budget: of bytes in flight.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.lock = threading.Lock()
        self.budget = budget
        self._loads_waiting: set[str] = set()
        self._turned_away: dict[str, threading.Condition] = {}

    def enter(self, storage: str, direction: Direction, size_bytes: int, wake: threading.Condition) -> bool:
        """Take room for a group, or be woken when trying again is worth while."""
        has_room = self.budget.has_room(size_bytes)
        has_share = self.budget.has_share(storage, size_bytes)
        is_load = direction is Direction.LOAD
        if is_load and has_share and not has_room:
            self._loads_waiting.add(storage)
        elif is_load:  # it goes now, or room would not help it
            self.no_load_waits(storage)
        if has_room and has_share and (is_load or not self._loads_waiting):
            self.budget.take(storage, size_bytes)
            return True
        self._turned_away[storage] = wake
        return False

    def leave(self, storage: str, size_bytes: int) -> None:
        """Give the room of a group back."""
        self.budget.give_back(storage, size_bytes)
        self._wake_all()

    def no_load_waits(self, storage: str) -> None:
        """Let saves go on: the storage's load has got its room, or room is not what it needs."""
        if storage in self._loads_waiting:
            self._loads_waiting.remove(storage)
            self._wake_all()

    def _wake_all(self) -> None:
        for condition in self._turned_away.values():
            condition.notify_all()
        self._turned_away.clear()
