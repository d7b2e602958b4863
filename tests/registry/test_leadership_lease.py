"""One manager's lease, with the time in our hands."""

import asyncio

import pytest
from election_rig import ENDPOINT, FakeClock, UnreliableLease, elector

from kvcm.model.errors import NotLeaderError, StorageIOError
from kvcm.registry.leadership import Leadership
from kvcm.store.memory import MemoryLease, MemoryTable


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def lease(clock: FakeClock) -> UnreliableLease:
    return UnreliableLease(MemoryLease(clock))


@pytest.fixture
def leadership(clock: FakeClock, lease: UnreliableLease) -> Leadership:
    return elector("node-1", clock, lease, MemoryTable())


def holder(leadership: Leadership) -> tuple[bool, str, float | None]:
    return leadership.is_leader, leadership.leader_node_id, leadership.expires


def test_nobody_leads_before_the_first_tick(leadership: Leadership) -> None:
    assert holder(leadership) == (False, "", None)
    assert (leadership.last_tick, leadership.token, leadership.leader_endpoint) == (0.0, 0, None)


async def test_a_tick_takes_the_lease(leadership: Leadership) -> None:
    await leadership.tick()
    assert holder(leadership) == (True, "node-1", 109.0)  # ten seconds, less the margin
    assert (leadership.last_tick, leadership.token) == (100.0, 1)


async def test_ticks_renew_it(leadership: Leadership, clock: FakeClock) -> None:
    for _ in range(5):
        await leadership.tick()
        clock.time += 8.999
        assert leadership.is_leader
    assert (leadership.last_tick, leadership.token) == (clock.time - 8.999, 1)


async def test_without_ticks_it_ends(leadership: Leadership, clock: FakeClock) -> None:
    await leadership.tick()
    clock.time += 9.0
    assert holder(leadership) == (False, "", None)
    await leadership.tick()
    assert holder(leadership) == (True, "node-1", 118.0)


async def test_the_term_begins_before_the_store_was_asked(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    """Invariant 1: from the store's view the lease may have begun as early as that."""
    lease.on_answer = lambda: clock.advance(4)
    await leadership.tick()
    assert leadership.expires == 109.0
    lease.on_answer = lambda: clock.advance(9)
    await leadership.tick()
    assert not leadership.is_leader


@pytest.mark.parametrize("answers", ["no call", "no answer"])
async def test_silence_of_the_store_ends_no_term_early_and_none_late(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease, answers: str
) -> None:
    """Invariant 2."""
    await leadership.tick()
    lease.outage = StorageIOError("refused") if answers == "no call" else None
    lease.lost_answer = StorageIOError("timed out") if answers == "no answer" else None
    for _ in range(89):
        clock.time += 0.1
        await leadership.tick()
        assert leadership.is_leader
    clock.time += 0.2
    assert not leadership.is_leader
    await leadership.tick()
    assert holder(leadership) == (False, "", None)
    lease.outage = lease.lost_answer = None
    await leadership.tick()
    assert leadership.is_leader


@pytest.mark.parametrize(("delay_ms", "retaken_after"), [(0, 0.0), (1, 0.001), (5000, 5.0), (60_000, 60.0)])
async def test_after_a_demotion_it_is_taken_again_after_the_campaign_delay(
    leadership: Leadership, clock: FakeClock, delay_ms: int, retaken_after: float
) -> None:
    leadership.campaign_delay_ms = delay_ms
    await leadership.tick()
    await leadership.demote()
    assert holder(leadership) == (False, "", None)
    demoted_at = clock.time
    if retaken_after:
        clock.time = demoted_at + retaken_after * 0.99
        await leadership.tick()
        assert not leadership.is_leader
        assert leadership.last_tick == clock.time
    clock.time = demoted_at + retaken_after
    await leadership.tick()
    assert holder(leadership) == (True, "node-1", clock.time + 9.0)
    assert leadership.token == 2


async def test_only_the_leader_can_be_demoted(leadership: Leadership, clock: FakeClock) -> None:
    with pytest.raises(NotLeaderError, match="node-1"):
        await leadership.demote()
    await leadership.tick()
    clock.time += 10
    with pytest.raises(NotLeaderError):
        await leadership.demote()
    await leadership.tick()
    await leadership.demote()
    with pytest.raises(NotLeaderError):
        await leadership.demote()


@pytest.mark.parametrize("verb", ["demote", "withdraw"])
async def test_an_answer_under_way_does_not_undo_a_resignation(
    leadership: Leadership, lease: UnreliableLease, verb: str
) -> None:
    """Invariant 3, and the lease is free afterwards although the renewal came after the resignation began."""
    leadership.campaign_delay_ms = 60_000
    await leadership.tick()
    lease.gate.clear()
    tick = asyncio.create_task(leadership.tick())
    await lease.asked.wait()
    resignation = asyncio.create_task(getattr(leadership, verb)())
    await asyncio.sleep(0)
    assert not leadership.is_leader
    lease.gate.set()
    await asyncio.gather(tick, resignation)
    assert not leadership.is_leader
    assert (await lease.hold("node-2", 1)).holder == "node-2"


async def test_a_demotion_counts_even_when_the_store_does_not_hear_of_it(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    leadership.campaign_delay_ms = 3000
    await leadership.tick()
    lease.outage = StorageIOError("refused")
    await leadership.demote()
    await leadership.tick()
    assert not leadership.is_leader


async def test_after_a_withdrawal_it_never_leads_again(
    leadership: Leadership, clock: FakeClock, lease: UnreliableLease
) -> None:
    await leadership.publish(ENDPOINT)
    await leadership.tick()
    await leadership.withdraw()
    for _ in range(3):
        clock.time += 1000
        await leadership.tick()
        assert not leadership.is_leader


@pytest.mark.parametrize(("margin", "term"), [(0.0, 10.0), (0.1, 9.9), (5.0, 5.0), (60.0, 5.0)])
async def test_a_margin_never_eats_the_whole_lease(clock: FakeClock, margin: float, term: float) -> None:
    leadership = Leadership("n", clock, 10.0, MemoryLease(clock), MemoryTable(), margin)
    await leadership.tick()
    assert leadership.expires == 100.0 + term
