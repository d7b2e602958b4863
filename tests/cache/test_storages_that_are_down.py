"""A storage that is down costs hits while it is away, and no request: reads skip it, writes go to the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from cache_rig import Rig, group, opened, uris
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.model.errors import NotReadyError
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.storage.health import HealthState, StorageHealth

KEYS = [1, 2, 3]


def down(rig: Rig, storage: str = "slow") -> None:
    rig.storages.set_health(storage, StorageHealth(HealthState.SH_DOWN, "it is gone"))


def up(rig: Rig, storage: str = "slow", state: HealthState = HealthState.SH_UP) -> None:
    rig.storages.set_health(storage, StorageHealth(state))


async def hosts(rig: Rig, keys: Sequence[int] = KEYS) -> list[str]:
    """The storages that a match names for the blocks it finds."""
    found = await rig.manager.match("i", MatchQuery(MatchMode.PREFIX_MATCH, keys))
    return [location["tp0"].partition("://")[2].partition("/")[0] for location in uris(found.chunks)]


@pytest.mark.parametrize("state", [HealthState.SH_UP, HealthState.SH_DEGRADED])
async def test_reads_skip_what_is_down_and_find_it_again_when_it_is_back(state: HealthState) -> None:
    """Also those whose answers are kept."""
    with opened() as rig:
        await rig.store(KEYS)
        for _ in range(2):
            assert await hosts(rig) == ["slow"] * 3
            down(rig)
            assert await hosts(rig) == []
            up(rig, state=state)
        assert await hosts(rig) == ["slow"] * 3


async def test_of_two_copies_the_one_that_can_be_read_is_named() -> None:
    with opened() as rig:
        await rig.store(KEYS)
        rig.enable("slow", False)
        await rig.store(KEYS)
        rig.enable("slow", True)
        down(rig)
        assert await hosts(rig) == ["slow2"] * 3
        up(rig)
        down(rig, "slow2")
        assert await hosts(rig) == ["slow"] * 3


async def test_blocks_on_what_is_down_are_written_to_the_next_candidate_and_both_copies_serve_afterwards() -> None:
    with opened() as rig:
        await rig.store(KEYS)
        down(rig)
        again = await rig.store([*KEYS, 4])
        assert len(again.chunks) == 4
        assert await hosts(rig, [*KEYS, 4]) == ["slow2"] * 4
        up(rig)
        assert await rig.statuses([*KEYS, 4]) == [["SERVING", "SERVING"]] * 3 + [["SERVING"]]
        assert len(await hosts(rig, [*KEYS, 4])) == 4
        assert (await rig.start([*KEYS, 4])).chunks == []
        for storage, other in (("slow", "slow2"), ("slow2", "slow")):
            down(rig, storage)
            assert await hosts(rig) == [other] * 3
            up(rig, storage)


async def test_what_is_full_is_read_and_written_to_last() -> None:
    with opened() as rig:
        await rig.store(KEYS)
        full = StorageHealth(HealthState.SH_DEGRADED, "no space left", is_unwritable=True)
        rig.storages.set_health("slow", full)
        await rig.store([*KEYS, 4])
        assert await hosts(rig, [*KEYS, 4]) == ["slow"] * 3 + ["slow2"]
        rig.storages.set_health("slow2", full)
        await rig.store([5])
        assert await hosts(rig, [5]) == ["slow"], "it may have been emptied a moment ago"


async def test_a_session_on_a_storage_that_went_down_is_finished_as_ever() -> None:
    with opened() as rig:
        started = await rig.start(KEYS)
        down(rig)
        await rig.manager.finish_write("i", started.session.id, BlockMask(offset=3))
        assert await hosts(rig) == []
        up(rig)
        assert await hosts(rig) == ["slow"] * 3


async def test_usage_and_deletions_do_not_depend_on_it() -> None:
    with opened(group(delay_ms=0)) as rig:
        await rig.store(KEYS)
        used_bytes = rig.used_bytes
        down(rig)
        assert rig.used_bytes == used_bytes > 0
        await rig.manager.remove("i", KEYS, NO_MASK)
        await rig.executor.run_due()
        assert rig.used_bytes == 0


async def test_with_no_candidate_left_the_caller_is_told_so() -> None:
    with opened() as rig:
        await rig.store(KEYS)
        down(rig)
        down(rig, "slow2")
        with pytest.raises(NotReadyError, match="no storage of group 'group' is available"):
            await hosts(rig)
        with pytest.raises(NotReadyError, match="no storage of group 'group' is available"):
            await rig.start([7])
        up(rig, "slow2")
        assert await hosts(rig) == []
        assert len((await rig.start([7])).chunks) == 1


STEPS = st.lists(
    st.tuples(st.just("flip"), st.sampled_from(["slow", "slow2"]))
    | st.tuples(st.sampled_from(["start", "finish", "read"]), st.integers(1, 6)),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_while_one_candidate_is_there_no_request_fails_and_in_the_end_everything_is_found(
    steps: list[tuple[str, str | int]],
) -> None:
    """Chains of 1 to n; health changes between any two requests, also while blocks are being written."""
    asyncio.run(_go_through(steps))


async def _go_through(steps: list[tuple[str, str | int]]) -> None:
    away: set[str] = set()
    started: list[tuple[str, int]] = []
    longest = 0
    with opened() as rig:
        for verb, what in steps:
            if isinstance(what, str):
                _flip(rig, what, away)
                continue
            keys = range(1, what + 1)
            if verb == "read":
                assert not away.intersection(await hosts(rig, keys))
            elif verb == "start":
                write = await rig.start(keys)
                started.append((write.session.id, len(write.chunks)))
                longest = max(longest, what)
            elif started:
                session, count = started.pop(0)
                await rig.manager.finish_write("i", session, BlockMask(offset=count))
        for session, count in started:
            await rig.manager.finish_write("i", session, BlockMask(offset=count))
        for storage in away:
            up(rig, storage)
        assert len(await hosts(rig, range(1, longest + 1))) == longest


def _flip(rig: Rig, storage: str, away: set[str]) -> None:
    if storage in away:
        away.remove(storage)
        up(rig, storage)
    elif not away:
        away.add(storage)
        down(rig, storage)
