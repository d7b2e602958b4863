"""The bound of every policy at every capacity in one pass: Belady's algorithm with bypass as a stack algorithm.

Block by block (Mattson et al. 1970): each level of a stack holds the next access of a block, and a cache of C blocks
holds the first C levels. The block accessed is the smallest value on the stack. It takes its new next access, leaves a
hole, and sinks from the top: at each level the nearer next access stays and the farther one sinks on, until a hole
takes it. Blocks without another access are holes at once: a cache is no worse for dropping them.

So many levels change with each access (1,500 in a trace of agents) that this is done by the run: blocks on successive
levels whose next accesses follow each other, which is how blocks of a prefix lie there. A run that is accessed in a row
and comes back in a row sinks as one. What sinks is then a heap of runs, and at each level the least of the heap and
the level stays: passing a heap once equals passing its values one after the other.

The time is runs accessed times runs on the stack: 7,000 times 20 in the trace of agents. It grows with the square of
the trace where nothing repeats in a row: 100,000 accesses to 20,000 blocks at random take seconds, and a million a
quarter of an hour. So the steps are estimated first, and a trace that takes too many is refused and replayed instead.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.curves.counting import counted_curve, refuse_what_has_no_curve
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["belady_curve"]

_NEVER = 1 << 62
_MOST_STEPS = 10**9
"""Of 5 to 10 ns each."""
_TOP, _FREE = 0, 1  # nodes that hold no run: before the first level, and before the nodes that are not in use


def belady_curve(trace: Trace) -> Curve:
    """Return the exact curve of `belady` with bypass in mode block, for any ids.

    Raises:
        OptionError: the trace has requests that only read, or that are not plain, or takes too long.
    """
    refuse_what_has_no_curve(trace, "belady")
    steps = _steps(trace.blocks, trace.unique_blocks)
    if steps > _MOST_STEPS:
        raise OptionError(
            f"trace: too few blocks of {trace.name!r} come again in a row: the curve of belady takes about "
            f"{steps:.1e} steps; allowed: {_MOST_STEPS:.0e}; replay belady at chosen capacities instead "
            "(kvcm.optimizer.replay)"
        )
    return counted_curve("belady", trace, _depths)


def _depths(trace: Trace) -> Int32Column:
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
        room = lengths[under]
        if len(sinking) == 0 or values[under] < sinking[0][0]:
            node = under
        elif _changes_places(values, lengths, node, under, sinking):
            values[under], sinking[0] = sinking[0][0], (values[under], room)
            node = under
        else:
            if values[under] != _NEVER:
                heappush(sinking, (values[under], room))
            _remove_under(below, node)
            node = _settle(values, lengths, below, node, sinking, room)
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
    values: Int64Column, lengths: Int64Column, below: Int64Column, node: int, sinking: list[tuple[int, int]], room: int
) -> int:
    """Put the least of what sinks on as many levels under a node, and holes where it does not suffice; return the
    last node of them."""
    while room > 0 and len(sinking) > 0:
        value, length = heappop(sinking)
        if length > room:
            heappush(sinking, (value + room, length - room))
            length = room
        node = _put_under(values, lengths, below, node, value, length)
        room -= length
    return _put_under(values, lengths, below, node, _NEVER, room) if room > 0 else node


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
