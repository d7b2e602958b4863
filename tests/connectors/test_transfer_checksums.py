"""Checksums in the transfer engine: told of what a caller saved, compared with what a caller loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from transfer_parts import DEADLINE, SCHEME, HeldStorage, failures
from transfer_parts import item as held_item

from kvcm.connectors.layout import IndexRange, Shard, StoredFormat
from kvcm.connectors.layout.stored_format import AXES, item_bytes
from kvcm.connectors.transfer import (
    Failure,
    FileMover,
    TransferEngine,
    TransferItem,
    TransferResult,
    checksum_of,
    mover,
)
from kvcm.connectors.transfer.breaker import BreakerState
from kvcm.connectors.transfer.lanes import group_items
from kvcm.connectors.transfer.mover import moved, not_moved, range_items, record_checksums
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri

STORAGE = "nfs_01"
SIZE = 4096
SLOTS = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    (root / "cluster").mkdir(parents=True)
    return root


@pytest.fixture
def new_engine(root: Path) -> Iterator[Callable[..., TransferEngine]]:
    """Make engines over one directory; all are closed at the end."""
    opened: list[TransferEngine] = []

    def new(**options: bool) -> TransferEngine:
        opened.append(TransferEngine({("file", STORAGE): FileMover({STORAGE: str(root)})}, **options))
        return opened[-1]

    yield new
    for engine in opened:
        engine.close()


def uri_of(root: Path, block: int, size: int = SIZE) -> LocationUri:
    """Blocks lie in packed files of `SLOTS`, every third in a file of its own."""
    directory = root / "cluster" / "i"
    if block % 3 == 0:
        return LocationUri("file", STORAGE, str(directory / f"b{block}"), size)
    return LocationUri("file", STORAGE, str(directory / f"p{block // SLOTS}"), size, block % SLOTS)


def content(block: int, size: int = SIZE) -> bytes:
    return bytes((block * 31 + position * 7) % 256 for position in range(size))


def split_at(memory: bytearray, ends: Sequence[int]) -> list[memoryview]:
    """The memory in pieces that end there."""
    bounds = [0, *sorted(ends), len(memory)]
    return [memoryview(memory)[first:last] for first, last in pairwise(bounds)]


def to_save(root: Path, blocks: Sequence[int]) -> list[TransferItem]:
    return [TransferItem(uri_of(root, block), [memoryview(content(block))]) for block in blocks]


def to_load(root: Path, blocks: Sequence[int], results: Sequence[TransferResult]) -> list[TransferItem]:
    return [
        TransferItem(uri_of(root, block), [memoryview(bytearray(SIZE))], checksum=result.checksum)
        for block, result in zip(blocks, results, strict=True)
    ]


def flip(uri: LocationUri, byte: int) -> None:
    """Change one bit on the disk."""
    path = Path(uri.path)
    data = bytearray(path.read_bytes())
    data[uri.offset + byte] ^= 1
    path.write_bytes(data)


# ── The checksum ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(data=st.binary(max_size=3000), ends=st.lists(st.integers(0, 3000), max_size=9))
def test_it_is_that_of_the_bytes_in_however_many_pieces(data: bytes, ends: list[int]) -> None:
    pieces = split_at(bytearray(data), [min(end, len(data)) for end in ends])
    assert checksum_of(pieces) == xxhash.xxh3_64_intdigest(data, 0) or 1


def test_pieces_of_any_type_count_by_their_bytes() -> None:
    data = content(1)
    assert checksum_of([memoryview(data).cast("d"), memoryview(data).cast("B", (64, 64))]) == checksum_of(
        [memoryview(data + data)]
    )


def test_a_digest_of_0_is_told_as_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 means that there is none; nobody knows bytes whose digest it is."""

    class Zero:
        def update(self, _data: memoryview) -> None: ...

        def intdigest(self) -> int:
            return 0

    monkeypatch.setattr(mover, "xxh3_64_intdigest", lambda _data: 0)
    monkeypatch.setattr(mover, "xxh3_64", Zero)
    assert [checksum_of([memoryview(b"x")] * count) for count in (1, 2)] == [1, 1]


# ── Saves ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_save_tells_the_checksum_of_what_it_was_given(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    """Of pieces that lie apart in memory, as KV does."""
    blocks = range(20)
    items = []
    for block in blocks:
        spread = bytearray(2 * SIZE)
        pieces = [memoryview(spread)[start : start + 256] for start in range(0, 2 * SIZE, 512)]
        for number, piece in enumerate(pieces):
            piece[:] = content(block)[256 * number : 256 * (number + 1)]
        items.append(TransferItem(uri_of(root, block), pieces))
    results = new_engine(checksums=True).save(items, DEADLINE)
    assert failures(results) == [None] * 20
    assert [result.checksum for result in results] == [xxhash.xxh3_64_intdigest(content(block)) for block in blocks]
    assert [result.moved_bytes for result in results] == [SIZE] * 20


def test_without_checksums_none_is_told(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    results = new_engine().save(to_save(root, range(4)), DEADLINE)
    assert [result.checksum for result in results] == [0] * 4
    assert results[0] is moved(SIZE)  # nothing is made anew per item


class Scribbler(HeldStorage):
    """A storage during whose saves the memory changes."""

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        for item in items:
            item.buffers[0][:] = b"\xff" * len(item.buffers[0])
        return super().save(items, deadline_seconds)


def test_it_is_taken_before_the_bytes_are_written() -> None:
    """Whatever happens to the memory afterwards is not what the caller meant to save."""
    engine = TransferEngine({(SCHEME, "s"): Scribbler()}, checksums=True)
    (result,) = engine.save([held_item("/1")], DEADLINE)
    assert result.checksum == xxhash.xxh3_64_intdigest(bytes(8))
    engine.close()


def test_what_was_not_saved_has_none(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    good, short, apart = to_save(root, range(3))
    short = TransferItem(short.uri, [memoryview(bytes(SIZE - 1))])
    apart = TransferItem(apart.uri, [memoryview(bytes(2 * SIZE))[::2]])
    results = new_engine(checksums=True).save([short, good, apart], DEADLINE)
    assert failures(results) == [Failure.REFUSED, None, Failure.REFUSED]
    assert [bool(result.checksum) for result in results] == [False, True, False]


def test_the_time_that_it_takes_is_the_callers() -> None:
    now = [100.0]
    given_seconds: list[float] = []

    def save(items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        given_seconds.append(deadline_seconds)
        return [moved(8), not_moved(Failure.ERROR, "full")]

    def clock() -> float:
        now[0] += 2.0
        return now[0]

    first, second = record_checksums(save, clock)([held_item("/1"), held_item("/2")], 5.0)
    assert given_seconds == [3.0]
    assert (first.checksum, second) == (checksum_of([memoryview(bytes(8))]), not_moved(Failure.ERROR, "full"))


# ── Loads ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("byte", [0, SIZE // 2, SIZE - 1])
def test_one_bit_makes_an_item_corrupt_and_no_other(
    new_engine: Callable[..., TransferEngine], root: Path, byte: int
) -> None:
    blocks, damaged = range(20), {6, 9, 10, 19}  # alone in a file and packed, the first and the last of a file
    saved = new_engine(checksums=True).save(to_save(root, blocks), DEADLINE)
    for block in damaged:
        flip(uri_of(root, block), byte)
    items = to_load(root, blocks, saved)
    engine = new_engine()  # whether it tells checksums of its own does not matter
    results = engine.load(items, DEADLINE)
    assert failures(results) == [Failure.CORRUPT if block in damaged else None for block in blocks]
    assert [bytes(item.buffers[0]) == content(block) for item, block in zip(items, blocks, strict=True)] == [
        block not in damaged for block in blocks
    ]
    assert {result.moved_bytes for result in results} == {SIZE}
    assert f"{saved[6].checksum:016x}" in results[6].reason
    loads = engine.statistics().storages[STORAGE].loads
    assert (loads.count(Failure.CORRUPT).items, loads.count().items) == (4, 16)
    assert loads.count(Failure.CORRUPT).bytes == 4 * SIZE


def test_bytes_of_another_block_and_holes_are_corrupt(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    """What a late writer, a hole punched for a deletion, or a mixed-up disk leaves."""
    engine = new_engine(checksums=True)
    saved = engine.save(to_save(root, range(8)), DEADLINE)
    path = Path(uri_of(root, 1).path)
    data = path.read_bytes()
    path.write_bytes(data[:SIZE] + data[2 * SIZE : 3 * SIZE] + bytes(SIZE) + data[3 * SIZE :])
    results = engine.load(to_load(root, [1, 2, 4], [saved[1], saved[2], saved[4]]), DEADLINE)
    assert failures(results) == [Failure.CORRUPT, Failure.CORRUPT, None]


def test_items_without_a_checksum_are_not_verified(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    engine = new_engine(checksums=True)
    saved = engine.save(to_save(root, range(6)), DEADLINE)
    for block in range(6):
        flip(uri_of(root, block), 5)
    items = to_load(root, range(6), saved)
    for block in (0, 3, 5):
        items[block] = replace(items[block], checksum=0)
    expected = [None, Failure.CORRUPT, Failure.CORRUPT, None, Failure.CORRUPT, None]
    assert failures(engine.load(items, DEADLINE)) == expected


def test_a_range_of_a_part_cannot_be_verified(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    engine = new_engine(checksums=True)
    (saved,) = engine.save(to_save(root, [1]), DEADLINE)
    buffer = memoryview(bytearray(100))
    items = [TransferItem(uri_of(root, 1), [buffer], 50, saved.checksum)]
    assert failures(engine.load(items, DEADLINE)) == [None]
    assert bytes(buffer) == content(1)[50:150]


def test_what_is_missing_is_lost_and_not_corrupt(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    engine = new_engine(checksums=True)
    saved = engine.save(to_save(root, [0, 3]), DEADLINE)
    Path(uri_of(root, 0).path).unlink()
    assert failures(engine.load(to_load(root, [0, 3], saved), DEADLINE)) == [Failure.LOST, None]


def test_corrupt_bytes_are_a_sign_of_life_of_their_storage() -> None:
    """Three failures in a row open the breaker; a storage that answers is not left alone, whatever it answers."""
    storage = HeldStorage()
    engine = TransferEngine({(SCHEME, "s"): storage})

    def load(failure: Failure | None) -> list[Failure | None]:
        storage.always = failure
        return failures(engine.load([replace(held_item("/1"), checksum=1)], DEADLINE))

    expected = [Failure.ERROR, Failure.ERROR, None, Failure.ERROR, Failure.ERROR, None, Failure.ERROR]
    assert [load(failure) for failure in expected] == [[failure or Failure.CORRUPT] for failure in expected]
    assert engine.statistics().storages["s"].loads.breaker is BreakerState.CLOSED
    engine.close()


# ---- Loading some layers or heads of stored blocks: the same bytes as slicing the whole, and nothing beside the ----

PART_BYTES = 64
ORDERS = [".".join(order) for order in permutations(AXES)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    folder.mkdir()
    return folder


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransferEngine]:
    engine = TransferEngine({("file", STORAGE): FileMover({STORAGE: str(tmp_path)})}, request.param)
    yield engine
    engine.close()


def uri(path: Path, size: int, slot: int | None = None) -> LocationUri:
    return LocationUri("file", STORAGE, str(path), size, slot)


@st.composite
def formats(draw: st.DrawFn) -> StoredFormat:
    shards = draw(st.integers(1, 2))
    return StoredFormat(
        layer_ends=tuple(accumulate(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))),
        heads=shards * draw(st.integers(1, 3)),
        head_shards=shards,
        kv_parts=draw(st.sampled_from([1, 2])),
        head_dim=draw(st.integers(1, 4)),
        block_tokens=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        order=draw(st.sampled_from(ORDERS)),
    )


def sliced(stored: StoredFormat, whole: np.ndarray, wanted: Shard) -> bytes:
    """Return a shard of the whole model's array, cut out by its axes."""
    spans = {"layer": wanted.layers, "head": wanted.heads}
    where = tuple(slice(*spans[axis]) if axis in spans else slice(None) for axis in stored.axes)
    return whole[where].tobytes()


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reading_layer_ranges_equals_slicing_the_whole(
    data: st.DataObject, engine: TransferEngine, folder: Path
) -> None:
    stored = data.draw(formats())
    first = data.draw(st.integers(0, stored.layers - 1))
    wanted = Shard(IndexRange(first, data.draw(st.integers(first + 1, stored.layers))), stored.model.heads)
    item = np.dtype((np.void, item_bytes(stored.dtype)))
    shape = tuple(stored.shape(stored.model).values())
    whole = np.frombuffer(os.urandom(math.prod(shape) * item.itemsize), item).reshape(shape)
    slot = data.draw(st.sampled_from([None, 2]))
    for spec in stored.specs:
        before = os.urandom((slot or 0) * spec.size_bytes)
        (folder / spec.name).write_bytes(before + sliced(stored, whole, spec.shard) + os.urandom(7))
    items: list[TransferItem] = []
    read: list[tuple[Shard, bytearray]] = []
    for part in stored.reads(wanted):
        memory = bytearray(stored.shard_bytes(part.shard))
        read.append((part.shard, memory))
        items += range_items(uri(folder / part.spec.name, part.spec.size_bytes, slot), part.ranges, memoryview(memory))
    assert failures(engine.load(data.draw(st.permutations(items)), DEADLINE)) == [None] * len(items)
    for shard, memory in read:
        assert memory == sliced(stored, whole, shard)


@given(
    stored=st.integers(0, PART_BYTES + 8),
    ranges=st.lists(st.tuples(st.integers(-1, PART_BYTES), st.integers(0, PART_BYTES)), min_size=1, max_size=6),
)
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_range_ends_as_if_it_was_alone_and_never_leaves_the_part(
    engine: TransferEngine, folder: Path, stored: int, ranges: list[tuple[int, int]]
) -> None:
    """Ranges outside the part are refused, whatever the file has there; what a short file has not is lost."""
    data = os.urandom(stored)
    (folder / "f").write_bytes(data)
    buffers = [bytearray(count) for _, count in ranges]
    items = [
        TransferItem(uri(folder / "f", PART_BYTES), [memoryview(buffer)], start)
        for (start, _), buffer in zip(ranges, buffers, strict=True)
    ]
    for (start, count), buffer, result in zip(ranges, buffers, engine.load(items, DEADLINE), strict=True):
        if start < 0 or not count or start + count > PART_BYTES:
            assert result.failure is Failure.REFUSED
            assert "start is" in result.reason
        elif start + count > stored:
            assert result.failure is Failure.LOST
        else:
            assert (result.failure, result.moved_bytes, buffer) == (None, count, data[start : start + count])


@given(starts=st.permutations(range(0, PART_BYTES, 8)))
def test_ranges_of_a_part_reach_the_storage_in_order_however_they_were_asked_for(starts: list[int]) -> None:
    place = uri(Path("/r/c/f"), PART_BYTES)
    items = [TransferItem(place, [memoryview(bytearray(8))], start) for start in starts]
    [group] = group_items(items, range(len(items)), 1 << 20)
    assert [item.offset for item in group.items] == list(range(0, PART_BYTES, 8))
    assert [items[position] for position in group.positions] == group.items


def test_a_range_counts_as_the_bytes_that_it_moves(engine: TransferEngine, folder: Path) -> None:
    (folder / "f").write_bytes(bytes(PART_BYTES))
    engine.load([TransferItem(uri(folder / "f", PART_BYTES), [memoryview(bytearray(5))], 0)], DEADLINE)
    assert engine.statistics().storages[STORAGE].loads.count().bytes == 5


def test_a_part_is_saved_whole(engine: TransferEngine, folder: Path) -> None:
    (folder / "f").write_bytes(b"f" * PART_BYTES)
    for start, length in ((0, PART_BYTES), (0, 8), (8, 8)):
        item = TransferItem(uri(folder / "f", PART_BYTES), [memoryview(bytearray(length))], start)
        [result] = engine.save([item], DEADLINE)
        assert result.failure is Failure.REFUSED
        assert "saved whole" in result.reason
    assert (folder / "f").read_bytes() == b"f" * PART_BYTES


def test_without_a_start_memory_must_have_the_size_of_the_part(engine: TransferEngine, folder: Path) -> None:
    (folder / "f").write_bytes(bytes(PART_BYTES))
    items = [
        TransferItem(uri(folder / "f", PART_BYTES), [memoryview(bytearray(length))])
        for length in (PART_BYTES - 1, PART_BYTES)
    ]
    assert failures(engine.load(items, DEADLINE)) == [Failure.REFUSED, None]


def test_ranges_that_are_all_of_a_part_are_loaded_as_the_part() -> None:
    place = uri(Path("/r/c/f"), PART_BYTES)
    [item] = range_items(place, [(0, PART_BYTES)], memoryview(bytearray(PART_BYTES)), checksum=7)
    assert (item.start, item.checksum) == (None, 7)
    items = range_items(place, [(0, 8), (16, 8)], memoryview(bytearray(16)), checksum=7)
    assert [(item.start, item.checksum) for item in items] == [(0, 0), (16, 0)]


@pytest.mark.parametrize(("ranges", "room"), [([(0, 65)], 65), ([(-1, 4)], 4), ([(60, 5)], 5), ([(0, 0)], 0)])
def test_ranges_outside_the_part_are_named(ranges: list[tuple[int, int]], room: int) -> None:
    with pytest.raises(InvalidArgumentError, match="must lie in the part's 64"):
        range_items(uri(Path("/r/c/f"), PART_BYTES), ranges, memoryview(bytearray(room)))


def test_memory_of_another_size_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="memory has 9 bytes, the ranges have 8"):
        range_items(uri(Path("/r/c/f"), PART_BYTES), [(0, 8)], memoryview(bytearray(9)))
