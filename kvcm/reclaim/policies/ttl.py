"""TTL: blocks expire at an age, whether there is space or not."""

from __future__ import annotations

from kvcm.reclaim.policies.fifo import Fifo
from kvcm.reclaim.policies.lru import Lru
from kvcm.reclaim.policies.policy import Policy

__all__ = ["by_age"]


def by_age(*, sliding: bool) -> Policy:
    """Return an order in which blocks expire at an age.

    The caller knows the time and removes expired blocks. Where space is short the same order holds: an age since the
    last read is the order of LRU, an age since the write that of FIFO.

    Args:
        sliding: whether age counts from the last read instead of the write.
    """
    return Lru() if sliding else Fifo()
