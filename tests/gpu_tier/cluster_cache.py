"""The rule of RetroInfer's block cache in plain Python, to compare the wave buffer with.

Clusters are admitted and given up whole, in blocks; one that is larger than the cache is never admitted, and what a
step uses is not given up in that step. Missed clusters are admitted in the order of the selection while there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_tier.errors import ConfigError

__all__ = ["ClusterCache"]

_POLICIES = ("lru", "lfu", "fifo")


class ClusterCache:
    """The cache of one request, layer and head.

    Args:
        blocks: of each cluster.
        capacity: blocks that fit.
        policy: which clusters are given up: those used longest ago (lru), least often (lfu) or admitted first (fifo).

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(self, blocks: Sequence[int], capacity: int, policy: str = "lru") -> None:
        if policy not in _POLICIES:
            raise ConfigError.choice("policy", policy, _POLICIES)
        self._blocks, self._capacity, self._policy = blocks, capacity, policy
        self._cached: dict[int, int] = {}  # number of uses, in the order in which clusters are given up by lru and fifo
        self._used_blocks = 0

    def step(self, clusters: Sequence[int]) -> tuple[set[int], int]:
        """Look clusters up, then update the cache.

        Returns:
            Those that were cached, and how many were admitted.
        """
        hits = {cluster for cluster in clusters if cluster in self._cached}
        for cluster in clusters:
            if cluster in hits:
                self._use(cluster)
        in_use = set(clusters)
        return hits, sum(self._admit(cluster, in_use) for cluster in clusters if cluster not in hits)

    def _use(self, cluster: int) -> None:
        if self._policy == "lru":
            self._cached[cluster] = self._cached.pop(cluster) + 1
        else:
            self._cached[cluster] += 1

    def _admit(self, cluster: int, in_use: set[int]) -> bool:
        needed = self._blocks[cluster]
        if needed > self._capacity:
            return False
        while self._used_blocks + needed > self._capacity:
            unused = [other for other in self._cached if other not in in_use]
            if not unused:
                return False
            victim = min(unused, key=self._cached.__getitem__) if self._policy == "lfu" else unused[0]
            del self._cached[victim]
            self._used_blocks -= self._blocks[victim]
        self._cached[cluster] = 1
        self._used_blocks += needed
        return True
