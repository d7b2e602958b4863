"""What a group would have found with other settings: its recorded accesses once more, through the policies themselves.

It does what a manager with its metadata in its own process does (docs/eviction.md), with time as it was recorded:

* Reads are written down once a second, writes at once, each request from its tail to its head.
* A write that leaves the group above its mark evicts down to the low end of it, the tail of a chain before its head.
* What is being deleted takes room for `delay_before_delete_ms`; what finds no room is refused, with all behind it.
* A block that a lookup would have missed although it was found then, is written with what follows it: the engine would
  have computed and written it.

Not rehearsed: classes, pins, step limits, and limits other than the group's own (`proposals.unrehearsed` names them). A
manager over Redis evicts from windows of the coldest blocks, which is less exact than this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcm.model.groups import EvictionPolicy, InstanceGroup, InstanceGroupQuota, TriggerStrategy
from kvcm.optimizer.live.recording import Finish, Lookup, Recording, Start
from kvcm.optimizer.live.resident_blocks import ResidentBlocks
from kvcm.optimizer.live.victims import Member, evict
from kvcm.reclaim.policies import POLICIES
from kvcm.reclaim.watermarks import Mark, group_mark, size_mark

__all__ = ["UNLIMITED_BYTES", "Outcome", "rehearse", "unlimited"]

UNLIMITED_BYTES = 1 << 60
_DRAIN_SECONDS = 1.0  # between two times that reads are written down
_FULL = 0.9  # of the low end of a mark: what is used above that has filled up before


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a group would have found.

    Attributes:
        asked_blocks, found_blocks: by instance.
        refused_blocks: that found no room.
        evicted_blocks: for want of room, or by age.
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


def rehearse(
    recording: Recording, group: InstanceGroup, block_bytes: Mapping[str, int], used_bytes: int = 0
) -> Outcome:
    """Return what a group would have found.

    Args:
        recording: the accesses of all groups.
        group: with the settings that are asked about.
        block_bytes: of each instance of the group, by id.
        used_bytes: what the group uses now; where it was full before the recording began, it is so here.
    """
    return _Rehearsal(recording, group, block_bytes, used_bytes).run()


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
        self._marks = [mark for mark in (group_mark(group, largest), size_mark(group)) if mark is not None]
        self._active: set[Mark] = set()
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
        """Let what was there before be there: the blocks that were found before anybody wrote them, and what nobody
        asked for since, which goes first, up to where a full group was.

        Nobody knows when they were read last. All of them stayed until they were asked for, the later the longer: so
        what is asked for last counts as the newest.
        """
        for block in self._recording.warm:
            member = self._members.get(self._recording.owners[block])
            if member is not None:
                self._take_room(member, 1)
                self._add(member, [block])
        low = min((mark.low for mark in self._marks), default=0)
        if self._used and self._used < low and used_bytes >= _FULL * low:
            self._stale = low - self._used
            self._used = low
        self._evict_down()

    def run(self) -> Outcome:
        """Do everything again."""
        for access in self._recording.accesses:
            member = self._members.get(access.instance)
            if member is None:
                continue
            self._advance(access.at)
            if isinstance(access, Lookup):
                self._look_up(member, access)
            elif isinstance(access, Start):
                self._start(member, access)
            else:
                self._finish(member, access)
        seconds = self._now - self._began
        return Outcome(
            {member.name: member.asked_blocks for member in self._members.values()},
            {member.name: member.found_blocks for member in self._members.values()},
            self._refused,
            self._evicted,
            self._written,
            self._used_seconds / seconds if seconds else float(self._used),
            seconds,
        )

    def _advance(self, at: float) -> None:
        """Do what is due before something happens."""
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

    def _look_up(self, member: Member, access: Lookup) -> None:
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
        place = (access.instance, len(found), found[-1])  # a block stands for what is before it
        _, _, times = self._reads.pop(place, (member, found, 0))
        self._reads[place] = (member, found, times + 1)

    def _drain(self, at: float) -> None:
        """Write reads down as `kvcm.cache.access` does: what was read last is the newest, and of a request its head."""
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
        room = max(0, self._capacity - self._used) // max(1, member.block_bytes)
        self._refused += max(0, len(new) - room)
        new = new[:room]
        for block in new:
            blocks.begin_writing(block)
        self._take_room(member, len(new))
        self._sessions[access.session] = new
        self._evict_down()

    def _finish(self, member: Member, access: Finish) -> None:
        new = self._sessions.pop(access.session, [])
        for block in new:
            self._blocks.end_writing(block)
        written = [block for block in new if block not in access.failed]
        self._give_room(member, len(new) - len(written))
        self._written += len(written)
        self._add(member, written)
        self._evict_down()

    def _add(self, member: Member, blocks: list[int]) -> None:
        for block in blocks:
            self._blocks.add(block, int(self._now))
        newest_last = blocks[::-1]
        member.policy.insert_all(newest_last, newest_last)

    def _take_room(self, member: Member, count: int) -> None:
        member.used_blocks += count
        self._used += count * member.block_bytes

    def _give_room(self, member: Member, count: int) -> None:
        self._take_room(member, -count)

    def _evict_down(self) -> None:
        for mark in self._marks:
            excess = mark.excess(self._used - self._leaving, is_active=mark in self._active)
            if excess:
                stale = min(excess, self._stale)
                self._stale -= stale
                self._used -= stale
                evict([*self._members.values()], self._blocks, excess - stale, self._share, self._now, self._gone)
            is_above = self._used - self._leaving > mark.low
            self._active = self._active | {mark} if excess and is_above else self._active - {mark}

    def _gone(self, member: Member, block: int) -> None:
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
                        self._gone(member, block)
                        going += 1
                if not going:
                    break
