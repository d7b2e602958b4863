"""Stages of requests are measured where somebody asks, nested as they ran, and not otherwise."""

from __future__ import annotations

import asyncio
import contextlib

from kvcm.telemetry.stages import Stage, note_stage, opened_stage, staged


@staged("inner")
async def inner(count: int) -> int:
    note_stage(keys=count)
    await asyncio.sleep(0)
    return count


@staged("outer")
async def outer() -> int:
    return await inner(1) + await inner(2)


@staged("broken")
async def broken() -> None:
    raise ValueError("broken")


def names(stage: Stage) -> dict[str, object]:
    return {f"{number} {part.name} {part.notes}": names(part) for number, part in enumerate(stage.parts)}


async def test_stages_are_nested_as_they_ran() -> None:
    with opened_stage("call", "x.py:call") as root:
        assert await outer() == 3
    assert names(root) == {"0 outer {}": {"0 inner {'keys': 1}": {}, "1 inner {'keys': 2}": {}}}
    assert root.parts[0].place == "test_stages.py:outer"
    assert root.begin_ns <= root.parts[0].begin_ns <= root.parts[0].end_ns <= root.end_ns


async def test_while_nobody_measures_nothing_is_kept() -> None:
    assert await outer() == 3
    with opened_stage("call", "x.py:call") as root:
        pass
    assert await outer() == 3
    assert root.parts == []


async def test_requests_at_the_same_time_have_stages_of_their_own() -> None:
    async def call(count: int) -> Stage:
        with opened_stage("call", "x.py:call") as root:
            await inner(count)
        return root

    first, second = await asyncio.gather(call(1), call(2))
    assert [part.notes for part in (*first.parts, *second.parts)] == [{"keys": 1}, {"keys": 2}]


async def test_a_stage_that_fails_ends() -> None:
    with opened_stage("call", "x.py:call") as root:
        with contextlib.suppress(ValueError):
            await broken()
        await inner(1)
    assert [(part.name, part.end_ns > 0) for part in root.parts] == [("broken", True), ("inner", True)]
