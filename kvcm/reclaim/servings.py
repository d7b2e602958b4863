"""The needs of one look, served batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcm.reclaim.needs import Label, Need
from kvcm.reclaim.shares import Shares
from kvcm.reclaim.victims import Walk

__all__ = ["Payment", "Serving", "Servings", "payment_of"]

Payment = tuple[Label, str]
"""A mark, and the group that pays."""


class Serving(NamedTuple):
    """One need, from batch to batch.

    Attributes:
        uids: of the instances that pay.
        shares: which of them is next.
        walk: where the last batch stopped.
    """

    uids: frozenset[int]
    shares: Shares
    walk: Walk


class Servings:
    """Which need is next, and what is known of each from the batches before.

    Args:
        hopeless: what cannot be served; kept by whoever looks again.
    """

    def __init__(self, hopeless: set[Payment]) -> None:
        self._hopeless = hopeless
        self._held_back: set[Payment] = set()
        self._servings: dict[Payment, Serving] = {}
        self._gave: set[Payment] = set()

    def next(self, found: Sequence[Need]) -> Need | None:
        """Return the first need that is worth a try, None when there is none."""
        done = self._hopeless | self._held_back
        return next((need for need in found if payment_of(need) not in done), None)

    def of(self, need: Need, now: float) -> Serving:
        """Return the serving of a need; a new one when others pay than before."""
        uids = frozenset(holding.uid for holding in need.holdings)
        serving = self._servings.get(payment_of(need))
        if serving is None or serving.uids != uids:
            serving = self._servings[payment_of(need)] = Serving(uids, Shares(need, now), Walk())
        return serving

    def note(self, need: Need, blocks: int, *, is_held_back: bool) -> None:
        """Note what a batch gave. A walk that gave something and came to its end is made once more: blocks behind it
        have become ends of chains."""
        payment = payment_of(need)
        if blocks:
            self._gave.add(payment)
        elif is_held_back:
            self._held_back.add(payment)
        elif payment in self._gave:
            self._gave.discard(payment)
            del self._servings[payment]
        else:
            self._hopeless.add(payment)


def payment_of(need: Need) -> Payment:
    """Return what a need is told from others by."""
    return need.label, need.payer
