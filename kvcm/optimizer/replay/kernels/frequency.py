"""LFU: the order is how often blocks were accessed since they came, then when.

One ring of links holds the blocks of one frequency together, and a table knows the newest of each frequency: a block
whose frequency grows by one moves to the next group, or stays if it is the last of its own and there is no next.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_lfu"]

_NONE = 0


@compiled
def _add(older: Int32Column, newer: Int32Column, newest: Int32Column, block: int) -> None:
    """Put a block into the first group."""
    after = newest[1] - 1 if newest[1] != _NONE else len(newer) - 1
    behind = newer[after]
    older[block] = after
    newer[block] = behind
    newer[after] = older[behind] = block
    newest[1] = block + 1


@compiled
def _touch(older: Int32Column, newer: Int32Column, counts: Int32Column, newest: Int32Column, block: int) -> None:
    """Move a block to the next group."""
    frequency = counts[block]
    after, behind = older[block], newer[block]
    next_group = newest[frequency + 1]
    is_last = newest[frequency] == block + 1
    if is_last:
        newest[frequency] = after + 1 if counts[after] == frequency else _NONE
    if next_group != _NONE or not is_last:
        newer[after] = behind
        older[behind] = after
        after = (newest[frequency] if next_group == _NONE else next_group) - 1
        behind = newer[after]
        newer[after] = older[behind] = block
    older[block] = after
    newer[block] = behind
    counts[block] = frequency + 1
    newest[frequency + 1] = block + 1


@compiled
def _evict(older: Int32Column, newer: Int32Column, counts: Int32Column, newest: Int32Column) -> None:
    """Take the oldest block of the first group out."""
    end = len(newer) - 1
    block = newer[end]
    group = newest[counts[block]]
    newest[counts[block]] = _NONE if group == block + 1 else group
    behind = newer[block]
    newer[end] = behind
    older[behind] = end
    counts[block] = 0


@compiled
def replay_lfu(requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column) -> int:
    """Replay LFU without ageing."""
    end = requests.unique
    newer = np.full(end + 1, end, np.int32)  # a ring that begins and ends at `end`
    older = newer.copy()
    counts = np.zeros(end + 1, np.int32)  # accesses since the insert, which is one; 0 of what is not resident
    newest = np.zeros(len(requests.blocks) + 2, np.int32)  # by frequency, the block's number + 1
    count = objects = 0
    for request in range(len(requests.read_blocks)):
        writes = requests.writes[request]
        start = requests.offsets[request]
        reads_stop = start + requests.read_blocks[request]
        is_prefix = True
        for at in range(start, requests.offsets[request + 1] if writes else reads_stop):
            block = requests.blocks[at]
            is_hit = counts[block] > 0
            is_prefix = is_prefix and is_hit
            if at < reads_stop:
                objects += is_hit
                hits[request] += is_prefix
            if is_prefix or (is_hit and writes):
                _touch(older, newer, counts, newest, block)
            elif writes:
                if count == capacity and not by_request:
                    _evict(older, newer, counts, newest)
                    count -= 1
                _add(older, newer, newest, block)
                counts[block] = 1
                count += 1
        while count > capacity:
            _evict(older, newer, counts, newest)
            count -= 1
        resident[request] = count
    return objects
