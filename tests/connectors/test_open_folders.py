"""Files opened in folders that stay open for a batch: the same files as from the root, and nothing outside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcm.connectors.transfer import Failure, FileMover, TransferItem, paths
from kvcm.connectors.transfer.mover import BatchingMover
from kvcm.connectors.transfer.paths import OpenFolders
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri

STORAGE = "nfs_01"
DEADLINE = 30.0
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(params=[True, False], ids=["openat2", "without-openat2"])
def folders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenFolders]:
    """Open files as a kernel with and one without `openat2` does."""
    if not request.param:
        monkeypatch.setattr(paths, "open_without_links", lambda *_: None)
    folders = OpenFolders(0o600, 0o700)
    yield folders
    folders.close()


@pytest.fixture
def folder(root: Path, folders: OpenFolders) -> Path:
    """Return a folder that is open."""
    folder = root / "cluster" / "inst"
    folder.mkdir()
    (folder / "f").write_bytes(b"1")
    assert content(folders, root, "cluster/inst/f") == b"1"
    return folder


def content(folders: OpenFolders, root: Path, path: str) -> bytes:
    descriptor = folders.open(str(root), f"{root}/{path}", os.O_RDONLY)
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_many_folders_at_once_are_opened_and_closed(folders: OpenFolders, root: Path) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    for turn in range(2):
        for index in range(40):
            folder = root / "cluster" / str(index)
            folder.mkdir(exist_ok=True)
            (folder / "f").write_bytes(b"%d" % index)
            assert content(folders, root, f"cluster/{index}/f") == b"%d" % index, turn
    assert len(list(DESCRIPTORS.iterdir())) <= before + 16
    folders.close()
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_a_link_in_an_open_folder_is_refused(folders: OpenFolders, folder: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError) as refused:
        content(folders, root, "cluster/inst/link")
    assert refused.value.errno == errno.ELOOP


@pytest.mark.parametrize("name", ["", ".", "..", "../../../secret", "a\0b"])
def test_a_name_leads_nowhere_else(folders: OpenFolders, folder: Path, root: Path, name: str) -> None:
    (root.parent / "secret").write_bytes(b"s")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        with pytest.raises((InvalidArgumentError, ValueError)):
            folders.open(str(root), f"{root}/cluster/inst/{name}", flags)


def test_only_regular_files_are_opened(folders: OpenFolders, folder: Path, root: Path) -> None:
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    before = len(list(DESCRIPTORS.iterdir()))
    for name in ("folder", "pipe"):
        with pytest.raises(InvalidArgumentError, match="not a regular file"):
            content(folders, root, f"cluster/inst/{name}")
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_a_folder_that_was_replaced_is_found_again(folders: OpenFolders, folder: Path, root: Path) -> None:
    (folder / "f").unlink()
    folder.rmdir()
    folder.mkdir()
    (folder / "g").write_bytes(b"2")
    assert content(folders, root, "cluster/inst/g") == b"2"


def test_a_lost_folder_is_made_again_by_a_save(folders: OpenFolders, folder: Path, root: Path) -> None:
    (folder / "f").unlink()
    folder.rmdir()
    os.close(folders.open(str(root), str(folder / "g"), os.O_WRONLY | os.O_CREAT))
    assert (folder / "g").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_lost_file_and_an_unmounted_storage_differ(folders: OpenFolders, folder: Path, root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        content(folders, root, "cluster/inst/gone")
    root.rename(root.with_name("away"))
    with pytest.raises(paths.NotMountedError):
        content(folders, root, "cluster/inst/gone")


def test_a_batch_keeps_its_folders_open_and_nothing_stays_behind_it(root: Path) -> None:
    mover = FileMover({STORAGE: str(root)})
    assert isinstance(mover, BatchingMover)
    (root / "cluster" / "inst").mkdir()
    before = len(list(DESCRIPTORS.iterdir()))
    items = [
        TransferItem(LocationUri("file", STORAGE, f"{root}/cluster/inst/{name}", 1), [memoryview(bytearray(b"x"))])
        for name in ("a", "b", "c")
    ]
    with mover.batch() as batch:
        for item in items:
            assert batch.save([item], DEADLINE)[0].ok
        assert len(list(DESCRIPTORS.iterdir())) == before + 1
        (root / "cluster" / "inst" / "b").unlink()
        found = [batch.load([item], DEADLINE)[0].failure for item in items]
    assert found == [None, Failure.LOST, None]
    assert len(list(DESCRIPTORS.iterdir())) == before
