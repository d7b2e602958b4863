"""Blocks that begin together do not have to end together: what became of them meanwhile counts (invariants 1 and 3)."""

import pytest
from cache_rig import Rig, group, opened

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.sessions import FinishedWrite
from kvcm.model.masks import NO_MASK, BlockMask

KEYS = [1, 2, 3]
ALL = BlockMask(offset=len(KEYS))


async def hits(rig: Rig) -> list[int]:
    found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, KEYS))
    return list(found.keys)


@pytest.mark.parametrize("gone", [KEYS, [2]])
async def test_blocks_that_are_another_writers_by_now_are_not_ended(gone: list[int]) -> None:
    with opened() as rig:
        first = await rig.start(KEYS)
        await rig.manager.cache("i").index.delete(gone)  # as a removal of all metadata does
        rest = [key for key in KEYS if key not in gone]
        second = await rig.start(gone)
        assert list(second.session.keys) == gone
        finished = await rig.manager.finish_write("i", first.session.id, ALL)
        assert finished == FinishedWrite(len(rest), 0, len(gone))
        assert await rig.statuses(gone) == [["WRITING"]] * len(gone)
        assert await hits(rig) == rest
        await rig.manager.finish_write("i", second.session.id, BlockMask(offset=len(gone)))
        assert await hits(rig) == KEYS


async def test_blocks_that_are_removed_while_they_are_written_stay_removed() -> None:
    with opened() as rig:
        started = await rig.start(KEYS, timeout_seconds=600)
        await rig.manager.remove("i", KEYS, NO_MASK)
        finished = await rig.manager.finish_write("i", started.session.id, ALL)
        assert finished == FinishedWrite(0, 0, len(KEYS))
        assert await hits(rig) == []


async def test_blocks_that_come_to_serve_on_a_storage_that_is_away_are_no_answer_invariant_1() -> None:
    with opened(group(storages=["slow"])) as rig:
        started = await rig.start(KEYS)
        rig.enable("slow", False)
        assert await rig.manager.cache("i").index.answers(KEYS) == [None] * 3
        await rig.manager.finish_write("i", started.session.id, ALL)
        assert await rig.statuses(KEYS) == [["SERVING"]] * 3
        assert await rig.manager.cache("i").index.answers(KEYS) == [None] * 3
        rig.enable("slow", True)
        assert await hits(rig) == KEYS


async def test_some_of_the_blocks_fail() -> None:
    with opened() as rig:
        started = await rig.start(KEYS)
        flags = BlockMask(flags=(True, False, True))
        assert await rig.manager.finish_write("i", started.session.id, flags) == FinishedWrite(2, 1, 0)
        assert await rig.statuses(KEYS) == [["SERVING"], ["DELETING"], ["SERVING"]]
        assert await hits(rig) == [1, 3]
