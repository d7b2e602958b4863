"""Which limits are exceeded, by how much, and which instances give blocks: marks at every level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from levels_rig import BLOCK, LEVELS_POOL, Levels, group, instance, levels
from thoroughness import examples

from kvcm.model.errors import CapacityError
from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    CacheReclaimStrategy,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    InstanceGroupQuota,
    InstanceOverride,
    MetaIndexerConfig,
    QuotaConfig,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.needs import InstanceUsage, Label, Limits, Reason, ReclaimNeed, needs
from kvcm.reclaim.reclaimer import NeedQueue
from kvcm.reclaim.watermarks import (
    Watermark,
    global_watermark,
    group_watermark,
    key_watermark,
    size_watermark,
    storage_watermark,
    type_watermark,
)

DUMMY, POOL = StorageType.ST_DUMMY, StorageType.ST_TAIRMEMPOOL
PREFERS_POOL = CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL


def typed(**changes: object) -> InstanceGroup:
    """Writes go to the pool while they fit there: its limit is 100 bytes, its mark 80."""
    fields = {"storages": ("a", LEVELS_POOL), "types": {POOL: 100}, "prefers": PREFERS_POOL, **changes}
    return group(blocks=100, hysteresis=0.2, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["lru", "leaf_lru"])
async def test_blocks_with_a_copy_elsewhere_lose_only_the_copies_that_help(policy: str) -> None:
    """Invariant 1: they are readable without a break, and the other copies are not touched."""
    with levels(typed(reclaim={"policy": EvictionPolicy(policy)})) as rig:
        chain = list(range(1, 10))
        await rig.without(LEVELS_POOL, lambda: rig.write(chain))
        await rig.without("a", lambda: rig.write(chain))
        assert await rig.places(9) == ["a", LEVELS_POOL]
        assert await rig.reclaim() == 3
        assert sorted(rig.order()) == [7, 8, 9]
        for key in rig.order():
            assert await rig.places(key) == ["a"]
        assert await rig.left(chain) == chain
        assert all(uri.startswith(f"dummy://{LEVELS_POOL}/") for uri in rig.marked_uris())


@pytest.mark.parametrize("policy", ["lru", "leaf_lru"])
async def test_cold_copies_of_a_chain_go_before_warmer_blocks(policy: str) -> None:
    with levels(typed(reclaim={"policy": EvictionPolicy(policy)})) as rig:
        await rig.without(LEVELS_POOL, lambda: rig.write([1, 2, 3, 4]))
        await rig.without("a", lambda: rig.write([1, 2, 3, 4]))
        rig.wait(1)
        await rig.write_each(range(100, 105))
        assert await rig.reclaim() == 3
        assert rig.order() == [4, 3, 2]
        assert await rig.left([1, 2, 3, 4]) == [1, 2, 3, 4]


def part(rig: Levels, name: str, storage: str, size: int = BLOCK) -> Location:
    """A serving location of one spec."""
    kind = POOL if storage == LEVELS_POOL else DUMMY
    chunk = encode_chunk(kind, 1, [SpecUri(name, f"dummy://{storage}/{name}?size={size}")])
    return Location(name, storage, kind, LocationStatus.SERVING, (name,), chunk, size, rig.clock.now())


@pytest.mark.parametrize(("groups", "left"), [({}, []), ({"left": ("tp0",), "right": ("tp1",)}, ["a"])])
async def test_a_part_stays_where_it_is_readable_alone(groups: dict[str, tuple[str, ...]], left: list[str]) -> None:
    """Specs of one spec group live and die together, wherever they lie."""
    with levels(typed(), instance(specs={"tp0": BLOCK, "tp1": BLOCK}, groups=groups)) as rig:
        index = rig.manager.cache("i").index
        for key in range(9):
            places = (part(rig, "tp0", LEVELS_POOL), part(rig, "tp1", "a"))
            await index.put({key: BlockRecord(None, 0, places)})
            rig.wait(1)
        assert await rig.reclaim() == 3
        assert [await rig.places(key) for key in range(4)] == [left, left, left, [LEVELS_POOL, "a"]]


async def test_a_head_goes_with_its_tail_where_only_the_head_helps() -> None:
    """Invariant 7: nothing is left behind whose prefix is gone."""
    with levels(typed()) as rig:
        for chain in range(9):
            await rig.without("a", lambda chain=chain: rig.write([10 * chain]))
            await rig.without(
                LEVELS_POOL, lambda chain=chain: rig.write([10 * chain + 1, 10 * chain + 2], parent_key=10 * chain)
            )
            rig.wait(1)
        await rig.reclaim()
        assert await rig.left([10 * chain for chain in range(9)]) == [10 * chain for chain in range(3, 9)]
        assert await rig.left([10 * chain + 2 for chain in range(9)]) == [10 * chain + 2 for chain in range(3, 9)]


async def test_a_lower_limit_on_blocks_holds_before_anybody_writes() -> None:
    with levels(group(blocks=1000, max_keys=100, hysteresis=0.2)) as rig:
        await rig.write_each(range(20))
        await rig.update(group(blocks=1000, max_keys=10, hysteresis=0.2))
        assert await rig.reclaim() == 14


async def test_a_storage_without_a_mark_of_its_own_has_one_at_nine_tenths() -> None:
    with levels(group(blocks=1000, mark=0)) as rig:
        await rig.limit_storage("a", 100 * BLOCK)
        await rig.write_each(range(90))
        assert await rig.reclaim() == 0
        await rig.write([90])
        assert await rig.reclaim() == 3


async def test_a_global_quota_above_one_never_evicts() -> None:
    with levels(group(blocks=1000, mark=0, quota="q")) as rig:
        await rig.registry.quotas.set(GlobalQuota("q", 10 * BLOCK, 1.5))
        await rig.write_each(range(10))
        assert await rig.reclaim() == 0
        with pytest.raises(CapacityError):
            await rig.write([10])


# Where marks lie.


@pytest.mark.parametrize("mark", [0.0, 1.01, 2.0])
async def test_a_mark_above_one_or_unset_is_off(mark: float) -> None:
    with levels(group(blocks=10, mark=mark, max_keys=10, types={DUMMY: 100})) as rig:
        await rig.write_each(range(10))
        assert await rig.reclaim() == 0
        with pytest.raises(CapacityError):
            await rig.write([10])
        assert rig.pressed


@pytest.mark.parametrize(("hysteresis", "goes"), [(None, 3), (0.0, 1), (0.1, 11), (0.5, 51), (0.9, 81)])
async def test_the_hysteresis_is_how_far_eviction_goes(hysteresis: float | None, goes: int) -> None:
    with levels(group(blocks=100, mark=0.8, hysteresis=hysteresis)) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaim() == 0
        await rig.write([80])
        assert await rig.reclaim() == goes
        assert await rig.reclaim() == 0


@pytest.mark.parametrize("level", ["group", "type", "keys", "storage", "global", "size"])
@pytest.mark.parametrize("mark", [0.8, 1.0])
async def test_a_write_that_crosses_a_mark_wakes(level: str, mark: float) -> None:
    """If a write leaves something to evict, it wakes a reclaimer."""
    limits = {"types": {DUMMY: 100}} if level == "type" else {"max_keys": 10} if level == "keys" else {}
    size = {"used_size": 80} if level == "size" else {}
    quota = "q" if level == "global" else ""
    blocks = 10 if level == "group" else 1000
    configured = group(blocks=blocks, mark=mark, quota=quota, **limits, **size)  # type: ignore[arg-type]
    with levels(configured) as rig:
        if level == "storage":
            await rig.limit_storage("a", 100, mark)
        if level == "global":
            await rig.registry.quotas.set(GlobalQuota("q", 100, mark))
        for key in range(10):
            await rig.write([key])
            woken = bool(rig.pressed)
            assert (await rig.reclaim() > 0) == woken, key
            rig.pressed.clear()
            await rig.delete()
            if woken:
                return
        raise AssertionError("no mark was ever crossed")


async def test_what_follows_stays_where_it_is_pinned_itself() -> None:
    with levels(typed(pin_budget_bytes=1000)) as rig:
        for chain in range(0, 90, 10):
            await rig.without("a", lambda chain=chain: rig.write([chain]))
            await rig.without(LEVELS_POOL, lambda chain=chain: rig.write([chain + 1, chain + 2], parent_key=chain))
            rig.wait(1)
        await rig.without(LEVELS_POOL, lambda: rig.write([3], parent_key=1))
        await rig.pin([0, 1, 3], 1000)
        await rig.reclaim()
        assert await rig.left([0, 1, 2, 3]) == [0, 1, 2, 3]
        assert rig.remaining() == (3 * 9 + 1 - 9) * BLOCK


# ── Needs against a plain reading of the rules ──


STORAGES = ("a", "b", "c")
TYPES = (StorageType.ST_DUMMY, StorageType.ST_TAIRMEMPOOL)
PLACES = [
    StorageKey(storage, kind) for storage in STORAGES for kind in TYPES
]  # a name may have been another type's once
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


def seen(need: ReclaimNeed) -> Seen:
    places, uids = tuple(map(need.filter, PLACES)), tuple(holding.uid for holding in need.usages)
    return Seen(need.label, need.amount, places, uids, need.payer, need.counts_blocks)


def is_of_type(kind: StorageType, place: StorageKey) -> bool:
    return place.storage_type is kind


# ── the rules, as plainly as they can be written ──


class Rules(NamedTuple):
    """Holdings, limits, and the marks that were crossed before."""

    holdings: Sequence[InstanceUsage]
    limits: Limits
    active: frozenset[Label]

    def needs(self) -> Iterator[Seen]:
        groups = list({each.group.name: each.group for each in self.holdings}.values())
        for one in groups:
            for kind in (each.storage_type for each in one.quota.quota_config):
                mark, name = type_watermark(one, kind, self.block([one])), f"{one.name}/{kind.kind}"
                yield from self.of_group(Reason.TYPE, name, mark, one, partial(is_of_type, kind))
        for storage in self.limits.storages:
            yield from self.of_storage(storage, groups)
        for one in groups:
            yield from self.of_keys(one)
            yield from self.of_group(Reason.SIZE, one.name, size_watermark(one), one, lambda _: True)
            mark = group_watermark(one, self.block([one]))
            yield from self.of_group(Reason.GROUP, one.name, mark, one, lambda _: True)
        for quota in self.limits.quotas:
            drawing = [one for one in groups if one.global_quota_group_name == quota.name]
            mark = global_watermark(quota, self.block(drawing))
            yield from self.shared((Reason.GLOBAL, quota.name), mark, drawing, lambda _: True, {}, 0)

    def of(self, one: InstanceGroup) -> list[InstanceUsage]:
        return [each for each in self.holdings if each.group.name == one.name]

    def used(self, one: InstanceGroup, counts: Callable[[StorageKey], bool]) -> int:
        return sum(size for each in self.of(one) for place, size in each.remaining.items() if counts(place))

    def block(self, groups: Sequence[InstanceGroup]) -> int:
        return max((each.instance.block_bytes for one in groups for each in self.of(one)), default=0)

    def excess(self, label: Label, mark: Watermark | None, used: int) -> int:
        if mark is None or used <= (mark.low if label in self.active else mark.high):
            return 0
        return used - mark.low

    def of_group(
        self,
        reason: Reason,
        name: str,
        mark: Watermark | None,
        one: InstanceGroup,
        counts: Callable[[StorageKey], bool],
    ) -> Iterator[Seen]:
        if excess := self.excess((reason, name), mark, self.used(one, counts)):
            uids = tuple(each.uid for each in self.of(one))
            yield Seen((reason, name), excess, tuple(map(counts, PLACES)), uids, "", counts_blocks=False)

    def of_keys(self, one: InstanceGroup) -> Iterator[Seen]:
        for each in self.of(one):
            label, mark = (Reason.KEYS, each.instance.instance_id), key_watermark(one, each.max_keys)
            if excess := self.excess(label, mark, each.keys):
                yield Seen(label, excess, (True,) * len(PLACES), (each.uid,), "", counts_blocks=True)

    def of_storage(self, storage: StorageConfig, groups: Sequence[InstanceGroup]) -> Iterator[Seen]:
        name = storage.global_unique_name
        mark = storage_watermark(storage, self.block([one for one in groups if name in one.storage_candidates]))
        kept_bytes, guaranteed = 0, {}
        for one in self.limits.groups:  # also those of no instance
            guaranteed[one.name] = one.guaranteed_on(storage)
            kept_bytes += max(0, guaranteed[one.name] - self.used(one, lambda place: place.storage == name))
        on_it = (Reason.STORAGE, name)
        yield from self.shared(on_it, mark, groups, lambda place: place.storage == name, guaranteed, kept_bytes)

    def shared(
        self,
        label: Label,
        mark: Watermark | None,
        groups: Sequence[InstanceGroup],
        counts: Callable[[StorageKey], bool],
        guaranteed: dict[str, int],
        kept_bytes: int,
    ) -> Iterator[Seen]:
        """Each gives its usage above its guarantee and an equal share of the bytes without a guarantee, the group
        furthest above first; the rest comes from all."""
        users = [one for one in groups if self.used(one, counts)]
        total = sum(self.used(one, counts) for one in users)
        excess = self.excess(label, mark, total + kept_bytes)
        if not excess or mark is None or not users:
            return
        share = max(0, mark.low - sum(guaranteed.values())) // len(users)
        above = {one.name: self.used(one, counts) - guaranteed.get(one.name, 0) - share for one in users}
        places, left = tuple(map(counts, PLACES)), excess
        for one in sorted(users, key=lambda one: (-above[one.name], one.name)):
            if above[one.name] > 0:
                uids = tuple(each.uid for each in self.of(one))
                amount = min(excess, above[one.name])
                yield Seen(label, amount, places, uids, one.name, counts_blocks=False)
                left -= above[one.name]
        rest = min(left, total - mark.low)
        if rest > 0:
            uids = tuple(each.uid for one in users for each in self.of(one))
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
        one = draw(st.sampled_from(groups))
        registered = instance(f"i{uid}", one.name, {"kv": draw(st.integers(1, 9))})
        remaining = draw(st.dictionaries(st.sampled_from(PLACES), SIZES, max_size=4))
        max_keys = one.cache_config.meta_indexer_config.max_key_count
        holdings.append(InstanceUsage(uid, registered, one, remaining, draw(st.integers(0, 12)), max_keys))
    limits = Limits(storages, quotas, draw(st.sampled_from([groups, groups[:2], []])))
    plain = Rules(holdings, limits, frozenset())
    labels = [label for label, *_ in plain.needs()]  # and some that end between their marks
    labels += [(Reason.STORAGE, "a"), (Reason.GLOBAL, "p"), (Reason.GROUP, "g"), (Reason.TYPE, "g/dummy")]
    return plain._replace(active=draw(st.frozensets(st.sampled_from(labels))))


@settings(max_examples=examples(300), deadline=None)
@given(rules())
def test_what_has_to_go_is_what_the_rules_say(plain: Rules) -> None:
    expected = list(plain.needs())
    for (reason, _), _, _, _, payer, _ in expected:
        event(f"{reason.value}{' of one group' if payer else ''}")
    assert [seen(need) for need in needs(*plain)] == expected


# ── Which instance of a group gives up blocks: by age, by part, or by fixed shares ──


THREE = [instance("i"), instance("j"), instance("k")]


def shared(share: str = "", mark: float = 0.8, hysteresis: float = 0.0, **reclaim: Any) -> InstanceGroup:
    """A group of 100 blocks."""
    return group(blocks=100, mark=mark, hysteresis=hysteresis, reclaim={"share": share, **reclaim})


def counts(rig: Levels) -> dict[str, int]:
    """Blocks that each instance has left."""
    return {each: rig.remaining(each) // BLOCK for each in ("i", "j", "k")}


def weights(**given: float) -> tuple[InstanceOverride, ...]:
    return tuple(InstanceOverride(name, weight=weight) for name, weight in given.items())


@pytest.mark.parametrize("share", ["", "group_lru"])
async def test_the_oldest_block_of_any_instance_goes_first(share: str) -> None:
    with levels(shared(share), THREE) as rig:
        for key in range(81):
            await rig.write([key], "ijk"[key % 3])
            rig.wait(1)
        await rig.update(shared(share, mark=0.6))
        assert await rig.reclaim() == 21
        for place, each in enumerate("ijk"):
            assert await rig.left(range(place, 81, 3), each) == list(range(21 + place, 81, 3))


async def test_proportional_takes_the_same_part_of_each() -> None:
    with levels(shared("proportional"), THREE) as rig:
        await rig.fill(i=50, j=30, k=10)
        await rig.update(shared("proportional", mark=0.45))
        assert await rig.reclaim() == 45
        assert counts(rig) == {"i": 25, "j": 15, "k": 5}


async def test_fixed_takes_from_the_instance_furthest_above_its_share() -> None:
    configured = shared("fixed", mark=0.6, instance_overrides=weights(i=2.0))
    with levels(shared("fixed", instance_overrides=weights(i=2.0)), THREE) as rig:
        await rig.fill(i=30, j=40, k=10)
        await rig.update(configured)
        assert await rig.reclaim() == 20  # of 60: shares 30, 15, 15
        assert counts(rig) == {"i": 30, "j": 20, "k": 10}
        await rig.update(shared("fixed", mark=0.4, instance_overrides=weights(i=2.0)))
        await rig.reclaim()  # of 40: shares 20, 10, 10
        assert counts(rig) == {"i": 20, "j": 10, "k": 10}


@pytest.mark.parametrize("share", ["group_lru", "proportional", "fixed"])
async def test_an_instance_that_can_give_nothing_leaves_it_to_the_others(share: str) -> None:
    configured = group(blocks=100, mark=0.5, reclaim={"share": share}, pin_budget_bytes=1000)
    with levels(configured, [instance("i"), instance("j")]) as rig:
        await rig.write(list(range(40)), "i")
        await rig.pin(list(range(40)), 1000)
        rig.wait(1)
        await rig.write_each(range(20), "j")
        await rig.reclaim()
        assert (rig.remaining("i"), rig.remaining("j")) == (40 * BLOCK, 8 * BLOCK)


async def test_an_instance_may_have_an_order_of_its_own() -> None:
    overrides = (InstanceOverride("j", EvictionPolicy("fifo")),)
    configured = shared(instance_overrides=overrides, policy=EvictionPolicy("lru"))
    with levels(configured, [instance("i"), instance("j")]) as rig:
        for each in ("i", "j"):
            await rig.write_each(range(40), each)
        for each in ("i", "j"):
            for key in range(5):
                await rig.read([key], each)
        await rig.update(group(blocks=100, mark=0.7, hysteresis=0.0, reclaim={
            "share": "proportional", "instance_overrides": overrides, "policy": EvictionPolicy("lru"),
        }))  # fmt: skip
        assert await rig.reclaim() == 10
        assert await rig.left(range(10), "i") == [0, 1, 2, 3, 4]
        assert await rig.left(range(10), "j") == [5, 6, 7, 8, 9]
        policies = {each.instance.instance_id: each.policy for each in rig.evicted}
        assert policies == {"i": "lru", "j": "fifo"}


async def test_an_instance_may_have_an_age_of_its_own() -> None:
    overrides = (InstanceOverride("j", EvictionPolicy(ttl_seconds=50)),)
    configured = group(blocks=100, mark=0, reclaim={"instance_overrides": overrides})
    with levels(configured, [instance("i"), instance("j")]) as rig:
        await rig.write([1], "i")
        await rig.write([1], "j")
        assert await rig.reclaim(after=51) == 1
        assert (await rig.left([1], "i"), await rig.left([1], "j")) == ([1], [])


# ── Step limits: what one look marks at most, and that later looks go on ──


def stepped(mark: float = 0.5, name: str = "g", **reclaim: Any) -> InstanceGroup:
    return group(name, blocks=100, mark=mark, hysteresis=0.1, reclaim=reclaim)


@pytest.mark.parametrize(
    ("limits", "blocks"),
    [
        ({"reclaim_step_size": 5 * BLOCK}, 5),
        ({"reclaim_step_percentage": 7}, 7),
        ({"reclaim_step_size": 5 * BLOCK, "reclaim_step_percentage": 7}, 5),
        ({"reclaim_step_size": 8 * BLOCK, "reclaim_step_percentage": 7}, 7),
        ({"reclaim_step_size": BLOCK // 2}, 1),
    ],
)
async def test_a_round_marks_no_more_than_a_step(limits: dict[str, int], blocks: int) -> None:
    """A step below one block is one block: otherwise nothing would ever go."""
    with levels(stepped(**limits)) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaimer.reclaim() == blocks
        assert rig.reclaimer.is_held_back
        assert rig.order() == list(range(blocks))


async def test_later_rounds_go_on_to_the_low_end_and_then_stop() -> None:
    """Also below the high end, where a fresh reclaimer would not begin."""
    with levels(stepped(reclaim_step_size=9 * BLOCK)) as rig:
        await rig.write_each(range(80))
        marked = [await rig.reclaimer.reclaim() for _ in range(6)]
        assert marked == [9, 9, 9, 9, 4, 0]
        assert not rig.reclaimer.is_held_back
        assert rig.remaining() == 40 * BLOCK


async def test_a_step_that_just_suffices_holds_nothing_back() -> None:
    with levels(stepped(reclaim_step_size=40 * BLOCK)) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaimer.reclaim() == 40
        assert not rig.reclaimer.is_held_back


async def test_a_step_of_one_group_does_not_hold_another_one_back() -> None:
    groups = [stepped(reclaim_step_size=BLOCK), stepped(name="free")]
    with levels(groups, [instance("i"), instance("f", "free")]) as rig:
        await rig.fill(i=80, f=80)
        assert await rig.reclaimer.reclaim() == 41
        assert rig.remaining("f") == 40 * BLOCK
        assert rig.reclaimer.is_held_back


async def test_a_storage_takes_no_more_than_a_step_of_each_group() -> None:
    groups = [stepped(0, name, reclaim_step_size=3 * BLOCK) for name in ("x", "y")]
    with levels(groups, [instance("i", "x"), instance("j", "y")]) as rig:
        await rig.limit_storage("a", 100 * BLOCK, 0.5)
        await rig.fill(i=40, j=40)
        assert await rig.reclaimer.reclaim() == 6
        assert (rig.remaining("i"), rig.remaining("j")) == (37 * BLOCK, 37 * BLOCK)
        assert rig.reclaimer.is_held_back


async def test_a_step_counts_bytes_where_the_mark_counts_blocks() -> None:
    configured = group(blocks=1000, mark=0.5, hysteresis=0.1, max_keys=100, reclaim={"reclaim_step_size": 5 * BLOCK})
    with levels(configured) as rig:
        await rig.write_each(range(80))
        assert await rig.reclaimer.reclaim() == 5
        assert rig.reclaimer.is_held_back


# ── Needs take turns: a group that always needs something does not keep others waiting ──


def holding(uid: int, group_name: str) -> InstanceUsage:
    name = f"{group_name}{uid}"
    return InstanceUsage(uid, instance(name, group_name), group(group_name), {}, 0, 0)


def need(reason: Reason, amount: int, *holdings: InstanceUsage, name: str = "", payer: str = "") -> ReclaimNeed:
    named = name or holdings[0].group.name
    return ReclaimNeed(reason, amount, bool, holdings, named, payer, reason is Reason.KEYS)


G, H = holding(1, "g"), holding(2, "h")


def served(found: list[ReclaimNeed], batches: int) -> list[tuple[str, int]]:
    """Return the served groups with their amounts, when every batch gives one block and new writes replace it."""
    servings, turns = NeedQueue(set()), []
    for _ in range(batches):
        chosen = servings.next(found)
        assert chosen is not None
        turns.append((chosen.name, chosen.amount))
        servings.record(chosen, 1, is_held_back=False)
    return turns


def test_groups_take_turns() -> None:
    found = [need(Reason.GROUP, 500, G), need(Reason.GROUP, 300, H)]
    assert served(found, 4) == [("g", 500), ("h", 300)] * 2


def test_a_wide_mark_has_its_turn_for_what_narrow_ones_leave() -> None:
    """The first one takes up to a block more than it needs."""
    narrow, wide = need(Reason.GROUP, 300, G), need(Reason.STORAGE, 500, G, H, name="nfs")
    assert served([narrow, wide], 4) == [("g", 300), ("nfs", 200 - BLOCK)] * 2


def test_a_wide_mark_waits_where_narrow_ones_may_do() -> None:
    narrow, wide = need(Reason.TYPE, 300, G, name="g/nfs"), need(Reason.GROUP, 305, G)
    assert served([narrow, wide], 2) == [("g/nfs", 300)] * 2


def test_groups_that_pay_for_one_mark_do_not_both_pay_it_whole() -> None:
    first = need(Reason.STORAGE, 400, G, name="nfs", payer="g")
    second = need(Reason.STORAGE, 300, H, name="nfs", payer="h")
    assert served([first, second], 2) == [("nfs", 400)] * 2
    servings = NeedQueue(set())
    servings.record(first, 0, is_held_back=False)  # it has nothing to give
    assert servings.next([first, second]) == second


def test_blocks_and_bytes_wait_for_each_other() -> None:
    size, keys, total = need(Reason.TYPE, 10, G, name="t"), need(Reason.KEYS, 5, G, name="i"), need(Reason.GROUP, 99, G)
    assert served([size, keys], 2) == [("t", 10)] * 2
    assert served([keys, total], 2) == [("i", 5)] * 2


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_levels_of_one_group_together_take_what_the_greatest_asks_for(amounts: list[int]) -> None:
    """Nothing goes twice for two marks (invariant 7)."""
    found = [need(Reason.GROUP, amount, G, name=f"level {number}") for number, amount in enumerate(amounts)]
    turns = dict(served(found, 2 * len(found)))
    assert sum(turns.values()) <= max(amounts)
    assert turns[found[0].name] == amounts[0]


async def test_a_round_serves_groups_in_turns() -> None:
    """A batch is 32 blocks."""
    groups = [group(name, blocks=200, mark=0.5, hysteresis=0.0) for name in ("g", "h")]
    with levels(groups, [instance(each.name, each.name) for each in groups]) as rig:
        for each in groups:
            await rig.write_each(range(196), each.name)
        await rig.reclaimer.reclaim()
        assert [(each.instance.instance_id, len(each.keys)) for each in rig.evicted] == [("g", 32), ("h", 32)] * 3


@pytest.mark.parametrize("mark", [0.5, 0.3])
@pytest.mark.parametrize("is_pool_colder", [True, False])
async def test_levels_that_are_served_in_turns_evict_no_more_than_needed(mark: float, *, is_pool_colder: bool) -> None:
    """What goes for the pool counts for the total, which is 20 blocks or more further above its mark."""
    configured = group(
        blocks=200,
        mark=mark,
        hysteresis=0.0,
        storages=("a", LEVELS_POOL),
        types={StorageType.ST_TAIRMEMPOOL: 160 * BLOCK},
        prefers=CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL,
    )
    with levels(configured) as rig:
        if is_pool_colder:
            await rig.write_each(range(150))
        await rig.without(LEVELS_POOL, lambda: rig.write_each(range(200, 240)))
        if not is_pool_colder:
            await rig.write_each(range(150))
        assert await rig.reclaim() == 190 - int(200 * mark)
        assert rig.remaining() == int(200 * mark) * BLOCK
        assert len(await rig.left(range(150))) <= 160 * mark


async def test_a_round_that_takes_long_begins_again() -> None:
    """Else instances, ages and settings that came since would wait until a flood ends. A batch takes 0.4 s here."""
    with levels(group(blocks=1000, mark=0.5, hysteresis=0.0)) as rig:
        await rig.write_each(range(900))
        rig.reclaimer = rig.new_reclaimer(lambda _evicted: rig.wait(0.4))
        assert [await rig.reclaimer.reclaim() for _ in range(5)] == [96, 96, 96, 96, 16]
