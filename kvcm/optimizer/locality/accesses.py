"""Each access of a trace beside the access of the same block before it: what all of these statistics are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Trace

__all__ = ["Accesses", "accesses_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Accesses:
    """Accesses in the order of their replay.

    Attributes:
        requests: [N] the request of each.
        previous: [N] the access of the same block before it, -1 for its first.
        is_read: [N] whether the request reads the block; the others only write it.
        times_us: [N] of the request.
    """

    requests: Int32Column
    previous: Int64Column
    is_read: BoolColumn
    times_us: Int64Column

    @property
    def reuses(self) -> Int64Column:
        """Return the reads of blocks that were accessed before."""
        return np.flatnonzero(self.is_read & (self.previous >= 0))


def accesses_of(trace: Trace) -> Accesses:
    """Return the accesses of a trace, beside those before them."""
    lengths = np.diff(trace.offsets)
    requests = np.repeat(np.arange(len(trace), dtype=np.int32), lengths)
    places = np.arange(trace.accesses) - np.repeat(trace.offsets[:-1], lengths)
    is_read = places < np.repeat(trace.read_blocks, lengths)
    return Accesses(requests, _previous(trace.blocks), is_read, trace.times_us[requests])


def _previous(blocks: Int32Column) -> Int64Column:
    order = np.argsort(blocks, kind="stable")
    is_again = np.concatenate([[False], blocks[order[1:]] == blocks[order[:-1]]])[: len(blocks)]
    previous = np.full(len(blocks), -1, np.int64)
    again = np.flatnonzero(is_again)
    previous[order[again]] = order[again - 1]
    return previous
