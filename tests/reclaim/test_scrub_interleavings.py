"""The scrub while others change what it looks at, and any history before it (decisions 1 and 16)."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from garbage_rig import DAY_SECONDS, NFS, Deployment, Disk, deployed, files_below
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.cache.garbage_custody import GarbageCustody
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord
from kvcm.reclaim.scrub import ScrubReport, StorageScrubber

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


class Interrupting(GarbageCustody):
    """Something happens between the first look and the second one."""

    meanwhile: Callable[[], Awaitable[None]]
    looks = 0

    async def unreadable_instances(self) -> Sequence[str]:
        self.looks += 1
        if self.looks == 2:
            await self.meanwhile()
        return await super().unreadable_instances()


def interrupted(site: Deployment, meanwhile: Callable[[], Awaitable[None]]) -> StorageScrubber:
    custody = Interrupting(site.manager, site.registry, site.disk.store)
    custody.meanwhile = meanwhile
    return StorageScrubber(custody, site.storages, site.clock, site.disk.cluster_id)


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
def test_what_is_left_is_what_a_plain_set_says(
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
