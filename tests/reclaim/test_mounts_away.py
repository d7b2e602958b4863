"""A manager that starts while a storage is not mounted: it makes nothing in the empty mount point, deletes nothing that
it cannot see, and goes on when the mount is back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from garbage_rig import NFS, Deployment, Disk, deployed, files_below

from kvcm.model.errors import DuplicateEntityError, StorageIOError
from kvcm.model.masks import BlockMask
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.reclaim.executor import DeletionExecutor

CHAIN = [1, 2, 3]


@pytest.fixture(params=["missing", "empty"])
def mount_point(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Root of the storage; what is seen of it while nothing is mounted is the parameter."""
    return tmp_path / request.param


@pytest.fixture
def site(mount_point: Path) -> Iterator[Deployment]:
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


async def restarted(site: Deployment) -> Deployment:
    made = await Deployment.restarted(site)
    made.executor = DeletionExecutor(made.storages, made.clock, is_configured=made.registry.storages.is_configured)
    made.executor.serve(made.manager)
    return made


async def refreshed(site: Deployment) -> None:
    """As many refreshes as it takes until the storage is tried again."""
    for _ in range(300):
        await site.registry.refresh()
        if site.storages.backend(NFS) is not None:
            return
    raise AssertionError("the storage stays closed")


async def delete_due(site: Deployment) -> int:
    site.clock.time += 600
    return await site.executor.run_due()


async def test_deletions_wait_until_the_mount_is_back(site: Deployment, mount_point: Path) -> None:
    await site.store(CHAIN)
    unmount(mount_point)
    again = await restarted(site)
    assert again.storages.backend(NFS) is None
    await again.manager.remove("i", CHAIN[1:], BlockMask(offset=0))
    for _ in range(3):
        assert await delete_due(again) > 0
        await again.registry.refresh()
    assert [bool(await again.locations(key)) for key in CHAIN] == [True] * 3, "nothing counts as deleted"
    assert seen(mount_point) == set()
    assert len(files_below(mount_point.with_name("away"))) == 3
    mount(mount_point)
    await refreshed(again)
    assert await delete_due(again) > 0
    assert [bool(await again.locations(key)) for key in CHAIN] == [True, False, False]
    assert files_below(mount_point) == {*await again.paths(1)}
    await again.assert_readable(CHAIN[:1])
    again.close()


async def test_what_names_a_known_storage_again_makes_nothing(site: Deployment, mount_point: Path) -> None:
    """A startup document does so at every start."""
    unmount(mount_point)
    again = await restarted(site)
    for add in (again.registry.storages.add, again.registry.storages.add_while_serving):
        with pytest.raises(DuplicateEntityError):
            await add(StorageConfig(NFS, NfsStorageSpec(str(mount_point))))
    assert seen(mount_point) == set()
    again.close()


async def test_a_manager_that_follows_another_makes_nothing(site: Deployment, mount_point: Path) -> None:
    """Another one has it mounted and added it; here it is not."""
    other = await restarted(site)
    unmount(mount_point)
    config = StorageConfig("new", NfsStorageSpec(str(mount_point / "new")))
    await site.registry.storages.add(config)
    (mount_point / "new" / "cluster-1").rmdir()
    await other.registry.refresh()
    assert other.registry.storages.is_configured("new")
    assert other.storages.backend("new") is None
    assert not (mount_point / "new" / "cluster-1").exists()
    other.close()


async def test_an_update_makes_anew_what_is_gone_for_good(site: Deployment, mount_point: Path) -> None:
    unmount(mount_point)
    again = await restarted(site)
    await again.registry.storages.update_while_serving(StorageConfig(NFS, NfsStorageSpec(str(mount_point))))
    await again.store(CHAIN)
    await again.assert_readable(CHAIN)
    again.close()


async def test_a_manager_that_saw_it_mounted_puts_off_its_deletions_as_well(
    site: Deployment, mount_point: Path
) -> None:
    await site.store(CHAIN)
    await site.manager.remove("i", CHAIN, BlockMask(offset=0))
    unmount(mount_point)
    assert await delete_due(site) > 0
    assert [bool(await site.locations(key)) for key in CHAIN] == [True] * 3
    assert seen(mount_point) == set()
    mount(mount_point)
    assert await delete_due(site) > 0
    assert files_below(mount_point) == set()


async def test_a_deployment_that_was_moved_writes_beside_the_blocks_of_the_first(
    site: Deployment, mount_point: Path
) -> None:
    """Its storages came configured, and it never wrote there. Another deployment's blocks tell that it is mounted."""
    moved = Disk(mount_point, "cluster-2", store=site.disk.store, backends=site.disk.backends)
    empty = Deployment(moved, site.clock)
    await empty.registry.load()
    assert empty.storages.backend(NFS) is None, "nothing tells that it is mounted"
    empty.close()
    await site.store(CHAIN)
    full = Deployment(moved, site.clock)
    await full.registry.load()
    assert full.storages.backend(NFS) is not None
    assert (mount_point / "cluster-2").is_dir()
    full.close()


async def test_a_start_says_what_is_missing(site: Deployment, mount_point: Path) -> None:
    unmount(mount_point)
    with pytest.raises(StorageIOError, match=r"storage nfs: .*/cluster-1/ is not there, is it mounted on this host\?"):
        site.storages.prepare(StorageConfig(NFS, NfsStorageSpec(str(mount_point))), is_new=False)
