"""Blocks written many at a time are as if they had been written one after the other."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.index.backends.alike import Alike
from kvcm.index.backends.columns import BlockColumns
from kvcm.index.backends.rows import RowObserver
from kvcm.index.backends.written_columns import WrittenColumns
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.runs import BlockRun
from kvcm.model.storages import StorageType

FIXED = settings(max_examples=300, deadline=None, derandomize=True)
KEY_RANGE = range(-4, 9)
KEYS = st.integers(min(KEY_RANGE), max(KEY_RANGE))


def location(key: int, session: str, size: int) -> Location:
    chunk = f"{session}/{key}".encode()
    writing = LocationStatus.WRITING
    return Location(session[:1], "nfs", StorageType.ST_NFS, writing, ("tp0",), chunk, size, 5.0, session, 60.0)


@st.composite
def runs(draw: st.DrawFn) -> BlockRun:
    """Blocks of one chain, which may hang on one that others are the parents of, or on none."""
    keys = draw(st.lists(KEYS, unique=True, min_size=1, max_size=6))
    parent = draw(st.none() | KEYS.filter(lambda key: key not in keys))
    session, size = draw(st.sampled_from(["a1", "b2"])), draw(st.sampled_from([1, 7]))
    alike = location(0, session, size)._replace(chunk=b"")
    return BlockRun(keys, parent, draw(st.integers(0, 3)), alike, [f"{session}/{key}".encode() for key in keys])


class Ends:
    """Lets the blocks of a session serve."""

    def __init__(self, session: str, deadline: float, priority: int, addition: bytes) -> None:
        self.session = session
        self.hint = (deadline, priority)
        self.addition = addition

    def __call__(self, blocks: Alike) -> Alike | None:
        if blocks.location.session_id != self.session:
            return None
        location = self.serving(blocks.location)._replace(chunk=b"")
        return Alike(blocks.keys, location, [chunk + self.addition for chunk in blocks.chunks])

    def serving(self, one: Location) -> Location:
        deadline, priority = self.hint
        served = one._replace(status=LocationStatus.SERVING, session_id="", deadline=deadline, priority=priority)
        return served._replace(chunk=one.chunk + self.addition)

    def of_record(self, record: BlockRecord | None) -> BlockRecord | None:
        """Return the record as it serves, None where that is not for this end to say."""
        if record is None or len(record.locations) != 1:
            return None
        (only,) = record.locations
        if only.status is not LocationStatus.WRITING or only.session_id != self.session:
            return None
        return record._replace(locations=(self.serving(only),))


ENDS = st.builds(Ends, st.sampled_from(["a1", "b2"]), st.sampled_from([0.0, 99.0]), st.integers(0, 1), st.just(b""))
CHECKED_ENDS = st.builds(Ends, st.sampled_from(["a1", "b2"]), st.just(0.0), st.just(0), st.sampled_from([b"", b"+"]))


class Told(RowObserver):
    """Remembers which keys it was told of."""

    def __init__(self, columns: BlockColumns) -> None:
        self.columns = columns
        self.events: list[tuple[str, int]] = []

    def added(self, row: int) -> None:
        assert self.columns.is_resident(row)
        self.events.append(("added", self.columns.key(row)))

    def added_together(self, rows: Sequence[int], keys: Sequence[int], priority: int) -> None:
        assert [self.columns.key(row) for row in rows] == list(keys)
        for row in rows:
            assert self.columns.priority(row) == priority
            self.added(row)

    def removed(self, row: int) -> None:
        self.events.append(("removed", self.columns.key(row)))

    def changed(self, row: int) -> None:
        self.events.append(("changed", self.columns.key(row)))

    def moved(self, row: int, to: int) -> None:
        self.events.append(("moved", to))

    def touched_together(self, rows: Sequence[int], reads: Sequence[int]) -> None:
        self.events.append(("touched", tuple(reads)))


def state(columns: BlockColumns) -> object:
    """Everything that can be asked of columns."""
    keys = range(-4, 9)
    return (
        columns.get(keys),
        columns.accesses(keys),
        [columns.family(key) for key in keys],
        columns.coldest(20),
        columns.keys() or array("q"),
        [columns.priority(row) for row in range(len(columns))],
    )


def begin_each(columns: BlockColumns, run: BlockRun) -> bool:
    """Begin one block after the other, all or nothing."""
    if any(key in columns for key in run.keys):
        return False
    return all(columns.swap(key, None, new) for key, new in zip(run.keys, run.records(), strict=True))


def serve_each(columns: BlockColumns, keys: Sequence[int], ends: Ends) -> bool:
    """End one block after the other, all or nothing."""
    olds = columns.get(keys)
    news = [ends.of_record(old) for old in olds]
    if None in news:
        return False
    return all(columns.swap(key, old, new) for key, old, new in zip(keys, olds, news, strict=True))


STEPS = st.one_of(
    st.tuples(st.just("begin"), runs()),
    st.tuples(st.just("serve"), st.tuples(st.lists(KEYS, unique=True, min_size=1), ENDS | CHECKED_ENDS)),
    st.tuples(st.just("serve those"), st.tuples(st.randoms(use_true_random=False), ENDS | CHECKED_ENDS)),
    st.tuples(
        st.sampled_from(["remove", "add a second", "mark", "read"]), st.lists(KEYS, unique=True, min_size=1, max_size=3)
    ),
)


@FIXED
@given(st.lists(STEPS, max_size=14))
def test_many_at_a_time_are_as_one_after_the_other(steps: list[tuple[str, Any]]) -> None:
    plain, bulk = BlockColumns(), WrittenColumns()
    told = Told(plain), Told(bulk)
    plain.follow(told[0])
    bulk.follow(told[1])
    for step, what in steps:
        if step == "begin":
            assert bulk.begin(what) == begin_each(plain, what)
        elif step.startswith("serve"):
            keys, ends = what
            if step == "serve those":  # blocks of the session, whatever became of them, in any order
                keys = blocks_of(plain, ends.session)
                what[0].shuffle(keys)
            served = bulk.serve(keys, ends)
            assert (served is not None) == serve_each(plain, keys, ends)
            check_told(bulk, keys, served)
        else:
            for columns in (plain, bulk):
                change_each(columns, step, what)
        assert state(bulk) == state(plain)
        assert told[0].events == told[1].events


def blocks_of(columns: BlockColumns, session: str) -> list[int]:
    found = zip(KEY_RANGE, columns.get(KEY_RANGE), strict=True)
    return [key for key, record in found if record is not None and record.locations[0].session_id == session]


def check_told(columns: BlockColumns, keys: Sequence[int], served: list[Alike] | None) -> None:
    """What is returned of blocks that serve is what is there."""
    if served is None:
        return
    assert [key for blocks in served for key in blocks.keys] == list(keys)
    found = [blocks.location._replace(chunk=chunk) for blocks in served for chunk in blocks.chunks]
    assert [record.locations for record in columns.get(keys) if record is not None] == [(one,) for one in found]


def change_each(columns: BlockColumns, step: str, keys: Sequence[int]) -> None:
    if step == "read":
        columns.touch(dict.fromkeys(keys, 2), 9, moves=True)
        return
    for key, old in zip(keys, columns.get(keys), strict=True):
        if step == "remove":
            columns.swap(key, old, None)
        elif old is not None and step == "mark":  # what never served keeps its session
            marked = [place._replace(status=LocationStatus.DELETING) for place in old.locations]
            columns.swap(key, old, old._replace(locations=tuple(marked)))
        elif old is not None:
            columns.swap(key, old, old._replace(locations=(*old.locations, location(key, "c3", 1))))


def test_blocks_of_several_kinds_serve_together() -> None:
    columns = WrittenColumns()
    one = location(0, "a1", 1)._replace(chunk=b"")
    other = one._replace(spec_names=("tp0", "tp1"))
    for first, alike in ((1, one), (3, other), (5, one)):
        keys = [first, first + 1]
        assert columns.begin(BlockRun(keys, first - 1 or None, first - 1, alike, [b"%d" % key for key in keys]))
    told = Told(columns)
    columns.follow(told)
    served = columns.serve([6, 5, 4, 3, 2, 1], Ends("a1", 0.0, 3, b""))
    assert served is not None
    assert [(list(blocks.keys), list(blocks.chunks)) for blocks in served] == [
        ([6, 5], [b"6", b"5"]),
        ([4, 3], [b"4", b"3"]),
        ([2, 1], [b"2", b"1"]),
    ]
    assert told.events == [("added", key) for key in (6, 5, 4, 3, 2, 1)]


@pytest.mark.parametrize("field", ["storage", "size_bytes", "spec_names", "written_at", "id"])
def test_an_end_that_moves_blocks_is_a_defect(field: str) -> None:
    columns = WrittenColumns()
    assert columns.begin(BlockRun([1], None, 0, location(0, "a1", 1)._replace(chunk=b""), [b"1"]))
    ends, others = Ends("a1", 0.0, 0, b""), {"storage": "b", "size_bytes": 9, "spec_names": (), "written_at": 1.0}

    def moving(blocks: Alike) -> Alike | None:
        served = ends(blocks)
        assert served is not None
        return served._replace(location=served.location._replace(**{field: others.get(field, "x")}))

    before = state(columns)
    with pytest.raises(AssertionError):
        columns.serve([1], moving)
    assert state(columns) == before
