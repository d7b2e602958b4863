"""Blocks written as a run leave the same state as the same blocks written one record at a time: records, answers,
usage, due times, orders of eviction, events and the results of calls (invariants 2, 3, 4 and 7)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from cache_world import World as Core
from cache_world import dummy, group_of, instance
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.cache import instance_cache, write_sessions
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.write_sessions import LocationChecksums, Retention, StartedWrite, WriteRequest
from kvcm.index.backends.backend import FinishRun
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.errors import KvcmError
from kvcm.model.groups import EvictionPolicy, MetaIndexerConfig, PrefixClass
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRun
from kvcm.model.storages import StorageType
from kvcm.reclaim.eviction_order import LiveOrder, OrderPlan
from kvcm.reclaim.policies import POLICIES
from kvcm.telemetry.events import EventLog

SPECS = {"tp0": 10, "tp1": 10}
GROUPS = {"all": ("tp0", "tp1"), "first": ("tp0",), "second": ("tp1",)}
KEYS = st.integers(1, 12)
MANY = st.lists(KEYS, min_size=1, max_size=9, unique=True)
CHAIN = st.integers(1, 9).flatmap(lambda first: st.integers(first, 12).map(lambda last: list(range(first, last + 1))))
HEADS = PrefixClass("head", end_depth=2, priority=1, policy=EvictionPolicy("fifo"), budget=0.1)
PLANS = [
    *(OrderPlan(EvictionPolicy(name, ttl_seconds=5)) for name in sorted(POLICIES)),
    OrderPlan(EvictionPolicy("lru"), (HEADS,)),
]


class OneByOne(MemoryBackend):
    """A memory backend that knows records only."""

    def begin(self, run: BlockRun) -> None:
        """Left to `write_many`."""

    def serve(self, keys: Sequence[int], ending: FinishRun) -> None:
        """Left to `write_many`."""

    def retire(self, keys: Sequence[int], ending: FinishRun) -> None:
        """Left to `write_many`."""


class World(Core):
    """A manager's core over one backend, with an order of eviction and a listener to events."""

    def __init__(self, backend: MemoryBackend, plan: OrderPlan, keys_per_object: int) -> None:
        indexer, quotas = MetaIndexerConfig(max_key_count=11), {StorageType.ST_DUMMY: 300}
        super().__init__(
            group_of(["a", "b"], quotas=quotas, indexer=indexer),
            [instance("i", SPECS, GROUPS)],
            [replace(dummy("a", keys_per_object), capacity_bytes=120), dummy("b", keys_per_object)],
            lambda: backend,
            new_events=self.new_events,
        )
        self.sessions: list[StartedWrite] = []
        self.index = self.manager.cache("i").index
        order = LiveOrder.over(self.index, plan)
        assert order is not None
        self.order = order

    def new_events(self, clock: FakeClock) -> EventLog:
        self.events = EventLog(now=clock.now, new_id=lambda: "")
        self.received = self.events.subscribe()
        return self.events

    async def do(self, step: tuple[str, Any]) -> object:
        """Do a step; return the result or error that the caller gets."""
        name, what = step
        try:
            return await getattr(self, name)(what)
        except KvcmError as error:
            return type(error), str(error)

    async def start(self, fields: dict[str, Any]) -> object:
        started = await self.manager.start_write(self.manager.cache("i"), WriteRequest(**fields))
        self.sessions.append(started)
        return started

    async def start_two(self, both: Sequence[dict[str, Any]]) -> object:
        """Two writers at once: where they meet, one of them loses blocks."""
        outcomes = await asyncio.gather(*(self.do(("start", fields)) for fields in both))
        return list(outcomes)

    async def finish(self, what: tuple[int, int, list[bool] | None, Retention, bool]) -> object:
        number, offset, flags, retention, has_checksums = what
        if not self.sessions:
            return None
        started = self.sessions[number % len(self.sessions)]
        count = len(started.chunks)
        mask = BlockMask(offset=min(offset, count)) if flags is None else BlockMask(flags=(flags * count)[:count])
        reported = [
            LocationChecksums([("tp0", 7 + i % 2), ("tp1", i)], 5) for i in range(count if has_checksums else 0)
        ]
        return await self.manager.finish_write(self.manager.cache("i"), started.session.id, mask, retention, reported)

    async def remove(self, keys: Sequence[int]) -> object:
        return await self.manager.remove(self.manager.cache("i"), keys, BlockMask())

    async def match(self, keys: Sequence[int]) -> object:
        found = await self.manager.match(self.manager.cache("i"), MatchQuery(MatchMode.BATCH_GET, keys))
        await self.manager.accesses.drain()
        return found

    async def wait(self, seconds: int) -> object:
        self.clock.time += seconds
        await self.manager.expire()
        return await self.executor.run_due()

    async def enable(self, what: tuple[str, bool]) -> object:
        name, enabled = what
        return await self.registry.storages.set_enabled(name, enabled=enabled)

    async def state(self) -> list[object]:
        """Everything that is left behind."""
        keys = range(13)
        await self.events._dispatch()
        return [
            await self.index.get(keys),
            await self.index.answers(keys),
            await self.index.accesses(keys),
            await self.index.families(keys),
            await self.index.due(1e12, 100),
            await self.index.coldest(100),
            self.index.key_count,
            self.index.free_key_count,
            (dict(self.index.usage_bytes), dict(self.index.deleting_bytes), self.index.deleting_keys),
            dict(self.manager.usage.used("group")),
            list(self.order.candidates(lambda _class: False)),
            list(self.order.expired(self.clock.now())),
            self.received.pop_pending(),
            self.index.generation > 0,
        ]


REQUESTS = st.fixed_dictionaries(
    {"keys": CHAIN | CHAIN | MANY | st.lists(KEYS, min_size=1, max_size=6)},
    optional={"parent_key": st.integers(13, 14) | KEYS, "timeout_seconds": st.integers(1, 20)},
).flatmap(
    lambda fields: st.one_of(
        st.just(fields),
        st.lists(st.sampled_from(sorted(GROUPS)), min_size=len(fields["keys"]), max_size=len(fields["keys"])).map(
            lambda names: fields | {"spec_groups": names}
        ),
    )
)
FINISHES = st.tuples(
    st.integers(-2, 3),
    st.sampled_from([99, 99, 0, 1, 3]),
    st.none() | st.none() | st.lists(st.booleans(), min_size=1, max_size=4),
    st.builds(Retention, st.sampled_from([0, 0, 4]), st.sampled_from([0, 0, 3])),
    st.booleans(),
)
STEPS = st.one_of(
    st.tuples(st.just("start"), REQUESTS),
    st.tuples(st.just("start_two"), st.tuples(REQUESTS, REQUESTS)),
    st.tuples(st.just("finish"), FINISHES),
    st.tuples(st.just("finish"), FINISHES),
    st.tuples(st.just("remove"), MANY),
    st.tuples(st.just("match"), CHAIN),
    st.tuples(st.just("wait"), st.integers(0, 12)),
    st.tuples(st.just("enable"), st.tuples(st.sampled_from(["a", "b"]), st.booleans())),
)


@pytest.mark.parametrize("page_keys", [1024, 3])
@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=12), st.sampled_from(PLANS), st.sampled_from([1, 4]))
async def test_runs_leave_what_records_leave(
    page_keys: int, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, Any]], plan: OrderPlan, per_object: int
) -> None:
    monkeypatch.setattr(instance_cache, "batch_keys", lambda _parts: page_keys)
    monkeypatch.setattr(write_sessions, "BATCH_KEYS", page_keys)

    together, one_by_one = (World(backend, plan, per_object) for backend in (MemoryBackend(), OneByOne()))
    for step in steps:
        assert await together.do(step) == await one_by_one.do(step)
        assert await together.state() == await one_by_one.state()
    for world in (together, one_by_one):
        world.close()
