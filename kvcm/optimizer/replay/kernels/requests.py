"""What kernels see of a trace."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Trace

__all__ = ["Requests", "requests_of"]

Scalar = TypeVar("Scalar", bound=np.generic)


class Requests(NamedTuple):
    """Columns of a trace, of always the same types, so that each kernel is compiled once.

    Attributes:
        unique: U.
        times_us, offsets, blocks, read_blocks, writes: as in `Trace`.
    """

    unique: int
    times_us: Int64Column
    offsets: Int64Column
    blocks: Int32Column
    read_blocks: Int32Column
    writes: BoolColumn


def requests_of(trace: Trace) -> Requests:
    """Return the columns of a trace, without copies where they are as a trace says."""
    return Requests(
        unique=trace.unique_blocks,
        times_us=_column(trace.times_us, np.int64),
        offsets=_column(trace.offsets, np.int64),
        blocks=_column(trace.blocks, np.int32),
        read_blocks=_column(trace.read_blocks, np.int32),
        writes=_column(trace.writes, np.bool_),
    )


def _column(values: npt.NDArray[Scalar], kind: type[Scalar]) -> npt.NDArray[Scalar]:
    """Return a view that cannot be written: what is mapped from a file cannot either, and would be another type."""
    column = np.ascontiguousarray(values, kind).view(np.ndarray)
    column.flags.writeable = False
    return column
