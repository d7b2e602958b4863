"""Which of the instances that share one quota gives up the next block.

* `group_lru` (the default): the instance whose candidate was not read for the longest time, by age times the inverse
  of the instance's weight. Instances need no shares of their own: used blocks stay, so a model version that takes
  over the traffic takes over the space.
* `proportional`: each gives the same part of what it has, over its weight.
* `fixed`: the one that is furthest above its share of the bytes to remain: its weight over all weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

__all__ = ["SHARES", "Sharing"]

SHARES = ("group_lru", "proportional", "fixed")


class Sharing:
    """The turns of one round of evictions.

    Args:
        strategy: one of `SHARES`; anything else is `group_lru`.
        used: blocks or bytes of each instance when the round begins, by a number of its own.
        weights: of each.
        amount: blocks or bytes that the round is to free.
    """

    __slots__ = ("_part", "_strategy", "_taken", "_used", "_weights")

    def __init__(self, strategy: str, used: Mapping[int, int], weights: Mapping[int, float], amount: int) -> None:
        self._strategy = strategy
        self._used = used
        self._weights = weights
        self._taken: Counter[int] = Counter()
        self._part = max(0, sum(used.values()) - amount) / (sum(weights.values()) or 1.0)

    def record(self, uid: int, amount: int) -> None:
        """Note what an instance gave."""
        self._taken[uid] += amount

    def priority(self, uid: int, age: float) -> tuple[float, float]:
        """Return where an instance stands: the smallest gives next.

        Args:
            uid: of the instance.
            age: seconds since its candidate was read.
        """
        weighted = age / self._weights[uid]
        if self._strategy == "proportional":
            return self._taken[uid] * self._weights[uid] / max(1, self._used[uid]), -weighted
        if self._strategy == "fixed":
            return self._part * self._weights[uid] + self._taken[uid] - self._used[uid], -weighted
        return -weighted, 0.0
