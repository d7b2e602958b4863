"""Background tasks end whatever they do with their cancellation."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvcm.model import tasks
from kvcm.model.tasks import end_tasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch) -> None:
    monkeypatch.setattr(tasks, "_AGAIN_SECONDS", 0.01)
    lost = 0

    async def goes_round() -> None:
        nonlocal lost
        while lost < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(goes_round())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.cancelled()
    assert lost == 3


async def test_tasks_that_fail_or_have_ended_are_no_trouble() -> None:
    async def fails() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise ValueError

    async def nothing() -> None:
        pass

    ended, failing = asyncio.create_task(nothing()), asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end_tasks([ended, failing])
    assert isinstance(failing.exception(), ValueError)
    await end_tasks([])
