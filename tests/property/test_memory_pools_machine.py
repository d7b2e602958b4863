"""Invariants 1, 2, 4 and 5 with memory pools: readers and writers on two nodes and on none, pools that are rebooted,
disabled and purged, against a plain model. No client ever gets memory of another node."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, NamedTuple, TypeVar

from cache_world import CLUSTER, World, group_of, instance
from fake_clock import FakeClock
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from suspending_backend import SuspendingBackend
from thoroughness import is_thorough

from kvcm.cache.manager import GarbageSource
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.removal import PoolPurges, Remover
from kvcm.cache.write_sessions import WriteRequest
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.errors import NotReadyError
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import decode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.model.uri import LocationUri
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.storage.backend import object_name
from kvcm.storage.mempool import PoolOpener, PoolReport
from kvcm.store.memory import MemoryStore

Result = TypeVar("Result")

MIB = 1 << 20
BLOCK = 5000  # two pages
NODE_OF = {"a1": "a", "a2": "a", "b1": "b", "shared": ""}
NODES = st.sampled_from(["a", "b", "", "c"])
KEYS = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(sorted)
POOLS = st.sampled_from(["a1", "a2", "b1"])
ORDERS = st.permutations(["a1", "a2", "b1", "shared"])


class Held(NamedTuple):
    """A session that is open: its blocks with their uris, without those that were removed since it began."""

    session_id: str
    count: int
    uris: dict[int, str]
    deadline: float


class PoolsMachine(RuleBasedStateMachine):
    awaits = False

    @initialize(order=ORDERS)
    def begin(self, order: list[str]) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = MemoryStore()
        specs = {
            name: TairMemPoolStorageSpec(node_id=node, capacity_bytes=MIB) for name, node in NODE_OF.items() if node
        }
        world = World(
            group_of(order, delay_ms=1000),
            [instance("i", {"kv": BLOCK})],
            [StorageConfig(name, specs.get(name, DummyStorageSpec())) for name in NODE_OF],
            lambda: SuspendingBackend(Random(2)) if self.awaits else MemoryBackend(),  # type: ignore[return-value]
            new_openers=self.new_openers,
            store=self.store,
        )
        self.clock, self.registry, self.storages = world.clock, world.registry, world.storages
        self.manager, self.executor = world.manager, world.executor
        remover = Remover(self.clock, self.registry.groups.find)
        self.purges = PoolPurges(self.storages.pools, self.manager.open_caches, remover, self.clock)
        ownership = GarbageSource(self.manager, self.registry, self.store)
        self.scrubber = StorageScrubber(ownership, self.storages, self.clock, CLUSTER)
        self.down: set[str] = set()
        self.generations = dict.fromkeys(NODE_OF, 1)
        self.serving: dict[int, dict[str, str]] = {key: {} for key in range(8)}  # uri by storage
        self.open: list[Held] = []
        for name in specs:
            self.run(self.storages.pools()[name].report(PoolReport(NODE_OF[name], 1, MIB)))

    def new_openers(self, clock: FakeClock) -> dict[StorageType, PoolOpener]:
        table = self.store.table("pools")
        return {StorageType.ST_TAIRMEMPOOL: PoolOpener(table, clock, Random(1), is_shared=self.awaits)}

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    def is_seen(self, storage: str, node_id: str) -> bool:
        return storage not in self.down and NODE_OF[storage] in {"", node_id}

    def readable(self, key: int, node_id: str) -> bool:
        return any(self.is_seen(storage, node_id) for storage in self.serving[key])

    def is_being_written(self, key: int, node_id: str) -> bool:
        uris = [held.uris[key] for held in self.open if key in held.uris]
        return any(self.is_seen(LocationUri.parse(uri).storage, node_id) for uri in uris)

    @rule(node_id=NODES, keys=KEYS)
    def start(self, node_id: str, keys: list[int]) -> None:
        self.expire()
        wanted = [key for key in keys if not self.readable(key, node_id) and not self.is_being_written(key, node_id)]
        request = WriteRequest(keys, node_id=node_id, timeout_seconds=60)
        try:
            started = self.run(self.manager.start_write(self.manager.cache("i"), request))
        except NotReadyError:
            assert wanted
            assert not any(self.is_seen(name, node_id) for name in NODE_OF)
            return
        uris = [spec.uri for chunk in started.chunks for spec in decode_chunk(chunk).specs]
        assert len(uris) == len(wanted), "masked is what the writer's node can read, or is being written there"
        for uri in uris:
            assert self.is_seen(LocationUri.parse(uri).storage, node_id)
            assert LocationUri.parse(uri).node_id in {None, node_id}
        held = Held(started.session.id, len(uris), dict(zip(wanted, uris, strict=True)), started.session.deadline)
        self.open.append(held)

    @rule(data=st.data(), success=st.booleans())
    def finish(self, data: st.DataObject, success: bool) -> None:
        self.expire()
        if not self.open:
            return
        held = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        mask = BlockMask(offset=held.count if success else 0)
        self.run(self.manager.finish_write(self.manager.cache("i"), held.session_id, mask))
        for key, uri in held.uris.items() if success else ():
            self.serving[key][LocationUri.parse(uri).storage] = uri

    def expire(self) -> None:
        self.run(self.manager.expire())
        self.open = [held for held in self.open if held.deadline > self.clock.time]

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.expire()
        self.run(self.executor.run_due())

    @rule(keys=KEYS)
    def remove(self, keys: list[int]) -> None:
        self.run(self.manager.remove(self.manager.cache("i"), keys, NO_MASK))
        for key in keys:
            self.serving[key].clear()
            self.forget_writers(key, lambda _uri: True)

    def forget_writers(self, key: int, goes: Any) -> None:
        for held in self.open:
            if key in held.uris and goes(held.uris[key]):
                del held.uris[key]

    @rule(storage=st.sampled_from(sorted(NODE_OF)))
    def switch(self, storage: str) -> None:
        self.run(self.registry.storages.set_enabled(storage, enabled=storage in self.down))
        self.down ^= {storage}

    @rule(storage=POOLS, is_known_at_once=st.booleans())
    def reboot(self, storage: str, is_known_at_once: bool) -> None:
        """New memory: after the purge nothing of the old is readable, and clients write the blocks again."""
        self.generations[storage] += 1
        report = PoolReport(NODE_OF[storage], self.generations[storage], MIB)
        assert self.run(self.storages.pools()[storage].report(report))
        if not is_known_at_once:
            self.clock.time += 0.5
        self.run(self.purges.resume())
        for key, places in self.serving.items():
            places.pop(storage, None)
            self.forget_writers(key, lambda uri: LocationUri.parse(uri).storage == storage)

    @invariant()
    def everybody_is_given_what_their_node_can_read(self) -> None:
        if not hasattr(self, "serving"):
            return
        for node_id in ("a", "b", "", "c"):
            query = MatchQuery(MatchMode.BATCH_GET, list(range(8)), node_id=node_id)
            try:
                found = self.run(self.manager.match(self.manager.cache("i"), query))
            except NotReadyError:
                assert not any(self.is_seen(name, node_id) for name in NODE_OF)
                continue
            for key, chunk in enumerate(found.chunks):
                uris = [spec.uri for spec in decode_chunk(chunk).specs if spec.uri]
                known = {uri for name, uri in self.serving[key].items() if self.is_seen(name, node_id)}
                assert bool(uris) == bool(known)
                assert known.issuperset(uris)
                own = {uri for uri in known if uri.startswith("pace://")}
                assert not own or own.issuperset(uris), "memory of the own node is the fastest"
            prefix = MatchQuery(MatchMode.PREFIX_MATCH, list(range(8)), node_id=node_id)
            hits = [self.readable(key, node_id) for key in range(8)]
            length = hits.index(False) if False in hits else 8
            assert len(self.run(self.manager.match(self.manager.cache("i"), prefix)).keys) == length

    def teardown(self) -> None:
        """At rest the documents hold what the records name, and usage is the sum of both."""
        if not hasattr(self, "serving"):
            return
        self.clock.time += 4000
        self.expire()
        self.run(self.executor.run_due())
        self.run(self.settle())
        self.run(self.executor.run_due())
        named = self.run(self.names())
        taken = self.run(self.taken())
        assert taken == {name for name in named if name.startswith("/")}
        assert sum(self.manager.group_usage_bytes("group").values()) == BLOCK * len(named)
        self.storages.close_all()
        self.loop.close()

    async def settle(self) -> None:
        await self.purges.resume()
        for pool in self.storages.pools():
            report = await self.scrubber.scrub(pool, dry_run=False)
            assert report.orphans == 0, "nothing leaks while no manager dies"

    async def names(self) -> set[str]:
        records = await self.manager.cache("i").index.get(range(8))
        chunks = [location.chunk for record in records if record is not None for location in record.locations]
        return {object_name(spec.uri) for chunk in chunks for spec in decode_chunk(chunk).specs}

    async def taken(self) -> set[str]:
        pools = self.storages.pools().values()
        return {each.name for pool in pools async for page in pool.objects(CLUSTER) for each in page.objects}


class SuspendingPoolsMachine(PoolsMachine):
    """The same before a store that takes its time, so that records are kept for nodes."""

    awaits = True


PHASES = [Phase.explicit, Phase.generate]  # a failure of many steps takes minutes to shrink
FEW = settings(phases=PHASES, max_examples=40 if is_thorough() else 8, stateful_step_count=25)
PoolsMachine.TestCase.settings = FEW
SuspendingPoolsMachine.TestCase.settings = FEW
TestPools = PoolsMachine.TestCase
TestSuspendingPools = SuspendingPoolsMachine.TestCase
