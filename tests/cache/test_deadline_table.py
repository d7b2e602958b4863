"""The table of deadlines: an entry leaves exactly once, taken or due."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.deadlines import DeadlineTable


@dataclass(frozen=True)
class Entry:
    id: str
    deadline: float


IDS = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), IDS, st.integers(0, 20)),
        st.tuples(st.just("take"), IDS, st.just(0)),
        st.tuples(st.just("due"), IDS, st.integers(0, 6)),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_the_table_is_what_a_dict_would_be(steps: list[tuple[str, str, int]]) -> None:
    """Entries are put, renewed to earlier and later deadlines, taken, and fall due as time goes on."""
    table: DeadlineTable[Entry] = DeadlineTable()
    expected: dict[str, Entry] = {}
    now = 0
    for verb, entry_id, number in steps:
        if verb == "put":
            entry = Entry(entry_id, float(now + number))
            table.put(entry)
            expected[entry_id] = entry
        elif verb == "take":
            assert table.take(entry_id) == expected.pop(entry_id, None)
        else:
            now += number
            due = {key: entry for key, entry in expected.items() if entry.deadline <= now}
            popped = table.pop_due(now)
            assert {entry.id: entry for entry in popped} == due
            assert len(popped) == len(due)
            expected = {key: entry for key, entry in expected.items() if key not in due}
        assert len(table) == len(expected)
        assert sorted(entry.id for entry in table.values()) == sorted(expected)
        assert [table.get(key) for key in "abcde"] == [expected.get(key) for key in "abcde"]


def test_entries_fall_due_in_order_of_their_deadlines() -> None:
    table: DeadlineTable[Entry] = DeadlineTable()
    for entry in (Entry("c", 3.0), Entry("a", 1.0), Entry("b", 2.0)):
        table.put(entry)
    assert [entry.id for entry in table.pop_due(3.0)] == ["a", "b", "c"]
    assert table.pop_due(100.0) == []


def test_a_deadline_is_exact() -> None:
    table: DeadlineTable[Entry] = DeadlineTable()
    table.put(Entry("a", 10.0))
    assert table.pop_due(9.999999) == []
    assert table.pop_due(10.0) == [Entry("a", 10.0)]


def test_a_renewed_entry_ignores_its_old_deadline() -> None:
    table: DeadlineTable[Entry] = DeadlineTable()
    table.put(Entry("later", 1.0))
    table.put(Entry("later", 50.0))
    table.put(Entry("sooner", 50.0))
    table.put(Entry("sooner", 1.0))
    assert [entry.id for entry in table.pop_due(2.0)] == ["sooner"]
    assert table.pop_due(49.0) == []
    assert [entry.id for entry in table.pop_due(50.0)] == ["later"]
