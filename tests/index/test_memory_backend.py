"""The memory backend: its columns against a dict, batches, observers, and what a block costs."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from index_records import write
from index_rig import TableView, location, record
from numpy.typing import NDArray
from thoroughness import examples

from kvcm.index.backends.backend import Access, Change, Rows, UniformRun
from kvcm.index.backends.memory import BlockColumns, HeaderPool, MemoryBackend, RowTable, WrittenColumns
from kvcm.index.backends.rocks import load_index
from kvcm.index.search_cache import compose_answer
from kvcm.model.clock import SystemClock
from kvcm.model.keys import mixed
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.rocks import RocksStore

TABLE_KEYS = st.one_of(
    st.integers(-3, 60),
    st.integers(-20, 20).map(lambda number: number << 40),
    st.integers(-(2**63), 2**63 - 1),
)
KEYS = st.sampled_from([*range(8), -1, 2**63 - 1, -(2**63)])
PARENTS = st.sampled_from([None, 0, 0, 0, 1, -1, 2**63 - 1])  # few, so that blocks have many siblings
LOCATIONS = st.builds(
    location, st.sampled_from(["a", "b"]), status=st.sampled_from(LocationStatus), size_bytes=st.sampled_from([5, 10])
).map(lambda place: place._replace(written_at=50.5))
RECORDS = st.builds(
    lambda parent, depth, locations: BlockRecord(parent, depth, tuple(locations)),
    PARENTS,
    st.integers(0, 3000),
    st.lists(LOCATIONS, min_size=1, max_size=3),
)
COUNTS = st.dictionaries(KEYS, st.integers(1, 40_000))
SESSIONS = st.sampled_from(["a1", "b2"])
STORAGES: st.SearchStrategy[dict[str, int | None]] = st.sampled_from([{"nfs": 1}, {"nfs": None}])


def run_location(session: str = "a1", size: int = 10) -> Location:
    """What the blocks of a run have in common while they are being written."""
    made = location(session[:1], status=LocationStatus.WRITING, size_bytes=size)
    return made._replace(chunk=b"", session_id=session, written_at=50.5, deadline=60.0)


@st.composite
def runs(draw: st.DrawFn) -> BlockRun:
    """Blocks of one chain, which may hang on one that others are the parents of, or on none."""
    keys = draw(st.lists(KEYS, unique=True, min_size=1, max_size=6))
    parent = draw(st.none() | KEYS.filter(lambda key: key not in keys))
    session = draw(SESSIONS)
    chunks = [f"{session}/{key}".encode() for key in keys]
    return BlockRun(keys, parent, draw(st.integers(0, 3)), run_location(session, draw(st.sampled_from([1, 7]))), chunks)


class Ends(NamedTuple):
    """Lets the blocks of a session serve."""

    session: str
    deadline: float = 0.0
    priority: int = 0
    addition: bytes = b""

    def __call__(self, blocks: UniformRun) -> UniformRun | None:
        if blocks.location.session_id != self.session:
            return None
        served = self.serving(blocks.location)._replace(chunk=b"")
        return UniformRun(blocks.keys, served, [chunk + self.addition for chunk in blocks.chunks])

    def serving(self, one: Location) -> Location:
        served = one._replace(status=LocationStatus.SERVING, session_id="", deadline=self.deadline)
        return served._replace(priority=self.priority, chunk=one.chunk + self.addition)

    def is_of(self, found: BlockRecord | None) -> bool:
        """Whether these are the ends of a block."""
        only = found.locations[0] if found is not None and len(found.locations) == 1 else None
        return only is not None and only.status is LocationStatus.WRITING and only.session_id == self.session


ENDS = st.builds(Ends, SESSIONS, st.sampled_from([0.0, 99.0]), st.integers(0, 1), st.sampled_from([b"", b"+"]))


def retired(place: Location) -> Location:
    return place._replace(status=LocationStatus.DELETING, deadline=88.0)


def is_resident(record: BlockRecord | None) -> bool:
    return record is not None and any(place.status is LocationStatus.SERVING for place in record.locations)


class RowTableMachine(RuleBasedStateMachine):
    """A table of rows beside a dict; rows stay dense as those of columns do. Keys that differ in their high bits alone
    have one home, and all of them stand in line."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = array("q")
        self.table = RowTable(self.keys)
        self.rows: dict[int, int] = {}

    @rule(keys=st.lists(TABLE_KEYS, unique=True, max_size=150))
    def add_together(self, keys: list[int]) -> None:
        new = array("q", [key for key in keys if key not in self.rows])
        assert (self.table.free_slots(array("q", keys)) is None) is (len(new) < len(keys))
        slots = self.table.free_slots(new)
        assert slots is not None
        self.rows.update(zip(new, range(len(self.rows), len(self.rows) + len(new)), strict=True))
        self.keys.extend(new)
        self.table.add_rows(slots)

    @rule(key=TABLE_KEYS)
    def add(self, key: int) -> None:
        if key not in self.rows:
            self.rows[key] = len(self.keys)
            self.keys.append(key)
            self.table.add_row()

    @rule(data=st.data(), count=st.integers(1, 40))
    def remove(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.keys))):
            row = data.draw(st.integers(0, len(self.keys) - 1))
            del self.rows[self.keys[row]]
            self.table.discard(row)
            last = len(self.keys) - 1
            if row != last:
                self.table.move(last, row)
                self.keys[row] = self.keys[last]
                self.rows[self.keys[row]] = row
            self.keys.pop()

    @rule()
    def build(self) -> None:
        self.table = RowTable(self.keys)
        self.table.build()

    @rule()
    def clear(self) -> None:
        self.rows.clear()
        del self.keys[:]
        self.table.clear()

    @rule(keys=st.lists(TABLE_KEYS, max_size=200))
    def find(self, keys: list[int]) -> None:
        expected = [self.rows.get(key) for key in keys]
        assert list(map(self.table.get, keys)) == self.table.get_all(keys) == expected
        numbers = [-1 if row is None else row for row in expected]
        assert self.table.find(np.array(keys, np.int64)).tolist() == self.table.find(keys).tolist() == numbers

    @invariant()
    def all_are_found(self) -> None:
        assert len(self.table) == len(self.rows)
        assert self.table.get_all(self.keys) == list(range(len(self.keys)))


class CountingTable(RowTable):
    """Counts rows that are put into slots, those of before included."""

    placed = 0

    def _place(self, rows: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        self.placed += len(rows)
        super()._place(rows, slots)


@pytest.mark.parametrize("size", [1, 64, 1024])
def test_no_addition_to_a_table_moves_many_rows(size: int) -> None:
    """The table doubles several times meanwhile. A fixed number of rows moves at once, however many there are."""
    random = np.random.default_rng(size)
    all_keys = random.integers(-(2**63), 2**63 - 1, 200_000 if size > 1 else 20_000)
    keys = array("q")
    table = CountingTable(keys)
    most = 0
    for first in range(0, len(all_keys), size):
        added = array("q", all_keys[first : first + size].tolist())
        table.placed = 0
        if size == 1:
            keys.extend(added)
            table.add_row()
        else:
            slots = table.free_slots(added)
            assert slots is not None
            keys.extend(added)
            table.add_rows(slots)
        most = max(most, table.placed)
    assert 1000 < most <= 4096 + size
    assert table.find(all_keys).tolist() == list(range(len(all_keys)))
    assert table.find(~all_keys).max() == -1


def test_rows_are_removed_and_added_while_a_table_grows() -> None:
    """So many that it doubles often, with many rows in a line."""
    random, keys, rows = Random(5), array("q"), dict[int, int]()
    table = RowTable(keys)
    for _ in range(400):
        added = array("q", [random.randrange(1 << 16) - 1000 for _ in range(random.choice([3, 200]))])
        added = array("q", [key for key in dict.fromkeys(added) if key not in rows])
        slots = table.free_slots(added)
        assert slots is not None
        for key in added:
            rows[key] = len(rows)
        keys.extend(added)
        table.add_rows(slots)
        for row in random.sample(range(len(keys)), len(added) // 3):
            if row >= len(keys):
                continue
            del rows[keys[row]]
            table.discard(row)
            if row != len(keys) - 1:
                table.move(len(keys) - 1, row)
                keys[row] = keys[-1]
                rows[keys[row]] = row
            keys.pop()
    assert len(rows) == len(table) > 10_000
    asked = range(-2000, 1 << 16)
    assert table.get_all(asked) == list(map(rows.get, asked)) == list(map(table.get, asked))


TestRowTable = RowTableMachine.TestCase
TestRowTable.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None, derandomize=True)


class Follower:
    """Keeps the events it receives, and checks that every event is true on arrival."""

    def __init__(self, follow: Callable[[Follower], Rows | None], rows: Rows | None = None) -> None:
        self.blocks: dict[int, int] = {}
        self.events: list[tuple[str, int, int]] = []
        followed = follow(self)
        rows = rows if followed is None else followed
        assert rows is not None
        self.rows = rows
        self.blocks = {row: rows.key(row) for row in range(len(rows)) if rows.is_resident(row)}

    def added(self, row: int) -> None:
        assert row not in self.blocks
        assert self.rows.is_resident(row)
        self.blocks[row] = self.rows.key(row)
        self.note("added", row)

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        for row in rows:
            assert self.rows.priority(row) == priority
            self.added(row)

    def removed(self, row: int) -> None:
        assert self.blocks[row] == self.rows.key(row)
        self.note("removed", row)
        del self.blocks[row]

    def changed(self, row: int) -> None:
        assert self.blocks[row] == self.rows.key(row)
        assert self.rows.is_resident(row)
        self.note("changed", row)

    def moved(self, row: int, to: int) -> None:
        assert to not in self.blocks
        self.blocks[to] = self.blocks.pop(row)
        assert self.blocks[to] == self.rows.key(to)
        self.note("moved", to)

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        for row, count in zip(rows, reads, strict=True):
            if row in self.blocks:
                assert self.blocks[row] == self.rows.key(row)
                self.note("touched", row, count)

    def note(self, what: str, row: int, reads: int = 0) -> None:
        self.events.append((what, self.blocks[row], reads))

    def reported(self) -> list[tuple[str, int, int]]:
        """The events since the last call, without moves."""
        events, self.events = self.events, []
        return [event for event in events if event[0] != "moved"]


class ColumnsMachine(RuleBasedStateMachine):
    """Swaps and reads at random, beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = WrittenColumns()
        self.follower = Follower(self.columns.observe, self.columns)
        self.records: dict[int, BlockRecord] = {}
        self.accesses: dict[int, Access] = {}

    @rule(key=KEYS, new=RECORDS)
    def store(self, key: int, new: BlockRecord) -> None:
        """Add a block or change it."""
        old = self.records.get(key)
        assert self.columns.swap(key, old, new)
        self.keep(key, new)
        names = {(False, True): "added", (True, False): "removed", (True, True): "changed"}
        name = names.get((is_resident(old), is_resident(new)))
        assert self.follower.reported() == ([(name, key, 0)] if name is not None else [])

    def keep(self, key: int, new: BlockRecord) -> None:
        """Store a record in the dicts."""
        old = self.records.get(key)
        self.records[key] = new
        if old is None or (is_resident(new) and not is_resident(old)):
            self.accesses[key] = Access(50, 0)

    @rule(new=RECORDS)
    def store_siblings(self, new: BlockRecord) -> None:
        """Add siblings."""
        for key in (3, 4, 5, 6):
            self.store(key, new)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        """Remove a block, or nothing."""
        old = self.records.pop(key, None)
        assert self.columns.swap(key, old, None)
        self.accesses.pop(key, None)
        assert self.follower.reported() == [("removed", key, 0)] * is_resident(old)

    @rule(run=runs())
    def begin(self, run: BlockRun) -> None:
        """Add blocks that are being written, all or none."""
        is_new = self.records.keys().isdisjoint(run.keys)
        assert self.columns.begin(run) == is_new
        if is_new:
            for key, new in zip(run.keys, run.records(), strict=True):
                self.keep(key, new)

    @rule(keys=st.lists(KEYS, unique=True, min_size=1), ends=ENDS)
    def serve(self, keys: list[int], ends: Ends) -> None:
        """Let blocks serve, all or none, whatever became of them."""
        served = self.columns.serve(keys, ends)
        assert (served is not None) == all(ends.is_of(self.records.get(key)) for key in keys)
        if served is None:
            return
        assert [key for blocks in served for key in blocks.keys] == keys
        found = [blocks.location._replace(chunk=chunk) for blocks in served for chunk in blocks.chunks]
        for key, place in zip(keys, found, strict=True):
            old = self.records[key]
            assert place == ends.serving(old.locations[0])
            self.keep(key, old._replace(locations=(place,)))
        assert self.follower.reported() == [("added", key, 0) for key in keys]

    @rule(ends=ENDS, random=st.randoms(use_true_random=False))
    def serve_those_of_a_session(self, ends: Ends, random: Random) -> None:
        """Let all blocks of a session serve, in any order."""
        keys = [key for key, found in self.records.items() if ends.is_of(found)]
        random.shuffle(keys)
        self.serve(keys, ends)

    @rule(keys=st.lists(KEYS, unique=True, min_size=1), ids=st.sampled_from([{"a"}, {"a", "b"}]))
    def retire(self, keys: list[int], ids: set[str]) -> None:
        """Mark blocks as deleting, all or none, whatever became of them."""

        def ending(blocks: UniformRun) -> UniformRun | None:
            return blocks._replace(location=retired(blocks.location)) if blocks.location.id in ids else None

        rows = self.columns.rows_of(keys)
        marked = self.columns.retire_rows(rows, keys, ending) if rows is not None else None
        olds = [self.records.get(key) for key in keys]
        only = [old.locations[0] if old is not None and len(old.locations) == 1 else None for old in olds]
        can_go = [one is not None and one.status is LocationStatus.SERVING and one.id in ids for one in only]
        assert (marked is not None) == all(can_go)
        if marked is not None:
            assert [key for blocks in marked for key in blocks.keys] == keys
            for key, old, one in zip(keys, olds, only, strict=True):
                assert old is not None
                assert one is not None
                self.keep(key, old._replace(locations=(retired(one),)))
        assert self.follower.reported() == [("removed", key, 0) for key in keys if marked is not None]

    @rule(ids=st.sampled_from([{"a"}, {"a", "b"}]), random=st.randoms(use_true_random=False))
    def retire_all(self, ids: set[str], random: Random) -> None:
        """Mark all blocks as deleting that have one of these locations alone, in any order."""
        alone = [(key, found.locations[0]) for key, found in self.records.items() if len(found.locations) == 1]
        keys = [key for key, one in alone if one.status is LocationStatus.SERVING and one.id in ids]
        random.shuffle(keys)
        if keys:
            self.retire(keys, ids)

    @rule(key=KEYS, old=st.one_of(st.none(), RECORDS), new=st.one_of(st.none(), RECORDS))
    def abandon(self, key: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        """Expect another record than the stored one."""
        if self.records.get(key) != old:
            assert not self.columns.swap(key, old, new)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), change=st.sampled_from(["parent", "depth", "id", "chunk", "deadline", "more", "less"]))
    def lose_by_one_field(self, data: st.DataObject, change: str) -> None:
        """Expect the stored record but for one field: the columns compare every field."""
        key = data.draw(st.sampled_from(sorted(self.records)))
        there = self.records[key]
        first, *others = there.locations
        olds: Mapping[str, BlockRecord] = {
            "parent": there._replace(parent=0 if there.parent is None else None),
            "depth": there._replace(depth=there.depth + 1),
            "id": there._replace(locations=(first._replace(id="x"), *others)),
            "chunk": there._replace(locations=(first._replace(chunk=b"x"), *others)),
            "deadline": there._replace(locations=(first._replace(deadline=1.5), *others)),
            "more": there._replace(locations=(*there.locations, first)),
            "less": there._replace(locations=there.locations[:-1]),
        }
        assert not self.columns.swap(key, olds[change], None)

    @rule(counts=COUNTS, at=st.sampled_from([40, 60, 80]), moves=st.booleans())
    def touch(self, counts: Mapping[int, int], at: int, moves: bool) -> None:
        """Read blocks, some of which are not there; times go back too."""
        self.columns.touch(counts, at, moves=moves)
        reported = [("touched", key, count) for key, count in counts.items() if is_resident(self.records.get(key))]
        assert self.follower.reported() == reported
        for key in counts.keys() & self.accesses.keys():
            before, reads = self.accesses[key]
            self.accesses[key] = Access(max(before, at) if moves else before, min(reads + counts[key], 65_535))

    @rule(counts=COUNTS, at=st.sampled_from([40, 60, 80]))
    def requeue(self, counts: Mapping[int, int], at: int) -> None:
        """Set accesses, also of blocks that are not there."""
        self.columns.requeue(counts, at)
        for key in counts.keys() & self.records.keys():
            if is_resident(self.records[key]):
                self.accesses[key] = Access(at, counts[key])

    @rule(keys=st.lists(KEYS, max_size=9), many=st.booleans(), storages=STORAGES, stop_at_miss=st.booleans())
    def answer(self, keys: list[int], many: bool, storages: dict[str, int | None], stop_at_miss: bool) -> None:
        """Compose answers without a record per block."""
        keys = 12 * keys if many else keys
        compose = partial(compose_answer, view=TableView(storages))
        expected = [compose(self.records[key]) if key in self.records else None for key in keys]
        if stop_at_miss and None in expected:
            del expected[expected.index(None) :]
        found, missing = self.columns.answers(keys, compose, stop_at_miss=stop_at_miss)
        assert found == expected
        assert stop_at_miss or missing == sum(key not in self.records for key in keys)

    @rule()
    def clear(self) -> None:
        """Remove all."""
        self.columns.clear()
        reported = [("removed", key, 0) for key, found in self.records.items() if is_resident(found)]
        assert sorted(self.follower.reported()) == sorted(reported)
        self.records.clear()
        self.accesses.clear()

    @invariant()
    def holds_the_same(self) -> None:
        """All that can be asked agrees with the dict."""
        keys = [*range(9), -1, 2**63 - 1, -(2**63)]
        assert len(self.columns) == len(self.records)
        assert sorted(self.columns.keys()) == sorted(self.records)
        assert self.columns.get(keys) == [self.records.get(key) for key in keys]
        assert self.columns.accesses(keys) == [self.accesses.get(key) for key in keys]
        for key in keys:
            assert self.columns.family(key) == sorted(k for k, r in self.records.items() if r.parent == key)
        self.holds_the_same_by_row()
        assert self.follower.reported() == []
        resident = sorted(key for key, found in self.records.items() if is_resident(found))
        assert sorted(self.follower.blocks.values()) == resident
        assert all(self.columns.row(key) == row for row, key in self.follower.blocks.items())
        coldest = [access.at for _, access in self.columns.coldest(3)]
        assert coldest == sorted(self.accesses[key].at for key in resident)[:3]
        sample = self.columns.sample(3, Random(len(self.records)))
        assert len(set(sample)) == len(sample) == min(3, len(self.records))
        assert set(sample) <= self.records.keys()
        assert {len(column) for column in self.columns._columns} == {len(self.records)}
        parents = {made.parent for made in self.records.values()} - {None}
        assert self.columns._orphans.keys() == parents - self.records.keys()

    def holds_the_same_by_row(self) -> None:
        """What can be asked by row agrees with what can be asked by key; rows are dense."""
        rows = {key: self.columns.row(key) for key in self.records}
        assert sorted(row for row in rows.values() if row is not None) == list(range(len(self.columns)))
        for key, row in rows.items():
            assert row is not None
            made = self.records[key]
            assert (self.columns.key(row), self.columns.depth(row)) == (key, made.depth)
            assert self.columns.locations(row) == made.locations
            assert self.columns.access(row) == self.accesses[key]
            assert self.columns.is_resident(row) == is_resident(made)
            assert sorted(map(self.columns.key, self.columns.children(row))) == self.columns.family(key)


TestColumns = ColumnsMachine.TestCase
TestColumns.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None, derandomize=True)


def test_times_and_counts_beyond_their_columns_are_the_most_that_fits() -> None:
    columns = BlockColumns()
    columns.swap(1, None, record(location()._replace(written_at=1e12)))
    columns.swap(2, None, record(location()._replace(written_at=-7.0)))
    columns.touch({2: 1 << 40}, -5, moves=True)
    assert columns.accesses([1, 2]) == [Access(2**32 - 1, 0), Access(0, 65_535)]


def test_blocks_of_several_kinds_serve_together() -> None:
    columns = WrittenColumns()
    one = run_location()
    other = one._replace(spec_names=("tp0", "tp1"))
    for first, same in ((1, one), (3, other), (5, one)):
        keys = [first, first + 1]
        assert columns.begin(BlockRun(keys, first - 1 or None, first - 1, same, [b"%d" % key for key in keys]))
    follower = Follower(columns.observe, columns)
    served = columns.serve([6, 5, 4, 3, 2, 1], Ends("a1", priority=3))
    assert served is not None
    assert [(list(blocks.keys), list(blocks.chunks)) for blocks in served] == [
        ([6, 5], [b"6", b"5"]),
        ([4, 3], [b"4", b"3"]),
        ([2, 1], [b"2", b"1"]),
    ]
    assert follower.reported() == [("added", key, 0) for key in (6, 5, 4, 3, 2, 1)]


@pytest.mark.parametrize("field", ["storage", "size_bytes", "spec_names", "written_at", "id"])
def test_an_end_that_moves_blocks_is_a_defect(field: str) -> None:
    columns = WrittenColumns()
    assert columns.begin(BlockRun([1], None, 0, run_location(), [b"1"]))
    ends, others = Ends("a1"), {"storage": "b", "size_bytes": 9, "spec_names": (), "written_at": 1.0}

    def moving(blocks: UniformRun) -> UniformRun | None:
        served = ends(blocks)
        assert served is not None
        return served._replace(location=served.location._replace(**{field: others.get(field, "x")}))

    before = columns.get([1]), columns.accesses([1])
    with pytest.raises(AssertionError):
        columns.serve([1], moving)
    assert (columns.get([1]), columns.accesses([1])) == before


async def test_only_the_last_observer_gets_events() -> None:
    backend = MemoryBackend()
    first = Follower(backend.observe)
    second = Follower(backend.observe)
    await write(backend, {1: record()})
    backend.observe(None)
    await write(backend, {2: record()})
    assert (first.reported(), second.reported()) == ([], [("added", 1, 0)])


async def test_observers_get_loaded_blocks_too(tmp_path: Path) -> None:
    made = {key: record(location(status=Random(key).choice(list(LocationStatus)))) for key in range(30)}
    store = RocksStore(tmp_path, "never", SystemClock())
    await write(load_index(store).backend(1), made)
    await store.close()
    store = RocksStore(tmp_path, "never", SystemClock())
    backend = load_index(store).backend(1)
    follower = Follower(backend.observe)
    assert sorted(follower.blocks.values()) == [key for key in made if is_resident(made[key])]
    await backend.drop()
    assert follower.blocks == {}
    await store.close()


# ── What the memory backend promises beyond the contract ──


NFS = StorageKey("nfs", StorageType.ST_NFS)

PAGE = 1024


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
    answers = await write_pages(backend, 10)
    after, _ = tracemalloc.get_traced_memory()
    assert len(answers) == backend.key_count == 10 * PAGE
    assert (after - before) / backend.key_count < 400


async def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    backend = MemoryBackend()
    for start in range(0, 10_000, 500):
        new = {
            key: record(location(f"l{start}", status=LocationStatus.WRITING), parent=key - 1)
            for key in range(start, start + 500)
        }
        await backend.write_many([Change(key, None, made) for key, made in new.items()])
        await backend.write_many([Change(key, made, None) for key, made in new.items()])
    blocks = backend._blocks
    assert (backend.key_count, backend.usage_bytes) == (0, {NFS: 0})
    assert [len(column) for column in blocks._columns] == [0] * len(blocks._columns)
    assert (len(blocks._rows), blocks._orphans, len(backend._due)) == (0, {}, 0)
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
    # As the manager hands keys on: plain numbers make one long run of the table, and each removal walks along it.
    keys = mixed(range(20_000))
    await backend.write_many([Change(key, None, record()) for key in keys])
    await backend.write_many([Change(key, record(), None) for key in keys[3_000:]])
    random = CountingRandom(3)
    assert len(await backend.random_sample(100, random)) == 100
    assert 100 <= random.draws < 100 * 8


def test_headers_in_use_are_shared_and_others_are_forgotten() -> None:
    """Sessions come and go; those whose blocks stay keep one header each, however many others passed."""
    pool = HeaderPool()
    kept = [pool.pack((location(f"kept{number}"),))[0] for number in range(1500)]
    for number in range(5_000):
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
