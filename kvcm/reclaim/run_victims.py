"""Selection of victims by runs: over a shared store blocks that lie together go together.

Blocks of one write lie in one run, are read alike, and mostly go together, so a step per run serves up to 64 blocks.
What `victims` selects block by block is selected here in the same order: the coldest ends of chains first, of a run
from its last block on, the tail of a chain before its head (invariant 7), no more than the need asks for. Runs of
which anything stays (a pinned location, a copy elsewhere) are left to `victims`, and so is every policy that orders
blocks by something else than when and how often they were read.

Only the coldest runs are read, and of what follows them as much as it takes to find enough that can go: the order of
a store names the head of a chain before its tail, which mostly was written a little later than the head was read.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from kvcm.index.backends.backend import Access, StoredRun
from kvcm.index.meta_index import MetaIndex
from kvcm.index.run_codec import MOST_BLOCKS
from kvcm.model.locations import Location, LocationStatus
from kvcm.reclaim.eviction_order import Candidate, OrderPlan, WindowOrder, window_size
from kvcm.reclaim.needs import InstanceUsage, ReclaimNeed
from kvcm.reclaim.victims import Goal, ShareOrder

__all__ = ["ColdRuns", "can_go_by_runs", "select_runs"]

_POLICIES = frozenset({"lru", "leaf_lru", "lfu", "lfu_aging"})
_MOST_FOLLOWERS = 16  # of one block: one with more stays, until they are gone
_MOST_BEHIND = 16_384  # blocks that are read behind the coldest ones
_TURNS_WITHOUT_YIELD = 64


def can_go_by_runs(need: ReclaimNeed, holding: InstanceUsage, index: MetaIndex, plan: OrderPlan) -> bool:
    """Return whether blocks of an instance go in the order in which their runs were read, and as a whole."""
    is_by_reads = plan.policy.name in _POLICIES and not plan.classes
    is_thinned = bool(holding.instance.linear_spec_names) and not need.counts_blocks
    return index.has_runs and is_by_reads and not is_thinned


class _RunState:
    """A run as far as it is not chosen.

    Attributes:
        run: as it was read.
        access: when it was read, and how often.
        left: blocks from the start that are not chosen.
        held: by position, blocks elsewhere that follow and live, as far as is known.
        is_related: whether it is known what follows.
        is_queued: whether it is among the candidates.
    """

    __slots__ = ("_reads", "access", "held", "is_queued", "is_related", "left", "run")

    def __init__(self, run: StoredRun, access: Access, reads: int) -> None:
        self.run = run
        self.access = access
        self._reads = reads
        self.left = len(run.keys)
        self.held: dict[int, set[int]] = {}
        self.is_related = False
        self.is_queued = False

    @property
    def place(self) -> _Place:
        """Where it stands among the runs. Of those that were read at one time the deepest goes first: mostly they are
        one chain."""
        priority = max(location.priority for location in self.run.locations)
        return priority, self._reads, self.access.at, -self.run.depth, self.run.keys[-1], self

    @property
    def free(self) -> int:
        """Blocks at the end that nothing follows."""
        return self.left - (max(self.held) + 1 if self.held else 0) if self.is_related else 0

    @property
    def is_living(self) -> bool:
        """Whether readers or writers use any of it."""
        return any(location.status is not LocationStatus.DELETING for location in self.run.locations)

    def has(self, key: int) -> bool:
        """Return whether a block is in the run and was not chosen."""
        return self.run.keys.index(key) < self.left


_Place: TypeAlias = tuple[int, int, int, int, int, _RunState]


class _Size(NamedTuple):
    """What the end of one block of a run gives: units of the need, and bytes."""

    amount: int
    size_bytes: int


class ColdRuns:
    """The coldest runs of one instance, and what follows them.

    What follows a run is found only when it may be the next to go: that costs the store more than all the rest. A run
    before another one that lives is not the next, and no question.

    Args:
        need: what they have to serve.
        holding: the instance.
        index: of its blocks.
        order: of its blocks.
        now: unix seconds; locations pinned longer stay.
    """

    def __init__(
        self, need: ReclaimNeed, holding: InstanceUsage, index: MetaIndex, order: WindowOrder, now: float
    ) -> None:
        self.holding = holding
        self.policy = order.plan.policy.name
        self._order = order
        self._need = need
        self._index = index
        self._now = now
        self._state_of: dict[int, _RunState] = {}
        self._next_of: dict[int | None, _RunState] = {}  # the run that begins behind a block, and lives
        self._ends: list[_Place] = []  # a heap of runs that may be the next, and of which it is not known what follows
        self._candidates: list[_Place] = []  # a heap of runs with blocks that can go
        self._waiting: defaultdict[int, list[tuple[_RunState, int]]] = defaultdict(list)  # by follower
        self._asked: set[int] = set()
        self._behind_left, self._read_ahead = _MOST_BEHIND, 0
        self._taken: dict[_RunState, None] = {}  # in the order in which the first block of each was chosen

    async def read(self, count: int, window: int) -> None:
        """Read the coldest runs, in windows that suffice for so many blocks."""
        size = window_size(count)
        self._add(await self._index.coldest_runs(size, window * size))
        if self._order.samples:
            self._add(await self._order.sample_runs(count))

    def _add(self, runs: Iterable[tuple[StoredRun, Access]]) -> None:
        for run, access in runs:
            # A run that was cut meanwhile may come as a whole and in part: no block must be counted twice.
            if not self._state_of.keys().isdisjoint(run.keys):
                continue
            state = _RunState(run, access, access.reads if self._order.samples else 0)
            self._state_of.update(dict.fromkeys(run.keys, state))
            if not state.is_living:
                self._gone(run.keys)
                continue
            self._next_of.setdefault(run.parent, state)
            if self._can_go(run.locations):
                heappush(self._ends, state.place)

    async def head(self, count: int) -> Candidate | None:
        """Return the block that is the next to go, None where none can; so many more are wanted, about."""
        assert count > 0
        self._read_ahead = max(self._read_ahead, count)
        while self._ends and not (self._candidates and self._candidates[0] < self._ends[0]):
            await self._relate(count)
            count *= 2  # few round trips also where hardly anything can go
        if not self._candidates:
            return None
        priority, _, read_at, _, _, state = self._candidates[0]
        return Candidate(state.run.keys[state.left - 1], False, priority, read_at, self.policy)

    async def _relate(self, count: int) -> None:
        """Find what follows the runs that may be next, of about so many blocks."""
        states: dict[_RunState, None] = {}
        while self._ends and count > 0 and not (self._candidates and self._candidates[0] < self._ends[0]):
            *_, state = heappop(self._ends)
            follower = self._next_of.get(state.run.keys[-1])
            if state.is_related or state in states or (follower is not None and follower.left):
                continue
            line = self._read_together_up_to(state)
            if sum(each.left for each in line) > count:  # of a long one the end may have to stay: first that
                line = [state]
            states.update(dict.fromkeys(line))
            count -= sum(each.left for each in line)
        families = await self._index.outer_families([state.run for state in states], _MOST_FOLLOWERS)
        for state, family in zip(states, families, strict=True):
            state.is_related = True
            self._hold(state, family)
        for state in states:
            self._queue(state)
        await self._read_behind()

    def _read_together_up_to(self, state: _RunState) -> list[_RunState]:
        """Return a run and those before it in its chain that mostly go with it."""
        line = {state: None}
        before = self._before(state)
        # Writers can make two runs each other's parents.
        while before is not None and before not in line and before.access.at == state.access.at:
            line[before] = None
            before = self._before(before)
        return list(line)

    def _before(self, state: _RunState) -> _RunState | None:
        """Return the run whose last block a run follows, if it may go and is not related."""
        before = self._state_of.get(state.run.parent) if state.run.parent is not None else None
        is_open = before is not None and not before.is_related and self._can_go(before.run.locations)
        return before if is_open and before is not None and before.run.keys[-1] == state.run.parent else None

    async def _read_behind(self) -> None:
        """Read what follows, as far as it is not known: whether it lives decides what can go."""
        followers = [key for key in self._waiting if key not in self._state_of and key not in self._asked]
        if followers and self._behind_left > 0:
            # Enough for the run of each, and twice as far behind them each time: a chain may be long, and warm.
            most = max(MOST_BLOCKS * len(followers), min(self._read_ahead, self._behind_left))
            self._asked.update(followers)
            self._read_ahead *= 2
            runs = await self._index.runs_around(followers, most)
            self._behind_left -= sum(len(run.keys) for run, _ in runs)
            self._add(runs)

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
        return state is None or (state.is_living and state.has(key))

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
            heappush(self._candidates, state.place)

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
        if not state.left and (before := self._before(state)) is not None:
            heappush(self._ends, before.place)
        return count

    def taken(self) -> Sequence[tuple[StoredRun, Access]]:
        """Return the chosen blocks as runs."""
        return [(state.run.tail(len(state.run.keys) - state.left), state.access) for state in self._taken]


async def select_runs(goal: Goal, sources: Sequence[ColdRuns], shares: ShareOrder) -> int:
    """Choose blocks of the sources; return how many."""
    left, bytes_left, chosen, turns = goal.amount, goal.most_bytes, 0, 0
    while min(left, bytes_left) > 0 and chosen < goal.most:
        wanted = min(goal.most - chosen, left if goal.need.counts_blocks else _blocks_of(left, goal.need.block_bytes))
        heads = [(source, head) for source in sources if (head := await source.head(wanted)) is not None]
        if not heads:
            break
        turn = shares.first([(source.holding.uid, head) for source, head in heads]) if len(heads) > 1 else 0
        source, _ = heads[turn]
        turns += 1
        if turns % _TURNS_WITHOUT_YIELD == 0:
            await asyncio.sleep(0)
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
