"""FIFO, and TTL with an age that counts from the insertion: the order is when blocks came."""

from __future__ import annotations

import numpy as np

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.replay.kernels.requests import Requests
from kvcm.optimizer.trace import Int32Column

__all__ = ["replay_fifo"]


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
