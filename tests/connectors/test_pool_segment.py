"""The segment of a memory pool: made by one of many, refused unless it is ours, whole and of this boot."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_parts import CAPACITY, DEADLINE, MIB, NODE, access_at, content, mover_at, save_one, uri
from thoroughness import examples
from waiting import until

from kvcm.connectors.transfer import Failure, TransferItem, pool_segment
from kvcm.connectors.transfer.mempool import ItemChecks, MemPoolMover, PoolRun, adjacent_runs
from kvcm.connectors.transfer.mover import Direction
from kvcm.connectors.transfer.pool_segment import (
    PoolSegment,
    SegmentHeader,
    create_segment,
    open_segment,
    segment_path,
    stamps_of,
)
from kvcm.model.errors import StorageIOError
from kvcm.model.storages import PAGE_BYTES, chunk_bytes, extent_bytes, pool_bytes


def make(path: Path, capacity: int = CAPACITY, generation: int = 7) -> None:
    create_segment(path, capacity, lambda: generation)


def opened(path: Path, capacity: int = CAPACITY) -> PoolSegment:
    segment = open_segment(path, capacity)
    assert segment is not None
    return segment


@pytest.fixture
def path(pool_directory: Path) -> Path:
    return pool_directory / "segment"


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


def test_a_new_segment_is_zeroed_whole_and_private(path: Path, pool_directory: Path) -> None:
    make(path)
    segment = opened(path)
    assert segment.header.generation == 7
    assert segment.header.capacity_bytes == CAPACITY
    assert segment.newest_stamp(0, CAPACITY) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= CAPACITY  # no page is left to be found when it is touched
    assert [entry.name for entry in pool_directory.iterdir()] == ["segment"]


def _overwrite(path: Path, offset: int, byte: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(byte)


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
        (lambda path: _overwrite(path, 0, b"\0"), "does not begin as"),
        (lambda path: _overwrite(path, 30, b"\xff"), "damaged"),
        (lambda path: os.truncate(path, 3 * MIB), "its header says"),
        (lambda path: os.truncate(path, 20), "does not begin as"),
        (lambda path: path.chmod(0o644), "mode is 0644"),
        (_link, "is a link"),
        (_folder, "[Dd]irectory"),
        (_fifo, "no regular file"),
    ],
)
def test_damaged_or_foreign_segments_are_refused(
    path: Path, pool_directory: Path, spoil: Callable[[Path], None], why: str
) -> None:
    make(path)
    spoil(path)
    before = path.lstat()
    for _ in range(2):  # making does not make good either
        with pytest.raises(StorageIOError, match=f"memory pool {path}: .*{why}"):
            access_at(pool_directory).find_or_create()
    assert path.lstat().st_ino == before.st_ino
    with pytest.raises(StorageIOError, match=why):
        make(path)
    assert path.lstat().st_ino == before.st_ino


def test_a_smaller_segment_is_refused_and_a_larger_one_is_used(path: Path) -> None:
    make(path, 2 * MIB)
    with pytest.raises(StorageIOError, match=f"room for {2 * MIB} bytes, the storage's capacity_bytes is {4 * MIB}"):
        open_segment(path, 4 * MIB)
    assert opened(path, MIB).header.capacity_bytes == 2 * MIB


def test_a_segment_of_another_boot_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool_segment, "boot_id", lambda: b"an earlier boot!")
        make(path, generation=1)
    assert open_segment(path, CAPACITY) is None
    make(path, generation=2)
    assert opened(path).header.generation == 2


def test_of_many_makers_one_makes(path: Path, pool_directory: Path) -> None:
    start = threading.Barrier(8)
    failures: list[str] = []

    def maker(generation: int) -> None:
        start.wait()
        try:
            make(path, 4 * MIB, generation)
        except StorageIOError as error:
            failures.append(str(error))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(maker, range(1, 9)))
    assert all("another process is making it now" in failure for failure in failures)
    assert 1 <= opened(path, 4 * MIB).header.generation <= 8
    assert [entry.name for entry in pool_directory.iterdir()] == ["segment"]


def test_while_one_process_makes_it_others_do_not_take_the_memory_twice(path: Path, pool_directory: Path) -> None:
    draft = pool_directory / ".segment.new"
    draft.touch(0o600)
    with draft.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageIOError, match="another process is making it now"):
            make(path)
        assert draft.stat().st_size == 0


def test_what_a_killed_maker_left_is_used_by_the_next(path: Path, pool_directory: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from kvcm.connectors.transfer.pool_segment import create_segment
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
create_segment(Path({str(path)!r}), {4 * MIB}, lambda: 1)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode < 0
    assert [entry.name for entry in pool_directory.iterdir()] == [".segment.new"]
    make(path, 2 * MIB, generation=2)
    assert opened(path, 2 * MIB).header.generation == 2
    assert [entry.name for entry in pool_directory.iterdir()] == ["segment"]


def test_a_full_medium_is_said_at_once_and_keeps_nothing(path: Path, pool_directory: Path) -> None:
    with pytest.raises(StorageIOError, match=r"needs \d+ bytes, .* has \d+ free of \d+: enlarge it"):
        make(path, 1 << 50)
    assert list(pool_directory.iterdir()) == []


def test_a_medium_that_fills_up_meanwhile_keeps_nothing(pool_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A quota, or another process that was faster: the look at the free space was too early.
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pool_segment.os, "posix_fallocate", full)
    with pytest.raises(StorageIOError, match=r"has no room for it .*: enlarge it"):
        make(pool_directory / "segment")
    assert list(pool_directory.iterdir()) == []


def test_a_missing_directory_is_named(pool_directory: Path) -> None:
    with pytest.raises(StorageIOError, match=r"memory pool .*/nowhere/segment: No such file or directory"):
        make(pool_directory / "nowhere" / "segment")


def test_names_of_other_clusters_and_storages_differ() -> None:
    pairs = [("", "a-b"), ("a", "b"), ("", "b"), ("a-b", "c"), ("a", "b-c"), ("../x", "c"), ("a+b", "c")]
    names = {segment_path(Path("/dev/shm"), cluster, storage) for cluster, storage in pairs}
    assert len(names) == 7
    assert {path.parent for path in names} == {Path("/dev/shm")}


def test_locks_of_two_claims_of_one_process_exclude_each_other(pool_directory: Path) -> None:
    make(pool_directory / "segment")
    segment = opened(pool_directory / "segment")
    with segment.write_lock() as one, segment.write_lock() as other:
        assert one.lock(0, 2 * PAGE_BYTES)
        assert not other.lock(PAGE_BYTES, PAGE_BYTES)
        assert other.lock(2 * PAGE_BYTES, PAGE_BYTES)
    with segment.write_lock() as one:
        assert one.lock(0, CAPACITY)


def test_a_dropped_segment_closes_its_descriptors(pool_directory: Path) -> None:
    make(pool_directory / "segment")
    before = set(Path("/proc/self/fd").iterdir())
    segment = opened(pool_directory / "segment")
    with segment.write_lock() as claim:
        claim.lock(0, PAGE_BYTES)
    del segment, claim
    assert set(Path("/proc/self/fd").iterdir()) == before


# ---- Parts that are copied together: the same bytes and the same answers as one by one, whatever their memory i ----

STAMP = 9
SMALL_CHUNK = 256 << 10  # of a pool 64 times as large
Layout = list[tuple[int, int, int, str]]
"""Of each part: pages left free before it, size, bytes left free before its memory, and what that memory is like."""


@pytest.fixture
def mover(pool_directory: Path) -> MemPoolMover:
    return mover_at(pool_directory)


def rows(memory: memoryview, size: int, stamp: int = STAMP) -> list[TransferItem]:
    """Return neighbours in the pool whose memory is neighbours, too."""
    step = extent_bytes(size)
    return [
        TransferItem(uri(index * step, size, stamp), [memory[index * size : (index + 1) * size]])
        for index in range(memory.nbytes // size)
    ]


def cut(items: Sequence[TransferItem], capacity: int = CAPACITY) -> list[PoolRun]:
    def fail(_: int, error: Exception) -> None:
        raise error

    return list(adjacent_runs(items, ItemChecks(NODE, capacity, Direction.LOAD), fail))


def shape(found: Sequence[PoolRun]) -> list[list[list[int]]]:
    """Return the positions of each piece of each run."""
    return [[[part[0] for part in piece.parts] for piece in run.pieces] for run in found]


def test_neighbours_on_both_sides_are_one_piece() -> None:
    memory = bytearray(range(256)) * 64
    (run,) = cut(rows(memoryview(memory), PAGE_BYTES))
    assert shape([run]) == [[[0, 1, 2, 3]]]
    (view,) = run.pieces[0].views
    assert (view.format, view.nbytes, view.readonly) == ("B", 4 * PAGE_BYTES, False)
    assert view == memory
    view[3 * PAGE_BYTES] = 99
    assert memory[3 * PAGE_BYTES] == 99
    assert (run.offset, run.end, run.stamps) == (0, 4 * PAGE_BYTES, stamps_of(STAMP, 4 * PAGE_BYTES))


def test_buffers_that_are_not_adjacent_in_memory_are_separate_pieces() -> None:
    whole = memoryview(bytearray(8 * PAGE_BYTES))
    items = rows(whole, PAGE_BYTES)

    def given(position: int, buffers: list[memoryview], start: int | None = None) -> None:
        items[position] = TransferItem(items[position].uri, buffers, start)

    assert shape(cut(items)) == [[list(range(8))]]
    given(1, [whole[: 1 * PAGE_BYTES]])  # the first one's
    given(3, [whole[2 * PAGE_BYTES + 1 : 3 * PAGE_BYTES + 1]])  # overlaps the one before
    given(5, [memoryview(bytes(PAGE_BYTES))])  # read-only
    given(6, [whole[6 * PAGE_BYTES : 6 * PAGE_BYTES + 100], whole[6 * PAGE_BYTES + 100 : 7 * PAGE_BYTES]])
    assert shape(cut(items)) == [[[0], [1], [2], [3], [4], [5], [6], [7]]]


@pytest.mark.parametrize("start", [0, PAGE_BYTES])
def test_a_part_of_a_part_is_joined_to_nothing_behind_it(start: int) -> None:
    memory = memoryview(bytearray(6 * PAGE_BYTES))
    first = TransferItem(uri(0, 2 * PAGE_BYTES, STAMP), [memory[:PAGE_BYTES]], start)
    for place in (PAGE_BYTES, 2 * PAGE_BYTES):
        after = TransferItem(uri(2 * PAGE_BYTES, PAGE_BYTES, STAMP), [memory[place : place + PAGE_BYTES]])
        assert shape(cut([first, after])) == [[[0], [1]]]
        assert [piece.offset for piece in cut([first, after])[0].pieces] == [start, 2 * PAGE_BYTES]


@pytest.mark.parametrize("start", [0, PAGE_BYTES])
def test_a_part_of_a_part_is_joined_to_nothing_before_it(start: int) -> None:
    memory = memoryview(bytearray(2 * PAGE_BYTES))
    first = TransferItem(uri(0, PAGE_BYTES, STAMP), [memory[:PAGE_BYTES]])
    after = TransferItem(uri(PAGE_BYTES, 2 * PAGE_BYTES, STAMP), [memory[PAGE_BYTES:]], start)
    (run,) = cut([first, after])
    assert [piece.offset for piece in run.pieces] == [0, PAGE_BYTES + start]


def test_runs_are_bounded_and_never_go_over_a_gap() -> None:
    items = rows(memoryview(bytearray(20 * MIB)), MIB // 2)
    found = cut(items)
    assert shape(found) == [[list(range(start, min(40, start + 16)))] for start in (0, 16, 32)]
    assert shape(cut([items[0], items[2], items[1]])) == [[[0]], [[1]], [[2]]]
    assert shape(cut([items[0], items[0]])) == [[[0]], [[1]]]
    large = rows(memoryview(bytearray(32 * MIB)), 16 * MIB)
    assert shape(cut(large, 64 * 16 * MIB)) == [[[0]], [[1]]]


def test_a_piece_keeps_its_memory() -> None:
    """A caller that has left may release its views while they are still copied; the memory must not go."""
    memory = bytearray(2 * PAGE_BYTES)
    items = rows(memoryview(memory), PAGE_BYTES)
    (run,) = cut(items)
    (view,) = run.pieces[0].views
    for item in items:
        item.buffers[0].release()
    del items
    del run
    with pytest.raises(BufferError):
        memory.extend(bytes(MIB))
    del view
    memory.extend(bytes(MIB))


def test_runs_that_fall_apart_have_a_run_for_each_part() -> None:
    (run,) = cut(rows(memoryview(bytearray(3 * PAGE_BYTES)), PAGE_BYTES))
    singles = run.split()
    assert shape(singles) == [[[0]], [[1]], [[2]]]
    assert [(single.offset, single.end) for single in singles] == list(pairwise(range(0, 4 * PAGE_BYTES, PAGE_BYTES)))
    assert not any(single.split() for single in singles)


@pytest.mark.parametrize("changed", [0, 2, 4])
@pytest.mark.parametrize("is_late", [False, True], ids=["before the copy", "during the copy"])
def test_one_part_of_a_run_that_is_overwritten_is_lost_alone(
    mover: MemPoolMover, pool_directory: Path, monkeypatch: pytest.MonkeyPatch, changed: int, is_late: bool
) -> None:
    size, copied = 10 * PAGE_BYTES, list[int]()
    saved = bytearray(b"".join(content(STAMP, index * size, size) for index in range(5)))
    assert all(result.ok for result in mover.save(rows(memoryview(saved), size), DEADLINE))
    other, segment = mover_at(pool_directory), mover._access.find()
    assert segment is not None
    copy_out = segment.copy_out

    def overwrite() -> None:
        assert save_one(other, changed * size + 3 * PAGE_BYTES, 1, STAMP + 1).ok

    def overtaken(offset: int, views: Sequence[memoryview]) -> None:
        overwrite()
        copied.append(sum(view.nbytes for view in views))
        copy_out(offset, views)

    if is_late:
        monkeypatch.setattr(segment, "copy_out", overtaken)
    else:
        overwrite()
    memory = bytearray(5 * size)
    results = mover.load(rows(memoryview(memory), size), DEADLINE)
    assert [result.failure for result in results] == [Failure.LOST if at == changed else None for at in range(5)]
    for index in set(range(5)) - {changed}:
        assert memory[index * size : (index + 1) * size] == saved[index * size : (index + 1) * size]
    if is_late:
        assert copied == [5 * size]  # all were one piece
    else:
        assert memory[changed * size : (changed + 1) * size] == bytes(size)  # seen before it was copied


def test_a_run_over_several_allocations_is_written_and_read(mover: MemPoolMover) -> None:
    memory = bytearray(content(STAMP, 0, 4 * PAGE_BYTES))
    items = [
        TransferItem(uri(index * PAGE_BYTES, PAGE_BYTES, STAMP + index % 2), [memoryview(memory)[at : at + PAGE_BYTES]])
        for index, at in enumerate(range(0, 4 * PAGE_BYTES, PAGE_BYTES))
    ]
    assert all(result.ok for result in mover.save(items, DEADLINE))
    segment = mover._access.find()
    assert segment is not None
    assert segment.has_stamps(0, b"".join(stamps_of(item.uri.range_id or 0, PAGE_BYTES) for item in items))
    expected, memory[:] = bytes(memory), bytes(len(memory))
    assert all(result.ok for result in mover.load(items, DEADLINE))
    assert memory == expected


@pytest.mark.parametrize("direction", list(Direction))
def test_the_deadline_is_looked_at_between_runs(
    pool_directory: Path, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    access, clock, sizes = access_at(pool_directory), FakeClock(), list[int]()
    mover, segment = MemPoolMover("pool", NODE, CAPACITY, access, clock=clock.now), access.find_or_create()
    items = rows(memoryview(bytearray(content(STAMP, 0, 20 * MIB))), MIB)
    assert all(result.ok for result in mover.save(items, DEADLINE))
    name = "copy_out" if direction is Direction.LOAD else "copy_in"
    copy = getattr(segment, name)

    def take_a_second(offset: int, views: Sequence[memoryview]) -> None:
        copy(offset, views)
        sizes.append(sum(view.nbytes for view in views))
        clock.time += 1.0

    monkeypatch.setattr(segment, name, take_a_second)
    results = (mover.load if direction is Direction.LOAD else mover.save)(items, 1.5)
    assert sizes == [8 * MIB, 8 * MIB]
    assert [result.failure for result in results] == [None] * 16 + [Failure.CANCELLED] * 4


layouts: st.SearchStrategy[Layout] = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES, 50 * PAGE_BYTES, 100, PAGE_BYTES + 1]),
        st.sampled_from([0, 0, 0, 1, 64]),
        st.sampled_from(["plain", "plain", "plain", "pieces", "elsewhere", "read-only"]),
    ),
    min_size=1,
    max_size=12,
)


def laid_out(layout: Layout, order: Sequence[int]) -> tuple[bytearray, list[TransferItem], list[slice]]:
    """Return memory, and items in it, in the pool in the order of the layout and in memory in another one."""
    memory = bytearray(b"\xee" * sum(size + gap for _, size, gap, _ in layout))
    places: dict[int, slice] = {}
    start = 0
    for index in order:
        _, size, gap, _ = layout[index]
        places[index] = slice(start + gap, start + gap + size)
        start += gap + size
    items, offset = [], 0
    for index, (pages, size, _, kind) in enumerate(layout):
        offset += pages * PAGE_BYTES
        if offset % SMALL_CHUNK + size > SMALL_CHUNK:
            offset += SMALL_CHUNK - offset % SMALL_CHUNK
        items.append(TransferItem(uri(offset, size, STAMP), _memory(memoryview(memory)[places[index]], kind)))
        offset += extent_bytes(size)
    return memory, items, [places[index] for index in range(len(layout))]


def _memory(view: memoryview, kind: str) -> list[memoryview]:
    middle = view.nbytes // 3
    return {
        "plain": [view],
        "pieces": [view[:middle], view[middle:]],
        "elsewhere": [memoryview(bytearray(view.nbytes))],
        "read-only": [view.toreadonly()],
    }[kind]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts, data=st.data())
def test_any_memory_is_moved_as_part_by_part(pool_directory: Path, layout: Layout, data: st.DataObject) -> None:
    (pool_directory / "segment").unlink(missing_ok=True)
    mover = mover_at(pool_directory, 64 * SMALL_CHUNK)
    some_order = st.one_of(st.just(list(range(len(layout)))), st.permutations(range(len(layout))))
    memory, items, places = laid_out(layout, data.draw(some_order))
    for place, item in zip(places, items, strict=True):
        memory[place] = content(STAMP, item.uri.offset, item.uri.size)
        if item.buffers[0].obj is not memory:
            item.buffers[0][:] = memory[place]
    assert all(result.ok for result in mover.save(items, DEADLINE))
    segment = mover._access.find()
    assert segment is not None
    filled = 0
    for item in items:
        end = item.uri.offset + item.uri.size
        assert segment.data[item.uri.offset : end].tobytes() == content(STAMP, item.uri.offset, item.uri.size)
        filled += int((segment.data[item.uri.offset : end] != 0).sum())
    assert int((segment.data != 0).sum()) == filled  # nothing beside them was written

    memory, items, places = laid_out(layout, data.draw(some_order))
    results = mover.load(items, DEADLINE)
    expected = bytearray(b"\xee" * len(memory))
    for place, item, result, (_, size, _, kind) in zip(places, items, results, layout, strict=True):
        assert result.failure is (Failure.REFUSED if kind == "read-only" else None)
        if kind == "elsewhere":
            assert item.buffers[0] == content(STAMP, item.uri.offset, size)
        elif kind != "read-only":
            expected[place] = content(STAMP, item.uri.offset, size)
    assert memory == expected  # also all bytes outside of any allocation


# ---- Locks of pages and processes that fork: a lock is its writer's, and ends with it, whatever was forked ----

SECONDS = 30.0

# Lives on in a child that was forked in the middle of a save, and until its stdin is closed.
KILLED = """
import os, signal, sys
from pathlib import Path
from kvcm.connectors.transfer.pool_segment import open_segment
segment = open_segment(Path(sys.argv[1]), int(sys.argv[2]))
with segment.write_lock() as lock:
    assert lock.lock(0, 4096)
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

# Its child leaves the lock that it was forked in, and saves something itself; the parent's lock stays.
OUTLIVED = """
import os, sys
from pathlib import Path
from kvcm.connectors.transfer.pool_segment import open_segment
segment = open_segment(Path(sys.argv[1]), int(sys.argv[2]))
with segment.write_lock() as spare:  # one that is free when it forks
    pass
locks = segment.write_lock()
lock = locks.__enter__()
assert lock.lock(0, 4096)
child = os.fork()
if child == 0:
    locks.__exit__(None, None, None)
    with segment.write_lock() as own:
        assert not own.lock(0, 4096)
        assert own.lock(4096, 4096)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
sys.stdin.read()
locks.__exit__(None, None, None)
with segment.write_lock() as lock:
    assert lock.lock(0, 8192)
"""


@pytest.fixture
def segment(pool_directory: Path) -> PoolSegment:
    return access_at(pool_directory).find_or_create()


@pytest.fixture
def started(segment: PoolSegment, pool_directory: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(pool_directory / "segment"), str(CAPACITY)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()  # closes stdin, which ends children, too


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS)[0], "the process says nothing"
    return process.stdout.readline().strip()


def is_locked(segment: PoolSegment) -> bool:
    with segment.write_lock() as lock:
        return not lock.lock(0, PAGE_BYTES)


def test_the_lock_of_a_killed_writer_ends(
    segment: PoolSegment, started: Callable[[str], subprocess.Popen[str]]
) -> None:
    writer = started(KILLED)
    child = int(line_of(writer))
    assert writer.wait(SECONDS) == -signal.SIGKILL
    until(lambda: not is_locked(segment), "the pages are free")
    os.kill(child, 0)  # it is still there


def test_a_child_leaves_its_parents_lock(segment: PoolSegment, started: Callable[[str], subprocess.Popen[str]]) -> None:
    writer = started(OUTLIVED)
    assert line_of(writer) == "0"
    assert is_locked(segment)
    writer.communicate()
    assert writer.returncode == 0
    assert not is_locked(segment)
