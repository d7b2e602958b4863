"""The lane of long requests: few at a time, in order, none in vain; as histories against what must always hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.service.lanes import DEADLINE, QUEUE, Lane
from kvcm.service.turned_away import TurnedAwayError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _lane(slots: int = 1, places: int = 2, most_wait: float = 0.0) -> tuple[Lane, Clock]:
    clock = Clock()
    return Lane(clock, slots, places, most_wait), clock


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _paced(lane: Lane, clock: Clock, seconds: float) -> None:
    """Have the lane measure a pace."""
    began = await lane.enter(None)
    clock.now += seconds
    lane.leave(began)


async def _refused(entering: Awaitable[float]) -> TurnedAwayError:
    with pytest.raises(TurnedAwayError) as refused:
        await entering
    return refused.value


async def test_who_finds_a_slot_does_not_wait_and_the_others_come_in_order() -> None:
    lane, _ = _lane(slots=2, places=3)
    order: list[int] = []

    async def visit(number: int) -> None:
        await lane.enter(None)
        order.append(number)

    visits = [asyncio.create_task(visit(number)) for number in range(5)]
    await _settled()
    assert (order, lane.inside, lane.waiting) == ([0, 1], 2, 3)
    for count in (3, 4, 5):
        lane.leave(100.0)
        await _settled()
        assert order == list(range(count))
    await asyncio.gather(*visits)


async def test_a_queue_that_is_full_refuses_and_says_when_to_come_back() -> None:
    lane, clock = _lane(places=1)
    await _paced(lane, clock, 3.0)
    await lane.enter(None)
    waiting = asyncio.create_task(lane.enter(None))
    await _settled()
    refused = await _refused(lane.enter(None))
    assert (refused.reason, refused.http_status, refused.retry_after_seconds) == (QUEUE, 503, 6.0)
    lane.leave(clock.now)
    await waiting


async def test_what_would_wait_for_too_long_by_the_pace_is_refused_at_once() -> None:
    lane, clock = _lane(slots=2, places=100, most_wait=2.0)
    await _paced(lane, clock, 1.0)
    running = [await lane.enter(None) for _ in range(2)]
    waiting = [asyncio.create_task(lane.enter(None)) for _ in range(4)]
    await _settled()
    assert lane.waiting == 4
    refused = await _refused(lane.enter(None))
    assert (refused.reason, refused.retry_after_seconds) == (QUEUE, 2.5)
    for began in running * 2:
        lane.leave(began)
        await _settled()
    await asyncio.gather(*waiting)


async def test_a_deadline_that_the_pace_cannot_meet_is_refused_at_once() -> None:
    lane, clock = _lane(places=100)
    await _paced(lane, clock, 1.0)
    began = await lane.enter(None)
    refused = await _refused(lane.enter(clock.now + 2.0))  # a second to wait, and one to be answered
    assert (refused.reason, lane.waiting) == (DEADLINE, 0)
    waiting = asyncio.create_task(lane.enter(clock.now + 60.0))
    await _settled()
    assert lane.waiting == 1
    lane.leave(began)
    await waiting


async def test_a_slot_that_is_free_is_taken_whatever_the_pace() -> None:
    lane, clock = _lane(most_wait=0.001)
    await _paced(lane, clock, 50.0)
    assert await lane.enter(clock.now + 0.001) == clock.now


@pytest.mark.parametrize(("most_wait", "left", "reason"), [(0.01, None, QUEUE), (0.0, 0.01, DEADLINE)])
async def test_whose_turn_does_not_come_in_time_is_refused_then(
    most_wait: float, left: float | None, reason: str
) -> None:
    lane, clock = _lane(most_wait=most_wait)
    await lane.enter(None)
    refused = await _refused(lane.enter(None if left is None else clock.now + left))
    assert (refused.reason, lane.inside, lane.waiting) == (reason, 1, 0)


async def test_the_pace_follows_what_happens() -> None:
    lane, clock = _lane()
    await _paced(lane, clock, 10.0)
    for _ in range(40):
        await _paced(lane, clock, 1.0)
    await lane.enter(None)
    assert 1.0 <= lane.wait_seconds() < 1.1


async def test_more_slots_let_more_in_at_once() -> None:
    lane, _ = _lane(slots=1, places=5)
    await lane.enter(None)
    waiting = [asyncio.create_task(lane.enter(None)) for _ in range(3)]
    await _settled()
    lane.set(3, 5, 0.0)
    await _settled()
    assert (lane.inside, lane.waiting) == (3, 1)
    lane.leave(100.0)
    await asyncio.gather(*waiting)


async def test_a_turn_that_comes_in_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    lane, _ = _lane(places=2)
    began = await lane.enter(None)
    first, second = (asyncio.create_task(lane.enter(None)) for _ in range(2))
    await _settled()
    lane.leave(began)  # the turn is the first one's, who does not know yet
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (lane.inside, lane.waiting) == (1, 0)


ACTIONS = st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 9)), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@given(slots=st.integers(1, 3), places=st.integers(0, 4), actions=ACTIONS)
def test_no_slot_is_lost_or_given_twice(slots: int, places: int, actions: list[tuple[str, int]]) -> None:
    asyncio.run(_live(slots, places, actions))


async def _live(slots: int, places: int, actions: list[tuple[str, int]]) -> None:
    lane, _ = _lane(slots, places)
    tasks: list[asyncio.Task[float]] = []
    inside: list[asyncio.Task[float]] = []
    for action, number in actions:
        if action == "come":
            tasks.append(asyncio.create_task(lane.enter(None)))
        elif action == "leave" and inside:
            lane.leave(inside.pop(number % len(inside)).result())
        elif action == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        if number % 3:
            await _settled()
        _take(tasks, inside)
        _check(lane, slots, places, inside, tasks)
    await _settled()
    _take(tasks, inside)
    while inside:
        lane.leave(inside.pop().result())
        await _settled()
        _take(tasks, inside)
        _check(lane, slots, places, inside, tasks)
    assert (lane.inside, lane.waiting, tasks) == (0, 0, [])


def _take(tasks: list[asyncio.Task[Any]], inside: list[asyncio.Task[Any]]) -> None:
    """Note who came in, and forget who was refused or cancelled."""
    for task in [task for task in tasks if task.done()]:
        tasks.remove(task)
        with contextlib.suppress(TurnedAwayError, asyncio.CancelledError):
            task.result()
            inside.append(task)


def _check(lane: Lane, slots: int, places: int, inside: list[Any], tasks: list[Any]) -> None:
    assert len(inside) <= lane.inside <= slots
    assert lane.waiting <= places
    assert lane.inside - len(inside) + lane.waiting <= len(tasks)
    if lane.waiting:
        assert lane.inside == slots
