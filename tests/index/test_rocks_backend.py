"""Blocks in RocksDB: whatever was written is there after a restart, and nothing else."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_records import check_sums, write
from thoroughness import examples

from kvcm.index.backends.backend import Access, Change, ResidentBlocks, UniformRun
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.rocks import ADDRESS, BLOCKS, RocksBackend, RocksIndex, audit_rows, load_index
from kvcm.index.codec import encode_payload
from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed_key, unmixed_key
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.rocks import BEGUN, DOCUMENTS, CommitLog, DocumentRow, Fsync, RocksStore, decode_row, encode_row

KEYS = [0, -1, 2**63 - 1, -(2**63)]
UIDS = [0, 2**32 - 1]
WRITING = LocationStatus.WRITING


def location(name: str, status: LocationStatus, size_bytes: int, written_at: float) -> Location:
    storage_type = StorageType.ST_NFS if size_bytes % 2 else StorageType.ST_DUMMY
    chunk = encode_chunk(storage_type, 1, [SpecUri("tp0", f"file://nfs/{name}?size={size_bytes}")])
    deadline = 0.0 if status is LocationStatus.SERVING and size_bytes % 3 else written_at + 30.0
    return Location(name, "nfs", storage_type, status, ("tp0",), chunk, size_bytes, written_at, "session", deadline)


LOCATIONS = st.builds(
    location, st.sampled_from("xyz"), st.sampled_from(LocationStatus), st.integers(0, 9), st.integers(0, 5).map(float)
)
RECORDS = st.builds(
    BlockRecord,
    st.one_of(st.none(), st.sampled_from(KEYS)),
    st.integers(0, 3),
    st.lists(LOCATIONS, min_size=1, max_size=3).map(tuple),
)


def run_of(keys: list[int], parent: int | None, written_at: float) -> BlockRun:
    same = location("r", LocationStatus.WRITING, 7, written_at)._replace(chunk=b"")
    return BlockRun(keys, parent, 2, same, [f"{written_at}/{key}".encode() for key in keys])


RUNS = st.builds(
    run_of,
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
    st.sampled_from([None, 5]),
    st.integers(0, 5).map(float),
)
STEPS = st.one_of(
    st.tuples(st.just("write"), st.dictionaries(st.sampled_from(KEYS), st.one_of(st.none(), RECORDS), max_size=4)),
    st.tuples(
        st.sampled_from(["touch", "count", "requeue"]),
        st.dictionaries(st.sampled_from(KEYS), st.integers(1, 40_000), max_size=3),
    ),
    st.tuples(st.just("begin"), RUNS),
    st.tuples(st.just("begin"), RUNS),
    st.tuples(st.just("serve"), st.tuples(st.randoms(use_true_random=False), st.sampled_from([0.0, 31.0]))),
    st.tuples(st.just("serve"), st.tuples(st.randoms(use_true_random=False), st.sampled_from([0.0, 31.0]))),
    st.tuples(st.just("retire"), st.tuples(st.randoms(use_true_random=False), st.integers(1, 3))),
    st.tuples(st.just("drop"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


class Model:
    """What one registration holds."""

    def __init__(self) -> None:
        self.records: dict[int, BlockRecord] = {}
        self.accesses: dict[int, Access] = {}

    def write(self, key: int, record: BlockRecord | None) -> None:
        if record is None:
            self.records.pop(key, None)
            self.accesses.pop(key, None)
            return
        serving = [place for place in record.locations if place.status is LocationStatus.SERVING]
        first = Access(int((serving or record.locations)[0].written_at), 0)
        if key not in self.records or (serving and not self.is_resident(key)):
            self.accesses[key] = first
        self.records[key] = record

    def is_resident(self, key: int) -> bool:
        return any(place.status is LocationStatus.SERVING for place in self.records[key].locations)

    def touch(self, key: int, count: int, at: int, moves: bool) -> None:
        if key in self.records:
            before = self.accesses[key]
            self.accesses[key] = Access(max(before.at, at if moves else 0), min(before.reads + count, 65535))

    def requeue(self, key: int, reads: int, at: int) -> None:
        if key in self.records and self.is_resident(key):
            self.accesses[key] = Access(at, reads)

    def begin(self, run: BlockRun) -> bool:
        if any(key in self.records for key in run.keys):
            return False
        for key, record in zip(run.keys, run.records(), strict=True):
            self.write(key, record)
        return True

    def alone(self, status: LocationStatus) -> list[int]:
        """The blocks whose only location has this status."""
        return [key for key, record in self.records.items() if [*map(status_of, record.locations)] == [status]]

    def retire(self, keys: list[int]) -> None:
        for key in keys:
            (only,) = self.records[key].locations
            self.write(key, self.records[key]._replace(locations=(retired(only),)))

    def serve(self, keys: list[int], deadline: float) -> None:
        for key in keys:
            (only,) = self.records[key].locations
            self.write(key, self.records[key]._replace(locations=(served(only, deadline),)))

    async def agrees_with(self, backend: RocksBackend) -> None:
        assert backend.key_count == len(self.records)
        assert await backend.get_many(KEYS) == [self.records.get(key) for key in KEYS]
        assert await backend.accesses(KEYS) == [self.accesses.get(key) for key in KEYS]
        for parent in KEYS:
            found = await backend.children(parent)
            assert sorted(found) == sorted(key for key, record in self.records.items() if record.parent == parent)
        for now in (29.0, 32.0, 99.0):
            due = {key for key, record in self.records.items() if record.due is not None and record.due <= now}
            assert set(await backend.due(now, 10)) == due
        await check_sums(backend)


def status_of(place: Location) -> LocationStatus:
    return place.status


def served(place: Location, deadline: float) -> Location:
    return place._replace(status=LocationStatus.SERVING, session_id="", deadline=deadline)


def retired(place: Location) -> Location:
    return place._replace(status=LocationStatus.DELETING, deadline=31.5)


def serving(deadline: float, blocks: UniformRun) -> UniformRun:
    return blocks._replace(location=served(blocks.location, deadline))


def opened(directory: Path) -> tuple[RocksStore, RocksIndex]:
    store = RocksStore(directory, "never", SystemClock())
    try:
        return store, load_index(store)
    except BaseException:
        store.log.close_at_once()
        raise


async def reopened(store: RocksStore, directory: Path) -> tuple[RocksStore, RocksIndex]:
    await store.close()
    return opened(directory)


async def do(backend: RocksBackend, model: Model, at: int, verb: str, values: Any) -> None:
    """Do a step with a backend and its model."""
    if verb == "write":
        await write(backend, values)
        for key, record in values.items():
            model.write(key, record)
    elif verb in ("touch", "count"):
        await backend.touch(values, at + 0.5, moves=verb == "touch")
        for key, count in values.items():
            model.touch(key, count, at, moves=verb == "touch")
    elif verb == "begin":
        assert (backend.begin(values) is not None) == model.begin(values)
    elif verb == "serve":
        (random, deadline), keys = values, model.alone(WRITING)
        random.shuffle(keys)
        assert backend.serve(keys, partial(serving, deadline)) is not None
        model.serve(keys, deadline)
    elif verb == "retire":
        (random, count), keys = values, model.alone(LocationStatus.SERVING)
        keys = random.sample(keys, min(count, len(keys)))
        assert backend.retire(keys, lambda blocks: blocks._replace(location=retired(blocks.location))) is not None
        model.retire(keys)
    else:
        await backend.requeue(values, at + 0.5)
        for key, count in values.items():
            model.requeue(key, count, at)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(steps=st.lists(st.tuples(st.sampled_from(UIDS), STEPS), min_size=4, max_size=40))
async def test_any_history_with_restarts_leaves_what_a_dict_would_hold(
    steps: list[tuple[int, tuple[str, Any]]],
) -> None:
    """Invariant 4 among others: usage after a restart is that of the records."""
    models = {uid: Model() for uid in UIDS}
    with TemporaryDirectory() as directory:
        store, index = opened(Path(directory))
        for at, (uid, (verb, values)) in enumerate(steps):
            if verb == "drop":
                await index.backend(uid).drop()
                models[uid] = Model()
            elif verb == "restart":
                store, index = await reopened(store, Path(directory))
            else:
                await do(index.backend(uid), models[uid], at, verb, values)
        store, index = await reopened(store, Path(directory))
        assert index.uids() == [uid for uid in UIDS if models[uid].records]
        for uid in UIDS:
            await models[uid].agrees_with(index.backend(uid))
        await store.close()


def random_blocks(random: Random, keys: list[int]) -> dict[int, BlockRecord]:
    """Blocks of sessions of a few, some with several locations; their parents are others, missing blocks or none."""
    found, session = dict[int, BlockRecord](), [location("a", LocationStatus.SERVING, 1, 0.0)]
    for key in keys:
        if random.random() < 0.1:
            count = random.choice([1, 1, 1, 2])
            status = random.choices(list(LocationStatus), [1, 8, 1])[0]
            session = [location(f"{key}-{each}", status, random.randrange(9), float(key % 97)) for each in range(count)]
        parent = random.choice([None, random.choice(keys), random.choice(keys), -key - 1])
        places = tuple(each._replace(chunk=each.chunk + bytes((0x22, 1, key % 7))) for each in session)
        found[key] = BlockRecord(parent, random.randrange(2000), places)
    return found


async def check_all(backend: RocksBackend, model: Model, keys: list[int]) -> None:
    """Compare all blocks, and what follows from them."""
    assert await backend.get_many(keys) == [model.records.get(key) for key in keys]
    assert await backend.accesses(keys) == [model.accesses.get(key) for key in keys]
    families = dict[int | None, list[int]]()
    for key, record in model.records.items():
        families.setdefault(record.parent, []).append(key)
    parents = [*keys, *(-key - 1 for key in keys)]
    assert await backend.families(parents) == [sorted(families.get(parent, [])) for parent in parents]
    due = {key: record.due for key, record in model.records.items() if record.due is not None}
    assert await backend.due(1e9, len(due) + 1) == sorted(due, key=lambda key: (due[key], key))
    assert backend.key_count == len(model.records)
    await check_sums(backend)


async def check_equal(backend: MemoryBackend, memory: MemoryBackend, keys: list[int]) -> None:
    """Compare a backend that was loaded with one whose blocks were written one by one: all but the order of rows."""
    assert await backend.get_many(keys) == await memory.get_many(keys)
    assert await backend.accesses(keys) == await memory.accesses(keys)
    assert await backend.families(keys) == await memory.families(keys)
    assert backend.usage_bytes == memory.usage_bytes
    assert backend.deleting_bytes == memory.deleting_bytes
    assert backend.deleting_keys == memory.deleting_keys
    assert backend.due_from == memory.due_from
    assert await backend.due(1e9, len(keys)) == await memory.due(1e9, len(keys))
    ours, theirs = (by_key(each.observe(None).residents()) for each in (backend, memory))
    assert ours == theirs
    ours, theirs = (each.answers(keys, chunk_of, stop_at_miss=False) for each in (backend, memory))
    assert ours == theirs
    assert set(ours) > {None}


def by_key(blocks: ResidentBlocks) -> list[tuple[Any, ...]]:
    """All columns but the rows, sorted."""
    return sorted(zip(*(column.tolist() for column in blocks[1:]), strict=True))


def chunk_of(record: BlockRecord) -> bytes | None:
    serving = [place.chunk for place in record.locations if place.status is LocationStatus.SERVING]
    return max(serving, default=None)


@pytest.mark.parametrize("seed", range(3))
async def test_thousands_of_blocks_are_loaded_in_columns_as_they_were(tmp_path: Path, seed: int) -> None:
    """Of two registrations that share a batch of rows; and the blocks can be changed afterwards."""
    random, models = Random(seed), {uid: Model() for uid in (7, 9)}
    memories = {uid: MemoryBackend() for uid in models}
    store, index = opened(tmp_path)
    keys = {uid: random.sample(range(10**9), 6000) for uid in models}
    for uid, model in models.items():
        blocks = random_blocks(random, keys[uid])
        for each in (index.backend(uid), memories[uid]):
            await write(each, dict(blocks))
        read = {key: random.randrange(1, 70_000) for key in random.sample(keys[uid], 2000)}
        for each in (index.backend(uid), memories[uid]):
            await each.touch(read, 1000 + uid)
        for key, record in blocks.items():
            model.write(key, record)
        for key, count in read.items():
            model.touch(key, count, 1000 + uid, moves=True)
    store.log.append([(b"a" + (9).to_bytes(4) + (-5).to_bytes(8, signed=True), b"damaged, of no block")])
    store, index = await reopened(store, tmp_path)
    for uid, model in models.items():
        await check_all(index.backend(uid), model, keys[uid])
        await check_equal(index.backend(uid), memories[uid], keys[uid])
        gone = random.sample(keys[uid], 1500)
        await write(index.backend(uid), dict.fromkeys(gone))
        for key in gone:
            model.write(key, None)
        again = random_blocks(random, gone[:300])
        await write(index.backend(uid), dict(again))
        for key, record in again.items():
            model.write(key, record)
        missing = next(record.parent for record in model.records.values() if (record.parent or 0) < 0)
        run = run_of([missing, 10**10], None, 3.0)
        assert index.backend(uid).begin(run) is not None
        assert model.begin(run)
        await check_all(index.backend(uid), model, [*keys[uid], missing, 10**10])
    await store.close()


async def test_reads_of_blocks_that_were_being_written_end_when_these_serve_together(tmp_path: Path) -> None:
    store, index = opened(tmp_path)
    backend = index.backend(1)
    assert backend.begin(run_of([1, 2], None, 5.0)) is not None
    await backend.touch({1: 3}, 50.0)
    assert backend.serve([2, 1], partial(serving, 0.0)) is not None
    store, index = await reopened(store, tmp_path)
    assert await index.backend(1).accesses([1, 2]) == [Access(5, 0)] * 2
    await store.close()


async def rows_on_disk(store: RocksStore) -> tuple[int, int]:
    """How many blocks have rows, and how many runs are documents."""
    await store.flush()
    begun = sum(decode_row(*row).table == BEGUN for row in store.log.read(DOCUMENTS))
    return sum(1 for _ in store.log.read(BLOCKS)), begun


async def test_blocks_that_begin_are_one_document_until_they_serve(tmp_path: Path) -> None:
    store, index = opened(tmp_path)
    run = run_of([1, 2, 3], 9, 5.0)
    assert index.backend(1).begin(run) is not None
    assert await rows_on_disk(store) == (0, 1)
    store, index = await reopened(store, tmp_path)
    backend = index.backend(1)
    assert await backend.get_many([1, 2, 3]) == run.records()
    assert backend.serve([3, 2, 1], partial(serving, 0.0)) is not None
    assert await rows_on_disk(store) == (3, 0)
    store, index = await reopened(store, tmp_path)
    assert [record and record.locations[0].status for record in await index.backend(1).get_many([1, 2, 3])] == [
        LocationStatus.SERVING
    ] * 3
    await store.close()


@pytest.mark.parametrize("how", ["serve", "remove", "change"])
async def test_the_first_block_of_a_run_that_changes_gives_rows_to_all(tmp_path: Path, how: str) -> None:
    store, index = opened(tmp_path)
    backend, run, other = index.backend(1), run_of([1, 2, 3], None, 5.0), run_of([7, 8], None, 6.0)
    assert backend.begin(run) is not None
    assert backend.begin(replace(other, location=other.location._replace(session_id="other"))) is not None
    first, *_ = records = run.records()
    if how == "serve":
        assert backend.serve([2], partial(serving, 0.0)) is not None
    else:
        changed = first._replace(locations=(first.locations[0]._replace(deadline=99.0),)) if how == "change" else None
        await backend.write_many([Change(1, first, changed)])
    expected = await backend.get_many([1, 2, 3])
    assert sum(record == before for record, before in zip(expected, records, strict=True)) == 2
    assert await rows_on_disk(store) == (2 if how == "remove" else 3, 1)
    store, index = await reopened(store, tmp_path)
    assert await index.backend(1).get_many([1, 2, 3]) == expected
    assert index.backend(1).key_count == 5 - (how == "remove")
    await store.close()


async def test_rows_of_blocks_that_were_being_written_are_read_as_the_release_before_wrote_them(tmp_path: Path) -> None:
    store, index = opened(tmp_path)
    run = run_of([1, 2], 9, 5.0)
    await write(index.backend(1), dict(zip(run.keys, run.records(), strict=True)))
    assert await rows_on_disk(store) == (2, 0)
    store, index = await reopened(store, tmp_path)
    backend = index.backend(1)
    assert await backend.get_many([1, 2]) == run.records()
    assert backend.serve([2, 1], partial(serving, 0.0)) is not None
    assert await rows_on_disk(store) == (2, 0)
    await store.close()


async def test_a_row_counts_where_a_document_holds_its_block_too(tmp_path: Path) -> None:
    """After a repair, or when an older release, which does not know the document, was here in between."""
    store, index = opened(tmp_path)
    run = run_of([1, 2, 3], None, 5.0)
    assert index.backend(1).begin(run) is not None
    record = BlockRecord(None, 0, (location("x", LocationStatus.SERVING, 3, 1.0),))
    row = ADDRESS.pack(BLOCKS, 1, unmixed_key(2)), encode_payload(record)
    store.log.append([row], blocks=1)
    for _ in range(2):
        store, index = await reopened(store, tmp_path)
        first, _, last = run.records()
        assert await index.backend(1).get_many([1, 2, 3]) == [first, record, last]
        assert await rows_on_disk(store) == (3, 0)
    await store.close()


async def test_a_run_that_cannot_be_read_stops_the_start_and_is_found(tmp_path: Path) -> None:
    store, _ = opened(tmp_path)
    store.log.append([encode_row(DocumentRow(BEGUN, "1/5", 0.0, b"damaged"))], documents=1)
    await store.close()
    with pytest.raises(StorageIOError, match=f"{tmp_path}: document '1/5…' of table 'blocks.begun' cannot be read"):
        opened(tmp_path)
    log = CommitLog(tmp_path, Fsync.NEVER, SystemClock())
    [bad] = audit_rows(log).bad
    assert (bad.where, bad.holds_data, bad.stops_loading) == ("document '1/5…' of table 'blocks.begun'", True, True)
    log.close_at_once()


async def test_what_lost_is_neither_in_memory_nor_on_disk(tmp_path: Path) -> None:
    store, index = opened(tmp_path)
    backend = index.backend(3)
    first, second = (BlockRecord(None, depth, (location("x", LocationStatus.SERVING, 3, 1.0),)) for depth in (1, 2))
    await write(backend, {1: first})
    written = await backend.write_many([Change(1, None, second), Change(2, None, second), Change(3, first, None)])
    assert sorted(written.lost) == [1, 3]
    store, index = await reopened(store, tmp_path)
    assert await index.backend(3).get_many([1, 2, 3]) == [first, second, None]
    await store.close()


async def test_a_change_that_cannot_be_written_is_not_applied(tmp_path: Path) -> None:
    store, index = opened(tmp_path)
    backend = index.backend(3)
    record = BlockRecord(None, 0, (location("x", LocationStatus.SERVING, 3, 1.0),))
    await write(backend, {1: record})
    await store.close()
    for call in (write(backend, {2: record}), backend.touch({1: 1}, 9.0), backend.drop()):
        with pytest.raises(StorageIOError, match="is closed"):
            await call
    assert await backend.get_many([1, 2]) == [record, None]
    assert await backend.accesses([1]) == [Access(1, 0)]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (b"b" + (5).to_bytes(4) + (-2).to_bytes(8, signed=True), b"\x01damaged", "block -2 of registration 5"),
        (b"b" + (5).to_bytes(4) + (7).to_bytes(8), b"\x63", "block 7 of registration 5 .* version 99"),
        (b"b" + (5).to_bytes(4), b"\x01", "row 6200000005"),
        (b"a" + (5).to_bytes(4) + (9).to_bytes(8), b"\x01", "block 9 of registration 5"),
    ],
)
async def test_a_row_that_cannot_be_read_stops_the_start_and_is_named(
    tmp_path: Path, key: bytes, value: bytes, named: str
) -> None:
    store, index = opened(tmp_path)
    record = BlockRecord(None, 0, (location("x", LocationStatus.SERVING, 3, 1.0),))
    await write(index.backend(5), {mixed_key(8): record, mixed_key(9): record})
    store.log.append([(key, value)])
    await store.close()
    with pytest.raises(StorageIOError, match=f"{tmp_path}: {named}.*kvcm index verify"):
        opened(tmp_path)


async def test_progress_is_reported_and_ends_at_the_number_of_blocks(tmp_path: Path) -> None:
    store, index = opened(tmp_path)
    records = {key: BlockRecord(None, 0, (location("x", LocationStatus.SERVING, 3, 1.0),)) for key in range(10_000)}
    await write(index.backend(1), dict(records))
    await store.close()
    store = RocksStore(tmp_path, "never", SystemClock())
    reported: list[tuple[int, int]] = []
    loaded = load_index(store, lambda done, estimated: reported.append((done, estimated)))
    assert [done for done, _ in reported] == [4096, 8192, 10_000]
    assert all(estimated >= 10_000 for _, estimated in reported)
    assert set(await loaded.backend(1).random_sample(20_000, Random(1))) == set(records)
    await store.close()
