"""What the memory backend promises beyond the contract: few bytes per block, and no cost that grows with the index."""

import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest
from index_rig import location, record

from kvcm.index.backends.backend import Access, Change
from kvcm.index.backends.columns import BlockColumns
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.packed import HeaderPool
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place, SpecUri, encode_chunk
from kvcm.model.storages import StorageType

NFS = Place("nfs", StorageType.ST_NFS)

PAGE = 1024
STATUSES = (LocationStatus.WRITING, LocationStatus.DELETING, LocationStatus.SERVING)


def page_of(random: Random, parent: int | None, depth: int) -> dict[int, BlockRecord]:
    """Records as a start of 1,024 blocks makes them: one chain, one session, a file uri each."""
    location_id, session_id = f"{random.getrandbits(64):016x}", f"{random.getrandbits(128):032x}"
    records = {}
    for position in range(PAGE):
        key = random.getrandbits(64) - (1 << 63)
        uri = f"file://nfs/mnt/kvcache/cluster-8f3a/instance/tp0/{key % 2**64:016x}.{location_id}?size=1048576"
        place = Location(
            location_id, "nfs", StorageType.ST_NFS, LocationStatus.WRITING, ("tp0",),
            encode_chunk(StorageType.ST_NFS, 1, [SpecUri("tp0", uri)]), 1 << 20, 1.7e9, session_id, 1.7e9 + 30,
        )  # fmt: skip
        records[key] = BlockRecord(parent, depth + position, (place,))
        parent = key
    return records


async def write_pages(backend: MemoryBackend, pages: int) -> dict[int, bytes]:
    """Start and finish chains of four pages; return the chunks, as a book of answers holds them."""
    random, answers = Random(5), dict[int, bytes]()
    parent: int | None = None
    for number in range(pages):
        depth = number % 4 * PAGE
        new = page_of(random, parent if depth else None, depth)
        await backend.write_many([Change(key, None, made) for key, made in new.items()])
        olds = await backend.get_many(list(new))
        finished = [
            Change(
                key,
                old,
                old._replace(locations=(old.locations[0]._replace(status=LocationStatus.SERVING, deadline=0.0),)),
            )
            for key, old in zip(new, olds, strict=True)
            if old is not None
        ]
        await backend.write_many(finished)
        answers |= {key: change.locations[0].chunk for key, _, change, _ in finished if change is not None}
        parent = next(reversed(new))
    return answers


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_a_block_costs_less_than_400_bytes_with_its_answer() -> None:
    before, _ = tracemalloc.get_traced_memory()
    backend = MemoryBackend()
    answers = await write_pages(backend, 40)
    after, _ = tracemalloc.get_traced_memory()
    assert len(answers) == backend.key_count == 40 * PAGE
    assert (after - before) / backend.key_count < 400


async def test_an_answer_and_its_record_share_the_chunk() -> None:
    backend = MemoryBackend()
    made = record()
    await backend.write_many([Change(1, None, made)])
    (read,) = await backend.get_many([1])
    assert read is not None
    assert read.locations[0].chunk is made.locations[0].chunk


async def test_loaded_records_count_like_written_ones() -> None:
    written, loaded = MemoryBackend(), MemoryBackend()
    places = [location(status=STATUSES[key % 3])._replace(deadline=5.0 * (key % 3 < 2)) for key in range(9)]
    records = {key: record(place, parent=1) for key, place in enumerate(places)}
    await written.write_many([Change(key, None, made) for key, made in records.items()])
    await written.touch(dict.fromkeys(records, 3), 77.7)
    for key, made in records.items():
        loaded.load(key, made, Access(77, 3))
    for backend in (written, loaded):
        assert await backend.get_many(list(records)) == list(records.values())
        assert await backend.accesses([0, 8]) == [Access(77, 3), Access(77, 3)]
        assert await backend.due(5.0, 10) == [0, 1, 3, 4, 6, 7]
        assert await backend.children(1) == list(records)
        assert backend.usage_bytes == {NFS: 90}
        assert (backend.deleting_bytes, backend.deleting_keys) == ({NFS: 30}, 3)


async def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    backend = MemoryBackend()
    for start in range(0, 50_000, 500):
        new = {
            key: record(location(f"l{start}", status=LocationStatus.WRITING), parent=key - 1)
            for key in range(start, start + 500)
        }
        await backend.write_many([Change(key, None, made) for key, made in new.items()])
        await backend.write_many([Change(key, made, None) for key, made in new.items()])
    blocks = backend._blocks
    assert (backend.key_count, backend.usage_bytes) == (0, {NFS: 0})
    assert [len(column) for column in blocks._columns] == [0] * len(blocks._columns)
    assert (blocks._rows, blocks._orphans, len(backend._due)) == ({}, {}, 0)
    assert len(backend._due._heap) <= 64
    assert len(blocks._pool) <= 1024 + 1


class CountingRandom(Random):
    """Counts the draws."""

    draws = 0

    def getrandbits(self, k: int, /) -> int:
        self.draws += 1
        return super().getrandbits(k)


async def test_a_sample_costs_a_few_draws_per_key_after_most_keys_are_gone() -> None:
    backend = MemoryBackend()
    await backend.write_many([Change(key, None, record()) for key in range(20_000)])
    await backend.write_many([Change(key, record(), None) for key in range(3_000, 20_000)])
    random = CountingRandom(3)
    assert len(await backend.random_sample(100, random)) == 100
    assert 100 <= random.draws < 100 * 8


def test_headers_in_use_are_shared_and_others_are_forgotten() -> None:
    """Sessions come and go; those whose blocks stay keep one header each, however many others passed."""
    pool = HeaderPool()
    kept = [pool.pack((location(f"kept{number}"),))[0] for number in range(1500)]
    for number in range(20_000):
        pool.pack((location(f"gone{number}"),))
    assert len(pool) <= 2 * len(kept) + 1024 + 1
    assert all(pool.pack((location(f"kept{number}"),))[0] is header for number, header in enumerate(kept))


class CountingColumn(list[int]):
    """Counts how often one of its items is read."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        self.reads += 1
        return super().__getitem__(index)


def test_a_prefix_loses_one_of_its_many_continuations_in_constant_time() -> None:
    columns = BlockColumns()
    records = {key: record(parent=0) for key in range(1, 5001)}
    for key, made in records.items():
        columns.swap(key, None, made)
    counting = CountingColumn(columns._next)
    columns._columns = tuple(counting if column is columns._next else column for column in columns._columns)
    columns._next = counting  # type: ignore[assignment]
    for key in Random(9).sample(sorted(records), 1000):
        counting.reads = 0
        assert columns.swap(key, records.pop(key), None)
        assert 0 < counting.reads < 10
    assert columns.family(0) == sorted(records)
