"""What every storage promises a scrub: it lists what is there, and removes whole objects as they were listed."""

import asyncio
import os
from pathlib import Path

import pytest
from storage_rig import KINDS, Kind, addresses, allocation, fill_objects

from kvcm.storage.backend import StorageBackend, StoredObject
from kvcm.storage.file_listing import object_pages
from kvcm.storage.packing import object_name, owner_of


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def storage(kind: Kind, tmp_path: Path) -> StorageBackend:
    return kind.open(tmp_path)


async def listed(storage: StorageBackend, cluster_id: str = "cluster") -> dict[str, StoredObject]:
    pages = [page async for page in storage.objects(cluster_id)]
    assert all(page.objects and not page.failed for page in pages)
    found = [each for page in pages for each in page.objects]
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


async def written(storage: StorageBackend, count: int, location_id: str = "aa", instance_id: str = "inst") -> list[str]:
    uris = await storage.allocate(allocation({"tp0": 8, "tp1": 8}, range(count), location_id, instance_id))
    fill_objects(uris, 64)
    return uris


@pytest.mark.parametrize("instance_id", ["inst", "../a b", "鍵" * 80])
async def test_what_was_written_is_listed(storage: StorageBackend, instance_id: str) -> None:
    uris = await written(storage, 11, instance_id=instance_id)
    found = await listed(storage)
    assert found.keys() == set(map(object_name, uris))
    assert sum(each.size_bytes for each in found.values()) >= 8 * 22


async def test_the_name_of_an_object_tells_its_first_block(storage: StorageBackend) -> None:
    keys = [-1, 0, 5, 2**63 - 1, -(2**63)]
    for number, key in enumerate(keys):
        uris = await storage.allocate(allocation({"tp0": 8}, [key, 77], f"a{number}", "in/st"))
        assert owner_of(object_name(uris[0])) == ("in%2Fst", key)


@pytest.mark.parametrize("name", ["i/kv/", "i/kv/x.aa", "i/kv/1", "i/kv/1.", "i/kv/1_2.aa", "i/kv/1.a.b", "1", ""])
def test_other_names_are_of_no_object(name: str) -> None:
    assert owner_of(name) is None


async def test_removed_objects_are_gone_and_the_others_stay(storage: StorageBackend) -> None:
    gone, kept = await written(storage, 5, "aa"), await written(storage, 5, "ab")
    found = await listed(storage)
    going = [found[name] for name in {object_name(uri) for uri in gone}]
    for _ in range(2):  # what is gone already counts as removed
        assert await storage.remove_objects("cluster", going) == [None] * len(going)
        assert (await listed(storage)).keys() == {object_name(uri) for uri in kept}
    assert await storage.exists([*gone, *kept]) == [False] * len(gone) + [True] * len(kept)


async def test_an_object_that_changed_stays(storage: StorageBackend) -> None:
    uris = await written(storage, 1)
    found = await listed(storage)
    earlier = [each._replace(modified_at=each.modified_at - 10) for each in found.values()]
    reasons = await storage.remove_objects("cluster", earlier)
    assert reasons == ["it changed since it was listed"] * len(earlier)
    assert await storage.exists(uris) == [True] * len(uris)


async def test_another_deployment_has_its_own(kind: Kind, storage: StorageBackend, tmp_path: Path) -> None:
    await written(storage, 3)
    assert await listed(storage, "other") == {}
    other = kind.open(tmp_path, "other")
    there = {object_name(uri) for uri in await written(other, 3, "bb")}
    assert (await listed(other, "other")).keys() == there
    assert there.isdisjoint(await listed(storage))


@pytest.mark.parametrize("name", ["../other/kv/1.aa", "i/../1.aa", "i/kv/deeper/1.aa", "/etc/1.aa", "1.aa", ""])
async def test_names_that_leave_their_place_are_refused(tmp_path: Path, name: str) -> None:
    victims = [tmp_path / "other" / "kv" / "1.aa", tmp_path / "cluster" / "i" / "kv" / "deeper" / "1.aa"]
    for victim in victims:
        victim.parent.mkdir(parents=True)
        victim.touch()
    storage = KINDS["file-1"].open(tmp_path)
    (reason,) = await storage.remove_objects("cluster", [StoredObject(name, 0, 0.0)])
    assert reason == "it is not the name of an object"
    assert all(victim.exists() for victim in victims)


async def test_a_listing_goes_in_pages(tmp_path: Path) -> None:
    storage = KINDS["file-1"].open(tmp_path)
    uris = await written(storage, 1250)
    sizes = [len(page.objects) async for page in storage.objects("cluster")]
    assert (max(sizes), sum(sizes)) == (1000, len(uris))


async def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    """Put there after the listing, and leading to what looks the same."""
    storage = KINDS["file-1"].open(tmp_path / "root")
    await written(storage, 2)
    found = list((await listed(storage)).values())
    for depth in ("inst", "inst/tp0", "inst/tp1"):
        place, outside = tmp_path / "root" / "cluster" / depth, tmp_path / "outside" / depth
        outside.parent.mkdir(parents=True, exist_ok=True)
        place.rename(outside)
        place.symlink_to(outside)
        inside = {each.name for each in found if each.name.startswith(depth)}
        await storage.remove_objects("cluster", [each for each in found if each.name in inside])
        place.unlink()
        outside.rename(place)
        assert (await listed(storage)).keys() == {each.name for each in found}


def test_holes_take_up_nothing(tmp_path: Path) -> None:
    storage = KINDS["file-8"].open(tmp_path)
    path = Path(addresses(asyncio.run(storage.allocate(allocation({"tp0": 1 << 20}, range(8)))))[0].path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * (1 << 20))
    os.truncate(path, 8 << 20)
    ((found,), _) = next(object_pages(f"{tmp_path}/cluster"))
    assert found.size_bytes <= 2 << 20
