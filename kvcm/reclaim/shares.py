"""From which instance the next victim is taken, when several could give one.

* `group_lru` (the default): from the one whose candidate was not read for the longest time, by age times the inverse
  of the instance's weight. Instances need no shares of their own: what is used stays, so a model version that takes
  over the traffic takes over the space.
* `proportional`: so that each gives the same part of what it has, over its weight.
* `fixed`: from the one that is furthest above its share of what is to remain, which is its weight over all weights.

Before any of that, blocks of classes over their budget go first, then those of the lowest priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcm.reclaim.lanes import Candidate
from kvcm.reclaim.needs import Holding, Need

__all__ = ["SHARES", "Shares"]

SHARES = ("group_lru", "proportional", "fixed")


class Shares:
    """Decides for one need, as long as it is being served.

    Args:
        need: whose holdings compete.
        now: unix seconds.
    """

    def __init__(self, need: Need, now: float) -> None:
        self._now = now
        self._taken: Counter[int] = Counter()
        self._used = {holding.uid: self._amount(need, holding) for holding in need.holdings}
        self._weights = {
            holding.uid: holding.group.override_of(holding.instance.instance_id).weight or 1.0
            for holding in need.holdings
        }
        strategies = {holding.group.cache_config.reclaim_strategy.share for holding in need.holdings}
        # Instances of several groups compete only where guarantees exceed a mark: then by age.
        self._strategy = strategies.pop() if len(strategies) == 1 else ""
        remaining = max(0, sum(self._used.values()) - need.amount)
        self._part = remaining / (sum(self._weights.values()) or 1.0)

    @staticmethod
    def _amount(need: Need, holding: Holding) -> int:
        return holding.keys if need.counts_blocks else holding.bytes(need.wanted)

    def took(self, uid: int, amount: int) -> None:
        """Note what an instance gave."""
        self._taken[uid] += amount

    def first(self, heads: Sequence[tuple[int, Candidate]]) -> int:
        """Return the position of the one to be taken.

        Args:
            heads: number of an instance and its candidate.
        """
        return min(range(len(heads)), key=lambda position: self._order(*heads[position]))

    def _order(self, uid: int, head: Candidate) -> tuple[bool, int, float, float]:
        age = (self._now - head.read_at) / self._weights[uid]
        if self._strategy == "proportional":
            given = self._taken[uid] * self._weights[uid] / max(1, self._used[uid])
            return (*head.urgency, given, -age)
        if self._strategy == "fixed":
            above = self._used[uid] - self._taken[uid] - self._part * self._weights[uid]
            return (*head.urgency, -above, -age)
        return (*head.urgency, -age, 0.0)
