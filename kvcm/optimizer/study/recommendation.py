"""Which policy and how much cache to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcm.optimizer.roi import Returns
from kvcm.optimizer.roi.returns import NEARLY

__all__ = ["BOUND", "Recommendation", "recommended"]

BOUND = "belady"
"""Knows the future: what it returns is a bound, and nothing to recommend."""


_OF_THE_MANAGER = "leaf_lru"
"""Groups evict by it unless they are told otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Recommendation:
    """A setting.

    Attributes:
        returns: of the policy.
        place: of the capacity among those.
    """

    returns: Returns
    place: int

    @property
    def policy(self) -> str:
        """Return its label."""
        return self.returns.policy

    @property
    def capacity_blocks(self) -> int:
        """Return how large a cache; 0 where none pays."""
        return int(self.returns.capacity_blocks[self.place])

    @property
    def pays(self) -> bool:
        """Whether any cache returns more than it costs."""
        return self.capacity_blocks > 0


def recommended(returns: Mapping[str, Returns]) -> Recommendation | None:
    """Return a policy within 1 % of the greatest net value, at the smallest capacity within 1 % of its best.

    The last per cent of value often takes half of the capacity, and changing a policy for less is not worth it: of
    several the manager's own is taken, else the first. None where there is no policy but the bound.
    """
    live = [each for label, each in returns.items() if label.split(":")[0] != BOUND]
    if not live:
        return None
    greatest = max(float(each.net_per_hour[each.best]) for each in live)
    good = [each for each in live if each.net_per_hour[each.best] >= greatest * (1 - NEARLY)]
    best = next((each for each in good if each.policy == _OF_THE_MANAGER), good[0])
    return Recommendation(best, best.nearly_best)
