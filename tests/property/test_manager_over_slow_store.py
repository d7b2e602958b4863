"""CacheManager over a store that suspends: many clients at once on the same keys. Numbers as in design.md 5."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from cache_world import World, decoded, dummy, group_of, instance
from hypothesis import given, settings
from hypothesis import strategies as st
from suspending_backend import SuspendingBackend, spy_on_locks
from thoroughness import examples

from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.sessions import FinishedWrite, WriteRequest
from kvcm.index.meta_index import Change
from kvcm.model.errors import CapacityError, InvalidArgumentError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.masks import NO_MASK, BlockMask

CAPACITY, SHARDS = 150, 4
INDEXER = MetaIndexerConfig(mutex_shard_num=SHARDS, batch_key_size=2)
CHAINS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


class Client(NamedTuple):
    """What one client does, and with which keys."""

    verb: str
    keys: list[int]
    flag: bool


VERBS = st.sampled_from(["write", "write", "write", "abandon", "read", "read", "remove", "expire", "delete"])
ROUNDS = st.lists(st.lists(st.builds(Client, VERBS, CHAINS, st.booleans()), min_size=1, max_size=9), max_size=4)


class SlowWorld(World):
    """A manager whose one instance has its records in a slow store."""

    def __init__(self, seed: int, capacity: int = CAPACITY, indexer: MetaIndexerConfig = INDEXER) -> None:
        self.backend = SuspendingBackend(Random(seed), on_write=self.on_write)
        group = group_of(["one", "two"], capacity=capacity, indexer=indexer)
        instances = [instance("i", {"tp0": 10, "tp1": 10}, {"half": ("tp0",), "all": ("tp0", "tp1")})]
        super().__init__(group, instances, [dummy("one"), dummy("two")], lambda: self.backend)
        self.capacity = capacity
        self.index = self.manager.cache("i").index
        self.locks = spy_on_locks(self.index, SHARDS)
        self.stored_bytes = 0

    def on_write(self, change: Change) -> None:
        """Invariant 2, and that a quota holds at every moment."""
        self.stored_bytes += size_of(change.new) - size_of(change.old)
        assert self.stored_bytes <= self.capacity
        for record in [change.new] if change.new is not None else []:
            writing = Counter(
                name
                for place in record.locations
                if place.status is LocationStatus.WRITING
                for name in place.spec_names
            )
            assert all(count == 1 for count in writing.values())

    async def perform(self, client: Client) -> None:
        await getattr(self, client.verb)(client.keys, client.flag)

    async def write(self, keys: list[int], flag: bool) -> None:
        """Start, and finish three times at the same time, once with another mask: one decision is carried out
        (invariant 3), and whoever asked for it hears of it, the same each time."""
        groups = ("half",) * len(keys) if flag else ()
        try:
            started = await self.manager.start_write("i", WriteRequest(keys, groups, timeout_seconds=20))
        except CapacityError:
            return
        count = len(started.chunks)
        success = BlockMask(offset=count // 2) if flag else BlockMask(flags=(True,) * count)
        masks = [success, success, BlockMask(offset=0)]
        calls = [self.manager.finish_write("i", started.session.id, mask) for mask in masks]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, FinishedWrite | InvalidArgumentError) for outcome in outcomes), outcomes
        finished = [outcome for outcome in outcomes if isinstance(outcome, FinishedWrite)]
        successes = count // 2 if flag else count
        assert len(set(finished)) == 1, outcomes
        assert finished[0].dropped in {count - successes, count}
        assert all(each.served + each.dropped + each.vanished == count for each in finished)
        is_same = finished[0].dropped == count - successes
        decided = [mask for mask in masks if (mask is success or successes == 0) == is_same]
        assert len(finished) == len(decided), outcomes

    async def abandon(self, keys: list[int], flag: bool) -> None:
        try:
            await self.manager.start_write("i", WriteRequest(keys, timeout_seconds=5 if flag else 20))
        except CapacityError:
            return

    async def read(self, keys: list[int], flag: bool) -> None:
        """Invariant 1: what is returned was serving at some moment of the call."""
        begin = self.backend.steps.next()
        mode = MatchMode.PREFIX_MATCH if flag else MatchMode.BATCH_GET
        found = await self.manager.match("i", MatchQuery(mode, keys))
        end = self.backend.steps.next()
        chunks = decoded(found.chunks)
        for key, (_, _, specs) in zip(keys, chunks, strict=False):
            versions = self.backend.versions_between(key, begin, end)
            assert dict(specs) in [serving_uris(record) for record in versions], key
        if flag and len(chunks) < len(keys):
            missing = self.backend.versions_between(keys[len(chunks)], begin, end)
            assert {"tp0": "", "tp1": ""} in [serving_uris(record) for record in missing]

    async def remove(self, keys: list[int], flag: bool) -> None:
        assert await self.manager.remove("i", keys, NO_MASK) >= 0

    async def expire(self, keys: list[int], flag: bool) -> None:
        await self.manager.expire()

    async def delete(self, keys: list[int], flag: bool) -> None:
        await self.executor.run_due()

    async def records(self) -> list[BlockRecord]:
        records = self.backend.inner
        keys = [key async for page in records.scan(100) for key in page]
        return [record for record in await records.get_many(keys) if record is not None]

    async def come_to_rest(self) -> Sequence[BlockRecord]:
        """Let every session and every delay pass."""
        self.clock.advance(4000)
        await self.manager.expire()
        await self.executor.run_due()
        self.clock.advance(4000)
        await self.executor.run_due()
        assert await self.executor.run_due() == 0
        return await self.records()


def size_of(record: BlockRecord | None) -> int:
    return sum(place.size_bytes for place in record.locations) if record is not None else 0


def serving_uris(record: BlockRecord | None) -> dict[str, str]:
    """All storages have one speed here: the oldest serving location of each spec; empty uris for a miss."""
    uris: dict[str, str] = {}
    for place in record.locations if record is not None else ():
        ((_, _, specs),) = decoded([place.chunk])
        for name, uri in specs if place.status is LocationStatus.SERVING else ():
            uris.setdefault(name, uri)
    return uris or {"tp0": "", "tp1": ""}


@settings(max_examples=examples(250), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), rounds=ROUNDS)
async def test_invariants_1_2_3_4_8_with_many_clients_at_once(seed: int, rounds: list[list[Client]]) -> None:
    world = SlowWorld(seed)
    try:
        for clients in rounds:
            await asyncio.gather(*map(world.perform, clients))
            assert world.locks.held == []
            assert sum(world.index.usage_bytes.values()) == sum(map(size_of, await world.records()))
            assert sum(world.manager.group_usage_bytes("group").values()) == world.stored_bytes
            world.clock.advance(6)
        records = await world.come_to_rest()
        assert {place.status for record in records for place in record.locations} <= {LocationStatus.SERVING}
        assert world.manager.endings.open_count == 0
        assert sum(world.index.usage_bytes.values()) == sum(map(size_of, records))
    finally:
        world.close()
