"""What has to go, and from whom: usage against the marks of every level.

What is already being deleted counts as gone: otherwise the delay before a deletion would let every look evict the same
amount again. Levels are looked at from the narrow to the wide: a mark crossed on one type evicts that type only, and
what goes there counts for the group's total, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.locations import Location, Place
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.reclaim.holdings import GroupHoldings, Holding, Wanted
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


class Limits(NamedTuple):
    """The limits above the groups, and all groups."""

    storages: Sequence[StorageConfig]
    quotas: Sequence[GlobalQuota]
    groups: Sequence[InstanceGroup] = ()


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
    """Holdings against limits, once. Every sum is made once, however many storages and quotas ask for it."""

    def __init__(self, holdings: Sequence[Holding], limits: Limits, active: Collection[Label]) -> None:
        members: dict[str, list[Holding]] = {}
        for holding in holdings:
            members.setdefault(holding.group.name, []).append(holding)
        self._groups = [GroupHoldings.of(each) for each in members.values()]
        self._limits = limits
        self._active = active
        self._on_storage: defaultdict[str, list[GroupHoldings]] = defaultdict(list)
        self._allowed_on: defaultdict[str, int] = defaultdict(int)
        self._under_quota: defaultdict[str, list[GroupHoldings]] = defaultdict(list)
        for group in self._groups:
            self._sort(group)
        self._guarantors: defaultdict[str, dict[str, InstanceGroup]] = defaultdict(dict)
        for configured in limits.groups:
            for guarantee in configured.storage_guarantees:
                self._guarantors[guarantee.storage_unique_name][configured.name] = configured

    def _sort(self, held: GroupHoldings) -> None:
        """Note where a group holds something, and where its blocks need room, whether there are any or not."""
        for name in held.by_storage:
            self._on_storage[name].append(held)
        for name in held.group.storage_candidates:
            self._allowed_on[name] = max(self._allowed_on[name], held.largest_block)
        self._under_quota[held.group.global_quota_group_name].append(held)

    def needs(self) -> Iterator[Need]:
        for held in self._groups:
            yield from self._of_types(held)
        for storage in self._limits.storages:
            if storage.limit_bytes:
                yield from self._of_storage(storage)
        for held in self._groups:
            yield from self._of_keys(held)
            yield from self._of_group(held)
        for quota in self._limits.quotas:
            yield from self._of_quota(quota)

    def _of_types(self, held: GroupHoldings) -> Iterator[Need]:
        for quota in held.group.quota.quota_config:
            kind = quota.storage_type
            mark, used = type_mark(held.group, kind, held.largest_block), held.by_type.get(kind, 0)
            name = f"{held.group.name}/{kind.kind}"
            yield from self._need(Reason.TYPE, mark, used, held, partial(_is_of_type, kind), name)

    def _of_group(self, held: GroupHoldings) -> Iterator[Need]:
        group, used = held.group, held.total
        yield from self._need(Reason.SIZE, size_mark(group), used, held, _anywhere, group.name)
        mark = group_mark(group, held.largest_block)
        yield from self._need(Reason.GROUP, mark, used, held, _anywhere, group.name)

    def _of_keys(self, held: GroupHoldings) -> Iterator[Need]:
        for holding in held.members:
            name = holding.instance.instance_id
            excess = self._excess((Reason.KEYS, name), key_mark(held.group, holding.max_keys), holding.keys)
            if excess:
                yield Need(Reason.KEYS, excess, _anywhere, [holding], name, counts_blocks=True)

    def _of_storage(self, storage: StorageConfig) -> Iterator[Need]:
        name = storage.global_unique_name
        users = [(held, used) for held in self._on_storage.get(name, ()) if (used := held.by_storage[name])]
        mark = storage_mark(storage, self._allowed_on.get(name, 0))
        guarantees = {each.name: each.guaranteed_on(storage) for each in self._guarantors.get(name, {}).values()}
        wanted = partial(_is_on, name)
        yield from self._fair_needs(_Contest(Reason.STORAGE, name, mark, users, wanted, guarantees))

    def _of_quota(self, quota: GlobalQuota) -> Iterator[Need]:
        drawing = self._under_quota.get(quota.name, ())
        mark = global_mark(quota, max((held.largest_block for held in drawing), default=0))
        users = [(held, held.total) for held in drawing if held.total]
        yield from self._fair_needs(_Contest(Reason.GLOBAL, quota.name, mark, users, _anywhere, {}))

    def _excess(self, label: Label, mark: Mark | None, used: int) -> int:
        return mark.excess(used, is_active=label in self._active) if mark is not None else 0

    def _need(
        self, reason: Reason, mark: Mark | None, used: int, held: GroupHoldings, wanted: Wanted, name: str
    ) -> Iterator[Need]:
        excess = self._excess((reason, name), mark, used)
        if excess:
            yield Need(reason, excess, wanted, held.members, name)

    def _fair_needs(self, contest: _Contest) -> Iterator[Need]:
        """Take from the groups that use most above what they are entitled to: their guarantee, and an equal share of
        what nobody is guaranteed. Each gives what is above that; the group that is furthest above gives first, and
        the next one where that has nothing to give."""
        reason, name, mark, users, wanted, guarantees = contest
        total = sum(used for _, used in users)
        excess = self._excess((reason, name), mark, total + contest.kept_bytes)
        if not excess or mark is None or not users:
            return
        share = max(0, mark.low - sum(guarantees.values())) // len(users)
        above = [(used - guarantees.get(held.group.name, 0) - share, held) for held, used in users]
        payers = sorted(
            ((most, held) for most, held in above if most > 0), key=lambda payer: (-payer[0], payer[1].group.name)
        )
        for most, held in payers:
            yield Need(reason, min(excess, most), wanted, held.members, name, held.group.name)
        # Nobody gives what is guaranteed to him for a guarantee that is not used: only where too much is used.
        rest = min(excess - sum(most for most, _ in payers), mark.excess(total))
        if rest > 0:  # guarantees that together exceed the mark, and are used
            yield Need(reason, rest, wanted, [each for held, _ in users for each in held.members], name)


class _Contest(NamedTuple):
    """Groups that use one thing.

    Attributes:
        reason: whose mark it is.
        name: of the thing.
        mark: of all groups together.
        users: those that use some of it, with how many bytes.
        wanted: places that belong to it.
        guarantees: bytes by group that it can always have, also of groups that use nothing.
    """

    reason: Reason
    name: str
    mark: Mark | None
    users: Sequence[tuple[GroupHoldings, int]]
    wanted: Wanted
    guarantees: Mapping[str, int]

    @property
    def kept_bytes(self) -> int:
        """Bytes that are guaranteed and not used: nobody else may use them."""
        used = {held.group.name: size for held, size in self.users}
        return sum(max(0, size - used.get(name, 0)) for name, size in self.guarantees.items())


def _anywhere(_place: Place) -> bool:
    return True


def _is_of_type(kind: StorageType, place: Place) -> bool:
    return place.storage_type is kind


def _is_on(name: str, place: Place) -> bool:
    return place.storage == name
