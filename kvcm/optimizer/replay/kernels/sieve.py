"""SIEVE: the order is when blocks came, and a hand goes round it from the oldest to the newest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_sieve"]

_ABSENT, _UNREAD, _READ = 0, 1, 2


@compiled
def _evict(older: Int32Column, newer: Int32Column, states: npt.NDArray[np.uint8], hand: int) -> int:
    """Evict one block and return where the hand rests: on the next newer block, or the end of the ring."""
    end = len(states)
    block = newer[end] if hand == end else hand
    while states[block] == _READ:
        states[block] = _UNREAD
        block = newer[block]
        if block == end:
            block = newer[end]
    before, after = older[block], newer[block]
    newer[before] = after
    older[after] = before
    states[block] = _ABSENT
    return int(after)


@compiled
def replay_sieve(requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column) -> int:
    """Replay SIEVE."""
    end = requests.unique
    newer = np.full(end + 1, end, np.int32)  # a ring that begins and ends at `end`
    older = newer.copy()
    states = np.zeros(end, np.uint8)
    hand = end
    count = objects = 0
    for request in range(len(requests.read_blocks)):
        writes = requests.writes[request]
        start = requests.offsets[request]
        reads_stop = start + requests.read_blocks[request]
        is_prefix = True
        for at in range(start, requests.offsets[request + 1] if writes else reads_stop):
            block = requests.blocks[at]
            is_hit = states[block] != _ABSENT
            is_prefix = is_prefix and is_hit
            if at < reads_stop:
                objects += is_hit
                hits[request] += is_prefix
            if is_prefix or (is_hit and writes):
                states[block] = _READ
            elif writes:
                if count == capacity and not by_request:
                    hand = _evict(older, newer, states, hand)
                    count -= 1
                newest = older[end]
                newer[newest] = older[end] = block
                older[block] = newest
                newer[block] = end
                states[block] = _UNREAD
                count += 1
        while count > capacity:
            hand = _evict(older, newer, states, hand)
            count -= 1
        resident[request] = count
    return objects
