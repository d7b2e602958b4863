"""Work that a cancelled caller must not cut in two."""

import asyncio

import pytest

from kvcm.index.uninterrupted import uninterrupted


class Work:
    """Takes so many turns of the loop, then returns or raises."""

    def __init__(self, turns: int = 3, error: Exception | None = None) -> None:
        self.turns_left = turns
        self._error = error

    async def run(self) -> str:
        while self.turns_left:
            self.turns_left -= 1
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return "done"


async def test_a_caller_that_stays_gets_the_result() -> None:
    assert await uninterrupted(Work().run()) == "done"
    assert await uninterrupted(Work(turns=0).run()) == "done"


async def test_a_caller_that_stays_gets_the_error() -> None:
    with pytest.raises(ZeroDivisionError):
        await uninterrupted(Work(error=ZeroDivisionError()).run())


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
@pytest.mark.parametrize("cancelled_after", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_caller_waits_for_the_end(error: Exception | None, cancelled_after: int, times: int) -> None:
    work = Work(turns=8, error=error)
    caller = asyncio.create_task(uninterrupted(work.run()))
    for _ in range(cancelled_after):
        await asyncio.sleep(0)
    for _ in range(times):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.turns_left == 0


async def test_a_timeout_is_still_a_timeout() -> None:
    work = Work(turns=5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await uninterrupted(work.run())
    assert work.turns_left == 0
