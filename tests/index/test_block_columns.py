"""The columns of the memory backend against a dict of records: rows move, and nobody notices."""

from collections.abc import Mapping
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from index_rig import location, record
from thoroughness import examples

from kvcm.index.backends.backend import Access
from kvcm.index.backends.columns import BlockColumns
from kvcm.model.locations import BlockRecord, LocationStatus

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


def is_resident(record: BlockRecord) -> bool:
    return any(place.status is LocationStatus.SERVING for place in record.locations)


class ColumnsMachine(RuleBasedStateMachine):
    """Swaps and reads at random, beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = BlockColumns()
        self.records: dict[int, BlockRecord] = {}
        self.accesses: dict[int, Access] = {}

    @rule(key=KEYS, new=RECORDS)
    def store(self, key: int, new: BlockRecord) -> None:
        """Add a block or change it."""
        old = self.records.get(key)
        assert self.columns.swap(key, old, new)
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
        assert self.columns.swap(key, self.records.pop(key, None), None)
        self.accesses.pop(key, None)

    @rule(key=KEYS, old=st.one_of(st.none(), RECORDS), new=st.one_of(st.none(), RECORDS))
    def lose(self, key: int, old: BlockRecord | None, new: BlockRecord | None) -> None:
        """Expect something else than what is there."""
        if self.records.get(key) != old:
            assert not self.columns.swap(key, old, new)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), change=st.sampled_from(["parent", "depth", "id", "chunk", "deadline", "more", "less"]))
    def lose_by_one_field(self, data: st.DataObject, change: str) -> None:
        """Expect what is there but for one field: every field is compared."""
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

    @rule()
    def clear(self) -> None:
        """Remove all."""
        self.columns.clear()
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
TestColumns.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None, derandomize=True)


def test_times_and_counts_beyond_their_columns_are_the_most_that_fits() -> None:
    columns = BlockColumns()
    columns.swap(1, None, record(location()._replace(written_at=1e12)))
    columns.swap(2, None, record(location()._replace(written_at=-7.0)))
    columns.touch({2: 1 << 40}, -5, moves=True)
    assert columns.accesses([1, 2]) == [Access(2**32 - 1, 0), Access(0, 65_535)]


def test_an_access_is_loaded_with_its_record() -> None:
    columns = BlockColumns()
    columns.insert(7, record(), Access(1234, 56))
    columns.insert(8, record())
    assert columns.accesses([7, 8]) == [Access(1234, 56), Access(0, 0)]
