"""Sizes in the order in which they came, whose sum since any of them is asked for: a Fenwick tree, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ByteOrder"]


class ByteOrder:
    """Sizes at places from 0 on; taken out ones leave a gap until a restart. Asking and changing take log2(room) steps.

    Args:
        room: how many places there are.
    """

    def __init__(self, room: int) -> None:
        self._sizes = [0] * room
        self._sums = [0] * (room + 1)  # at i: the sum of the i & -i sizes up to the place i - 1
        self._total = 0
        self.end = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no place left."""
        return self.end == len(self._sizes)

    def size_at(self, place: int) -> int:
        """Return the size at a place, 0 in a gap."""
        return self._sizes[place]

    def append(self, size: int) -> int:
        """Put a size at the end; return its place."""
        place, self.end = self.end, self.end + 1
        self._sizes[place] = size
        self._add(place, size)
        return place

    def remove(self, place: int) -> None:
        """Leave a gap."""
        self._add(place, -self._sizes[place])
        self._sizes[place] = 0

    def _add(self, place: int, size: int) -> None:
        self._total += size
        sums, room, at = self._sums, len(self._sizes), place + 1
        while at <= room:
            sums[at] += size
            at += at & -at

    def bytes_since(self, place: int) -> int:
        """Return the sum of the sizes from a place on."""
        before, sums, at = 0, self._sums, place
        while at:
            before += sums[at]
            at &= at - 1
        return self._total - before

    def restart(self, sizes: Sequence[int]) -> None:
        """Begin anew with these sizes at the first places."""
        assert len(sizes) < len(self._sizes)
        self._sizes[:] = [*sizes, *[0] * (len(self._sizes) - len(sizes))]
        self._sums = [0, *self._sizes]
        for at in range(1, len(self._sums)):
            above = at + (at & -at)
            if above < len(self._sums):
                self._sums[above] += self._sums[at]
        self._total, self.end = sum(sizes), len(sizes)
