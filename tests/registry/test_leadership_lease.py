"""The lease of a single manager, with the time in our hands."""

import pytest

from kvcm.model.errors import NotLeaderError
from kvcm.registry.leadership import Leadership


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def leadership(clock: FakeClock) -> Leadership:
    return Leadership("node-1", clock, lease_seconds=10.0)


def holder(leadership: Leadership) -> tuple[bool, str, float | None]:
    return leadership.is_leader, leadership.leader_node_id, leadership.expires


def test_nobody_leads_before_the_first_tick(leadership: Leadership) -> None:
    assert holder(leadership) == (False, "", None)
    assert leadership.last_tick == 0.0


def test_a_tick_takes_the_lease(leadership: Leadership) -> None:
    leadership.tick()
    assert holder(leadership) == (True, "node-1", 110.0)
    assert leadership.last_tick == 100.0


def test_ticks_renew_it(leadership: Leadership, clock: FakeClock) -> None:
    for _ in range(5):
        leadership.tick()
        clock.time += 9.999
        assert leadership.is_leader
    assert leadership.last_tick == clock.time - 9.999


def test_without_ticks_it_ends(leadership: Leadership, clock: FakeClock) -> None:
    leadership.tick()
    clock.time += 10.0
    assert holder(leadership) == (False, "", None)
    leadership.tick()
    assert holder(leadership) == (True, "node-1", 120.0)


@pytest.mark.parametrize(("delay_ms", "retaken_after"), [(0, 0.0), (1, 0.001), (5000, 5.0), (60_000, 60.0)])
def test_after_a_demotion_it_is_taken_again_after_the_campaign_delay(
    leadership: Leadership, clock: FakeClock, delay_ms: int, retaken_after: float
) -> None:
    leadership.campaign_delay_ms = delay_ms
    leadership.tick()
    leadership.demote()
    assert holder(leadership) == (False, "", None)
    demoted_at = clock.time
    if retaken_after:
        clock.time = demoted_at + retaken_after * 0.99
        leadership.tick()
        assert not leadership.is_leader
        assert leadership.last_tick == clock.time
    clock.time = demoted_at + retaken_after
    leadership.tick()
    assert holder(leadership) == (True, "node-1", clock.time + 10.0)


def test_only_the_leader_can_be_demoted(leadership: Leadership, clock: FakeClock) -> None:
    with pytest.raises(NotLeaderError, match="node-1"):
        leadership.demote()
    leadership.tick()
    clock.time += 10
    with pytest.raises(NotLeaderError):
        leadership.demote()
    leadership.tick()
    leadership.demote()
    with pytest.raises(NotLeaderError):
        leadership.demote()
