"""What becomes of the bytes in a path storage: what clients wrote stays until it is deleted, and only that goes."""

import asyncio
import os
import shutil
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from storage_rig import FILE_1, FILE_8, PATH_KINDS, Kind, Written, allocation, can_punch_holes, files_below, read, write

import kvcm.storage.file_slots
from kvcm.model.errors import StorageIOError
from kvcm.model.names import path_component
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.slot_notes import beside, note_slots, noted_slots

SIZES = [{"tp0": 100, "tp1": 100}, {"tp0": 4096, "tp1": 300}]


@pytest.fixture(params=PATH_KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return PATH_KINDS[request.param]


@pytest.mark.parametrize("specs", SIZES, ids=["equal", "different"])
async def test_a_deletion_harms_no_neighbour(kind: Kind, tmp_path: Path, specs: dict[str, int]) -> None:
    """In any order, twice each, every part that is not deleted yet keeps its bytes."""
    written = await Written.into(kind.open(tmp_path), allocation(specs, range(11)))
    order = list(range(len(written.uris)))
    Random(6).shuffle(order)
    for done, index in enumerate(order, start=1):
        assert await written.backend.delete([written.uris[index]] * 2) == [None, None]
        written.assert_intact(order[done:])
    assert files_below(tmp_path) == []


async def test_a_deletion_harms_no_other_session(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path)
    first = await Written.into(storage, allocation({"tp0": 64}, range(9), "aa"))
    second = await Written.into(storage, allocation({"tp0": 64}, range(9), "ab"))
    await storage.delete(first.uris)
    second.assert_intact(range(9))


async def test_a_file_goes_with_its_last_slot(tmp_path: Path) -> None:
    written = await Written.into(FILE_8.open(tmp_path), allocation({"tp0": 64}, range(8)))
    await written.backend.delete(written.uris[:7])
    assert written.path(0).exists()
    await written.backend.delete(written.uris[:7])
    assert written.path(0).exists()
    await written.backend.delete(written.uris[7:])
    assert not written.path(0).exists()


def test_an_open_storage_shows_that_it_is_mounted(kind: Kind, tmp_path: Path) -> None:
    """Engines that do not find the cluster's directory know that the storage is not mounted where they are."""
    kind.open(tmp_path / "root")
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


async def test_what_is_missing_because_the_mount_went_away_meanwhile_is_not_deleted(
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
    note_slots(path, [1, 2, 12])
    notes = Path(beside(path))
    for end in range(len(notes.read_bytes())):
        whole = notes.read_bytes()
        notes.write_bytes(whole[:end])
        assert noted_slots(path) <= {1, 2, 12}
        note_slots(path, [12, 2, 1])  # again
        assert noted_slots(path) == {1, 2, 12}
        notes.write_bytes(whole)
    notes.write_bytes(b"\n4." + notes.read_bytes()[3:] + b"\n16.\n99.")
    assert noted_slots(path) <= {2, 4, 12}


async def test_a_deletion_that_is_repeated_while_another_one_ends_the_file_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash what was deleted is deleted again: here the last slot goes while the first one is punched anew."""
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


async def test_what_was_never_handed_out_leaves_nothing(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path)
    uris = await storage.allocate(allocation({"tp0": 64}, range(8)))
    assert await storage.discard(uris) == [None] * 8
    assert files_below(tmp_path) == []


async def test_a_file_goes_with_its_last_slot_after_a_deletion_failed(kind: Kind, tmp_path: Path) -> None:
    """The folder is no folder for a while, as on a broken mount; the retry must finish the job."""
    storage = kind.open(tmp_path)
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


async def test_one_failure_does_not_hold_up_the_other_deletions(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path)
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


async def test_a_link_in_place_of_a_file_is_never_followed(kind: Kind, tmp_path: Path) -> None:
    """Somebody put a link where a packed file should be; what it points to keeps its bytes."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 4096)
    storage = kind.open(tmp_path / "root")
    written = await Written.into(storage, allocation({"tp0": 512}, range(4)))
    for index in range(4):
        written.path(index).unlink(missing_ok=True)
        written.path(index).symlink_to(victim)
    for uri in written.uris:
        await storage.delete([uri])
        assert victim.read_bytes() == b"v" * 4096


async def test_exists_wants_every_byte(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path)
    uris = await storage.allocate(allocation({"tp0": 64}, range(2)))
    assert await storage.exists(uris) == [False, False]
    write(uris[0])
    assert await storage.exists(uris) == [True, False]
    write(uris[1])
    assert await storage.exists(uris) == [True, True]
    path = Written(storage, uris).path(1)
    os.truncate(path, path.stat().st_size - 1)
    assert (await storage.exists(uris))[1] is False


async def test_deleting_what_was_never_written_is_fine(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path)
    uris = await storage.allocate(allocation({"tp0": 64}, range(9)))
    assert await storage.delete(uris) == [None] * 9
    assert await storage.exists(uris) == [False] * 9


@pytest.mark.parametrize("name", ["..", "a/../../b", "%2F..", "鍵" * 85, "x" * 256, " ", "\\", "*", "~"], ids=range(9))
async def test_ugly_names_are_real_files_below_the_root(kind: Kind, tmp_path: Path, name: str) -> None:
    storage = kind.open(tmp_path / "root", name)
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
    kind: Kind, tmp_path: Path, is_file: bool
) -> None:
    written = await Written.into(kind.open(tmp_path / "root"), allocation({"tp0": 64}, range(3)))
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


async def test_a_storage_that_is_gone_says_so(kind: Kind, tmp_path: Path) -> None:
    storage = kind.open(tmp_path / "root")
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(StorageIOError, match="s-1"):
        await storage.space()


async def test_a_file_goes_with_its_last_slot_after_the_storage_was_removed_and_added_again(tmp_path: Path) -> None:
    directory = StorageDirectory("cluster")
    config = FILE_8.config(tmp_path)
    directory.open(config)
    first = directory.backend(config.global_unique_name)
    assert first is not None
    written = await Written.into(first, allocation({"tp0": 64}, range(8)))
    await first.delete(written.uris[:3])
    directory.close(config.global_unique_name)
    directory.open(config)
    again = directory.backend(config.global_unique_name)
    assert again is not None
    await again.delete(written.uris[3:7])
    written.assert_intact([7])
    await again.delete(written.uris[7:])
    assert not written.path(0).exists()
