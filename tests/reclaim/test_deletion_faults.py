"""Deletions under faults, against a plain model: storages hang, fail and return, time passes, executors die."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from reclaim_rig import Rig
from thoroughness import examples

from kvcm.model.locations import LocationStatus

STORAGES = ("a", "b", "gone")


class Placed(NamedTuple):
    """A location, and when it is to be gone at the earliest; None for never."""

    key: int
    storage: str
    uris: tuple[str, ...]
    gone_from: float | None


class World:
    """A rig, what was put into it, and the executor that runs."""

    def __init__(self) -> None:
        self.rig = Rig(STORAGES[:2])
        self.rig.delay = 3.0
        self.placed: list[Placed] = []
        self.running = asyncio.create_task(self.rig.executor.run(0.0))

    async def put(self, storage: str, key: int, serving: bool, after: int, pinned: int) -> None:
        status = LocationStatus.SERVING if serving else LocationStatus.DELETING
        uris = await self.rig.block(
            key, storage, status, f"{len(self.placed)}", after_seconds=after, pinned_seconds=pinned * serving
        )
        gone_from: float | None = self.rig.clock.time + after
        if serving:
            gone_from = self.rig.clock.time + max(after, pinned) + self.rig.delay if after else None
        self.placed.append(Placed(key, storage, uris, gone_from))

    async def restart(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.turns()
        self.rig.executor = self.rig.new_executor()
        self.running = asyncio.create_task(self.rig.executor.run(0.0))

    async def turns(self) -> None:
        await self.rig.turns(lambda: False, most=150)

    async def check(self) -> None:
        """Nothing goes before its time, or twice at once; bytes before metadata."""
        records = await self.rig.index.get(range(8))
        there = {location.id for record in records if record is not None for location in record.locations}
        for number, placed in enumerate(self.placed):
            may_go = placed.gone_from is not None and placed.gone_from <= self.rig.clock.time
            fault = self.rig.storages.faults.get(placed.storage)
            deleted = fault is None or set(placed.uris) <= set(fault.deleted)
            if str(number) not in there:
                assert may_go
                assert deleted
            if fault is not None and not may_go:
                assert set(fault.deleted).isdisjoint(placed.uris)
        for fault in self.rig.storages.faults.values():
            assert fault.twice == set()

    async def come_to_rest(self) -> None:
        for fault in self.rig.storages.faults.values():
            fault.outage = None
            fault.open_gate.set()
        for _ in range(12):
            self.rig.clock.time += 61
            await self.turns()
        await self.check()
        left = await self.rig.index.get(range(8))
        count = sum(len(record.locations) for record in left if record is not None)
        assert count == sum(placed.gone_from is None for placed in self.placed)
        assert all(backlog[:2] == (0, 0) for backlog in self.rig.executor.backlogs().values())
        assert sum(self.rig.index.usage_bytes.values()) == 16 * count


PUT = st.tuples(
    st.just("put"),
    st.sampled_from(STORAGES),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from((0, 0, 2, 5)),
    st.sampled_from((0, 4, 50)),
)
FAULT = st.tuples(st.sampled_from(("hang", "fail", "return")), st.sampled_from(STORAGES[:2]))
PASS = st.tuples(st.just("pass"), st.sampled_from((0.5, 1, 4, 31, 70)))
STEPS = st.lists(st.one_of(PUT, FAULT, PASS, st.just(("restart",))), max_size=25)


async def play(steps: list[tuple[str, ...]]) -> None:
    world = World()
    try:
        for what, *rest in steps:
            if what == "put":
                await world.put(*rest)  # type: ignore[arg-type]
            elif what == "pass":
                world.rig.clock.time += float(rest[0])
            elif what == "restart":
                await world.restart()
            else:
                fault = world.rig.storages.faults[rest[0]]
                fault.outage = OSError("down") if what == "fail" else None
                fault.open_gate.clear() if what == "hang" else fault.open_gate.set()
            await world.turns()
            await world.check()
        await world.come_to_rest()
    finally:
        world.running.cancel()
        await asyncio.gather(world.running, return_exceptions=True)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(steps=STEPS)
def test_invariants_4_and_6_nothing_is_left_nothing_goes_early_and_nothing_twice_at_once(
    steps: list[tuple[str, ...]],
) -> None:
    asyncio.run(play(steps))
