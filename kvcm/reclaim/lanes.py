"""Lanes: blocks of one instance that are ordered by one policy.

A lane per prefix class and priority; nearly every instance has one only. Which lane gives up a block next: one whose
class is over its budget before the others, then the one of the lowest priority, then the one whose candidate was not
read for the longest time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvcm.model.groups import EvictionPolicy, InstanceGroup, PrefixClass
from kvcm.reclaim.policies import POLICIES
from kvcm.reclaim.policies.policy import IsLeaf, Policy, Summary

__all__ = ["Candidate", "IsOverBudget", "Lane", "Lanes", "OrderPlan", "SlotFacts"]

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
            replace(each, policy=each.policy.or_else(policy))
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
    """What lanes ask of the block in a slot.

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
        priority: what is lower goes first.
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
        """What is smaller goes first, before any age is looked at."""
        return not self.is_over_budget, self.priority


class Lane:
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
        """Return when a block leaves though there is room, None for never."""
        if not self.settings.ttl_seconds:
            return None
        slides = self.settings.name in {"lru", "leaf_lru"} or (
            self.settings.name == "ttl" and self.settings.ttl_sliding
        )
        return (summary.read_at if slides else summary.written_at) + self.settings.ttl_seconds


class Lanes:
    """The lanes of one instance.

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
        self._lanes: list[Lane] = []
        self._by_kind: dict[tuple[str, int], Lane] = {}
        self._class_bytes: dict[str, int] = {each.name: 0 for each in plan.classes}

    def __getitem__(self, number: int) -> Lane:
        return self._lanes[number]

    def __len__(self) -> int:
        return sum(len(lane.policy) for lane in self._lanes)

    def lane_of(self, facts: SlotFacts) -> Lane:
        """Return the lane that a block belongs to."""
        prefix_class = self.plan.class_of(facts.depth, facts.summary.reads) if self.plan.classes else None
        priority = facts.priority + (prefix_class.priority if prefix_class is not None else 0)
        if prefix_class is None:
            return self.lane_of_priority(priority)
        lane = self._by_kind.get((prefix_class.name, priority))
        return lane if lane is not None else self._open(prefix_class, priority)

    def _open(self, prefix_class: PrefixClass | None, priority: int) -> Lane:
        settings = prefix_class.policy if prefix_class is not None else self.plan.policy
        lane = Lane(len(self._lanes), prefix_class, priority, settings, self._is_leaf)
        self._by_kind[prefix_class.name if prefix_class is not None else "", priority] = lane
        self._lanes.append(lane)
        return lane

    def lane_of_priority(self, priority: int) -> Lane:
        """Return the lane of blocks of no class."""
        lane = self._by_kind.get(("", priority))
        return lane if lane is not None else self._open(None, priority)

    def count(self, lane: Lane, size_bytes: int) -> None:
        """Count bytes of a class; negative ones when they go."""
        if lane.prefix_class is not None:
            self._class_bytes[lane.prefix_class.name] += size_bytes

    def scale_classes(self, factor: float) -> None:
        """What was counted is a sample: take it for so many times as much."""
        self._class_bytes = {name: int(size * factor) for name, size in self._class_bytes.items()}

    def class_bytes(self, name: str) -> int:
        """Return the bytes of a class, of this instance alone."""
        return self._class_bytes.get(name, 0)

    def candidates(self, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        """Yield blocks in the order in which they are to go. Whoever iterates may evict as it goes on."""
        lanes = [lane for lane in self._lanes if len(lane.policy)]
        if len(lanes) == 1:
            yield from self._of_lane(lanes[0], is_over_budget)
        else:
            yield from self._merged([self._of_lane(lane, is_over_budget) for lane in lanes])

    def expired(self, now: float) -> Iterator[Candidate]:
        """Yield blocks that have reached their age."""
        for lane in self._lanes:
            if not lane.settings.ttl_seconds:
                continue
            for slot in lane.policy.victims():
                facts = self._facts(slot)
                at = lane.expires_at(facts.summary)
                if at is None or at > now:
                    break
                yield Candidate(facts.key, True, lane.priority, facts.summary.read_at, lane.settings.name)

    def _of_lane(self, lane: Lane, is_over_budget: IsOverBudget) -> Iterator[Candidate]:
        prefix_class = lane.prefix_class
        has_budget = prefix_class is not None and prefix_class.budget > 0
        for slot in lane.policy.victims():
            key, read_at = self._head(slot)
            is_over = has_budget and prefix_class is not None and is_over_budget(prefix_class)
            yield Candidate(key, is_over, lane.priority, read_at, lane.settings.name)

    def _merged(self, sources: Sequence[Iterator[Candidate]]) -> Iterator[Candidate]:
        heads = {number: head for number, source in enumerate(sources) if (head := next(source, None)) is not None}
        while heads:
            number = min(heads, key=lambda number: (*heads[number].urgency, heads[number].read_at, number))
            yield heads.pop(number)
            head = next(sources[number], None)
            if head is not None:
                heads[number] = head
