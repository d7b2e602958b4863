"""Memory pools whose memory is removed, cut, emptied or locked under engines that use it.

Always a miss or a refused write, in time; and all is well again when the fault is over. What every call must hold is
asserted in corruption_site.py. Single calls of the mover under the same faults: tests/connectors/test_mempool_mover.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from threading import Event

import pytest
from corruption_media import NODE, POOL_BYTES, PoolMedium
from corruption_site import PART_BYTES, BlockSite, opened_site
from manager_process import ManagerProcess
from waiting import until

from kvcm.connectors.results import Location, MissingReport
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem
from kvcm.connectors.transfer.pool_segment import PoolSegment, open_segment
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri

KEYS = list(range(1, 13))
SECONDS = 30.0


@pytest.fixture
def site(manager: ManagerProcess, shared_memory: Path) -> Iterator[BlockSite]:
    with opened_site(manager, PoolMedium(shared_memory)) as site:
        yield site


@pytest.fixture
def path(site: BlockSite, shared_memory: Path) -> Path:
    """The file of the memory."""
    (found,) = shared_memory.iterdir()
    return found


def saved(site: BlockSite) -> dict[int, Location]:
    assert site.save(KEYS) == KEYS
    return site.match(KEYS)


def mapped(path: Path) -> PoolSegment:
    segment = open_segment(path, POOL_BYTES)
    assert segment is not None
    return segment


def another_engine(site: BlockSite) -> TransferEngine:
    (pool,) = site.engine.pools()
    spec = TairMemPoolStorageSpec(node_id=NODE, capacity_bytes=POOL_BYTES)
    return TransferEngine.for_storages([StorageConfig(pool.storage, spec)])


def failures_of(engine: TransferEngine, way: str, uris: list[LocationUri]) -> set[Failure | None]:
    items = [TransferItem(uri, [memoryview(bytearray(uri.size))]) for uri in uris]
    return {result.failure for result in (engine.load if way == "load" else engine.save)(items, SECONDS)}


def assert_begins_again(site: BlockSite, before: dict[int, Location]) -> None:
    """The next save creates the memory again, the manager forgets the old blocks, and the engine saves all again."""
    first = KEYS[-1] + 1
    site.save([first])
    site.report_of_pools()
    until(lambda: not site.match(KEYS), "the manager forgets the blocks of the removed memory", SECONDS)
    assert site.save(KEYS) == KEYS
    site.assert_all_load(KEYS)
    assert set(site.load(before).values()) == {Failure.LOST}, "old answers lead to no other block's bytes"


def test_memory_that_is_removed_is_a_miss_and_made_again(site: BlockSite, path: Path) -> None:
    before = saved(site)
    path.unlink()
    assert set(site.load(before).values()) == {Failure.LOST}
    assert_begins_again(site, before)


@pytest.mark.parametrize("left_bytes", [0, 4096, POOL_BYTES // 2, -1])
def test_memory_that_is_cut_is_an_error_until_it_is_removed(site: BlockSite, path: Path, left_bytes: int) -> None:
    """No engine, old or new, touches memory behind the end, which would kill its process."""
    before = saved(site)
    uris = list(site.places(before).values())
    os.truncate(path, left_bytes if left_bytes >= 0 else path.stat().st_size + left_bytes)
    late = another_engine(site)
    try:
        for engine in (site.engine, late):
            assert failures_of(engine, "load", uris) == {Failure.ERROR}
            assert failures_of(engine, "save", uris) == {Failure.ERROR}
        assert late.pools() == []
    finally:
        late.close()
    path.unlink()
    until(lambda: set(site.load(before).values()) == {Failure.LOST}, "the engine looks at it again")
    assert_begins_again(site, before)


@pytest.mark.parametrize("stamp", [0, 1, 2**64 - 1])
def test_stamps_that_someone_changed_are_misses(site: BlockSite, path: Path, stamp: int) -> None:
    """Neither the bytes under them nor their neighbours' are taken for what they are not."""
    before = saved(site)
    places = site.places(before)
    hit = places[5, "tp0"]
    mapped(path).write_stamps(hit.offset, stamp.to_bytes(8, "little"))
    failures = site.load(before)
    assert {part for part, failure in failures.items() if failure} == {(5, "tp0")}
    assert failures[5, "tp0"] is Failure.LOST
    # The manager cannot see memory: it keeps what it handed out until a client removes it or the reclaimer evicts it.
    assert site.report(failures, before) == MissingReport(0, 1)
    assert site.client.remove([5])
    until(lambda: site.try_to_save(KEYS, 10.0) == [5], "the block is saved elsewhere, or there")
    site.assert_all_load(KEYS)


def harm(site: BlockSite, path: Path, uri: LocationUri, random: Random) -> None:
    """Do something to the memory, or to one part in it."""
    what = random.choice(["bytes", "stamps", "removed", "saved"])
    if what == "saved":
        site.engine.save([TransferItem(uri, [memoryview(bytes(PART_BYTES))])], 2.0)
    elif not path.exists():
        return
    elif what == "removed":
        path.unlink()
    elif what == "bytes":
        mapped(path).data[uri.offset + random.randrange(PART_BYTES)] ^= 0x20
    else:
        mapped(path).write_stamps(uri.offset, bytes(8))


def test_whatever_happens_to_the_memory_no_bytes_are_wrong_and_it_ends_well(site: BlockSite, path: Path) -> None:
    """Loads and saves while the memory is removed, wiped in places and damaged, again and again."""
    random, over, known = Random(7), Event(), saved(site)
    seen: list[Failure | None] = []

    def read() -> None:
        while not over.is_set():
            seen.extend(site.load(known).values())

    def has_more(than: int) -> bool:
        return len(seen) > than or any(call.done() for call in calls)

    with ThreadPoolExecutor(3) as readers:
        calls = [readers.submit(read) for _ in range(3)]
        for _ in range(30):
            harm(site, path, random.choice(list(site.places(known).values())), random)
            until(partial(has_more, len(seen)), "readers go on")
        over.set()
        for call in calls:
            call.result()
    assert set(seen) <= {None, Failure.LOST, Failure.CORRUPT}
    path.unlink(missing_ok=True)
    assert_begins_again(site, known)
