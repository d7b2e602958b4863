"""The order in which memory of a pool is handed out: what was just freed comes last, a stopped writer may hold it."""

from __future__ import annotations

import struct
from random import Random

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from pool_rig import MIB, allocation, open_pool, pool_config, report

from kvcm.model.memory_pool import PAGE_BYTES
from kvcm.model.uri import LocationUri
from kvcm.storage.pool_chunks import Extent, PoolChunk
from kvcm.store.memory import MemoryTable

PAGES = 16
CHUNK = PoolChunk(PAGES * PAGE_BYTES)
LARGE = 64 * MIB  # capacity: 64 chunks of 256 pages


def pages(extents: list[Extent]) -> list[int]:
    return [extent.offset // PAGE_BYTES for extent in extents]


def stored(chunk: PoolChunk) -> PoolChunk:
    return PoolChunk.decoded(chunk.encoded(), chunk.size_bytes, 0)


def test_extents_are_taken_behind_the_last_ones_round_and_round() -> None:
    chunk, held = CHUNK.take(PAGE_BYTES, 2, 1)
    chunk, first = stored(chunk).take(PAGE_BYTES, 3, 1)
    chunk, second = stored(chunk.free(first)).take(PAGE_BYTES, 10, 1)
    assert (pages(held), pages(first), pages(second)) == ([0, 1], [2, 3, 4], [*range(5, 15)])
    chunk, third = stored(chunk.free(held)).take(PAGE_BYTES, 4, 1)
    assert pages(third) == [15, 0, 1, 2]


def test_what_was_taken_last_is_known_when_all_is_free() -> None:
    chunk, taken = CHUNK.take(PAGE_BYTES, 3, 1)
    chunk, taken = stored(chunk.free(taken)).take(2 * PAGE_BYTES, 2, 1)
    assert pages(taken) == [4, 6]  # extents of another size, the first whole one behind
    chunk, taken = stored(chunk.free(taken)).take(PAGES * PAGE_BYTES, 1, 1)
    assert pages(taken) == [0]


def test_documents_of_before_begin_at_the_beginning() -> None:
    header = struct.pack("<B7xQQQ", 1, PAGES * PAGE_BYTES, PAGE_BYTES, 5)
    stamps = struct.pack(f"<{PAGES}Q", 5, *(PAGES - 1) * [0])
    chunk = PoolChunk.decoded(header + stamps, PAGES * PAGE_BYTES, 0)
    assert pages(chunk.take(PAGE_BYTES, 2, 1)[1]) == [1, 2]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=40), st.randoms(use_true_random=False))
def test_invariant_5_nothing_is_handed_out_twice_and_all_room_is_found(
    steps: list[tuple[int, int]], random: Random
) -> None:
    chunk, live, since = CHUNK, {}, 0
    for wanted, freed in steps:
        chunk, taken = stored(chunk).take(PAGE_BYTES, wanted, 1)
        assert len(taken) == min(wanted, PAGES - len(live))
        assert not {extent.offset for extent in taken} & live.keys()
        free = [page for page in range(since, since + PAGES) if page % PAGES * PAGE_BYTES not in live]
        assert pages(taken) == [page % PAGES for page in free[:wanted]]
        since = (pages(taken)[-1] + 1) if taken else since
        live.update({extent.offset: extent for extent in taken})
        gone = random.sample(sorted(live), min(freed, len(live)))
        chunk = chunk.free([live.pop(offset) for offset in gone])


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("batch", [1, 7, 64])
async def test_a_stopped_writer_does_not_keep_a_pool_from_taking_blocks(is_shared: bool, batch: int) -> None:
    """Its pages are free and locked: whoever is given them fails and gives them back. Another gets others in the end,
    also where its chunk has nothing else free."""
    pool = open_pool(MemoryTable(), FakeClock(), pool_config(capacity_bytes=LARGE), is_shared=is_shared, seed=batch)
    await pool.report(report(capacity_bytes=LARGE))
    stopped = await pool.allocate(allocation([PAGE_BYTES] * 100))
    locked = {LocationUri.parse(uri).offset for uri in stopped}
    await pool.allocate(allocation([PAGE_BYTES] * 156))  # the rest of that chunk
    await pool.delete(stopped)
    failed = saved = 0
    for _ in range(40):
        uris = await pool.allocate(allocation([PAGE_BYTES] * batch))
        if locked.isdisjoint(LocationUri.parse(uri).offset for uri in uris):
            saved += 1
        else:
            failed += 1
            await pool.delete(uris)
    assert saved >= 3 * failed, (saved, failed)  # the chunk is tried again after every other one
