"""Age: blocks leave when they are too old, whether there is room or not.

The caller knows the time and drops what is too old; for want of room the same order holds: an age that counts from the
last read is LRU's order, one that counts from the write FIFO's.
"""

from __future__ import annotations

from kvcm.reclaim.policies.fifo import Fifo
from kvcm.reclaim.policies.lru import Lru
from kvcm.reclaim.policies.policy import Policy

__all__ = ["by_age"]


def by_age(*, sliding: bool) -> Policy:
    """Return the order by age.

    Args:
        sliding: whether age counts from the last read instead of the write.
    """
    return Lru() if sliding else Fifo()
