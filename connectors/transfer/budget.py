"""How many bytes may be in flight, over all storages of an engine and for each of them.

Memory in flight is neither free nor the engine's own: a storage may still write to it. A storage that hangs keeps what
it holds for as long as it hangs, so no storage may hold more than its share: the others always have room.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.model.errors import InvalidArgumentError

__all__ = ["ByteBudget"]


class ByteBudget:
    """Counts bytes in flight. Not locked: its owner does that.

    Invariant: not more than `limit_bytes` are in flight, or one single piece that is larger than that.

    Args:
        limit_bytes: over all storages, > 0.
        storages: names; each may hold an equal share, or one piece larger than its share.
    """

    def __init__(self, limit_bytes: int, storages: Sequence[str]) -> None:
        if limit_bytes <= 0:
            raise InvalidArgumentError(f"limit_bytes is {limit_bytes}, must be > 0")
        self.limit_bytes = limit_bytes
        self.share_bytes = max(1, limit_bytes // max(1, len(storages)))
        self.total_bytes = 0
        self._held_bytes = dict.fromkeys(storages, 0)

    def held_bytes(self, storage: str) -> int:
        """Return what a storage holds now."""
        return self._held_bytes[storage]

    def has_room(self, size_bytes: int) -> bool:
        """Return whether a piece of this size fits beside all that is in flight; alone every piece does."""
        return self.total_bytes + size_bytes <= self.limit_bytes or not self.total_bytes

    def has_share(self, storage: str, size_bytes: int) -> bool:
        """Return whether a storage may hold so much more; a single piece it always may."""
        held_bytes = self._held_bytes[storage]
        return held_bytes + size_bytes <= self.share_bytes or not held_bytes

    def take(self, storage: str, size_bytes: int) -> None:
        """Count a piece in; the owner asked `has_room` and `has_share` before."""
        self.total_bytes += size_bytes
        self._held_bytes[storage] += size_bytes

    def give_back(self, storage: str, size_bytes: int) -> None:
        """Count a piece out again."""
        self.total_bytes -= size_bytes
        self._held_bytes[storage] -= size_bytes
        assert self._held_bytes[storage] >= 0
