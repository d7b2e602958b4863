"""The order of eviction over an index that is in this process's memory: exact, and told of every change as it happens.

What it costs: 11 to 22 bytes per resident block, by policy, in arrays, and no object per block.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvcm.index.backends.rows import Rows
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.reclaim.lanes import Candidate, IsOverBudget, Lane, Lanes, OrderPlan, SlotFacts
from kvcm.reclaim.policies.policy import Summary

__all__ = ["LiveOrder", "to_its_end"]

_NO_LANE = 0xFFFF
_STEP_ROWS = 1024  # some milliseconds

_Ranked = tuple[Any, int, int, int, Lane, SlotFacts]
"""Where a block comes in the order (rank, depth negated, key), its row, its lane, and what is known of it."""

Result = TypeVar("Result")


def to_its_end(steps: Iterator[None] | Generator[None, None, Result]) -> Result | None:
    """Do all steps in one go and return what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _place(ranked: _Ranked) -> tuple[Any, int, int]:
    return ranked[:3]


class LiveOrder:
    """Follows one index.

    Args:
        plan: how its blocks are ordered.

    Attributes:
        is_evicting: set while the reclaimer marks what it chose: what goes then goes for want of room.
    """

    def __init__(self, plan: OrderPlan) -> None:
        self.plan = plan
        self.is_evicting = False
        self._rows: Rows
        self._lanes = Lanes(plan, self._facts, self._head, self._is_leaf)
        self._lane_of_row = array("H")
        self._sizes = array("q")  # only kept where classes have budgets
        self._has_budgets = plan.has_budgets
        self._counts_reads = plan.counts_reads
        self._taken: set[int] = set()  # rows of blocks that were chosen and are not marked yet
        self._is_disturbed = False

    @classmethod
    def over(cls, index: MetaIndex, plan: OrderPlan) -> Generator[None, None, LiveOrder | None]:
        """Make the order over an index, with the blocks that it holds, in steps of some milliseconds.

        Whoever lets others run between two steps sees to it that nobody changes the index meanwhile.

        Returns:
            The order; None for an index that others share.
        """
        order = cls(plan)
        rows = index.follow(order)
        if rows is None:
            return None
        yield from order._begin(rows)
        return order

    def _begin(self, rows: Rows) -> Iterator[None]:
        self._rows = rows
        pages: list[list[_Ranked]] = []
        for first in range(0, len(rows), _STEP_ROWS):
            resident = filter(rows.is_resident, range(first, min(first + _STEP_ROWS, len(rows))))
            pages.append(sorted(map(self._ranked, resident), key=_place))
            yield
        # Sorting all at once would be one step, of seconds where there are millions.
        for number, (_, _, _, row, lane, fact) in enumerate(heapq.merge(*pages, key=_place)):
            lane.policy.restore(row, fact.key, fact.summary)
            self._enter(row, lane.number, fact.size_bytes)
            if number % _STEP_ROWS == _STEP_ROWS - 1:
                yield

    def _ranked(self, row: int) -> _Ranked:
        fact = self._facts(row)
        lane = self._lanes.lane_of(fact)
        # Of blocks of the same second the tail of a chain is the colder one, then the one of the smallest key: rows say
        # nothing, since blocks that were removed have left theirs to others.
        return lane.policy.rank(fact.summary), -fact.depth, fact.key, row, lane, fact

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        """Nothing has to be fetched."""
        if self._is_disturbed and not self._taken:
            self._is_disturbed = False
            self._lanes = Lanes(self.plan, self._facts, self._head, self._is_leaf)
            self._lane_of_row = array("H")
            to_its_end(self._begin(self._rows))
        return {}

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a prefix class."""
        return self._lanes.class_bytes(name)

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks in the order in which they are to go, as `Lanes.candidates`."""
        return self._lanes.candidates(is_over_budget)

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks that have reached their age."""
        return self._lanes.expired(now)

    def took(self, key: int) -> None:
        """A block was chosen, and nothing of it is left: from now on the order is as if it were marked already."""
        row = self._rows.row(key)
        if row is not None and row not in self._taken:
            self._taken.add(row)
            self._leave(row, is_evicted=True)

    async def settle(self) -> None:
        """Put back what was chosen and could not be marked. Policies take blocks in at their newest end only, where
        the coldest ones have no business: before the next choice the whole order is made anew."""
        taken, self._taken = self._taken, set()
        for row in sorted(taken):
            self.added(row)
            self._is_disturbed = True

    def __len__(self) -> int:
        return len(self._lanes)

    def added(self, row: int) -> None:
        if self.plan.classes:
            facts = self._facts(row)
            lane = self._lanes.lane_of(facts)
            lane.policy.insert(row, facts.key)
            self._enter(row, lane.number, facts.size_bytes)
        else:  # every block that is written passes here
            lane = self._lanes.lane_of_priority(self._rows.priority(row))
            lane.policy.insert(row, self._rows.key(row))
            self._put(row, lane.number, 0)

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        if self.plan.classes:
            for row in rows:
                self.added(row)
            return
        lane = self._lanes.lane_of_priority(priority)
        lane.policy.insert_all(rows, keys)
        self._put(max(rows), lane.number, 0)  # makes room for all
        lane_of_row, number = self._lane_of_row, lane.number
        for row in rows:
            lane_of_row[row] = number

    def removed(self, row: int) -> None:
        if row in self._taken:
            self._taken.remove(row)
        else:
            self._leave(row, is_evicted=self.is_evicting)

    def _leave(self, row: int, *, is_evicted: bool) -> None:
        lane = self._lanes[self._lane_of_row[row]]
        lane.policy.remove(row, evicted=is_evicted)
        self._lane_of_row[row] = _NO_LANE
        if self._has_budgets:
            self._lanes.count(lane, -self._sizes[row])

    def changed(self, row: int) -> None:
        if row not in self._taken:
            self._reclassify(row)

    def moved(self, row: int, to: int) -> None:
        if row in self._taken:
            self._taken.remove(row)
            self._taken.add(to)
            return
        number = self._lane_of_row[row]
        self._lanes[number].policy.moved(row, to)
        self._lane_of_row[row] = _NO_LANE
        self._put(to, number, self._sizes[row] if self._has_budgets else 0)

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        self._make_room(max(rows))
        lane_of_row = self._lane_of_row
        if self._counts_reads:
            for row in rows:
                if lane_of_row[row] != _NO_LANE:
                    self._reclassify(row)
        numbers = [lane_of_row[row] for row in rows]
        # In no lane is what is not resident, and what was taken and is being marked.
        for number in {*numbers} - {_NO_LANE}:
            policy = self._lanes[number].policy
            if numbers.count(number) == len(numbers):
                policy.touch_all(rows, reads)
            else:
                its = [place for place, other in enumerate(numbers) if other == number]
                policy.touch_all([rows[place] for place in its], [reads[place] for place in its])

    def _reclassify(self, row: int) -> None:
        facts = self._facts(row)
        before, after = self._lanes[self._lane_of_row[row]], self._lanes.lane_of(facts)
        if after is not before:
            before.policy.remove(row, evicted=False)
            after.policy.insert(row, facts.key)
        if self._has_budgets:
            self._lanes.count(before, -self._sizes[row])
            self._lanes.count(after, facts.size_bytes)
        self._put(row, after.number, facts.size_bytes)

    def _enter(self, row: int, number: int, size_bytes: int) -> None:
        self._put(row, number, size_bytes)
        if self._has_budgets:
            self._lanes.count(self._lanes[number], size_bytes)

    def _put(self, row: int, number: int, size_bytes: int) -> None:
        self._make_room(row)
        self._lane_of_row[row] = number
        if self._has_budgets:
            missing = row + 1 - len(self._sizes)
            if missing > 0:
                self._sizes.extend([0] * missing)
            self._sizes[row] = size_bytes

    def _make_room(self, row: int) -> None:
        missing = row + 1 - len(self._lane_of_row)
        if missing > 0:
            self._lane_of_row.extend([_NO_LANE] * missing)

    def _facts(self, row: int) -> SlotFacts:
        rows = self._rows
        at, reads = rows.access(row)
        locations = rows.locations(row)
        serving = [each for each in locations if each.status is LocationStatus.SERVING]
        summary = Summary((serving or locations)[0].written_at, at, reads)
        priority = max((each.priority for each in serving), default=0)
        return SlotFacts(rows.key(row), rows.depth(row), priority, sum(each.size_bytes for each in serving), summary)

    def _is_leaf(self, row: int) -> bool:
        return not any(self._rows.is_resident(child) and child not in self._taken for child in self._rows.children(row))

    def _head(self, row: int) -> tuple[int, float]:
        return self._rows.key(row), self._rows.access(row).at
