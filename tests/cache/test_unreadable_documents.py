"""A document that cannot be read, damaged or of a later release, holds up nothing but itself."""

from __future__ import annotations

import msgspec
import pytest
from cache_rig import Rig, group, instance

from kvcm.model.masks import NO_MASK
from kvcm.store.memory import MemoryStore

GARBAGE = [
    b"",
    b"garbage",
    msgspec.msgpack.encode([99, 1, 0.0, "l", b"12345678", None]),
    msgspec.msgpack.encode([1, 1, 0.0, "l", b"123", None]),
]


@pytest.fixture
def rig() -> Rig:
    return Rig(group(delay_ms=0), instance())


def store_of(rig: Rig) -> MemoryStore:
    store = rig.manager._store
    assert isinstance(store, MemoryStore)
    return store


@pytest.mark.parametrize("document", GARBAGE)
@pytest.mark.parametrize("table", ["sessions", "leases"])
async def test_sessions_expire_and_blocks_are_deleted_all_the_same(rig: Rig, table: str, document: bytes) -> None:
    await store_of(rig).table(table).replace("bad", None, document, due=rig.clock.now() + 1)
    await rig.store([1, 2])
    await rig.start([3, 4], timeout_seconds=2)
    await rig.manager.remove("i", [1], NO_MASK)
    await rig.manager.remove("i", [2], NO_MASK)
    rig.wait(3)
    await rig.manager.expire()
    await rig.executor.run_due()
    assert await rig.statuses([1, 2, 3, 4]) == [[], [], [], []]


@pytest.mark.parametrize("document", GARBAGE)
async def test_a_manager_starts_beside_an_unreadable_lease(rig: Rig, document: bytes) -> None:
    await store_of(rig).table("leases").replace("bad", None, document, due=rig.clock.now() + 1)
    await rig.manager.load()
    rig.wait(2)
    await rig.manager.expire()
    assert await store_of(rig).table("leases").all() == {}


async def test_a_writer_whose_session_cannot_be_read_keeps_only_its_own_blocks(rig: Rig) -> None:
    first = await rig.start([1], timeout_seconds=2)
    await rig.start([2], timeout_seconds=2)
    table = store_of(rig).table("sessions")
    held = await table.get(first.session.id)
    assert held is not None
    await table.replace(first.session.id, held, b"garbage")
    rig.wait(3)
    await rig.executor.run_due()
    assert await rig.statuses([1, 2]) == [["WRITING"], []]
