"""Two managers on one store at the same time, with crashes: checksums, pins within their budget, and drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from cache_world import CountingIds, dummy, group_of, instance
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_store import Node, SharedStore, begin_two
from thoroughness import examples

from kvcm.cache.drains import DrainProgress, StorageDrains
from kvcm.cache.pins import Pin, PinRequest
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.removal import Remover
from kvcm.cache.write_sessions import LocationChecksums, StartedWrite, WriteRequest, WriteSession
from kvcm.index.backends.backend import Change
from kvcm.model.errors import CapacityError, KvcmError, NotReadyError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import Location, LocationStatus, decode_chunk

# ── Checksum interleavings ──


KEYS = (1, 2, 3, 4)
GROUPS = ("all", "half", "all", "other")
CHECKED_INSTANCE = instance("i", {"tp0": 10, "tp1": 10}, {"half": ("tp0",), "other": ("tp1",), "all": ("tp0", "tp1")})
CHECKED_GROUP = group_of(["d"], delay_ms=1000, indexer=MetaIndexerConfig(mutex_shard_num=2, batch_key_size=1))
REPORTS = range(3)
"""A finish of report 0 reports no checksums."""


class CheckedOp(NamedTuple):
    """A call on one of the two managers, concurrent with the others."""

    node: int
    verb: str
    report: int
    key: int


CHECKED_OPS = st.builds(
    CheckedOp,
    st.integers(0, 1),
    st.sampled_from(["finish", "finish", "finish", "expire", "remove", "tick"]),
    st.sampled_from(REPORTS),
    st.sampled_from(KEYS),
)
CONTEST = [CheckedOp(0, "finish", 1, 0), CheckedOp(1, "finish", 2, 0)]
CRASHES = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.integers(4, 24)))
"""(which node, after how many turns of the loop)"""


def answer(report: int, key: int) -> dict[str, int]:
    """Return the checksums that a finish reports of a block: unique to finish and block; of key 3 only one part."""
    if not report:
        return {}
    first = (1 << 63) + 100 * report + 10 * key
    return {"tp0": first} if key == 3 else {"tp0": first, "tp1": first + 1}


class Deployment:
    """Two managers on one store, and what must never happen, seen in the store."""

    def __init__(self, seed: int) -> None:
        self.clock = FakeClock()
        self.served: dict[tuple[int, str], bytes] = {}
        self.violations: list[str] = []
        self.store = SharedStore(self.on_change)
        ids = CountingIds()
        self.nodes = [Node(self.store, self.clock, ids, seed + number) for number in range(2)]

    async def begin(self) -> None:
        await begin_two(*self.nodes, dummy("d"), CHECKED_GROUP, CHECKED_INSTANCE)

    def on_change(self, _uid: int, change: Change) -> None:
        for place in change.new.locations if change.new is not None else ():
            at = (change.key, place.id)
            has_served = place.status is LocationStatus.SERVING or at in self.served
            if has_served and self.served.setdefault(at, place.chunk) != place.chunk:
                self.violations.append(f"block {change.key} changed while it served")
            if place.status is LocationStatus.SERVING and checksums_in(place) != self.decided(change.key):
                self.violations.append(f"block {change.key} has other checksums than were decided")

    def decided(self, key: int) -> dict[str, int]:
        """Return the checksums in the stored decision of a block, which its manager has not removed yet."""
        (document,) = self.store.table("sessions")._documents.values()
        session = WriteSession.decoded("", document)
        row = session.checksums.by_key(session.keys, 0, len(session.keys)).get(key, {})
        return {name: row.get(name, 0) for name in parts_of(key)}

    async def perform(self, op: CheckedOp, started: StartedWrite) -> None:
        manager = self.nodes[op.node].manager
        try:
            if op.verb == "finish":
                locations = [LocationChecksums(list(answer(op.report, key).items())) for key in started.session.keys]
                success = BlockMask(offset=len(KEYS))
                await self.nodes[op.node].ask(
                    manager.finish_write(
                        manager.cache("i"), started.session.id, success, reported=locations if op.report else ()
                    )
                )
            elif op.verb == "expire":
                await self.nodes[op.node].ask(manager.expire())
            elif op.verb == "remove":
                await self.nodes[op.node].ask(manager.remove(manager.cache("i"), [op.key], NO_MASK))
            else:
                self.clock.time += 6
        except KvcmError:
            return

    async def records(self) -> dict[int, dict[str, int]]:
        """Checksums of what serves, by key and spec, and whether both managers answer just that."""
        (backend,) = self.store.backends().values()
        kept: dict[int, dict[str, int]] = {}
        for key, record in zip(KEYS, await backend.get_many(KEYS), strict=True):
            for place in record.locations if record is not None else ():
                assert place.status is LocationStatus.SERVING
                kept[key] = checksums_in(place)
        for node in self.nodes:
            found = await node.manager.match(node.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, KEYS))
            answered = [{spec.name: spec.checksum for spec in decode_chunk(chunk).specs} for chunk in found.chunks]
            assert list(found.keys) == list(kept)
            assert [row for row in answered if any(row.values())] == [row for row in kept.values() if any(row.values())]
        return kept

    async def come_to_rest(self, survivor: int) -> None:
        for _ in range(3):
            self.clock.time += 4000
            await self.nodes[survivor].manager.expire()
            await self.nodes[survivor].executor.run_due()


def parts_of(key: int) -> tuple[str, ...]:
    return next(
        group.spec_names for group in CHECKED_INSTANCE.location_spec_groups if group.name == GROUPS[KEYS.index(key)]
    )


def checksums_in(place: Location) -> dict[str, int]:
    return {spec.name: spec.checksum for spec in decode_chunk(place.chunk).specs}


def expected(report: int, key: int) -> dict[str, int]:
    return {name: answer(report, key).get(name, 0) for name in parts_of(key)}


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 1 << 32), ops=st.lists(CHECKED_OPS, max_size=4).map(CONTEST.__add__), crash=CRASHES)
async def test_invariants_1_and_3_hold_for_checksums(
    seed: int, ops: Sequence[CheckedOp], crash: tuple[int, int] | None
) -> None:
    world = Deployment(seed)
    await world.begin()
    started = await world.nodes[0].manager.start_write(
        world.nodes[0].manager.cache("i"), WriteRequest(KEYS, GROUPS, timeout_seconds=20)
    )
    tasks = [asyncio.create_task(world.perform(op, started)) for op in ops]
    if crash is not None:
        for _ in range(crash[1]):
            await asyncio.sleep(0)
        world.nodes[crash[0]].crash()
    await asyncio.gather(*tasks)
    dead = [world.nodes.pop(crash[0])] if crash is not None else []
    await world.come_to_rest(0)
    kept = await world.records()
    reports = {op.report for op in ops if op.verb == "finish"}
    assert world.violations == []
    assert not kept or any(all(row == expected(report, key) for key, row in kept.items()) for report in reports)
    removed = {op.key for op in ops if op.verb == "remove"}
    assert not kept or set(KEYS) - removed <= set(kept)
    for node in (*dead, *world.nodes):
        await node.close()


# ── Pinned bytes ──


BLOCK = 10
BUDGET = 7 * BLOCK
GROUP = replace(group_of(["d"], delay_ms=0), pin_budget_bytes=BUDGET)
INSTANCE = instance("i", {"kv": BLOCK})


@dataclass(frozen=True)
class Op:
    """What one manager is asked for.

    Attributes:
        node: which one.
        verb: a method of `Run`.
        length: of the prefix.
        pick: chooses among pins, and how long a pin lasts.
    """

    node: int
    verb: str
    length: int
    pick: int


OPS = st.builds(
    Op,
    st.integers(0, 1),
    st.sampled_from(["pin", "pin", "pin", "unpin", "unpin", "write", "remove", "expire"]),
    st.integers(1, len(KEYS)),
    st.integers(0, 5),
)
ROUNDS = st.lists(
    st.tuples(
        st.lists(OPS, min_size=1, max_size=6),
        st.one_of(st.none(), st.none(), st.none(), st.tuples(st.integers(0, 1), st.integers(0, 60))),
        st.sampled_from([0.0, 0.0, 1.0, 6.0]),
    ),
    min_size=1,
    max_size=6,
)


class Run:
    """Two managers, and a plain model of what may be pinned."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock, self.ids = FakeClock(), CountingIds()
        self.store = SharedStore(self.on_change)
        self.pinned: dict[tuple[int, str], tuple[int, float]] = {}
        self.latest = dict.fromkeys(KEYS, 0.0)
        self.known: list[Pin] = []
        self.has_crashed = False
        self.nodes: list[Node] = []
        self.crashed: list[Node] = []

    def new_node(self) -> Node:
        self.seed += 1
        return Node(self.store, self.clock, self.ids, self.seed)

    async def begin(self) -> None:
        self.nodes = [self.new_node(), self.new_node()]
        await begin_two(*self.nodes, dummy("d"), GROUP, INSTANCE)
        await self.write(self.nodes[0], Op(0, "write", len(KEYS), 0))

    def on_change(self, _uid: int, change: Change) -> None:
        """After each single change of a record."""
        now = self.clock.now()
        for place in change.old.locations if change.old is not None else ():
            self.pinned.pop((change.key, place.id), None)
        for place in change.new.locations if change.new is not None else ():
            if place.status is LocationStatus.SERVING and place.pinned_until:
                assert place.pinned_until <= self.latest[change.key], "pinned past the deadline of every pin"
                self.pinned[change.key, place.id] = (place.size_bytes, place.pinned_until)
        assert sum(size for size, until in self.pinned.values() if until > now) <= BUDGET

    async def perform(self, op: Op) -> None:
        node = self.nodes[op.node]
        try:
            await getattr(self, op.verb)(node, op)
        except KvcmError:
            return

    async def pin(self, node: Node, op: Op) -> None:
        seconds = (1, 5, 20, 50, 100, 100)[op.pick]
        for key in KEYS[: op.length]:
            self.latest[key] = max(self.latest[key], self.clock.now() + seconds)
        pin = await node.ask(node.manager.pin(node.manager.cache("i"), PinRequest(KEYS[: op.length], "me", seconds)))
        if pin is not None:
            assert [place.key for place in pin.pinned_locations] == list(KEYS[: len(pin.pinned_locations)])
            self.known.append(pin)

    async def unpin(self, node: Node, op: Op) -> None:
        if self.known:
            pin = self.known.pop(op.pick % len(self.known))
            await node.ask(node.manager.unpin(node.manager.cache("i"), pin.id))

    async def write(self, node: Node, op: Op) -> None:
        started = await node.ask(node.manager.start_write(node.manager.cache("i"), WriteRequest(KEYS[: op.length])))
        await node.ask(
            node.manager.finish_write(
                node.manager.cache("i"), started.session.id, BlockMask(offset=len(started.chunks))
            )
        )

    async def remove(self, node: Node, op: Op) -> None:
        await node.ask(node.manager.remove(node.manager.cache("i"), [KEYS[op.length - 1]], NO_MASK))

    async def expire(self, node: Node, _op: Op) -> None:
        await node.ask(node.manager.expire())

    async def round(self, ops: Sequence[Op], crash: tuple[int, int] | None, seconds: float) -> None:
        tasks = [asyncio.create_task(self.perform(op)) for op in ops]
        if crash is not None:
            self.has_crashed = True
            crashing, turns = crash
            for _ in range(turns):
                await asyncio.sleep(0)
            self.crashed.append(self.nodes[crashing])
            self.nodes[crashing].crash()
        await asyncio.gather(*tasks)
        if crash is not None:
            self.nodes[crash[0]] = self.new_node()
            await self.nodes[crash[0]].begin()
            self.clock.time += 6.0  # then a manager carries out the interrupted call
            await self.nodes[0].manager.expire()
        self.clock.time += seconds
        await self.check()

    async def check(self) -> None:
        """Between rounds."""
        node = self.nodes[0]
        now = self.clock.now()
        listed = await node.manager.pins.of_instance(node.manager.cache("i"))
        taken = await node.manager.pins.pinned_bytes("group")
        assert sum(pin.size_bytes for pin in listed) <= taken <= BUDGET
        records = await node.manager.cache("i").index.get(KEYS)
        marks = {
            (key, place.id): place.pinned_until
            for key, record in zip(KEYS, records, strict=True)
            for place in (record.locations if record is not None else ())
            if place.status is LocationStatus.SERVING
        }
        for pin in self.known:  # calls cut off by a crash returned no pin
            if pin.deadline > now:
                assert pin in listed
                assert all(marks.get(at, pin.deadline) >= pin.deadline for at in _places(pin)), "a pin lost its mark"
        for at, mark in marks.items():
            held = max((pin.deadline for pin in listed if at in _places(pin)), default=0.0)
            assert self.has_crashed or mark <= max(held, now), "a mark without a pin"
        if not self.has_crashed:
            assert taken == sum(pin.size_bytes for pin in listed)

    async def come_to_rest(self) -> None:
        self.clock.time += 200
        node = self.nodes[0]
        for _ in range(3):
            await node.manager.expire()
            self.clock.time += 200
        assert await node.manager.pins.pinned_bytes("group") == 0
        assert await self.store.table("pins").all() == {}
        assert await self.store.table("pinbudgets").all() == {}
        assert not any(until > self.clock.now() for _, until in self.pinned.values())
        self.latest = dict.fromkeys(KEYS, self.clock.now() + 10)
        await self.write(node, Op(0, "write", len(KEYS), 0))
        pin = await node.manager.pin(node.manager.cache("i"), PinRequest(KEYS, "me", 10))
        assert pin is not None
        assert pin.block_count == len(KEYS)  # nothing takes any of the budget any more

    async def close(self) -> None:
        for node in (*self.crashed, *self.nodes):
            await node.close()


def _places(pin: Pin) -> set[tuple[int, str]]:
    return {place[:2] for place in pin.pinned_locations}


@settings(max_examples=examples(250))
@given(st.integers(0, 1 << 32), ROUNDS)
async def test_pins_keep_to_budget_and_deadline(
    seed: int, rounds: list[tuple[list[Op], tuple[int, int] | None, float]]
) -> None:
    run = Run(seed)
    try:
        await run.begin()
        for ops, crash, seconds in rounds:
            await run.round(ops, crash, seconds)
        await run.come_to_rest()
    finally:
        await run.close()


async def test_of_many_pins_at_once_exactly_as_many_succeed_as_fit() -> None:
    for seed in range(20):
        run = Run(seed)
        await run.begin()
        request = PinRequest(KEYS[:2], "me", 50)
        asked = [
            run.nodes[number % 2].manager.pin(run.nodes[number % 2].manager.cache("i"), request) for number in range(12)
        ]
        run.latest |= dict.fromkeys(KEYS, run.clock.now() + 50)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, Pin) for each in outcomes) == 3  # of two blocks each, and the budget is seven
        assert sum(isinstance(each, CapacityError) for each in outcomes) == 9
        await run.check()
        await run.close()


# ── Drains of two managers ──


MANY = list(range(600))


class Two(NamedTuple):
    """Two managers, their drains, and the time."""

    nodes: list[Node]
    drains: list[StorageDrains]
    clock: FakeClock
    store: SharedStore

    async def start(self, number: int, keys: list[int]) -> StartedWrite:
        return await self.nodes[number].manager.start_write(self.nodes[number].manager.cache("i"), WriteRequest(keys))

    async def finish(self, number: int, started: StartedWrite) -> None:
        mask = BlockMask(offset=len(started.chunks))
        await self.nodes[number].manager.finish_write(self.nodes[number].manager.cache("i"), started.session.id, mask)

    async def write(self, number: int, keys: list[int]) -> StartedWrite:
        started = await self.start(number, keys)
        await self.finish(number, started)
        return started

    async def lead(self, number: int, seconds: float) -> None:
        """One of the two does what a leader does, some time later."""
        self.clock.time += seconds
        for node in self.nodes:
            await node.registry.refresh()
        await self.nodes[number].manager.expire()
        await self.drains[number].resume()
        await self.nodes[number].executor.run_due()

    async def progress(self, number: int, *, is_leader: bool = True) -> DrainProgress:
        (only,) = await self.drains[number].progress(is_leader=is_leader)
        return only

    @property
    def used_bytes(self) -> int:
        return sum(sum(backend.usage_bytes.values()) for backend in self.store.backends().values())


async def _no_pause(_seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    """Two managers that know one storage."""
    store, clock, ids = SharedStore(), FakeClock(), CountingIds()
    nodes = [Node(store, clock, ids, seed) for seed in (1, 2)]
    await begin_two(*nodes, dummy("a"), group_of(["a"], delay_ms=1000), instance("i", {"kv": 32}))
    drains = [
        StorageDrains(
            node.registry,
            node.manager.open_caches,
            Remover(clock, node.registry.groups.find),
            clock,
            is_shared=True,
            pause=_no_pause,
        )
        for node in nodes
    ]
    yield Two(nodes, drains, clock, store)
    for node in nodes:
        await node.close()


async def test_what_a_manager_writes_that_has_not_received_yet_is_found(two: Two) -> None:
    await two.write(0, MANY)
    await two.drains[0].drain("a")
    late = await two.start(1, [1000])  # this manager has not received the drain
    assert len(late.chunks) == 1
    for node in two.nodes:
        await node.registry.refresh()
    with pytest.raises(NotReadyError, match="being drained"):
        await two.start(1, [1001])
    for _ in range(5):
        await two.lead(0, 2.0)
    assert two.used_bytes == 32
    assert not (await two.progress(0)).is_done
    await two.finish(1, late)
    for _ in range(4):
        await two.lead(0, 31.0)
    assert two.used_bytes == 0
    assert [(await two.progress(n, is_leader=n == 0)).is_done for n in (0, 1)] == [True, True]


async def test_what_comes_after_the_drain_was_done_is_found_too(two: Two) -> None:
    await two.drains[0].drain("a")
    for _ in range(5):
        two.clock.time += 10.0
        await two.drains[0].resume()
    assert (await two.progress(0)).is_done
    await two.write(1, [1000])  # its view is a minute old: it was cut off from the store, say
    assert not (await two.progress(0)).is_done
    for _ in range(4):
        await two.lead(0, 2.0)
    assert two.used_bytes == 0


async def test_nothing_is_done_before_every_manager_must_have_received(two: Two) -> None:
    await two.drains[0].drain("a")
    for _ in range(5):
        await two.lead(0, 1.0)
    assert [(await two.progress(n, is_leader=n == 0)).is_done for n in (0, 1)] == [False, False]
    for _ in range(4):
        await two.lead(0, 5.0)
    assert [(await two.progress(n, is_leader=n == 0)).is_done for n in (0, 1)] == [True, True]


async def test_the_next_leader_goes_on_where_the_last_one_stopped(two: Two) -> None:
    await two.write(0, MANY)
    await two.drains[0].drain("a")
    turns = iter([True, False])
    await two.drains[0].resume(lambda: next(turns))
    await two.nodes[0].executor.run_due()
    await two.nodes[1].registry.refresh()
    assert (await two.progress(1, is_leader=False)).remaining_bytes > 0
    two.nodes[0].crash()
    two.clock.time += 2.0
    for _ in range(4):
        two.clock.time += 10.0
        await two.nodes[1].registry.refresh()
        await two.drains[1].resume()
        await two.nodes[1].executor.run_due()
    assert two.used_bytes == 0
    assert (await two.progress(1)).is_done


async def test_two_that_believe_to_lead_do_each_other_no_harm(two: Two) -> None:
    await two.write(0, MANY)
    await two.drains[0].drain("a")
    await two.nodes[1].registry.refresh()
    for _ in range(4):
        await asyncio.gather(two.drains[0].resume(), two.drains[1].resume())
        await asyncio.gather(*(node.executor.run_due() for node in two.nodes))
        two.clock.time += 10.0
    assert two.used_bytes == 0


@pytest.mark.parametrize("turns", range(40))
async def test_a_write_and_the_removal_of_its_storage_at_the_same_time_leave_nothing(two: Two, turns: int) -> None:
    async def remove() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await two.drains[0].remove("a")

    async def write() -> None:
        try:
            await two.write(0, [1, 2])
        except KvcmError:
            return

    await asyncio.gather(write(), remove())
    for _ in range(8):
        await two.lead(1, 20.0)
    assert two.used_bytes == 0
    assert two.nodes[1].registry.storages.drains() == []
