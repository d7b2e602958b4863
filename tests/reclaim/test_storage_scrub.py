"""Bytes without metadata: the scrub, and slots of packed files that are handed out again (decision 16)."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_clock import FakeClock
from garbage_rig import DAY_SECONDS, NFS, Deployment, Disk, deployed, files_below, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reclaim_rig import Rig
from thoroughness import examples

from kvcm.cache.manager import GarbageSource
from kvcm.cache.write_sessions import WriteRequest
from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, LocationStatus, decode_chunk
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.reclaim.scrub import ScrubReport, StorageScrubber
from kvcm.storage.backend import StoredObject

KEYS = list(range(-3, 9))


@pytest.fixture(params=[1, 4], ids=["one part a file", "packed"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(tmp_path / "root", keys_per_file=request.param)


@pytest.fixture
def site(disk: Disk) -> Iterator[Deployment]:
    with deployed(disk, instance_ids=("i", "Qwen/..")) as made:
        yield made


def scrub(site: Deployment, **fields: object) -> Awaitable[ScrubReport]:
    return site.scrubber.scrub(NFS, **({"dry_run": False} | fields))  # type: ignore[arg-type]


async def test_orphans_go_and_known_files_stay(site: Deployment) -> None:
    for instance_id in ("i", "Qwen/.."):
        await site.store(KEYS, instance_id)
    await site.store([*KEYS[::-1], 100, 101, 102, 103], "i")  # of another session: files of its own
    before = files_below(site.disk.root)
    lost = {path for key in (100, 101, 102, 103) for path in await site.paths(key)}
    lost |= {path for key in KEYS for path in await site.paths(key, "Qwen/..")}
    await site.forget([100, 101, 102, 103])
    await site.forget(KEYS, "Qwen/..")
    report = await scrub(site)
    assert files_below(site.disk.root) == before - lost
    assert (report.objects, report.orphans, report.deleted) == (len(before), len(lost), len(lost))
    assert report.orphan_bytes == 16 * 100
    assert (report.too_young, report.failed) == (0, 0)
    await site.assert_readable(KEYS)
    assert site.scrubber.found == {"without_metadata": len(lost)}
    assert (await scrub(site)).orphans == 0


async def test_whatever_status_a_location_has_its_bytes_are_known(site: Deployment) -> None:
    """A writer at work and a deletion under way are not the scrub's business, however old the files are."""
    await site.store([1, 2, 3, 4])
    site.write(await site.start([11, 12, 13, 14]))
    await site.manager.trim(site.manager.cache("i"))
    statuses = {each.status for key in (1, 11) for each in await site.locations(key)}
    assert statuses == {LocationStatus.DELETING}
    site.write(await site.start([21, 22, 23, 24]))
    before = files_below(site.disk.root)
    report = await scrub(site)
    assert (report.orphans, files_below(site.disk.root)) == (0, before)


async def test_young_files_stay(site: Deployment) -> None:
    """The metadata does not name them yet, or their writer is late and still writes them."""
    await site.store([1, 2, 3, 4], age_seconds=3599)
    await site.forget([1, 2, 3, 4])
    before = files_below(site.disk.root)
    report = await scrub(site)
    assert (report.orphans, report.too_young, files_below(site.disk.root)) == (0, len(before), before)
    assert (await scrub(site, min_age_seconds=3600)).too_young == len(before)
    assert (await scrub(site, min_age_seconds=3599)).deleted == len(before)
    assert files_below(site.disk.root) == set()


async def test_two_deployments_on_one_directory(tmp_path: Path) -> None:
    """The scrub of one touches nothing of the other, though both lost all metadata and have the same instances."""
    clock = FakeClock()
    with deployed(Disk(tmp_path, "one"), clock) as one, deployed(Disk(tmp_path, "two"), clock) as two:
        for site in (one, two):
            await site.store(KEYS)
        await one.forget(KEYS)
        await two.forget(KEYS[6:])
        of_two = files_below(tmp_path / "two")
        assert (await scrub(one)).deleted == len(KEYS)
        assert files_below(tmp_path / "one") == set()
        assert files_below(tmp_path / "two") == of_two
        assert (await scrub(two)).deleted == 6
        await two.assert_readable(KEYS[:6])


async def test_a_dead_deployment(tmp_path: Path) -> None:
    clock = FakeClock()
    with deployed(Disk(tmp_path, "dead/1"), clock) as dead, deployed(Disk(tmp_path, "live"), clock) as live:
        await dead.store(KEYS)
        await dead.store([50], age_seconds=10)
        await live.store(KEYS)
        before = files_below(tmp_path / "live")
        assert (await scrub(live, cluster_id="dead/1", dry_run=True)).orphans == len(KEYS)
        report = await scrub(live, cluster_id="dead/1")
        assert (report.deleted, report.too_young) == (len(KEYS), 1)
        assert files_below(tmp_path) - before == set(await dead.paths(50))
        assert (await scrub(live, cluster_id="never was")).objects == 0
        assert (await scrub(live, cluster_id="..")).objects == 0
        await live.assert_readable(KEYS)


async def test_blocks_that_came_from_a_dead_deployment_stay(tmp_path: Path) -> None:
    """An import keeps uris: they lead into the directory of the deployment that wrote the bytes."""
    clock = FakeClock()
    with deployed(Disk(tmp_path, "dead"), clock) as dead, deployed(Disk(tmp_path, "live"), clock) as live:
        await dead.store(KEYS)
        kept = KEYS[:5]
        records = await dead.index().get(kept)
        await live.index().put({key: record for key, record in zip(kept, records, strict=True) if record is not None})
        assert (await scrub(live, cluster_id="dead")).deleted == len(KEYS) - 5
        await live.assert_readable(kept)


async def test_errors_name_the_wrong_argument(site: Deployment) -> None:
    with pytest.raises(InvalidArgumentError, match="storage_unique_name 'other' is not an open storage"):
        await site.scrubber.scrub("other", dry_run=True)
    with pytest.raises(InvalidArgumentError, match="cluster_id 'cluster-1' is this deployment's own"):
        await scrub(site, cluster_id="cluster-1")
    with pytest.raises(InvalidArgumentError, match="min_age_seconds is -1"):
        await scrub(site, min_age_seconds=-1)


async def test_one_scrub_of_a_storage_at_a_time(site: Deployment) -> None:
    await site.store(KEYS)
    first = asyncio.ensure_future(scrub(site))
    await asyncio.sleep(0)
    with pytest.raises(NotReadyError, match="'nfs' is being scrubbed"):
        await scrub(site)
    assert (await first).objects > 0
    assert (await scrub(site)).objects > 0


async def test_links_are_never_followed(site: Deployment, tmp_path: Path) -> None:
    """Whatever is linked from inside, at whatever depth, stays; so do the links."""
    victim = put(tmp_path / "outside" / "kv" / "7.aa", 0, b"precious", 0.0)
    top = site.disk.root / "cluster-1"
    inside = put(top / "i" / "kv" / "8.ab", 0, b"orphan", 0.0)
    links = {
        top / "linked": victim.parent.parent,
        top / "i" / "linked": victim.parent,
        top / "i" / "kv" / "9.ac": victim,
        top / "i" / "kv" / "a.ad.deleted": victim,
    }
    for link, target in links.items():
        link.symlink_to(target)
    report = await scrub(site)
    assert (report.objects, report.deleted) == (1, 1)
    assert not inside.exists()
    assert victim.read_bytes() == b"precious"
    assert all(link.is_symlink() for link in links)


async def test_foreign_files_are_left_alone(site: Deployment) -> None:
    top = site.disk.root / "cluster-1"
    foreign = [
        put(top / name, 0, b"x", 0.0)
        for name in (
            "README", "7.aa", "i/7.aa", "i/kv/deeper/7.aa", "i/kv/notes.txt", "i/kv/7", "i/kv/xyz.aa", "i/kv/7.aa.tmp",
            "i/kv/.deleted", "i/kv/11112222333344445.aa",
        )
    ]  # fmt: skip
    report = await scrub(site)
    assert (report.objects, report.deleted) == (0, 0)
    assert all(path.exists() for path in foreign)


async def test_the_same_directory_under_another_path(site: Deployment, tmp_path: Path) -> None:
    """Two names of one storage, mounted at two places: what one wrote is no orphan of the other."""
    (tmp_path / "mount").symlink_to(site.disk.root)
    await site.store(KEYS)
    await site.registry.storages.add(StorageConfig("again", NfsStorageSpec(str(tmp_path / "mount"))))
    report = await site.scrubber.scrub("again", dry_run=False)
    assert (report.objects, report.orphans) == (len(files_below(site.disk.root)), 0)


async def test_an_instance_that_is_being_removed_still_knows_its_bytes(site: Deployment) -> None:
    await site.store([1, 2, 3, 4])
    await site.manager.remove_instance("i")
    assert (await scrub(site)).orphans == 0


async def test_a_storage_that_is_not_mounted_is_an_error(site: Deployment) -> None:
    shutil.rmtree(site.disk.root / "cluster-1")
    with pytest.raises(StorageIOError, match="is it mounted on this host"):
        await scrub(site)


# ── packed files ──


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path, keys_per_file=4)) as made:
        yield made


async def test_a_record_of_deletions_belongs_to_its_file(packed: Deployment) -> None:
    await packed.store([1, 2, 3, 4])
    (path,) = await packed.paths(1)
    await packed.remove([2])
    beside = path.with_name(path.name + ".deleted")
    assert beside.exists()
    for each in (path, beside):
        os.utime(each, (0, 0))
    report = await scrub(packed)
    assert (report.objects, report.orphans, beside.exists()) == (1, 0, True)
    await packed.forget([1, 3, 4])
    assert (await scrub(packed)).deleted == 1
    assert files_below(packed.disk.root) == set()


async def test_a_scrub_that_was_cut_off_is_finished_by_the_next(packed: Deployment) -> None:
    """The file is gone, the record of deletions beside it is not."""
    await packed.store([1, 2, 3, 4])
    (path,) = await packed.paths(1)
    await packed.remove([2])
    await packed.forget([1, 3, 4])
    path.unlink()
    beside = path.with_name(path.name + ".deleted")
    os.utime(beside, (0, 0))
    again = await Deployment.restarted(packed)
    assert (await scrub(again)).deleted == 1
    assert not beside.exists()
    again.close()


async def test_a_discarded_slot_of_a_file_that_is_still_written(packed: Deployment) -> None:
    """Its note stands alone for a while; the session's blocks know the file."""
    started = await packed.start([1, 2, 3, 4])
    (path,) = await packed.paths(1)
    put(path.with_name(path.name + ".deleted"), 0, b"0\n", 0.0)
    assert (await scrub(packed)).orphans == 0
    packed.write(started)
    assert (await scrub(packed)).objects == 1


# ── The scrub while others change what it looks at ──


class Interrupting(GarbageSource):
    """Something happens between the first look and the second one."""

    meanwhile: Callable[[], Awaitable[None]]
    reads = 0

    async def unreadable_instances(self) -> Sequence[str]:
        self.reads += 1
        if self.reads == 2:
            await self.meanwhile()
        return await super().unreadable_instances()


def interrupted(site: Deployment, meanwhile: Callable[[], Awaitable[None]]) -> StorageScrubber:
    ownership = Interrupting(site.manager, site.registry, site.disk.store)
    ownership.meanwhile = meanwhile
    return StorageScrubber(ownership, site.storages, site.clock, site.disk.cluster_id)


async def test_an_orphan_is_looked_for_again_right_before_it_goes(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path)) as site:
        await site.store(KEYS)
        records = dict(zip(KEYS, await site.index().get(KEYS), strict=True))
        await site.forget(KEYS)

        async def restore() -> None:
            back: dict[int, BlockRecord] = {key: each for key, each in records.items() if each is not None and key > 0}
            await site.index().put(back)

        report = await interrupted(site, restore).scrub(NFS, dry_run=False)
        assert report.deleted == sum(key <= 0 for key in KEYS)
        await site.assert_readable([key for key in KEYS if key > 0])


async def test_a_file_that_changed_since_it_was_listed_stays(site: Deployment) -> None:
    await site.store(KEYS[:4])
    paths = {path for key in KEYS[:4] for path in await site.paths(key)}
    await site.forget(KEYS[:4])
    (written, *_) = sorted(paths)

    async def write() -> None:
        os.utime(written, (site.clock.time, site.clock.time))

    report = await interrupted(site, write).scrub(NFS, dry_run=False)
    assert (report.deleted, report.failed) == (len(paths) - 1, 1)
    assert files_below(site.disk.root) == {written}


async def test_an_instance_damaged_meanwhile_stops_the_scrub(site: Deployment) -> None:
    await site.store(KEYS[:4])
    await site.forget(KEYS[:4])
    before = files_below(site.disk.root)

    async def damage() -> None:
        await site.disk.store.table("registry").replace("instance/other", None, b"{}")

    with pytest.raises(StorageIOError, match="cannot be read"):
        await interrupted(site, damage).scrub(NFS, dry_run=False)
    assert files_below(site.disk.root) == before


async def test_files_that_vanish_meanwhile_count_as_deleted(site: Deployment) -> None:
    await site.store(KEYS[:4])
    await site.forget(KEYS[:4])

    async def vanish() -> None:
        shutil.rmtree(site.disk.root / "cluster-1" / "i")

    report = await interrupted(site, vanish).scrub(NFS, dry_run=False)
    assert (report.deleted, report.failed) == (report.orphans, 0)


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    keys_per_file=st.sampled_from([1, 2, 4]),
    sessions=st.lists(st.tuples(st.sampled_from("ij"), st.integers(1, 6), st.booleans()), max_size=6),
    forgotten=st.sets(st.integers(0, 40)),
    dry_run=st.booleans(),
)
def test_the_remaining_files_match_a_plain_set(
    tmp_path_factory: pytest.TempPathFactory,
    keys_per_file: int,
    sessions: list[tuple[str, int, bool]],
    forgotten: set[int],
    dry_run: bool,
) -> None:
    """A file stays if some block of it is known or it is young."""

    async def history() -> None:
        with deployed(Disk(tmp_path_factory.mktemp("root"), keys_per_file=keys_per_file), instance_ids="ij") as site:
            users: dict[Path, int] = {}
            young: set[Path] = set()
            first = 0
            for instance_id, count, is_young in sessions:
                keys = range(first, first + count)
                first += count
                await site.store(keys, instance_id, 60.0 if is_young else DAY_SECONDS)
                for key in keys:
                    for path in await site.paths(key, instance_id):
                        users[path] = users.get(path, 0) + (key not in forgotten)
                        young |= {path} if is_young else set()
                await site.forget([key for key in keys if key in forgotten], instance_id)
            orphans = {path for path, count in users.items() if not count}
            report = await scrub(site, dry_run=dry_run)
            assert (report.objects, report.failed) == (len(users), 0)
            assert (report.orphans, report.too_young) == (len(orphans - young), len(orphans & young))
            gone = set() if dry_run else orphans - young
            assert (report.deleted, files_below(site.disk.root)) == (len(gone), users.keys() - gone)

    asyncio.run(history())


# ── Reports to storages of slots that no manager will delete again ──


GRACE_SECONDS = 600.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def reusing(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path / "root", keys_per_file=4), instance_ids=("i", "j")) as made:
        hand_out_again(made)
        yield made


def hand_out_again(reusing: Deployment) -> None:
    reusing.storages.slot_reuse.grace_seconds = GRACE_SECONDS
    reusing.storages.slot_reuse.now = reusing.clock.now
    reusing.storages.slot_reuse.term = lambda: 1


async def places(reusing: Deployment, keys: list[int], instance_id: str = "i") -> set[tuple[str, int | None]]:
    chunks = [each.chunk for key in keys for each in await reusing.locations(key, instance_id)]
    found = [LocationUri.parse(spec.uri) for chunk in chunks for spec in decode_chunk(chunk).specs]
    return {(place.path, place.blkid) for place in found}


async def objects_of(site: Deployment) -> list[StoredObject]:
    pages = site.storages.open_backends()[NFS].objects("cluster-1")
    return [each async for page in pages for each in page.objects]


async def run_due_deletions(reusing: Deployment, seconds: float = 5.0) -> None:
    reusing.clock.time += seconds
    await reusing.executor.run_due()


# ── the executor ──


async def test_it_reports_a_served_block_once_its_metadata_is_gone(rig: Rig) -> None:
    uris = await rig.block(1)
    storage = rig.storages.faults["a"]
    storage.outage = OSError("down")
    await rig.executor.run_due()
    assert storage.forgotten_uris == []
    storage.outage = None
    rig.clock.time += 1
    await rig.executor.run_due()
    assert (await rig.left(), storage.forgotten_uris) == ([], list(uris))


async def test_it_reports_no_block_that_another_manager_dropped(rig: Rig) -> None:
    """Its deletion hung meanwhile, and another block may use the slot by now."""
    uris = {key: await rig.block(key) for key in (1, 2)}
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    assert await rig.executor._start_due() == 2
    assert await rig.turns(lambda: bool(storage.under_way))
    await rig.index.delete([1])
    storage.open_gate.set()
    await rig.executor._deletions.all_done()
    assert storage.forgotten_uris == list(uris[2])


async def test_it_reports_no_block_that_is_kept_or_never_served(rig: Rig) -> None:
    uris = await rig.block(1)
    await rig.block(2)

    def never_served(_key: int, old: BlockRecord | None) -> BlockRecord | None:
        return old and old._replace(locations=tuple(each._replace(session_id="s") for each in old.locations))

    await rig.index.read_modify_write([2], never_served)
    await rig.block(3, status=LocationStatus.SERVING)
    storage = rig.storages.faults["a"]
    storage.stubborn = {(await rig.block(4))[0]}
    await rig.executor.run_due()
    assert await rig.left() == [3, 4]
    assert storage.forgotten_uris == list(uris)


# ── slots that are reported, from the session on ──


async def test_a_slot_is_handed_out_again_after_the_delay_and_the_grace(reusing: Deployment) -> None:
    await reusing.store([1, 2, 3, 4])
    before = await places(reusing, [1, 2])
    await reusing.manager.remove(reusing.manager.cache("i"), [1, 2], BlockMask(offset=0))
    await run_due_deletions(reusing)
    await reusing.store([5], age_seconds=0)
    reusing.clock.time += GRACE_SECONDS
    await reusing.store([6, 7], "j")
    await reusing.store([8, 9])
    assert await places(reusing, [8, 9]) == before
    assert not (await places(reusing, [5]) | await places(reusing, [6, 7], "j")) & before
    await reusing.assert_readable([3, 4, 5, 8, 9])


@pytest.mark.parametrize("end", ["expired", "aborted", "removed while writing", "failed"])
async def test_a_slot_whose_writer_may_come_back_is_never_handed_out(reusing: Deployment, end: str) -> None:
    await reusing.store([1, 2, 3, 4])  # of one session, which ended well: its file has no free slot
    started = await reusing.manager.start_write(
        reusing.manager.cache("i"), WriteRequest([11, 12, 13, 14], timeout_seconds=30)
    )
    reusing.write(started)
    lost = await places(reusing, [11, 12])
    name = started.session.id
    if end == "removed while writing":
        await reusing.manager.remove(reusing.manager.cache("i"), [11, 12], BlockMask(offset=0))
        await reusing.manager.finish_write(reusing.manager.cache("i"), name, BlockMask(offset=4))
    elif end == "expired":
        reusing.clock.time += 31
        await reusing.manager.expire()
    else:
        await reusing.manager.finish_write(
            reusing.manager.cache("i"), name, BlockMask(flags=(False, False, end == "failed", False))
        )
    await run_due_deletions(reusing, 40)
    assert await reusing.locations(11) == ()
    reusing.clock.time += GRACE_SECONDS
    await reusing.store(list(range(20, 32)))
    assert not await places(reusing, list(range(20, 32))) & lost


async def test_what_never_served_keeps_its_session_to_the_end_however_often_it_is_settled(reusing: Deployment) -> None:
    started = await reusing.start([1, 2])
    await reusing.manager.finish_write(reusing.manager.cache("i"), started.session.id, BlockMask(offset=1))
    (served,), (failed,) = await reusing.locations(1), await reusing.locations(2)
    assert (served.has_served, failed.has_served) == (True, False)
    assert failed.status is LocationStatus.DELETING
    before = await reusing.index().get([2])
    reusing.clock.time += 3
    cache = reusing.manager.cache("i")
    await reusing.manager.endings.expire_writers(cache, {started.session.id: [2]})
    assert await reusing.index().get([2]) == before


# ── the scrub ──


async def test_a_file_that_only_later_owners_live_in_is_no_orphan(reusing: Deployment) -> None:
    """Its name contains the key of a block that is long gone."""
    await reusing.store([1, 2, 3, 4])
    (path,) = await reusing.paths(1)
    await reusing.remove([1, 2, 3])
    reusing.clock.time += GRACE_SECONDS
    await reusing.store([101, 102])
    assert await reusing.paths(101) == [path]
    await reusing.remove([4])
    for each in files_below(reusing.disk.root):
        os.utime(each, (0, 0))
    report = await reusing.scrubber.scrub(NFS, dry_run=False)
    assert (report.objects, report.orphans, report.too_young) == (1, 0, 0)
    await reusing.assert_readable([101, 102])
    await reusing.forget([101])
    report = await reusing.scrubber.scrub(NFS, dry_run=False)
    assert (report.orphans, report.too_young) == (0, 0)
    await reusing.assert_readable([102])
    await reusing.forget([102])
    assert (await reusing.scrubber.scrub(NFS, dry_run=False)).deleted == 1
    assert files_below(reusing.disk.root) == set()


async def test_a_file_that_a_slot_is_handed_out_of_is_too_young_for_the_scrub(reusing: Deployment) -> None:
    """No block uses the file; then a writer gets a slot of it between the two reads of the scrub."""
    await reusing.store([1, 2, 3, 4])
    (path,) = await reusing.paths(1)
    await reusing.remove([1, 2])
    await reusing.forget([3, 4])
    reusing.clock.time += GRACE_SECONDS + 86400
    listed = await objects_of(reusing)
    await reusing.start([101])
    assert await reusing.paths(101) == [path]
    (reason,) = await reusing.storages.open_backends()[NFS].remove_objects("cluster-1", listed)
    assert reason == "it changed since it was listed"
    assert path.exists()
