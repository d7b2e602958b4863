"""A finish that is repeated, at whatever manager, is answered as the first one was (invariant 3), on every store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from audit_rig import IndexRig
from cache_rig import instance, opened
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from redis_servers import Standalone, standalone

from kvcm.cache import ended_sessions
from kvcm.cache.ended_sessions import REPEAT_SECONDS, EndedSession, EndedSessions
from kvcm.cache.manager import CacheManager
from kvcm.cache.sessions import FinishedWrite, WriteRequest, WriteSession
from kvcm.config import Settings
from kvcm.metadata import Metadata, open_metadata
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.model.principals import Errand, Principal, Verb, errand
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryTable

ALL = BlockMask(offset=3)
UNKNOWN = "unknown, finished or expired"


@contextmanager
def asking_as(name: str) -> Iterator[None]:
    """Ask as a principal of that name."""
    before = errand.set(Errand(Principal(name, frozenset({Verb.WRITE}), frozenset({"*"}))))
    try:
        yield
    finally:
        errand.reset(before)


async def test_a_repeated_finish_is_told_what_the_first_one_was_told_for_a_minute() -> None:
    with opened() as rig:
        started = await rig.start([1, 2, 3])
        await rig.manager.remove("i", [1], NO_MASK)
        first = await rig.manager.finish_write("i", started.session.id, BlockMask(flags=(True, True, False)))
        assert first == FinishedWrite(served=1, dropped=1, vanished=1)
        await rig.manager.remove("i", [2], NO_MASK)
        rig.wait(REPEAT_SECONDS - 0.001)
        for mask in (BlockMask(offset=2), BlockMask(flags=(True, True, False))):
            assert await rig.manager.finish_write("i", started.session.id, mask) == first
        assert await rig.statuses([2]) == [["DELETING"]], "what was removed since is not revived"
        rig.wait(0.001)
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write("i", started.session.id, BlockMask(offset=2))


@pytest.mark.parametrize(
    ("first", "other", "named"),
    [
        (BlockMask(offset=2), BlockMask(offset=3), "2 of 3 succeeded, position 2 did not"),
        (ALL, BlockMask(flags=(False, True, True)), "3 of 3 succeeded, position 0 did"),
        (BlockMask(flags=(False, True, False)), BlockMask(offset=0), "1 of 3 succeeded, position 1 did"),
        (ALL, BlockMask(offset=4), "offset is 4, must be from 0 to 3"),
        (ALL, BlockMask(flags=(True,)), "has 1 entries.* 3"),
    ],
)
async def test_a_repeat_with_another_mask_is_told_what_was_said(first: BlockMask, other: BlockMask, named: str) -> None:
    with opened() as rig:
        started = await rig.start([1, 2, 3])
        told = await rig.manager.finish_write("i", started.session.id, first)
        statuses = await rig.statuses([1, 2, 3])
        with pytest.raises(InvalidArgumentError, match=named):
            await rig.manager.finish_write("i", started.session.id, other)
        assert await rig.statuses([1, 2, 3]) == statuses
        assert await rig.manager.finish_write("i", started.session.id, first) == told


async def test_a_repeat_is_for_who_started_the_session_and_for_its_instance() -> None:
    with opened() as rig:
        await rig.manager.register_instance(instance())
        with asking_as("one"):
            started = await rig.start([1, 2, 3])
            told = await rig.manager.finish_write("i", started.session.id, ALL)
        with asking_as("another"), pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write("i", started.session.id, ALL)
        with asking_as("one"):
            assert await rig.manager.finish_write("i", started.session.id, ALL) == told
            with pytest.raises(InvalidArgumentError, match=UNKNOWN):
                await rig.manager.renew_write("i", started.session.id, 30)
            await rig.manager.remove_instance("i")
            await rig.manager.register_instance(instance())
            with pytest.raises(InvalidArgumentError, match=UNKNOWN):
                await rig.manager.finish_write("i", started.session.id, ALL)


@pytest.mark.parametrize("mask", [BlockMask(offset=0), ALL])
async def test_a_session_that_its_deadline_ended_is_unknown_as_ever(mask: BlockMask) -> None:
    with opened() as rig:
        started = await rig.start([1, 2, 3], timeout_seconds=5)
        rig.wait(5)
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match=UNKNOWN):
                await rig.manager.finish_write("i", started.session.id, mask)


@pytest.mark.parametrize("mask", [BlockMask(offset=0), ALL])
async def test_so_is_one_whose_end_by_deadline_was_cut_off(mask: BlockMask) -> None:
    with opened() as rig:
        started = await rig.start([1, 2, 3], timeout_seconds=5)
        session = started.session
        sessions = rig.tables.table("sessions", 16)
        assert await sessions.replace(session.id, session.encoded(), session.lapsed().encoded(), rig.clock.now() + 5)
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write("i", session.id, mask)
        assert await rig.statuses([1, 2, 3]) == [["DELETING"]] * 3


async def test_a_decision_that_was_carried_out_by_somebody_else_is_repeated() -> None:
    """The manager that was asked died behind its decision; the client comes back after the leader looked after it."""
    with opened() as rig:
        session = (await rig.start([1, 2, 3])).session
        sessions = rig.tables.table("sessions", 16)
        decided = replace(session, decision=(False, False, False))
        assert await sessions.replace(session.id, session.encoded(), decided.encoded(), rig.clock.now() + 5)
        rig.wait(5)
        await rig.manager.expire()
        assert await sessions.all() == {}
        told = await rig.manager.finish_write("i", session.id, BlockMask(offset=0))
        assert told == FinishedWrite(served=0, dropped=3, vanished=0)


async def test_of_two_who_carry_out_one_decision_the_first_tells_for_both() -> None:
    """Blocks may be removed between the two: what they found differs."""
    table, clock = MemoryTable(), FakeClock()
    decided = WriteSession("s", 1, 30.0, "l", (1, 2), (True, True))
    await table.replace("s", None, decided.encoded())
    managers = [EndedSessions(table, clock), EndedSessions(table, clock)]
    assert await managers[0].put(decided, FinishedWrite(2, 0, 0)) == FinishedWrite(2, 0, 0)
    assert await managers[1].put(decided, FinishedWrite(1, 0, 1)) == FinishedWrite(2, 0, 0)


async def test_what_is_remembered_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_sessions, "_MOST", 2)
    with opened() as rig:
        ids = [(await rig.store([3 * at, 3 * at + 1, 3 * at + 2])).session.id for at in range(3)]
        for session_id in ids[:2]:
            await rig.manager.finish_write("i", session_id, ALL)
        with pytest.raises(InvalidArgumentError, match=UNKNOWN):
            await rig.manager.finish_write("i", ids[2], ALL)
        rig.wait(REPEAT_SECONDS)
        later = (await rig.store([91, 92, 93])).session.id
        assert await rig.manager.finish_write("i", later, ALL) == FinishedWrite(3, 0, 0)


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


class Deployment:
    """A store, and the managers on it, one after the other or side by side.

    Args:
        settings: where the store is.
    """

    def __init__(self, settings: Settings) -> None:
        self.clock = FakeClock()
        self._settings = settings

    async def rig(self) -> IndexRig:
        """Open the store once more."""
        return IndexRig(await open_metadata(self._settings, self.clock, secrets.token_hex(4)), self.clock)


async def manager_on(rig: IndexRig) -> CacheManager:
    """A manager that knows what is registered."""
    metadata: Metadata = rig.metadata
    storages = StorageDirectory("cluster")
    registry = type(rig.registry)(storages, metadata.store.table("registry"), metadata.store.flush, metadata.kind)
    await registry.load()
    manager = CacheManager(
        registry, storages, rig.clock, new_backend=metadata.new_backend, store=metadata.store, usage=metadata.usage
    )
    await manager.load()
    return manager


@pytest.fixture(params=["redis_standalone", "redis_cluster"])
def shared(request: pytest.FixtureRequest) -> Deployment:
    uri = request.getfixturevalue(request.param).uri(f"test-{secrets.token_hex(8)}", timeout_ms=10_000)
    return Deployment(Settings(registry_storage_uri=uri))


async def test_two_managers_on_one_store_tell_the_same(shared: Deployment) -> None:
    rigs = [await shared.rig(), await shared.rig()]
    try:
        await rigs[0].configure(instances=("i",))
        first, second = [await manager_on(rig) for rig in rigs]
        started = await first.start_write("i", WriteRequest((1, 2, 3)))
        told = await first.finish_write("i", started.session.id, BlockMask(offset=2))
        assert told == FinishedWrite(served=2, dropped=1, vanished=0)
        assert await second.finish_write("i", started.session.id, BlockMask(offset=2)) == told
        with pytest.raises(InvalidArgumentError, match="2 of 3 succeeded, position 2 did not"):
            await second.finish_write("i", started.session.id, ALL)
        assert await second.open_sessions.look() == []
        assert await first.endings.due_count() == 0
        await rigs[0].settle()
        await rigs[1].settle()
        assert (await rigs[0].verified()).findings == []
    finally:
        for rig in rigs:
            await rig.metadata.close()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Standalone]:
    """A server that the test may fill."""
    with standalone(tmp_path) as made:
        yield made


async def test_a_full_server_lets_sessions_be_finished_and_finished_again(lone: Standalone) -> None:
    deployment = Deployment(Settings(registry_storage_uri=lone.uri("test")))
    rig = await deployment.rig()
    try:
        await rig.configure(instances=("i",))
        manager = await manager_on(rig)
        started = await manager.start_write("i", WriteRequest((1, 2, 3)))
        with lone.server.admin() as server:
            server.config_set("maxmemory", 1)
            told = await manager.finish_write("i", started.session.id, ALL)
            assert await manager.finish_write("i", started.session.id, ALL) == told
            (key,) = [key for key in server.keys("*:o{sessions.*}*") if started.session.id.encode() in key]
            assert 0 < server.pttl(key) <= REPEAT_SECONDS * 1000, "the server forgets it by itself"
    finally:
        await rig.metadata.close()


async def test_a_manager_that_was_restarted_over_its_data_directory_tells_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    deployment = Deployment(Settings(data_dir=str(tmp_path_factory.mktemp("rocks")), fsync="never"))
    rig = await deployment.rig()
    await rig.configure(instances=("i",))
    manager = await manager_on(rig)
    started = await manager.start_write("i", WriteRequest((1, 2, 3)))
    told = await manager.finish_write("i", started.session.id, ALL)
    for seconds in (0.0, REPEAT_SECONDS - 1.0):
        await rig.metadata.close()
        deployment.clock.time += seconds
        rig = await deployment.rig()
        manager = await manager_on(rig)
        assert await manager.finish_write("i", started.session.id, ALL) == told
        assert (await rig.verified()).findings == []
    await rig.metadata.close()
    deployment.clock.time += 1.0
    rig = await deployment.rig()
    with pytest.raises(InvalidArgumentError, match=UNKNOWN):
        await (await manager_on(rig)).finish_write("i", started.session.id, ALL)
    await rig.metadata.close()
