"""What a StartWriteCache writes and masks (decision 17)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from cache_rig import TableView, group, location
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.limits import Limits, SharedQuota, StorageLimit
from kvcm.cache.usage import Room, Taken
from kvcm.cache.write_plan import Planner, Specs, WritePlan, missing_specs, plan_write
from kvcm.model.groups import GlobalQuota
from kvcm.model.instances import LocationSpecInfo
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place
from kvcm.model.storages import StorageType

WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING
DUMMY, POOL = StorageType.ST_DUMMY, StorageType.ST_TAIRMEMPOOL
VIEW = TableView({"a": 1, "b": 1})
INFOS = tuple(LocationSpecInfo(name, 10) for name in ("tp0", "tp1"))
TP0, TP1 = ("tp0",), ("tp1",)
BOTH = ("tp0", "tp1")


def missing(*locations: Location, replicas: int = 1) -> tuple[str, ...]:
    record = BlockRecord(None, 0, locations) if locations else None
    return tuple(info.name for info in missing_specs(record, INFOS, VIEW, replicas))


@pytest.mark.parametrize(
    ("locations", "replicas", "lacking"),
    [
        ([], 1, BOTH),
        ([location("a")], 1, ()),
        ([location("a", status=WRITING)], 1, ()),
        ([location("a", status=DELETING)], 1, BOTH),
        # Only available storages count.
        ([location("off")], 1, BOTH),
        ([location("off", status=WRITING)], 1, BOTH),
        ([location("off"), location("b")], 1, ()),
        # Spec by spec, from several locations together.
        ([location("a", TP0)], 1, TP1),
        ([location("a", TP0), location("b", TP1)], 1, ()),
        ([location("a", TP0), location("b", TP1, WRITING)], 1, ()),
        ([location("a", TP0), location("off", TP1)], 1, TP1),
        # Replicas; a spec being written is masked whatever their number.
        ([location("a")], 2, BOTH),
        ([location("a"), location("b")], 2, ()),
        ([location("a"), location("b", TP0)], 2, TP1),
        ([location("a", status=WRITING)], 3, ()),
        ([location("a"), location("b", TP1, WRITING)], 2, TP0),
        ([location("a"), location("off")], 2, BOTH),
    ],
)
def test_missing_specs(locations: list[Location], replicas: int, lacking: tuple[str, ...]) -> None:
    assert missing(*locations, replicas=replicas) == lacking


def test_specs_that_nobody_asks_for_do_not_matter() -> None:
    record = BlockRecord(None, 0, (location("a", TP0),))
    assert missing_specs(record, INFOS[:1], VIEW, 1) == ()
    assert missing_specs(None, (), VIEW, 1) == ()


def plan(
    keys: Sequence[int],
    records: dict[int, BlockRecord] | None = None,
    *,
    capacity: int = 1 << 30,
    quotas: dict[StorageType, int] | None = None,
    used: dict[StorageType, int] | None = None,
    storages: dict[str, int] | None = None,
    candidates: Sequence[Place] = (),
    free_keys: int = 100,
    head: tuple[int | None, int] = (None, 0),
    wanted: Sequence[tuple[LocationSpecInfo, ...]] | None = None,
) -> WritePlan:
    found = [(records or {}).get(key) for key in keys]
    asked = wanted or [INFOS] * len(keys)
    lacking = [missing_specs(record, specs, VIEW, 1) for record, specs in zip(found, asked, strict=True)]
    limits = Limits(
        group(capacity=capacity, quotas=quotas),
        {name: StorageLimit(size, {}) for name, size in (storages or {}).items()},
    )
    places = {Place("a" if kind is DUMMY else "b", kind): size for kind, size in (used or {}).items()}
    on_storages = {place.storage: {"group": size} for place, size in places.items()}
    room = Room(limits, Taken(places, on_storages, {}), free_keys)
    planner = Planner(candidates or [Place("a", DUMMY), Place("b", POOL)], room, 100)
    return plan_write(planner, keys, lacking, found, head)


class Block(NamedTuple):
    """One block of a plan."""

    position: int
    key: int
    parent: int | None
    depth: int
    specs: Specs
    place: Place
    size_bytes: int
    is_fresh: bool


def blocks_of(planned: WritePlan) -> list[Block]:
    """Return the blocks of a plan one by one."""
    return [
        Block(run.position + i, key, run.keys[i - 1] if i else run.parent, run.depth + i, *run[4:])
        for run in planned.runs
        for i, key in enumerate(run.keys)
    ]


def test_new_blocks_are_written_in_order_with_parents_and_depths() -> None:
    blocks = blocks_of(plan([7, 8, 9]))
    assert [(b.position, b.key, b.parent, b.depth) for b in blocks] == [(0, 7, None, 0), (1, 8, 7, 1), (2, 9, 8, 2)]
    assert [(b.place.storage, b.size_bytes, b.specs) for b in blocks] == [("a", 20, INFOS)] * 3


def test_a_chain_goes_on_behind_its_parent() -> None:
    blocks = blocks_of(plan([7, 8], head=(5, 3)))
    assert [(b.parent, b.depth) for b in blocks] == [(5, 3), (7, 4)]


def test_depth_follows_what_is_known() -> None:
    """A masked block keeps its recorded depth, and what follows counts on from there."""
    blocks = blocks_of(plan([7, 8, 9], {8: BlockRecord(7, 11, (location("a"),))}))
    assert [(b.key, b.parent, b.depth) for b in blocks] == [(7, None, 0), (9, 8, 12)]


def test_a_key_repeated_in_one_request_is_masked_at_its_later_positions() -> None:
    assert [b.position for b in blocks_of(plan([7, 7, 8, 7, 8]))] == [0, 2]


def test_what_follows_a_repeated_key_hangs_on_its_first_position() -> None:
    blocks = blocks_of(plan([7, 8, 7, 9]))
    assert [(b.key, b.parent, b.depth) for b in blocks] == [(7, None, 0), (8, 7, 1), (9, 7, 1)]


def test_a_repeated_key_is_masked_with_another_spec_group_too() -> None:
    first = plan([7, 7], wanted=[INFOS[:1], INFOS])
    assert [(b.position, b.specs) for b in blocks_of(first)] == [(0, INFOS[:1])]


def test_missing_specs_go_to_the_type_of_the_others() -> None:
    records = {7: BlockRecord(None, 0, (location("b", TP0, storage_type=POOL),))}
    assert [(b.key, b.place.storage, b.specs) for b in blocks_of(plan([7, 8], records))] == [
        (7, "b", INFOS[1:]),
        (8, "a", INFOS),
    ]


def test_missing_specs_go_elsewhere_when_that_type_is_full() -> None:
    records = {7: BlockRecord(None, 0, (location("b", TP0, storage_type=POOL),))}
    (block,) = blocks_of(plan([7], records, quotas={POOL: 0}))
    assert block.place.storage == "a"


def test_a_full_type_makes_way_for_the_next_candidate() -> None:
    assert [b.place.storage for b in blocks_of(plan([1, 2, 3], quotas={DUMMY: 45}))] == ["a", "a", "b"]


def test_a_full_storage_makes_way_for_the_next_candidate_of_the_same_type_too() -> None:
    places = [Place("a", DUMMY), Place("b", DUMMY), Place("c", POOL)]
    result = plan([1, 2, 3, 4], storages={"a": 25, "b": 45}, candidates=places)
    assert [b.place.storage for b in blocks_of(result)] == ["a", "b", "b", "c"]


def test_a_refusal_names_the_limit_of_every_candidate() -> None:
    result = plan([1, 2], quotas={POOL: 5}, storages={"a": 25})
    assert ([b.key for b in blocks_of(result)], result.refused) == ([1], 1)
    for text in ("storage 'a' is full", "capacity_bytes of 25", "'group' is full on pace", "quota of 5 bytes"):
        assert text in result.refusal, result.refusal


def test_the_suffix_of_a_refused_block_is_refused_too() -> None:
    """The third would fit on its own, being smaller."""
    result = plan([1, 2, 3], capacity=45, wanted=[INFOS, (*INFOS, LocationSpecInfo("big", 90)), INFOS[:1]])
    assert [b.key for b in blocks_of(result)] == [1]
    assert result.refused == 2
    assert "45 bytes" in result.refusal


def test_masked_blocks_behind_a_refused_one_are_not_refused() -> None:
    result = plan([1, 2, 3], {3: BlockRecord(2, 2, (location("a"),))}, capacity=20)
    assert ([b.key for b in blocks_of(result)], result.refused) == ([1], 1)


def test_the_key_limit_refuses_new_blocks_only() -> None:
    known = {1: BlockRecord(None, 0, (location("a", TP0),)), 2: BlockRecord(1, 1, (location("a", TP0),))}
    result = plan([1, 2, 3, 4], known, free_keys=1)
    assert ([b.key for b in blocks_of(result)], result.refused) == ([1, 2, 3], 1)
    assert "max_key_count of 100" in result.refusal


def test_nothing_to_write_is_never_refused() -> None:
    result = plan([1], {1: BlockRecord(None, 0, (location("a"),))}, capacity=0, free_keys=0)
    assert result == WritePlan([], 0, "")
    assert plan([], capacity=0) == WritePlan([], 0, "")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.integers(0, 6), max_size=10),
    known=st.sets(st.integers(0, 6)),
    capacity=st.integers(0, 200),
    quota=st.integers(0, 200),
    used=st.integers(0, 60),
    free_keys=st.integers(0, 7),
)
def test_a_plan_is_a_prefix_that_fits(
    keys: list[int], known: set[int], capacity: int, quota: int, used: int, free_keys: int
) -> None:
    records = {key: BlockRecord(None, 0, (location("a"),)) for key in known}
    limits = {"capacity": capacity, "quotas": {DUMMY: quota}, "used": {DUMMY: used}, "free_keys": free_keys}
    result = plan(keys, records, **limits)  # type: ignore[arg-type]
    wanted = [key for key in dict.fromkeys(keys) if key not in known]
    planned = [block.key for block in blocks_of(result)]
    assert planned == wanted[: len(planned)]
    assert result.refused == len(wanted) - len(planned)
    assert bool(result.refusal) == bool(result.refused)
    assert [keys.index(block.key) for block in blocks_of(result)] == [block.position for block in blocks_of(result)]
    on_dummy = sum(block.size_bytes for block in blocks_of(result) if block.place.storage_type is DUMMY)
    total = used + sum(block.size_bytes for block in blocks_of(result))
    assert not planned or (total <= capacity and len(planned) <= free_keys)
    assert on_dummy == 0 or used + on_dummy <= quota
    if result.refused:
        assert total + 20 > capacity or len(planned) == free_keys


SPEC_SETS = [INFOS, INFOS[:1], (LocationSpecInfo("empty", 0),), ()]
LIMITS = st.integers(0, 150)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    blocks=st.lists(st.tuples(st.sampled_from(SPEC_SETS), st.sampled_from([0, 0, 0, 1, 2])), max_size=12),
    capacity=LIMITS,
    on_dummy=LIMITS,
    on_a=LIMITS,
    shared=LIMITS,
    kept=st.integers(0, 40),
    used=st.integers(0, 60),
    free_keys=st.integers(-1, 9),
)
def test_runs_of_fresh_blocks_are_planned_as_one_by_one(
    blocks: list[tuple[tuple[LocationSpecInfo, ...], int]],
    capacity: int,
    on_dummy: int,
    on_a: int,
    shared: int,
    kept: int,
    used: int,
    free_keys: int,
) -> None:
    known = [None, BlockRecord(3, 9, (location("b", TP1, storage_type=POOL),)), BlockRecord(None, 4, ())]
    keys, lacking = list(range(100, 100 + len(blocks))), [specs for specs, _ in blocks]
    records = [known[number] for _, number in blocks]
    place = Place("a", DUMMY)
    limits = Limits(
        group(capacity=capacity, quotas={DUMMY: on_dummy}),
        {"a": StorageLimit(on_a, {"other": kept})},
        SharedQuota(GlobalQuota("all", shared), ("group",)),
    )

    def planner() -> Planner:
        room = Room(limits, Taken({place: used}, {"a": {"group": used}}, {"group": used}), free_keys)
        return Planner([place, Place("b", POOL), Place("c", DUMMY)], room, 100)

    each = planner()
    parent: int | None = 7
    depth = 2
    for position, (key, specs, record) in enumerate(zip(keys, lacking, records, strict=True)):
        depth = record.depth if record is not None else depth
        if specs:
            each.add(position, key, (parent, depth), specs, record)
        parent, depth = key, depth + 1
    together = planner()
    plan_write(together, keys, lacking, records, (7, 2))
    assert blocks_of(together.plan) == blocks_of(each.plan)
    assert replace(together.plan, runs=[]) == replace(each.plan, runs=[])
    assert all(len(run.keys) == 1 or run.is_fresh for run in together.plan.runs)
    assert together.room is not None
    assert each.room is not None
    assert together.room.free_keys == each.room.free_keys
    assert together.plan.wanted_bytes == sum(
        (Counter({b.place: b.size_bytes}) for b in blocks_of(each.plan)), Counter()
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(fresh=st.lists(st.booleans(), max_size=12), most=st.integers(1, 5))
def test_pages_hold_the_same_blocks(fresh: list[bool], most: int) -> None:
    keys = list(range(1, len(fresh) + 1))
    records = {key: BlockRecord(None, key, ()) for key, is_fresh in zip(keys, fresh, strict=True) if not is_fresh}
    whole = plan(keys, records)
    pages = [WritePlan(runs) for runs in whole.pages(most)]
    assert [block for page in pages for block in blocks_of(page)] == blocks_of(whole)
    assert [len(page.keys) for page in pages[:-1]] == [most] * (len(pages) - 1)
    assert all(0 < len(page.keys) <= most for page in pages)
    assert whole.keys == tuple(keys)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.integers(0, 6), max_size=12), known=st.dictionaries(st.integers(0, 6), st.integers(0, 20)),
    head=st.sampled_from([(None, 0), (99, 4)]),
)  # fmt: skip
def test_what_follows_any_block_hangs_on_its_first_position(
    keys: list[int], known: dict[int, int], head: tuple[int | None, int]
) -> None:
    """Blocks of even depth are there, of the others there is a record that lacks every spec."""
    records = {key: BlockRecord(None, depth, (location("a"),) * (1 - depth % 2)) for key, depth in known.items()}
    expected, depths = [], dict[int, int]()
    parent, depth = head
    for position, key in enumerate(keys):
        if key in depths:
            depth = depths[key]
        else:
            depth = depths[key] = known.get(key, depth)
            if known.get(key, 1) % 2:
                expected.append((position, key, parent, depth))
        parent, depth = key, depth + 1
    assert [(b.position, b.key, b.parent, b.depth) for b in blocks_of(plan(keys, records, head=head))] == expected
