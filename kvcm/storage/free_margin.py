"""How many bytes of a medium stay free: below that it is full, whatever the quotas of its groups say.

A medium is shared: by files of others, by names and records that no quota counts, by blocks that are smaller than what
the file system gives them. So it may be full long before any quota is. A medium with less than `low` free counts as
full; blocks leave it until `goal` is free, and until then it stays full: between the two it does not change its mind.

The margin is small, a hundredth of the medium and 256 MiB at most: a nearly full disk is no reason to give up a cache.
Two of the largest blocks always fit into it, since less free space than one block is none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvcm.model.storages import StorageSpace
from kvcm.model.units import format_size

__all__ = ["NO_MARGIN", "FreeMargin", "FreeMargins"]

_MOST_BYTES: Final = 256 << 20
_RATIO: Final = 100  # of the medium, its hundredth part
_BLOCKS: Final = 2
_WIDE: Final = 10  # a failed write makes the margin no larger than this part of the medium, whatever it wanted
_FAILED_SECONDS: Final = 60.0
"""For so long a failed write counts."""


class FreeMargin(NamedTuple):
    """Bytes of one medium that are to stay free.

    Attributes:
        low: with less free it counts as full.
        goal: with as much free it counts as full no more.
    """

    low: int
    goal: int

    def shortage(self, space: StorageSpace, *, was_full: bool) -> str:
        """Return why a medium counts as full, "" where it does not or its space is unknown."""
        free = space.free_bytes
        if 0 <= free < (self.goal if was_full else self.low):
            return f"{format_size(free)} of {format_size(space.capacity_bytes)} are free on its medium"
        return ""


NO_MARGIN = FreeMargin(0, 0)


class FreeMargins:
    """The margins of the open storages.

    Args:
        largest_block: returns the bytes of the largest block that may go to a storage.
        reserved_bytes: returns what of a storage's medium is kept for metadata, 0 where that lies elsewhere.
        now: unix seconds.
    """

    def __init__(
        self,
        largest_block: Callable[[str], int],
        reserved_bytes: Callable[[str], int] = lambda _storage: 0,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._largest_block = largest_block
        self._reserved_bytes = reserved_bytes
        self._now = now
        self._failed: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def on_failed_write(self, storage: str, size_bytes: int) -> None:
        """Want as many bytes free as a write had that failed: for a minute, and a tenth of the medium at most.

        The client may have failed for any reason: the medium is full only where so much is not free.
        """
        self._failed[storage].append((self._now(), size_bytes))

    def failed_bytes(self, storage: str, seconds: float = _FAILED_SECONDS) -> list[int]:
        """Return the sizes of the writes that failed on a storage in the last seconds, a minute at most."""
        failed, now = self._failed[storage], self._now()
        while failed and failed[0][0] < now - _FAILED_SECONDS:
            failed.popleft()
        return [size for at, size in failed if at >= now - seconds]

    def of(self, storage: str, space: StorageSpace) -> FreeMargin:
        """Return the margin of a storage, given the space of its medium."""
        if space.capacity_bytes < 0:
            return NO_MARGIN
        capacity = space.capacity_bytes
        least = max(_BLOCKS * self._largest_block(storage), min(capacity // _RATIO, _MOST_BYTES))
        least = max(least, min(max(self.failed_bytes(storage), default=0), capacity // _WIDE))
        least = min(least, capacity // 2)
        reserved = self._reserved_bytes(storage)
        return FreeMargin(reserved + least, reserved + 2 * least)
