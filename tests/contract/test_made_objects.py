"""Storages that make the files of fresh addresses themselves, because their clients want to find them there."""

import os
from pathlib import Path

import pytest
from storage_rig import KINDS, Kind, Written, addresses, allocation, files_below, write

from kvcm.model.errors import StorageIOError
from kvcm.model.storages import StorageType
from kvcm.storage.backend import StorageBackend

MAKING = {
    f"{each.kind}-{n}": Kind(each, n, True) for each in (StorageType.ST_3FS, StorageType.ST_VCNS_3FS) for n in (1, 8)
}


@pytest.fixture(params=MAKING)
def kind(request: pytest.FixtureRequest) -> Kind:
    return MAKING[request.param]


@pytest.fixture
def storage(kind: Kind, tmp_path: Path) -> StorageBackend:
    return kind.open(tmp_path / "root")


@pytest.mark.parametrize("name", KINDS)
def test_only_storages_that_are_told_so_make_objects(tmp_path: Path, name: str) -> None:
    assert KINDS[name].open(tmp_path).makes_objects is KINDS[name].makes_objects


@pytest.mark.parametrize("instance_id", ["inst", "../a b", "鍵" * 80])
async def test_objects_are_made_empty_and_nothing_else(
    storage: StorageBackend, tmp_path: Path, instance_id: str
) -> None:
    assert storage.makes_objects
    uris = await storage.allocate(allocation({"tp0": 64, "tp1": 32}, range(11), instance_id=instance_id))
    assert files_below(tmp_path) == []
    await storage.make_objects(uris)
    made = {path: path.stat().st_size for path in files_below(tmp_path)}
    assert made == dict.fromkeys({Path(place.path) for place in addresses(uris)}, 0)
    assert await storage.exists(uris) == [False] * len(uris), "nobody has written them"
    for uri in uris:
        write(uri)
    assert await storage.exists(uris) == [True] * len(uris)
    assert await storage.delete(uris) == [None] * len(uris)
    assert files_below(tmp_path) == []


async def test_what_is_there_stays_as_it_is(storage: StorageBackend) -> None:
    written = await Written.into(storage, allocation({"tp0": 64}, range(9)))
    for _ in range(2):
        await storage.make_objects(written.uris)
    written.assert_intact(range(9))


async def test_objects_that_nobody_will_write_go_with_their_deletion(storage: StorageBackend, tmp_path: Path) -> None:
    uris = await storage.allocate(allocation({"tp0": 64}, range(9)))
    await storage.make_objects(uris)
    assert await storage.delete(uris) == [None] * 9
    assert files_below(tmp_path) == []


async def test_nothing_is_made_while_the_storage_is_not_mounted(storage: StorageBackend, tmp_path: Path) -> None:
    uris = await storage.allocate(allocation({"tp0": 64}, range(3)))
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").mkdir()
    with pytest.raises(StorageIOError, match=r"storage s-1.*is it mounted on this host"):
        await storage.make_objects(uris)
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("depth", ["inst", "inst/tp0", "file"])
async def test_no_link_is_followed(storage: StorageBackend, tmp_path: Path, depth: str) -> None:
    uris = await storage.allocate(allocation({"tp0": 64}, range(3)))
    outside = tmp_path / "outside"
    outside.mkdir()
    path = Path(addresses(uris)[0].path)
    link = path if depth == "file" else tmp_path / "root" / "cluster" / depth
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "made" if depth == "file" else outside)
    with pytest.raises(StorageIOError, match="storage s-1"):
        await storage.make_objects(uris)
    assert list(outside.iterdir()) == []


async def test_something_else_of_that_name_is_an_error(storage: StorageBackend) -> None:
    """A pipe, for example: opening that would hang."""
    uris = await storage.allocate(allocation({"tp0": 64}, [1]))
    path = Path(addresses(uris)[0].path)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(StorageIOError, match="storage s-1"):
        await storage.make_objects(uris)


@pytest.mark.parametrize(
    "path", ["cluster/../x/y", "cluster/i/../y", "cluster/a/b/c/d", "other/i/kv/1.aa", "cluster/i//1"]
)
async def test_addresses_of_other_places_are_refused(storage: StorageBackend, tmp_path: Path, path: str) -> None:
    with pytest.raises(StorageIOError, match="is not that of an object"):
        await storage.make_objects([f"hf3fs://s-1{tmp_path}/root/{path}?size=8"])
    assert files_below(tmp_path) == []
