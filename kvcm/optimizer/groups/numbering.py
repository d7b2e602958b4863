"""Numbers of blocks within their own instance, so that the columns of an instance are as long as it has blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvcm.optimizer.trace import Int32Column, Trace

__all__ = ["Numbering"]


@dataclass(frozen=True, slots=True, eq=False)
class Numbering:
    """Blocks by instance; a number within an instance goes by first appearance as well.

    Attributes:
        blocks: [N] the accesses of the trace, in numbers of the instance of each.
        parents: for each instance of the trace, the block before each of its blocks; -1 for the first of a chain.
    """

    blocks: Int32Column
    parents: tuple[Int32Column, ...]

    @classmethod
    def of(cls, trace: Trace) -> Numbering:
        """Return the numbers of a trace."""
        lengths = np.diff(trace.offsets)
        owners = np.zeros(trace.unique_blocks, np.int32)
        owners[trace.blocks] = np.repeat(trace.instances, lengths)
        order = np.argsort(owners, kind="stable")
        starts = np.searchsorted(owners[order], np.arange(len(trace.instance_names) + 1))
        numbers = np.empty(trace.unique_blocks, np.int32)
        numbers[order] = np.arange(trace.unique_blocks, dtype=np.int32) - starts[owners[order]].astype(np.int32)
        parents = np.where(trace.parents >= 0, numbers[trace.parents], -1).astype(np.int32)
        ranges = pairwise(starts)
        return cls(numbers[trace.blocks], tuple(parents[order[start:end]] for start, end in ranges))
