"""Reports of corrupt bytes: a right to look blocks up is no right to delete them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from cache_rig import Rig, group, opened
from test_removal import parts_of, store

from kvcm.cache.pins import PinRequest
from kvcm.cache.removal import MissingPart, MissingReport
from kvcm.model.principals import CallContext, Principal, Verb, call_context

HOUR = 3600.0
NOTHING = MissingReport(0, 1)
REMOVED = MissingReport(1, 0)


@contextmanager
def as_principal(name: str, *verbs: Verb, peer: str = "10.0.0.1") -> Iterator[None]:
    """Calls inside the block are those of a principal."""
    token = call_context.set(CallContext(Principal(name, frozenset(verbs), frozenset({"*"})), "ReportMissing", peer))
    try:
        yield
    finally:
        call_context.reset(token)


async def report(rig: Rig, reporter: str, *parts: MissingPart, verbs: tuple[Verb, ...] = ()) -> MissingReport:
    with as_principal(reporter, Verb.MATCH, *verbs):
        return await rig.manager.report_missing(rig.manager.cache("i"), parts)


async def test_a_reader_needs_a_second_one_with_the_same_report() -> None:
    with opened(group(delay_ms=0)) as rig:
        await store(rig, [1, 2])
        part, other_part = await parts_of(rig, 1)
        for _ in range(3):
            assert await report(rig, "a", part) == NOTHING
        assert await rig.statuses([1]) == [["SERVING"]]
        assert await report(rig, "b", part._replace(mismatched_checksum=other_part.mismatched_checksum)) == NOTHING
        assert await report(rig, "b", part) == REMOVED
        assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]


async def test_what_another_reader_said_an_hour_ago_does_not_count() -> None:
    with opened(group(delay_ms=0)) as rig:
        await store(rig, [1])
        part, _ = await parts_of(rig, 1)
        await report(rig, "a", part)
        rig.wait(HOUR)
        assert await report(rig, "b", part) == NOTHING
        rig.wait(HOUR - 1)
        assert await report(rig, "a", part) == REMOVED


async def test_what_was_said_of_an_earlier_location_does_not_count() -> None:
    with opened(group(delay_ms=0)) as rig:
        await store(rig, [1])
        part, _ = await parts_of(rig, 1)
        await report(rig, "a", part)
        await report(rig, "owner", part, verbs=(Verb.REMOVE,))
        await rig.executor.run_due()
        await store(rig, [1])
        part, _ = await parts_of(rig, 1)
        assert await report(rig, "b", part) == NOTHING


@pytest.mark.parametrize("verb", [Verb.REPORT, Verb.REMOVE])
async def test_a_reporter_is_believed_at_once(verb: Verb) -> None:
    with opened(group(delay_ms=0)) as rig:
        await store(rig, [1])
        part, _ = await parts_of(rig, 1)
        assert await report(rig, "a", part, verbs=(verb,)) == REMOVED


async def test_a_pinned_block_goes_when_two_report_it_or_one_that_may_remove() -> None:
    with opened(replace(group(delay_ms=0), pin_budget_bytes=1 << 40)) as rig:
        await store(rig, [1, 2])
        assert await rig.manager.pin(rig.manager.cache("i"), PinRequest([1, 2], "me", 7200)) is not None
        (first, _), (second, _) = await parts_of(rig, 1), await parts_of(rig, 2)
        assert await report(rig, "a", first, verbs=(Verb.REPORT,)) == NOTHING
        assert await report(rig, "b", first) == REMOVED
        assert await report(rig, "c", second, verbs=(Verb.REMOVE,)) == REMOVED


async def test_a_host_that_finds_every_block_corrupt_is_believed_so_often_a_minute() -> None:
    with opened(group(delay_ms=0)) as rig:
        rig.manager.missing.corruption.most_per_minute = 2
        await store(rig, [1, 2, 3, 4])
        parts = [part for key in (1, 2, 3, 4) for part in await parts_of(rig, key)]
        assert await report(rig, "a", *parts, verbs=(Verb.REPORT,)) == MissingReport(2, 4), "both parts count once"
        assert await report(rig, "a", *parts[4:], verbs=(Verb.REPORT,)) == MissingReport(0, 4)
        assert await report(rig, "b", parts[4], verbs=(Verb.REPORT,)) == REMOVED
        rig.wait(60)
        assert await report(rig, "a", parts[6], verbs=(Verb.REPORT,)) == REMOVED


async def test_without_names_reporters_are_addresses() -> None:
    with opened(group(delay_ms=0)) as rig:
        await store(rig, [1])
        part, _ = await parts_of(rig, 1)
        for peer, found in (("10.0.0.1", NOTHING), ("10.0.0.1", NOTHING), ("10.0.0.2", REMOVED)):
            with as_principal("", Verb.MATCH, peer=peer):
                assert await rig.manager.report_missing(rig.manager.cache("i"), [part]) == found
