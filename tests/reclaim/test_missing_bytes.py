"""Metadata without bytes: the storages are asked, and what lost some is given up (invariant 1: reads find bytes)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from garbage_rig import NFS, SIZE, Deployment, Disk, deployed

from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.reclaim.garbage import GarbageReport
from kvcm.reclaim.missing_bytes import without_lost

CHAIN = list(range(1, 11))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path)) as made:
        yield made


async def collect(site: Deployment, *, dry_run: bool = False, check_bytes: bool = False) -> GarbageReport:
    return await site.collector.collect(dry_run=dry_run, check_bytes=check_bytes)


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


async def test_a_missing_part_takes_what_is_useless_without_it(tmp_path: Path) -> None:
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


async def test_what_a_writer_adds_keeps_the_rest(tmp_path: Path) -> None:
    with deployed(Disk(tmp_path), specs=("a", "b"), groups={"a": ("a",), "ab": ("a", "b")}) as site:
        await site.store([1], spec_groups=["a"])
        await site.start([1], spec_groups=["ab"])
        (path,) = [path for path in await site.paths(1) if "/a/" in str(path)]
        path.unlink()
        assert (await collect(site, check_bytes=True)).without_bytes == 1
        statuses = {each.status for each in await site.locations(1)}
        assert statuses == {LocationStatus.DELETING, LocationStatus.WRITING}


async def test_what_is_being_written_may_complete_a_replica(tmp_path: Path) -> None:
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
    await site.store(range(1000))
    await collect(site, check_bytes=True)
    assert sum(site.pauses) == pytest.approx(1000 / 20_000)
    assert len(site.pauses) == 8
