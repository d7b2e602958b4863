"""What has to go, level by level, against a plain reading of the rules that adds up everything for every mark anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hypothesis import event, given, settings
from hypothesis import strategies as st
from levels_rig import instance
from thoroughness import examples

from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.locations import Place
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.needs import Holding, Label, Limits, Need, Reason, needs
from kvcm.reclaim.watermarks import Mark, global_mark, group_mark, key_mark, size_mark, storage_mark, type_mark

STORAGES = ("a", "b", "c")
TYPES = (StorageType.ST_DUMMY, StorageType.ST_TAIRMEMPOOL)
PLACES = [Place(storage, kind) for storage in STORAGES for kind in TYPES]  # a name may have been another type's once
GROUPS = ("g", "h", "k")
QUOTAS = ("", "p", "q")
RATIOS = (0.0, 0.5, 0.8, 1.0, 2.0)
SIZES = st.integers(0, 60)


class Seen(NamedTuple):
    """All that can be seen of a need."""

    label: Label
    amount: int
    places: tuple[bool, ...]
    uids: tuple[int, ...]
    payer: str
    counts_blocks: bool


def seen(need: Need) -> Seen:
    places, uids = tuple(map(need.wanted, PLACES)), tuple(holding.uid for holding in need.holdings)
    return Seen(need.label, need.amount, places, uids, need.payer, need.counts_blocks)


def is_of_type(kind: StorageType, place: Place) -> bool:
    return place.storage_type is kind


# ── the rules, as plainly as they can be written ──


class Rules(NamedTuple):
    """Holdings, limits, and the marks that were crossed before."""

    holdings: Sequence[Holding]
    limits: Limits
    active: frozenset[Label]

    def needs(self) -> Iterator[Seen]:
        groups = list({each.group.name: each.group for each in self.holdings}.values())
        for group in groups:
            for kind in (each.storage_type for each in group.quota.quota_config):
                mark, name = type_mark(group, kind, self.block([group])), f"{group.name}/{kind.kind}"
                yield from self.of_group(Reason.TYPE, name, mark, group, partial(is_of_type, kind))
        for storage in self.limits.storages:
            yield from self.of_storage(storage, groups)
        for group in groups:
            yield from self.of_keys(group)
            yield from self.of_group(Reason.SIZE, group.name, size_mark(group), group, lambda _: True)
            mark = group_mark(group, self.block([group]))
            yield from self.of_group(Reason.GROUP, group.name, mark, group, lambda _: True)
        for quota in self.limits.quotas:
            drawing = [group for group in groups if group.global_quota_group_name == quota.name]
            mark = global_mark(quota, self.block(drawing))
            yield from self.shared((Reason.GLOBAL, quota.name), mark, drawing, lambda _: True, {}, 0)

    def of(self, group: InstanceGroup) -> list[Holding]:
        return [each for each in self.holdings if each.group.name == group.name]

    def used(self, group: InstanceGroup, counts: Callable[[Place], bool]) -> int:
        return sum(size for each in self.of(group) for place, size in each.remaining.items() if counts(place))

    def block(self, groups: Sequence[InstanceGroup]) -> int:
        return max((each.instance.block_bytes for group in groups for each in self.of(group)), default=0)

    def excess(self, label: Label, mark: Mark | None, used: int) -> int:
        if mark is None or used <= (mark.low if label in self.active else mark.high):
            return 0
        return used - mark.low

    def of_group(
        self, reason: Reason, name: str, mark: Mark | None, group: InstanceGroup, counts: Callable[[Place], bool]
    ) -> Iterator[Seen]:
        if excess := self.excess((reason, name), mark, self.used(group, counts)):
            uids = tuple(each.uid for each in self.of(group))
            yield Seen((reason, name), excess, tuple(map(counts, PLACES)), uids, "", counts_blocks=False)

    def of_keys(self, group: InstanceGroup) -> Iterator[Seen]:
        for each in self.of(group):
            label, mark = (Reason.KEYS, each.instance.instance_id), key_mark(group, each.max_keys)
            if excess := self.excess(label, mark, each.keys):
                yield Seen(label, excess, (True,) * len(PLACES), (each.uid,), "", counts_blocks=True)

    def of_storage(self, storage: StorageConfig, groups: Sequence[InstanceGroup]) -> Iterator[Seen]:
        name = storage.global_unique_name
        mark = storage_mark(storage, self.block([group for group in groups if name in group.storage_candidates]))
        kept_bytes, guaranteed = 0, {}
        for group in self.limits.groups:  # also those of no instance
            guaranteed[group.name] = group.guaranteed_on(storage)
            kept_bytes += max(0, guaranteed[group.name] - self.used(group, lambda place: place.storage == name))
        on_it = (Reason.STORAGE, name)
        yield from self.shared(on_it, mark, groups, lambda place: place.storage == name, guaranteed, kept_bytes)

    def shared(
        self,
        label: Label,
        mark: Mark | None,
        groups: Sequence[InstanceGroup],
        counts: Callable[[Place], bool],
        guaranteed: dict[str, int],
        kept_bytes: int,
    ) -> Iterator[Seen]:
        """Each gives what it uses above its guarantee and an equal share of what nobody is guaranteed, whoever is
        furthest above first; what that leaves is taken from all."""
        users = [group for group in groups if self.used(group, counts)]
        total = sum(self.used(group, counts) for group in users)
        excess = self.excess(label, mark, total + kept_bytes)
        if not excess or mark is None or not users:
            return
        share = max(0, mark.low - sum(guaranteed.values())) // len(users)
        above = {group.name: self.used(group, counts) - guaranteed.get(group.name, 0) - share for group in users}
        places, left = tuple(map(counts, PLACES)), excess
        for group in sorted(users, key=lambda group: (-above[group.name], group.name)):
            if above[group.name] > 0:
                uids = tuple(each.uid for each in self.of(group))
                amount = min(excess, above[group.name])
                yield Seen(label, amount, places, uids, group.name, counts_blocks=False)
                left -= above[group.name]
        rest = min(left, total - mark.low)
        if rest > 0:
            uids = tuple(each.uid for group in users for each in self.of(group))
            yield Seen(label, rest, places, uids, "", counts_blocks=False)


# ── random settings and holdings ──

TRIGGERS = st.builds(
    TriggerStrategy,
    used_size=st.sampled_from([0, 0, 20, 80]),
    used_percentage=st.sampled_from(RATIOS),
    hysteresis=st.sampled_from([None, 0.0, 0.3]),
)
QUOTA_CONFIGS = st.lists(
    st.builds(QuotaConfig, st.sampled_from(TYPES), SIZES), unique_by=lambda each: each.storage_type
)
GUARANTEES = st.lists(st.builds(StorageGuarantee, st.sampled_from(STORAGES), SIZES), max_size=3)


@st.composite
def groups_of(draw: st.DrawFn, name: str) -> InstanceGroup:
    config = CacheConfig(
        CacheReclaimStrategy(trigger_strategy=draw(TRIGGERS)),
        meta_indexer_config=MetaIndexerConfig(draw(st.sampled_from([0, 5, 10]))),
    )
    return InstanceGroup(
        name,
        tuple(draw(st.lists(st.sampled_from(STORAGES), unique=True))),
        draw(st.sampled_from(QUOTAS)),
        quota=InstanceGroupQuota(draw(st.integers(0, 150)), tuple(draw(QUOTA_CONFIGS.map(tuple)))),
        cache_config=config,
        storage_guarantees=tuple(draw(GUARANTEES)),
    )


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    groups = [draw(groups_of(name)) for name in GROUPS]
    storages = [
        StorageConfig(
            name, DummyStorageSpec(), capacity_bytes=draw(SIZES), used_percentage=draw(st.sampled_from(RATIOS))
        )
        for name in STORAGES
    ]
    quotas = [GlobalQuota(name, draw(SIZES), draw(st.sampled_from(RATIOS))) for name in QUOTAS[1:]]
    holdings = []
    for uid in range(draw(st.integers(0, 6))):
        group = draw(st.sampled_from(groups))
        registered = instance(f"i{uid}", group.name, {"kv": draw(st.integers(1, 9))})
        remaining = draw(st.dictionaries(st.sampled_from(PLACES), SIZES, max_size=4))
        max_keys = group.cache_config.meta_indexer_config.max_key_count
        holdings.append(Holding(uid, registered, group, remaining, draw(st.integers(0, 12)), max_keys))
    limits = Limits(storages, quotas, draw(st.sampled_from([groups, groups[:2], []])))
    plain = Rules(holdings, limits, frozenset())
    labels = [label for label, *_ in plain.needs()]  # and some that end between their marks
    labels += [(Reason.STORAGE, "a"), (Reason.GLOBAL, "p"), (Reason.GROUP, "g"), (Reason.TYPE, "g/dummy")]
    return plain._replace(active=draw(st.frozensets(st.sampled_from(labels))))


@settings(max_examples=examples(600), deadline=None)
@given(rules())
def test_what_has_to_go_is_what_the_rules_say(plain: Rules) -> None:
    expected = list(plain.needs())
    for (reason, _), _, _, _, payer, _ in expected:
        event(f"{reason.value}{' of one group' if payer else ''}")
    assert [seen(need) for need in needs(*plain)] == expected
