"""Documents in memory, deadlines, and outcomes that are kept for a while."""

from math import inf

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.store.memory import DueQueue, MemoryLease, MemoryStore, MemoryTable, Outcomes


async def test_a_listing_does_not_change_with_the_table() -> None:
    table = MemoryTable()
    await table.replace("a", None, b"1")
    before = await table.all()
    await table.replace("b", None, b"2")
    assert before == {"a": b"1"}


def test_nothing_suspends() -> None:
    """Tests of the packages above drive their coroutines with one step."""
    store = MemoryStore()
    table, lease = store.table("t"), MemoryLease(FakeClock())
    for call in (table.get("a"), table.all(), table.replace("a", None, b""), table.due(0, 1), table.version(),
                 lease.acquire("a", 1), lease.release("a"), store.flush(), store.close()):  # fmt: skip
        with pytest.raises(StopIteration):
            call.send(None)


# ── Deadlines that move: the queue stays exact, and no longer than what it holds ──


MOVES = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 4).map(float))), max_size=60)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(moves=MOVES, now=st.integers(0, 5).map(float), most=st.integers(0, 7))
def test_any_moves_leave_what_sorting_would_find(moves: list[tuple[int, float | None]], now: float, most: int) -> None:
    queue: DueQueue[int] = DueQueue()
    expected: dict[int, float] = {}
    for key, deadline in moves:
        if deadline is None:
            queue.discard(key)
            expected.pop(key, None)
        else:
            queue.put(key, deadline)
            expected[key] = deadline
        assert len(queue) == len(expected)
        assert queue.earliest <= min(expected.values(), default=inf)
    due = [key for deadline, key in sorted((deadline, key) for key, deadline in expected.items()) if deadline <= now]
    assert queue.until(now, most) == due[:most]
    assert queue.until(now, most) == due[:most]
    assert due or not most or queue.earliest > now, "after one call, no key is due"


SAME = st.tuples(st.lists(st.integers(0, 8), unique=True), st.one_of(st.none(), st.integers(0, 4).map(float)))


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(moves=st.lists(SAME, max_size=30), now=st.integers(0, 5).map(float), most=st.integers(0, 9))
def test_many_at_a_time_are_as_one_after_the_other(
    moves: list[tuple[list[int], float | None]], now: float, most: int
) -> None:
    queue: DueQueue[int] = DueQueue()
    expected: DueQueue[int] = DueQueue()
    for keys, deadline in moves:
        if deadline is None:
            queue.discard_all(keys)
        else:
            queue.put_all(keys, deadline)
        for key in keys:
            expected.discard(key) if deadline is None else expected.put(key, deadline)
        assert len(queue) == len(expected)
        assert queue.until(now, most) == expected.until(now, most)
    queue.clear()
    queue.put_all([3, 1], 1.0)
    assert queue.until(1.0, 9) == [1, 3]


def test_deadlines_that_move_leave_nothing_behind() -> None:
    queue: DueQueue[int] = DueQueue()
    for step in range(20_000):
        queue.put(step % 10, float(step))
    assert len(queue._heap) <= 2 * 10 + 64
    for key in range(10):
        queue.discard(key)
    assert len(queue._heap) <= 64
    assert queue.until(1e9, 100) == []


# ── How documents ended, in memory ──


def test_an_outcome_is_reported_until_it_is_over() -> None:
    outcomes = Outcomes()
    assert outcomes.store("a", b"1", until=10.0, now=0.0) == []
    assert [outcomes.get("a", now) for now in (0.0, 9.99, 10.0)] == [b"1", b"1", None]
    assert outcomes.get("b", 0.0) is None


def test_expired_outcomes_go_a_few_at_a_time_until_none_is_left() -> None:
    outcomes = Outcomes()
    for at in range(100):
        outcomes.store(f"n{at}", b"", until=10.0, now=0.0)
    forgotten = []
    for at in range(40):
        some = outcomes.store(f"late{at}", b"", until=90.0, now=50.0)
        assert len(some) <= 4
        forgotten += some
    assert forgotten == [f"n{at}" for at in range(100)]
    assert len(outcomes) == 40


def test_a_name_that_ends_again_is_as_young_as_its_last_end() -> None:
    outcomes = Outcomes()
    outcomes.store("a", b"1", until=10.0, now=0.0)
    outcomes.store("b", b"2", until=11.0, now=1.0)
    assert outcomes.store("a", b"3", until=70.0, now=10.0) == []
    assert outcomes.store("c", b"4", until=72.0, now=12.0) == ["b"]
    assert outcomes.get("a", 12.0) == b"3"
