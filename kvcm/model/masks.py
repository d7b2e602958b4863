"""Block masks: which positions of a request are left out (wire.md 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NO_MASK", "BlockMask"]


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Either the first `offset` positions, or those whose flag is true; at most one of the two is set.

    Attributes:
        offset: positions [0, offset) are masked; a negative one masks everything, as the original does.
        flags: position i is masked when `flags[i]`; positions past the end are not.
    """

    offset: int | None = None
    flags: Sequence[bool] | None = None

    @classmethod
    def of(cls, flags: Sequence[bool]) -> BlockMask:
        """Return the shortest mask that masks exactly where `flags` is true."""
        count = sum(flags)
        if all(flags[:count]):
            return cls(offset=count)
        return cls(flags=tuple(flags))

    def unmasked(self, count: int) -> Sequence[int]:
        """Return the positions below `count` that are not masked, ascending."""
        if self.offset is not None:
            return range(self.offset, count) if self.offset >= 0 else ()
        if self.flags is None:
            return range(count)
        known = len(self.flags)
        return [i for i in range(count) if i >= known or not self.flags[i]]


NO_MASK = BlockMask()
