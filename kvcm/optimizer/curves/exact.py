"""The policies that have an exact curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.recency import leaf_lru_depths, lru_depths
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["CURVES", "belady_curve", "leaf_lru_curve", "lru_curve"]

# From the depth of each access to what a replay counts at every capacity.
#
# The *depth* of an access is the smallest capacity at which it is a hit, 0 if there is none. A policy has depths if a
# larger cache always holds what a smaller one does: it is then a stack algorithm (Mattson et al. 1970).

_MOST_ACCESSES = (1 << 31) - 64


def _check_has_curve(trace: Trace, policy: str, *, needs_tree: bool = False) -> None:
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


def _counted_curve(policy: str, trace: Trace, find_depths: Callable[[Trace], Int32Column]) -> Curve:
    """Return the curve of a policy from what finds the [N] depths of its accesses."""
    _counts(_without_requests(trace), find_depths)  # so that the time measured is none of the compiler's
    begin = time.perf_counter()
    prefixes, tokens, objects, full = np.cumsum(_counts(trace, find_depths), axis=1)
    return Curve(
        policy=policy,
        prefix_blocks=prefixes,
        prefix_tokens=tokens,
        object_blocks=objects,
        full_requests=full,
        totals=trace.totals,
        seconds=time.perf_counter() - begin,
        accesses=trace.accesses,
    )


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


# The bound of every policy at every capacity in one pass: Belady's algorithm with bypass as a stack algorithm.
#
# Block by block (Mattson et al. 1970): each level of a stack holds the next access of a block, and a cache of C blocks
# holds the first C levels. The block accessed is the smallest value on the stack. It takes its new next access, leaves
# a hole, and sinks from the top: at each level the nearer next access stays and the farther one sinks on, until a hole
# takes it. Blocks without another access are holes at once: a cache is no worse for dropping them.
#
# So many levels change with each access (1,500 in a trace of agents) that this is done by the run: blocks on
# successive levels whose next accesses follow each other, which is how blocks of a prefix lie there. A run that is
# accessed in a row and comes back in a row sinks as one. What sinks is then a heap of runs, and at each level the
# least of the heap and the level stays: passing a heap once equals passing its values one after the other.
#
# The time is runs accessed times runs on the stack: 7,000 times 20 in the trace of agents. It grows with the square of
# the trace where nothing repeats in a row: 100,000 accesses to 20,000 blocks at random take seconds, and a million a
# quarter of an hour. So the steps are estimated first, and a trace that takes too many is refused and replayed
# instead.

_NEVER = 1 << 62
_MOST_STEPS = 10**9
"""Of 5 to 10 ns each."""
_TOP, _FREE = 0, 1  # nodes that hold no run: before the first level, and before the nodes that are not in use


def belady_curve(trace: Trace) -> Curve:
    """Return the exact curve of `belady` with bypass in mode block, for any ids.

    Raises:
        OptionError: the trace has requests that only read, or that are not plain, or takes too long.
    """
    _check_has_curve(trace, "belady")
    steps = _steps(trace.blocks, trace.unique_blocks)
    if steps > _MOST_STEPS:
        raise OptionError(
            f"trace: too few blocks of {trace.name!r} come again in a row: the curve of belady takes about "
            f"{steps:.1e} steps; allowed: {_MOST_STEPS:.0e}; replay belady at chosen capacities instead "
            "(kvcm.optimizer.replay)"
        )
    return _counted_curve("belady", trace, _depths_of_trace)


def _depths_of_trace(trace: Trace) -> Int32Column:
    return _belady_depths(trace.blocks, trace.unique_blocks)


@compiled
def _belady_depths(blocks: Int32Column, unique_blocks: int) -> Int32Column:
    """Return [N] the level of each accessed block just before the access, from 1 on; 0 for its first access.

    The runs on the stack are a list from the top down, of nodes with a first value and a length.
    """
    count = len(blocks)
    nexts = _next_accesses(blocks, unique_blocks)
    depths = np.zeros(count, np.int32)
    values = np.full(2 * unique_blocks + 4, _NEVER, np.int64)
    lengths = np.zeros(len(values), np.int64)
    below = np.arange(1, len(values) + 1)
    below[_TOP] = _TOP
    seen = at = 0
    while at < count:
        is_new = blocks[at] == seen  # blocks are numbered as they appear
        node, depth = _TOP, 0
        if not is_new:
            node, depth = _find(values, lengths, below, at)
        length, most = 1, count - at if is_new else lengths[node]
        step = 0 if nexts[at] == _NEVER else 1
        while (
            length < most
            and nexts[at + length] == nexts[at] + step * length
            and (not is_new or blocks[at + length] == seen + length)
        ):
            length += 1
        if is_new:
            seen += length
        else:
            depths[at : at + length] = np.arange(depth, depth + length)
        _sink(values, lengths, below, node, nexts[at], length)
        at += length
    return depths


@compiled
def _steps(blocks: Int32Column, unique_blocks: int) -> int:
    """Return the sum, over runs accessed, of the runs that are needed again at that time."""
    nexts = _next_accesses(blocks, unique_blocks)
    coming = np.zeros(len(blocks), np.bool_)  # where runs begin that come again
    needed = steps = 0
    for at in range(len(blocks)):
        needed -= coming[at]
        value, before = nexts[at], nexts[at - 1] if at else -1
        if value == before == _NEVER or value == before + 1:
            continue
        steps += needed
        if value != _NEVER:
            coming[value] = True
            needed += 1
    return steps


@compiled
def _next_accesses(blocks: Int32Column, unique_blocks: int) -> Int64Column:
    """Return [N] the number of the next access to the same block."""
    nexts = np.empty(len(blocks), np.int64)
    coming = np.full(unique_blocks, _NEVER, np.int64)
    for at in range(len(blocks) - 1, -1, -1):
        nexts[at] = coming[blocks[at]]
        coming[blocks[at]] = at
    return nexts


@compiled
def _find(values: Int64Column, lengths: Int64Column, below: Int64Column, value: int) -> tuple[int, int]:
    """Return the node of the run that begins with a value, and its first level, from 1 on."""
    node, level = below[_TOP], 1
    while values[node] != value:
        level += lengths[node]
        node = below[node]
    return node, level


@compiled
def _sink(
    values: Int64Column, lengths: Int64Column, below: Int64Column, accessed: int, value: int, length: int
) -> None:
    """Let a run sink to the place of the first blocks of the run that is accessed, which they leave; new ones, where
    `accessed` is the top, below everything."""
    sinking = [(value, length)]
    if value == _NEVER:
        sinking.pop()
    node = _TOP
    while below[node] != accessed:
        under = below[node]
        levels = lengths[under]
        if len(sinking) == 0 or values[under] < sinking[0][0]:
            node = under
        elif _changes_places(values, lengths, node, under, sinking):
            values[under], sinking[0] = sinking[0][0], (values[under], levels)
            node = under
        else:
            if values[under] != _NEVER:
                heappush(sinking, (values[under], levels))
            _remove_under(below, node)
            node = _settle(values, lengths, below, node, sinking, levels)
    if accessed != _TOP:
        values[accessed] += length
        lengths[accessed] -= length
        if lengths[accessed] == 0:
            _remove_under(below, node)
    else:
        length = 0
        for _, each in sinking:
            length += each
    node = _settle(values, lengths, below, node, sinking, length)
    under = below[node]
    if under != _TOP and _continues(values, lengths, node, values[under]):
        lengths[node] += lengths[under]
        _remove_under(below, node)


@compiled
def _changes_places(
    values: Int64Column, lengths: Int64Column, node: int, under: int, sinking: list[tuple[int, int]]
) -> bool:
    """Return whether one run sinks, as long as the one under a node, and neither ends nor continues another: the case
    of blocks that come alone, for which a heap would take five times as long."""
    value, length = sinking[0]
    is_alone = len(sinking) == 1 and length == lengths[under] and values[under] != _NEVER
    return is_alone and not _continues(values, lengths, node, value)


@compiled
def _settle(
    values: Int64Column,
    lengths: Int64Column,
    below: Int64Column,
    node: int,
    sinking: list[tuple[int, int]],
    levels: int,
) -> int:
    """Put the least of what sinks on as many levels under a node, and holes where it does not suffice; return the
    last node of them."""
    while levels > 0 and len(sinking) > 0:
        value, length = heappop(sinking)
        if length > levels:
            heappush(sinking, (value + levels, length - levels))
            length = levels
        node = _put_under(values, lengths, below, node, value, length)
        levels -= length
    return _put_under(values, lengths, below, node, _NEVER, levels) if levels > 0 else node


@compiled
def _put_under(
    values: Int64Column, lengths: Int64Column, below: Int64Column, node: int, value: int, length: int
) -> int:
    if _continues(values, lengths, node, value):
        lengths[node] += length
        return node
    fresh = int(below[_FREE])
    below[_FREE] = below[fresh]
    values[fresh], lengths[fresh] = value, length
    below[fresh], below[node] = below[node], fresh
    return fresh


@compiled
def _remove_under(below: Int64Column, node: int) -> None:
    gone = below[node]
    below[node] = below[gone]
    below[gone] = below[_FREE]
    below[_FREE] = gone


@compiled
def _continues(values: Int64Column, lengths: Int64Column, node: int, value: int) -> bool:
    """Return whether a value belongs to the run of a node, at its end; all holes do to a run of holes."""
    if node == _TOP:
        return False
    return value == _NEVER if values[node] == _NEVER else value == values[node] + lengths[node]


# Leaf LRU at every capacity in one pass.
#
# Among the leaves that lie off the current path, the one touched last by the oldest request goes. A cache of C blocks
# therefore holds after each request the first C blocks of a stack on which requests lie by age, each from its head
# down: LRU over whole requests whose blocks are touched from the tail to the head.


def leaf_lru_curve(trace: Trace) -> Curve:
    """Return the exact curve of `leaf_lru` in mode block.

    Raises:
        OptionError: the trace has requests that only read, or that are not plain, or blocks of several parents.
    """
    _check_has_curve(trace, "leaf_lru", needs_tree=True)
    return _counted_curve("leaf_lru", trace, _leaf_lru_depths)


def _leaf_lru_depths(trace: Trace) -> Int32Column:
    return leaf_lru_depths(trace.blocks, trace.offsets, trace.unique_blocks)


# LRU at every capacity in one pass.


def lru_curve(trace: Trace) -> Curve:
    """Return the exact curve of `lru` in mode block, for any ids.

    Raises:
        OptionError: the trace has requests that only read, or that are not plain.
    """
    _check_has_curve(trace, "lru")
    return _counted_curve("lru", trace, _lru_depths)


def _lru_depths(trace: Trace) -> Int32Column:
    return lru_depths(trace.blocks, trace.unique_blocks)


CURVES: Mapping[str, Callable[[Trace], Curve]] = {
    "lru": lru_curve,
    "leaf_lru": leaf_lru_curve,
    "belady": belady_curve,
}
"""By the label of the policy."""
