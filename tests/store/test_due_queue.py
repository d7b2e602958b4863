"""Deadlines that move: the queue stays exact, and no longer than what it holds."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.store.due_queue import DueQueue

MOVES = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 4).map(float))), max_size=60)


@settings(max_examples=300, deadline=None, derandomize=True)
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
    assert due or not most or queue.earliest > now, "who asked once knows that there is nothing"


ALIKE = st.tuples(st.lists(st.integers(0, 8), unique=True), st.one_of(st.none(), st.integers(0, 4).map(float)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(moves=st.lists(ALIKE, max_size=30), now=st.integers(0, 5).map(float), most=st.integers(0, 9))
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


def test_sessions_that_end_in_time_leave_nothing_behind() -> None:
    queue: DueQueue[int] = DueQueue()
    for step in range(1_000):
        queue.put_all(range(100), float(step))
        queue.discard_all(range(100))
    assert len(queue._heap) <= 64


def test_deadlines_that_move_leave_nothing_behind() -> None:
    queue: DueQueue[int] = DueQueue()
    for step in range(20_000):
        queue.put(step % 10, float(step))
    assert len(queue._heap) <= 2 * 10 + 64
    for key in range(10):
        queue.discard(key)
    assert len(queue._heap) <= 64
    assert queue.until(1e9, 100) == []


def test_what_was_cleared_is_gone() -> None:
    queue: DueQueue[str] = DueQueue()
    queue.put("a", 1.0)
    queue.clear()
    assert (len(queue), queue.until(2.0, 10)) == (0, [])
