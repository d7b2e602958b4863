"""How a manager that does not lead wakes the one that does: over a document of the store that they share.

A write that crosses a mark, or is refused, may be served by any manager, and eviction is a duty of the leader. Whoever
has something to tell changes the document; the leader asks for the table's version twenty times a second, which costs
the store next to nothing, and looks when it has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcm.store.store import Table

__all__ = ["SharedWakes"]

_DOCUMENT = "wake"
_SECONDS = 0.05


class SharedWakes:
    """Wakes the leader's reclaimer.

    Args:
        table: for this purpose alone.
        wake: wakes the reclaimer of this manager.
        is_leader: whether that is the one that evicts.
    """

    def __init__(self, table: Table, wake: Callable[[], None], is_leader: Callable[[], bool]) -> None:
        self._table = table
        self._wake = wake
        self._is_leader = is_leader
        self._is_pressed = False
        self._version: int | None = None

    def press(self, _group_name: str = "") -> None:
        """A write crossed a mark or was refused. Never waits: the leader hears of it within a moment."""
        if self._is_leader():
            self._wake()
        else:
            self._is_pressed = True

    async def run(self) -> None:
        """Tell and hear, until cancelled."""
        while True:
            await self.exchange()
            await asyncio.sleep(_SECONDS)

    async def exchange(self) -> None:
        """Tell the leader what was pressed here, or hear what was pressed elsewhere.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if self._is_leader():
            version = await self._table.version()
            if self._is_pressed or version != self._version:
                self._is_pressed, self._version = False, version
                self._wake()
        elif self._is_pressed:
            known = await self._table.get(_DOCUMENT)
            following = (int.from_bytes(known or b"") + 1) % (1 << 64)
            await self._table.replace(_DOCUMENT, known, following.to_bytes(8))
            self._is_pressed = False  # if another manager was faster, it told the leader for both
