"""The line in which requests wait."""

from __future__ import annotations

import asyncio

import pytest

from kvcm.gateway.waiting_line import LineFullError, WaitingLine


class Turns:
    """Turns are numbers; so many may be out at a time."""

    def __init__(self, most: int) -> None:
        self.free = most
        self.undone: list[int] = []
        self.given = 0
        self.line: WaitingLine[int] = WaitingLine(10, self.give_back)

    def try_begin(self) -> int | None:
        if not self.free:
            return None
        self.free -= 1
        self.given += 1
        return self.given

    def give_back(self, turn: int) -> None:
        self.undone.append(turn)
        self.free += 1

    def end(self) -> None:
        self.free += 1
        self.line.advance()

    def turn(self, deadline: float = float("inf")) -> asyncio.Task[int]:
        return asyncio.create_task(self.line.turn(self.try_begin, deadline))


async def until_waiting(turns: Turns, count: int) -> None:
    async with asyncio.timeout(60):
        while turns.line.waiting != count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_turns_come_in_order() -> None:
    turns = Turns(1)
    assert await turns.turn() == 1
    waiting = [turns.turn() for _ in range(3)]
    await until_waiting(turns, 3)
    for expected in (2, 3, 4):
        turns.end()
        assert await waiting[expected - 2] == expected
    assert turns.undone == []


async def test_no_waiter_overtakes() -> None:
    turns = Turns(0)
    first = turns.turn()
    await until_waiting(turns, 1)
    turns.free = 1
    second = turns.turn()
    await until_waiting(turns, 2)
    turns.line.advance()
    assert await first == 1
    turns.end()
    assert await second == 2


async def test_a_turn_that_comes_as_its_waiter_leaves_goes_to_the_next() -> None:
    turns = Turns(0)
    first, second = turns.turn(), turns.turn()
    await until_waiting(turns, 2)
    turns.end()  # hands the turn to the first one, which has not run yet
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 2
    assert (turns.undone, turns.free) == ([1], 0)


async def test_a_waiter_that_leaves_is_passed_over() -> None:
    turns = Turns(0)
    first, second = turns.turn(), turns.turn()
    await until_waiting(turns, 2)
    first.cancel()
    turns.end()
    assert await second == 1
    assert turns.undone == []


async def test_deadlines_and_full_lines_are_errors() -> None:
    turns = Turns(0)
    with pytest.raises(TimeoutError):
        await turns.turn(deadline=asyncio.get_running_loop().time())
    waiting = [turns.turn() for _ in range(10)]
    await until_waiting(turns, 10)
    with pytest.raises(LineFullError):
        await turns.turn()
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert turns.line.waiting == 0


async def test_an_error_of_one_is_for_that_one() -> None:
    turns = Turns(0)
    calls = 0

    def fail() -> int | None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError("no")
        return None

    failing = asyncio.create_task(turns.line.turn(fail, float("inf")))
    await until_waiting(turns, 1)
    other = turns.turn()
    await until_waiting(turns, 2)
    turns.end()
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await other == 1
