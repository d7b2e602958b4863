"""What policies share whose order of eviction is one queue: they differ in where a block is put into it."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.reclaim.policies.queue import Links, Queue

__all__ = ["Ordered"]


class Ordered:
    """Blocks in the order in which they are to be evicted."""

    __slots__ = ("_links", "_queue")

    def __init__(self) -> None:
        self._links = Links()
        self._queue = Queue(self._links)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def remove(self, slot: int, *, evicted: bool = True) -> None:
        """Take a block out."""
        self._queue.remove(slot)

    def moved(self, slot: int, to: int) -> None:
        """Call the block in `slot` `to`."""
        self._links.move(slot, to)

    def victims(self) -> Iterator[int]:
        """Yield from the oldest to the newest, at most as many as there are now, so that touching cannot prolong it."""
        queue = self._queue
        cursor = self._links.open_cursor()
        try:
            for _ in range(len(queue)):
                slot = queue.newer(cursor.at)
                if slot < 0:
                    return
                cursor.stand_on(slot)
                yield slot
        finally:
            self._links.close_cursor(cursor)
