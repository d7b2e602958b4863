"""An operator reads in the log what a manager that does not end waits for."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from kvcm.draining import SlowEnd


async def _stands_here(event: asyncio.Event) -> None:
    await event.wait()


async def _for_ever(event: asyncio.Event) -> None:
    await _stands_here(event)


async def test_tasks_and_where_they_stand_are_told_until_the_end() -> None:
    event = asyncio.Event()
    with capture_logs() as logs:
        with SlowEnd(after_seconds=0.0) as end:
            task = asyncio.create_task(_for_ever(event))
            await asyncio.sleep(0)
            assert logs == []  # nothing has to end yet
            end.begin()
            for _ in range(10):  # turns of the loop
                await asyncio.sleep(0)
        told = len(logs)
        assert told > 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(logs) == told
    event.set()
    await task
    assert {log["event"] for log in logs} == {"ending_is_slow"}
    assert any("_for_ever > _stands_here > Event.wait" in place for place in logs[0]["tasks"])
