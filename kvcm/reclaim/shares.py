"""From which instance the next victim is taken, when several could give one.

Blocks of classes over their budget go first, then those of the lowest priority, then whose turn it is by the group's
`share` (`kvcm.reclaim.policies.sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.reclaim.lanes import Candidate
from kvcm.reclaim.needs import Holding, Need
from kvcm.reclaim.policies.sharing import Sharing

__all__ = ["Shares"]


class Shares:
    """Decides for one need, as long as it is being served.

    Args:
        need: whose holdings compete.
        now: unix seconds.
    """

    def __init__(self, need: Need, now: float) -> None:
        self._now = now
        used = {holding.uid: self._amount(need, holding) for holding in need.holdings}
        weights = {
            holding.uid: holding.group.override_of(holding.instance.instance_id).weight or 1.0
            for holding in need.holdings
        }
        strategies = {holding.group.cache_config.reclaim_strategy.share for holding in need.holdings}
        # Instances of several groups compete only where guarantees exceed a mark: then by age.
        self._sharing = Sharing(strategies.pop() if len(strategies) == 1 else "", used, weights, need.amount)

    @staticmethod
    def _amount(need: Need, holding: Holding) -> int:
        return holding.keys if need.counts_blocks else holding.bytes(need.wanted)

    def took(self, uid: int, amount: int) -> None:
        """Note what an instance gave."""
        self._sharing.took(uid, amount)

    def first(self, heads: Sequence[tuple[int, Candidate]]) -> int:
        """Return the position of the one to be taken.

        Args:
            heads: number of an instance and its candidate.
        """
        return min(range(len(heads)), key=lambda position: self._order(*heads[position]))

    def _order(self, uid: int, head: Candidate) -> tuple[bool, int, float, float]:
        return (*head.urgency, *self._sharing.turn(uid, self._now - head.read_at))
