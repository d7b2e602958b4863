"""Watermarks: the usage above which eviction begins, and down to which it goes. Pure arithmetic.

A watermark is a ratio of a hard limit. Eviction begins above `high` and ends at `low`, the hysteresis below it. A ratio
above 1, or an unset one, disables the watermark. At least one block always fits between a watermark and its limit, so
that no write is rejected while eviction can help.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcm.model.groups import DEFAULT_HYSTERESIS, DEFAULT_WATERMARK, GlobalQuota, InstanceGroup
from kvcm.model.storages import StorageConfig, StorageType

__all__ = [
    "Watermark",
    "global_watermark",
    "group_watermark",
    "key_watermark",
    "size_watermark",
    "storage_watermark",
    "type_watermark",
]


class Watermark(NamedTuple):
    """A limit with its watermarks, in bytes or in blocks.

    Attributes:
        capacity: the hard limit.
        high: above this, eviction begins.
        low: down to this it goes.
    """

    capacity: int
    high: int
    low: int

    def excess(self, used: int, *, is_active: bool = False) -> int:
        """Return how much must be evicted at some usage: the excess above `low`, once `high` was crossed."""
        return used - self.low if used > (self.low if is_active else self.high) else 0


def _ratio_watermark(capacity: int, ratio: float, hysteresis: float | None, block: int = 0) -> Watermark | None:
    """Return the watermark at a ratio of a limit, None when it is off.

    Args:
        capacity: the limit.
        ratio: 0 is unset, above 1 is off.
        hysteresis: ratio below that; None is the default.
        block: what the largest block takes of the limit.
    """
    if not 0 < ratio <= 1:
        return None
    below = DEFAULT_HYSTERESIS if hysteresis is None else hysteresis
    high = max(0, min(_part(capacity, ratio), capacity - block))
    return Watermark(capacity, high, min(high, _part(capacity, max(0.0, ratio - below))))


def group_watermark(group: InstanceGroup, block: int = 0) -> Watermark | None:
    """Return the watermark of a group's total bytes."""
    trigger = group.cache_config.reclaim_strategy.trigger_strategy
    return _ratio_watermark(group.quota.capacity, trigger.used_percentage, trigger.hysteresis, block)


def type_watermark(group: InstanceGroup, storage_type: StorageType, block: int = 0) -> Watermark | None:
    """Return the watermark of a group's bytes on one storage type, None when that has no limit of its own."""
    capacity = group.quota.capacity_of(storage_type)
    trigger = group.cache_config.reclaim_strategy.trigger_strategy
    return None if capacity is None else _ratio_watermark(capacity, trigger.used_percentage, trigger.hysteresis, block)


def size_watermark(group: InstanceGroup) -> Watermark | None:
    """Return the watermark of a group in absolute bytes."""
    trigger = group.cache_config.reclaim_strategy.trigger_strategy
    size = trigger.used_size
    below = DEFAULT_HYSTERESIS if trigger.hysteresis is None else trigger.hysteresis
    return Watermark(group.quota.capacity, size, _part(size, 1 - below)) if size > 0 else None


def key_watermark(group: InstanceGroup, max_key_count: int) -> Watermark | None:
    """Return the watermark of the blocks of one instance, None when their number is not limited."""
    trigger = group.cache_config.reclaim_strategy.trigger_strategy
    if not group.cache_config.meta_indexer_config.max_key_count:
        return None
    return _ratio_watermark(
        capacity=max_key_count, ratio=trigger.used_percentage, hysteresis=trigger.hysteresis, block=1
    )


def storage_watermark(storage: StorageConfig, block: int = 0) -> Watermark | None:
    """Return the watermark of all bytes on a storage, None when it has no capacity of its own."""
    if not storage.limit_bytes:
        return None
    return _ratio_watermark(
        capacity=storage.limit_bytes, ratio=storage.used_percentage or DEFAULT_WATERMARK, hysteresis=None, block=block
    )


def global_watermark(quota: GlobalQuota, block: int = 0) -> Watermark | None:
    """Return the watermark of all groups of one `global_quota_group_name` together."""
    return _ratio_watermark(
        capacity=quota.capacity_bytes, ratio=quota.used_percentage or DEFAULT_WATERMARK, hysteresis=None, block=block
    )


def _part(whole: int, ratio: float) -> int:
    return int(whole * ratio + 1e-6)  # 0.8 of 10 is 8, whatever floats say
