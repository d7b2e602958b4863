"""Eviction policies by name. The live reclaimer and the simulator run the same code (design.md decision 18)."""

from __future__ import annotations

from collections.abc import Callable

from kvcm.model.groups import EvictionPolicy
from kvcm.reclaim.policies.fifo import Fifo
from kvcm.reclaim.policies.leaf_lru import LeafLru
from kvcm.reclaim.policies.lfu import Lfu
from kvcm.reclaim.policies.lru import Lru
from kvcm.reclaim.policies.policy import IsLeaf, Policy, Summary
from kvcm.reclaim.policies.s3fifo import S3Fifo
from kvcm.reclaim.policies.sieve import Sieve
from kvcm.reclaim.policies.ttl import by_age

__all__ = ["POLICIES", "Fifo", "IsLeaf", "LeafLru", "Lfu", "Lru", "Policy", "S3Fifo", "Sieve", "Summary", "by_age"]

POLICIES: dict[str, Callable[[IsLeaf, EvictionPolicy], Policy]] = {
    "fifo": lambda is_leaf, policy: Fifo(),
    "leaf_lru": lambda is_leaf, policy: LeafLru(is_leaf),
    "lfu": lambda is_leaf, policy: Lfu(ageing=False),
    "lfu_aging": lambda is_leaf, policy: Lfu(ageing=True),
    "lru": lambda is_leaf, policy: Lru(),
    "s3fifo": lambda is_leaf, policy: S3Fifo(),
    "sieve": lambda is_leaf, policy: Sieve(),
    "ttl": lambda is_leaf, policy: by_age(sliding=policy.ttl_sliding),
}
"""By name, as a live cache runs them."""
