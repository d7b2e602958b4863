"""Write sessions from start to end: their endings, repeats, and the data stored with the blocks (invariant 3)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from audit_rig import IndexRig
from cache_rig import Rig, group, instance, location, opened, uris
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_servers import Standalone, standalone
from thoroughness import examples

from kvcm.cache import write_sessions
from kvcm.cache.manager import CacheManager
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.read_leases import DeadlineTable
from kvcm.cache.write_sessions import (
    NO_CHECKSUMS,
    REPEAT_SECONDS,
    Checksums,
    EndedSession,
    EndedSessions,
    FinishedWrite,
    LocationChecksums,
    Retention,
    StartedWrite,
    WriteRequest,
    WriteSession,
    checksums_of,
)
from kvcm.components import Metadata, open_metadata
from kvcm.config import Settings
from kvcm.model.errors import CapacityError, InvalidArgumentError, StorageIOError, UnknownInstanceError
from kvcm.model.keys import NO_MASK, BlockMask, mixed
from kvcm.model.locations import BlockRecord, LocationStatus, decode_chunk
from kvcm.model.principals import CallContext, Principal, Verb, call_context
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryTable

# ── Write sessions ──


@pytest.mark.parametrize(
    ("requested", "seconds"), [(0, 30), (-5, 30), (1, 1), (3600, 3600), (3601, 3600), (2**31 - 1, 3600)]
)
async def test_a_session_lives_as_long_as_asked_within_bounds(rig: Rig, requested: int, seconds: int) -> None:
    started = await rig.start([1], timeout_seconds=requested)
    assert started.session.deadline == rig.clock.now() + seconds
    rig.wait(seconds - 0.001)
    await rig.manager.expire()
    assert rig.manager.endings.open_count == 1
    rig.wait(0.001)
    await rig.manager.expire()
    assert rig.manager.endings.open_count == 0
    assert await rig.statuses([1]) == [["DELETING"]]


@pytest.mark.parametrize(("requested", "seconds"), [(0, 10), (3600, 10), (4, 4)])
async def test_a_session_without_blocks_lives_ten_seconds(rig: Rig, requested: int, seconds: int) -> None:
    started = await rig.start([], timeout_seconds=requested)
    assert (started.mask, started.chunks) == (BlockMask(offset=0), [])
    assert started.session.deadline == rig.clock.now() + seconds


async def test_ids_of_sessions_and_locations_are_long(rig: Rig) -> None:
    """128 random bits are the only right to finish a session."""
    session = (await rig.start([1])).session
    assert (len(session.id), len(session.location_id)) == (32, 12)


@pytest.mark.parametrize("mask", [NO_MASK, BlockMask(offset=0), BlockMask(flags=())])
async def test_a_session_without_blocks_takes_any_empty_mask(rig: Rig, mask: BlockMask) -> None:
    started = await rig.start([])
    assert await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, mask) == FinishedWrite(0, 0, 0)


async def test_spec_groups_store_parts_of_blocks_and_later_the_rest() -> None:
    registered = instance({"kv": 10, "state": 30}, {"light": ("kv",), "full": ("kv", "state")})
    with opened(registered=registered) as rig:
        first = await rig.store([1, 2], spec_groups=("light", "full"))
        assert [list(specs) for specs in uris(first.chunks)] == [["kv"], ["kv", "state"]]
        assert rig.used_bytes == 10 + 40
        rest = await rig.start([1, 2], spec_groups=("full", "full"))
        assert (rest.mask, [list(specs) for specs in uris(rest.chunks)]) == (
            BlockMask(flags=(False, True)),
            [["state"]],
        )
        again = await rig.start([1, 2], spec_groups=("light", "light"))
        assert again.mask == BlockMask(offset=2)


async def test_each_write_adds_only_the_replicas_that_it_requests(rig: Rig) -> None:
    await rig.store([1])
    assert (await rig.start([1], min_replica_count=1)).mask == BlockMask(offset=1)
    await rig.store([1], min_replica_count=2)
    assert await rig.statuses([1]) == [["SERVING", "SERVING"]]
    assert (await rig.start([1], min_replica_count=2)).mask == BlockMask(offset=1)


async def test_a_removed_group_refuses_writes(rig: Rig) -> None:
    await rig.registry.groups.remove("group")
    with pytest.raises(UnknownInstanceError, match="'group'"):
        await rig.start([1])


async def test_sessions_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.write_sessions._MAX_SESSIONS", 3)
    with opened() as rig:
        for key in range(3):
            await rig.start([key], timeout_seconds=5)
        with pytest.raises(CapacityError, match="3 write sessions"):
            await rig.start([9])
        rig.wait(5)
        await rig.start([9])
        assert rig.manager.endings.open_count == 1


async def test_renewing_moves_the_deadline_of_session_and_records(rig: Rig) -> None:
    started = await rig.start([1], timeout_seconds=5)
    rig.wait(4)
    renewed = await rig.manager.renew_write(rig.manager.cache("i"), started.session.id, 10)
    record = await rig.record(1)
    assert record is not None
    assert record.locations[0].deadline == renewed.deadline == rig.clock.now() + 10
    rig.wait(9.5)
    assert await rig.manager.finish_write(
        rig.manager.cache("i"), started.session.id, BlockMask(offset=1)
    ) == FinishedWrite(1, 0, 0)
    with pytest.raises(InvalidArgumentError):
        await rig.manager.renew_write(rig.manager.cache("i"), started.session.id, 10)


async def test_a_block_whose_session_is_unknown_is_repaired_from_its_record(rig: Rig) -> None:
    """It was stored after the end of its session, by a manager that was slow or died."""
    orphan = location("slow", status=LocationStatus.WRITING)._replace(session_id="f" * 32, deadline=rig.clock.now() + 5)
    await rig.manager.cache("i").index.put({1: BlockRecord(None, 0, (orphan,))})
    rig.wait(4.9)
    await rig.executor.run_due()
    assert await rig.statuses([1]) == [["WRITING"]]
    rig.wait(0.1)
    await rig.executor.run_due()
    assert (await rig.statuses([1]), rig.used_bytes) == ([[]], 0)


async def test_sessions_that_cannot_be_ended_do_not_hide_those_behind_them(rig: Rig) -> None:
    """A newer release wrote some: they are looked at again later, and the others end."""
    table = rig.tables.table("sessions")
    for number in range(40):
        assert await table.replace(f"unreadable-{number}", None, b"newer", rig.clock.now() + 1)
    await rig.start([1], timeout_seconds=5)
    rig.wait(5)
    await rig.manager.expire()
    await rig.manager.expire()
    await rig.manager.expire()
    assert await rig.statuses([1]) == [["DELETING"]]


# ── Ends of runs ──


KEYS = [1, 2, 3]
ALL_KEYS = BlockMask(offset=len(KEYS))


async def hits(rig: Rig) -> list[int]:
    found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, KEYS))
    return list(found.keys)


@pytest.mark.parametrize("gone", [KEYS, [2]])
async def test_blocks_that_are_another_writers_by_now_are_not_ended(rig: Rig, gone: list[int]) -> None:
    first = await rig.start(KEYS)
    await rig.manager.cache("i").index.delete(gone)  # as a removal of all metadata does
    rest = [key for key in KEYS if key not in gone]
    second = await rig.start(gone)
    assert list(second.session.keys) == gone
    finished = await rig.manager.finish_write(rig.manager.cache("i"), first.session.id, ALL_KEYS)
    assert finished == FinishedWrite(len(rest), 0, len(gone))
    assert await rig.statuses(gone) == [["WRITING"]] * len(gone)
    assert await hits(rig) == rest
    await rig.manager.finish_write(rig.manager.cache("i"), second.session.id, BlockMask(offset=len(gone)))
    assert await hits(rig) == KEYS


async def test_blocks_that_come_to_serve_on_a_storage_that_is_away_are_no_answer_invariant_1() -> None:
    with opened(group(storages=["slow"])) as rig:
        started = await rig.start(KEYS)
        rig.enable("slow", False)
        assert await rig.manager.cache("i").index.answers(KEYS) == [None] * 3
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, ALL_KEYS)
        assert await rig.statuses(KEYS) == [["SERVING"]] * 3
        assert await rig.manager.cache("i").index.answers(KEYS) == [None] * 3
        rig.enable("slow", True)
        assert await hits(rig) == KEYS


# ── Repeated finishes ──


ALL_THREE = BlockMask(offset=3)
UNKNOWN = "unknown, finished or expired"


@contextmanager
def asking_as(name: str) -> Iterator[None]:
    """Ask as a principal of that name."""
    before = call_context.set(CallContext(Principal(name, frozenset({Verb.WRITE}), frozenset({"*"}))))
    try:
        yield
    finally:
        call_context.reset(before)


async def test_a_repeated_finish_is_reported_what_the_first_one_was_reported_for_a_minute(rig: Rig) -> None:
    started = await rig.start([1, 2, 3])
    await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
    first = await rig.manager.finish_write(
        rig.manager.cache("i"), started.session.id, BlockMask(flags=(True, True, False))
    )
    assert first == FinishedWrite(served=1, dropped=1, vanished=1)
    await rig.manager.remove(rig.manager.cache("i"), [2], NO_MASK)
    rig.wait(REPEAT_SECONDS - 0.001)
    for mask in (BlockMask(offset=2), BlockMask(flags=(True, True, False))):
        assert await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, mask) == first
    assert await rig.statuses([2]) == [["DELETING"]], "a block removed since is not revived"
    rig.wait(0.001)
    with pytest.raises(InvalidArgumentError, match=UNKNOWN):
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, BlockMask(offset=2))


@pytest.mark.parametrize(
    ("first", "other", "named"),
    [
        (BlockMask(offset=2), BlockMask(offset=3), "2 of 3 succeeded, position 2 did not"),
        (ALL_THREE, BlockMask(flags=(False, True, True)), "3 of 3 succeeded, position 0 did"),
        (BlockMask(flags=(False, True, False)), BlockMask(offset=0), "1 of 3 succeeded, position 1 did"),
        (ALL_THREE, BlockMask(offset=4), "offset is 4, must be from 0 to 3"),
        (ALL_THREE, BlockMask(flags=(True,)), "has 1 entries.* 3"),
    ],
)
async def test_a_repeat_with_another_mask_is_rejected_with_the_first_outcome(
    rig: Rig, first: BlockMask, other: BlockMask, named: str
) -> None:
    started = await rig.start([1, 2, 3])
    answer = await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, first)
    statuses = await rig.statuses([1, 2, 3])
    with pytest.raises(InvalidArgumentError, match=named):
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, other)
    assert await rig.statuses([1, 2, 3]) == statuses
    assert await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, first) == answer


async def test_a_repeat_is_for_the_principal_that_started_the_session_and_for_its_instance(rig: Rig) -> None:
    await rig.manager.register_instance(instance())
    with asking_as("one"):
        started = await rig.start([1, 2, 3])
        answer = await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, ALL_THREE)
    with asking_as("another"), pytest.raises(InvalidArgumentError, match=UNKNOWN):
        await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, ALL_THREE)
    with asking_as("one"):
        assert await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, ALL_THREE) == answer
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.renew_write(rig.manager.cache("i"), started.session.id, 30)
        await rig.manager.remove_instance("i")
        await rig.manager.register_instance(instance())
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, ALL_THREE)


@pytest.mark.parametrize("mask", [BlockMask(offset=0), ALL_THREE])
async def test_a_session_that_its_deadline_ended_is_unknown_as_ever(rig: Rig, mask: BlockMask) -> None:
    started = await rig.start([1, 2, 3], timeout_seconds=5)
    rig.wait(5)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, mask)
    assert await rig.statuses([1, 2, 3]) == [["DELETING"]] * 3


@pytest.mark.parametrize("mask", [BlockMask(offset=0), ALL_THREE])
async def test_so_is_one_whose_end_by_deadline_was_cut_off(rig: Rig, mask: BlockMask) -> None:
    started = await rig.start([1, 2, 3], timeout_seconds=5)
    session = started.session
    sessions = rig.tables.table("sessions", 16)
    assert await sessions.replace(session.id, session.encoded(), session.lapsed().encoded(), rig.clock.now() + 5)
    with pytest.raises(InvalidArgumentError, match=UNKNOWN):
        await rig.manager.finish_write(rig.manager.cache("i"), session.id, mask)
    assert await rig.statuses([1, 2, 3]) == [["DELETING"]] * 3


async def test_a_decision_that_was_carried_out_by_someone_else_is_repeated(rig: Rig) -> None:
    """The manager that was asked died behind its decision; the client comes back after the leader looked after it."""
    session = (await rig.start([1, 2, 3])).session
    sessions = rig.tables.table("sessions", 16)
    decided = replace(session, decision=(False, False, False))
    assert await sessions.replace(session.id, session.encoded(), decided.encoded(), rig.clock.now() + 5)
    rig.wait(5)
    await rig.manager.expire()
    assert await sessions.all() == {}
    answer = await rig.manager.finish_write(rig.manager.cache("i"), session.id, BlockMask(offset=0))
    assert answer == FinishedWrite(served=0, dropped=3, vanished=0)


@pytest.mark.parametrize("is_repeated", [True, False])
async def test_a_finish_that_is_cut_off_behind_its_blocks_ends_as_it_began(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    """Nothing is stored between the open session and its outcome; what a kill in between leaves is the same."""
    session = (await rig.start([1, 2, 3])).session
    sessions = rig.tables.table("sessions", 16)

    async def fail(*_arguments: object) -> bool:
        raise StorageIOError("the disk failed")

    with monkeypatch.context() as failing:
        failing.setattr(sessions, "finish", fail)
        with pytest.raises(StorageIOError):
            await rig.manager.finish_write(rig.manager.cache("i"), session.id, ALL_THREE)
    assert await sessions.get(session.id) == session.encoded()
    assert await rig.statuses([1, 2, 3]) == [["SERVING"]] * 3
    if is_repeated:
        for _ in range(2):
            finished = await rig.manager.finish_write(rig.manager.cache("i"), session.id, ALL_THREE)
            assert finished == FinishedWrite(served=3, dropped=0, vanished=0)
    else:
        rig.wait(3600)
        await rig.manager.expire()
    assert await sessions.all() == {}
    assert await rig.statuses([1, 2, 3]) == [["SERVING"]] * 3


async def test_of_two_managers_that_carry_out_one_decision_the_first_reports_for_both() -> None:
    """Blocks may be removed between the two: what they found differs."""
    table, clock = MemoryTable(), FakeClock()
    decided = WriteSession("s", 1, 30.0, "l", (1, 2), (True, True))
    document = decided.encoded()
    await table.replace("s", None, document)
    managers = [EndedSessions(table, clock), EndedSessions(table, clock)]
    assert await managers[0].put(decided, document, FinishedWrite(2, 0, 0)) == FinishedWrite(2, 0, 0)
    assert await managers[1].put(decided, document, FinishedWrite(1, 0, 1)) == FinishedWrite(2, 0, 0)


async def test_remembered_sessions_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_sessions, "_MOST", 2)
    with opened() as rig:
        ids = [(await rig.store([3 * at, 3 * at + 1, 3 * at + 2])).session.id for at in range(3)]
        for session_id in ids[:2]:
            await rig.manager.finish_write(rig.manager.cache("i"), session_id, ALL_THREE)
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write(rig.manager.cache("i"), ids[2], ALL_THREE)
        rig.wait(REPEAT_SECONDS)
        later = (await rig.store([91, 92, 93])).session.id
        assert await rig.manager.finish_write(rig.manager.cache("i"), later, ALL_THREE) == FinishedWrite(3, 0, 0)


@given(decision=st.lists(st.booleans(), max_size=40), vanished=st.integers(0, 40), starter=st.text(max_size=4))
def test_an_end_is_read_as_it_was_written(decision: list[bool], vanished: int, starter: str) -> None:
    wanted = sum(decision)
    vanished = min(vanished, wanted)
    finished = FinishedWrite(wanted - vanished, len(decision) - wanted, vanished)
    ended = EndedSession(7, starter, tuple(decision), finished)
    assert EndedSession.decoded(ended.encoded()) == ended


def test_an_end_is_small_however_many_blocks_there_were() -> None:
    most = 1 << 16
    in_order, scattered = (True,) * most, (True, False) * (most // 2)
    sizes = [
        len(EndedSession(1, "", decision, FinishedWrite(sum(decision), most - sum(decision), 0)).encoded())
        for decision in (in_order, scattered)
    ]
    assert sizes[0] < 32
    assert sizes[1] < 32 + most // 8


@pytest.mark.parametrize(
    ("stored", "named"), [(b"", "cannot be read"), (msgspec.msgpack.encode([2, 0, "", 0, 0, 0, None]), "format 2")]
)
def test_an_end_of_a_newer_release_is_refused(stored: bytes, named: str) -> None:
    with pytest.raises(StorageIOError, match=named):
        EndedSession.decoded(stored)


async def rig_on(settings: Settings, clock: FakeClock) -> IndexRig:
    """Open a store once more."""
    return IndexRig(await open_metadata(settings, clock, secrets.token_hex(4)), clock)


async def manager_on(rig: IndexRig) -> CacheManager:
    """A manager that has loaded the registry."""
    metadata: Metadata = rig.metadata
    storages = StorageDirectory("cluster")
    registry = type(rig.registry)(storages, metadata.store.table("registry"), metadata.store.flush, metadata.kind)
    await registry.load()
    manager = CacheManager(
        registry, storages, rig.clock, new_backend=metadata.new_backend, store=metadata.store, usage=metadata.usage
    )
    await manager.load()
    return manager


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Standalone]:
    """A server that the test may fill."""
    with standalone(tmp_path) as made:
        yield made


async def test_a_full_server_lets_sessions_be_finished_and_finished_again(lone: Standalone) -> None:
    rig = await rig_on(Settings(registry_storage_uri=lone.uri("test")), FakeClock())
    try:
        await rig.configure(instances=("i",))
        manager = await manager_on(rig)
        started = await manager.start_write(manager.cache("i"), WriteRequest((1, 2, 3)))
        with lone.server.admin() as server:
            server.config_set("maxmemory", 1)
            answer = await manager.finish_write(manager.cache("i"), started.session.id, ALL_THREE)
            assert await manager.finish_write(manager.cache("i"), started.session.id, ALL_THREE) == answer
            (key,) = [key for key in server.keys("*:o{sessions.*}*") if started.session.id.encode() in key]
            assert 0 < server.pttl(key) <= REPEAT_SECONDS * 1000, "the server forgets it by itself"
    finally:
        await rig.metadata.close()


async def test_a_manager_that_was_restarted_over_its_data_directory_reports_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings, clock = Settings(data_dir=str(tmp_path_factory.mktemp("rocks")), fsync="never"), FakeClock()
    rig = await rig_on(settings, clock)
    await rig.configure(instances=("i",))
    manager = await manager_on(rig)
    started = await manager.start_write(manager.cache("i"), WriteRequest((1, 2, 3)))
    answer = await manager.finish_write(manager.cache("i"), started.session.id, ALL_THREE)
    for seconds in (0.0, REPEAT_SECONDS - 1.0):
        await rig.metadata.close()
        clock.time += seconds
        rig = await rig_on(settings, clock)
        manager = await manager_on(rig)
        assert await manager.finish_write(manager.cache("i"), started.session.id, ALL_THREE) == answer
        assert (await rig.verified()).findings == []
    await rig.metadata.close()
    clock.time += 1.0
    rig = await rig_on(settings, clock)
    manager = await manager_on(rig)
    with pytest.raises(InvalidArgumentError, match=UNKNOWN):
        await manager.finish_write(manager.cache("i"), started.session.id, ALL_THREE)
    await rig.metadata.close()


# ── Reported checksums ──


MOST = 2**64 - 1
GROUPS = {"first": ("tp0",), "second": ("tp1",), "both": ("tp0", "tp1")}


async def recorded(rig: Rig, keys: Sequence[int]) -> list[dict[str, int]]:
    """Checksums of each block by spec, as a match answers them."""
    found = await rig.manager.match(rig.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, list(keys)))
    assert list(found.keys) == list(keys)
    return [{spec.name: spec.checksum for spec in decode_chunk(chunk).specs} for chunk in found.chunks]


async def finish_with_checksums(
    rig: Rig, started: StartedWrite, answer: Sequence[LocationChecksums], success: BlockMask | None = None
) -> FinishedWrite:
    success = success or BlockMask(offset=len(started.chunks))
    return await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, success, reported=answer)


def of_both(first: int, second: int) -> LocationChecksums:
    return LocationChecksums([("tp1", second), ("tp0", first)])


async def test_checksums_are_kept_by_the_name_of_the_spec(rig: Rig) -> None:
    started = await rig.start([1, 2, 3])
    await finish_with_checksums(
        rig, started, [of_both(1, MOST), LocationChecksums([("tp1", 5)]), LocationChecksums([])]
    )
    assert await recorded(rig, [1, 2, 3]) == [{"tp0": 1, "tp1": MOST}, {"tp0": 0, "tp1": 5}, {"tp0": 0, "tp1": 0}]
    record = await rig.record(1)
    assert record is not None
    assert [spec.uri for spec in decode_chunk(record.locations[0].chunk).specs] == [
        spec.uri for spec in decode_chunk(started.chunks[0]).specs
    ]


async def test_the_checksum_of_a_location_is_that_of_its_only_part() -> None:
    """It counts where the part's own is 0, and nowhere where there are two parts."""
    with opened(registered=instance(groups=GROUPS)) as rig:
        started = await rig.start([1, 2, 3, 4], spec_groups=["first", "second", "first", "both"])
        answer = [
            LocationChecksums([], 7),
            LocationChecksums([("tp1", 0)], MOST),
            LocationChecksums([("tp0", 8)], 9),
            LocationChecksums([("tp0", 0)], 10),
        ]
        await finish_with_checksums(rig, started, answer)
        assert await recorded(rig, [1, 2, 3, 4]) == [{"tp0": 7}, {"tp1": MOST}, {"tp0": 8}, {"tp0": 0, "tp1": 0}]


async def test_a_part_that_the_location_does_not_have_is_left_out() -> None:
    with opened(registered=instance(groups=GROUPS)) as rig:
        started = await rig.start([1], spec_groups=["first"])
        await finish_with_checksums(rig, started, [of_both(1, 2)])
        assert await recorded(rig, [1]) == [{"tp0": 1}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([LocationChecksums([], 5)], "locations has 1 entries, must have none, or one per location .* returned: 2"),
        ([LocationChecksums([], 5)] * 3, "locations has 3 entries, .*: 2"),
        (
            [LocationChecksums([]), LocationChecksums([("tp2", 1)])],
            r"locations\[1\] names the spec 'tp2', .*'tp0', 'tp1'",
        ),
        ([LocationChecksums([("", 1)]), LocationChecksums([])], r"locations\[0\] names the spec ''"),
        (
            [LocationChecksums([("tp0", 1), ("tp0", 0)]), LocationChecksums([])],
            r"locations\[0\] names the spec 'tp0' twice",
        ),
    ],
)
async def test_what_does_not_fit_is_refused_and_the_session_stays_open(
    rig: Rig, answer: list[LocationChecksums], message: str
) -> None:
    started = await rig.start([1, 2])
    with pytest.raises(InvalidArgumentError, match=message):
        await finish_with_checksums(rig, started, answer)
    assert await rig.statuses([1, 2]) == [["WRITING"], ["WRITING"]]
    await finish_with_checksums(rig, started, [of_both(1, 2)] * 2)
    assert await recorded(rig, [1, 2]) == [{"tp0": 1, "tp1": 2}] * 2


async def test_checksums_of_blocks_that_were_not_written_do_not_count(rig: Rig) -> None:
    started = await rig.start([1, 2, 3])
    answer = [LocationChecksums([("nonsense", 1)]), of_both(3, 4), LocationChecksums([("tp0", 1), ("tp0", 2)])]
    await finish_with_checksums(rig, started, answer, BlockMask(flags=(False, True, False)))
    assert await recorded(rig, [2]) == [{"tp0": 3, "tp1": 4}]


@pytest.mark.parametrize("carried_out_by", ["expiry", "the same finish", "a finish without checksums"])
async def test_a_decision_is_carried_out_with_its_checksums_and_hint_invariant_3(rig: Rig, carried_out_by: str) -> None:
    """The manager that decided died between the decision and the blocks; what it stored counts, and nothing else."""
    started = await rig.start([1, 2])
    session, keep_until = started.session, rig.clock.now() + 60
    checksums = await checksums_of([of_both(1, 2), of_both(3, MOST)], (True, True), ("tp0", "tp1"))
    decided = replace(session, decision=(True, True), checksums=checksums, priority=9, keep_until=keep_until)
    table = rig.tables.table("sessions")
    assert await table.replace(session.id, session.encoded(), decided.encoded(), rig.clock.now() + 5)
    rig.wait(5)
    if carried_out_by == "expiry":
        await rig.manager.expire()
    else:
        later = [] if carried_out_by == "a finish without checksums" else [of_both(9, 9)] * 2
        finished = await rig.manager.finish_write(rig.manager.cache("i"), session.id, BOTH, Retention(-9, 600), later)
        assert finished == FinishedWrite(2, 0, 0)
    assert await recorded(rig, [1, 2]) == [{"tp0": 1, "tp1": 2}, {"tp0": 3, "tp1": MOST}]
    assert await hints(rig, [1, 2]) == [(9, 55)] * 2
    assert await table.all() == {}


async def test_a_removed_block_takes_no_checksums_and_stays_removed(rig: Rig) -> None:
    started = await rig.start([1, 2])
    await rig.manager.remove(rig.manager.cache("i"), [1], BlockMask(offset=0))
    assert await finish_with_checksums(rig, started, [of_both(1, 2)] * 2) == FinishedWrite(1, 0, 1)
    assert await rig.statuses([1, 2]) == [["DELETING"], ["SERVING"]]
    assert await recorded(rig, [2]) == [{"tp0": 1, "tp1": 2}]


# ── How they are stored ──────────────────────────────────────────────────────────────────────────────────────────────

SESSION = WriteSession("s", 7, 12.5, "l", tuple(mixed([1, -2])), (True, False))
REPORTED = asyncio.run(checksums_of([of_both(1, MOST), of_both(2, 3)], SESSION.decision or (), ("tp0", "tp1")))


@pytest.mark.parametrize("decision", [None, SESSION.decision])
@pytest.mark.parametrize("checksums", [NO_CHECKSUMS, REPORTED])
@pytest.mark.parametrize("hint", [(0, 0.0), (-3, 0.0), (0, 99.5), (3, 9.5)])
def test_decision_checksums_and_hint_are_stored_with_the_session(
    decision: tuple[bool, ...] | None, checksums: Checksums, hint: tuple[int, float]
) -> None:
    session = replace(SESSION, decision=decision, checksums=checksums, priority=hint[0], keep_until=hint[1])
    document = session.encoded()
    assert WriteSession.decoded("s", document) == session
    assert WriteSession.decoded("s", document).encoded() == document  # it is found by comparing every byte


def test_a_session_without_hint_and_checksums_is_read_and_written_as_ever() -> None:
    """Its document is replaced by comparing every byte: a longer one would never be found again."""
    old = msgspec.msgpack.encode([1, 7, 12.5, "l", b"\1" + b"\0" * 7 + b"\xfe" + b"\xff" * 7, b"\1\0"])
    assert WriteSession.decoded("s", old) == SESSION
    assert SESSION.encoded() == old
    without = asyncio.run(checksums_of([LocationChecksums([("tp0", 0)])] * 2, (True, True), ("tp0", "tp1")))
    assert without is NO_CHECKSUMS
    assert len(msgspec.msgpack.decode(replace(SESSION, priority=1).encoded())) == 8


def test_a_document_whose_checksums_do_not_fit_is_damaged() -> None:
    fields = msgspec.msgpack.decode(replace(SESSION, checksums=REPORTED).encoded())
    damaged = msgspec.msgpack.encode([*fields[:-1], fields[-1][:-8]])
    with pytest.raises(StorageIOError, match="cannot be read"):
        WriteSession.decoded("s", damaged)


@settings(max_examples=examples(200))
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.sampled_from("abc"), st.integers(0, MOST)), st.integers(0, MOST)),
        max_size=6,
    ),
    most=st.integers(1, 7),
)
def test_reported_checksums_come_back_by_key(rows: list[tuple[bool, dict[str, int], int]], most: int) -> None:
    answer = [LocationChecksums(list(row.items()), of_only) for _, row, of_only in rows]
    keys = range(100, 100 + len(rows))
    stored = asyncio.run(checksums_of(answer, [is_written for is_written, _, _ in rows], ("a", "b", "c")))
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


# ── Retention ──


BOTH = BlockMask(offset=2)


async def hints(rig: Rig, keys: list[int]) -> list[tuple[int, float]]:
    """Priority and time left of each block's only location; 0 for no limit."""
    records = await rig.manager.cache("i").index.get(keys)
    places = [place for record in records if record is not None for place in record.locations]
    assert [place.status for place in places] == [LocationStatus.SERVING] * len(keys)
    return [(place.priority, place.deadline and place.deadline - rig.clock.now()) for place in places]


async def finish_with_hint(rig: Rig, started: StartedWrite, retention: Retention, success: BlockMask = BOTH) -> None:
    await rig.manager.finish_write(rig.manager.cache("i"), started.session.id, success, retention)


async def test_the_hint_is_on_the_blocks_that_serve(rig: Rig) -> None:
    started = await rig.start([1, 2])
    rig.wait(3)  # time runs from the decision, not from the start
    await finish_with_hint(rig, started, Retention(-7, 60))
    assert await hints(rig, [1, 2]) == [(-7, 60), (-7, 60)]
    records = await rig.manager.cache("i").index.get([1, 2])
    assert [record.due for record in records if record is not None] == [rig.clock.now() + 60] * 2


async def test_without_a_hint_blocks_have_no_limit(rig: Rig) -> None:
    await rig.store([1, 2])
    assert await hints(rig, [1, 2]) == [(0, 0), (0, 0)]
    started = await rig.start([3, 4])
    await finish_with_hint(rig, started, Retention(5))
    assert await hints(rig, [3, 4]) == [(5, 0), (5, 0)]


async def test_failed_blocks_take_no_hint() -> None:
    with opened(group(delay_ms=0)) as rig:
        started = await rig.start([1, 2])
        await finish_with_hint(rig, started, Retention(5, 60), BlockMask(offset=1))
        assert await hints(rig, [1]) == [(5, 60)]
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [["SERVING"], []]


@pytest.mark.parametrize("priority", [-100, 100])
async def test_priorities_reach_from_minus_100_to_100(rig: Rig, priority: int) -> None:
    started = await rig.start([1, 2])
    with pytest.raises(InvalidArgumentError, match=r"retention.priority is -?101, must be from -100 to 100"):
        await finish_with_hint(rig, started, Retention(priority + (1 if priority > 0 else -1)))
    with pytest.raises(InvalidArgumentError, match=r"retention.ttl_seconds is -1, must be >= 0"):
        await finish_with_hint(rig, started, Retention(priority, -1))
    assert await rig.statuses([1, 2]) == [["WRITING"], ["WRITING"]]  # the session is still open
    await finish_with_hint(rig, started, Retention(priority))
    assert await hints(rig, [1, 2]) == [(priority, 0), (priority, 0)]


@pytest.mark.parametrize(("ttl_seconds", "until"), [(0, 0.0), (60, 160.0), (2**63 - 1, 1_000_000_100.0)])
def test_any_time_that_a_message_can_carry_fits(ttl_seconds: int, until: float) -> None:
    assert Retention(0, ttl_seconds).keep_until(100.0) == until


# ── Deadline table ──


@dataclass(frozen=True)
class Entry:
    id: str
    deadline: float


IDS = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), IDS, st.integers(0, 20)),
        st.tuples(st.just("take"), IDS, st.just(0)),
        st.tuples(st.just("due"), IDS, st.integers(0, 6)),
    ),
    max_size=40,
)


@settings(max_examples=examples(400))
@given(steps=STEPS)
def test_the_table_is_what_a_dict_would_be(steps: list[tuple[str, str, int]]) -> None:
    """Entries are put, renewed to earlier and later deadlines, taken, and fall due as time goes on."""
    table: DeadlineTable[Entry] = DeadlineTable()
    expected: dict[str, Entry] = {}
    now = 0
    for verb, entry_id, number in steps:
        if verb == "put":
            entry = Entry(entry_id, float(now + number))
            table.put(entry)
            expected[entry_id] = entry
        elif verb == "take":
            assert table.pop(entry_id) == expected.pop(entry_id, None)
        else:
            now += number
            due = {key: entry for key, entry in expected.items() if entry.deadline <= now}
            popped = table.pop_due(now)
            assert {entry.id: entry for entry in popped} == due
            assert [entry.deadline for entry in popped] == sorted(entry.deadline for entry in due.values())
            expected = {key: entry for key, entry in expected.items() if key not in due}
        assert len(table) == len(expected)
        assert sorted(entry.id for entry in table.values()) == sorted(expected)
        assert [table.get(key) for key in "abcde"] == [expected.get(key) for key in "abcde"]
