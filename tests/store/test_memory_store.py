"""Documents in memory: compare and set, due times, versions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.store.memory import MemoryLease, MemoryStore, MemoryTable
from kvcm.store.store import LeaseState

NAMES = ["a", "b", "c", "d"]
BODIES = st.one_of(st.none(), st.sampled_from([b"1", b"2", b""]))
REPLACEMENTS = st.tuples(st.sampled_from(NAMES), BODIES, BODIES, st.integers(0, 6).map(float))


class SetClock:
    """Shows what it is set to."""

    seconds = 100.0

    def now(self) -> float:
        return self.seconds


@settings(max_examples=200, deadline=None, derandomize=True)
@given(replacements=st.lists(REPLACEMENTS, max_size=40), most=st.integers(0, 5))
async def test_any_history_leaves_what_a_dict_would_hold(
    replacements: list[tuple[str, bytes | None, bytes | None, float]], most: int
) -> None:
    table = MemoryTable()
    expected: dict[str, tuple[bytes, float]] = {}
    for name, old, new, due in replacements:
        version = await table.version()
        wins = expected.get(name, (None, 0))[0] == old
        assert await table.replace(name, old, new, due) is wins
        if wins:
            expected.pop(name, None)
            expected |= {name: (new, due)} if new is not None else {}
            assert await table.version() > version
        assert await table.get(name) == expected.get(name, (None, 0))[0]
    assert await table.all() == {name: body for name, (body, _) in expected.items()}
    for now in (0.0, 2.5, 4.0, 9.0):
        times = sorted((due, name) for name, (_, due) in expected.items() if 0 < due <= now)
        assert await table.due(now, most) == [name for _, name in times][:most]


async def test_what_was_listed_does_not_change_with_the_table() -> None:
    table = MemoryTable()
    await table.replace("a", None, b"1")
    before = await table.all()
    await table.replace("b", None, b"2")
    assert before == {"a": b"1"}


async def test_a_table_is_found_by_its_name() -> None:
    store = MemoryStore()
    await store.table("sessions").replace("a", None, b"1")
    assert await store.table("sessions", 16).get("a") == b"1"
    assert await store.table("leases").get("a") is None
    assert store.is_shared is False
    await store.flush()
    await store.close()


def test_nothing_suspends() -> None:
    """Tests of the rooms above drive their coroutines with one step."""
    store = MemoryStore()
    table, lease = store.table("t"), MemoryLease(SetClock())
    for call in (table.get("a"), table.all(), table.replace("a", None, b""), table.due(0, 1), table.version(),
                 lease.hold("a", 1), lease.release("a"), store.flush(), store.close()):  # fmt: skip
        with pytest.raises(StopIteration):
            call.send(None)


async def test_a_lease_has_one_holder_until_it_expires() -> None:
    clock = SetClock()
    lease = MemoryLease(clock)
    assert await lease.hold("a", 10) == LeaseState("a", 1)
    clock.seconds += 9
    assert await lease.hold("b", 10) == LeaseState("a", 1)
    assert await lease.hold("a", 10) == LeaseState("a", 1)
    clock.seconds += 9.5
    assert await lease.hold("b", 10) == LeaseState("a", 1)
    clock.seconds += 0.5
    assert await lease.hold("b", 10) == LeaseState("b", 2)
    await lease.release("a")
    assert await lease.hold("a", 10) == LeaseState("b", 2)
    await lease.release("b")
    assert await lease.hold("a", 10) == LeaseState("a", 3)
