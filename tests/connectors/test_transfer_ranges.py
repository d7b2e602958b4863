"""Loading some layers or heads of stored blocks: the same bytes as slicing the whole, and nothing beside the part."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import accumulate, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_parts import DEADLINE, failures

from connectors.layout import Shard, Span, StoredFormat
from connectors.layout.dtypes import item_bytes
from connectors.layout.stored import AXES
from connectors.transfer import Failure, FileMover, TransferEngine, TransferItem
from connectors.transfer.ranges import range_items
from connectors.transfer.work import cut
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri

STORAGE = "nfs_01"
SIZE = 64
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
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reading_layer_ranges_equals_slicing_the_whole(
    data: st.DataObject, engine: TransferEngine, folder: Path
) -> None:
    stored = data.draw(formats())
    first = data.draw(st.integers(0, stored.layers - 1))
    wanted = Shard(Span(first, data.draw(st.integers(first + 1, stored.layers))), stored.model.heads)
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
    stored=st.integers(0, SIZE + 8),
    ranges=st.lists(st.tuples(st.integers(-1, SIZE), st.integers(0, SIZE)), min_size=1, max_size=6),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_range_ends_as_if_it_was_alone_and_never_leaves_the_part(
    engine: TransferEngine, folder: Path, stored: int, ranges: list[tuple[int, int]]
) -> None:
    """Ranges outside the part are refused, whatever the file has there; what a short file has not is lost."""
    data = os.urandom(stored)
    (folder / "f").write_bytes(data)
    buffers = [bytearray(count) for _, count in ranges]
    items = [
        TransferItem(uri(folder / "f", SIZE), [memoryview(buffer)], start)
        for (start, _), buffer in zip(ranges, buffers, strict=True)
    ]
    for (start, count), buffer, result in zip(ranges, buffers, engine.load(items, DEADLINE), strict=True):
        if start < 0 or not count or start + count > SIZE:
            assert result.failure is Failure.REFUSED
            assert "start is" in result.reason
        elif start + count > stored:
            assert result.failure is Failure.LOST
        else:
            assert (result.failure, result.moved_bytes, buffer) == (None, count, data[start : start + count])


@given(starts=st.permutations(range(0, SIZE, 8)))
def test_ranges_of_a_part_reach_the_storage_in_order_however_they_were_asked_for(starts: list[int]) -> None:
    place = uri(Path("/r/c/f"), SIZE)
    items = [TransferItem(place, [memoryview(bytearray(8))], start) for start in starts]
    [group] = cut(items, range(len(items)), 1 << 20)
    assert [item.offset for item in group.items] == list(range(0, SIZE, 8))
    assert [items[position] for position in group.positions] == group.items


def test_a_range_counts_as_the_bytes_that_it_moves(engine: TransferEngine, folder: Path) -> None:
    (folder / "f").write_bytes(bytes(SIZE))
    engine.load([TransferItem(uri(folder / "f", SIZE), [memoryview(bytearray(5))], 0)], DEADLINE)
    assert engine.statistics().storages[STORAGE].loads.count().bytes == 5


def test_a_part_is_saved_whole(engine: TransferEngine, folder: Path) -> None:
    (folder / "f").write_bytes(b"f" * SIZE)
    for start, length in ((0, SIZE), (0, 8), (8, 8)):
        item = TransferItem(uri(folder / "f", SIZE), [memoryview(bytearray(length))], start)
        [result] = engine.save([item], DEADLINE)
        assert result.failure is Failure.REFUSED
        assert "saved whole" in result.reason
    assert (folder / "f").read_bytes() == b"f" * SIZE


def test_without_a_start_memory_must_have_the_size_of_the_part(engine: TransferEngine, folder: Path) -> None:
    (folder / "f").write_bytes(bytes(SIZE))
    items = [TransferItem(uri(folder / "f", SIZE), [memoryview(bytearray(length))]) for length in (SIZE - 1, SIZE)]
    assert failures(engine.load(items, DEADLINE)) == [Failure.REFUSED, None]


def test_ranges_that_are_all_of_a_part_are_loaded_as_the_part() -> None:
    place = uri(Path("/r/c/f"), SIZE)
    [item] = range_items(place, [(0, SIZE)], memoryview(bytearray(SIZE)), checksum=7)
    assert (item.start, item.checksum) == (None, 7)
    items = range_items(place, [(0, 8), (16, 8)], memoryview(bytearray(16)), checksum=7)
    assert [(item.start, item.checksum) for item in items] == [(0, 0), (16, 0)]


@pytest.mark.parametrize(("ranges", "room"), [([(0, 65)], 65), ([(-1, 4)], 4), ([(60, 5)], 5), ([(0, 0)], 0)])
def test_ranges_outside_the_part_are_named(ranges: list[tuple[int, int]], room: int) -> None:
    with pytest.raises(InvalidArgumentError, match="must lie in the part's 64"):
        range_items(uri(Path("/r/c/f"), SIZE), ranges, memoryview(bytearray(room)))


def test_memory_of_another_size_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="memory has 9 bytes, the ranges have 8"):
        range_items(uri(Path("/r/c/f"), SIZE), [(0, 8)], memoryview(bytearray(9)))
