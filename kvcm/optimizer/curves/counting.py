"""From the depth of each access to what a replay counts at every capacity.

The *depth* of an access is the smallest capacity at which it is a hit, 0 if there is none. A policy has depths if a
larger cache always holds what a smaller one does: it is then a stack algorithm (Mattson et al. 1970).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["counted_curve", "refuse_what_has_no_curve"]

_MOST_ACCESSES = (1 << 31) - 64


def refuse_what_has_no_curve(trace: Trace, policy: str, *, needs_tree: bool = False) -> None:
    """Do nothing if one pass over a trace gives the exact curve of a policy.

    Requests that write and read nothing, or less than they write, have one. Those that only read have none: what they
    touch depends on the capacity, and so does the order in which blocks leave thereafter.

    Raises:
        OptionError: it does not; the message says what does.
    """
    instead = f"; replay {policy} at chosen capacities instead (kvcm.optimizer.replay)"
    if not trace.is_plain:
        instead = "; replay it as groups instead (kvcm.optimizer.groups)"
        raise OptionError(
            f"trace: {trace.name!r} has requests with query modes, masks or location specs; allowed in the curve of "
            f"{policy}: plain prefix reads{instead}"
        )
    readers = int(np.count_nonzero(~trace.writes))
    if readers:
        raise OptionError(
            f"trace: {readers} requests of {trace.name!r} read without writing; allowed in the curve of {policy}: "
            f"requests that write{instead}"
        )
    if needs_tree and not trace.has_one_parent:
        raise OptionError(
            f"trace: blocks of {trace.name!r} follow several others; allowed in the curve of {policy}: one parent "
            f"per block{instead}"
        )
    if trace.accesses > _MOST_ACCESSES:
        raise OptionError(f"trace: {trace.name!r} has {trace.accesses} block accesses; allowed: {_MOST_ACCESSES}")


def counted_curve(policy: str, trace: Trace, find_depths: Callable[[Trace], Int32Column]) -> Curve:
    """Return the curve of a policy from what finds the [N] depths of its accesses."""
    _counts(_without_requests(trace), find_depths)  # so that the time measured is none of the compiler's
    begin = time.perf_counter()
    prefixes, tokens, objects, full = np.cumsum(_counts(trace, find_depths), axis=1)
    return Curve(policy, prefixes, tokens, objects, full, trace.totals, time.perf_counter() - begin, trace.accesses)


def _without_requests(trace: Trace) -> Trace:
    return replace(trace, offsets=trace.offsets[:1], blocks=trace.blocks[:0], parents=trace.parents[:0])


def _counts(trace: Trace, find_depths: Callable[[Trace], Int32Column]) -> Int64Column:
    return _count(
        find_depths(trace),
        trace.offsets,
        trace.read_blocks,
        trace.input_tokens,
        trace.tokens_per_block(),
        trace.unique_blocks,
    )


@compiled
def _count(
    depths: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    input_tokens: Int64Column,
    tokens_per_block: Int64Column,
    unique_blocks: int,
) -> Int64Column:
    """Return [4, U + 1] how many more prefix blocks, prefix tokens, object hits and full requests each capacity has
    than the one below it.

    A block is a prefix hit where it and all blocks before it are resident, at the greatest of their depths.
    """
    counts = np.zeros((4, unique_blocks + 1), np.int64)
    prefixes, tokens, objects, full = counts[0], counts[1], counts[2], counts[3]
    for request in range(len(offsets) - 1):
        begin = offsets[request]
        end = begin + read_blocks[request]
        for at in range(begin, end):
            objects[depths[at]] += 1
        greatest, size, length, at = 0, tokens_per_block[request], input_tokens[request], begin
        while at < end and depths[at] > 0:
            greatest, first = depths[at], at
            while at < end and 0 < depths[at] <= greatest:
                at += 1
            prefixes[greatest] += at - first
            tokens[greatest] += min((at - begin) * size, length) - min((first - begin) * size, length)
        if at == end > begin:
            full[greatest] += 1
    objects[0] = 0
    return counts
