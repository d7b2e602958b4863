"""Leaf LRU at every capacity in one pass.

Among the leaves that lie off the current path, the one touched last by the oldest request goes. A cache of C blocks
therefore holds after each request the first C blocks of a stack on which requests lie by age, each from its head down:
LRU over whole requests whose blocks are touched from the tail to the head.
"""

from __future__ import annotations

from kvcm.optimizer.curves.counting import counted_curve, refuse_what_has_no_curve
from kvcm.optimizer.curves.recency import leaf_lru_depths
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Int32Column, Trace

__all__ = ["leaf_lru_curve"]


def leaf_lru_curve(trace: Trace) -> Curve:
    """Return the exact curve of `leaf_lru` in mode block.

    Raises:
        OptionError: the trace has requests that only read, or that are not plain, or blocks of several parents.
    """
    refuse_what_has_no_curve(trace, "leaf_lru", needs_tree=True)
    return counted_curve("leaf_lru", trace, _depths)


def _depths(trace: Trace) -> Int32Column:
    return leaf_lru_depths(trace.blocks, trace.offsets, trace.unique_blocks)
