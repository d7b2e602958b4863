"""What every type of storage promises: addresses, listings, objects, probes, and the bytes of files."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_rig import (
    FILE_1,
    FILE_8,
    KINDS,
    PATH_KINDS,
    Kind,
    Written,
    addresses,
    allocation,
    can_punch_holes,
    files_below,
    fill_objects,
    read,
    write,
)
from thoroughness import examples

import kvcm.storage.file_slots
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import unmixed_key
from kvcm.model.storages import StorageType
from kvcm.model.uri import LocationUri, path_component
from kvcm.storage.backend import Allocation, StorageBackend, StoredObject, object_name, owner_of
from kvcm.storage.file_objects import PROBE_PREFIX, object_batches
from kvcm.storage.file_slots import deleted_slots, notes_path, record_deleted_slots

# ── Storage contract ──


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(kind: Kind, root: Path) -> StorageBackend:
    return kind.open(root)


def expected_chunks(what: Allocation, keys_per_object: int) -> list[list[int]]:
    """Wire.md 8: one list where all parts are of one size, one list per spec otherwise, cut into chunks."""
    lists = [list(range(len(what.parts)))]
    if len({part.size_bytes for part in what.parts}) > 1:
        specs = list(dict.fromkeys(part.spec_name for part in what.parts))
        lists = [[i for i, part in enumerate(what.parts) if part.spec_name == spec] for spec in specs]
    per = max(1, keys_per_object)
    return [each[start : start + per] for each in lists for start in range(0, len(each), per)]


def hex_of(key: int) -> str:
    return format(key % 2**64, "x")


def check_packing(kind: Kind, what: Allocation, places: list[LocationUri]) -> None:
    chunks = expected_chunks(what, kind.keys_per_object)
    paths = [{places[i].path for i in chunk} for chunk in chunks]
    assert all(len(each) == 1 for each in paths)
    assert len(set.union(set(), *paths)) == len(chunks), "chunks never share an object"
    for chunk in chunks:
        first = what.parts[chunk[0]]
        name = PurePosixPath(places[chunk[0]].path)
        folder = f"/cluster/{path_component(what.instance_id)}/{path_component(first.spec_name)}"
        assert str(name.parent).endswith(folder)
        stem, _, location_id = name.name.rpartition(".")
        assert location_id == what.location_id
        logical, underscore, packed = stem.partition("_")
        count, _, digest = packed.partition("x")
        assert logical == hex_of(unmixed_key(first.key))
        assert count == (str(len(chunk)) if len(chunk) > 1 else ""), "names have the slot count, for the last deletion"
        assert bool(underscore) == (len(chunk) > 1)
        assert len(digest) == (16 if len(chunk) > 1 else 0), "a 64-bit hash in hex"
        for slot, index in enumerate(chunk):
            assert places[index].blkid == (slot if kind.keys_per_object > 1 else None)
            assert places[index].size == what.parts[index].size_bytes


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3) | st.sampled_from([64, 512]), min_size=1, max_size=4),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20, unique=True),
    per=st.sampled_from([-1, 0, 1, 2, 3, 8, 100]),
    storage_type=st.sampled_from([kind.storage_type for kind in KINDS.values()]),
)
def test_any_allocation_is_packed_as_wire_md_8_says(
    tmp_path: Path, sizes: list[int], keys: list[int], per: int, storage_type: StorageType
) -> None:
    kind = Kind(storage_type, per)
    what = allocation({f"spec{i}": size for i, size in enumerate(sizes)}, keys)
    check_packing(kind, what, addresses(asyncio.run(kind.open(tmp_path).allocate(what))))


# ── Storage listing ──


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
async def test_written_objects_are_listed(storage: StorageBackend, instance_id: str) -> None:
    uris = await written(storage, 11, instance_id=instance_id)
    found = await listed(storage)
    assert found.keys() == set(map(object_name, uris))
    assert sum(each.size_bytes for each in found.values()) >= 8 * 22


async def test_the_name_of_an_object_reports_its_first_block(storage: StorageBackend) -> None:
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
    for _ in range(2):  # objects that are gone already count as removed
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


async def test_another_deployment_has_its_own(kind: Kind, storage: StorageBackend, root: Path) -> None:
    await written(storage, 3)
    assert await listed(storage, "other") == {}
    other = kind.open(root, "other")
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
    uris = await written(storage, 510)
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
    ((found,), _) = next(object_batches(f"{tmp_path}/cluster"))
    assert found.size_bytes <= 2 << 20


# ── Made objects ──


MAKING = {
    f"{each.kind}-{n}": Kind(each, n, True) for each in (StorageType.ST_3FS, StorageType.ST_VCNS_3FS) for n in (1, 8)
}


@pytest.fixture(params=MAKING)
def making_kind(request: pytest.FixtureRequest) -> Kind:
    return MAKING[request.param]


@pytest.fixture
def making_storage(making_kind: Kind, tmp_path: Path) -> StorageBackend:
    return making_kind.open(tmp_path / "root")


@pytest.mark.parametrize("instance_id", ["inst", "../a b", "鍵" * 80])
async def test_objects_are_made_empty_and_nothing_else(
    making_storage: StorageBackend, tmp_path: Path, instance_id: str
) -> None:
    assert making_storage.makes_objects
    uris = await making_storage.allocate(allocation({"tp0": 64, "tp1": 32}, range(11), instance_id=instance_id))
    assert files_below(tmp_path) == []
    await making_storage.make_objects(uris)
    made = {path: path.stat().st_size for path in files_below(tmp_path)}
    assert made == dict.fromkeys({Path(place.path) for place in addresses(uris)}, 0)
    assert await making_storage.exists(uris) == [False] * len(uris), "no engine has written them"
    for uri in uris:
        write(uri)
    assert await making_storage.exists(uris) == [True] * len(uris)
    assert await making_storage.delete(uris) == [None] * len(uris)
    assert files_below(tmp_path) == []


async def test_existing_objects_keep_their_bytes(making_storage: StorageBackend) -> None:
    written = await Written.into(making_storage, allocation({"tp0": 64}, range(9)))
    for _ in range(2):
        await making_storage.make_objects(written.uris)
    written.assert_intact(range(9))


async def test_nothing_is_made_while_the_storage_is_not_mounted(making_storage: StorageBackend, tmp_path: Path) -> None:
    uris = await making_storage.allocate(allocation({"tp0": 64}, range(3)))
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").mkdir()
    with pytest.raises(StorageIOError, match=r"storage s-1.*is it mounted on this host"):
        await making_storage.make_objects(uris)
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("depth", ["inst", "inst/tp0", "file"])
async def test_no_link_is_followed(making_storage: StorageBackend, tmp_path: Path, depth: str) -> None:
    uris = await making_storage.allocate(allocation({"tp0": 64}, range(3)))
    outside = tmp_path / "outside"
    outside.mkdir()
    path = Path(addresses(uris)[0].path)
    link = path if depth == "file" else tmp_path / "root" / "cluster" / depth
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "made" if depth == "file" else outside)
    with pytest.raises(StorageIOError, match="storage s-1"):
        await making_storage.make_objects(uris)
    assert list(outside.iterdir()) == []


async def test_something_else_of_that_name_is_an_error(making_storage: StorageBackend) -> None:
    """A pipe, for example: opening that would hang."""
    uris = await making_storage.allocate(allocation({"tp0": 64}, [1]))
    path = Path(addresses(uris)[0].path)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(StorageIOError, match="storage s-1"):
        await making_storage.make_objects(uris)


@pytest.mark.parametrize(
    "path", ["cluster/../x/y", "cluster/i/../y", "cluster/a/b/c/d", "other/i/kv/1.aa", "cluster/i//1"]
)
async def test_addresses_of_other_places_are_refused(making_storage: StorageBackend, tmp_path: Path, path: str) -> None:
    with pytest.raises(StorageIOError, match="is not that of an object"):
        await making_storage.make_objects([f"hf3fs://s-1{tmp_path}/root/{path}?size=8"])
    assert files_below(tmp_path) == []


# ── Storage probes ──


@pytest.fixture(params=PATH_KINDS)
def path_kind(request: pytest.FixtureRequest) -> Kind:
    return PATH_KINDS[request.param]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free block, with a storage in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system to be filled")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def of_probes(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "cluster").iterdir() if path.name.startswith(PROBE_PREFIX))


def leave(root: Path, name: str, age_seconds: float) -> None:
    path = root / "cluster" / f"{PROBE_PREFIX}{name}"
    path.write_bytes(b"left")
    then = time.time() - age_seconds
    os.utime(path, (then, then))


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def wait_until_gone(root: Path) -> None:
    deadline = time.monotonic() + 30
    while of_probes(root):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def objects(storage: StorageBackend) -> set[str]:
    return {each.name async for page in storage.objects("cluster") for each in page.objects}


async def test_a_storage_that_is_not_mounted_fails(path_kind: Kind, tmp_path: Path) -> None:
    storage = path_kind.open(tmp_path / "root")
    (tmp_path / "root").rename(tmp_path / "away")
    with pytest.raises(StorageIOError, match=r"storage s-1.*is it mounted on this host"):
        await storage.probe()
    assert not (tmp_path / "root").exists()
    (tmp_path / "away").rename(tmp_path / "root")
    await storage.probe()


async def test_a_link_in_place_of_the_directory_is_not_followed(path_kind: Kind, tmp_path: Path) -> None:
    storage = path_kind.open(tmp_path / "root")
    (tmp_path / "root" / "cluster").rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "cluster").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageIOError, match="s-1"):
        await storage.probe()
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_a_full_storage_fails_until_there_is_space(path_kind: Kind, full: Path) -> None:
    storage = path_kind.open(full / "root")
    filling = full / "filling"
    fill(filling)
    with pytest.raises(StorageIOError, match=r"storage s-1: probe failed: writing .*No space left on device"):
        await storage.probe()
    assert of_probes(full / "root") == []
    filling.unlink()
    await storage.probe()


async def test_bytes_that_come_back_changed_fail(
    path_kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are spoilt after the file was written and closed, and before it is read."""
    storage = path_kind.open(tmp_path)

    def spoil(*_args: object) -> None:
        (name,) = of_probes(tmp_path)
        with (tmp_path / "cluster" / name).open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", spoil)
        with pytest.raises(StorageIOError, match=r"storage s-1: probe failed: what was read back .*is not what"):
            await storage.probe()
    assert of_probes(tmp_path) == []
    await storage.probe()


async def test_a_file_that_cannot_be_deleted_fails(
    path_kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = path_kind.open(tmp_path)

    def refuse(*_args: object, **_fields: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(StorageIOError, match=r"deleting .*Read-only file system"):
            await storage.probe()
    assert len(of_probes(tmp_path)) == 1
    await storage.probe()


async def test_what_a_probe_left_behind_is_no_object_and_not_in_the_way(path_kind: Kind, tmp_path: Path) -> None:
    written = await Written.into(path_kind.open(tmp_path), allocation({"tp0": 64}, range(3)))
    before = await objects(written.backend)
    leave(tmp_path, "dead", 10.0)
    assert await objects(written.backend) == before
    await written.backend.probe()
    await path_kind.reopen(tmp_path).probe()
    assert of_probes(tmp_path) == [f"{PROBE_PREFIX}dead"]
    written.assert_intact(range(3))


async def test_leftovers_go_after_an_hour_with_a_probe_that_passes(
    path_kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = path_kind.open(tmp_path)
    leave(tmp_path, "old", 3700.0)
    leave(tmp_path, "young", 3500.0)
    (tmp_path / "cluster" / f"{PROBE_PREFIX}folder").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", lambda descriptor, *_: os.truncate(f"/proc/self/fd/{descriptor}", 0))
        with pytest.raises(StorageIOError):
            await storage.probe()
    assert f"{PROBE_PREFIX}old" in of_probes(tmp_path)
    await storage.probe()
    assert of_probes(tmp_path) == [f"{PROBE_PREFIX}folder", f"{PROBE_PREFIX}young"]


async def test_probes_that_hang_hold_up_no_deletion_and_end_with_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are threads, all given up by their callers, as on a mount that does not answer."""
    written = await Written.into(FILE_1.open(tmp_path), allocation({"tp0": 64}, range(2)))
    gate = os.pipe()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", lambda *_args: os.read(gate[0], 1))
        for _ in range(100):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(written.backend.probe(), 0.001)
        assert await written.backend.delete(written.uris[:1]) == [None]
        assert await written.backend.exists(written.uris) == [False, True]
        os.write(gate[1], b"x" * 100)
        os.close(gate[1])
        async with asyncio.timeout(30):
            await written.backend.probe()
        await asyncio.to_thread(wait_until_gone, tmp_path)
    os.close(gate[0])


# ── File storage bytes ──


SIZES = [{"tp0": 100, "tp1": 100}, {"tp0": 4096, "tp1": 300}]


@pytest.mark.parametrize("specs", SIZES, ids=["equal", "different"])
async def test_a_deletion_harms_no_neighbour(path_kind: Kind, tmp_path: Path, specs: dict[str, int]) -> None:
    """In any order, twice each, every part that is not deleted yet keeps its bytes."""
    written = await Written.into(path_kind.open(tmp_path), allocation(specs, range(11)))
    order = list(range(len(written.uris)))
    Random(6).shuffle(order)
    for done, index in enumerate(order, start=1):
        assert await written.backend.delete([written.uris[index]] * 2) == [None, None]
        written.assert_intact(order[done:])
    assert files_below(tmp_path) == []


def test_an_open_storage_shows_that_it_is_mounted(path_kind: Kind, tmp_path: Path) -> None:
    """Engines that do not find the cluster's directory know that the storage is not mounted where they are."""
    path_kind.open(tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["cluster"]


async def test_a_file_goes_with_its_last_slot_after_the_storage_was_reopened(tmp_path: Path) -> None:
    written = await Written.into(FILE_8.open(tmp_path), allocation({"tp0": 64}, range(8)))
    await written.backend.delete(written.uris[:3])
    written.backend.close()
    successor = FILE_8.open(tmp_path)  # of another process, which remembers nothing
    await successor.delete(written.uris[3:7])
    written.assert_intact([7])
    assert await successor.exists(written.uris) == [False] * 7 + [True]
    await successor.delete(written.uris[7:])
    assert list(written.path(0).parent.iterdir()) == []


async def test_a_file_goes_with_its_last_slot_though_some_were_never_handed_out(tmp_path: Path) -> None:
    """Another writer was faster for these blocks: their slots are discarded before anybody wrote the file."""
    storage = FILE_8.open(tmp_path)
    uris = await storage.allocate(allocation({"tp0": 64}, range(8)))
    assert await storage.discard(uris[:3]) == [None] * 3
    for uri in uris[3:]:
        write(uri)
    assert await storage.exists(uris) == [False] * 3 + [True] * 5
    await storage.delete(uris[3:])
    assert files_below(tmp_path) == []


async def test_objects_that_are_missing_because_the_mount_went_away_do_not_count_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator gives up a mount that hangs: the deletion under way fails, and those behind it find nothing."""
    root, away = tmp_path / "root", tmp_path / "away"
    written = await Written.into(FILE_1.open(root), allocation({"tp0": 64}, range(5)))
    unlink, paths = kvcm.storage.file_slots._unlink, []

    def unlink_late(path: str) -> None:
        paths.append(path)
        if len(paths) == 2:
            root.rename(away)
            root.mkdir()
            raise OSError(5, "Input/output error")
        unlink(path)

    monkeypatch.setattr(kvcm.storage.file_slots, "_unlink", unlink_late)
    assert all(await written.backend.delete(written.uris))
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    assert await written.backend.exists(written.uris) == [False, True, True, True, True]
    assert await written.backend.delete(written.uris) == [None] * 5


def test_a_note_that_was_cut_off_is_not_read_as_another_slot(tmp_path: Path) -> None:
    path = str(tmp_path / "1_16x0123456789abcdef.aa")
    record_deleted_slots(path, [1, 2, 12])
    notes = Path(notes_path(path))
    for end in range(len(notes.read_bytes())):
        whole = notes.read_bytes()
        notes.write_bytes(whole[:end])
        assert deleted_slots(path) <= {1, 2, 12}
        record_deleted_slots(path, [12, 2, 1])  # again
        assert deleted_slots(path) == {1, 2, 12}
        notes.write_bytes(whole)
    notes.write_bytes(b"\n4." + notes.read_bytes()[3:] + b"\n16.\n99.")
    assert deleted_slots(path) <= {2, 4, 12}


async def test_a_deletion_that_is_repeated_while_another_one_ends_the_file_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash the manager repeats deletions: here the last slot goes while the first one is punched again."""
    written = await Written.into(FILE_8.open(tmp_path), allocation({"tp0": 64}, range(8)))
    await written.backend.delete(written.uris[:7])
    other, punch = FILE_8.open(tmp_path), kvcm.storage.file_slots._punch

    def punch_late(path: str, offset: int, size: int) -> None:
        if offset == 0:
            assert asyncio.run(other.delete(written.uris[7:])) == [None]
        punch(path, offset, size)

    monkeypatch.setattr(kvcm.storage.file_slots, "_punch", punch_late)
    assert await written.backend.delete(written.uris[:1]) == [None]
    assert files_below(tmp_path) == []


async def test_a_file_goes_with_its_last_slot_after_a_deletion_failed(path_kind: Kind, tmp_path: Path) -> None:
    """The folder is no folder for a while, as on a broken mount; the retry must finish the job."""
    storage = path_kind.open(tmp_path)
    uris = await storage.allocate(allocation({"tp0": 64}, range(1)))
    folder = tmp_path / "cluster" / "inst" / "tp0"
    folder.parent.mkdir(parents=True)
    folder.touch()
    (reason,) = await storage.delete(uris)
    assert reason is not None
    assert "inst/tp0" in reason
    folder.unlink()
    write(uris[0])
    assert await storage.delete(uris) == [None]
    assert list(folder.iterdir()) == []


async def test_one_failure_does_not_hold_up_the_other_deletions(path_kind: Kind, tmp_path: Path) -> None:
    storage = path_kind.open(tmp_path)
    written = await Written.into(storage, allocation({"tp0": 64}, [1], "aa"))
    (tmp_path / "cluster" / "inst" / "tp1").touch()
    broken = await storage.allocate(allocation({"tp1": 64}, [1], "ab"))
    results = await storage.delete([broken[0], written.uris[0]])
    assert [result is None for result in results] == [False, True]
    assert not written.path(0).exists()


async def test_deleted_slots_give_their_space_back(tmp_path: Path) -> None:
    if not can_punch_holes(tmp_path):
        pytest.skip("this file system does not give holes back")
    size = 1 << 16
    written = await Written.into(FILE_8.open(tmp_path), allocation({"tp0": size}, range(8)))
    path = written.path(0)
    blocks = [path.stat().st_blocks]
    for uri in written.uris[:6]:
        await written.backend.delete([uri])
        blocks.append(path.stat().st_blocks)
    freed = [before - after for before, after in pairwise(blocks)]
    assert all(each * 512 >= size for each in freed), blocks
    assert path.stat().st_size == 8 * size
    written.assert_intact([6, 7])
    assert not any(read(written.uris[0]))


async def test_slots_that_share_a_page_are_not_damaged(tmp_path: Path) -> None:
    written = await Written.into(FILE_8.open(tmp_path), allocation({"tp0": 1000}, range(8)))
    await written.backend.delete([written.uris[2], written.uris[5]])
    written.assert_intact([0, 1, 3, 4, 6, 7])


async def test_a_link_in_place_of_a_file_is_never_followed(path_kind: Kind, tmp_path: Path) -> None:
    """A link is in the place of a packed file; the file that it points to keeps its bytes."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 4096)
    storage = path_kind.open(tmp_path / "root")
    written = await Written.into(storage, allocation({"tp0": 512}, range(4)))
    for index in range(4):
        written.path(index).unlink(missing_ok=True)
        written.path(index).symlink_to(victim)
    for uri in written.uris:
        await storage.delete([uri])
        assert victim.read_bytes() == b"v" * 4096


async def test_taking_back_parts_without_bytes_leaves_nothing(path_kind: Kind, tmp_path: Path) -> None:
    storage = path_kind.open(tmp_path)
    for take_back in (storage.discard, storage.delete):
        uris = await storage.allocate(allocation({"tp0": 64}, range(9)))
        if storage.makes_objects:
            await storage.make_objects(uris)
        assert await take_back(uris) == [None] * 9
        assert await storage.exists(uris) == [False] * 9
    assert files_below(tmp_path) == []


async def test_exists_wants_every_byte(path_kind: Kind, tmp_path: Path) -> None:
    storage = path_kind.open(tmp_path)
    uris = await storage.allocate(allocation({"tp0": 64}, range(2)))
    assert await storage.exists(uris) == [False, False]
    write(uris[0])
    assert await storage.exists(uris) == [True, False]
    write(uris[1])
    assert await storage.exists(uris) == [True, True]
    path = Written(storage, uris).path(1)
    os.truncate(path, path.stat().st_size - 1)
    assert (await storage.exists(uris))[1] is False


@pytest.mark.parametrize("name", ["..", "a/../../b", "%2F..", "鍵" * 85, "x" * 256, " ", "\\", "*", "~"], ids=range(9))
async def test_ugly_names_are_real_files_below_the_root(path_kind: Kind, tmp_path: Path, name: str) -> None:
    storage = path_kind.open(tmp_path / "root", name)
    written = await Written.into(storage, allocation({name: 32}, range(3), instance_id=name))
    written.assert_intact(range(3))
    component = path_component(name)
    for index in range(3):
        resolved = written.path(index).resolve()
        assert resolved.parent == tmp_path / "root" / component / component / component
    assert {path.relative_to(tmp_path).parts[0] for path in files_below(tmp_path)} == {"root"}
    await storage.delete(written.uris)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("is_file", [False, True], ids=["gone", "a file"])
async def test_nothing_counts_as_deleted_while_the_storage_is_not_mounted(
    path_kind: Kind, tmp_path: Path, is_file: bool
) -> None:
    written = await Written.into(path_kind.open(tmp_path / "root"), allocation({"tp0": 64}, range(3)))
    (tmp_path / "root").rename(tmp_path / "away")
    if is_file:
        (tmp_path / "root").touch()
    reasons = [*await written.backend.delete(written.uris[:1]), *await written.backend.discard(written.uris[1:2])]
    assert all(reason is not None and "mounted" in reason for reason in reasons)
    if is_file:
        (tmp_path / "root").unlink()
    assert not (tmp_path / "root").exists()
    (tmp_path / "away").rename(tmp_path / "root")
    written.assert_intact(range(3))
    assert await written.backend.delete(written.uris) == [None] * 3
    assert files_below(tmp_path) == []


async def test_a_storage_that_is_gone_says_so(path_kind: Kind, tmp_path: Path) -> None:
    storage = path_kind.open(tmp_path / "root")
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(StorageIOError, match="s-1"):
        await storage.space()
