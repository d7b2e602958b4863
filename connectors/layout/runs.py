"""Which bytes of memory a strided array covers, as contiguous runs.

Plain Python on purpose: a block has tens of runs, and numpy's cost per call is that of tens of additions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvcm.model.errors import InvalidArgumentError

__all__ = ["Runs", "coalesced", "contiguous_runs"]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of equal length.

    Attributes:
        outer: sizes and strides in bytes of the dimensions that separate the runs, outermost first.
        run_bytes: bytes of each run; 0 when the array is empty.
    """

    outer: tuple[tuple[int, int], ...]
    run_bytes: int

    @property
    def count(self) -> int:
        """Number of runs."""
        total = 1 if self.run_bytes else 0
        for size, _ in self.outer:
            total *= size
        return total

    def starts(self, first: int) -> list[int]:
        """Return where each run begins, in the order of the elements; the first one begins at byte `first`."""
        starts = [first] if self.run_bytes else []
        for size, stride in self.outer:
            steps = range(0, size * stride, stride)
            starts = [start + step for start in starts for step in steps]
        return starts


@lru_cache(maxsize=256)  # the pieces of a cache share a few shapes
def contiguous_runs(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Runs:
    """Return the runs of an array: together, in order, they are its elements in row-major order.

    Args:
        shape: of the array, any number of dimensions.
        strides: in elements, one per dimension.
        item_bytes: bytes per element.

    Raises:
        InvalidArgumentError: a dimension repeats the same memory, so writing to it has no meaning.
    """
    dimensions = [(size, stride * item_bytes) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(size == 0 for size, _ in dimensions):
        return Runs((), 0)
    if any(stride <= 0 for _, stride in dimensions):
        raise InvalidArgumentError(f"strides {strides} of shape {tuple(shape)} repeat memory, must be > 0")
    run_bytes = item_bytes
    while dimensions and dimensions[-1][1] == run_bytes:
        run_bytes *= dimensions.pop()[0]
    return Runs(tuple(dimensions), run_bytes)


def coalesced(bounds: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join runs (first byte, end) that follow each other in the list and in memory."""
    joined: list[tuple[int, int]] = []
    for begin, end in bounds:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined
