"""The needs of one look, served batch by batch, one need after the other.

A group that is written to without a pause always needs something. Others do not wait until it needs nothing: needs take
turns. What a narrow mark still evicts counts for the wider ones, so a wide need has its turn for what goes beyond that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
        self._batches = 0
        self._last_batch: dict[Payment, int] = {}

    def next(self, found: Sequence[Need]) -> Need | None:
        """Return the need that is worth a try and was not served for the longest time, None when there is none.

        Args:
            found: the narrowest level first. The amount of what is returned is without what those before it take.
        """
        done = self._hopeless | self._held_back
        remaining = _without_overlap([need for need in found if payment_of(need) not in done])
        return min(remaining, key=lambda need: self._last_batch.get(payment_of(need), 0), default=None)

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
        self._batches += 1
        self._last_batch[payment] = self._batches
        if blocks:
            self._gave.add(payment)
        elif is_held_back:
            self._held_back.add(payment)
        elif payment in self._gave:
            self._gave.discard(payment)
            del self._servings[payment]
        else:
            self._hopeless.add(payment)


def _without_overlap(found: Sequence[Need]) -> Iterator[Need]:
    """Yield needs, each without what those before it may take of the same groups, or for the same mark: up to a block
    more than their amounts, since they take whole blocks."""
    of_group: Counter[str] = Counter()
    of_mark: Counter[Label] = Counter()
    counting_blocks: set[str] = set()
    for need in found:
        groups = {holding.group.name for holding in need.holdings}
        amount = need.amount - of_mark[need.label] - sum(of_group[name] for name in groups)
        # Blocks and bytes cannot be compared: who counts one waits for who counts the other.
        if need.counts_blocks:
            amount = 0 if any(of_group[name] for name in groups) else need.amount
        elif groups & counting_blocks:
            amount = 0
        if amount <= 0:
            continue
        if need.counts_blocks:
            counting_blocks |= groups
        else:
            most = amount + max(holding.instance.block_bytes for holding in need.holdings)
            of_mark[need.label] += most
            of_group.update(dict.fromkeys(groups, most))
        yield replace(need, amount=amount)


def payment_of(need: Need) -> Payment:
    """Return what a need is told from others by."""
    return need.label, need.payer
