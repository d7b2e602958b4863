"""Checksums that writers tell at the finish: decided with the session's end, and kept in the blocks' locations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from cache_rig import Rig, instance, opened
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.checksums import NO_CHECKSUMS, Checksums, ToldLocation, checksums_of
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.sessions import FinishedWrite, StartedWrite, WriteSession
from kvcm.cache.write_values import Retention
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.locations import decode_chunk
from kvcm.model.masks import BlockMask

MOST = 2**64 - 1
GROUPS = {"first": ("tp0",), "second": ("tp1",), "both": ("tp0", "tp1")}


async def recorded(rig: Rig, keys: Sequence[int]) -> list[dict[str, int]]:
    """Checksums of each block by spec, as a match answers them."""
    found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, list(keys)))
    assert list(found.keys) == list(keys)
    return [{spec.name: spec.checksum for spec in decode_chunk(chunk).specs} for chunk in found.chunks]


async def finish(
    rig: Rig, started: StartedWrite, told: Sequence[ToldLocation], success: BlockMask | None = None
) -> FinishedWrite:
    success = success or BlockMask(offset=len(started.chunks))
    return await rig.manager.finish_write("i", started.session.id, success, told=told)


def of_both(first: int, second: int) -> ToldLocation:
    return ToldLocation([("tp1", second), ("tp0", first)])


async def test_checksums_are_kept_by_the_name_of_the_spec() -> None:
    with opened() as rig:
        started = await rig.start([1, 2, 3])
        await finish(rig, started, [of_both(1, MOST), ToldLocation([("tp1", 5)]), ToldLocation([])])
        assert await recorded(rig, [1, 2, 3]) == [
            {"tp0": 1, "tp1": MOST},
            {"tp0": 0, "tp1": 5},
            {"tp0": 0, "tp1": 0},
        ]
        record = await rig.record(1)
        assert record is not None
        assert [spec.uri for spec in decode_chunk(record.locations[0].chunk).specs] == [
            spec.uri for spec in decode_chunk(started.chunks[0]).specs
        ]


async def test_blocks_of_one_session_may_have_different_parts() -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        started = await rig.start([1, 2, 3], spec_groups=["first", "both", "second"])
        await finish(rig, started, [ToldLocation([("tp0", 1)]), of_both(2, 3), ToldLocation([("tp1", 4)])])
        assert await recorded(rig, [1, 2, 3]) == [{"tp0": 1}, {"tp0": 2, "tp1": 3}, {"tp1": 4}]


async def test_the_checksum_of_a_location_is_that_of_its_only_part() -> None:
    """It counts where the part's own is 0, and nowhere where there are two parts."""
    with opened(registered=instance(groups=GROUPS)) as rig:
        started = await rig.start([1, 2, 3, 4], spec_groups=["first", "second", "first", "both"])
        told = [
            ToldLocation([], 7),
            ToldLocation([("tp1", 0)], MOST),
            ToldLocation([("tp0", 8)], 9),
            ToldLocation([("tp0", 0)], 10),
        ]
        await finish(rig, started, told)
        assert await recorded(rig, [1, 2, 3, 4]) == [{"tp0": 7}, {"tp1": MOST}, {"tp0": 8}, {"tp0": 0, "tp1": 0}]


async def test_a_part_that_the_location_does_not_have_is_left_out() -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        started = await rig.start([1], spec_groups=["first"])
        await finish(rig, started, [of_both(1, 2)])
        assert await recorded(rig, [1]) == [{"tp0": 1}]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([ToldLocation([], 5)], "locations has 1 entries, must have none, or one per location .* returned: 2"),
        ([ToldLocation([], 5)] * 3, "locations has 3 entries, .*: 2"),
        ([ToldLocation([]), ToldLocation([("tp2", 1)])], r"locations\[1\] names the spec 'tp2', .*'tp0', 'tp1'"),
        ([ToldLocation([("", 1)]), ToldLocation([])], r"locations\[0\] names the spec ''"),
        ([ToldLocation([("tp0", 1), ("tp0", 0)]), ToldLocation([])], r"locations\[0\] names the spec 'tp0' twice"),
    ],
)
async def test_what_does_not_fit_is_refused_and_the_session_stays_open(told: list[ToldLocation], message: str) -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        with pytest.raises(InvalidArgumentError, match=message):
            await finish(rig, started, told)
        assert await rig.statuses([1, 2]) == [["WRITING"], ["WRITING"]]
        await finish(rig, started, [of_both(1, 2)] * 2)
        assert await recorded(rig, [1, 2]) == [{"tp0": 1, "tp1": 2}] * 2


async def test_what_is_told_of_blocks_that_were_not_written_does_not_count() -> None:
    with opened() as rig:
        started = await rig.start([1, 2, 3])
        told = [ToldLocation([("nonsense", 1)]), of_both(3, 4), ToldLocation([("tp0", 1), ("tp0", 2)])]
        await finish(rig, started, told, BlockMask(flags=(False, True, False)))
        assert await recorded(rig, [2]) == [{"tp0": 3, "tp1": 4}]


@pytest.mark.parametrize("carried_out_by", ["expiry", "the same finish", "a finish that tells nothing"])
async def test_whoever_carries_a_decision_out_writes_its_checksums_invariant_3(carried_out_by: str) -> None:
    """The manager that decided died between the decision and the blocks; what it stored counts, and nothing else."""
    with opened() as rig:
        started = await rig.start([1, 2])
        session = started.session
        told = await checksums_of([of_both(1, 2), of_both(3, MOST)], (True, True), ("tp0", "tp1"))
        decided = replace(session, decision=(True, True), checksums=told)
        table = rig.tables.table("sessions")
        assert await table.replace(session.id, session.encoded(), decided.encoded(), rig.clock.now() + 5)
        if carried_out_by == "expiry":
            rig.wait(5)
            await rig.manager.expire()
        else:
            later = [] if carried_out_by == "a finish that tells nothing" else [of_both(9, 9)] * 2
            assert await finish(rig, started, later) == FinishedWrite(2, 0, 0)
        assert await recorded(rig, [1, 2]) == [{"tp0": 1, "tp1": 2}, {"tp0": 3, "tp1": MOST}]
        assert await table.all() == {}


async def test_a_removed_block_takes_no_checksums_and_stays_removed() -> None:
    with opened() as rig:
        started = await rig.start([1, 2])
        await rig.manager.remove("i", [1], BlockMask(offset=0))
        assert await finish(rig, started, [of_both(1, 2)] * 2) == FinishedWrite(1, 0, 1)
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
        assert await recorded(rig, [2]) == [{"tp0": 1, "tp1": 2}]


async def test_hint_and_checksums_go_together() -> None:
    with opened() as rig:
        started = await rig.start([1])
        hint = Retention(-7, 60)
        await rig.manager.finish_write("i", started.session.id, BlockMask(offset=1), hint, [of_both(1, 2)])
        assert await recorded(rig, [1]) == [{"tp0": 1, "tp1": 2}]
        record = await rig.record(1)
        assert record is not None
        assert (record.locations[0].priority, record.due) == (-7, rig.clock.now() + 60)


# ── How they are stored ──────────────────────────────────────────────────────────────────────────────────────────────

SESSION = WriteSession("s", 7, 12.5, "l", (1, -2), (True, False))
TOLD = asyncio.run(checksums_of([of_both(1, MOST), of_both(2, 3)], SESSION.decision or (), ("tp0", "tp1")))


def test_they_are_stored_with_the_session() -> None:
    for checked in (replace(SESSION, checksums=TOLD), replace(SESSION, checksums=TOLD, priority=3, keep_until=9.5)):
        document = checked.encoded()
        assert WriteSession.decoded("s", document) == checked
        assert WriteSession.decoded("s", document).encoded() == document  # it is found by comparing every byte


def test_a_session_without_checksums_is_stored_as_ever() -> None:
    old = msgspec.msgpack.encode([1, 7, 12.5, "l", b"\1" + b"\0" * 7 + b"\xfe" + b"\xff" * 7, b"\1\0"])
    assert SESSION.encoded() == old
    told_nothing = asyncio.run(checksums_of([ToldLocation([("tp0", 0)])] * 2, (True, True), ("tp0", "tp1")))
    assert told_nothing is NO_CHECKSUMS
    hinted = replace(SESSION, priority=1)
    assert len(msgspec.msgpack.decode(hinted.encoded())) == 8


def test_a_document_whose_checksums_do_not_fit_is_damaged() -> None:
    fields = msgspec.msgpack.decode(replace(SESSION, checksums=TOLD).encoded())
    damaged = msgspec.msgpack.encode([*fields[:-1], fields[-1][:-8]])
    with pytest.raises(StorageIOError, match="cannot be read"):
        WriteSession.decoded("s", damaged)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.sampled_from("abc"), st.integers(0, MOST)), st.integers(0, MOST)),
        max_size=6,
    ),
    most=st.integers(1, 7),
)
def test_what_was_told_comes_back_by_key(rows: list[tuple[bool, dict[str, int], int]], most: int) -> None:
    told = [ToldLocation(list(row.items()), of_only) for _, row, of_only in rows]
    keys = range(100, 100 + len(rows))
    stored = asyncio.run(checksums_of(told, [is_written for is_written, _, _ in rows], ("a", "b", "c")))
    assert len(stored.values) == 8 * len(keys) * len(stored.names)
    expected = {}
    for key, (is_written, row, of_only) in zip(keys, rows, strict=True):
        positive = {name: value for name, value in row.items() if value} or ({"": of_only} if of_only else {})
        if is_written and positive:
            expected[key] = positive
    pages = [Checksums(*stored).by_key(keys, begin, begin + most) for begin in range(0, len(keys), most)]
    assert all(set(page) <= set(keys[i * most : (i + 1) * most]) for i, page in enumerate(pages))
    by_key = {key: row for page in pages for key, row in page.items()}
    assert {key: {name: value for name, value in row.items() if value} for key, row in by_key.items()} == expected
