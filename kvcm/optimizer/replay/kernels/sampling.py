"""Random LRU: of some blocks drawn at random the one goes that was not accessed for longest."""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_random_lru"]

_NEVER = np.iinfo(np.int32).max
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


@compiled
def _draw(state: np.uint64, count: int) -> int:
    """Return a place of `count`, drawn by `splitmix64`."""
    mixed = (state ^ state >> np.uint64(30)) * _FIRST_FACTOR
    mixed = (mixed ^ mixed >> np.uint64(27)) * _SECOND_FACTOR
    mixed ^= mixed >> np.uint64(31)
    return int((mixed >> np.uint64(32)) * np.uint64(count) >> np.uint64(32))


@compiled
def _evict(
    slots: Int32Column, places: Int32Column, stamps: Int32Column, count: int, sample: int, state: np.uint64
) -> np.uint64:
    """Evict one of the first `count` slots and return the state of the generator."""
    victim, oldest = -1, _NEVER
    for _ in range(sample):
        state += _STEP
        block = slots[_draw(state, count)]
        stamp = stamps[block]
        victim = block if stamp < oldest else victim
        oldest = min(oldest, stamp)
    last = slots[count - 1]
    slots[places[victim]] = last
    places[last] = places[victim]
    places[victim] = -1
    return state


@compiled
def replay_random_lru(
    requests: Requests,
    capacity: int,
    by_request: bool,
    hits: Int32Column,
    resident: Int32Column,
    sample: int,
    seed: int,
) -> int:
    """Replay LRU by sampling."""
    slots = np.empty(requests.unique, np.int32)  # resident blocks
    places = np.full(requests.unique, -1, np.int32)  # of blocks in `slots`
    stamps = np.empty(requests.unique, np.int32)  # position of the last access
    state = np.uint64(seed)
    count = objects = 0
    for request in range(len(requests.read_blocks)):
        writes = requests.writes[request]
        start = requests.offsets[request]
        reads_stop = start + requests.read_blocks[request]
        is_prefix = True
        for at in range(start, requests.offsets[request + 1] if writes else reads_stop):
            block = requests.blocks[at]
            is_hit = places[block] >= 0
            is_prefix = is_prefix and is_hit
            if at < reads_stop:
                objects += is_hit
                hits[request] += is_prefix
            if writes and not is_hit:
                if count == capacity and not by_request:
                    state = _evict(slots, places, stamps, count, sample, state)
                    count -= 1
                slots[count] = block
                places[block] = count
                count += 1
            if writes or is_prefix:
                stamps[block] = at
        while count > capacity:
            state = _evict(slots, places, stamps, count, sample, state)
            count -= 1
        resident[request] = count
    return objects
