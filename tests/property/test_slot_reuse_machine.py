"""Any history of packed files under managers that come and go (invariant 5, design.md decisions 1 and 16).

Two managers have the same directory open; one of them leads, deletes and hands out again. The other one may still be
deleting what it had begun before its term ended, however late. Whatever happens: no two live blocks share a place, and
live blocks keep their bytes.
"""

import asyncio
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slot_world import GRACE_SECONDS, SlotWorld
from storage_rig import files_below
from thoroughness import examples

T = TypeVar("T")


def done(work: Awaitable[T]) -> T:
    async def run() -> T:
        return await work

    return asyncio.run(run())


class SlotReuseMachine(RuleBasedStateMachine):
    """Two managers, and what either of them began to delete: one that hangs does it once more at any later time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = SlotWorld(Path(self.folder.name), Random(0), slot_bytes=64, slots_per_file=8)
        self.term = 1
        self.managers = [self.world.opened(lambda: self.term if self.term % 2 else None)]
        self.managers.append(self.world.opened(lambda: None if self.term % 2 else self.term))
        self.world.storage = self.managers[0]
        self.begun: list[str] = []

    def teardown(self) -> None:
        self.world.storage = self.managers[0]
        done(self.world.roll_back(list(self.world.live.values())))
        assert files_below(self.world.root) == []
        self.folder.cleanup()

    @rule(count=st.integers(1, 9))
    def create(self, count: int) -> None:
        done(self.world.create(count))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), served=st.sampled_from([True, True, True, False]))
    def delete(self, data: st.DataObject, served: bool) -> None:
        uris = data.draw(st.lists(st.sampled_from(sorted(self.world.live.values())), unique=True, max_size=6))
        done(self.world.delete(uris, served=served))
        self.begun += uris

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), count=st.integers(1, 5))
    def replace(self, data: st.DataObject, count: int) -> None:
        self.delete(data, served=True)
        self.let_time_pass(GRACE_SECONDS)
        self.create(count)

    @rule(seconds=st.sampled_from([1.0, GRACE_SECONDS]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.clock.time += seconds

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """The other manager leads from now on, while this one is deleting."""
        uris = data.draw(st.lists(st.sampled_from(sorted(self.world.live.values())), unique=True, max_size=4))
        self.begun += uris
        self.term += 1
        self.world.storage = self.managers[1 - self.term % 2]
        done(self.world.delete(uris))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def go_on_deleting(self, data: st.DataObject) -> None:
        """Late, by either of them, and once more."""
        uris = data.draw(st.lists(st.sampled_from(self.begun), max_size=12))
        assert done(data.draw(st.sampled_from(self.managers)).delete(uris)) == [None] * len(uris)

    @rule()
    def restart(self) -> None:
        number = 1 - self.term % 2
        self.managers[number] = self.world.opened(lambda: self.term if self.term % 2 != number else None)
        self.world.storage = self.managers[number]

    @rule()
    def configure_again(self) -> None:
        number = 1 - self.term % 2
        again = self.world.opened(lambda: self.term if self.term % 2 != number else None)
        again.take_over(self.managers[number])
        self.managers[number] = self.world.storage = again

    @rule(count=st.integers(1, 5))
    def lose_a_race(self, count: int) -> None:
        """Other writers were faster: the addresses are given back, unwritten."""
        before = set(self.world.live.values())
        uris = done(self.world.allocate(count))
        self.world.write(uris[: count // 2])
        assert done(self.world.storage.discard(uris[count // 2 :])) == [None] * (count - count // 2)
        for slot in [slot for slot, uri in self.world.live.items() if uri in {*uris[count // 2 :]} - before]:
            self.world._drop(slot)

    @invariant()
    def all_is_well(self) -> None:
        done(self.world.check_all())
        counts = self.world.counts
        assert (counts.overlaps, counts.wrong_reads, counts.failures) == (0, 0, 0)


TestSlotReuse = SlotReuseMachine.TestCase
TestSlotReuse.settings = settings(
    max_examples=examples(60), stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
