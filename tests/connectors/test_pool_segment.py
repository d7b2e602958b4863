"""The segment of a memory pool: made by one of many, refused unless it is ours, whole and of this boot."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_parts import CAPACITY, MIB, access_at

from connectors.transfer import pool_header, pool_making
from connectors.transfer.pool_header import SegmentHeader
from connectors.transfer.pool_making import make_segment, open_segment, segment_path
from connectors.transfer.pool_segment import PoolSegment
from kvcm.model.errors import StorageIOError
from kvcm.model.memory_pool import PAGE_BYTES, chunk_bytes, extent_bytes, pool_bytes


def make(path: Path, capacity: int = CAPACITY, generation: int = 7) -> None:
    make_segment(path, capacity, lambda: generation)


def opened(path: Path, capacity: int = CAPACITY) -> PoolSegment:
    segment = open_segment(path, capacity)
    assert segment is not None
    return segment


@given(st.integers(1, 1 << 45))
def test_chunks_are_whole_pages_and_cover_the_pool(capacity: int) -> None:
    chunk = chunk_bytes(capacity)
    assert chunk % PAGE_BYTES == 0
    assert PAGE_BYTES <= chunk <= 64 * MIB
    assert pool_bytes(capacity) <= capacity < pool_bytes(capacity) + PAGE_BYTES
    if capacity >= 64 * 64 * MIB:
        assert chunk == 64 * MIB
    elif capacity >= 64 * PAGE_BYTES:
        assert 64 * chunk <= capacity


@given(st.integers(1, 1 << 40))
def test_extents_are_the_least_whole_pages(size: int) -> None:
    assert extent_bytes(size) % PAGE_BYTES == 0
    assert size <= extent_bytes(size) < size + PAGE_BYTES


@given(st.integers(1, (1 << 64) - 1), st.integers(PAGE_BYTES, 1 << 45))
def test_headers_are_read_as_they_were_written(generation: int, capacity: int) -> None:
    header = SegmentHeader.new(generation, capacity)
    assert SegmentHeader.decode(header.encode() + bytes(100)) == header
    assert header.stamps_offset + 8 * header.pages <= header.data_offset
    assert header.data_offset % (2 * MIB) == 0
    assert header.segment_bytes(MIB) >= header.data_offset + header.capacity_bytes


@given(st.data())
def test_no_changed_byte_of_a_header_goes_unnoticed(data: st.DataObject) -> None:
    encoded = bytearray(SegmentHeader.new(7, CAPACITY).encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"it does not begin|damaged|this release knows"):
        SegmentHeader.decode(bytes(encoded))


def test_a_new_segment_is_zeroed_whole_and_private(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    make(path)
    segment = opened(path)
    assert segment.header.generation == 7
    assert segment.header.capacity_bytes == CAPACITY
    assert segment.newest_stamp(0, CAPACITY) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= CAPACITY  # no page is left to be found when it is touched
    assert [entry.name for entry in pool_directory.iterdir()] == ["segment"]


def test_what_is_written_through_one_mapping_is_seen_through_another(pool_directory: Path) -> None:
    make(pool_directory / "segment")
    one, other = opened(pool_directory / "segment"), opened(pool_directory / "segment")
    assert one.passes_check(b"token")
    one.copy_in(PAGE_BYTES, [memoryview(b"abc"), memoryview(bytes(range(256)) * 512)])
    three, rest = bytearray(3), bytearray(256 * 512)
    other.copy_out(PAGE_BYTES, [memoryview(three), memoryview(rest)])
    assert three == b"abc"
    assert rest == bytes(range(256)) * 512


def test_nothing_there_is_no_error(pool_directory: Path) -> None:
    assert open_segment(pool_directory / "segment", CAPACITY) is None


def _spoil_magic(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0")


def _spoil_check(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(30)
        file.write(b"\xff")


def _cut(path: Path) -> None:
    os.truncate(path, 3 * MIB)


def _cut_header(path: Path) -> None:
    os.truncate(path, 20)


def _lend(path: Path) -> None:
    path.chmod(0o644)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_spoil_magic, "does not begin as"),
        (_spoil_check, "damaged"),
        (_cut, "its header says"),
        (_cut_header, "does not begin as"),
        (_lend, "mode is 0644"),
        (_link, "is a link"),
        (_folder, "[Dd]irectory"),
        (_fifo, "no regular file"),
    ],
)
def test_what_is_not_whole_or_not_ours_is_refused_and_left_alone(
    pool_directory: Path, spoil: Callable[[Path], None], why: str
) -> None:
    path = pool_directory / "segment"
    make(path)
    spoil(path)
    before = path.lstat()
    for _ in range(2):  # making does not make good either
        with pytest.raises(StorageIOError, match=f"memory pool {path}: .*{why}"):
            access_at(pool_directory).find_or_make()
    assert path.lstat().st_ino == before.st_ino
    with pytest.raises(StorageIOError, match=why):
        make(path)
    assert path.lstat().st_ino == before.st_ino


def test_a_smaller_segment_is_refused_and_a_larger_one_is_used(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    make(path, 2 * MIB)
    with pytest.raises(StorageIOError, match=f"room for {2 * MIB} bytes, the storage's capacity_bytes is {4 * MIB}"):
        open_segment(path, 4 * MIB)
    assert opened(path, MIB).header.capacity_bytes == 2 * MIB


def test_a_segment_of_another_boot_counts_as_missing_and_is_replaced(
    pool_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pool_directory / "segment"
    with monkeypatch.context() as patch:
        patch.setattr(pool_header, "boot_id", lambda: b"an earlier boot!")
        make(path, generation=1)
    assert open_segment(path, CAPACITY) is None
    make(path, generation=2)
    assert opened(path).header.generation == 2


def test_a_segment_that_is_there_is_not_made_again(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    make(path, generation=1)
    make(path, generation=2)
    assert opened(path).header.generation == 1


def test_of_many_makers_one_makes(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    start = threading.Barrier(8)
    failures: list[str] = []

    def maker(generation: int) -> None:
        start.wait()
        try:
            make(path, 4 * MIB, generation)
        except StorageIOError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=maker, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another process is making it now" in failure for failure in failures)
    assert 1 <= opened(path, 4 * MIB).header.generation <= 8
    assert [entry.name for entry in pool_directory.iterdir()] == ["segment"]


def test_while_one_process_makes_it_others_do_not_take_the_memory_twice(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    draft = pool_directory / ".segment.new"
    draft.touch(0o600)
    with draft.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageIOError, match="another process is making it now"):
            make(path)
        assert draft.stat().st_size == 0


def test_what_a_killed_maker_left_is_used_by_the_next(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    program = f"""
import os, signal
from pathlib import Path
from connectors.transfer.pool_making import make_segment
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
make_segment(Path({str(path)!r}), {4 * MIB}, lambda: 1)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode < 0
    assert [entry.name for entry in pool_directory.iterdir()] == [".segment.new"]
    make(path, 2 * MIB, generation=2)
    assert opened(path, 2 * MIB).header.generation == 2
    assert [entry.name for entry in pool_directory.iterdir()] == ["segment"]


def test_a_full_medium_is_said_at_once_and_keeps_nothing(pool_directory: Path) -> None:
    path = pool_directory / "segment"
    with pytest.raises(StorageIOError, match=r"needs \d+ bytes, .* has \d+ free of \d+: enlarge it"):
        make(path, 1 << 50)
    assert list(pool_directory.iterdir()) == []


def test_a_medium_that_fills_up_meanwhile_keeps_nothing(pool_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A quota, or another process that was faster: the look at the free space was too early.
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pool_making.os, "posix_fallocate", full)
    with pytest.raises(StorageIOError, match=r"has no room for it .*: enlarge it"):
        make(pool_directory / "segment")
    assert list(pool_directory.iterdir()) == []


def test_a_missing_directory_is_named(pool_directory: Path) -> None:
    with pytest.raises(StorageIOError, match=r"memory pool .*/nowhere/segment: No such file or directory"):
        make(pool_directory / "nowhere" / "segment")


def test_names_of_other_clusters_and_storages_differ() -> None:
    names = {
        segment_path(Path("/dev/shm"), cluster, storage)
        for cluster, storage in [
            ("", "a-b"),
            ("a", "b"),
            ("", "b"),
            ("a-b", "c"),
            ("a", "b-c"),
            ("../x", "c"),
            ("a+b", "c"),
        ]
    }
    assert len(names) == 7
    assert {path.parent for path in names} == {Path("/dev/shm")}


def test_locks_of_two_claims_of_one_process_exclude_each_other(pool_directory: Path) -> None:
    make(pool_directory / "segment")
    segment = opened(pool_directory / "segment")
    with segment.claim() as one, segment.claim() as other:
        assert one.lock(0, 2 * PAGE_BYTES)
        assert not other.lock(PAGE_BYTES, PAGE_BYTES)
        assert other.lock(2 * PAGE_BYTES, PAGE_BYTES)
    with segment.claim() as one:
        assert one.lock(0, CAPACITY)


def test_a_dropped_segment_closes_its_descriptors(pool_directory: Path) -> None:
    make(pool_directory / "segment")
    before = set(Path("/proc/self/fd").iterdir())
    segment = opened(pool_directory / "segment")
    with segment.claim() as claim:
        claim.lock(0, PAGE_BYTES)
    del segment, claim
    assert set(Path("/proc/self/fd").iterdir()) == before
