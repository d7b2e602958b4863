"""What a group would have found with other settings: its recorded accesses once more, through the policies themselves.

It does what a manager with its metadata in its own process does (docs/eviction.md), with time as it was recorded:

* Reads are written down once a second, writes at once, each request from its tail to its head.
* A write that leaves the group above its mark evicts down to the low end of it, the tail of a chain before its head.
* A block that is being deleted uses bytes for `delay_before_delete_ms`; one that does not fit is refused, with all
  behind it.
* A block that a lookup would have missed although it was found then, is written with what follows it: the engine would
  have computed and written it.

Not rehearsed: classes, pins, step limits, and limits other than the group's own (`proposals.unrehearsed` names them). A
manager over Redis evicts from windows of the coldest blocks, which is less exact than this.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from multiprocessing import get_context

from kvcm.model.groups import EvictionPolicy, InstanceGroup, InstanceGroupQuota, TriggerStrategy
from kvcm.optimizer.live.recording import Access, Finish, Lookup, Recording, Start
from kvcm.reclaim.policies import POLICIES, Policy
from kvcm.reclaim.policies.sharing import Sharing
from kvcm.reclaim.watermarks import Watermark, group_watermark, size_watermark

__all__ = [
    "MOST_FOLLOWERS",
    "UNLIMITED_BYTES",
    "Member",
    "Outcome",
    "Rehearse",
    "ResidentBlocks",
    "Trial",
    "evict",
    "rehearsals",
    "rehearse",
    "unlimited",
]

# Which blocks of a rehearsal are there, and how they follow one another.

MOST_FOLLOWERS = 1024
"""Blocks behind a victim that are looked through for the coldest leaf, as by the live guard."""


class ResidentBlocks:
    """The state of every block; *living* blocks are resident or being written.

    Args:
        recording: whose blocks they are.
    """

    def __init__(self, recording: Recording) -> None:
        count = len(recording.parents)
        self.parents: Sequence[int] = recording.parents
        self.depths: Sequence[int] = recording.depths
        self.is_resident = bytearray(count)
        self.is_writing = bytearray(count)
        self.read_at = array("d", bytes(8 * count))
        self.written_at = array("d", bytes(8 * count))
        self._resident_children = array("i", bytes(4 * count))
        self._writing_children = array("i", bytes(4 * count))
        self._children: dict[int, list[int]] = {}
        for block, parent in enumerate(recording.parents):
            if parent >= 0:
                self._children.setdefault(parent, []).append(block)

    def begin_writing(self, block: int) -> None:
        """A block is being written."""
        self.is_writing[block] = 1
        if self.parents[block] >= 0:
            self._writing_children[self.parents[block]] += 1

    def end_writing(self, block: int) -> None:
        """It is not, any more."""
        self.is_writing[block] = 0
        if self.parents[block] >= 0:
            self._writing_children[self.parents[block]] -= 1

    def add(self, block: int, at: float) -> None:
        """A block is resident from now on."""
        self.is_resident[block] = 1
        self.read_at[block] = self.written_at[block] = at
        if self.parents[block] >= 0:
            self._resident_children[self.parents[block]] += 1

    def remove(self, block: int) -> None:
        """A block is gone."""
        self.is_resident[block] = 0
        if self.parents[block] >= 0:
            self._resident_children[self.parents[block]] -= 1

    def has_no_resident_child(self, block: int) -> bool:
        """Return what policies call a leaf."""
        return not self._resident_children[block]

    def is_leaf(self, block: int) -> bool:
        """Return whether nothing living follows a block."""
        return not (self._resident_children[block] or self._writing_children[block])

    def _is_living(self, block: int) -> bool:
        return bool(self.is_resident[block] or self.is_writing[block])

    def ancestors_missing(self, block: int) -> list[int]:
        """Return the blocks before one that are not living, the first of the chain first."""
        missing = []
        parent = self.parents[block]
        while parent >= 0 and not self._is_living(parent):
            missing.append(parent)
            parent = self.parents[parent]
        return missing[::-1]

    def tail_first(self, root: int) -> Iterator[int]:
        """Yield what follows a block in the order in which it is to go, the block itself at last, as the live guard
        does: always the coldest leaf, of equals the deepest. Nothing where more than `MOST_FOLLOWERS` follow.

        The caller removes a block before the next step, or keeps it: then nothing before it is named.
        """
        found, open_children = self._living_below(root)
        if len(found) > MOST_FOLLOWERS:
            return
        leaves = [self._coldness(block) for block in found if block not in open_children]
        heapify(leaves)
        while leaves:
            block = heappop(leaves)[2]
            yield block
            parent = self.parents[block]
            if self._is_living(block) or block == root or parent not in open_children:
                continue
            open_children[parent] -= 1
            if not open_children[parent]:
                del open_children[parent]
                heappush(leaves, self._coldness(parent))

    def _coldness(self, block: int) -> tuple[float, int, int]:
        return self.read_at[block], -self.depths[block], block

    def _living_below(self, root: int) -> tuple[list[int], dict[int, int]]:
        """Return a block with what follows it, and of those that are followed how many directly do."""
        found, open_children = [root], dict[int, int]()
        for block in found:  # which grows meanwhile
            children = [child for child in self._children.get(block, ()) if self._is_living(child)]
            if children:
                open_children[block] = len(children)
                found += children
            if len(found) > MOST_FOLLOWERS:
                break
        return found, open_children


# Victims when a rehearsed group is above a watermark: those of the live reclaimer, one block after the other.

_NAMES_LEAVES = "leaf_lru"


@dataclass(slots=True, eq=False)
class Member:
    """An instance of the group.

    Attributes:
        name: its id.
        block_bytes: of each of its blocks.
        weight: of its claim to the group's space.
        rule: order and age of its blocks.
        policy: the order.
        used_blocks: resident, being written, or being deleted.
        asked_blocks, found_blocks: by lookups.
    """

    name: str
    block_bytes: int
    weight: float
    rule: EvictionPolicy
    policy: Policy
    used_blocks: int = 0
    asked_blocks: int = 0
    found_blocks: int = 0


class _VictimSelection:
    """One look of the reclaimer.

    Args:
        members: from whom it may be taken.
        blocks: all blocks.
        amount: bytes that have to go.
        share: which member gives: `group_lru`, `proportional` or `fixed`.
        now: seconds.
        gone: called with each evicted block and its member.
    """

    def __init__(
        self,
        members: Sequence[Member],
        blocks: ResidentBlocks,
        amount: int,
        share: str,
        now: float,
        gone: Callable[[Member, int], None],
    ) -> None:
        self._members = members
        self._blocks = blocks
        self._left = amount
        self._now = now
        self._gone = gone
        used = {turn: member.used_blocks * member.block_bytes for turn, member in enumerate(members)}
        self._sharing = Sharing(share, used, {turn: member.weight for turn, member in enumerate(members)}, amount)

    def run(self) -> None:
        """Take victims until it is enough, or there are no more."""
        walks = [member.policy.victims() for member in self._members]
        try:
            self._evict_merged(walks)
        finally:
            for walk in walks:
                walk.close()  # type: ignore[attr-defined] # they are generators: a cursor of the policy is closed

    def _evict_merged(self, walks: Sequence[Iterator[int]]) -> None:
        heads = [next(walk, -1) for walk in walks]
        while self._left > 0:
            turns = [turn for turn, head in enumerate(heads) if head >= 0]
            if not turns:
                return
            turn = turns[0] if len(turns) == 1 else min(turns, key=lambda turn: self._turn(turn, heads[turn]))
            left = self._left
            self._evict_with_tail(self._members[turn], heads[turn])
            self._sharing.record(turn, left - self._left)
            if self._left > 0:
                heads[turn] = next(walks[turn], -1)

    def _turn(self, turn: int, head: int) -> tuple[float, float]:
        return self._sharing.priority(turn, self._now - self._blocks.read_at[head])

    def _evict_with_tail(self, member: Member, head: int) -> None:
        if self._blocks.is_leaf(head):
            self._evict(member, head)
            if member.rule.name == _NAMES_LEAVES:
                self._evict_colder_leaves(member, head)
        elif member.rule.name != _NAMES_LEAVES:  # else something is being written behind it
            for block in self._blocks.tail_first(head):
                if self._left <= 0:
                    return
                self._evict(member, block)

    def _evict_colder_leaves(self, member: Member, block: int) -> None:
        """A block that is the end of its chain now, and colder than the one that was, has been left behind."""
        read_at, parent = self._blocks.read_at[block], self._blocks.parents[block]
        while self._left > 0 and parent >= 0 and self._blocks.is_resident[parent]:
            if self._blocks.read_at[parent] >= read_at or not self._blocks.is_leaf(parent):
                return
            self._evict(member, parent)
            parent = self._blocks.parents[parent]

    def _evict(self, member: Member, block: int) -> None:
        if not self._blocks.is_resident[block]:  # it is being written
            return
        self._left -= member.block_bytes
        self._gone(member, block)


def evict(
    members: Sequence[Member],
    blocks: ResidentBlocks,
    amount: int,
    share: str,
    now: float,
    gone: Callable[[Member, int], None],
) -> None:
    """Choose blocks of so many bytes, as far as there are any.

    Args:
        members: from whom they may be taken.
        blocks: all blocks.
        amount: bytes that have to go.
        share: which member gives: `group_lru` (or ""), `proportional` or `fixed`.
        now: seconds.
        gone: removes a block from the policy of its member and from the resident ones.
    """
    _VictimSelection(members=members, blocks=blocks, amount=amount, share=share, now=now, gone=gone).run()


UNLIMITED_BYTES = 1 << 60
_DRAIN_SECONDS = 1.0  # between two times that reads are written down
_FULL = 0.9  # of the low watermark: a group that uses more has filled up before


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a group would have found.

    Attributes:
        asked_blocks, found_blocks: by instance.
        refused_blocks: that did not fit.
        evicted_blocks: for capacity, or by age.
        written_blocks: that were stored.
        mean_used_bytes: over the time that was recorded.
        seconds: that were recorded.
    """

    asked_blocks: Mapping[str, int]
    found_blocks: Mapping[str, int]
    refused_blocks: int
    evicted_blocks: int
    written_blocks: int
    mean_used_bytes: float
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Return blocks found per block asked for."""
        return sum(self.found_blocks.values()) / max(1, sum(self.asked_blocks.values()))


Observe = Callable[[Access, ResidentBlocks, int], None]
"""Called after each access, with all blocks and the bytes that the group uses then."""


def _observe_nothing(_access: Access, _blocks: ResidentBlocks, _used_bytes: int) -> None:
    """Watch nothing."""


def rehearse(
    recording: Recording,
    group: InstanceGroup,
    block_bytes: Mapping[str, int],
    used_bytes: int = 0,
    observe: Observe = _observe_nothing,
) -> Outcome:
    """Return what a group would have found.

    Args:
        recording: the accesses of all groups.
        group: with the settings that are asked about.
        block_bytes: of each instance of the group, by id.
        used_bytes: what the group uses now; where it was full before the recording began, it is so here.
        observe: watches it.
    """
    return _Rehearsal(recording, group, block_bytes, used_bytes).run(observe)


def unlimited(group: InstanceGroup) -> InstanceGroup:
    """Return the group without limits, marks and ages."""
    strategy = group.cache_config.reclaim_strategy
    endless = replace(strategy, trigger_strategy=TriggerStrategy(), policy=EvictionPolicy("lru"), instance_overrides=())
    cache_config = replace(group.cache_config, reclaim_strategy=endless)
    return replace(group, quota=InstanceGroupQuota(UNLIMITED_BYTES), cache_config=cache_config)


class _Rehearsal:
    def __init__(
        self, recording: Recording, group: InstanceGroup, block_bytes: Mapping[str, int], used_bytes: int
    ) -> None:
        self._recording = recording
        self._blocks = ResidentBlocks(recording)
        numbers = {name: number for number, name in enumerate(recording.instance_names)}
        self._members = {
            numbers[name]: self._member(group, name, size) for name, size in block_bytes.items() if name in numbers
        }
        largest = max(block_bytes.values(), default=0)
        self._marks = [mark for mark in (group_watermark(group, largest), size_watermark(group)) if mark is not None]
        self._active: set[Watermark] = set()
        strategy = group.cache_config.reclaim_strategy
        self._capacity = group.quota.capacity
        self._share = strategy.share
        self._delay = strategy.delay_before_delete_ms / 1000
        self._used = self._leaving = self._stale = 0
        self._deleting: deque[tuple[float, int]] = deque()
        self._reads: dict[tuple[int, int, int], tuple[Member, list[int], int]] = {}
        self._sessions: dict[int, list[int]] = {}
        self._refused = self._evicted = self._written = 0
        self._now = self._began = recording.accesses[0].at if recording.accesses else 0.0
        self._drain_at = self._now + _DRAIN_SECONDS
        self._used_seconds = 0.0
        self._warm_up(used_bytes)

    def _member(self, group: InstanceGroup, name: str, block_bytes: int) -> Member:
        rule = group.policy_of(name)
        policy = POLICIES[rule.name](self._blocks.has_no_resident_child, rule)
        return Member(name, block_bytes, group.override_of(name).weight or 1.0, rule, policy)

    def _warm_up(self, used_bytes: int) -> None:
        """Start with the blocks that were there before: those that were found before they were written, and those that
        were not asked for since, which go first, up to where a full group was.

        The time of their last read is not known. All of them stayed until they were asked for, the later the longer: so
        the block that is read last counts as the newest.
        """
        for block in self._recording.warm:
            member = self._members.get(self._recording.owners[block])
            if member is not None:
                self._acquire_bytes(member, 1)
                self._add(member, [block])
        low = min((mark.low for mark in self._marks), default=0)
        if self._used and self._used < low and used_bytes >= _FULL * low:
            self._stale = low - self._used
            self._used = low
        self._evict_down()

    def run(self, observe: Observe) -> Outcome:
        """Do everything again."""
        for access in self._recording.accesses:
            member = self._members.get(access.instance)
            if member is None:
                continue
            self._advance(access.at)
            if isinstance(access, Lookup):
                self._lookup(member, access)
            elif isinstance(access, Start):
                self._start(member, access)
            else:
                self._finish(member, access)
            observe(access, self._blocks, self._used)
        seconds = self._now - self._began
        return Outcome(
            asked_blocks={member.name: member.asked_blocks for member in self._members.values()},
            found_blocks={member.name: member.found_blocks for member in self._members.values()},
            refused_blocks=self._refused,
            evicted_blocks=self._evicted,
            written_blocks=self._written,
            mean_used_bytes=self._used_seconds / seconds if seconds else float(self._used),
            seconds=seconds,
        )

    def _advance(self, at: float) -> None:
        """Carry out everything that is due before an access."""
        self._used_seconds += self._used * (at - self._now)
        self._now = at
        while self._deleting and self._deleting[0][0] <= at:
            size = self._deleting.popleft()[1]
            self._used -= size
            self._leaving -= size
        if at >= self._drain_at:
            self._drain(self._drain_at)
            self._expire()
            self._drain_at = at - (at - self._drain_at) % _DRAIN_SECONDS + _DRAIN_SECONDS

    def _lookup(self, member: Member, access: Lookup) -> None:
        is_resident, blocks = self._blocks.is_resident, access.blocks
        if access.is_prefix:
            count = next((place for place, block in enumerate(blocks) if not is_resident[block]), len(blocks))
            found = list(blocks[:count])
        else:
            found = [block for block in blocks if is_resident[block]]
        member.asked_blocks += len(blocks)
        member.found_blocks += len(found)
        if not found:
            return
        place = (access.instance, len(found), found[-1])  # a block stands for its whole prefix
        _, _, times = self._reads.pop(place, (member, found, 0))
        self._reads[place] = (member, found, times + 1)

    def _drain(self, at: float) -> None:
        """Record reads as `kvcm.cache.access` does: the last read is the newest, and of a request its head."""
        counts: dict[Member, dict[int, int]] = {}
        for member, found, times in self._reads.values():
            of_member = counts.setdefault(member, {})
            for block in reversed(found):
                of_member[block] = of_member.pop(block, 0) + times
        self._reads.clear()
        for member, of_member in counts.items():
            read = {block: times for block, times in of_member.items() if self._blocks.is_resident[block]}
            if read:
                member.policy.touch_all(list(read), list(read.values()))
            for block in () if member.rule.orders_by_write else read:
                self._blocks.read_at[block] = int(at)

    def _start(self, member: Member, access: Start) -> None:
        blocks = self._blocks
        wanted = [*blocks.ancestors_missing(access.blocks[0]), *access.blocks] if access.blocks else []
        new = [block for block in wanted if not (blocks.is_resident[block] or blocks.is_writing[block])]
        fitting = max(0, self._capacity - self._used) // max(1, member.block_bytes)
        self._refused += max(0, len(new) - fitting)
        new = new[:fitting]
        for block in new:
            blocks.begin_writing(block)
        self._acquire_bytes(member, len(new))
        self._sessions[access.session] = new
        self._evict_down()

    def _finish(self, member: Member, access: Finish) -> None:
        new = self._sessions.pop(access.session, [])
        for block in new:
            self._blocks.end_writing(block)
        written = [block for block in new if block not in access.failed]
        self._release_bytes(member, len(new) - len(written))
        self._written += len(written)
        self._add(member, written)
        self._evict_down()

    def _add(self, member: Member, blocks: list[int]) -> None:
        for block in blocks:
            self._blocks.add(block, int(self._now))
        newest_last = blocks[::-1]
        member.policy.insert_all(newest_last, newest_last)

    def _acquire_bytes(self, member: Member, count: int) -> None:
        member.used_blocks += count
        self._used += count * member.block_bytes

    def _release_bytes(self, member: Member, count: int) -> None:
        self._acquire_bytes(member, -count)

    def _evict_down(self) -> None:
        for mark in self._marks:
            excess = mark.excess(self._used - self._leaving, is_active=mark in self._active)
            if excess:
                stale = min(excess, self._stale)
                self._stale -= stale
                self._used -= stale
                evict(
                    members=[*self._members.values()],
                    blocks=self._blocks,
                    amount=excess - stale,
                    share=self._share,
                    now=self._now,
                    gone=self._on_removed,
                )
            is_above = self._used - self._leaving > mark.low
            self._active = self._active | {mark} if excess and is_above else self._active - {mark}

    def _on_removed(self, member: Member, block: int) -> None:
        member.policy.remove(block, evicted=True)
        self._blocks.remove(block)
        self._evicted += 1
        member.used_blocks -= 1
        if self._delay:
            self._leaving += member.block_bytes
            self._deleting.append((self._now + self._delay, member.block_bytes))
        else:
            self._used -= member.block_bytes

    def _expire(self) -> None:
        """Let blocks go that have reached their age, what follows them first; what others follow waits for them."""
        for member in self._members.values():
            if not member.rule.ttl_seconds:
                continue
            since = self._blocks.written_at if member.rule.orders_by_write else self._blocks.read_at
            while True:
                old = []
                for block in member.policy.victims():
                    if self._now - since[block] < member.rule.ttl_seconds:
                        break
                    old.append(block)
                old.sort(key=self._blocks.depths.__getitem__, reverse=True)
                going = 0
                for block in old:
                    if self._blocks.is_leaf(block):
                        self._on_removed(member, block)
                        going += 1
                if not going:
                    break


# Rehearsals of several settings, in processes beside each other where there is much to rehearse.

_WORTH_A_PROCESS = 100_000  # accesses to blocks: below, a process takes longer to start


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings, and what they would have given."""

    group: InstanceGroup
    outcome: Outcome


Rehearse = Callable[[Sequence[InstanceGroup], Mapping[str, int], int], list[Trial]]
"""Rehearses one group with several settings: those, the bytes of a block by instance, and what the group uses now."""
_recording: Recording | None = None


@contextmanager
def rehearsals(recording: Recording, workers: int = 0) -> Iterator[Rehearse]:
    """Yield what rehearses settings inside the block.

    Args:
        recording: what to rehearse.
        workers: processes, 0 for one per core; one does without.
    """
    accesses = sum(len(access.blocks) for access in recording.accesses if isinstance(access, Lookup))
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1 or accesses < _WORTH_A_PROCESS:
        yield partial(_rehearse_in_process, recording)
        return
    # Started afresh: the caller may have threads, which a fork would leave behind.
    with ProcessPoolExecutor(workers, get_context("spawn"), _init_worker, (recording,)) as pool:
        yield partial(_rehearse_in_workers, pool)


def _rehearse_in_process(
    recording: Recording, groups: Sequence[InstanceGroup], block_bytes: Mapping[str, int], used_bytes: int
) -> list[Trial]:
    return [Trial(group, rehearse(recording, group, block_bytes, used_bytes)) for group in groups]


def _rehearse_in_workers(
    pool: ProcessPoolExecutor, groups: Sequence[InstanceGroup], block_bytes: Mapping[str, int], used_bytes: int
) -> list[Trial]:
    one = partial(_rehearse_in_worker, block_bytes=dict(block_bytes), used_bytes=used_bytes)
    return [Trial(group, outcome) for group, outcome in zip(groups, pool.map(one, groups), strict=True)]


def _init_worker(recording: Recording) -> None:
    global _recording
    _recording = recording


def _rehearse_in_worker(group: InstanceGroup, block_bytes: Mapping[str, int], used_bytes: int) -> Outcome:
    assert _recording is not None
    return rehearse(_recording, group, block_bytes, used_bytes)
