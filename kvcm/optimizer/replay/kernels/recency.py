"""LRU, TTL with an age that counts from the last access, and leaf LRU: the order is when blocks were accessed.

The order is a ring of links in two arrays; its end is number U, and a block that is not resident is its own neighbour.
Blocks that stand together in the order of a request already, as those of a chain do from their first access on, are
renewed in one step.
"""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column, Int64Column

__all__ = ["replay_fifo", "replay_leaf_lru", "replay_lru"]


@compiled
def _push(older: Int32Column, newer: Int32Column, block: int) -> None:
    end = len(newer) - 1
    newest = older[end]
    newer[newest] = older[end] = block
    older[block] = newest
    newer[block] = end


@compiled
def _drop_oldest(older: Int32Column, newer: Int32Column) -> None:
    end = len(newer) - 1
    block = newer[end]
    after = newer[block]
    newer[end] = after
    older[after] = end
    newer[block] = block


@compiled
def _drop_aged(
    older: Int32Column, newer: Int32Column, times: Int64Column, stamps: Int32Column, oldest_time: int, count: int
) -> int:
    """Drop blocks that were accessed before a time and return how many are left."""
    while count and times[stamps[newer[-1]]] < oldest_time:
        _drop_oldest(older, newer)
        count -= 1
    return count


@compiled
def _renew_run(older: Int32Column, newer: Int32Column, first: int, last: int) -> None:
    end = len(newer) - 1
    before, after = older[first], newer[last]
    newer[before] = after
    older[after] = before
    newest = older[end]
    newer[newest] = first
    older[first] = newest
    newer[last] = end
    older[end] = last


@compiled
def _stamp(stamps: Int32Column, accessed: Int32Column, request: int) -> None:
    for block in accessed:
        stamps[block] = request


@compiled
def _run_stop(newer: Int32Column, blocks: Int32Column, start: int, stop: int) -> int:
    """Return where the resident blocks end that stand together in the order, from `start` on."""
    block = blocks[start]
    after = newer[block]
    if after == block:
        return start
    at = start + 1
    while at < stop and blocks[at] == after:
        after = newer[after]
        at += 1
    return at


@compiled
def replay_lru(
    requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column, most_age_us: int
) -> int:
    """Replay LRU; blocks that were not accessed for longer than `most_age_us` are dropped when a request arrives.

    Args:
        most_age_us: below zero for no limit.
    """
    newer = np.arange(requests.unique + 1).astype(np.int32)
    older = newer.copy()
    ages = most_age_us >= 0
    stamps = np.zeros(requests.unique if ages else 0, np.int32)  # the request of the last access
    blocks = requests.blocks
    count = objects = 0
    for request in range(len(requests.read_blocks)):
        if ages:
            oldest_time = requests.times_us[request] - most_age_us
            count = _drop_aged(older, newer, requests.times_us, stamps, oldest_time, count)
        writes = requests.writes[request]
        start = at = requests.offsets[request]
        reads_stop = at + requests.read_blocks[request]
        stop = requests.offsets[request + 1] if writes else reads_stop
        is_prefix = True
        while at < stop:
            run_stop = _run_stop(newer, blocks, at, stop)
            if run_stop > at:
                read = max(0, min(run_stop, reads_stop) - at)
                objects += read
                hits[request] += read if is_prefix else 0
                if writes or is_prefix:
                    _renew_run(older, newer, blocks[at], blocks[run_stop - 1])
                at = run_stop
                continue
            is_prefix = False
            if writes:
                if count == capacity and not by_request:
                    _drop_oldest(older, newer)
                    count -= 1
                _push(older, newer, blocks[at])
                count += 1
            at += 1
        while count > capacity:
            _drop_oldest(older, newer)
            count -= 1
        if ages:
            _stamp(stamps, blocks[start : stop if writes else start + hits[request]], request)
        resident[request] = count
    return objects


@compiled
def replay_leaf_lru(
    requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column
) -> int:
    """Replay leaf LRU: as LRU by request that touches a request from its tail to its head, in both modes.

    Every block is then newer than those that follow it, so the oldest is always a leaf.
    """
    newer = np.arange(requests.unique + 1).astype(np.int32)
    older = newer.copy()
    blocks = requests.blocks
    count = objects = 0
    for request in range(len(requests.read_blocks)):
        start = requests.offsets[request]
        is_prefix = True
        for place in range(start, start + requests.read_blocks[request]):
            is_hit = newer[blocks[place]] != blocks[place]
            is_prefix = is_prefix and is_hit
            objects += is_hit
            hits[request] += is_prefix
        stop = requests.offsets[request + 1] if requests.writes[request] else start + hits[request]
        reverse = blocks[start:stop][::-1]
        at = 0
        while at < len(reverse):
            run_stop = _run_stop(newer, reverse, at, len(reverse))
            if run_stop > at:
                _renew_run(older, newer, reverse[at], reverse[run_stop - 1])
                at = run_stop
                continue
            _push(older, newer, reverse[at])
            count += 1
            at += 1
        while count > capacity:
            _drop_oldest(older, newer)
            count -= 1
        resident[request] = count
    return objects


# FIFO, and TTL with an age that counts from the insertion: the order is when blocks came.


@compiled
def replay_fifo(
    requests: Requests, capacity: int, by_request: bool, hits: Int32Column, resident: Int32Column, most_age_us: int
) -> int:
    """Replay FIFO; blocks that came more than `most_age_us` ago are dropped when a request arrives.

    Args:
        most_age_us: below zero for no limit.
    """
    size = requests.unique
    ring = np.empty(size, np.int32)  # resident blocks, the oldest at `oldest`
    is_resident = np.zeros(size, np.bool_)
    ages = most_age_us >= 0
    stamps = np.zeros(size if ages else 0, np.int32)  # the request that inserted a place of the ring
    times = requests.times_us
    oldest = count = objects = 0
    for request in range(len(requests.read_blocks)):
        writes = requests.writes[request]
        start = requests.offsets[request]
        reads_stop = start + requests.read_blocks[request]
        stop = requests.offsets[request + 1] if writes else reads_stop
        while ages and count and times[request] - times[stamps[oldest]] > most_age_us:
            is_resident[ring[oldest]] = False
            oldest = oldest + 1 if oldest + 1 < size else 0
            count -= 1
        is_prefix = True
        for at in range(start, stop):
            block = requests.blocks[at]
            is_hit = is_resident[block]
            is_prefix = is_prefix and is_hit
            if at < reads_stop:
                objects += is_hit
                hits[request] += is_prefix
            if is_hit or not writes:
                continue
            if count == capacity and not by_request:
                is_resident[ring[oldest]] = False
                oldest = oldest + 1 if oldest + 1 < size else 0
                count -= 1
            place = oldest + count if oldest + count < size else oldest + count - size
            ring[place] = block
            is_resident[block] = True
            if ages:
                stamps[place] = request
            count += 1
        while count > capacity:
            is_resident[ring[oldest]] = False
            oldest = oldest + 1 if oldest + 1 < size else 0
            count -= 1
        resident[request] = count
    return objects
