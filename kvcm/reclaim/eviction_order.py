"""Eviction orders: in which order the blocks of an instance become candidates for eviction.

* `LiveOrder` covers an index in this process. It is exact: the index reports every change to it.
* `WindowOrder` covers an index on a shared store: a window of its coldest blocks, put into the same policies.
* `EvictionOrders` decides which instances have an order, and which, by the settings of their groups.

Each order has one queue per prefix class and priority; nearly every instance has a single one. The next candidate comes
from a queue whose class is over its budget, then from the queue of the lowest priority, then from the queue whose
candidate was not read for the longest time.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.index.backends.backend import Access, ResidentBlocks, Rows, StoredRun, is_resident
from kvcm.index.meta_index import IndexHandle, MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.groups import EvictionPolicy, InstanceGroup, PrefixClass
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.policies import POLICIES
from kvcm.reclaim.policies.leaf_lru import LeafLru
from kvcm.reclaim.policies.policy import IsLeaf, Policy, Summaries, Summary, descends

__all__ = [
    "TRIGGER_SECONDS",
    "Candidate",
    "EvictionOrders",
    "IsOverBudget",
    "LiveOrder",
    "Order",
    "OrderPlan",
    "PolicyQueue",
    "SlotFacts",
    "WindowOrder",
    "WindowScan",
    "window_size",
]

IsOverBudget = Callable[[PrefixClass], bool]
"""Whether the blocks of a class, in all instances of their group, use more than its budget."""


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """How the blocks of one instance are ordered.

    Attributes:
        policy: of blocks of no class.
        classes: those that take blocks of the instance, each with its own policy filled in.
    """

    policy: EvictionPolicy
    classes: tuple[PrefixClass, ...] = ()

    @classmethod
    def of(cls, group: InstanceGroup, instance_id: str) -> OrderPlan:
        """Return what a group says of an instance."""
        policy = group.policy_of(instance_id)
        classes = tuple(
            replace(each, policy=each.policy.with_defaults(policy))
            for each in group.cache_config.reclaim_strategy.prefix_classes
            if not each.instance_ids or instance_id in each.instance_ids
        )
        return cls(policy, classes)

    @property
    def counts_reads(self) -> bool:
        """Whether a read may bring a block into another class."""
        return any(each.min_reads for each in self.classes)

    @property
    def has_budgets(self) -> bool:
        """Whether some class has a budget."""
        return any(each.budget for each in self.classes)

    @property
    def expires(self) -> bool:
        """Whether some blocks leave at an age."""
        return any(policy.ttl_seconds for policy in (self.policy, *(each.policy for each in self.classes)))

    def class_of(self, depth: int, reads: int) -> PrefixClass | None:
        """Return the first class that a block fits."""
        for each in self.classes:
            if each.min_depth <= depth < (each.end_depth or 1 << 62) and reads >= each.min_reads:
                return each
        return None


class SlotFacts(NamedTuple):
    """The facts of the block in a slot.

    Attributes:
        key: of the block.
        depth: in its chain.
        priority: of its locations.
        size_bytes: of its serving locations.
        summary: when it was written and read.
    """

    key: int
    depth: int
    priority: int
    size_bytes: int
    summary: Summary


class Candidate(NamedTuple):
    """A block that is the next to go, as far as its order says.

    Attributes:
        key: of the block.
        is_over_budget: whether its class uses more than its budget.
        priority: lower ones are evicted first.
        read_at: unix seconds.
        policy: name of the policy that chose it.
    """

    key: int
    is_over_budget: bool
    priority: int
    read_at: float
    policy: str

    @property
    def urgency(self) -> tuple[bool, int]:
        """Smaller ones are evicted first, whatever their age."""
        return not self.is_over_budget, self.priority


class PolicyQueue:
    """Blocks of one class and priority.

    Attributes:
        number: within its instance.
        prefix_class: None for blocks of no class.
        priority: of its blocks.
        settings: order and age.
        policy: keeps the order, by slot.
    """

    __slots__ = ("number", "policy", "prefix_class", "priority", "settings")

    def __init__(
        self, number: int, prefix_class: PrefixClass | None, priority: int, settings: EvictionPolicy, is_leaf: IsLeaf
    ) -> None:
        self.number = number
        self.prefix_class = prefix_class
        self.priority = priority
        self.settings = settings
        self.policy: Policy = POLICIES[settings.name](is_leaf, settings)

    def expires_at(self, summary: Summary) -> float | None:
        """Return when a block expires, None for never."""
        if not self.settings.ttl_seconds:
            return None
        slides = self.settings.name in {"lru", "leaf_lru"} or (
            self.settings.name == "ttl" and self.settings.ttl_sliding
        )
        return (summary.read_at if slides else summary.written_at) + self.settings.ttl_seconds


class _PolicyQueues:
    """The queues of one instance.

    Args:
        plan: classes and policies.
        facts: of the block in a slot.
        head: key of the block in a slot, and when it was last read.
        is_leaf: whether no resident block follows the one in a slot.
    """

    def __init__(
        self,
        plan: OrderPlan,
        facts: Callable[[int], SlotFacts],
        head: Callable[[int], tuple[int, float]],
        is_leaf: IsLeaf,
    ) -> None:
        self.plan = plan
        self._facts = facts
        self._head = head
        self._is_leaf = is_leaf
        self._queues: list[PolicyQueue] = []
        self._by_kind: dict[tuple[str, int], PolicyQueue] = {}
        self._class_bytes: dict[str, int] = {each.name: 0 for each in plan.classes}

    def __getitem__(self, number: int) -> PolicyQueue:
        return self._queues[number]

    def __len__(self) -> int:
        return sum(len(queue.policy) for queue in self._queues)

    def queue_of(self, facts: SlotFacts) -> PolicyQueue:
        """Return the queue that a block belongs to."""
        prefix_class = self.plan.class_of(facts.depth, facts.summary.reads) if self.plan.classes else None
        priority = facts.priority + (prefix_class.priority if prefix_class is not None else 0)
        if prefix_class is None:
            return self.queue_of_priority(priority)
        queue = self._by_kind.get((prefix_class.name, priority))
        return queue if queue is not None else self._open(prefix_class, priority)

    def _open(self, prefix_class: PrefixClass | None, priority: int) -> PolicyQueue:
        settings = prefix_class.policy if prefix_class is not None else self.plan.policy
        queue = PolicyQueue(len(self._queues), prefix_class, priority, settings, self._is_leaf)
        self._by_kind[prefix_class.name if prefix_class is not None else "", priority] = queue
        self._queues.append(queue)
        return queue

    def numbers_of(self, blocks: ResidentBlocks) -> NDArray[np.int64]:
        """Return the number of the queue of each block."""
        if not self.plan.classes:
            priorities, kind_of_block = np.unique(blocks.priorities, return_inverse=True)
            queues = list(map(self.queue_of_priority, priorities.tolist()))
        else:
            facts = np.column_stack((blocks.priorities, blocks.depths, blocks.reads))
            kinds, kind_of_block = np.unique(facts, axis=0, return_inverse=True)
            queues = [
                self.queue_of(SlotFacts(0, depth, priority, 0, Summary(0, 0, reads)))
                for priority, depth, reads in kinds.tolist()
            ]
        return np.array([queue.number for queue in queues], np.int64)[kind_of_block.ravel()]

    def queue_of_priority(self, priority: int) -> PolicyQueue:
        """Return the queue of blocks of no class."""
        queue = self._by_kind.get(("", priority))
        return queue if queue is not None else self._open(None, priority)

    def count(self, queue: PolicyQueue, size_bytes: int) -> None:
        """Count bytes of a class; negative ones when they go."""
        if queue.prefix_class is not None:
            self._class_bytes[queue.prefix_class.name] += size_bytes

    def scale_classes(self, factor: float) -> None:
        """Scale the counted bytes: they are those of a sample."""
        self._class_bytes = {name: int(size * factor) for name, size in self._class_bytes.items()}

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a class, of this instance alone."""
        return self._class_bytes.get(name, 0)

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks in the order of eviction. The caller may evict while it iterates."""
        queues = [queue for queue in self._queues if len(queue.policy)]
        if len(queues) == 1:
            yield from self._candidates_of(queues[0], is_over_budget)
        else:
            yield from self._merged([self._candidates_of(queue, is_over_budget) for queue in queues])

    @property
    def only(self) -> PolicyQueue | None:
        """The queue that has all blocks, None where several have some."""
        queues = [queue for queue in self._queues if len(queue.policy)]
        return queues[0] if len(queues) == 1 else None

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks that have reached their age."""
        for queue in self._queues:
            if not queue.settings.ttl_seconds:
                continue
            for slot in queue.policy.victims():
                facts = self._facts(slot)
                at = queue.expires_at(facts.summary)
                if at is None or at > now:
                    break
                yield Candidate(
                    key=facts.key,
                    is_over_budget=True,
                    priority=queue.priority,
                    read_at=facts.summary.read_at,
                    policy=queue.settings.name,
                )

    def _candidates_of(self, queue: PolicyQueue, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        prefix_class = queue.prefix_class
        has_budget = prefix_class is not None and prefix_class.budget > 0
        for slot in queue.policy.victims():
            key, read_at = self._head(slot)
            is_over = has_budget and prefix_class is not None and is_over_budget(prefix_class)
            yield Candidate(key, is_over, queue.priority, read_at, queue.settings.name)

    def _merged(self, sources: Sequence[Iterator[Candidate]]) -> Iterator[Candidate]:
        heads = {number: head for number, source in enumerate(sources) if (head := next(source, None)) is not None}
        while heads:
            number = min(heads, key=lambda number: (*heads[number].urgency, heads[number].read_at, number))
            yield heads.pop(number)
            head = next(sources[number], None)
            if head is not None:
                heads[number] = head


# The order over an index in this process. It costs 11 to 22 bytes per resident block, by policy, in arrays, and no
# object per block.

_NO_QUEUE = 0xFFFF


class LiveOrder:
    """The eviction order of one index in this process.

    Args:
        plan: how its blocks are ordered.

    Attributes:
        is_evicting: set while the reclaimer marks victims: blocks that leave then were evicted.
    """

    def __init__(self, plan: OrderPlan) -> None:
        self.plan = plan
        self.is_evicting = False
        self._rows: Rows
        self._queues = _PolicyQueues(plan, self._facts, self._head, self._is_leaf)
        self._queue_of_row = array("H")
        self._sizes = array("q")  # only kept where classes have budgets
        self._has_budgets = plan.has_budgets
        self._counts_reads = plan.counts_reads
        self._taken: set[int] = set()  # rows of blocks that were chosen and are not marked yet
        self._is_disturbed = False

    @classmethod
    def over(cls, index: MetaIndex, plan: OrderPlan) -> LiveOrder | None:
        """Make the order over an index, with the blocks that it holds: half a second per million.

        Returns:
            The order; None for an index that others share.
        """
        order = cls(plan)
        rows = index.observe(order)
        if rows is None:
            return None
        order._begin(rows)
        return order

    def _begin(self, rows: Rows) -> None:
        """Put all resident blocks in order, in columns: block by block it costs twenty times as much."""
        self._rows = rows
        blocks = rows.residents()
        if not len(blocks.rows):
            return
        self._put(int(blocks.rows[-1]), _NO_QUEUE, 0)  # reserves space for all
        numbers = self._queues.numbers_of(blocks)
        np.frombuffer(self._queue_of_row, np.uint16)[blocks.rows] = numbers
        for number in np.unique(numbers).tolist():
            self._restore(self._queues[number], blocks.take(np.flatnonzero(numbers == number)))

    def _restore(self, queue: PolicyQueue, blocks: ResidentBlocks) -> None:
        rank = queue.policy.rank(_summaries(blocks))
        # Of blocks of the same second the tail of a chain is the colder one, then the one of the smallest key: rows say
        # nothing, since blocks that were removed have left theirs to others.
        ordered = blocks.take(np.lexsort((blocks.keys, -blocks.depths, *reversed(rank))))
        queue.policy.restore_all(ordered.rows, ordered.keys, _summaries(ordered))
        if self._has_budgets:
            np.frombuffer(self._sizes, np.int64)[blocks.rows] = blocks.size_bytes
            self._queues.count(queue, int(blocks.size_bytes.sum()))

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        """Nothing has to be fetched."""
        if self._is_disturbed and not self._taken:
            self._is_disturbed = False
            self._queues = _PolicyQueues(self.plan, self._facts, self._head, self._is_leaf)
            self._queue_of_row = array("H")
            self._begin(self._rows)
        return {}

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a prefix class."""
        return self._queues.class_bytes(name)

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks in the order in which they are to go, as `_PolicyQueues.candidates`."""
        return self._queues.candidates(is_over_budget)

    def line(self, key: int, most: int) -> list[int]:
        """Return the blocks that come next if the oldest leaf goes, and then each of them: up its chain, as far as no
        other block follows them, each stands beside the one that follows it, which others cannot come before, and has
        locations like the leaf's."""
        leaf, queue = self._rows.row(key), self._queues.only
        if leaf is None or queue is None or not isinstance(queue.policy, LeafLru):
            return []
        line: list[int] = []
        row = leaf
        while len(line) < most:
            beside = [above for above in queue.policy.neighbours(row) if above >= 0 and self._is_only_child(row, above)]
            if not beside or not self._rows.is_like(beside[0], leaf):
                break
            (row,) = beside
            line.append(self._rows.key(row))
        return line

    def _is_only_child(self, row: int, of: int) -> bool:
        return [*islice(self._rows.children(of), 2)] == [row]

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks that have reached their age."""
        return self._queues.expired(now)

    def discard(self, key: int) -> None:
        """A block was chosen, and nothing of it is left: from now on the order is as if it were marked already."""
        row = self._rows.row(key)
        if row is not None and row not in self._taken:
            self._taken.add(row)
            self._leave(row, is_evicted=True)

    async def settle(self) -> None:
        """Put back victims that could not be marked. Policies insert blocks at their newest end only, and victims are
        the coldest: so the whole order is rebuilt before the next selection."""
        taken, self._taken = self._taken, set()
        for row in sorted(taken):
            self.added(row)
            self._is_disturbed = True

    def __len__(self) -> int:
        return len(self._queues)

    def added(self, row: int) -> None:
        if self.plan.classes:
            facts = self._facts(row)
            queue = self._queues.queue_of(facts)
            queue.policy.insert(row, facts.key)
            self._enter(row, queue.number, facts.size_bytes)
        else:  # every block that is written passes here
            queue = self._queues.queue_of_priority(self._rows.priority(row))
            queue.policy.insert(row, self._rows.key(row))
            self._put(row, queue.number, 0)

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        if self.plan.classes:
            for row in rows:
                self.added(row)
            return
        queue = self._queues.queue_of_priority(priority)
        queue.policy.insert_all(rows, keys)
        are_descending = descends(rows)
        self._put(rows[0] if are_descending else max(rows), queue.number, 0)  # reserves space for all
        queue_of_row, number = self._queue_of_row, queue.number
        if are_descending:
            queue_of_row[rows[-1] : rows[0] + 1] = array("H", (number,)) * len(rows)
            return
        for row in rows:
            queue_of_row[row] = number

    def removed(self, row: int) -> None:
        if row in self._taken:
            self._taken.remove(row)
        else:
            self._leave(row, is_evicted=self.is_evicting)

    def _leave(self, row: int, *, is_evicted: bool) -> None:
        queue = self._queues[self._queue_of_row[row]]
        queue.policy.remove(row, evicted=is_evicted)
        self._queue_of_row[row] = _NO_QUEUE
        if self._has_budgets:
            self._queues.count(queue, -self._sizes[row])

    def changed(self, row: int) -> None:
        if row not in self._taken:
            self._reclassify(row)

    def moved(self, row: int, to: int) -> None:
        if row in self._taken:
            self._taken.remove(row)
            self._taken.add(to)
            return
        number = self._queue_of_row[row]
        self._queues[number].policy.moved(row, to)
        self._queue_of_row[row] = _NO_QUEUE
        self._put(to, number, self._sizes[row] if self._has_budgets else 0)

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        self._reserve_slots(max(rows))
        queue_of_row = self._queue_of_row
        if self._counts_reads:
            for row in rows:
                if queue_of_row[row] != _NO_QUEUE:
                    self._reclassify(row)
        numbers = [queue_of_row[row] for row in rows]
        # No queue holds blocks that are not resident, or that were selected and are being marked.
        for number in {*numbers} - {_NO_QUEUE}:
            policy = self._queues[number].policy
            if numbers.count(number) == len(numbers):
                policy.touch_all(rows, reads)
            else:
                its = [place for place, other in enumerate(numbers) if other == number]
                policy.touch_all([rows[place] for place in its], [reads[place] for place in its])

    def _reclassify(self, row: int) -> None:
        facts = self._facts(row)
        before, after = self._queues[self._queue_of_row[row]], self._queues.queue_of(facts)
        if after is not before:
            before.policy.remove(row, evicted=False)
            after.policy.insert(row, facts.key)
        if self._has_budgets:
            self._queues.count(before, -self._sizes[row])
            self._queues.count(after, facts.size_bytes)
        self._put(row, after.number, facts.size_bytes)

    def _enter(self, row: int, number: int, size_bytes: int) -> None:
        self._put(row, number, size_bytes)
        if self._has_budgets:
            self._queues.count(self._queues[number], size_bytes)

    def _put(self, row: int, number: int, size_bytes: int) -> None:
        self._reserve_slots(row)
        self._queue_of_row[row] = number
        if self._has_budgets:
            missing = row + 1 - len(self._sizes)
            if missing > 0:
                self._sizes.extend([0] * missing)
            self._sizes[row] = size_bytes

    def _reserve_slots(self, row: int) -> None:
        missing = row + 1 - len(self._queue_of_row)
        if missing > 0:
            self._queue_of_row.extend([_NO_QUEUE] * missing)

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


def _summaries(blocks: ResidentBlocks) -> Summaries:
    return Summaries(blocks.written_at, blocks.read_at, blocks.reads)


# The order over an index on a shared store: a window of its coldest blocks.
#
# The leader does not see every change, and 10⁸ blocks do not fit its memory. The store keeps the blocks in the order
# of their last reads (of their writes, where the policy orders by write), so a window of the coldest of them is
# fetched and put into the same policies as in the live order, by the access that the store keeps of each. For lru,
# leaf_lru, ttl and fifo that is exact to the second. lfu also takes a random sample, since blocks that were read
# rarely may have been read lately; so does lfu_aging, which is lfu here: what a block was allowed is not stored.
# sieve and s3fifo become second chances: a block that was read and is passed over goes back to the hot end with its
# reads used up.

_TIMES = 2  # candidates per victim: some are pinned, being deleted, or of another storage
_TIMES_SAMPLED = 16
_LEAST = 256
_MOST_SWEEPS = 16  # windows in which too little was not read, in a row
_SAMPLE = 1024  # from which the bytes of a class are estimated: to about 2 points
_SECOND_CHANCES = {"sieve": 1, "s3fifo": 2}
"""Policies that pass over read blocks, and from how many reads on."""


def window_size(count: int) -> int:
    """Return how many of the coldest blocks are read to find so many victims."""
    return max(_LEAST, _TIMES * count)


class WindowOrder:
    """Candidates of one index.

    Args:
        index: the index.
        plan: how its blocks are ordered.
        clock: time source.
        random: draws the samples.
    """

    def __init__(self, index: MetaIndex, plan: OrderPlan, clock: Clock, random: Random) -> None:
        self.plan = plan
        self.is_evicting = False
        self._index = index
        self._clock = clock
        self._random = random
        self._slots: list[SlotFacts] = []
        self._children: Counter[int] = Counter()
        self._queue_of_slot: list[int] = []
        self._slot_of_key: dict[int, int] = {}
        self._parents: list[int | None] = []
        self._queues = self._new_queues()
        self._last_candidate: int | None = None

    def __len__(self) -> int:
        return len(self._slots)

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        """Fetch a window in which so many victims can be found; send those that have a second chance to the hot end
        while there are too few others."""
        size = window_size(count)
        for _ in range(_MOST_SWEEPS):
            accesses = dict(await self._index.coldest(size, window * size))
            is_whole = len(accesses) < size
            records = await self._records(accesses)
            if self.samples:
                sample = await self._index.random_records(_TIMES_SAMPLED * count, self._random)
                accesses |= {key: access for key, (_, access) in sample.items()}
                records |= {key: record for key, (record, _) in sample.items() if is_resident(record)}
            spent = await self._fill(records, accesses, takes_all=is_whole)
            if is_whole or not spent or len(self._queues) >= count:
                break
            await self._index.requeue(dict.fromkeys(spent, 0), self._clock.now())
        return records

    async def sample_runs(self, count: int) -> Sequence[tuple[StoredRun, Access]]:
        """Return runs among which so many victims can be found."""
        return await self._index.random_runs(_TIMES_SAMPLED * count, self._random)

    @property
    def samples(self) -> bool:
        """Whether the coldest blocks do not suffice: others may go before them."""
        names = {self.plan.policy.name, *(each.policy.name for each in self.plan.classes)}
        by_write = {self.plan.policy.orders_by_write, *(each.policy.orders_by_write for each in self.plan.classes)}
        return not names.isdisjoint({"lfu", "lfu_aging"}) or len(by_write) > 1

    async def _records(self, accesses: Mapping[int, Access]) -> dict[int, BlockRecord]:
        keys = list(accesses)
        records = zip(keys, await self._index.get(keys), strict=True)
        return {key: record for key, record in records if record is not None and is_resident(record)}

    async def _fill(
        self, records: Mapping[int, BlockRecord], accesses: Mapping[int, Access], *, takes_all: bool
    ) -> list[int]:
        """Put blocks in order; return the keys of those that have a second chance, which are left out unless the window
        takes all."""
        self._slots = [self._facts(key, record, accesses[key]) for key, record in records.items()]
        self._slot_of_key = {facts.key: slot for slot, facts in enumerate(self._slots)}
        self._last_candidate = None
        self._children = Counter(record.parent for record in records.values() if record.parent is not None)
        self._parents = [record.parent for record in records.values()]
        self._queue_of_slot = [0] * len(self._slots)
        self._queues = self._new_queues()
        ranked, spent = [], []
        for slot, facts in enumerate(self._slots):
            if self._has_second_chance(facts):
                spent.append(facts.key)
                if not takes_all:
                    continue
            queue = self._queues.queue_of(facts)
            ranked.append((queue.policy.rank(facts.summary), -facts.depth, slot, queue))
        ranked.sort(key=lambda each: each[:3])
        for _, _, slot, queue in ranked:
            queue.policy.restore(slot, self._slots[slot].key, self._slots[slot].summary)
            self._queue_of_slot[slot] = queue.number
        if self.plan.has_budgets:
            await self._estimate_classes()
        return spent

    def _has_second_chance(self, facts: SlotFacts) -> bool:
        least_reads = _SECOND_CHANCES.get(self.plan.policy.name)
        return least_reads is not None and facts.summary.reads >= least_reads

    async def _estimate_classes(self) -> None:
        sample = await self._index.random_sample(_SAMPLE, self._random)
        accesses = {
            key: access for key, access in zip(sample, await self._index.accesses(sample), strict=True) if access
        }
        sizes = 0
        for key, record in (await self._records(accesses)).items():
            facts = self._facts(key, record, accesses[key])
            self._queues.count(self._queues.queue_of(facts), facts.size_bytes)
            sizes += facts.size_bytes
        remaining = sum(self._index.usage_bytes.values()) - sum(self._index.deleting_bytes.values())
        self._queues.scale_classes(remaining / max(1, sizes))

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a prefix class, as estimated with the last window."""
        return self._queues.class_bytes(name)

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks of the window in the order in which they are to go."""
        for candidate in self._queues.candidates(is_over_budget):
            self._last_candidate = self._slot_of_key[candidate.key]
            yield candidate

    def line(self, key: int, most: int) -> list[int]:
        """Return nothing: what follows a block may lie outside the window, and `run_victims` does the same."""
        return []

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks of the window that have reached their age."""
        return self._queues.expired(now)

    def discard(self, key: int) -> None:
        """A block was chosen, and nothing of it is left: the next one is chosen as if it were gone."""
        slot = self._slot_of_key.get(key)
        if slot is None:
            return
        queue = self._queues[self._queue_of_slot[slot]]
        if slot in queue.policy:
            queue.policy.remove(slot)
            self._queues.count(queue, -self._slots[slot].size_bytes)
            parent = self._parents[slot]
            if parent is not None:
                self._children[parent] -= 1

    async def settle(self) -> None:
        """Send blocks that had a second chance, and are older than the last candidate, to the hot end."""
        if self._last_candidate is None:  # none was asked for, or for its age only
            return
        last = self._slots[self._last_candidate].summary.written_at
        spent = {
            facts.key: 0 for facts in self._slots if self._has_second_chance(facts) and facts.summary.written_at <= last
        }
        if spent:
            await self._index.requeue(spent, self._clock.now())

    def _facts(self, key: int, record: BlockRecord, access: Access) -> SlotFacts:
        serving = [each for each in record.locations if each.status is LocationStatus.SERVING]
        # Where reads leave the order as it is, the store's time is that of the write, or of the last second chance.
        written_at = access.at if self.plan.policy.orders_by_write else serving[0].written_at
        priority = max(each.priority for each in serving)
        size_bytes = sum(each.size_bytes for each in serving)
        return SlotFacts(key, record.depth, priority, size_bytes, Summary(written_at, access.at, access.reads))

    def _new_queues(self) -> _PolicyQueues:
        return _PolicyQueues(self.plan, self._slots.__getitem__, self._head, self._is_leaf)

    def _head(self, slot: int) -> tuple[int, float]:
        facts = self._slots[slot]
        return facts.key, facts.summary.read_at

    def _is_leaf(self, slot: int) -> bool:
        # Of what lies outside the window the guard takes care.
        return not self._children[self._slots[slot].key]


# Which window of the coldest blocks comes next, where a store that managers share is looked through in windows.
#
# Windows without a victim are left behind: everything in them may be pinned for hours. Since something
# colder can be had again later, every look tries one of those that were left behind, too, one after the other.


class WindowScan:
    """A walk through the windows for one need, which lasts from look to look.

    Attributes:
        window: the one that comes next.
    """

    def __init__(self) -> None:
        self.window = 0
        self._reached = 0
        self._tried = 0
        self._first = 0
        self._is_trying = False

    def start_round(self) -> None:
        """Try one of the windows that were left behind first."""
        self._is_trying = self._reached > 0
        if self._is_trying:
            self.window = self._tried = self._tried % self._reached

    def start_batch(self) -> None:
        """A walk ends where it began: remember that."""
        self._first = self._reached

    def found(self) -> None:
        """Something was had in this window: the next batch looks here again."""
        self._reached = self.window
        self._is_trying = False

    def passed(self, *, is_end: bool) -> bool:
        """Nothing was had in this window; go on, and return whether every window was looked through.

        Args:
            is_end: there was nothing in the window: no block is as warm as that.
        """
        if self._is_trying:
            self._is_trying = False
            self._tried += 1
            self.window = self._reached
            return False
        self.window = self._reached = 0 if is_end else self._reached + 1
        return self._reached == self._first


# Which instances have an eviction order, and which, by the current settings of their groups.
#
# Every round asks, and nearly always nothing has changed: an instance is decided again only when its group is another
# object than before, or when the limits above the groups matter in another way.

TRIGGER_SECONDS = 1.0
"""Between looks, unless a group says otherwise."""
_SHARED_SECONDS = 0.5  # other managers' writes are only seen by looking
Order = LiveOrder | WindowOrder


class _OuterLimits(NamedTuple):
    """Limits above the groups, as far as they decide whether a group has watermarks.

    Attributes:
        are_storages_limited: whether any storage is, by its capacity or since its medium is full.
        quota_names: of the global quotas.
    """

    are_storages_limited: bool
    quota_names: frozenset[str]

    @classmethod
    def of(cls, limits: Limits) -> _OuterLimits:
        is_limited = bool(limits.media) or any(storage.limit_bytes for storage in limits.storages)
        return cls(is_limited, frozenset(quota.name for quota in limits.quotas))

    def gives_marks(self, group: InstanceGroup) -> bool:
        """Return whether anything limits what a group uses, itself included."""
        trigger = group.cache_config.reclaim_strategy.trigger_strategy
        return bool(
            0 < trigger.used_percentage <= 1
            or trigger.used_size
            or self.are_storages_limited
            or group.global_quota_group_name in self.quota_names
        )


class _OrderEntry(NamedTuple):
    """The decision for an instance.

    Attributes:
        group: that was asked, None when it was gone.
        order: None when it needs none.
        expires: whether some of its blocks leave at an age.
        seconds: between looks.
    """

    group: InstanceGroup | None
    order: Order | None
    expires: bool
    seconds: float


class EvictionOrders:
    """The orders of all instances that need one.

    Args:
        find_group: from a name to a group, None when it is gone.
        window_order: makes the order over an index that others share.

    Attributes:
        by_uid: the orders.
        expiring: the uids of those in which some blocks leave at an age.
    """

    def __init__(
        self,
        find_group: Callable[[str], InstanceGroup | None],
        window_order: Callable[[MetaIndex, OrderPlan], WindowOrder],
    ) -> None:
        self._find_group = find_group
        self._window_order = window_order
        self._above = _OuterLimits(are_storages_limited=False, quota_names=frozenset())
        self._entries: dict[int, _OrderEntry] = {}
        self.by_uid: Mapping[int, Order] = {}
        self.expiring: Collection[int] = ()

    async def build(self, handles: Iterable[IndexHandle], limits: Limits) -> None:
        """Do `update` at startup, on a thread, and let probes run meanwhile; no index may change."""
        await asyncio.to_thread(self.update, list(handles), limits)

    def update(self, handles: Iterable[IndexHandle], limits: Limits) -> None:
        """Bring the orders up to date. A new policy reads the whole index once, in one piece.

        Args:
            handles: all instances; the others are forgotten.
            limits: above the groups.
        """
        above = _OuterLimits.of(limits)
        is_as_before, current = above == self._above, {}
        for handle in handles:
            group = self._find_group(handle.instance.instance_group_name)
            known = self._entries.get(handle.uid)
            if known is None or known.group is not group or not is_as_before:
                known = self._decide(handle, group, above, known.order if known is not None else None)
            current[handle.uid] = known
        self._above, self._entries = above, current
        self.by_uid = {uid: each.order for uid, each in current.items() if each.order is not None}
        self.expiring = {uid for uid, each in current.items() if each.expires}

    def _decide(
        self, handle: IndexHandle, group: InstanceGroup | None, above: _OuterLimits, order: Order | None
    ) -> _OrderEntry:
        plan = OrderPlan.of(group, handle.instance.instance_id) if group is not None else None
        if group is not None and plan is not None and (plan.expires or above.gives_marks(group)):
            if order is None or order.plan != plan:
                order = self._new_order(handle.meta_index, plan)
        elif order is not None:
            handle.meta_index.observe(None)
            order = None
        expires = order is not None and order.plan.expires
        return _OrderEntry(group, order, expires, _round_seconds(handle, group, expires=expires))

    def _new_order(self, index: MetaIndex, plan: OrderPlan) -> Order:
        live = LiveOrder.over(index, plan)
        return live if live is not None else self._window_order(index, plan)

    @property
    def round_seconds(self) -> float:
        """How long to wait when no write presses and no setting changes."""
        return min((each.seconds for each in self._entries.values() if each.group is not None), default=TRIGGER_SECONDS)


def _round_seconds(handle: IndexHandle, group: InstanceGroup | None, *, expires: bool) -> float:
    wanted = group.cache_config.reclaim_strategy.trigger_period_seconds if group is not None else 0
    seconds = wanted or TRIGGER_SECONDS
    if expires:  # no write signals that a block expired
        seconds = min(seconds, TRIGGER_SECONDS)
    return min(seconds, _SHARED_SECONDS) if handle.meta_index.is_shared else seconds
