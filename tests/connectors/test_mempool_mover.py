"""The mover of memory pools: refused and lost items, and that stale writers and readers are harmless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_parts import (
    CAPACITY,
    DEADLINE,
    MIB,
    NODE,
    STORAGE,
    access_at,
    bytes_of,
    content,
    load_item,
    load_one,
    mover_at,
    save_item,
    save_one,
    uri,
)
from thoroughness import examples

from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from kvcm.connectors.transfer.breaker import BreakerState
from kvcm.connectors.transfer.mempool import AttachedPool, MemPoolMover
from kvcm.connectors.transfer.pool_segment import PoolAccess, create_segment, open_segment, segment_path, stamps_of
from kvcm.model.storages import PAGE_BYTES, NfsStorageSpec, StorageConfig, TairMemPoolStorageSpec, extent_bytes
from kvcm.model.uri import LocationUri


@pytest.fixture
def mover(pool_directory: Path) -> MemPoolMover:
    return mover_at(pool_directory)


def is_failure(result: TransferResult, failure: Failure, reason: str) -> bool:
    return result.failure is failure and reason in result.reason and not result.ok


@pytest.mark.parametrize("size", [1, 100, PAGE_BYTES, PAGE_BYTES + 1, 100_000, MIB])
def test_a_saved_item_is_loaded(mover: MemPoolMover, size: int) -> None:
    assert save_one(mover, 0, size, 5) == TransferResult(True, size)
    assert load_one(mover, 0, size, 5) == TransferResult(True, size)


def test_pieces_of_memory_of_any_kind_are_moved(mover: MemPoolMover) -> None:
    whole = content(5, 0, 200_000)
    pieces = [memoryview(whole[:0]), memoryview(whole[:3]), memoryview(whole[3:99_999]), memoryview(whole[99_999:])]
    shaped = memoryview(whole).cast("B", (400, 500))
    for buffers in (pieces, [shaped]):
        assert mover.save([TransferItem(uri(0, len(whole), 5), buffers)], DEADLINE)[0].ok
        filled = [memoryview(bytearray(view.nbytes)) for view in pieces]
        item = TransferItem(uri(0, len(whole), 5), filled)
        assert mover.load([item], DEADLINE)[0].ok
        assert bytes_of(item) == whole


def test_a_part_is_loaded_in_pieces_and_saved_whole(mover: MemPoolMover) -> None:
    assert save_one(mover, 0, 100_000, 5).ok
    for start, length in ((0, 10), (70_001, 29_999), (5_000, 50_000)):
        item = TransferItem(uri(0, 100_000, 5), [memoryview(bytearray(length))], start)
        assert mover.load([item], DEADLINE) == [TransferResult(True, length)]
        assert bytes_of(item) == content(5, 0, 100_000)[start : start + length]
        assert is_failure(mover.save([item], DEADLINE)[0], Failure.REFUSED, "saved whole")
    for start, length in ((-1, 10), (99_999, 2), (0, 0)):
        item = TransferItem(uri(0, 100_000, 5), [memoryview(bytearray(length))], start)
        assert is_failure(mover.load([item], DEADLINE)[0], Failure.REFUSED, f"buffers hold {length} bytes")


@pytest.mark.parametrize("size", [1000, 100_000, 300_000])
def test_memory_that_is_not_contiguous_is_refused(mover: MemPoolMover, size: int) -> None:
    assert save_one(mover, 0, size, 5).ok
    item = TransferItem(uri(0, size, 5), [memoryview(bytearray(2 * size))[::2]])
    for results in (mover.load([item], DEADLINE), mover.save([item], DEADLINE)):
        assert is_failure(results[0], Failure.REFUSED, "contiguous")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (uri(0, 100, 5, "node-b"), "node_id is 'node-b', this node is 'node-a'"),
        (LocationUri("pace", STORAGE, "/0", 100, node_id=NODE), "range_id is None"),
        (uri(0, 100, 0), "range_id is 0"),
        (uri(0, 100, 1 << 64), "range_id is 18446744073709551616"),
        (uri(8, 100, 5), "must begin at a page of 4096"),
        (uri(CAPACITY, 100, 5), f"end within {CAPACITY}"),
        (uri(CAPACITY - PAGE_BYTES, 2 * PAGE_BYTES, 5), f"end within {CAPACITY}"),
        (uri(10**19 // PAGE_BYTES * PAGE_BYTES, 100, 5), f"end within {CAPACITY}"),
        (uri(MIB - PAGE_BYTES, 2 * PAGE_BYTES, 5), f"over the border of two chunks of {MIB}"),
        (uri(0, MIB + 1, 5), f"over the border of two chunks of {MIB}"),
        (LocationUri("pace", STORAGE, "/x", 100, node_id=NODE, range_id=5), "invalid literal"),
    ],
)
def test_what_no_manager_hands_out_is_refused_both_ways(mover: MemPoolMover, wrong: LocationUri, reason: str) -> None:
    item = TransferItem(wrong, [memoryview(bytearray(wrong.size))])
    for results in (mover.save([item], DEADLINE), mover.load([item], DEADLINE)):
        assert is_failure(results[0], Failure.REFUSED, reason), results


def test_memory_of_another_length_and_memory_that_cannot_be_filled_are_refused(mover: MemPoolMover) -> None:
    for size in (99, 101):
        item = TransferItem(uri(0, 100, 5), [memoryview(bytearray(size))])
        for results in (mover.save([item], DEADLINE), mover.load([item], DEADLINE)):
            assert is_failure(results[0], Failure.REFUSED, f"buffers hold {size} bytes")
    assert save_one(mover, 0, 100, 5).ok
    frozen = TransferItem(uri(0, 100, 5), [memoryview(bytes(100))])
    assert is_failure(mover.load([frozen], DEADLINE)[0], Failure.REFUSED, "read-only")


def test_a_late_writer_is_refused_and_a_late_reader_misses(mover: MemPoolMover) -> None:
    assert save_one(mover, 0, 3 * PAGE_BYTES, 5).ok
    assert save_one(mover, 2 * PAGE_BYTES, 2 * PAGE_BYTES, 6).ok  # one page of the first
    assert is_failure(save_one(mover, 0, 3 * PAGE_BYTES, 5), Failure.REFUSED, "newer allocation")
    assert is_failure(load_one(mover, 0, 3 * PAGE_BYTES, 5), Failure.LOST, "other bytes")
    assert load_one(mover, 2 * PAGE_BYTES, 2 * PAGE_BYTES, 6).ok


def test_a_late_writer_among_neighbours_keeps_none_of_them_from_being_written(mover: MemPoolMover) -> None:
    assert save_one(mover, PAGE_BYTES, PAGE_BYTES, 8).ok
    results = mover.save([save_item(page * PAGE_BYTES, PAGE_BYTES, 7) for page in range(3)], DEADLINE)
    assert [result.failure for result in results] == [None, Failure.REFUSED, None]
    assert load_one(mover, PAGE_BYTES, PAGE_BYTES, 8).ok


def test_locked_pages_are_busy_at_once_for_them_alone(pool_directory: Path, mover: MemPoolMover) -> None:
    segment = access_at(pool_directory).find_or_create()
    with segment.write_lock() as claim:
        assert claim.lock(PAGE_BYTES, PAGE_BYTES)
        results = mover.save([save_item(page * PAGE_BYTES, PAGE_BYTES, 7) for page in range(3)], DEADLINE)
        assert [result.failure for result in results] == [None, Failure.BUSY, None]
        assert "locked" in results[1].reason
    assert save_one(mover, PAGE_BYTES, PAGE_BYTES, 7).ok


def test_nothing_is_begun_after_the_deadline(mover: MemPoolMover) -> None:
    assert save_one(mover, 0, 100, 5).ok
    for results in (mover.load([load_item(0, 100, 5)], 0.0), mover.save([save_item(0, 100, 6)], 0.0)):
        assert results[0].failure is Failure.CANCELLED
    assert load_one(mover, 0, 100, 5).ok


def test_the_next_save_makes_a_removed_pool_again(mover: MemPoolMover, pool_directory: Path) -> None:
    assert save_one(mover, 0, 100, 5).ok
    before = mover.attached
    (pool_directory / "segment").unlink()
    assert is_failure(load_one(mover, 0, 100, 5), Failure.LOST, "is not there")
    assert mover.attached is None
    assert save_one(mover, PAGE_BYTES, 100, 6).ok
    assert is_failure(load_one(mover, 0, 100, 5), Failure.LOST, "other bytes")
    assert load_one(mover, PAGE_BYTES, 100, 6).ok
    after = mover.attached
    assert before is not None
    assert after is not None
    assert after.generation != before.generation


def test_a_pool_that_others_made_again_is_noticed(mover: MemPoolMover, pool_directory: Path) -> None:
    assert save_one(mover, 0, 100, 5).ok
    (pool_directory / "segment").unlink()
    other = mover_at(pool_directory)
    assert save_one(other, 0, 100, 6).ok
    assert load_one(mover, 0, 100, 6).ok
    assert is_failure(save_one(mover, 0, 100, 5), Failure.REFUSED, "newer allocation")


def test_a_pool_replaced_during_a_save_is_no_success(
    mover: MemPoolMover, pool_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = access_at(pool_directory).find_or_create()
    copy_in = type(segment).copy_in

    def replaced(self: object, offset: int, views: list[memoryview]) -> None:
        (pool_directory / "segment").unlink()
        copy_in(self, offset, views)  # type: ignore[arg-type]

    monkeypatch.setattr(type(segment), "copy_in", replaced)
    assert is_failure(save_one(mover, 0, 100, 5), Failure.ERROR, "replaced meanwhile")


def test_an_engine_that_must_not_make_it_waits_for_the_agent(pool_directory: Path) -> None:
    mover = mover_at(pool_directory, creates=False)
    assert is_failure(save_one(mover, 0, 100, 5), Failure.ERROR, "is the host agent running?")
    assert is_failure(load_one(mover, 0, 100, 5), Failure.LOST, "not there")
    create_segment(pool_directory / "segment", CAPACITY, lambda: 3)
    assert save_one(mover, 0, 100, 5).ok


def test_memory_that_cannot_be_used_is_an_error_and_never_lost(mover: MemPoolMover, pool_directory: Path) -> None:
    (pool_directory / "segment").write_bytes(b"something else")
    (pool_directory / "segment").chmod(0o600)
    for result in (load_one(mover, 0, 100, 5), save_one(mover, 0, 100, 5)):
        assert is_failure(result, Failure.ERROR, "does not begin as")


def test_a_pool_that_does_not_fit_is_an_error_until_there_is_space(pool_directory: Path) -> None:
    mover = mover_at(pool_directory, 1 << 50)
    assert is_failure(save_one(mover, 0, 100, 5), Failure.ERROR, "free of")
    assert is_failure(load_one(mover, 0, 100, 5), Failure.LOST, "not there")


def test_a_segment_cut_under_the_mapping_is_noticed(mover: MemPoolMover, pool_directory: Path) -> None:
    assert save_one(mover, 0, 100, 5).ok
    with (pool_directory / "segment").open("r+b") as file:
        file.truncate(3 * MIB)
    assert is_failure(load_one(mover, 32 * MIB, 100, 5), Failure.ERROR, "its header says")


Operation = tuple[str, int, int, int]
places = st.tuples(
    st.sampled_from(["save", "load"]), st.integers(0, 7), st.integers(1, 4 * PAGE_BYTES), st.integers(1, 6)
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(places, min_size=1, max_size=4), max_size=30))
def test_against_a_plain_model_of_pages(pool_directory: Path, calls: list[list[Operation]]) -> None:
    """Invariant 5 as an engine sees it: bytes of an allocation are read whole, or not at all."""
    (pool_directory / "segment").unlink(missing_ok=True)
    mover = mover_at(pool_directory, 4 * MIB)
    stamps = dict.fromkeys(range(16), 0)
    for call in calls:
        for kind, page, size, stamp in call:
            pages = range(page, page + extent_bytes(size) // PAGE_BYTES)
            if kind == "save":
                result = save_one(mover, page * PAGE_BYTES, size, stamp)
                assert result.ok == (max(stamps[each] for each in pages) <= stamp)
                if result.ok:
                    stamps.update(dict.fromkeys(pages, stamp))
                continue
            item = load_item(page * PAGE_BYTES, size, stamp)
            (result,) = mover.load([item], DEADLINE)
            assert result.ok == all(stamps[each] == stamp for each in pages)
    segment = mover._access.find()
    if segment is not None:
        assert all(
            segment.has_stamps(page * PAGE_BYTES, stamps_of(stamp, PAGE_BYTES)) for page, stamp in stamps.items()
        )


# ---- Memory pools in an engine: which it has, when their memory is looked for and made, and what happens withou ----


@pytest.fixture(autouse=True)
def _in_a_cluster(node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCM_CLUSTER_ID", "c0ffee")


@pytest.fixture
def path(pool_directory: Path) -> Path:
    return segment_path(pool_directory, "c0ffee", STORAGE)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    engine = TransferEngine.for_storages([pool(STORAGE, NODE)], 2)
    yield engine
    engine.close()


def pool(name: str, node_id: str, **values: object) -> StorageConfig:
    return StorageConfig(name, TairMemPoolStorageSpec(node_id=node_id, capacity_bytes=CAPACITY, **values))  # type: ignore[arg-type]


def test_an_engine_has_the_pools_of_its_node_and_says_which(pool_directory: Path) -> None:
    across_hosts = StorageConfig("wide", TairMemPoolStorageSpec(domain="somewhere"))
    nfs = StorageConfig("nfs", NfsStorageSpec(root_path="/nowhere"))
    engine = TransferEngine.for_storages([pool(STORAGE, NODE), pool("far", "node-b"), across_hosts, nfs])
    try:
        (attached,) = engine.pools()
        assert attached == AttachedPool(STORAGE, NODE, attached.generation, CAPACITY)
        assert [path.name for path in pool_directory.iterdir()] == ["kvcm-c0ffee+pool"]
        assert engine.save([save_item(0, 9_000, 5)], DEADLINE)[0].ok
        (far,) = engine.load([TransferItem(LocationUri("pace", "far", "/0", 1, None, None, "node-b", 5), [])], DEADLINE)
        assert far.failure is Failure.REFUSED
        assert "no storage pace://far here" in far.reason
    finally:
        engine.close()


def test_an_engine_is_made_before_memory_of_pools(engine: TransferEngine, pool_directory: Path, path: Path) -> None:
    assert engine.has_pools
    assert list(pool_directory.iterdir()) == []
    (attached,) = engine.pools()
    assert path.exists()
    other = TransferEngine.for_storages([pool(STORAGE, NODE)])
    assert [mover.attached for mover in other._pools] == [attached]  # memory that is there is mapped at once
    other.close()


def test_a_pool_is_used_as_soon_as_it_can_be(
    pool_directory: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines save only to reported pools, so no save would ever try an unreported one again."""
    path.write_bytes(b"something else")
    path.chmod(0o600)
    engine = TransferEngine.for_storages([pool(STORAGE, NODE)])
    for _ in range(3):
        assert engine.pools() == []
    assert caplog.text.count("storage pool is not used until this is resolved") == 1
    path.unlink()
    assert [each.storage for each in engine.pools()] == [STORAGE]
    engine.close()


def test_memory_that_is_lost_to_an_engine_that_only_loads_is_made_again(engine: TransferEngine, path: Path) -> None:
    (before,) = engine.pools()
    path.unlink()
    assert engine.load([load_item(0, 100, 5)], DEADLINE)[0].failure is Failure.LOST
    (after,) = engine.pools()
    assert after.generation != before.generation


def test_a_failed_pool_is_tried_once_a_second(pool_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    access = PoolAccess(pool_directory / "nowhere" / "segment", CAPACITY, clock=clock.now)
    mover = MemPoolMover(STORAGE, NODE, CAPACITY, access)
    assert mover.attach() is None
    assert "storage pool is not used until this is resolved" in caplog.text
    (pool_directory / "nowhere").mkdir()
    assert mover.attach() is None  # remembered for a second
    assert mover.save([save_item(0, 100, 5)], DEADLINE)[0].failure is Failure.ERROR
    clock.time += 1.0
    assert mover.attach() is not None
    assert save_one(mover, 0, 100, 5).ok


def test_locked_pages_do_not_have_the_pool_left_alone(engine: TransferEngine, path: Path) -> None:
    """One writer that is stopped must not keep others from saving elsewhere."""
    engine.pools()
    segment = open_segment(path, CAPACITY)
    assert segment is not None
    with segment.write_lock() as claim:
        assert claim.lock(0, PAGE_BYTES)
        for _ in range(10):
            assert engine.save([save_item(0, 100, 5)], DEADLINE)[0].failure is Failure.BUSY
        assert engine.statistics().storages[STORAGE].saves.breaker is BreakerState.CLOSED
        assert engine.save([save_item(PAGE_BYTES, 100, 5)], DEADLINE)[0].ok
