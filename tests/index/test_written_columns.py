"""Blocks written many at a time are as if they had been written one after the other."""

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.index.backends.columns import BlockColumns
from kvcm.index.backends.rows import RowObserver
from kvcm.index.backends.written_columns import WrittenColumns
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.storages import StorageType

FIXED = settings(max_examples=300, deadline=None, derandomize=True)
KEYS = st.integers(-4, 8)


def location(key: int, session: str, size: int) -> Location:
    chunk = f"{session}/{key}".encode()
    writing = LocationStatus.WRITING
    return Location(session[:1], "nfs", StorageType.ST_NFS, writing, ("tp0",), chunk, size, 5.0, session, 60.0)


def served(record: BlockRecord, deadline: float = 0.0) -> BlockRecord:
    (only,) = record.locations
    serving = only._replace(status=LocationStatus.SERVING, session_id="", deadline=deadline)
    return record._replace(locations=(serving,))


@st.composite
def writes(draw: st.DrawFn) -> dict[int, BlockRecord]:
    """Blocks of some chains, in the order of a request."""
    keys = draw(st.lists(KEYS, unique=True, min_size=1, max_size=6))
    session, size = draw(st.sampled_from(["a1", "b2"])), draw(st.sampled_from([1, 7]))
    records = {}
    for depth, key in enumerate(keys):
        parent = draw(st.none() | KEYS)
        records[key] = BlockRecord(parent, depth, (location(key, session, draw(st.sampled_from([size, size, 3]))),))
    return records


class Told(RowObserver):
    """Remembers which keys it was told of."""

    def __init__(self, columns: BlockColumns) -> None:
        self.columns = columns
        self.events: list[tuple[str, int]] = []

    def added(self, row: int) -> None:
        assert self.columns.is_resident(row)
        self.events.append(("added", self.columns.key(row)))

    def added_together(self, rows: Sequence[int], priority: int) -> None:
        for row in rows:
            assert self.columns.priority(row) == priority
            self.added(row)

    def removed(self, row: int) -> None:
        self.events.append(("removed", self.columns.key(row)))

    def changed(self, row: int) -> None:
        self.events.append(("changed", self.columns.key(row)))

    def moved(self, row: int, to: int) -> None:
        self.events.append(("moved", to))

    def touched(self, row: int, reads: int) -> None:
        self.events.append(("touched", reads))


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


def write_each(columns: BlockColumns, olds: list[BlockRecord | None], records: dict[int, BlockRecord]) -> bool:
    """Write one after the other, all or nothing."""
    if columns.get(list(records)) != olds:
        return False
    return all(columns.swap(key, old, new) for (key, new), old in zip(records.items(), olds, strict=True))


@FIXED
@given(st.lists(st.tuples(st.sampled_from(["begin", "serve", "limited", "remove"]), writes()), max_size=12))
def test_many_at_a_time_are_as_one_after_the_other(steps: list[tuple[str, dict[int, BlockRecord]]]) -> None:
    plain, bulk = BlockColumns(), WrittenColumns()
    told = Told(plain), Told(bulk)
    plain.follow(told[0])
    bulk.follow(told[1])
    for step, records in steps:
        keys = list(records)
        if step == "remove":
            for columns in (plain, bulk):
                for key, old in zip(keys, columns.get(keys), strict=True):
                    columns.swap(key, old, None)
        elif step == "begin":
            headers = bulk.begin(keys, list(records.values()))
            assert (headers is not None) == write_each(plain, [None] * len(keys), records)
            if headers is not None:
                wanted = [record.locations[0] for record in records.values()]
                assert headers == [each[:5] + each[6:] for each in wanted]
        else:
            limit = 99.0 if step == "limited" else 0.0
            news = {key: served(record, limit) for key, record in records.items()}
            outcome = bulk.serve(keys, list(records.values()), list(news.values()))
            assert outcome == write_each(plain, list(records.values()), news)
        assert state(bulk) == state(plain)
        assert told[0].events == told[1].events


@FIXED
@given(writes(), st.data())
def test_nothing_is_done_where_a_block_is_of_another_kind(records: dict[int, BlockRecord], data: st.DataObject) -> None:
    keys = list(records)
    odd = data.draw(st.sampled_from(keys))
    columns = WrittenColumns()
    twice = records[odd]._replace(locations=(*records[odd].locations, location(odd, "c3", 1)))
    for other in (served(records[odd]), twice):
        assert columns.begin(keys, list((records | {odd: other}).values())) is None
        assert len(columns) == 0
    assert columns.begin(keys, list(records.values())) is not None
    before = state(columns)
    news = {key: served(record) for key, record in records.items()}
    moved = news[odd].locations[0]._replace(storage="other")
    larger = news[odd].locations[0]._replace(size_bytes=1000)
    for other in (
        records[odd],
        twice,
        news[odd]._replace(depth=77),
        news[odd]._replace(parent=77),
        news[odd]._replace(locations=(moved,)),
        news[odd]._replace(locations=(larger,)),
    ):
        assert not columns.serve(keys, list(records.values()), list((news | {odd: other}).values()))
        assert state(columns) == before
    stale = records[odd]._replace(locations=(records[odd].locations[0]._replace(deadline=1.0),))
    assert not columns.serve(keys, list((records | {odd: stale}).values()), list(news.values()))
    assert state(columns) == before
