"""Garbage: blocks whose prefix is gone (invariant 7), metadata without bytes, overdue sessions, absent mounts."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_clock import FakeClock
from garbage_rig import NFS, SIZE, Deployment, Disk, deployed, files_below
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.model.errors import DuplicateEntityError, StorageIOError, UnknownInstanceError
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.reclaim.garbage import GRACE_SECONDS, GarbageReport, without_lost

CHAIN = list(range(1, 11))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path)) as made:
        yield made


async def collect(
    site: Deployment, *, after: float = 0.0, dry_run: bool = False, check_bytes: bool = False
) -> GarbageReport:
    site.clock.time += after
    return await site.collector.collect(dry_run=dry_run, check_bytes=check_bytes)


async def after_grace(site: Deployment) -> GarbageReport:
    """See what there is, and collect it when its grace is over."""
    await collect(site)
    return await collect(site, after=GRACE_SECONDS)


async def read(site: Deployment, mode: MatchMode, keys: Sequence[int] = CHAIN, window: int = 1) -> None:
    await site.manager.match(site.manager.cache("i"), MatchQuery(mode, keys, window=window))


# ── blocks whose prefix is gone ──


async def test_blocks_behind_a_gap_go_from_the_tail_when_their_grace_is_over(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    assert (await collect(site)).without_prefix == 0
    assert (await collect(site, after=GRACE_SECONDS - 0.001)).without_prefix == 0
    assert await site.serving() == {1, 2, 3, 5, 6, 7, 8, 9, 10}
    report = await collect(site, after=0.001)
    assert (report.blocks, report.without_prefix, report.freed_bytes) == (9, 6, 6 * SIZE)
    assert await site.serving() == {1, 2, 3}
    assert [key for key, _ in site.marked] == [10, 9, 8, 7, 6, 5]
    assert site.collector.found == {"without_prefix": 6, "without_bytes": 0}
    assert (await collect(site)).without_prefix == 0


async def test_collected_blocks_stay_readable_for_the_delay(site: Deployment) -> None:
    """Invariant 6; then bytes and metadata go as in any deletion."""
    await site.store(CHAIN)
    await site.remove([1])
    await after_grace(site)
    (location,) = await site.locations(2)
    assert (location.status, location.deadline) == (LocationStatus.DELETING, site.clock.time + 2)
    site.clock.time += 2
    await site.executor.run_due()
    assert (await collect(site)).blocks == 0


async def test_a_parent_that_is_only_being_deleted_is_gone(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.change(4, status=LocationStatus.DELETING, deadline=site.clock.time + 1e6)
    assert (await after_grace(site)).without_prefix == 6


async def test_a_prefix_that_came_back_in_time_saves_the_blocks_behind(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await collect(site)
    site.clock.time += GRACE_SECONDS
    await site.start(CHAIN)  # being written is enough
    assert (await collect(site)).without_prefix == 0
    assert await site.serving() == {1, 2, 3, 5, 6, 7, 8, 9, 10}


async def test_a_pin_holds_its_block_and_its_prefix(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    until = site.clock.time + 5000
    await site.change(7, pinned_until=until)
    assert (await after_grace(site)).without_prefix == 3
    assert await site.serving() == {1, 2, 3, 5, 6, 7}
    site.clock.time = until
    assert (await collect(site)).without_prefix == 3
    assert await site.serving() == {1, 2, 3}


async def test_a_writer_holds_its_block_and_its_prefix(tmp_path: Path) -> None:
    """It stores another spec of a block behind the gap."""
    with deployed(Disk(tmp_path), specs=("a", "b"), groups={"a": ("a",), "ab": ("a", "b")}) as site:
        await site.store(CHAIN, spec_groups=["a"] * 10)
        await site.remove([4])
        await site.start([7], spec_groups=["ab"], timeout_seconds=3600, parent_key=6)
        assert [each.status for each in await site.locations(7)] == [LocationStatus.SERVING, LocationStatus.WRITING]
        assert (await after_grace(site)).without_prefix == 3
        assert await site.serving() == {1, 2, 3, 5, 6, 7}
        site.clock.time += 3600
        await site.manager.expire()
        assert (await collect(site)).without_prefix == 3


async def test_keys_in_a_ring_are_worked_through(site: Deployment) -> None:
    """Clients may send keys that depend on no prefix."""
    await site.store([1, 2, 3])
    await site.change(1, status=LocationStatus.DELETING, deadline=site.clock.time + 1e6)
    await site.index().read_modify_write([1], lambda _key, old: old and old._replace(parent=3))
    assert (await after_grace(site)).without_prefix == 2


async def test_a_dry_run_counts_and_changes_nothing(site: Deployment) -> None:
    await site.store([1, 2, 3, 4, 5])
    await site.store([1, 2, 13, 14])
    await site.remove([2])
    await site.change(14, pinned_until=site.clock.time + 1e6)
    await collect(site, dry_run=True)
    site.clock.time += GRACE_SECONDS
    before = await site.index().get(list(range(20)))
    found = await collect(site, dry_run=True)
    assert await site.index().get(list(range(20))) == before
    assert (site.marked, site.collector.found["without_prefix"]) == ([], 0)
    assert await collect(site) == found
    assert found.without_prefix == 3


@pytest.mark.parametrize("mode", [MatchMode.BATCH_GET, MatchMode.REVERSE_ROLL_SW_MATCH])
async def test_instances_that_are_read_out_of_order_are_left_alone(site: Deployment, mode: MatchMode) -> None:
    """Even if that was long ago, by another manager's life, and they are read by prefix ever since."""
    await site.store(CHAIN)
    await read(site, mode)
    await read(site, MatchMode.PREFIX_MATCH)
    await site.remove([4])
    assert (await after_grace(site)).without_prefix == 0
    again = await Deployment.restarted(site)
    assert (await after_grace(again)).without_prefix == 0
    assert len(await again.serving()) == 9
    again.close()


async def test_a_first_batch_read_during_the_grace_is_in_time(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await collect(site)
    site.clock.time += GRACE_SECONDS
    await read(site, MatchMode.BATCH_GET)
    assert (await collect(site)).without_prefix == 0


@pytest.mark.parametrize("mode", [MatchMode.PREFIX_MATCH, MatchMode.PREFIX_MATCH_WITH_MAMBA])
async def test_reads_by_prefix_change_nothing(site: Deployment, mode: MatchMode) -> None:
    await site.store(CHAIN)
    await read(site, mode)
    await site.remove([4])
    assert (await after_grace(site)).without_prefix == 6


async def test_how_an_instance_is_read_is_its_own(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path), instance_ids=("i", "j")) as site:
        for instance_id in ("i", "j"):
            await site.store(CHAIN, instance_id)
            await site.remove([4], instance_id)
        await read(site, MatchMode.BATCH_GET)
        assert (await after_grace(site)).without_prefix == 6
        assert (len(await site.serving("i")), len(await site.serving("j"))) == (9, 3)


async def test_an_instance_registered_again_begins_again(site: Deployment) -> None:
    await read(site, MatchMode.BATCH_GET)
    instance = site.manager.cache("i").instance
    await site.manager.remove_instance("i")
    await site.manager.purge_removed()
    await site.manager.register_instance(instance)
    assert await site.disk.store.table("modes").all() == {}
    await site.store(CHAIN)
    await site.remove([4])
    assert (await after_grace(site)).without_prefix == 6


async def test_one_instance_can_be_asked_for(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path), instance_ids=("i", "j")) as site:
        for instance_id in ("i", "j"):
            await site.store(CHAIN, instance_id)
            await site.remove([4], instance_id)
        await collect(site)
        site.clock.time += GRACE_SECONDS
        report = await site.collector.collect("j", dry_run=False, check_bytes=False)
        assert (report.blocks, report.without_prefix) == (9, 6)
        assert len(await site.serving("i")) == 9
        with pytest.raises(UnknownInstanceError, match="'k' is not registered"):
            await site.collector.collect("k", dry_run=True, check_bytes=False)


# ── in the background ──


async def lap(site: Deployment) -> int:
    """Look at everything once, as slowly as in the background; return the number of steps."""
    steps = 0
    while await site.collector.step():
        steps += 1
    return steps


async def test_the_background_collects_when_the_grace_is_over(site: Deployment) -> None:
    await site.store(range(300))
    await site.remove([150])
    assert await lap(site) == 3, "a few blocks per step"
    site.clock.time += GRACE_SECONDS - 1
    await lap(site)
    assert site.marked == []
    site.clock.time += 1
    assert await site.collector.step() == 0, "between two laps: due blocks do not wait for the next one"
    assert len(site.marked) == 149


async def test_laps_are_not_run_one_after_the_other(site: Deployment) -> None:
    await site.store(CHAIN)
    assert await lap(site) == 1
    await site.store([100])
    site.clock.time += 29
    assert await lap(site) == 0
    site.clock.time += 1
    assert await lap(site) == 1


async def test_a_lap_leaves_out_what_did_not_change_since_the_last_one(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path), instance_ids=("i", "j")) as site:
        for instance_id in ("i", "j"):
            await site.store(CHAIN, instance_id)
        assert await lap(site) == 2
        site.clock.time += 30
        assert await lap(site) == 0
        await site.remove([4], "j")
        site.clock.time += 30
        assert await lap(site) == 1
        site.clock.time += GRACE_SECONDS
        await lap(site)
        assert [key for key, _ in site.marked] == [10, 9, 8, 7, 6, 5]


async def run_for(site: Deployment, rounds: int, rate: int) -> None:
    """Run the duty until it paused so often."""
    site.collector = site.new_collector(rate)
    duty = asyncio.ensure_future(site.collector.run())
    await site.paused(rounds)
    duty.cancel()


async def test_the_pace_is_the_one_that_is_set(site: Deployment) -> None:
    await site.store(range(384))
    await run_for(site, 3, rate=1000)
    assert sum(site.pauses[:3]) == pytest.approx(0.384)
    site.pauses.clear()
    await run_for(site, 10, rate=8)
    assert sum(site.pauses[:10]) == pytest.approx(2.5), "two at a time"


async def test_nothing_runs_in_the_background_when_it_is_off(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    await run_for(site, 3, rate=0)
    site.clock.time += GRACE_SECONDS
    await run_for(site, 3, rate=0)
    assert set(site.pauses) == {1.0}
    assert site.marked == []


async def test_a_manager_that_lost_the_lead_counts_again(site: Deployment) -> None:
    await site.store(CHAIN)
    await site.remove([4])
    site.collector = site.new_collector()
    leads = True
    duty = asyncio.ensure_future(site.collector.run(lambda: leads))

    await site.paused(3)
    leads = False
    await site.paused(3)
    site.clock.time += GRACE_SECONDS
    leads = True
    await site.paused(3)
    assert site.marked == []
    site.clock.time += GRACE_SECONDS
    await site.paused(3)
    assert len(site.marked) == 6
    duty.cancel()


# ── sessions ──


async def test_overdue_sessions_are_ended_and_counted(site: Deployment) -> None:
    await site.start([1], timeout_seconds=10)
    await site.start([2], timeout_seconds=10)
    open_one = await site.start([3], timeout_seconds=1000)
    assert (await collect(site, after=10, dry_run=True)).expired_sessions == 2
    assert (await collect(site)).expired_sessions == 2
    assert (await collect(site)).expired_sessions == 0
    assert await site.disk.store.table("sessions").get(open_one.session.id) is not None


# ── Any history: what has its prefix stays ──


KEYS = range(12)
STEPS = st.one_of(
    st.tuples(st.just("write"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True).map(sorted)),
    st.tuples(st.just("remove"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("wait"), st.sampled_from([[1], [300], [599], [600], [700]])),
    st.tuples(st.just("collect"), st.just([])),
)


class Model:
    """The serving blocks, the parent of each, and since when a block's prefix is not complete."""

    def __init__(self) -> None:
        self.stored: dict[int, int | None] = {}
        self.since: dict[int, float] = {}

    def is_whole(self, key: int) -> bool:
        parent = self.stored[key]
        return parent is None or (parent in self.stored and self.is_whole(parent))

    def note(self, time: float) -> None:
        cut = {key for key in self.stored if not self.is_whole(key)}
        self.since = {key: self.since.get(key, time) for key in cut}


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(steps=st.lists(STEPS, max_size=25))
def test_what_has_its_prefix_stays_and_everything_else_goes_after_its_grace(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]]
) -> None:
    """Invariant 7, with a collector that looks after every step. Keys are written in ascending order, so that each has
    whatever parent it was first written behind."""

    async def history() -> None:
        clock = FakeClock()
        with deployed(Disk(tmp_path_factory.getbasetemp()), clock) as site:
            model = Model()
            for what, numbers in steps:
                if what == "write":
                    await site.store(numbers)
                    for parent, key in zip([None, *numbers], numbers, strict=False):
                        model.stored.setdefault(key, parent)
                elif what == "remove":
                    await site.remove(numbers)
                    for key in numbers:
                        model.stored.pop(key, None)
                elif what == "wait":
                    clock.time += numbers[0]
                model.note(clock.time)
                await check(site, model, clock.time, dry_run=what != "collect")
            for _ in range(3):
                clock.time += GRACE_SECONDS
                await check(site, model, clock.time, dry_run=False)
            assert all(map(model.is_whole, model.stored))

    asyncio.run(history())


async def check(site: Deployment, model: Model, time: float, *, dry_run: bool) -> None:
    site.marked.clear()
    report = await site.collector.collect(dry_run=dry_run, check_bytes=False)
    marked = [key for key, _ in site.marked]
    assert dry_run <= (not marked)
    assert len(marked) == (0 if dry_run else report.without_prefix)
    for key in marked:
        assert time - model.since[key] >= GRACE_SECONDS
        assert all(model.stored[other] != key for other in model.stored), "the tail first"
        del model.stored[key]
    assert await site.serving() == model.stored.keys()
    site.clock.time += 5
    await site.executor.run_due()
    site.clock.time -= 5


# ── Metadata without bytes ──


async def test_blocks_whose_file_is_missing_or_short_go(site: Deployment) -> None:
    await site.store(CHAIN)
    (missing,), (short,) = await site.paths(9), await site.paths(10)
    missing.unlink()
    short.write_bytes(b"x" * (SIZE - 1))
    assert (await collect(site)).without_bytes == 0, "only when it is asked for"
    expected = await collect(site, dry_run=True, check_bytes=True)
    assert len(await site.serving()) == 10
    report = await collect(site, check_bytes=True)
    assert report == expected == GarbageReport(blocks=10, without_bytes=2, freed_bytes=2 * SIZE)
    assert await site.serving() == set(range(1, 9))
    assert site.collector.found["without_bytes"] == 2
    assert sorted(site.marked) == [(9, "without_bytes"), (10, "without_bytes")]


async def test_a_missing_part_removes_the_parts_that_are_useless_without_it(tmp_path: Path) -> None:
    """Each spec was written by itself: without `a` nothing is left of group `ab`; without `c` it is whole."""
    with deployed(Disk(tmp_path), specs=("a", "b", "c"), groups={"ab": ("a", "b"), "abc": ("a", "b", "c")}) as site:
        for name in (["ab"], ["abc"]):
            await site.store([1], spec_groups=name)
            await site.store([2], spec_groups=name)
        for key, spec in ((1, "/a/"), (2, "/c/")):
            (path,) = [path for path in await site.paths(key) if spec in str(path)]
            path.unlink()
        assert (await collect(site, check_bytes=True)).without_bytes == 3
        serving = [each.spec_names for each in await site.locations(2) if each.status is LocationStatus.SERVING]
        assert (await site.serving(), serving) == ({2}, [("a", "b")])


async def test_a_write_in_flight_may_complete_a_replica(tmp_path: Path) -> None:
    """`a` lies in two locations, one of which is lost, and `b` is on its way."""
    with deployed(Disk(tmp_path), specs=("a", "b")) as site:
        await site.store([1])
        (whole,) = await site.locations(1)
        one = whole._replace(id="1", spec_names=("a",))
        other, coming = one._replace(id="2"), one._replace(id="3", spec_names=("b",), status=LocationStatus.WRITING)
        old = BlockRecord(None, 0, (one, other, coming))
        instance = site.manager.cache("i").instance
        new = without_lost(old, {"1"}, instance, 5.0)
        deleting = one._replace(status=LocationStatus.DELETING, deadline=5.0)
        assert new == old._replace(locations=(deleting, other, coming))
        alone = without_lost(old._replace(locations=(one, other)), {"1"}, instance, 5.0)
        assert alone is not None
        assert [each.status for each in alone.locations] == [LocationStatus.DELETING] * 2
        assert without_lost(old, {"3", "4"}, instance, 5.0) is old


async def test_a_pin_does_not_bring_bytes_back(site: Deployment) -> None:
    await site.store([1])
    await site.change(1, pinned_until=site.clock.time + 1e6)
    (path,) = await site.paths(1)
    path.unlink()
    assert (await collect(site, check_bytes=True)).without_bytes == 1


async def test_a_storage_that_is_not_mounted_misses_nothing(site: Deployment) -> None:
    await site.store(CHAIN)
    (site.disk.root / "cluster-1").rename(site.disk.root / "elsewhere")
    with pytest.raises(StorageIOError, match="is it mounted on this host"):
        await collect(site, check_bytes=True)
    assert len(await site.serving()) == 10


async def test_a_storage_that_is_not_open_misses_nothing(site: Deployment) -> None:
    await site.store(CHAIN)
    site.storages.close(NFS)
    assert (await collect(site, check_bytes=True)).without_bytes == 0
    assert len(await site.serving()) == 10


async def test_storages_are_asked_at_a_bounded_rate(site: Deployment) -> None:
    await site.store(range(300))
    await collect(site, check_bytes=True)
    assert sum(site.pauses) == pytest.approx(300 / 20_000)
    assert len(site.pauses) == 3


# ── A manager that starts while a storage is not mounted ──


SHORT_CHAIN = [1, 2, 3]


@pytest.fixture(params=["missing", "empty"])
def mount_point(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Root of the storage; the parameter says how it looks while nothing is mounted."""
    return tmp_path / request.param


@pytest.fixture
def mounted(mount_point: Path) -> Iterator[Deployment]:
    with deployed(Disk(mount_point)) as made:
        yield made


def unmount(root: Path) -> None:
    root.rename(root.with_name("away"))
    if root.name == "empty":
        root.mkdir()


def mount(root: Path) -> None:
    if root.exists():
        root.rmdir()
    root.with_name("away").rename(root)


def seen(root: Path) -> set[Path]:
    return set(root.rglob("*"))


async def restarted(mounted: Deployment) -> Deployment:
    made = await Deployment.restarted(mounted)
    made.executor = DeletionExecutor(made.storages, made.clock, is_configured=made.registry.storages.is_configured)
    made.executor.serve(made.manager)
    return made


async def refreshed(mounted: Deployment) -> None:
    """As many refreshes as it takes until the storage is tried again."""
    for _ in range(300):
        await mounted.registry.refresh()
        if mounted.storages.backend(NFS) is not None:
            return
    raise AssertionError("the storage stays closed")


async def delete_due(mounted: Deployment) -> int:
    mounted.clock.time += 600
    return await mounted.executor.run_due()


async def test_deletions_wait_until_the_mount_is_back(mounted: Deployment, mount_point: Path) -> None:
    await mounted.store(SHORT_CHAIN)
    unmount(mount_point)
    again = await restarted(mounted)
    assert again.storages.backend(NFS) is None
    await again.manager.remove(again.manager.cache("i"), SHORT_CHAIN[1:], BlockMask(offset=0))
    for _ in range(3):
        assert await delete_due(again) > 0
        await again.registry.refresh()
    assert [bool(await again.locations(key)) for key in SHORT_CHAIN] == [True] * 3, "nothing counts as deleted"
    assert seen(mount_point) == set()
    assert len(files_below(mount_point.with_name("away"))) == 3
    mount(mount_point)
    await refreshed(again)
    assert await delete_due(again) > 0
    assert [bool(await again.locations(key)) for key in SHORT_CHAIN] == [True, False, False]
    assert files_below(mount_point) == {*await again.paths(1)}
    await again.assert_readable(SHORT_CHAIN[:1])
    again.close()


async def test_what_names_a_known_storage_again_makes_nothing(mounted: Deployment, mount_point: Path) -> None:
    """A startup document does so at every start."""
    unmount(mount_point)
    again = await restarted(mounted)
    for add in (again.registry.storages.add, again.registry.storages.add_in_background):
        with pytest.raises(DuplicateEntityError):
            await add(StorageConfig(NFS, NfsStorageSpec(str(mount_point))))
    assert seen(mount_point) == set()
    again.close()


async def test_a_manager_that_follows_another_makes_nothing(mounted: Deployment, mount_point: Path) -> None:
    """Another one has it mounted and added it; here it is not."""
    other = await restarted(mounted)
    unmount(mount_point)
    config = StorageConfig("new", NfsStorageSpec(str(mount_point / "new")))
    await mounted.registry.storages.add(config)
    (mount_point / "new" / "cluster-1").rmdir()
    await other.registry.refresh()
    assert other.registry.storages.is_configured("new")
    assert other.storages.backend("new") is None
    assert not (mount_point / "new" / "cluster-1").exists()
    other.close()


async def test_an_update_creates_a_lost_root_again(mounted: Deployment, mount_point: Path) -> None:
    unmount(mount_point)
    again = await restarted(mounted)
    await again.registry.storages.update_in_background(StorageConfig(NFS, NfsStorageSpec(str(mount_point))))
    await again.store(SHORT_CHAIN)
    await again.assert_readable(SHORT_CHAIN)
    again.close()


async def test_a_manager_that_saw_it_mounted_puts_off_deletions_too(mounted: Deployment, mount_point: Path) -> None:
    await mounted.store(SHORT_CHAIN)
    await mounted.manager.remove(mounted.manager.cache("i"), SHORT_CHAIN, BlockMask(offset=0))
    unmount(mount_point)
    assert await delete_due(mounted) > 0
    assert [bool(await mounted.locations(key)) for key in SHORT_CHAIN] == [True] * 3
    assert seen(mount_point) == set()
    mount(mount_point)
    assert await delete_due(mounted) > 0
    assert files_below(mount_point) == set()


async def test_a_deployment_that_was_moved_writes_beside_the_blocks_of_the_first(
    mounted: Deployment, mount_point: Path
) -> None:
    """Its storages came configured, and it never wrote there. Another deployment's blocks prove that it is mounted."""
    moved = Disk(mount_point, "cluster-2", store=mounted.disk.store, backends=mounted.disk.backends)
    empty = Deployment(moved, mounted.clock)
    await empty.registry.load()
    assert empty.storages.backend(NFS) is None, "nothing proves that it is mounted"
    empty.close()
    await mounted.store(SHORT_CHAIN)
    full = Deployment(moved, mounted.clock)
    await full.registry.load()
    assert full.storages.backend(NFS) is not None
    assert (mount_point / "cluster-2").is_dir()
    full.close()


async def test_a_start_names_the_missing_root(mounted: Deployment, mount_point: Path) -> None:
    unmount(mount_point)
    with pytest.raises(StorageIOError, match=r"storage nfs: .*/cluster-1/ is not there, is it mounted on this host\?"):
        mounted.storages.prepare(StorageConfig(NFS, NfsStorageSpec(str(mount_point))), is_new=False)
