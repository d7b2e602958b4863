"""The scrub: bytes that no metadata knows go, and nothing else does, on a real file system (decisions 1 and 16)."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from fake_clock import FakeClock
from garbage_rig import NFS, Deployment, Disk, deployed, files_below, put

from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.reclaim.scrub import ScrubReport

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


async def test_orphans_go_and_what_is_known_stays(site: Deployment) -> None:
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


async def test_a_dry_run_counts_and_changes_nothing(site: Deployment) -> None:
    await site.store(KEYS)
    await site.forget(KEYS[4:])
    before = files_below(site.disk.root)
    expected = await scrub(site, dry_run=True)
    assert files_below(site.disk.root) == before
    assert expected.deleted == 0
    found = await scrub(site)
    assert (found.orphans, found.orphan_bytes) == (expected.orphans, expected.orphan_bytes)
    assert found.deleted == found.orphans > 0


async def test_whatever_status_a_location_has_its_bytes_are_known(site: Deployment) -> None:
    """A writer at work and a deletion under way are not the scrub's business, however old the files are."""
    await site.store([1, 2, 3, 4])
    site.write(await site.start([11, 12, 13, 14]))
    await site.manager.trim("i")
    statuses = {each.status for key in (1, 11) for each in await site.locations(key)}
    assert statuses == {LocationStatus.DELETING}
    site.write(await site.start([21, 22, 23, 24]))
    before = files_below(site.disk.root)
    report = await scrub(site)
    assert (report.orphans, files_below(site.disk.root)) == (0, before)


async def test_young_files_stay(site: Deployment) -> None:
    """Nobody knows them yet, or their writer is late: it is at them."""
    await site.store([1, 2, 3, 4], age_seconds=3599)
    await site.forget([1, 2, 3, 4])
    before = files_below(site.disk.root)
    report = await scrub(site)
    assert (report.orphans, report.too_young, files_below(site.disk.root)) == (0, len(before), before)
    assert (await scrub(site, min_age_seconds=3600)).too_young == len(before)
    site.clock.time += 1
    assert (await scrub(site)).deleted == len(before)
    assert files_below(site.disk.root) == set()


async def test_another_age_can_be_asked_for(site: Deployment) -> None:
    await site.store([1, 2, 3, 4], age_seconds=50)
    await site.forget([1, 2, 3, 4])
    assert (await scrub(site, min_age_seconds=51)).deleted == 0
    assert (await scrub(site, min_age_seconds=50)).deleted > 0


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


async def test_the_own_cluster_id_is_refused(site: Deployment) -> None:
    with pytest.raises(InvalidArgumentError, match="cluster_id 'cluster-1' is this deployment's own"):
        await scrub(site, cluster_id="cluster-1")


async def test_refusals_name_what_is_wrong(site: Deployment) -> None:
    with pytest.raises(InvalidArgumentError, match="storage_unique_name 'other' is not an open storage"):
        await site.scrubber.scrub("other", dry_run=True)
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


async def test_what_is_not_ours_is_left_alone(site: Deployment) -> None:
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


async def test_an_instance_that_cannot_be_read_stops_the_scrub(site: Deployment) -> None:
    """Its blocks are in no index, so its bytes look like orphans."""
    await site.store([1, 2, 3, 4])
    await site.forget([1, 2, 3, 4])
    await site.disk.store.table("registry").replace("instance/other", None, b"{}")
    before = files_below(site.disk.root)
    with pytest.raises(StorageIOError, match="'other' for one"):
        await scrub(site)
    assert files_below(site.disk.root) == before


# ── packed files ──


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path, keys_per_file=4)) as made:
        yield made


@pytest.mark.parametrize("known", [1, 2, 3, 4])
async def test_a_packed_file_stays_for_any_of_its_blocks(packed: Deployment, known: int) -> None:
    """The name tells only the first one."""
    await packed.store([1, 2, 3, 4])
    await packed.forget([key for key in (1, 2, 3, 4) if key != known])
    assert (await scrub(packed)).orphans == 0
    await packed.assert_readable([known])
    await packed.forget([known])
    assert (await scrub(packed)).deleted == 1
    assert files_below(packed.disk.root) == set()


async def test_what_is_noted_beside_a_file_belongs_to_it(packed: Deployment) -> None:
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
    """The file is gone, what was noted beside it is not."""
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
