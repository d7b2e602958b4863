"""Files: every byte or a failure, and nothing outside the item's own range."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from transfer_parts import DEADLINE, failures

from kvcm.connectors.transfer import Failure, FileMover, TransferEngine, TransferItem, paths
from kvcm.connectors.transfer.memory import MAX_PIECES
from kvcm.connectors.transfer.mover import BatchingMover
from kvcm.connectors.transfer.paths import OpenFolders
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri

STORAGE = "nfs_01"


@pytest.fixture
def mover(root: Path) -> FileMover:
    return FileMover({STORAGE: str(root) + "/"})


def uri(path: Path | str, size: int, blkid: int | None = None) -> LocationUri:
    return LocationUri("file", STORAGE, str(path), size, blkid)


def cut(data: bytearray, lengths: Sequence[int]) -> list[memoryview]:
    """Cut memory into consecutive pieces."""
    view, position, pieces = memoryview(data), 0, []
    for length in lengths:
        pieces.append(view[position : position + length])
        position += length
    return pieces


lengths_of_pieces = st.lists(st.integers(0, 5000), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 0)


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_of_packed_blocks_with_any_iovecs(data: st.DataObject, mover: FileMover, root: Path) -> None:
    lengths = data.draw(lengths_of_pieces)
    size = sum(lengths)
    slots = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    written = [bytearray(os.urandom(size)) for _ in slots]
    (root / "a").mkdir(exist_ok=True)
    path = root / "a" / data.draw(st.sampled_from(["one", "two"])) / f"{size}-{len(slots)}"
    items = [
        TransferItem(uri(path, size, slot), cut(block, lengths)) for slot, block in zip(slots, written, strict=True)
    ]
    assert all(result.ok and result.moved_bytes == size for result in mover.save(items, DEADLINE))
    for slot, block in zip(slots, written, strict=True):
        assert path.read_bytes()[slot * size : (slot + 1) * size] == block

    other_lengths = data.draw(st.permutations(lengths))
    read = [bytearray(size) for _ in slots]
    items = [TransferItem(uri(path, size, s), cut(block, other_lengths)) for s, block in zip(slots, read, strict=True)]
    assert all(result.ok for result in mover.load(items, DEADLINE))
    assert read == written


def test_neighbours_in_a_packed_file_are_left_alone(mover: FileMover, root: Path) -> None:
    path = root / "packed"
    before = os.urandom(5 * 100)
    path.write_bytes(before)
    assert mover.save([TransferItem(uri(path, 100, 2), [memoryview(b"x" * 100)])], DEADLINE)[0].ok
    assert path.read_bytes() == before[:200] + b"x" * 100 + before[300:]


def test_more_pieces_than_one_system_call_takes(mover: FileMover, root: Path) -> None:
    lengths = [1 + index % 7 for index in range(3 * os.sysconf("SC_IOV_MAX"))]
    data = bytearray(os.urandom(sum(lengths)))
    target = uri(root / "many", len(data))
    assert mover.save([TransferItem(target, cut(data, lengths))], DEADLINE)[0].ok
    back = bytearray(len(data))
    assert mover.load([TransferItem(target, cut(back, lengths[::-1]))], DEADLINE)[0].ok
    assert back == data


def test_a_refused_write_is_never_a_success(mover: FileMover, root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        results = mover.save(
            [TransferItem(uri(root / "big", 3000, slot), [memoryview(bytes(3000))]) for slot in (0, 1)], DEADLINE
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failures(results) == [None, Failure.ERROR]
    assert results[1].moved_bytes == 4096 - 3000  # what the system took before it refused


def test_paths_outside_the_root_are_refused(mover: FileMover, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 8)
    (root / "link_file").symlink_to(secret)
    (root / "link_dir").symlink_to(tmp_path)
    (tmp_path / "store2").mkdir()
    paths = [
        "/etc/hostname",
        f"{root}/../secret",
        f"{root}/./x",
        f"{root}//x",
        f"{root}/",
        f"{root}2/x",
        f"{root}/link_file",
        f"{root}/link_dir/secret",
        f"{root}/a\0b",
    ]
    for move in (mover.load, mover.save):
        results = move([TransferItem(uri(path, 8), [memoryview(bytearray(b"n" * 8))]) for path in paths], DEADLINE)
        assert failures(results) == [Failure.REFUSED] * len(paths), [result.reason for result in results]
    assert secret.read_bytes() == b"s" * 8
    assert list((tmp_path / "store2").iterdir()) == []


def test_percent_signs_are_literal(mover: FileMover, root: Path) -> None:
    (root / "Qwen%2FQwen3").mkdir()
    target = uri(root / "Qwen%2FQwen3" / "%2E%2E", 3)
    assert mover.save([TransferItem(target, [memoryview(b"abc")])], DEADLINE)[0].ok
    assert (root / "Qwen%2FQwen3" / "%2E%2E").read_bytes() == b"abc"


def test_a_pipe_in_the_storage_does_not_hang(mover: FileMover, root: Path) -> None:
    os.mkfifo(root / "pipe")
    buffer = [memoryview(bytearray(1))]
    assert mover.load([TransferItem(uri(root / "pipe", 1), buffer)], DEADLINE)[0].failure is Failure.REFUSED
    assert not mover.save([TransferItem(uri(root / "pipe", 1), buffer)], DEADLINE)[0].ok


@pytest.mark.parametrize(
    ("size", "buffers"),
    [
        (10, [memoryview(bytearray(9))]),
        (10, [memoryview(bytearray(5)), memoryview(bytearray(6))]),
        (10, []),
        (0, []),
        (10, [memoryview(bytearray(20))[::2]]),
    ],
)
def test_buffers_of_another_size_are_refused(
    mover: FileMover, root: Path, size: int, buffers: list[memoryview]
) -> None:
    (root / "f").write_bytes(b"f" * 10)
    for move in (mover.load, mover.save):
        result = move([TransferItem(uri(root / "f", size), buffers)], DEADLINE)[0]
        assert (result.ok, result.failure) == (False, Failure.REFUSED)
        assert result.reason
    assert (root / "f").read_bytes() == b"f" * 10


def test_memory_that_cannot_be_written_is_refused(mover: FileMover, root: Path) -> None:
    (root / "f").write_bytes(b"f" * 10)
    constant = bytes(10)
    result = mover.load([TransferItem(uri(root / "f", 10), [memoryview(constant)])], DEADLINE)[0]
    assert result.failure is Failure.REFUSED
    assert constant == bytes(10)


def test_absurd_offsets_are_refused(mover: FileMover, root: Path) -> None:
    item = TransferItem(uri(root / "f", 8, 1 << 62), [memoryview(bytearray(8))])
    assert mover.save([item], DEADLINE)[0].failure is Failure.REFUSED


def test_new_files_are_private_whatever_the_umask(mover: FileMover, root: Path) -> None:
    path = root / "cluster" / "d" / "f"
    previous = os.umask(0)
    try:
        assert mover.save([TransferItem(uri(path, 1), [memoryview(b"1")])], DEADLINE)[0].ok
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("loads_first", [True, False])
@pytest.mark.parametrize("there", [[], ["store"], ["store", "store/other"]])
def test_a_storage_that_is_not_mounted_has_lost_nothing(tmp_path: Path, there: list[str], loads_first: bool) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    root = tmp_path / "store"
    mover = FileMover({STORAGE: str(root)})
    items = [
        TransferItem(uri(root / "cluster" / "instance" / name, 1), [memoryview(bytearray(b"1"))]) for name in ("a", "b")
    ]
    if loads_first:
        results = mover.load(items, DEADLINE)
        assert failures(results) == [Failure.ERROR] * 2
        assert "not mounted" in results[0].reason
    # Nor is it made on the local disk by a save: then it would seem to be there.
    assert failures(mover.save(items, DEADLINE)) == [Failure.ERROR] * 2
    assert not (root / "cluster").exists()
    (root / "cluster").mkdir(parents=True)  # mounted
    assert failures(mover.load(items, DEADLINE)) == [Failure.LOST] * 2
    assert failures(mover.save(items, DEADLINE)) == [None] * 2


def test_nothing_is_begun_after_the_deadline(mover: FileMover, root: Path) -> None:
    items = [TransferItem(uri(root / str(index), 1), [memoryview(b"1")]) for index in range(3)]
    assert failures(mover.save(items, -1.0)) == [Failure.CANCELLED] * 3
    assert list(root.iterdir()) == [root / "cluster"]


@pytest.mark.parametrize("coalesce", [True, False])
def test_no_access_is_begun_after_the_deadline_within_one_file(root: Path, coalesce: bool) -> None:
    (root / "packed").write_bytes(b"p" * 90)
    seconds = itertools.count()
    mover = FileMover({STORAGE: str(root)}, coalesce=coalesce, clock=lambda: float(next(seconds)))
    buffers = [bytearray(10) for _ in range(6)]
    slots = [0, 2, 4, 5, 7, 8]  # two pairs of neighbours
    items = [
        TransferItem(uri(root / "packed", 10, slot), [memoryview(b)]) for slot, b in zip(slots, buffers, strict=True)
    ]
    assert failures(mover.load(items, 3.5)) == [None] * 2 + [Failure.CANCELLED] * 4
    assert buffers == [b"p" * 10] * 2 + [bytes(10)] * 4


@pytest.mark.parametrize("call", ["fstat", "preadv", "close"])
def test_system_calls_that_time_out_open_the_breaker(root: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A mount that gives up by itself says ETIMEDOUT, which is not the caller's deadline."""
    size = MAX_PIECES + 1
    (root / "f").write_bytes(bytes(size))
    items = [TransferItem(uri(root / "f", size), cut(bytearray(size), [1] * size))]
    real = getattr(os, call)

    def times_out(descriptor: int, *arguments: object) -> None:
        real(descriptor, *arguments)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    engine = TransferEngine({("file", STORAGE): FileMover({STORAGE: str(root)})}, clock=FakeClock().now)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, times_out)
        results = [engine.load(items, DEADLINE)[0] for _ in range(4)]
    engine.close()
    assert failures(results) == [Failure.ERROR] * 3 + [Failure.UNAVAILABLE]
    assert "timed out" in results[0].reason


def test_a_file_that_cannot_be_reported_is_closed(
    mover: FileMover, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").write_bytes(b"1")
    items = [TransferItem(uri(root / "f", 1), [memoryview(bytearray(1))])]

    def is_stale(descriptor: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    before = len(list(DESCRIPTORS.iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", is_stale)
        results = [mover.load(items, DEADLINE)[0] for _ in range(50)]
    assert len(list(DESCRIPTORS.iterdir())) < before + 50
    assert failures(results) == [Failure.ERROR] * 50


@pytest.mark.parametrize("bad", ["", "/", "//", "relative/path", "/nul\0"])
def test_roots_must_be_absolute(bad: str) -> None:
    with pytest.raises(InvalidArgumentError, match="root_path"):
        FileMover({STORAGE: bad})


def test_a_storage_with_an_unusable_root_refuses_its_uris_alone(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "c").mkdir()
    storages = [
        StorageConfig("whole_disk", NfsStorageSpec("/", 8)),
        StorageConfig(STORAGE, NfsStorageSpec(str(root), 8)),
    ]
    items = [
        TransferItem(LocationUri("file", "whole_disk", str(root / "c" / "f"), 1), [memoryview(bytearray(b"1"))]),
        TransferItem(uri(root / "c" / "f", 1), [memoryview(bytearray(b"1"))]),
    ]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine = TransferEngine.for_storages(storages)
            assert failures(engine.save(items, DEADLINE)) == [Failure.REFUSED, None]
            assert failures(engine.load(items, DEADLINE)) == [Failure.REFUSED, None]
            engine.close()
    assert len(caplog.records) == 1
    assert "root_path '/' of storage whole_disk" in caplog.text


# ---- Folders that stay open for a batch: the same files as from the root, and nothing outside it ----

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
