"""The order of eviction over an index that managers share: chosen among a window of its coldest blocks.

Nobody is told of every change here, and 10⁸ blocks fit no leader's memory. The store keeps the blocks in the order of
their last reads (of their writes, where the policy orders by write), so a window of the coldest of them is fetched, put
into the very policies that the live order uses, by what the store remembers of each, and asked for victims. For lru,
leaf_lru, ttl and fifo that is exact to the second. lfu also looks at a random sample, since what was read rarely may
have been read lately. sieve and s3fifo become second chances: a block that was read and is passed over goes back to the
hot end with its reads used up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random

from kvcm.index.backends.backend import Access
from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import Clock
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.reclaim.lanes import Candidate, IsOverBudget, Lanes, OrderPlan, SlotFacts
from kvcm.reclaim.policies.policy import Summary

__all__ = ["WindowOrder"]

_TIMES = 4  # candidates per victim: some are pinned, being deleted, or of another storage
_TIMES_SAMPLED = 16
_LEAST = 256
_MOST_SWEEPS = 16  # windows in which too little was not read, in a row
_SAMPLE = 1024  # from which the bytes of a class are estimated: to about 2 points
_SECOND_CHANCES = {"sieve": 1, "s3fifo": 2}
"""Policies that pass over what was read, and from how many reads on."""


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
        self._lane_of_slot: list[int] = []
        self._slot_of_key: dict[int, int] = {}
        self._parents: list[int | None] = []
        self._lanes = self._no_lanes()
        self._asked: int | None = None

    def __len__(self) -> int:
        return len(self._slots)

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        """Fetch a window in which so many victims can be found; send those that have a second chance to the hot end
        while there are too few others."""
        size = max(_LEAST, _TIMES * count)
        for _ in range(_MOST_SWEEPS):
            accesses = dict(await self._index.coldest(size, window * size))
            is_whole = len(accesses) < size
            if self._samples:
                sample = await self._index.random_sample(_TIMES_SAMPLED * count, self._random)
                found = zip(sample, await self._index.accesses(sample), strict=True)
                accesses |= {key: access for key, access in found if access is not None}
            records = await self._records(accesses)
            spent = await self._fill(records, accesses, takes_all=is_whole)
            if is_whole or not spent or len(self._lanes) >= count:
                break
            await self._index.requeue(dict.fromkeys(spent, 0), self._clock.now())
        return records

    @property
    def _samples(self) -> bool:
        names = {self.plan.policy.name, *(each.policy.name for each in self.plan.classes)}
        by_write = {self.plan.policy.orders_by_write, *(each.policy.orders_by_write for each in self.plan.classes)}
        return "lfu" in names or len(by_write) > 1

    async def _records(self, accesses: Mapping[int, Access]) -> dict[int, BlockRecord]:
        keys = list(accesses)
        records = zip(keys, await self._index.get(keys), strict=True)
        return {key: record for key, record in records if record is not None and _is_resident(record)}

    async def _fill(
        self, records: Mapping[int, BlockRecord], accesses: Mapping[int, Access], *, takes_all: bool
    ) -> list[int]:
        """Put blocks in order; return the keys of those that have a second chance, which are left out unless the window
        takes all."""
        self._slots = [self._facts(key, record, accesses[key]) for key, record in records.items()]
        self._slot_of_key = {facts.key: slot for slot, facts in enumerate(self._slots)}
        self._asked = None
        self._children = Counter(record.parent for record in records.values() if record.parent is not None)
        self._parents = [record.parent for record in records.values()]
        self._lane_of_slot = [0] * len(self._slots)
        self._lanes = self._no_lanes()
        ranked, spent = [], []
        for slot, facts in enumerate(self._slots):
            if self._has_second_chance(facts):
                spent.append(facts.key)
                if not takes_all:
                    continue
            lane = self._lanes.lane_of(facts)
            ranked.append((lane.policy.rank(facts.summary), -facts.depth, slot, lane))
        ranked.sort(key=lambda each: each[:3])
        for _, _, slot, lane in ranked:
            lane.policy.restore(slot, self._slots[slot].key, self._slots[slot].summary)
            self._lane_of_slot[slot] = lane.number
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
            self._lanes.count(self._lanes.lane_of(facts), facts.size_bytes)
            sizes += facts.size_bytes
        remaining = sum(self._index.usage_bytes.values()) - sum(self._index.deleting_bytes.values())
        self._lanes.scale_classes(remaining / max(1, sizes))

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a prefix class, as estimated with the last window."""
        return self._lanes.class_bytes(name)

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks of the window in the order in which they are to go."""
        for candidate in self._lanes.candidates(is_over_budget):
            self._asked = self._slot_of_key[candidate.key]
            yield candidate

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks of the window that have reached their age."""
        return self._lanes.expired(now)

    def took(self, key: int) -> None:
        """A block was chosen, and nothing of it is left: the next one is chosen as if it were gone."""
        slot = self._slot_of_key.get(key)
        if slot is None:
            return
        lane = self._lanes[self._lane_of_slot[slot]]
        if slot in lane.policy:
            lane.policy.remove(slot)
            self._lanes.count(lane, -self._slots[slot].size_bytes)
            parent = self._parents[slot]
            if parent is not None:
                self._children[parent] -= 1

    async def settle(self) -> None:
        """Send blocks that had a second chance, and are older than the last candidate, to the hot end."""
        if self._asked is None:  # none was asked for, or for its age only
            return
        last = self._slots[self._asked].summary.written_at
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

    def _no_lanes(self) -> Lanes:
        return Lanes(self.plan, self._slots.__getitem__, self._head, self._is_leaf)

    def _head(self, slot: int) -> tuple[int, float]:
        facts = self._slots[slot]
        return facts.key, facts.summary.read_at

    def _is_leaf(self, slot: int) -> bool:
        # Of what lies outside the window the guard takes care.
        return not self._children[self._slots[slot].key]


def _is_resident(record: BlockRecord) -> bool:
    return any(each.status is LocationStatus.SERVING for each in record.locations)
