"""The policies as a simulator runs them: those of the live reclaimer, and two that no live cache runs."""

from __future__ import annotations

from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.replay.belady import Belady, Future
from kvcm.optimizer.replay.random_lru import RandomLru
from kvcm.reclaim.policies import Fifo, IsLeaf, LeafLru, Lfu, Lru, Policy, S3Fifo, Sieve, by_age

__all__ = ["policy_of"]


def policy_of(spec: PolicySpec, capacity: int | None, is_leaf: IsLeaf, future: Future | None = None) -> Policy:
    """Return a policy as its spec says (optimizer.md, Mode "block").

    Args:
        spec: the policy.
        capacity: of the cache in blocks; None where it has no such size of its own.
        is_leaf: asked by `leaf_lru`.
        future: that `belady` needs.
    """
    match spec.name:
        case "leaf_lru":
            return LeafLru(is_leaf)
        case "lfu":
            return Lfu(ageing=False)
        case "s3fifo":
            return S3Fifo(warmup=int(0.1 * capacity) if spec.warmup and capacity else None, blocks=capacity)
        case "ttl":
            return by_age(sliding=spec.ttl_sliding)
        case "random_lru":
            return RandomLru(spec.sample, spec.seed)
        case "belady":
            assert future is not None
            return Belady(future)
        case "sieve":
            return Sieve()
        case "fifo":
            return Fifo()
        case _:
            return Lru()
