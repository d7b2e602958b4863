"""What storages hear of places that nobody will delete again, and what becomes of reused slots (decision 16)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from garbage_rig import NFS, SIZE, Deployment, Disk, deployed, files_below
from reclaim_rig import Rig

from kvcm.cache.sessions import WriteRequest
from kvcm.model.locations import BlockRecord, LocationStatus, decode_chunk
from kvcm.model.masks import BlockMask
from kvcm.model.uri import LocationUri

GRACE_SECONDS = 600.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(Disk(tmp_path / "root", keys_per_file=4), instance_ids=("i", "j")) as made:
        hand_out_again(made)
        yield made


def hand_out_again(site: Deployment) -> None:
    site.storages.slot_reuse.grace_seconds = GRACE_SECONDS
    site.storages.slot_reuse.now = site.clock.now
    site.storages.slot_reuse.term = lambda: 1


async def places(site: Deployment, keys: list[int], instance_id: str = "i") -> set[tuple[str, int | None]]:
    chunks = [each.chunk for key in keys for each in await site.locations(key, instance_id)]
    found = [LocationUri.parse(spec.uri) for chunk in chunks for spec in decode_chunk(chunk).specs]
    return {(place.path, place.blkid) for place in found}


async def delete_what_is_due(site: Deployment, seconds: float = 5.0) -> None:
    site.clock.time += seconds
    await site.executor.run_due()


# ── the executor ──


async def test_it_tells_what_served_once_its_metadata_is_gone() -> None:
    rig = Rig()
    uris = await rig.block(1)
    storage = rig.storages.faults["a"]
    storage.outage = OSError("down")
    await rig.executor.run_due()
    assert storage.forgotten_uris == []
    storage.outage = None
    rig.clock.time += 1
    await rig.executor.run_due()
    assert (await rig.left(), storage.forgotten_uris) == ([], list(uris))


async def test_it_tells_nothing_of_what_another_manager_dropped() -> None:
    """Its deletion hung meanwhile, and the place may be somebody else's by now."""
    rig = Rig()
    uris = {key: await rig.block(key) for key in (1, 2)}
    storage = rig.storages.faults["a"]
    storage.open_gate.clear()
    assert await rig.executor._look() == 2
    assert await rig.turns(lambda: bool(storage.under_way))
    await rig.index.delete([1])
    storage.open_gate.set()
    await rig.executor._deletions.all_done()
    assert storage.forgotten_uris == list(uris[2])


async def test_it_tells_nothing_of_what_is_kept_or_never_served() -> None:
    rig = Rig()
    await rig.block(1)
    await rig.block(2)

    def never_served(_key: int, old: BlockRecord | None) -> BlockRecord | None:
        return old and old._replace(locations=tuple(each._replace(session_id="s") for each in old.locations))

    await rig.index.read_modify_write([2], never_served)
    await rig.block(3, status=LocationStatus.SERVING)
    storage = rig.storages.faults["a"]
    storage.stubborn = {(await rig.block(4))[0]}
    await rig.executor.run_due()
    assert await rig.left() == [3, 4]
    assert len(storage.forgotten_uris) == 2
    assert all("/1" in uri or "0001" in uri for uri in storage.forgotten_uris)


# ── who is told of, from the session on ──


async def test_a_slot_is_handed_out_again_after_the_delay_and_the_grace(site: Deployment) -> None:
    await site.store([1, 2, 3, 4])
    before = await places(site, [1, 2])
    await site.manager.remove("i", [1, 2], BlockMask(offset=0))
    await delete_what_is_due(site)
    await site.store([5], age_seconds=0)
    site.clock.time += GRACE_SECONDS
    await site.store([6, 7], "j")
    await site.store([8, 9])
    assert await places(site, [8, 9]) == before
    assert not (await places(site, [5]) | await places(site, [6, 7], "j")) & before
    await site.assert_readable([3, 4, 5, 8, 9])


@pytest.mark.parametrize("end", ["expired", "aborted", "removed while writing", "failed"])
async def test_a_slot_whose_writer_may_come_back_is_never_handed_out(site: Deployment, end: str) -> None:
    await site.store([1, 2, 3, 4])  # of one session, which ended well: its file has room for nobody
    started = await site.manager.start_write("i", WriteRequest([11, 12, 13, 14], timeout_seconds=30))
    site.write(started)
    lost = await places(site, [11, 12])
    name = started.session.id
    if end == "removed while writing":
        await site.manager.remove("i", [11, 12], BlockMask(offset=0))
        await site.manager.finish_write("i", name, BlockMask(offset=4))
    elif end == "expired":
        site.clock.time += 31
        await site.manager.expire()
    else:
        await site.manager.finish_write("i", name, BlockMask(flags=(False, False, end == "failed", False)))
    await delete_what_is_due(site, 40)
    assert await site.locations(11) == ()
    site.clock.time += GRACE_SECONDS
    await site.store(list(range(20, 32)))
    assert not await places(site, list(range(20, 32))) & lost


async def test_what_never_served_keeps_its_session_to_the_end_however_often_it_is_settled(site: Deployment) -> None:
    started = await site.start([1, 2])
    await site.manager.finish_write("i", started.session.id, BlockMask(offset=1))
    (served,), (failed,) = await site.locations(1), await site.locations(2)
    assert (served.has_served, failed.has_served) == (True, False)
    assert failed.status is LocationStatus.DELETING
    before = await site.index().get([2])
    site.clock.time += 3
    cache = site.manager.cache("i")
    await site.manager.endings.end_writers(cache, {started.session.id: [2]})
    assert await site.index().get([2]) == before


async def test_a_manager_that_was_restarted_hands_out_nothing_of_before(site: Deployment) -> None:
    await site.store([1, 2, 3, 4])
    freed = await places(site, [1, 2])
    await site.remove([1, 2])
    again = await Deployment.restarted(site)
    hand_out_again(again)
    again.clock.time += GRACE_SECONDS
    await again.store([5, 6])
    assert not await places(again, [5, 6]) & freed
    await again.remove([3, 4, 5, 6])
    assert files_below(site.disk.root) == set()
    again.close()


# ── the scrub ──


async def test_a_file_that_only_later_owners_live_in_is_no_orphan(site: Deployment) -> None:
    """Its name tells of a block that is gone for long."""
    await site.store([1, 2, 3, 4])
    (path,) = await site.paths(1)
    await site.remove([1, 2, 3])
    site.clock.time += GRACE_SECONDS
    await site.store([101, 102])
    assert await site.paths(101) == [path]
    await site.remove([4])
    for each in files_below(site.disk.root):
        os.utime(each, (0, 0))
    report = await site.scrubber.scrub(NFS, dry_run=False)
    assert (report.objects, report.orphans, report.too_young) == (1, 0, 0)
    await site.assert_readable([101, 102])
    await site.forget([101])
    report = await site.scrubber.scrub(NFS, dry_run=False)
    assert (report.orphans, report.too_young) == (0, 0)
    await site.assert_readable([102])
    await site.forget([102])
    assert (await site.scrubber.scrub(NFS, dry_run=False)).deleted == 1
    assert files_below(site.disk.root) == set()


async def test_a_file_that_a_slot_is_handed_out_of_is_too_young_for_the_scrub(site: Deployment) -> None:
    """Nobody knows the file; then a writer gets a slot of it between the two looks of the scrub."""
    await site.store([1, 2, 3, 4])
    (path,) = await site.paths(1)
    await site.remove([1, 2])
    await site.forget([3, 4])
    site.clock.time += GRACE_SECONDS + 86400
    listed = [each async for page in site.storages.open_backends()[NFS].objects("cluster-1") for each in page.objects]
    await site.start([101])
    assert await site.paths(101) == [path]
    (reason,) = await site.storages.open_backends()[NFS].remove_objects("cluster-1", listed)
    assert reason == "it changed since it was listed"
    assert path.exists()


async def test_a_file_that_the_scrub_removed_is_handed_out_no_more(site: Deployment) -> None:
    await site.store([1, 2, 3, 4])
    (path,) = await site.paths(1)
    await site.remove([1, 2])
    await site.forget([3, 4])
    site.clock.time += GRACE_SECONDS
    for each in (path, path.with_name(path.name + ".deleted")):
        assert each.exists()
    listed = [each async for page in site.storages.open_backends()[NFS].objects("cluster-1") for each in page.objects]
    assert await site.storages.open_backends()[NFS].remove_objects("cluster-1", listed) == [None]
    await site.store([101, 102])
    assert await site.paths(101) != [path]
    await site.assert_readable([101, 102])
    assert sum(each.size_bytes for each in listed) >= 2 * SIZE
