"""Belady: the order is when blocks are needed next.

A resident block that is needed again is kept as the position of its next access, which no other block has, in a set of
positions: words of 64 bits, and above them levels of bits that say which words below are not empty. An access is a hit
if its own position is in the set. Blocks that are not needed again have no position; it is enough to count them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_belady"]

Words = npt.NDArray[np.uint64]

_ONE = np.uint64(1)
_EMPTY = np.uint64(0)


@compiled
def _levels(positions: int) -> npt.NDArray[np.int64]:
    """Return where each level begins among the words, the lowest first, and their number at last."""
    starts = [0]
    width = positions
    while True:
        width = (width + 63) >> 6
        starts.append(starts[-1] + width)
        if width <= 1:
            return np.array(starts)


@compiled
def _add(words: Words, starts: npt.NDArray[np.int64], position: int) -> None:
    for level in range(len(starts) - 1):
        word = starts[level] + (position >> 6)
        was_empty = words[word] == _EMPTY
        words[word] |= _ONE << np.uint64(position & 63)
        if not was_empty:
            return
        position >>= 6


@compiled
def _discard(words: Words, starts: npt.NDArray[np.int64], position: int) -> None:
    for level in range(len(starts) - 1):
        word = starts[level] + (position >> 6)
        words[word] &= ~(_ONE << np.uint64(position & 63))
        if words[word] != _EMPTY:
            return
        position >>= 6


@compiled
def _last(words: Words, starts: npt.NDArray[np.int64]) -> int:
    """Return the greatest position; there is one."""
    position = 0
    for level in range(len(starts) - 2, -1, -1):
        word = words[starts[level] + position]
        position <<= 6
        for width in (32, 16, 8, 4, 2, 1):
            if word >> np.uint64(width):
                word >>= np.uint64(width)
                position += width
    return position


@compiled
def _evict(words: Words, starts: npt.NDArray[np.int64], unneeded: int) -> int:
    """Evict the block that is needed last and return how many are left of those that are not needed again."""
    if unneeded:
        return unneeded - 1
    _discard(words, starts, _last(words, starts))
    return 0


@compiled
def _next_accesses(requests: Requests) -> npt.NDArray[np.int64]:
    """Return [N] the position of the next access of the same block, N if there is none."""
    never = len(requests.blocks)
    found = np.empty(never, np.int64)
    ahead = np.full(requests.unique, never, np.int64)
    for request in range(len(requests.read_blocks) - 1, -1, -1):
        start = requests.offsets[request]
        stop = requests.offsets[request + 1] if requests.writes[request] else start + requests.read_blocks[request]
        for at in range(stop - 1, start - 1, -1):
            block = requests.blocks[at]
            found[at] = ahead[block]
            ahead[block] = at
    return found


@compiled
def replay_belady(
    requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column, bypass: bool
) -> int:
    """Replay Belady's algorithm.

    Args:
        bypass: whether a missed block that is needed last is not inserted, in mode block.
    """
    next_accesses = _next_accesses(requests)
    never = len(requests.blocks)
    starts = _levels(never)
    words = np.zeros(starts[-1], np.uint64)
    count = unneeded = objects = 0
    for request in range(len(requests.read_blocks)):
        writes = requests.writes[request]
        start = requests.offsets[request]
        reads_stop = start + requests.read_blocks[request]
        is_prefix = True
        for at in range(start, requests.offsets[request + 1] if writes else reads_stop):
            next_access = next_accesses[at]
            is_hit = words[at >> 6] >> np.uint64(at & 63) & _ONE != _EMPTY
            is_prefix = is_prefix and is_hit
            if at < reads_stop:
                objects += is_hit
                hits[request] += is_prefix
            if is_hit:
                _discard(words, starts, at)
            elif not writes:
                continue
            elif by_request or count < capacity:
                count += 1
            elif bypass and next_access >= (never if unneeded else _last(words, starts)):
                continue
            else:
                unneeded = _evict(words, starts, unneeded)
            if next_access == never:
                unneeded += 1
            else:
                _add(words, starts, next_access)
        while count > capacity:
            unneeded = _evict(words, starts, unneeded)
            count -= 1
        resident[request] = count
    return objects
