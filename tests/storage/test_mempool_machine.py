"""Invariant 5 for memory pools: two managers on one store, whose calls interleave, fail and are given up, against a
plain dictionary of pages. Capacity is 1 MiB: 64 chunks of four pages, so that parts of different sizes meet all the
time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_rig import (
    MIB,
    FakeClock,
    SlowTable,
    allocation,
    check_address,
    open_pool,
    pages_of,
    report,
    stamp_of,
    taken_bytes,
)
from thoroughness import examples

from kvcm.model.errors import StorageIOError
from kvcm.model.memory_pool import PAGE_BYTES
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import StoredObject
from kvcm.storage.mempool import MempoolStorage
from kvcm.storage.packing import object_name

SIZES = st.lists(st.sampled_from([0, 1, 4096, 4097, 9000, 16384]), max_size=40)
MANAGERS = st.integers(0, 1)


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.table = SlowTable()
        self.clock = FakeClock()
        self.pools = [self.open(0), self.open(1)]
        self.generation = 1
        self.live: set[str] = set()
        self.dead: list[str] = []
        self.leaked: list[str] = []
        self.stamps: dict[int, int] = {}  # largest ever given, by page
        self.may_leak = False
        self.run(self.pools[0].report(report(self.generation)))

    def open(self, seed: int) -> MempoolStorage:
        return open_pool(self.table, self.clock, seed=seed)

    def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*work, return_exceptions=True)

        results = self.loop.run_until_complete(together())
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, StorageIOError):
                raise result
        return results

    def note(self, uris: Sequence[str]) -> None:
        for uri in uris:
            check_address(uri)
            for page in pages_of(uri):
                assert stamp_of(uri) > self.stamps.get(page, 0), "stamps grow with every allocation of a page"
                self.stamps[page] = stamp_of(uri)
        self.live.update(uris)

    @rule(sizes=st.lists(st.tuples(MANAGERS, SIZES), min_size=1, max_size=4), seconds=st.sampled_from([0.0, 1.5]))
    def allocate(self, sizes: list[tuple[int, list[int]]], seconds: float) -> None:
        """Several at once, on both managers."""
        self.clock.time += seconds
        results = self.run(*(self.pools[each].allocate(allocation(wanted)) for each, wanted in sizes))
        for (_, wanted), result in zip(sizes, results, strict=True):
            if not isinstance(result, StorageIOError):
                assert [LocationUri.parse(uri).size for uri in result] == wanted
                self.note(result)

    @rule(manager=MANAGERS, data=st.data())
    def delete(self, manager: int, data: st.DataObject) -> None:
        """What is live, and what was deleted already: twice and late deletions free nothing of anybody else."""
        gone = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True)) if self.live else []
        late = data.draw(st.lists(st.sampled_from(self.dead), max_size=8)) if self.dead else []
        (reasons,) = self.run(self.pools[manager].delete([*gone, *late, *gone]))
        assert reasons == [None] * (2 * len(gone) + len(late))
        self.live.difference_update(gone)
        self.dead += gone

    @rule(manager=MANAGERS, sizes=SIZES, other=SIZES)
    def give_up(self, manager: int, sizes: list[int], other: list[int]) -> None:
        """A caller that hangs up while others allocate: it leaves nothing behind."""

        async def cancelled() -> None:
            task = asyncio.ensure_future(self.pools[manager].allocate(allocation(sizes)))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is None:
                self.note(task.result())

        _, result = self.run(cancelled(), self.pools[1 - manager].allocate(allocation(other)))
        if not isinstance(result, StorageIOError):
            self.note(result)
        self.run(*(asyncio.sleep(0) for _ in range(1)))
        for _ in range(400):  # what was taken for it is freed in the background
            self.run(asyncio.sleep(0))

    @rule(manager=MANAGERS, sizes=SIZES, failures=st.integers(1, 3))
    def fail(self, manager: int, sizes: list[int], failures: int) -> None:
        """The store does what it is told, and says that it failed."""
        self.table.failures = failures
        (result,) = self.run(self.pools[manager].allocate(allocation(sizes)))
        self.table.failures = 0
        if isinstance(result, StorageIOError):
            self.may_leak = True
        else:
            self.note(result)

    @rule(manager=MANAGERS, data=st.data())
    def crash(self, manager: int, data: st.DataObject) -> None:
        """A manager dies between taking memory and storing the blocks; the next one knows nothing."""
        lost = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True)) if self.live else []
        self.live.difference_update(lost)
        self.leaked += lost
        self.may_leak |= bool(lost)
        self.pools[manager] = self.open(len(self.dead))

    @rule(manager=MANAGERS)
    def scrub(self, manager: int) -> None:
        """What no block names is freed, and nothing else."""
        (listed,) = self.run(self.list_objects(manager))
        known = {object_name(uri) for uri in self.live}
        orphans = [each for each in listed if each.name not in known]
        self.run(self.pools[manager].remove_objects("cluster", orphans))
        self.end_leaks()

    def end_leaks(self) -> None:
        self.dead += self.leaked
        self.leaked.clear()
        self.may_leak = False

    async def list_objects(self, manager: int) -> list[StoredObject]:
        return [each async for page in self.pools[manager].objects("cluster") for each in page.objects]

    @rule(manager=MANAGERS, skew=st.sampled_from([-3600.0, 0.0, 0.1]))
    def reboot(self, manager: int, skew: float) -> None:
        """Another generation: everything that was given out is gone, whatever the clock says."""
        self.clock.time += skew
        self.generation += 1
        assert self.run(self.pools[manager].report(report(self.generation))) == [True]
        self.clock.time -= skew
        self.dead += sorted(self.live)
        self.live.clear()
        self.end_leaks()

    @invariant()
    def no_page_belongs_to_two(self) -> None:
        if not hasattr(self, "live"):
            return
        pages = [page for uri in self.live for page in pages_of(uri)]
        assert len(pages) == len(set(pages))

    @invariant()
    def what_is_taken_is_what_is_live(self) -> None:
        if not hasattr(self, "live"):
            return
        live_bytes = PAGE_BYTES * sum(len(pages_of(uri)) for uri in self.live)
        (taken,) = self.run(taken_bytes(self.pools[0]))
        assert taken >= live_bytes if self.may_leak else taken == live_bytes
        (exist,) = self.run(self.pools[1].exists([*sorted(self.live), *self.dead[-20:]]))
        assert exist == [True] * len(self.live) + [False] * len(self.dead[-20:])
        assert taken <= MIB

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()


PoolMachine.TestCase.settings = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=examples(40),
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
)
TestPools = PoolMachine.TestCase
