"""What has to go, and from whom: usage against the marks of every level.

What is already being deleted counts as gone: otherwise the delay before a deletion would let every look evict the same
amount again. Levels are looked at from the narrow to the wide: a mark crossed on one type evicts that type only, and
what goes there counts for the group's total, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.locations import Location, Place
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.reclaim.watermarks import Mark, global_mark, group_mark, key_mark, size_mark, storage_mark, type_mark

__all__ = ["Holding", "Label", "Limits", "Need", "Reason", "needs"]


class Reason(Enum):
    """Which mark was crossed."""

    TYPE = "type"
    STORAGE = "storage"
    KEYS = "keys"
    SIZE = "size"
    GROUP = "group"
    GLOBAL = "global"
    TTL = "ttl"


@dataclass(frozen=True, slots=True)
class Holding:
    """What one instance holds, without what is already being deleted.

    Attributes:
        uid: number of its registration.
        instance: the registration.
        group: its group.
        remaining: bytes by place.
        keys: blocks.
        max_keys: most blocks that it may have.
    """

    uid: int
    instance: Instance
    group: InstanceGroup
    remaining: Mapping[Place, int]
    keys: int
    max_keys: int

    def bytes(self, wanted: Wanted) -> int:
        """Return the bytes at wanted places."""
        return sum(size for place, size in self.remaining.items() if wanted(place))


Wanted = Callable[[Place], bool]
"""Whether what lies at a place helps."""


class Limits(NamedTuple):
    """The limits above the groups, and all groups."""

    storages: Sequence[StorageConfig]
    quotas: Sequence[GlobalQuota]
    groups: Sequence[InstanceGroup] = ()

    def kept_on(self, storage: StorageConfig, used: Mapping[str, int]) -> int:
        """Return the bytes on a storage that groups are guaranteed and do not use: nobody else may.

        Args:
            storage: as configured.
            used: bytes on it by group.
        """
        return sum(max(0, group.guaranteed_on(storage) - used.get(group.name, 0)) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Need:
    """Something that has to go.

    Attributes:
        reason: the mark that was crossed.
        amount: bytes, or blocks where `counts_blocks`.
        wanted: places whose bytes help.
        holdings: from whose instances it may be taken.
        name: of the group, type, storage, instance or global quota whose mark it is.
        payer: the group that gives, where several could.
        counts_blocks: whether the amount is blocks.
    """

    reason: Reason
    amount: int
    wanted: Wanted
    holdings: Sequence[Holding]
    name: str
    payer: str = ""
    counts_blocks: bool = False

    @property
    def label(self) -> Label:
        """Names the mark."""
        return self.reason, self.name

    def size_of(self, location: Location) -> int:
        """Return how many bytes of the need the end of a location serves."""
        return location.size_bytes if self.wanted(location.place) else 0


Label = tuple[Reason, str]
"""Names a mark."""


def needs(holdings: Sequence[Holding], limits: Limits, active: Collection[Label] = ()) -> Iterator[Need]:
    """Yield what has to go, the narrowest level first. Lazily: after serving one, ask again with new holdings.

    Args:
        holdings: what every instance holds.
        limits: above the groups.
        active: marks that were crossed and whose low end was not reached yet.
    """
    return _Look(holdings, limits, active).needs()


class _Look:
    """Holdings against limits, once."""

    def __init__(self, holdings: Sequence[Holding], limits: Limits, active: Collection[Label]) -> None:
        self._groups: dict[str, list[Holding]] = {}
        for holding in holdings:
            self._groups.setdefault(holding.group.name, []).append(holding)
        self._limits = limits
        self._active = active

    def needs(self) -> Iterator[Need]:
        for members in self._groups.values():
            yield from self._of_types(members)
        for storage in self._limits.storages:
            if storage.limit_bytes:
                yield from self._of_storage(storage)
        for members in self._groups.values():
            yield from self._of_keys(members)
            yield from self._of_group(members)
        for quota in self._limits.quotas:
            yield from self._of_quota(quota)

    def _of_types(self, members: Sequence[Holding]) -> Iterator[Need]:
        group, block = members[0].group, _largest_block(members)
        for quota in group.quota.quota_config:
            kind = quota.storage_type
            mark = type_mark(group, kind, block)
            yield from self._need(Reason.TYPE, mark, members, partial(_is_of_type, kind), f"{group.name}/{kind.kind}")

    def _of_group(self, members: Sequence[Holding]) -> Iterator[Need]:
        group = members[0].group
        yield from self._need(Reason.SIZE, size_mark(group), members, _anywhere, group.name)
        mark = group_mark(group, _largest_block(members))
        yield from self._need(Reason.GROUP, mark, members, _anywhere, group.name)

    def _of_keys(self, members: Sequence[Holding]) -> Iterator[Need]:
        for holding in members:
            name = holding.instance.instance_id
            excess = self._excess((Reason.KEYS, name), key_mark(holding.group, holding.max_keys), holding.keys)
            if excess:
                yield Need(Reason.KEYS, excess, _anywhere, [holding], name, counts_blocks=True)

    def _of_storage(self, storage: StorageConfig) -> Iterator[Need]:
        name = storage.global_unique_name
        wanted = partial(_is_on, name)
        users = {group: members for group, members in self._groups.items() if _sum(members, wanted)}
        mark = storage_mark(storage, self._largest_block_of(lambda group: name in group.storage_candidates))
        used = {group: _sum(members, wanted) for group, members in users.items()}
        kept = self._limits.kept_on(storage, used)
        guarantees = {group.name: group.guaranteed_on(storage) for group in self._limits.groups}
        yield from self._fair_needs(_Contest(Reason.STORAGE, name, mark, users, wanted, guarantees, kept))

    def _of_quota(self, quota: GlobalQuota) -> Iterator[Need]:
        drawing = {
            group: members
            for group, members in self._groups.items()
            if members[0].group.global_quota_group_name == quota.name and _sum(members, _anywhere)
        }
        mark = global_mark(quota, self._largest_block_of(lambda group: group.global_quota_group_name == quota.name))
        yield from self._fair_needs(_Contest(Reason.GLOBAL, quota.name, mark, drawing, _anywhere, {}))

    def _largest_block_of(self, may_use: Callable[[InstanceGroup], bool]) -> int:
        """Return the largest block of all groups that may use something, whether they do or not."""
        return _largest_block([each for members in self._groups.values() for each in members if may_use(each.group)])

    def _excess(self, label: Label, mark: Mark | None, used: int) -> int:
        return mark.excess(used, is_active=label in self._active) if mark is not None else 0

    def _need(
        self, reason: Reason, mark: Mark | None, members: Sequence[Holding], wanted: Wanted, name: str
    ) -> Iterator[Need]:
        excess = self._excess((reason, name), mark, _sum(members, wanted)) if mark is not None else 0
        if excess:
            yield Need(reason, excess, wanted, members, name)

    def _fair_needs(self, contest: _Contest) -> Iterator[Need]:
        """Take from the groups that use most above what they are entitled to: their guarantee, and an equal share of
        what nobody is guaranteed. Each gives what is above that; the group that is furthest above gives first, and
        the next one where that has nothing to give."""
        reason, name, mark, users, wanted, guarantees, kept = contest
        used = {group: _sum(members, wanted) for group, members in users.items()}
        total = sum(used.values())
        excess = self._excess((reason, name), mark, total + kept)
        if not excess or mark is None or not users:
            return
        share = max(0, mark.low - sum(guarantees.values())) // len(users)
        above = {group: used[group] - guarantees.get(group, 0) - share for group in users}
        payers = sorted((group for group in users if above[group] > 0), key=lambda group: (-above[group], group))
        for group in payers:
            yield Need(reason, min(excess, above[group]), wanted, users[group], name, group)
        rest = min(excess - sum(above[group] for group in payers), total - mark.low)
        if rest > 0:  # guarantees that together exceed the mark, and are used
            yield Need(reason, rest, wanted, [holding for members in users.values() for holding in members], name)


class _Contest(NamedTuple):
    """Groups that use one thing.

    Attributes:
        reason: whose mark it is.
        name: of the thing.
        mark: of all groups together.
        users: holdings by group.
        wanted: places that belong to it.
        guarantees: bytes by group that it can always have, also of groups that use nothing.
        kept: bytes that are guaranteed and not used.
    """

    reason: Reason
    name: str
    mark: Mark | None
    users: Mapping[str, Sequence[Holding]]
    wanted: Wanted
    guarantees: Mapping[str, int]
    kept: int = 0


def _anywhere(_place: Place) -> bool:
    return True


def _is_of_type(kind: StorageType, place: Place) -> bool:
    return place.storage_type is kind


def _is_on(name: str, place: Place) -> bool:
    return place.storage == name


def _largest_block(holdings: Sequence[Holding]) -> int:
    return max((holding.instance.block_bytes for holding in holdings), default=0)


def _sum(holdings: Sequence[Holding], wanted: Wanted) -> int:
    return sum(holding.bytes(wanted) for holding in holdings)
