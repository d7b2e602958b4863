"""S3-FIFO: new blocks queue in *small*, those that are read twice get into *main*, and names that left are remembered.

A block is in one of four queues: small, main, the ghost, which holds names of blocks that are not resident, or nowhere.
They are rings over the same links; their ends are the numbers from U on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_s3fifo"]

_NOWHERE, _SMALL, _MAIN, _GHOST = 0, 1, 2, 3
_MOST_READS = 3
_READS_FOR_MAIN = 2

Bytes = npt.NDArray[np.uint8]


@compiled
def _move(older: Int32Column, newer: Int32Column, queues: Bytes, lengths: Int32Column, block: int, queue: int) -> None:
    """Make a block the newest of a queue."""
    before, after = older[block], newer[block]
    newer[before] = after
    older[after] = before
    end = len(queues) + queue
    newest = older[end]
    newer[newest] = older[end] = block
    older[block] = newest
    newer[block] = end
    lengths[queues[block]] -= 1
    lengths[queue] += 1
    queues[block] = queue


@compiled
def _evict(
    older: Int32Column, newer: Int32Column, queues: Bytes, lengths: Int32Column, reads: Bytes, capacity: int
) -> None:
    """Evict one block: out of small as long as main has no more than its share."""
    small_end, main_end = len(queues) + _SMALL, len(queues) + _MAIN
    if lengths[_MAIN] <= capacity - int(0.1 * capacity):
        while lengths[_SMALL] and reads[newer[small_end]] >= _READS_FOR_MAIN:
            reads[newer[small_end]] = 0
            _move(older, newer, queues, lengths, newer[small_end], _MAIN)
        from_small = lengths[_SMALL] > 0
    else:
        from_small = False
    while not from_small and reads[newer[main_end]]:
        reads[newer[main_end]] -= 1
        _move(older, newer, queues, lengths, newer[main_end], _MAIN)
    victim = newer[small_end if from_small else main_end]
    reads[victim] = 0
    _move(older, newer, queues, lengths, victim, _GHOST if from_small else _NOWHERE)


@compiled
def replay_s3fifo(
    requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column, warmup: bool
) -> int:
    """Replay S3-FIFO.

    Args:
        warmup: whether new blocks go to main once small is full, until the first eviction ever.
    """
    newer = np.arange(1, requests.unique + 5).astype(np.int32)
    older = np.arange(-1, requests.unique + 3).astype(np.int32)
    newer[requests.unique], older[0] = 0, requests.unique  # all blocks are nowhere
    for end in range(requests.unique + _SMALL, requests.unique + _GHOST + 1):
        newer[end] = older[end] = end
    queues = np.zeros(requests.unique, np.uint8)
    reads = np.zeros(requests.unique, np.uint8)
    lengths = np.array([requests.unique, 0, 0, 0], np.int32)
    small_size, ghost_size = int(0.1 * capacity), int(0.9 * capacity)
    objects = 0
    for request in range(len(requests.read_blocks)):
        writes = requests.writes[request]
        start = requests.offsets[request]
        reads_stop = start + requests.read_blocks[request]
        is_prefix = True
        for at in range(start, requests.offsets[request + 1] if writes else reads_stop):
            block = requests.blocks[at]
            is_hit = queues[block] == _SMALL or queues[block] == _MAIN
            is_prefix = is_prefix and is_hit
            if at < reads_stop:
                objects += is_hit
                hits[request] += is_prefix
            if is_prefix or (is_hit and writes):
                reads[block] = min(reads[block] + 1, _MOST_READS)
            elif writes:
                if lengths[_SMALL] + lengths[_MAIN] == capacity and not by_request:
                    _evict(older, newer, queues, lengths, reads, capacity)
                    warmup = False
                # A name that this eviction made may still push out an older one, but not the one that is asked for.
                came_back = queues[block] == _GHOST
                is_warming_up = warmup and lengths[_SMALL] >= small_size
                _move(older, newer, queues, lengths, block, _MAIN if came_back or is_warming_up else _SMALL)
                while lengths[_GHOST] > ghost_size:
                    _move(older, newer, queues, lengths, newer[requests.unique + _GHOST], _NOWHERE)
        while lengths[_SMALL] + lengths[_MAIN] > capacity:
            _evict(older, newer, queues, lengths, reads, capacity)
            warmup = False
        resident[request] = lengths[_SMALL] + lengths[_MAIN]
    return objects
