"""LRU at every capacity in one pass."""

from __future__ import annotations

from kvcm.optimizer.curves.counting import counted_curve, refuse_what_has_no_curve
from kvcm.optimizer.curves.recency import lru_depths
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Int32Column, Trace

__all__ = ["lru_curve"]


def lru_curve(trace: Trace) -> Curve:
    """Return the exact curve of `lru` in mode block, for any ids.

    Raises:
        OptionError: the trace has requests that only read, or that are not plain.
    """
    refuse_what_has_no_curve(trace, "lru")
    return counted_curve("lru", trace, _depths)


def _depths(trace: Trace) -> Int32Column:
    return lru_depths(trace.blocks, trace.unique_blocks)
