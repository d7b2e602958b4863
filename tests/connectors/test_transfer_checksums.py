"""Checksums in the transfer engine: reported for saved bytes, compared with loaded bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from transfer_parts import DEADLINE, SCHEME, HeldStorage, failures
from transfer_parts import item as held_item

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
def new_engine(root: Path) -> Iterator[Callable[..., TransferEngine]]:
    """Make engines over one directory; all are closed at the end."""

    def new(**options: bool) -> TransferEngine:
        mover = FileMover({STORAGE: str(root)})
        return engines.enter_context(closing(TransferEngine({("file", STORAGE): mover}, **options)))

    with ExitStack() as engines:
        yield new


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


def test_a_digest_of_0_is_reported_as_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 means that there is none; no bytes with that digest are known."""

    class Zero:
        def update(self, _data: memoryview) -> None: ...

        def intdigest(self) -> int:
            return 0

    monkeypatch.setattr(mover, "xxh3_64_intdigest", lambda _data: 0)
    monkeypatch.setattr(mover, "xxh3_64", Zero)
    assert [checksum_of([memoryview(b"x")] * count) for count in (1, 2)] == [1, 1]


# ── Saves ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_save_reports_the_checksum_of_what_was_given(new_engine: Callable[..., TransferEngine], root: Path) -> None:
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


def test_without_checksums_none_is_reported(new_engine: Callable[..., TransferEngine], root: Path) -> None:
    results = new_engine(checksums=False).save(to_save(root, range(4)), DEADLINE)
    assert [result.checksum for result in results] == [0] * 4
    assert results[0] is moved(SIZE)  # no result is allocated per item


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


def test_an_item_that_was_not_saved_has_none(new_engine: Callable[..., TransferEngine], root: Path) -> None:
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
def test_one_bit_makes_an_item_corrupt(new_engine: Callable[..., TransferEngine], root: Path, byte: int) -> None:
    blocks, damaged = range(20), {6, 9, 10, 19}  # alone in a file and packed, the first and the last of a file
    saved = new_engine(checksums=True).save(to_save(root, blocks), DEADLINE)
    for block in damaged:
        flip(uri_of(root, block), byte)
    items = to_load(root, blocks, saved)
    engine = new_engine()  # whether it reports checksums of its own does not matter
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


def test_a_missing_item_is_lost_and_not_corrupt(new_engine: Callable[..., TransferEngine], root: Path) -> None:
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


def test_ranges_that_are_all_of_a_part_are_loaded_as_the_part() -> None:
    place = uri(Path("/r/c/f"), PART_BYTES)
    [item] = range_items(place, [(0, PART_BYTES)], memoryview(bytearray(PART_BYTES)), checksum=7)
    assert (item.start, item.checksum) == (None, 7)
    memory = bytearray(16)
    items = range_items(place, [(0, 8), (16, 8)], memoryview(memory), checksum=7)
    assert [(item.start, item.checksum) for item in items] == [(0, 0), (16, 0)]
    for item, letter in zip(items, (b"a", b"b"), strict=True):
        item.buffers[0][:] = letter * 8
    assert memory == b"a" * 8 + b"b" * 8


@pytest.mark.parametrize(("ranges", "space"), [([(0, 65)], 65), ([(-1, 4)], 4), ([(60, 5)], 5), ([(0, 0)], 0)])
def test_ranges_outside_the_part_are_named(ranges: list[tuple[int, int]], space: int) -> None:
    with pytest.raises(InvalidArgumentError, match="must lie in the part's 64"):
        range_items(uri(Path("/r/c/f"), PART_BYTES), ranges, memoryview(bytearray(space)))


def test_memory_of_another_size_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="memory has 9 bytes, the ranges have 8"):
        range_items(uri(Path("/r/c/f"), PART_BYTES), [(0, 8)], memoryview(bytearray(9)))
