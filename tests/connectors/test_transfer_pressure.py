"""A storage under pressure: what stands first in its queue, or hangs, holds up nothing that could go."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from transfer_parts import DEADLINE, SCHEME, WAIT, HeldStorage, failures, item
from waiting import until

from connectors.transfer import Failure, TransferEngine
from connectors.transfer.budget import ByteBudget
from connectors.transfer.gate import Gate
from connectors.transfer.lane import Lane
from connectors.transfer.mover import Direction
from connectors.transfer.work import Transfer, Visit


@pytest.fixture
def storage() -> Iterator[HeldStorage]:
    storage = HeldStorage()
    yield storage
    storage.let_go()


@pytest.mark.parametrize("behind", list(Direction))
def test_what_waits_behind_a_load_begins_when_the_load_is_taken_back(storage: HeldStorage, behind: Direction) -> None:
    gate = Gate(ByteBudget(50, ["s"]))
    lane = Lane("s", storage, 2, gate, time.monotonic)

    def begin(direction: Direction, path: str, size: int) -> Visit:
        visit = lane.visit(Transfer(direction, 1, time.monotonic() + DEADLINE), [item(path, size)], [0])
        lane.begin(visit)
        return visit

    storage.hold("/1")
    with gate.lock:
        begin(Direction.LOAD, "/1", 30)
    until(lambda: storage.begun == ["load /1"])
    with gate.lock:
        too_large = begin(Direction.LOAD, "/2", 40)
        fits = begin(behind, "/3", 8)
    until(lambda: too_large.batches[0].is_held_back)
    with gate.lock:  # the other thread sleeps now: it has let go of the lock
        assert len(lane.withdraw(too_large, "the call was cancelled")) == 1
    fits.transfer.wait(5.0)
    with gate.lock:
        lane.shut()
    assert storage.begun == ["load /1", f"{behind} /3"]
    storage.let_go()
    lane.join(time.monotonic() + WAIT)


@pytest.mark.parametrize("budget_bytes", [50, 59])
def test_a_storage_whose_share_hangs_is_left_alone_by_what_does_not_fit(
    storage: HeldStorage, budget_bytes: int
) -> None:
    """One access that hangs, fewer than threads: calls that cannot begin beside it come back at once."""
    now = [1000.0]
    engine = TransferEngine({(SCHEME, "s"): storage}, 2, budget_bytes=budget_bytes, clock=lambda: now[0])
    storage.hold("/0")
    assert failures(engine.load([item("/0", 50)], 0.1)) == [Failure.PENDING]
    now[0] += 1.0
    for move in (engine.load, engine.save):
        assert failures(move([item("/1", 10)], 5.0)) == [Failure.UNAVAILABLE]
    fitting = budget_bytes - 50
    if fitting:
        assert failures(engine.load([item("/1", fitting)], DEADLINE)) == [None]
    storage.let_go()
    until(lambda: engine.statistics().storages["s"].hung_accesses == 0)
    assert failures(engine.load([item("/1", 10)], DEADLINE)) == [None]
    engine.close()
