"""Pins of two managers on one store, at the same time, with crashes: the budget is never exceeded, nothing is pinned
past its deadline, and whatever was pinned and is still there stays pinned (after a crash: is soon pinned again)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_world import CountingIds, FakeClock, dummy, group_of, instance
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_store import Node, SharedStore
from thoroughness import examples

from kvcm.cache.pins import Pin, PinRequest
from kvcm.cache.sessions import WriteRequest
from kvcm.index.backends.backend import Change
from kvcm.model.errors import CapacityError, KvcmError
from kvcm.model.locations import LocationStatus
from kvcm.model.masks import NO_MASK, BlockMask

BLOCK = 10
KEYS = (1, 2, 3, 4)
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
        first, second = self.new_node(), self.new_node()
        await first.begin()
        await first.registry.storages.add(dummy("d"))
        await first.registry.groups.create(GROUP)
        await first.manager.register_instance(INSTANCE)
        await second.begin()
        self.nodes = [first, second]
        await self.write(first, Op(0, "write", len(KEYS), 0))

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
        pin = await node.ask(node.manager.pin("i", PinRequest(KEYS[: op.length], "me", seconds)))
        if pin is not None:
            assert [place.key for place in pin.places] == list(KEYS[: len(pin.places)])
            self.known.append(pin)

    async def unpin(self, node: Node, op: Op) -> None:
        if self.known:
            pin = self.known.pop(op.pick % len(self.known))
            await node.ask(node.manager.unpin("i", pin.id))

    async def write(self, node: Node, op: Op) -> None:
        started = await node.ask(node.manager.start_write("i", WriteRequest(KEYS[: op.length])))
        await node.ask(node.manager.finish_write("i", started.session.id, BlockMask(offset=len(started.chunks))))

    async def remove(self, node: Node, op: Op) -> None:
        await node.ask(node.manager.remove("i", [KEYS[op.length - 1]], NO_MASK))

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
            self.clock.advance(6.0)  # then somebody carries out what was cut off
            await self.nodes[0].manager.expire()
        self.clock.advance(seconds)
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
        for pin in self.known:  # of what a crash cut off nobody was told
            if pin.deadline > now:
                assert pin in listed
                assert all(marks.get(at, pin.deadline) >= pin.deadline for at in _places(pin)), "a pin lost its mark"
        for at, mark in marks.items():
            held = max((pin.deadline for pin in listed if at in _places(pin)), default=0.0)
            assert self.has_crashed or mark <= max(held, now), "a mark without a pin"
        if not self.has_crashed:
            assert taken == sum(pin.size_bytes for pin in listed)

    async def come_to_rest(self) -> None:
        self.clock.advance(200)
        node = self.nodes[0]
        for _ in range(3):
            await node.manager.expire()
            self.clock.advance(200)
        assert await node.manager.pins.pinned_bytes("group") == 0
        assert await self.store.table("pins").all() == {}
        assert await self.store.table("pinbudgets").all() == {}
        assert not any(until > self.clock.now() for _, until in self.pinned.values())
        self.latest = dict.fromkeys(KEYS, self.clock.now() + 10)
        await self.write(node, Op(0, "write", len(KEYS), 0))
        pin = await node.manager.pin("i", PinRequest(KEYS, "me", 10))
        assert pin is not None
        assert pin.block_count == len(KEYS)  # nothing takes any of the budget any more

    async def close(self) -> None:
        for node in (*self.crashed, *self.nodes):
            await node.close()


def _places(pin: Pin) -> set[tuple[int, str]]:
    return {place[:2] for place in pin.places}


async def _run(seed: int, rounds: Sequence[tuple[Sequence[Op], tuple[int, int] | None, float]]) -> None:
    run = Run(seed)
    try:
        await run.begin()
        for ops, crash, seconds in rounds:
            await run.round(ops, crash, seconds)
        await run.come_to_rest()
    finally:
        await run.close()


@settings(max_examples=examples(250), deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), ROUNDS)
def test_pins_keep_to_budget_and_deadline(
    seed: int, rounds: list[tuple[list[Op], tuple[int, int] | None, float]]
) -> None:
    asyncio.run(_run(seed, rounds))


async def test_of_many_pins_at_once_exactly_as_many_succeed_as_fit() -> None:
    for seed in range(20):
        run = Run(seed)
        await run.begin()
        request = PinRequest(KEYS[:2], "me", 50)
        asked = [run.nodes[number % 2].manager.pin("i", request) for number in range(12)]
        run.latest |= dict.fromkeys(KEYS, run.clock.now() + 50)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, Pin) for each in outcomes) == 3  # of two blocks each, and the budget is seven
        assert sum(isinstance(each, CapacityError) for each in outcomes) == 9
        await run.check()
        await run.close()
