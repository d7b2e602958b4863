"""Memory pools in an engine: which it has, when their memory is looked for and made, and what happens without it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_parts import (
    CAPACITY,
    DEADLINE,
    NODE,
    PAGE_BYTES,
    STORAGE,
    bytes_of,
    content,
    load_item,
    save_item,
    save_one,
)

from connectors.node import NodeSettings
from connectors.transfer import Failure, TransferEngine, TransferItem
from connectors.transfer.breaker import BreakerState
from connectors.transfer.mempool import AttachedPool, MemPoolMover
from connectors.transfer.pool_making import open_segment, segment_path
from kvcm.model.storages import NfsStorageSpec, StorageConfig, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri

SECONDS = 30.0


@pytest.fixture(autouse=True)
def _node(pool_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCM_NODE_ID", NODE)
    monkeypatch.setenv("KVCM_POOL_DIRECTORY", str(pool_directory))
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
        items = [save_item(index * 4 * PAGE_BYTES, 9_000, 5) for index in reversed(range(300))]
        assert all(result.ok for result in engine.save(items, DEADLINE))
        loads = [load_item(index * 4 * PAGE_BYTES, 9_000, 5) for index in range(300)]
        assert all(result.ok for result in engine.load(loads, DEADLINE))
        assert all(bytes_of(item) == content(5, item.uri.offset, 9_000) for item in loads)
        (far,) = engine.load([TransferItem(LocationUri("pace", "far", "/0", 1, None, None, "node-b", 5), [])], DEADLINE)
        assert far.failure is Failure.REFUSED
        assert "no storage pace://far here" in far.reason
        assert engine.statistics().storages[STORAGE].loads.count().items == 300
    finally:
        engine.close()


def test_an_engine_is_made_without_waiting_for_memory_which_its_pools_make(
    engine: TransferEngine, pool_directory: Path, path: Path
) -> None:
    assert engine.has_pools
    assert list(pool_directory.iterdir()) == []
    (attached,) = engine.pools()
    assert path.exists()
    other = TransferEngine.for_storages([pool(STORAGE, NODE)])
    assert [mover.attached for mover in other._pools] == [attached]  # memory that is there is mapped at once
    other.close()


def test_a_pool_that_could_not_be_used_is_had_as_soon_as_it_can(
    pool_directory: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody saves to a pool that was not told of, so no save would ever try again."""
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


def test_making_that_failed_is_tried_again_at_most_once_a_second(
    pool_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = NodeSettings(NODE, pool_directory / "nowhere")
    mover = MemPoolMover.for_storages([pool(STORAGE, NODE)], node)
    assert mover is not None
    assert mover.attach() is None
    assert "storage pool is not used until this is resolved" in caplog.text
    (pool_directory / "nowhere").mkdir()
    assert mover.attach() is None  # remembered for a second
    assert mover.save([save_item(0, 100, 5)], DEADLINE)[0].failure is Failure.ERROR
    deadline = time.monotonic() + SECONDS
    while mover.attach() is None:
        assert time.monotonic() < deadline, "it is not tried again"
    assert save_one(mover, 0, 100, 5).ok


def test_locked_pages_do_not_have_the_pool_left_alone(engine: TransferEngine, path: Path) -> None:
    """One writer that is stopped must not keep others from saving elsewhere."""
    engine.pools()
    segment = open_segment(path, CAPACITY)
    assert segment is not None
    with segment.claim() as claim:
        assert claim.lock(0, PAGE_BYTES)
        for _ in range(10):
            assert engine.save([save_item(0, 100, 5)], DEADLINE)[0].failure is Failure.BUSY
        assert engine.statistics().storages[STORAGE].saves.breaker is BreakerState.CLOSED
        assert engine.save([save_item(PAGE_BYTES, 100, 5)], DEADLINE)[0].ok
