"""Selection of victims by runs: over a shared store blocks that lie together go together.

Blocks of one write lie in one run, are read alike, and mostly go together, so a step per run serves up to 64 blocks.
What `victims` selects block by block is selected here in the same order: the coldest ends of chains first, of a run
from its last block on, the tail of a chain before its head (invariant 7), no more than the need asks for. Runs of
which anything stays (a pinned location, a copy elsewhere) are left to `victims`, and so is every policy that does not
order blocks by their last read.

Only the coldest runs are read, and of what follows them as much as it takes to find enough that can go: the order of
a store names the head of a chain before its tail, which mostly was written a little later than the head was read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from kvcm.index.backends.backend import Access, StoredRun
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import Location, LocationStatus
from kvcm.reclaim.eviction_order import Candidate, Order, WindowOrder
from kvcm.reclaim.needs import InstanceUsage, ReclaimNeed
from kvcm.reclaim.victims import Goal, ShareOrder

__all__ = ["ColdRuns", "can_go_by_runs", "select_runs"]

_POLICIES = frozenset({"lru", "leaf_lru"})
_MOST_FOLLOWERS = 16  # of one block: one with more stays, until they are gone
_MOST_BEHIND = 16_384  # blocks that are read behind the coldest ones


def can_go_by_runs(need: ReclaimNeed, holding: InstanceUsage, index: MetaIndex, order: Order) -> bool:
    """Return whether blocks of an instance go in the order in which their runs were read, and as a whole."""
    plan = order.plan
    is_by_read = plan.policy.name in _POLICIES and not plan.classes
    is_thinned = bool(holding.instance.linear_spec_names) and not need.counts_blocks
    return isinstance(order, WindowOrder) and index.has_runs and is_by_read and not is_thinned


class _RunState:
    """A run as far as it is not chosen.

    Attributes:
        run: as it was read.
        access: when it was read.
        priority: runs of a lower one go first.
        can_go: whether its blocks can go at all.
        left: blocks from the start that are not chosen.
        held: by position, blocks elsewhere that follow and live, as far as is known.
        is_queued: whether it is among the candidates.
    """

    __slots__ = ("access", "can_go", "held", "is_queued", "left", "priority", "run")

    def __init__(self, run: StoredRun, access: Access, *, can_go: bool) -> None:
        self.run = run
        self.access = access
        self.can_go = can_go
        self.left = len(run.keys)
        self.held: dict[int, set[int]] = {}
        self.is_queued = False
        self.priority = max(location.priority for location in run.locations)

    @property
    def free(self) -> int:
        """Blocks at the end that nothing follows."""
        return self.left - (max(self.held) + 1 if self.held else 0) if self.can_go else 0

    def has(self, key: int) -> bool:
        """Return whether a block is in the run and was not chosen."""
        return self.run.keys.index(key) < self.left


class _Size(NamedTuple):
    """What the end of one block of a run gives: units of the need, and bytes."""

    amount: int
    size_bytes: int


class ColdRuns:
    """The coldest runs of one instance, and what follows them.

    Args:
        need: what they have to serve.
        holding: the instance.
        index: of its blocks.
        policy: name of the policy, for those who want to know.
        now: unix seconds; locations pinned longer stay.
    """

    def __init__(self, need: ReclaimNeed, holding: InstanceUsage, index: MetaIndex, policy: str, now: float) -> None:
        self.holding = holding
        self.policy = policy
        self._need = need
        self._index = index
        self._now = now
        self._taken: dict[_RunState, None] = {}  # in the order in which the first block of each was chosen
        self._state_of: dict[int, _RunState] = {}
        self._waiting: defaultdict[int, list[tuple[_RunState, int]]] = defaultdict(list)  # by follower
        self._asked: set[int] = set()
        self._candidates: list[tuple[int, int, int, int, _RunState]] = []

    async def read(self, count: int, offset: int) -> None:
        """Read the coldest runs from a position on, and behind them until so many blocks can go."""
        await self._add(await self._index.coldest_runs(count, offset))
        left = _MOST_BEHIND
        # Always once: whether the blocks live that follow directly decides what can go at all.
        while (followers := self._unknown_followers()) and left > 0 and (not self._asked or self._free < count):
            self._asked.update(followers)
            runs = await self._index.runs_around(followers, left)
            left -= sum(len(run.keys) for run, _ in runs)
            await self._add(runs)

    @property
    def _free(self) -> int:
        return sum(state.free for *_, state in self._candidates)

    def _unknown_followers(self) -> list[int]:
        return [key for key in self._waiting if key not in self._state_of and key not in self._asked]

    async def _add(self, runs: Sequence[tuple[StoredRun, Access]]) -> None:
        states: list[_RunState] = []
        for run, access in runs:
            # A run that was cut meanwhile may come as a whole and in part: no block must be counted twice.
            if self._state_of.keys().isdisjoint(run.keys):
                state = _RunState(run, access, can_go=self._can_go(run.locations))
                self._state_of.update(dict.fromkeys(run.keys, state))
                states.append(state)
        families = await self._index.outer_families([state.run for state in states], _MOST_FOLLOWERS)
        for state, family in zip(states, families, strict=True):
            self._hold(state, family)
        for state in states:
            if all(location.status is LocationStatus.DELETING for location in state.run.locations):
                self._gone(state.run.keys)
            self._queue(state)

    def _can_go(self, locations: Collection[Location]) -> bool:
        if not self._need.counts_blocks and not any(map(self._need.size_of, locations)):
            return False
        return all(
            location.status is LocationStatus.SERVING
            and location.pinned_until <= self._now
            and self._need.filter(location.place)
            for location in locations
        )

    def _hold(self, state: _RunState, family: Sequence[tuple[int, int]]) -> None:
        """Note which blocks of a run cannot go before others."""
        if not state.can_go:
            return
        followers: defaultdict[int, set[int]] = defaultdict(set)
        for parent, child in family:
            followers[state.run.keys.index(parent)].add(child)
        for position, children in followers.items():
            is_crowded = len(children) >= _MOST_FOLLOWERS
            living = children if is_crowded else {child for child in children if self._may_live(child)}
            if living:
                state.held[position] = living
            for child in () if is_crowded else living:
                self._waiting[child].append((state, position))

    def _may_live(self, key: int) -> bool:
        state = self._state_of.get(key)
        return state is None or state.has(key)

    def _gone(self, keys: Sequence[int]) -> None:
        """Let blocks go that waited for these."""
        for key in keys:
            for state, position in self._waiting.pop(key, ()):
                state.held[position].discard(key)
                if not state.held[position]:
                    del state.held[position]
                self._queue(state)

    def _queue(self, state: _RunState) -> None:
        if state.free and not state.is_queued:
            state.is_queued = True
            # Of runs that were read at one time the deepest first: a tie is mostly one chain.
            place = (state.priority, state.access.at, -state.run.depth, state.run.keys[-1], state)
            heappush(self._candidates, place)

    def head(self) -> Candidate | None:
        """Return the block that is the next to go."""
        if not self._candidates:
            return None
        priority, read_at, _, _, state = self._candidates[0]
        return Candidate(state.run.keys[state.left - 1], False, priority, read_at, self.policy)

    def size_of_head(self) -> _Size:
        """Return what the end of the next block gives."""
        locations = self._candidates[0][-1].run.locations
        amount = 1 if self._need.counts_blocks else sum(map(self._need.size_of, locations))
        return _Size(amount, sum(location.size_bytes for location in locations))

    def take(self, most: int) -> int:
        """Choose up to so many blocks, those next to go, of one run; return how many."""
        *_, state = self._candidates[0]
        self._taken[state] = None
        count = min(state.free, most)
        state.left -= count
        if not state.free:
            heappop(self._candidates)
            state.is_queued = False
        self._gone(state.run.keys[state.left : state.left + count])
        return count

    def taken(self) -> Sequence[tuple[StoredRun, Access]]:
        """Return the chosen blocks as runs."""
        return [(state.run.tail(len(state.run.keys) - state.left), state.access) for state in self._taken]


async def select_runs(goal: Goal, sources: Sequence[ColdRuns], shares: ShareOrder) -> int:
    """Choose blocks of the sources; return how many."""
    left, bytes_left, chosen = goal.amount, goal.most_bytes, 0
    while min(left, bytes_left) > 0 and chosen < goal.most:
        heads = [(source, head) for source in sources if (head := source.head()) is not None]
        if not heads:
            break
        turn = shares.first([(source.holding.uid, head) for source, head in heads]) if len(heads) > 1 else 0
        source, _ = heads[turn]
        amount, size_bytes = source.size_of_head()
        # Several instances give by turns, so that each gives its share.
        most = 1 if len(heads) > 1 else min(_blocks_of(left, amount), _blocks_of(bytes_left, size_bytes))
        count = source.take(min(most, goal.most - chosen))
        shares.record(source.holding.uid, count * amount)
        chosen += count
        left -= count * amount
        bytes_left -= count * size_bytes
    return chosen


def _blocks_of(amount: int, of_each: int) -> int:
    """Return how many blocks give an amount."""
    return -(-amount // max(1, of_each))
