"""A writer's hint how long blocks are worth keeping: decided with the session's end, and carried out with it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from cache_rig import Rig, group, opened

from kvcm.cache.sessions import StartedWrite, WriteSession
from kvcm.cache.write_values import Retention
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.locations import LocationStatus
from kvcm.model.masks import BlockMask

ALL = BlockMask(offset=2)


async def hints(rig: Rig, keys: list[int]) -> list[tuple[int, float]]:
    """Priority and time left of each block's only location; 0 for no limit."""
    records = await rig.manager.cache("i").index.get(keys)
    places = [place for record in records if record is not None for place in record.locations]
    assert [place.status for place in places] == [LocationStatus.SERVING] * len(keys)
    return [(place.priority, place.deadline and place.deadline - rig.clock.now()) for place in places]


async def finish(rig: Rig, started: StartedWrite, retention: Retention, success: BlockMask = ALL) -> None:
    await rig.manager.finish_write("i", started.session.id, success, retention)


async def test_the_hint_is_on_the_blocks_that_serve() -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        rig.wait(3)  # time runs from the decision, not from the start
        await finish(rig, started, Retention(-7, 60))
        assert await hints(rig, [1, 2]) == [(-7, 60), (-7, 60)]
        records = await rig.manager.cache("i").index.get([1, 2])
        assert [record.due for record in records if record is not None] == [rig.clock.now() + 60] * 2


async def test_without_a_hint_blocks_have_no_limit() -> None:
    with opened() as rig:
        await rig.store([1, 2])
        assert await hints(rig, [1, 2]) == [(0, 0), (0, 0)]
        started = await rig.start([3, 4])
        await finish(rig, started, Retention(5))
        assert await hints(rig, [3, 4]) == [(5, 0), (5, 0)]


async def test_failed_blocks_take_no_hint() -> None:
    with opened(group(delay_ms=0)) as rig:
        started = await rig.start([1, 2])
        await finish(rig, started, Retention(5, 60), BlockMask(offset=1))
        assert await hints(rig, [1]) == [(5, 60)]
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [["SERVING"], []]


@pytest.mark.parametrize("priority", [-100, 100])
async def test_priorities_reach_from_minus_100_to_100(priority: int) -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        with pytest.raises(InvalidArgumentError, match=r"retention.priority is -?101, must be from -100 to 100"):
            await finish(rig, started, Retention(priority + (1 if priority > 0 else -1)))
        with pytest.raises(InvalidArgumentError, match=r"retention.ttl_seconds is -1, must be >= 0"):
            await finish(rig, started, Retention(priority, -1))
        assert await rig.statuses([1, 2]) == [["WRITING"], ["WRITING"]]  # the session is still open
        await finish(rig, started, Retention(priority))
        assert await hints(rig, [1, 2]) == [(priority, 0), (priority, 0)]


async def test_any_time_that_a_message_can_carry_fits() -> None:
    with opened() as rig:
        await finish(rig, await rig.start([1, 2]), Retention(0, 2**63 - 1))
        assert all(0 < left <= 1_000_000_000 for _, left in await hints(rig, [1, 2]))


async def test_whoever_carries_a_decision_out_applies_its_hint_invariant_3() -> None:
    """The manager that decided died; the hint is in what it stored."""
    with opened() as rig:
        started = await rig.start([1, 2])
        session = started.session
        decided = replace(session, decision=(True, True), priority=9, keep_until=rig.clock.now() + 60)
        table = rig.tables.table("sessions")
        assert await table.replace(session.id, session.encoded(), decided.encoded(), rig.clock.now() + 5)
        rig.wait(5)
        await rig.manager.expire()
        assert await hints(rig, [1, 2]) == [(9, 55), (9, 55)]
        assert await table.all() == {}


async def test_the_finish_that_decided_counts_invariant_3() -> None:
    """The same finish asked again, later and with another hint, carries the first one out."""
    with opened() as rig:
        started = await rig.start([1, 2])
        session = started.session
        decided = replace(session, decision=(True, True), priority=9, keep_until=rig.clock.now() + 60)
        table = rig.tables.table("sessions")
        assert await table.replace(session.id, session.encoded(), decided.encoded(), rig.clock.now() + 5)
        rig.wait(2)
        await finish(rig, started, Retention(-9, 600))
        assert await hints(rig, [1, 2]) == [(9, 58), (9, 58)]
        assert await table.all() == {}


async def test_an_overdue_session_takes_no_hint() -> None:
    with opened() as rig:
        started = await rig.start([1, 2], timeout_seconds=5)
        rig.wait(5)
        with pytest.raises(InvalidArgumentError, match="expired"):
            await finish(rig, started, Retention(9, 60))


SESSION = WriteSession("s", 7, 12.5, "l", (1, -2), (True, False))


def test_a_hint_is_stored_with_the_session() -> None:
    for hinted in (replace(SESSION, priority=-3), replace(SESSION, keep_until=99.5), replace(SESSION, decision=None)):
        assert WriteSession.decoded("s", hinted.encoded()) == hinted


def test_a_session_of_before_the_hint_is_read_and_written_as_ever() -> None:
    """Its document is replaced by comparing every byte: a longer one would never be found again."""
    old = msgspec.msgpack.encode([1, 7, 12.5, "l", b"\1" + b"\0" * 7 + b"\xfe" + b"\xff" * 7, b"\1\0"])
    assert WriteSession.decoded("s", old) == SESSION
    assert SESSION.encoded() == old
