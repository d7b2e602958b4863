"""LFU: the order is how often blocks were accessed since they came, then when. With ageing (LFU-DA, as
`kvcm.reclaim.policies.lfu` describes it) it is that number and an allowance: the worth of the last block evicted.

One ring of links holds the blocks of one frequency (one worth) together, and a table knows the newest of each: a block
whose frequency grows by one moves to the next group, or stays if it is the last of its own and there is no next. With
ageing it may move over many groups.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_lfu", "replay_lfu_aging"]

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


# With ageing. An allowance is the worth of a victim, which no resident block is below: so an insert goes to the second
# of the groups that may exist, and only a touched block looks for its place, downwards from its new worth.


@compiled
def _place(older: Int32Column, newer: Int32Column, worths: Int32Column, newest: Int32Column, block: int) -> None:
    """Put a block behind those of its worth, or of the next lower one that some block has."""
    worth = worths[block]
    below = worth
    while below > 0 and newest[below] == _NONE:
        below -= 1
    after = newest[below] - 1 if below > 0 else len(newer) - 1
    behind = newer[after]
    older[block] = after
    newer[block] = behind
    newer[after] = older[behind] = block
    newest[worth] = block + 1


@compiled
def _take_out(older: Int32Column, newer: Int32Column, worths: Int32Column, newest: Int32Column, block: int) -> None:
    after, behind = older[block], newer[block]
    if newest[worths[block]] == block + 1:
        newest[worths[block]] = after + 1 if worths[after] == worths[block] else _NONE
    newer[after] = behind
    older[behind] = after


@compiled
def _evict_worth(
    older: Int32Column, newer: Int32Column, counts: Int32Column, worths: Int32Column, newest: Int32Column
) -> int:
    """Take the oldest block of the least worth out and return its worth."""
    victim = newer[len(newer) - 1]
    _take_out(older, newer, worths, newest, victim)
    counts[victim] = 0
    return int(worths[victim])


@compiled
def replay_lfu_aging(
    requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column
) -> int:
    """Replay LFU with ageing."""
    end = requests.unique
    newer = np.full(end + 1, end, np.int32)  # a ring that begins and ends at `end`
    older = newer.copy()
    counts = np.zeros(end + 1, np.int32)  # accesses since the insert, which is one; 0 of what is not resident
    worths = np.zeros(end + 1, np.int32)  # 0 at `end`
    most = 2 * len(requests.blocks) + 1
    newest = np.zeros(most + 1, np.int32)  # by worth, the block's number + 1
    count = objects = allowance = 0
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
            if not is_prefix and not writes:
                continue
            if is_hit:
                _take_out(older, newer, worths, newest, block)
            else:
                if count == capacity and not by_request:
                    allowance = _evict_worth(older, newer, counts, worths, newest)
                    count -= 1
                count += 1
            counts[block] += 1
            worths[block] = min(counts[block] + allowance, most)
            _place(older, newer, worths, newest, block)
        while count > capacity:
            allowance = _evict_worth(older, newer, counts, worths, newest)
            count -= 1
        resident[request] = count
    return objects
