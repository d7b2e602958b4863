"""What a StartWriteCache plans, and which storages it goes to when some are full, down or fail."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest
from cache_rig import ManagerCore, Rig, TableView, group, instance, location, opened, uris
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_servers import Standalone
from thoroughness import examples

from kvcm.cache.instance_cache import BATCH_KEYS
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.quotas import FreeSpace, Ledger, Limits, SharedLedger, SharedQuota, StorageLimit, TakenBytes
from kvcm.cache.write_plan import Specs, WritePlan, WritePlanner, candidates, missing_specs, plan_write
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.model.errors import CapacityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.groups import CachePreferStrategy, GlobalQuota
from kvcm.model.instances import LocationSpecInfo
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, Location, LocationStatus, StorageKey, decode_chunk
from kvcm.model.storages import NfsStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec, ThreeFSStorageSpec
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.health import HealthRules, HealthState, Probe, ProbeOutcome, StorageHealth
from kvcm.storage.mempool import MempoolStorage, PoolReport
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.uri import parse_redis_uri

# ── Write planning ──


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


def test_specs_outside_the_request_do_not_matter() -> None:
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
    candidates: Sequence[StorageKey] = (),
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
    places = {StorageKey("a" if kind is DUMMY else "b", kind): size for kind, size in (used or {}).items()}
    on_storages = {place.storage: {"group": size} for place, size in places.items()}
    space = FreeSpace(limits, TakenBytes(places, on_storages, {}), free_keys)
    planner = WritePlanner(candidates or [StorageKey("a", DUMMY), StorageKey("b", POOL)], space, 100)
    return plan_write(planner, keys, lacking, found, head)


class Block(NamedTuple):
    """One block of a plan."""

    position: int
    key: int
    parent: int | None
    depth: int
    specs: Specs
    place: StorageKey
    size_bytes: int
    is_fresh: bool


def blocks_of(planned: WritePlan) -> list[Block]:
    """Return the blocks of a plan one by one."""
    return [
        Block(run.position + i, key, run.keys[i - 1] if i else run.parent, run.depth + i, *run[4:])
        for run in planned.runs
        for i, key in enumerate(run.keys)
    ]


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
    places = [StorageKey("a", DUMMY), StorageKey("b", DUMMY), StorageKey("c", POOL)]
    result = plan([1, 2, 3, 4], storages={"a": 25, "b": 45}, candidates=places)
    assert [b.place.storage for b in blocks_of(result)] == ["a", "b", "b", "c"]


def test_a_refusal_names_the_limit_of_every_candidate() -> None:
    result = plan([1, 2], quotas={POOL: 5}, storages={"a": 25})
    assert ([b.key for b in blocks_of(result)], result.rejected) == ([1], 1)
    for text in ("storage 'a' is full", "capacity_bytes of 25", "'group' is full on pace", "quota of 5 bytes"):
        assert text in result.rejection, result.rejection


def test_the_suffix_of_a_refused_block_is_refused_too() -> None:
    """The third would fit on its own, being smaller."""
    result = plan([1, 2, 3], capacity=45, wanted=[INFOS, (*INFOS, LocationSpecInfo("big", 90)), INFOS[:1]])
    assert [b.key for b in blocks_of(result)] == [1]
    assert result.rejected == 2
    assert "45 bytes" in result.rejection


def test_the_key_limit_refuses_new_blocks_only() -> None:
    known = {1: BlockRecord(None, 0, (location("a", TP0),)), 2: BlockRecord(1, 1, (location("a", TP0),))}
    result = plan([1, 2, 3, 4], known, free_keys=1)
    assert ([b.key for b in blocks_of(result)], result.rejected) == ([1, 2, 3], 1)
    assert "max_key_count of 100" in result.rejection


@settings(max_examples=examples(300))
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
    assert result.rejected == len(wanted) - len(planned)
    assert bool(result.rejection) == bool(result.rejected)
    assert [keys.index(block.key) for block in blocks_of(result)] == [block.position for block in blocks_of(result)]
    on_dummy = sum(block.size_bytes for block in blocks_of(result) if block.place.storage_type is DUMMY)
    total = used + sum(block.size_bytes for block in blocks_of(result))
    assert not planned or (total <= capacity and len(planned) <= free_keys)
    assert on_dummy == 0 or used + on_dummy <= quota
    if result.rejected:
        assert total + 20 > capacity or len(planned) == free_keys


SPEC_SETS = [INFOS, INFOS[:1], (LocationSpecInfo("empty", 0),), ()]
LIMITS = st.integers(0, 150)


@settings(max_examples=examples(400))
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
    place = StorageKey("a", DUMMY)
    limits = Limits(
        group(capacity=capacity, quotas={DUMMY: on_dummy}),
        {"a": StorageLimit(on_a, {"other": kept})},
        SharedQuota(GlobalQuota("all", shared), ("group",)),
    )

    def planner() -> WritePlanner:
        space = FreeSpace(limits, TakenBytes({place: used}, {"a": {"group": used}}, {"group": used}), free_keys)
        return WritePlanner([place, StorageKey("b", POOL), StorageKey("c", DUMMY)], space, 100)

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
    assert together.space is not None
    assert each.space is not None
    assert together.space.free_keys == each.space.free_keys
    assert together.plan.wanted_bytes == sum(
        (Counter({b.place: b.size_bytes}) for b in blocks_of(each.plan)), Counter()
    )


@settings(max_examples=examples(200))
@given(fresh=st.lists(st.booleans(), max_size=12), most=st.integers(1, 5))
def test_pages_hold_the_same_blocks(fresh: list[bool], most: int) -> None:
    keys = list(range(1, len(fresh) + 1))
    records = {key: BlockRecord(None, key, ()) for key, is_fresh in zip(keys, fresh, strict=True) if not is_fresh}
    whole = plan(keys, records)
    pages = [WritePlan(runs) for runs in whole.batches(most)]
    assert [block for page in pages for block in blocks_of(page)] == blocks_of(whole)
    assert [len(page.keys) for page in pages[:-1]] == [most] * (len(pages) - 1)
    assert all(0 < len(page.keys) <= most for page in pages)
    assert whole.keys == tuple(keys)


@settings(max_examples=examples(300))
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


# ── Storage selection ──


TYPES = {
    "fs": StorageType.ST_3FS,
    "fs-b": StorageType.ST_3FS,
    "mc": StorageType.ST_MOONCAKE,
    "pool": StorageType.ST_TAIRMEMPOOL,
    "nfs": StorageType.ST_NFS,
    "vfs": StorageType.ST_VCNS_3FS,
}
EVERYTHING = TableView(dict.fromkeys(TYPES, 1), TYPES)
NAMED = {"3FS": "fs", "MOONCAKE": "mc", "TAIR_MEMPOOL": "pool", "VCNS_3FS": "vfs"}


def chosen(names: list[str], strategy: CachePreferStrategy, view: TableView = EVERYTHING) -> list[str]:
    found = candidates(group(storages=names, strategy=strategy), view)
    assert all(TYPES[candidate.storage] is candidate.storage_type for candidate in found)
    return [candidate.storage for candidate in found]


@pytest.mark.parametrize("strategy", CachePreferStrategy)
def test_every_strategy_against_the_rule(strategy: CachePreferStrategy) -> None:
    """For every order of a group's candidates: the named type first or alone, the group's own order otherwise."""
    verb, _, name = strategy.name.removeprefix("CPS_").partition("_")
    named = TYPES[NAMED[name]] if name else None
    for order in permutations(["nfs", "fs", "fs-b", NAMED.get(name, "mc")]):
        names = list(dict.fromkeys(order))
        preferred = [each for each in names if TYPES[each] is named]
        others = [] if verb == "ALWAYS" else [each for each in names if TYPES[each] is not named]
        assert chosen(names, strategy) == preferred + others


def test_disabled_and_unregistered_storages_count_as_absent() -> None:
    disabled = TableView({"nfs": 1, "mc": 1}, TYPES)
    names = ["never-registered", "fs", "nfs", "mc"]
    assert chosen(names, CachePreferStrategy.CPS_PREFER_3FS, disabled) == ["nfs", "mc"]
    assert chosen(names, CachePreferStrategy.CPS_ALWAYS_3FS, disabled) == []
    assert chosen(["fs"], CachePreferStrategy.CPS_UNSPECIFIED, disabled) == []


def test_speed_does_not_matter_for_writes() -> None:
    fast_last = TableView({"nfs": 3, "pool": 0}, TYPES)
    assert chosen(["nfs", "pool"], CachePreferStrategy.CPS_UNSPECIFIED, fast_last) == ["nfs", "pool"]


# ── Next candidates ──


PAGE = 4096
POOL_BYTES = 5 << 20  # of some chunks, in all a little more than a page of blocks
IS_WRITING = LocationStatus.WRITING
VALID_MS = 3000
HOUR_MS = 3_600_000


class World(ManagerCore):
    """A manager with pools `p` and `q` on node `n`, files `f`, and files `m` that the manager makes itself."""

    def __init__(self, root: Path, usage: Ledger | None = None) -> None:
        super().__init__(has_pools=True, usage=usage)
        self.root = root

    async def begin(self, *candidates: str, blocks: int = 1 << 20, limits: dict[str, int] | None = None) -> None:
        """Let a group have these candidates, best first; limits are in blocks, too."""
        for name in candidates:
            limit = (limits or {}).get(name, 0) * PAGE
            await self.registry.storages.add(StorageConfig(name, self._spec(name), capacity_bytes=limit))
            if name in self.storages.pools():
                await self.report(name, HOUR_MS)
        await self.registry.groups.create(group(storages=candidates, capacity=blocks * PAGE))
        await self.manager.register_instance(instance({"kv": PAGE}))

    def _spec(self, name: str) -> NfsStorageSpec | ThreeFSStorageSpec | TairMemPoolStorageSpec:
        if name in "pq":
            return TairMemPoolStorageSpec(node_id="n", capacity_bytes=POOL_BYTES)
        (self.root / name).mkdir()
        if name == "f":
            return NfsStorageSpec(str(self.root / name))
        return ThreeFSStorageSpec(mountpoint=str(self.root / name), root_dir="d", touch_file_when_create=True)

    def pool(self, name: str = "p") -> MempoolStorage:
        return self.storages.pools()[name]

    async def report(self, name: str, valid_ms: int) -> None:
        await self.pool(name).report(PoolReport("n", 1, POOL_BYTES, valid_ms))

    async def fill(self, name: str = "p", but: int = 0) -> None:
        """Let all pages of a pool be taken, but some."""
        free_bytes = (await self.pool(name).space()).free_bytes
        parts = [Part("kv", key, PAGE) for key in range(free_bytes // PAGE - but)]
        await self.pool(name).allocate(Allocation("other", "x", parts))

    async def lose_agent(self, name: str = "p") -> None:
        await self.report(name, VALID_MS)
        self.clock.time += VALID_MS / 1000 + 1

    async def damage(self, name: str = "p") -> None:
        table = self.tables.table("pools")
        assert await table.replace(name, await table.get(name), b"garbage")

    async def start(self, keys: Sequence[int]) -> StartedWrite:
        return await self.manager.start_write(self.manager.cache("i"), WriteRequest(keys, node_id="n"))

    async def goes_to(self, keys: Sequence[int]) -> list[str]:
        """Start a write and return the storages of its blocks."""
        return [storage_of(chunk) for chunk in (await self.start(keys)).chunks]

    async def places(self, keys: Sequence[int]) -> list[list[tuple[str, LocationStatus]]]:
        records = await self.manager.cache("i").index.get(keys)
        return [[(each.storage, each.status) for each in record.locations] if record else [] for record in records]


def storage_of(chunk: bytes) -> str:
    (spec,) = decode_chunk(chunk).specs
    return LocationUri.parse(spec.uri).storage


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.storages.close_all()


FAULTS: dict[str, Callable[[World, str], Awaitable[None]]] = {
    "full": World.fill,
    "lost": World.lose_agent,
    "damaged": World.damage,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_next_candidate_takes_the_blocks_in_the_same_call(world: World, fault: str) -> None:
    await world.begin("p", "f")
    assert await world.goes_to([1, 2]) == ["p", "p"]
    await FAULTS[fault](world, "p")
    before = world.pool().allocated_bytes
    assert await world.goes_to([3, 4]) == ["f", "f"]
    assert await world.places([3, 4]) == [[("f", IS_WRITING)]] * 2
    assert world.pool().allocated_bytes == before
    assert world.pressed == (["group"] if fault == "full" else []), "an eviction helps only a full storage"
    assert world.manager.usage.rejections["group"] == 0
    assert world.manager.endings.open_count == 2
    assert dict(world.manager.usage.bytes_on_storage("f")) == {"group": 2 * PAGE}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_pool_that_refuses_for_lack_of_space_is_full_though_its_quota_is_not(world: World, fault: str) -> None:
    await world.begin("p", "f")
    notified: list[str] = []
    world.manager.set_full_listener(notified.append)
    await FAULTS[fault](world, "p")
    await world.goes_to([1])
    health = world.storages.health("p")
    assert health is not None
    assert (health.is_full, notified) == ((True, ["p"]) if fault == "full" else (False, []))


async def test_a_storage_that_refused_is_asked_last_until_it_answers_a_probe(world: World) -> None:
    """A failed probe proves nothing about writes; otherwise each one would send the next write there again."""
    await world.begin("p", "f")
    await world.lose_agent()
    assert await world.goes_to([1]) == ["f"]
    await world.report("p", HOUR_MS)
    for key, end in enumerate((ProbeOutcome.FAILED, ProbeOutcome.LATE), start=2):
        _probed(world, end)
        assert await world.goes_to([key]) == ["f"]
    _probed(world, ProbeOutcome.ANSWERED)
    assert await world.goes_to([9]) == ["p"]


def _probed(world: World, end: ProbeOutcome) -> None:
    health = world.storages.health("p")
    assert health is not None
    world.storages.set_health("p", health.after(Probe(end, 0.1, "reason"), world.clock.now(), HealthRules(9, 9)))


async def test_a_write_of_many_pages_goes_as_a_whole_and_leaves_nothing_behind(world: World) -> None:
    """The first page of blocks fits in the pool, the second does not, though the pool's limit allows it."""
    await world.begin("p", "f")
    keys = range(POOL_BYTES // PAGE)
    await world.fill(but=BATCH_KEYS + 10)
    before = world.pool().allocated_bytes
    assert before > 0
    assert await world.goes_to(keys) == ["f"] * len(keys)
    assert world.pool().allocated_bytes == before
    assert await world.places(keys) == [[("f", IS_WRITING)]] * len(keys)
    assert not world.manager.usage.bytes_on_storage("p").get("group", 0)


async def test_what_one_storage_gave_is_given_back_where_another_one_refuses(world: World) -> None:
    await world.begin("p", "q", "f", limits={"p": 2})
    await world.fill("q")
    assert await world.goes_to(range(5)) == ["p"] * 2 + ["f"] * 3
    assert world.pool().allocated_bytes == 2 * PAGE
    assert (await world.pool("q").space()).free_bytes == 0


async def test_files_that_cannot_be_made_are_made_by_the_next_candidate(world: World) -> None:
    """There the blocks are stored already, and have to be taken back first."""
    await world.begin("m", "f")
    assert await world.goes_to([1]) == ["m"]
    shutil.rmtree(world.root / "m")
    assert await world.goes_to([2, 3]) == ["f", "f"]
    assert await world.goes_to([4]) == ["f"], "it is noted"
    deleting = ("m", LocationStatus.DELETING)
    assert await world.places([2, 3, 4]) == [[deleting, ("f", IS_WRITING)]] * 2 + [[("f", IS_WRITING)]]
    assert world.manager.endings.open_count == 3
    (world.root / "m" / "d" / "cluster").mkdir(parents=True)
    await world.executor.run_due()
    assert await world.places([2, 3]) == [[("f", IS_WRITING)]] * 2


NONE_LEFT: dict[str, tuple[dict[str, str], type[KvcmError], list[str]]] = {
    "full": ({"p": "full"}, CapacityError, ["storage p: the pool has no space", "retry shortly, eviction frees space"]),
    "lost": ({"p": "lost"}, NotReadyError, ["storage p: no host agent has reported"]),
    "damaged": ({"p": "damaged"}, StorageIOError, ["cannot be read"]),
    "full and lost": ({"p": "full", "q": "lost"}, CapacityError, ["storage p: the pool", "storage q: no host agent"]),
    "lost and full": ({"p": "lost", "q": "full"}, CapacityError, ["storage q: the pool", "storage p: no host agent"]),
    "damaged and lost": ({"p": "damaged", "q": "lost"}, NotReadyError, ["cannot be read", "storage q: no host"]),
}


@pytest.mark.parametrize("case", NONE_LEFT)
async def test_only_when_no_candidate_is_left_the_write_is_refused_and_reported_why(world: World, case: str) -> None:
    faults, kind, texts = NONE_LEFT[case]
    await world.begin(*faults)
    for name, fault in faults.items():
        await FAULTS[fault](world, name)
    with pytest.raises(kind) as refusal:
        await world.start([1, 2])
    assert type(refusal.value) is kind
    assert [text for text in texts if text not in str(refusal.value)] == []
    assert await world.places([1, 2]) == [[], []]
    assert world.manager.endings.open_count == 0
    assert world.manager.usage.rejections["group"] == (kind is CapacityError)
    assert set(world.pressed) == ({"group"} if kind is CapacityError else set())


async def test_a_next_candidate_without_space_in_its_limits_is_named_beside_the_one_that_refused(world: World) -> None:
    await world.begin("p", "f", limits={"f": 1})
    await world.fill()
    assert await world.goes_to([1, 2]) == ["f"], "what fits of them"
    with pytest.raises(CapacityError, match=r"storage 'f' is full.*; storage p: the pool has no space"):
        await world.start([3])
    assert world.manager.usage.rejections["group"] == 2


async def test_what_can_be_read_on_a_storage_that_is_drained_is_masked_when_the_others_refuse(world: World) -> None:
    await world.begin("p", "f")
    await world.lose_agent()
    started = await world.start([1])
    await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=1))
    world.storages.set_draining("f", is_draining=True)
    assert (await world.start([1])).mask == BlockMask(offset=1)
    with pytest.raises(NotReadyError, match="no host agent has reported"):
        await world.start([1, 2])


async def test_the_space_of_an_attempt_is_free_for_the_next_one(tmp_path: Path, redis_standalone: Standalone) -> None:
    """Also where other managers count with it: nothing is sent here but what the write itself sends."""
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"t{secrets.token_hex(6)}")))
    world = World(tmp_path, SharedLedger(QuotaCounters(client), "node"))
    await world.begin("p", "q", "f", blocks=2)
    await world.fill("p")
    await world.lose_agent("q")
    assert await world.goes_to([1, 2]) == ["f", "f"]
    with pytest.raises(CapacityError, match=r"quota\.capacity"):
        await world.start([3])
    world.storages.close_all()
    await client.close()


# ── Storages that are down ──


KEYS = [1, 2, 3]


def down(rig: Rig, storage: str = "slow") -> None:
    rig.storages.set_health(storage, StorageHealth(HealthState.SH_DOWN, "it is gone"))


def up(rig: Rig, storage: str = "slow") -> None:
    rig.storages.set_health(storage, StorageHealth(HealthState.SH_UP))


async def hosts(rig: Rig, keys: Sequence[int] = KEYS) -> list[str]:
    """The storages that a match names for the blocks it finds."""
    found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.PREFIX_MATCH, keys))
    return [location["tp0"].partition("://")[2].partition("/")[0] for location in uris(found.chunks)]


async def test_blocks_on_a_storage_that_is_down_go_to_the_next_candidate_and_both_copies_serve_afterwards(
    rig: Rig,
) -> None:
    await rig.store(KEYS)
    down(rig)
    again = await rig.store([*KEYS, 4])
    assert len(again.chunks) == 4
    assert await hosts(rig, [*KEYS, 4]) == ["slow2"] * 4
    up(rig)
    assert await rig.statuses([*KEYS, 4]) == [["SERVING", "SERVING"]] * 3 + [["SERVING"]]
    assert len(await hosts(rig, [*KEYS, 4])) == 4
    assert (await rig.start([*KEYS, 4])).chunks == []
    for storage, other in (("slow", "slow2"), ("slow2", "slow")):
        down(rig, storage)
        assert await hosts(rig) == [other] * 3
        up(rig, storage)


async def test_a_full_storage_is_read_and_written_to_last(rig: Rig) -> None:
    await rig.store(KEYS)
    full = StorageHealth(HealthState.SH_DEGRADED, "no space left", is_unwritable=True)
    rig.storages.set_health("slow", full)
    await rig.store([*KEYS, 4])
    assert await hosts(rig, [*KEYS, 4]) == ["slow"] * 3 + ["slow2"]
    rig.storages.set_health("slow2", full)
    await rig.store([5])
    assert await hosts(rig, [5]) == ["slow"], "it may have been emptied a moment ago"


async def test_with_no_candidate_left_the_caller_is_reported_so(rig: Rig) -> None:
    await rig.store(KEYS)
    down(rig)
    down(rig, "slow2")
    with pytest.raises(NotReadyError, match="no storage of group 'group' is available"):
        await hosts(rig)
    with pytest.raises(NotReadyError, match="no storage of group 'group' is available"):
        await rig.start([7])
    assert rig.manager.endings.open_count == 0
    assert (await rig.start([])).chunks == []
    up(rig, "slow2")
    assert await hosts(rig) == []
    assert len((await rig.start([7])).chunks) == 1


STEPS = st.lists(
    st.tuples(st.just("flip"), st.sampled_from(["slow", "slow2"]))
    | st.tuples(st.sampled_from(["start", "finish", "read"]), st.integers(1, 6)),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_while_one_candidate_is_there_no_request_fails_and_in_the_end_everything_is_found(
    steps: list[tuple[str, str | int]],
) -> None:
    """Chains of 1 to n; health changes between any two requests, also while blocks are being written."""
    asyncio.run(_go_through(steps))


async def _go_through(steps: list[tuple[str, str | int]]) -> None:
    away: set[str] = set()
    started: list[tuple[str, int]] = []
    longest = 0
    with opened() as rig:
        for verb, what in steps:
            if isinstance(what, str):
                _flip(rig, what, away)
                continue
            keys = range(1, what + 1)
            if verb == "read":
                assert not away.intersection(await hosts(rig, keys))
            elif verb == "start":
                write = await rig.start(keys)
                started.append((write.session.id, len(write.chunks)))
                longest = max(longest, what)
            elif started:
                session, count = started.pop(0)
                await rig.manager.finish_write(rig.manager.cache("i"), session, BlockMask(offset=count))
        for session, count in started:
            await rig.manager.finish_write(rig.manager.cache("i"), session, BlockMask(offset=count))
        for storage in away:
            up(rig, storage)
        assert len(await hosts(rig, range(1, longest + 1))) == longest


def _flip(rig: Rig, storage: str, away: set[str]) -> None:
    if storage in away:
        away.remove(storage)
        up(rig, storage)
    elif not away:
        away.add(storage)
        down(rig, storage)
