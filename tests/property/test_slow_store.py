"""CacheManager over a store that suspends, fails or is cut off, with many clients at once (design.md 5)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
from cache_world import World, decoded, dummy, group_of, instance
from hypothesis import given, settings
from hypothesis import strategies as st
from suspending_backend import SuspendingBackend, spy_on_locks
from thoroughness import examples, is_thorough

from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.write_sessions import FinishedWrite, StartedWrite, WriteRequest
from kvcm.index.backends.backend import Change, IndexBackend, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.groups import InstanceGroupQuota, MetaIndexerConfig
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.model.locations import BlockRecord, LocationStatus

# ── Manager over slow store ──


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
        (invariant 3), and every client that asked for it gets the same result."""
        groups = ("half",) * len(keys) if flag else ()
        try:
            started = await self.manager.start_write(
                self.manager.cache("i"), WriteRequest(keys, groups, timeout_seconds=20)
            )
        except CapacityError:
            return
        count = len(started.chunks)
        success = BlockMask(offset=count // 2) if flag else BlockMask(flags=(True,) * count)
        masks = [success, success, BlockMask(offset=0)]
        calls = [self.manager.finish_write(self.manager.cache("i"), started.session.id, mask) for mask in masks]
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
            await self.manager.start_write(
                self.manager.cache("i"), WriteRequest(keys, timeout_seconds=5 if flag else 20)
            )
        except CapacityError:
            return

    async def read(self, keys: list[int], flag: bool) -> None:
        """Invariant 1: every returned location was serving at some moment of the call."""
        begin = self.backend.steps.next()
        mode = MatchMode.PREFIX_MATCH if flag else MatchMode.BATCH_GET
        found = await self.manager.match(self.manager.cache("i"), MatchQuery(mode, keys))
        end = self.backend.steps.next()
        chunks = decoded(found.chunks)
        for key, (_, _, specs) in zip(keys, chunks, strict=False):
            versions = self.backend.versions_between(key, begin, end)
            assert dict(specs) in [serving_uris(record) for record in versions], key
        if flag and len(chunks) < len(keys):
            missing = self.backend.versions_between(keys[len(chunks)], begin, end)
            assert {"tp0": "", "tp1": ""} in [serving_uris(record) for record in missing]

    async def remove(self, keys: list[int], flag: bool) -> None:
        assert await self.manager.remove(self.manager.cache("i"), keys, NO_MASK) >= 0

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
        self.clock.time += 4000
        await self.manager.expire()
        await self.executor.run_due()
        self.clock.time += 4000
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


@settings(max_examples=examples(250))
@given(seed=st.integers(0, 1 << 32), rounds=ROUNDS)
async def test_invariants_1_2_3_4_8_with_many_clients_at_once(seed: int, rounds: list[list[Client]]) -> None:
    world = SlowWorld(seed)
    try:
        for clients in rounds:
            await asyncio.gather(*map(world.perform, clients))
            assert world.locks.held == []
            assert sum(world.index.usage_bytes.values()) == sum(map(size_of, await world.records()))
            assert sum(world.manager.group_usage_bytes("group").values()) == world.stored_bytes
            world.clock.time += 6
        records = await world.come_to_rest()
        assert {place.status for record in records for place in record.locations} <= {LocationStatus.SERVING}
        assert world.manager.endings.open_count == 0
        assert sum(world.index.usage_bytes.values()) == sum(map(size_of, records))
    finally:
        world.close()


# ── Interrupted sessions ──


KEYS = (1, 2, 3, 4, 5, 6)
TURNS = range(1, 20)
"""After how many turns of the loop a call is cut off; some are after its end."""


@contextmanager
def slow_world(turns: int = 0) -> Iterator[SlowWorld]:
    world = SlowWorld(seed=turns, capacity=10_000)
    try:
        yield world
    finally:
        world.close()


async def cut_off(awaitable: Awaitable[Any], turns: int) -> Any:
    """Cancel a call after so many turns of the loop, and return what it returned or raised in the end."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome


async def statuses_at_rest(world: SlowWorld) -> set[str]:
    records = await world.come_to_rest()
    return {place.status.name for record in records for place in record.locations}


async def test_invariant_3_a_start_that_is_cut_off_is_rolled_back_at_once() -> None:
    """No client knows the session's id: its blocks must not wait for the deadline."""
    cut = 0
    for turns in TURNS:
        with slow_world(turns) as world:
            outcome = await cut_off(world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS)), turns)
            if isinstance(outcome, asyncio.CancelledError):
                cut += 1
                await world.executor.run_due()
                assert await world.records() == [], turns
                assert world.manager.endings.open_count == 0
                assert await world.manager.endings.deadlines_of([f"{n:032x}" for n in range(9)]) == {}
            assert await statuses_at_rest(world) == set(), turns
    assert cut > 3


async def test_a_start_that_the_store_refuses_is_rolled_back_at_once() -> None:
    with slow_world() as world:
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
        await world.executor.run_due()
        assert (await world.records(), world.manager.endings.open_count) == ([], 0)
        assert len((await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))).chunks) == len(KEYS)


async def test_a_renewal_that_the_store_refuses_half_way_protects_removed_blocks() -> None:
    """The session is renewed, its blocks are not: its client still writes, whatever the records say."""
    with slow_world() as world:
        started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS, timeout_seconds=5))
        await world.manager.remove(world.manager.cache("i"), KEYS, NO_MASK)
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.renew_write(world.manager.cache("i"), started.session.id, 100)
        world.clock.time += 50
        await world.executor.run_due()
        assert len(await world.records()) == len(KEYS)
        await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=0))
        await world.executor.run_due()
        assert await world.records() == []


async def test_invariant_3_a_finish_that_is_cut_off_leaves_nothing_writing() -> None:
    for turns in TURNS:
        with slow_world(turns) as world:
            started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
            await cut_off(
                world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=3)), turns
            )
            assert await statuses_at_rest(world) <= {"SERVING"}, turns


async def test_a_finish_that_is_cut_off_can_be_asked_for_again() -> None:
    """The client retries, as often as it likes: the manager answers that its blocks are served."""
    for turns in TURNS:
        with slow_world(turns) as world:
            started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
            success = BlockMask(offset=len(KEYS))
            await cut_off(world.manager.finish_write(world.manager.cache("i"), started.session.id, success), turns)
            for _ in range(2):
                finished = await world.manager.finish_write(world.manager.cache("i"), started.session.id, success)
                assert finished == FinishedWrite(len(KEYS), 0, 0), turns
            with pytest.raises(InvalidArgumentError, match="finished before, with other success_blocks"):
                await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=0))
            records = await world.records()
            assert {place.status.name for record in records for place in record.locations} == {"SERVING"}


async def test_invariant_3_a_client_that_hangs_up_does_not_lose_the_sessions_of_others() -> None:
    """Overdue sessions are rolled back inside the next start; that client may be gone before it is done."""
    for turns in TURNS:
        with slow_world(turns) as world:
            for keys in ((1, 2), (3, 4), (5, 6)):
                await world.manager.start_write(world.manager.cache("i"), WriteRequest(keys, timeout_seconds=1))
            world.clock.time += 2
            await cut_off(world.manager.start_write(world.manager.cache("i"), WriteRequest((9,))), turns)
            assert await statuses_at_rest(world) == set(), turns


async def test_a_removal_that_is_cut_off_is_deleted_all_the_same() -> None:
    """A record that is marked as deleting and known to no executor would count as usage for ever."""
    for turns in TURNS:
        with slow_world(turns) as world:
            started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
            await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=len(KEYS)))
            await cut_off(world.manager.remove(world.manager.cache("i"), KEYS, NO_MASK), turns)
            assert await statuses_at_rest(world) <= {"SERVING"}, turns


def break_store_once(world: SlowWorld) -> None:
    """Make the store refuse one write."""
    write_many, failures = world.backend.inner.write_many, iter([StorageIOError("the store is gone for a moment")])

    async def write_or_fail(changes: Sequence[Change]) -> Written:
        for failure in failures:
            raise failure
        return await write_many(changes)

    world.backend.inner.write_many = write_or_fail  # type: ignore[method-assign]


async def test_a_finish_that_the_store_refuses_can_be_repeated_with_the_same_mask_only() -> None:
    """The decision is stored: it is neither lost nor changed."""
    with slow_world() as world:
        started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=4))
        for mask in (BlockMask(offset=3), BlockMask(flags=(True,) * 6)):
            with pytest.raises(InvalidArgumentError, match="other success_blocks"):
                await world.manager.finish_write(world.manager.cache("i"), started.session.id, mask)
        with pytest.raises(InvalidArgumentError, match="cannot be renewed"):
            await world.manager.renew_write(world.manager.cache("i"), started.session.id, 100)
        again = BlockMask(flags=(True,) * 4 + (False,) * 2)
        assert await world.manager.finish_write(world.manager.cache("i"), started.session.id, again) == FinishedWrite(
            4, 2, 0
        )


async def test_a_decision_without_a_retry_is_carried_out_after_five_seconds() -> None:
    with slow_world() as world:
        started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
        break_store_once(world)
        with pytest.raises(StorageIOError):
            await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=len(KEYS)))
        for seconds, status in ((4.9, "WRITING"), (0.1, "SERVING")):
            world.clock.time += seconds
            await world.manager.expire()
            assert {place.status.name for record in await world.records() for place in record.locations} == {status}


async def test_invariant_3_an_expiry_that_the_store_refuses_leaves_nothing_writing() -> None:
    with slow_world() as world:
        await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
        break_store_once(world)
        world.clock.time += 100
        await world.manager.expire()
        assert {place.status.name for record in await world.records() for place in record.locations} == {"WRITING"}
        assert await statuses_at_rest(world) == set()


async def test_deletions_go_on_after_the_store_refused_one() -> None:
    """Nothing that was submitted is forgotten, whether bytes or metadata could not be deleted."""
    with slow_world() as world:
        started = await world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS))
        await world.manager.finish_write(world.manager.cache("i"), started.session.id, BlockMask(offset=len(KEYS)))
        await world.manager.remove(world.manager.cache("i"), KEYS, NO_MASK)
        break_store_once(world)
        world.clock.time += 10
        await asyncio.gather(world.executor.run_due(), return_exceptions=True)
        assert await statuses_at_rest(world) == set()


async def test_writers_with_parents_never_exceed_the_quota_together() -> None:
    """Usage promises that writes which overlap can never exceed a limit together."""
    with slow_world() as world:
        group = world.registry.groups.get("group")
        capacity = 40  # two blocks
        await world.registry.groups.update(
            replace(group, quota=InstanceGroupQuota(capacity), version=1), current_version=0
        )
        starts = [
            world.manager.start_write(world.manager.cache("i"), WriteRequest((key, key + 1), parent_key=key - 1))
            for key in (10, 20, 30)
        ]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        assert world.stored_bytes <= capacity
        assert [type(o) for o in outcomes if isinstance(o, BaseException)] == [CapacityError] * 2


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_invariant_3_a_start_that_outlives_its_session_leaves_nothing_writing(hangs_up: bool) -> None:
    """The store hangs until the session is overdue; its blocks must not come to life after its end."""
    for turns in TURNS:
        with slow_world(turns) as world:
            task = asyncio.create_task(
                world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS, timeout_seconds=1))
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            world.clock.time += 2
            expiry = asyncio.create_task(world.manager.expire())
            await asyncio.sleep(0)
            if hangs_up:
                task.cancel()
            (outcome, _) = await asyncio.gather(task, expiry, return_exceptions=True)
            assert not isinstance(outcome, Exception) or isinstance(outcome, KvcmError)
            assert await statuses_at_rest(world) == set(), turns


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_invariant_4_an_instance_removed_during_a_start_leaves_no_usage(hangs_up: bool) -> None:
    for turns in TURNS:
        with slow_world(turns) as world:
            task = asyncio.create_task(world.manager.start_write(world.manager.cache("i"), WriteRequest(KEYS)))
            for _ in range(turns):
                await asyncio.sleep(0)
            removal = asyncio.create_task(world.manager.remove_instance("i"))
            await asyncio.sleep(0)
            if hangs_up:
                task.cancel()
            await asyncio.gather(task, removal, return_exceptions=True)
            assert await statuses_at_rest(world) == set(), turns
            assert not any(world.manager.group_usage_bytes("group").values()), turns


# ── Key limit races ──


LIMIT = 5


async def race(seed: int) -> list[StartedWrite]:
    """Run four writers of three blocks each; return the sessions of those that were not refused altogether."""
    world = SlowWorld(seed, capacity=10_000, indexer=MetaIndexerConfig(LIMIT, mutex_shard_num=4, batch_key_size=1))
    try:
        chains = [range(start, start + 3) for start in (0, 10, 20, 30)]
        starts = [world.manager.start_write(world.manager.cache("i"), WriteRequest(keys)) for keys in chains]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        assert world.index.key_count <= LIMIT
        assert all(isinstance(outcome, StartedWrite | CapacityError) for outcome in outcomes), outcomes
        return [outcome for outcome in outcomes if isinstance(outcome, StartedWrite)]
    finally:
        world.close()


async def test_a_block_above_the_limit_is_rejected_with_its_suffix() -> None:
    """Every mask but a rejection means that another writer has the block; here none has."""
    for seed in range(30):
        for started in await race(seed):
            assert list(started.mask.unmasked(3)) == list(range(len(started.chunks))), seed
            assert started.rejected == 3 - len(started.chunks), seed
            assert started.chunks, "nothing fits: an error"


# ── Reads during finish ──


FINISHES, KEYS_PER_ROUND = 300 if is_thorough() else 25, 256
BACKENDS: dict[str, Callable[[], IndexBackend]] = {
    "memory": MemoryBackend,
    "suspending": lambda: SuspendingBackend(Random(5), most=1),
}


class Traffic:
    """One writer and several readers of the blocks of the current round."""

    def __init__(self, world: World) -> None:
        self._manager = world.manager
        self._keys: range = range(0)
        self._visible = 0
        self._random = Random(11)
        self.writing = True
        self.overlapping_reads = 0

    async def write(self) -> None:
        for number in range(FINISHES):
            self._keys = range(number * KEYS_PER_ROUND, (number + 1) * KEYS_PER_ROUND)
            self._visible = 0
            await self._write_once(copies=1, count=KEYS_PER_ROUND)
            await self._write_once(copies=2, count=self._random.choice([0, 100, KEYS_PER_ROUND]))
        self.writing = False

    async def _write_once(self, copies: int, count: int) -> None:
        keys = self._keys
        started = await self._manager.start_write(
            self._manager.cache("i"), WriteRequest(keys, min_replica_count=copies)
        )
        assert len(started.chunks) == KEYS_PER_ROUND
        await asyncio.sleep(0)
        finished = await self._manager.finish_write(
            self._manager.cache("i"), started.session.id, BlockMask(offset=count)
        )
        assert finished.served == count
        self._visible = max(self._visible, count)
        await asyncio.sleep(0)

    async def read(self, mode: MatchMode) -> None:
        seen, of = 0, self._keys
        while self.writing:
            if self._keys != of:
                seen, of = 0, self._keys
            at_least = max(seen, self._visible)
            found = await self._manager.match(self._manager.cache("i"), MatchQuery(mode, of))
            if self._keys == of:
                assert len(found.keys) >= at_least
                self.overlapping_reads += at_least > 0
                # Blocks of one finish need not appear at once, but none that appeared goes away.
                seen = max(seen, len(found.keys))
            await asyncio.sleep(0)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_read_never_hides_a_finished_block(backend: str) -> None:
    world = World(group_of(["d"]), [instance("i", {"kv": 64})], [dummy("d")], BACKENDS[backend])
    traffic = Traffic(world)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.write())
            for mode in (MatchMode.PREFIX_MATCH, MatchMode.BATCH_GET):
                tasks.create_task(traffic.read(mode))
        assert traffic.overlapping_reads > FINISHES
        everything = range(FINISHES * KEYS_PER_ROUND)
        assert len(
            (await world.manager.match(world.manager.cache("i"), MatchQuery(MatchMode.PREFIX_MATCH, everything))).keys
        ) == len(everything)
    finally:
        world.close()
