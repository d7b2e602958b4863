"""Checksums against finishes, expiries, removals and crashes in any order, over two managers on one store.

Whatever goes on (numbers as in design.md 5):

* 3: a session ends one way: all its blocks have the checksums that one and the same finish told, the one that decided,
  also where another manager or another finish carried the decision out.
* What serves never changes: neither a repeated finish nor a replay after a crash writes other checksums.
* 1: both managers answer what the store holds.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from cache_world import CountingIds, FakeClock, dummy, group_of, instance
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_store import Node, SharedStore
from thoroughness import examples

from kvcm.cache.checksums import ToldLocation
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.sessions import StartedWrite, WriteRequest, WriteSession
from kvcm.index.backends.backend import Change
from kvcm.model.errors import KvcmError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.locations import Location, LocationStatus, decode_chunk
from kvcm.model.masks import NO_MASK, BlockMask

KEYS = (1, 2, 3, 4)
GROUPS = ("all", "half", "all", "other")
INSTANCE = instance("i", {"tp0": 10, "tp1": 10}, {"half": ("tp0",), "other": ("tp1",), "all": ("tp0", "tp1")})
GROUP = group_of(["d"], delay_ms=1000, indexer=MetaIndexerConfig(mutex_shard_num=2, batch_key_size=1))
TELLINGS = range(3)
"""0 tells nothing."""


class Op(NamedTuple):
    """What is done at the same time as the others, on one of the two managers."""

    node: int
    verb: str
    telling: int
    key: int


OPS = st.builds(
    Op,
    st.integers(0, 1),
    st.sampled_from(["finish", "finish", "finish", "expire", "remove", "tick"]),
    st.sampled_from(TELLINGS),
    st.sampled_from(KEYS),
)
CONTEST = [Op(0, "finish", 1, 0), Op(1, "finish", 2, 0)]
CRASHES = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.integers(4, 24)))
"""(which node, after how many turns of the loop)"""


def told(telling: int, key: int) -> dict[str, int]:
    """What a finish tells of a block: other numbers than every other finish and block; of key 3 nothing of one part."""
    if not telling:
        return {}
    first = (1 << 63) + 100 * telling + 10 * key
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
        await self.nodes[0].begin()
        await self.nodes[0].registry.storages.add(dummy("d"))
        await self.nodes[0].registry.groups.create(GROUP)
        await self.nodes[0].manager.register_instance(INSTANCE)
        await self.nodes[1].begin()

    def on_change(self, _uid: int, change: Change) -> None:
        for place in change.new.locations if change.new is not None else ():
            at = (change.key, place.id)
            has_served = place.status is LocationStatus.SERVING or at in self.served
            if has_served and self.served.setdefault(at, place.chunk) != place.chunk:
                self.violations.append(f"block {change.key} changed while it served")
            if place.status is LocationStatus.SERVING and checksums_in(place) != self.decided(change.key):
                self.violations.append(f"block {change.key} has other checksums than were decided")

    def decided(self, key: int) -> dict[str, int]:
        """What the stored decision says of a block; whoever carries it out has not forgotten it yet."""
        (document,) = self.store.table("sessions")._documents.values()
        session = WriteSession.decoded("", document)
        row = session.checksums.by_key(session.keys, 0, len(session.keys)).get(key, {})
        return {name: row.get(name, 0) for name in parts_of(key)}

    async def perform(self, op: Op, started: StartedWrite) -> None:
        manager = self.nodes[op.node].manager
        try:
            if op.verb == "finish":
                locations = [ToldLocation(list(told(op.telling, key).items())) for key in started.session.keys]
                success = BlockMask(offset=len(KEYS))
                await self.nodes[op.node].ask(
                    manager.finish_write("i", started.session.id, success, told=locations if op.telling else ())
                )
            elif op.verb == "expire":
                await self.nodes[op.node].ask(manager.expire())
            elif op.verb == "remove":
                await self.nodes[op.node].ask(manager.remove("i", [op.key], NO_MASK))
            else:
                self.clock.advance(6)
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
            found = await node.manager.match("i", MatchQuery(MatchMode.BATCH_GET, KEYS))
            answered = [{spec.name: spec.checksum for spec in decode_chunk(chunk).specs} for chunk in found.chunks]
            assert list(found.keys) == list(kept)
            assert [row for row in answered if any(row.values())] == [row for row in kept.values() if any(row.values())]
        return kept

    async def come_to_rest(self, survivor: int) -> None:
        for _ in range(3):
            self.clock.advance(4000)
            await self.nodes[survivor].manager.expire()
            await self.nodes[survivor].executor.run_due()


def parts_of(key: int) -> tuple[str, ...]:
    return next(group.spec_names for group in INSTANCE.location_spec_groups if group.name == GROUPS[KEYS.index(key)])


def checksums_in(place: Location) -> dict[str, int]:
    return {spec.name: spec.checksum for spec in decode_chunk(place.chunk).specs}


def expected(telling: int, key: int) -> dict[str, int]:
    return {name: told(telling, key).get(name, 0) for name in parts_of(key)}


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), ops=st.lists(OPS, max_size=4).map(CONTEST.__add__), crash=CRASHES)
async def test_invariants_1_and_3_hold_for_checksums(
    seed: int, ops: Sequence[Op], crash: tuple[int, int] | None
) -> None:
    world = Deployment(seed)
    await world.begin()
    started = await world.nodes[0].manager.start_write("i", WriteRequest(KEYS, GROUPS, timeout_seconds=20))
    tasks = [asyncio.create_task(world.perform(op, started)) for op in ops]
    if crash is not None:
        for _ in range(crash[1]):
            await asyncio.sleep(0)
        world.nodes[crash[0]].crash()
    await asyncio.gather(*tasks)
    dead = [world.nodes.pop(crash[0])] if crash is not None else []
    await world.come_to_rest(0)
    kept = await world.records()
    tellings = {op.telling for op in ops if op.verb == "finish"}
    assert world.violations == []
    assert not kept or any(all(row == expected(telling, key) for key, row in kept.items()) for telling in tellings)
    removed = {op.key for op in ops if op.verb == "remove"}
    assert not kept or set(KEYS) - removed <= set(kept)
    for node in (*dead, *world.nodes):
        await node.close()
