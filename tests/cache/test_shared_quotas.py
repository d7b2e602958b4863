"""Quotas and limits that several managers share, on a real Redis: never exceeded, never forgotten (invariant 4)."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from redis_servers import Standalone
from thoroughness import is_thorough

from kvcm.cache.quotas import (
    OVERALL,
    InstanceIndexes,
    Limits,
    Reservation,
    SharedLedger,
    SharedQuota,
    StorageLimit,
    count_usage,
    group_account,
    storage_account,
)
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import GlobalQuota, InstanceGroup, InstanceGroupQuota, QuotaConfig
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.uri import parse_redis_uri

# ── Shared usage ──


UID = 1
SIZE = 10
NFS = StorageKey("s", StorageType.ST_NFS)
NFS2 = StorageKey("s2", StorageType.ST_NFS)
DUMMY = StorageKey("d", StorageType.ST_DUMMY)


class AnyStorage:
    """Every storage is available."""

    generation = 0

    def rank(self, _storage: str) -> int | None:
        return 0


def group(capacity: int = 40 * SIZE, nfs: int = 30 * SIZE) -> InstanceGroup:
    quota = InstanceGroupQuota(capacity, (QuotaConfig(StorageType.ST_NFS, nfs),))
    return InstanceGroup("a group {with} braces", ("s", "s2", "d"), quota=quota)


OWN = group_account(group().name)


def block(place: StorageKey) -> BlockRecord:
    chunk = encode_chunk(place.storage_type, 1, [SpecUri("tp0", f"dummy://{place.storage}/x?size={SIZE}")])
    return BlockRecord(None, 0, (Location("x", *place, LocationStatus.SERVING, ("tp0",), chunk, SIZE, 1.0),))


@dataclass
class Manager:
    """One manager's ledger, its view of the indexes by group, and its open reservations."""

    ledger: SharedLedger
    indexes: Mapping[str, MetaIndex]
    open: list[Reservation] = field(default_factory=list)

    @property
    def index(self) -> MetaIndex:
        """Of the only group."""
        (index,) = self.indexes.values()
        return index


class Managers:
    """Managers over one Redis, with one instance in every group.

    Args:
        client: of the Redis.
        groups: numbers of the instances by group.
        max_key_count: of every instance.
    """

    def __init__(self, client: RedisClient, groups: Mapping[str, int], max_key_count: int = 1 << 62) -> None:
        self.counters = QuotaCounters(client)
        self.groups = groups
        self._client = client
        self._max_key_count = max_key_count
        self._keys = iter(range(1, 1 << 40))
        self._nodes = iter(range(1 << 20))
        self.truth = {name: MetaIndex(self._backend(name), AnyStorage(), shard_count=4) for name in groups}
        self.census: InstanceIndexes = {name: {uid: self.truth[name]} for name, uid in groups.items()}

    def _backend(self, name: str) -> RedisBackend:
        return RedisBackend(self._client, self.groups[name], 4)

    def manager(self) -> Manager:
        ledger = SharedLedger(self.counters, f"node-{next(self._nodes)}")
        indexes = {
            name: MetaIndex(
                self._backend(name),
                AnyStorage(),
                shard_count=4,
                max_key_count=self._max_key_count,
                on_usage=ledger.listener(name, uid),
            )
            for name, uid in self.groups.items()
        }
        return Manager(ledger, indexes)

    async def take(self, manager: Manager, limits: Limits, place: StorageKey, count: int, deadline: float) -> bool:
        """Reserve bytes for blocks; return whether they fit."""
        name = limits.group.name
        wanted = {place: count * SIZE}
        reservation = Reservation(secrets.token_hex(4), limits, self.groups[name], wanted, count, deadline)
        fits = await manager.ledger.reserve(reservation, manager.indexes[name])
        if fits:
            manager.open.append(reservation)
        return fits

    async def store(self, manager: Manager) -> None:
        reservation = manager.open.pop()
        index = manager.indexes[reservation.limits.group.name]
        (place,) = reservation.wanted_bytes
        await index.put({next(self._keys): block(place) for _ in range(reservation.new_keys)})
        manager.ledger.settle(reservation, index)

    async def counted_indexes(self) -> InstanceIndexes:
        return self.census

    async def keys(self, name: str) -> list[int]:
        return [key async for page in self.truth[name].scan() for key in page]


class World(Managers):
    """Managers of one group."""

    def __init__(self, client: RedisClient, max_key_count: int = 1 << 62) -> None:
        super().__init__(client, {group().name: UID}, max_key_count)

    async def reserve(self, manager: Manager, count: int, place: StorageKey, deadline: float = math.inf) -> bool:
        return await self.take(manager, Limits(group()), place, count, deadline)

    async def check(self) -> None:
        """Counters are at least the truth, and the truth is within the limits."""
        counters, truth = await self.counters.read(OWN), (await count_usage(self.census))[OWN]
        for name, value in truth.items():
            assert counters.used.get(name, 0) + counters.reserved.get(name, 0) >= value, name
        assert sum(truth.get(name, 0) for name in ("b4/s", "b4/s2")) <= 30 * SIZE
        assert truth[f"k{UID}"] <= self._max_key_count
        assert sum(value for name, value in truth.items() if name[0] == "b") <= 40 * SIZE


@pytest.fixture
async def client(redis_standalone: Standalone) -> AsyncIterator[RedisClient]:
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"t{secrets.token_hex(6)}")))
    yield client
    await client.close()


async def recounted(manager: Manager, world: World, now: float) -> None:
    accounts = [OWN, *map(storage_account, ("s", "s2", "d")), OVERALL]
    assert await manager.ledger.recount(accounts, world.counted_indexes, now) == dict.fromkeys(accounts, True)


PLACES = [NFS, NFS2, DUMMY]


async def step(world: World, managers: list[Manager], random: Random) -> None:
    manager = random.choice(managers)
    action = random.choice(["reserve", "reserve", "store", "store", "delete", "flush", "crash"])
    if action == "reserve":
        await world.reserve(manager, random.randint(1, 8), random.choice(PLACES))
    elif action == "store" and manager.open:
        await world.store(manager)
    elif action == "delete" and (keys := await world.keys(group().name)):
        await manager.index.delete(random.sample(keys, min(len(keys), random.randint(1, 10))))
    elif action == "flush":
        await manager.ledger.flush()
    elif action == "crash" and random.random() < 0.3:
        managers[managers.index(manager)] = world.manager()


@pytest.mark.parametrize("seed", range(24 if is_thorough() else 6))
async def test_limits_hold_whatever_managers_do_and_lose(client: RedisClient, seed: int) -> None:
    """Invariant 4, with recounts begun and ended at any time in between."""
    random = Random(seed)
    world = World(client, max_key_count=33)
    managers = [world.manager() for _ in range(3)]
    begun = None
    for _ in range(70):
        await step(world, managers, random)
        if begun is None and random.random() < 0.15:
            begun = await world.counters.begin_recount(OWN, now=0.0)
            seen = (await count_usage(world.census))[OWN]
        elif begun is not None and random.random() < 0.4:
            assert await world.counters.end_recount(OWN, begun, seen)
            begun = None
        await world.check()
    for manager in managers:
        await manager.ledger.flush()
    await recounted(managers[0], world, math.inf)
    for account, truth in (await count_usage(world.census)).items():
        counters = await world.counters.read(account)
        assert {name: used for name, used in counters.used.items() if used} == {n: v for n, v in truth.items() if v}
        assert not any(value for value in counters.reserved.values() if value < 0)


async def test_the_key_limit_is_one_of_all_managers(client: RedisClient) -> None:
    world = World(client, max_key_count=7)
    first, second = world.manager(), world.manager()
    assert await world.reserve(first, 5, NFS)
    assert not await world.reserve(second, 3, NFS)
    assert await world.reserve(second, 2, NFS)


async def test_a_report_that_is_sent_twice_counts_once(client: RedisClient) -> None:
    """The store received it and the answer was lost: the manager sends it again."""
    world = World(client)
    manager = world.manager()
    assert await world.reserve(manager, 3, NFS)
    await world.store(manager)
    report = manager.ledger._next_reports()[OWN]
    await world.counters.report({OWN: report})
    await manager.ledger.flush()
    counters = await world.counters.read(OWN)
    assert (counters.used["b4/s"], counters.reserved["b4/s"]) == (30, 0)


async def test_a_reservation_of_a_manager_that_died_is_void_after_its_deadline(client: RedisClient) -> None:
    world = World(client)
    assert await world.reserve(world.manager(), 30, NFS, deadline=100.0)
    other = world.manager()
    await recounted(other, world, 99.0)
    assert not await world.reserve(other, 1, NFS)
    await recounted(other, world, 101.0)
    assert await world.reserve(other, 30, NFS)


async def test_what_shrank_before_a_recount_is_not_taken_off_after_it(client: RedisClient) -> None:
    """The store answered late: the recount has seen the shrinking, and this manager knows of the recount."""
    world = World(client)
    manager = world.manager()
    await world.reserve(manager, 6, NFS)
    await world.store(manager)
    await manager.ledger.flush()
    note = manager.ledger.listener(group().name, UID)()
    await world.truth[group().name].delete((await world.keys(group().name))[:2])
    await recounted(manager, world, 0.0)
    await manager.ledger.refresh([OWN])
    note({NFS: -2 * SIZE}, -2)
    await manager.ledger.flush()
    assert (await world.counters.read(OWN)).used["b4/s"] == 4 * SIZE
    await world.check()


async def test_counters_of_instances_that_are_gone_go_with_a_recount(client: RedisClient) -> None:
    world = World(client)
    manager = world.manager()
    note = manager.ledger.listener(group().name, 99)()
    note({}, 5)
    note({}, -5)
    await manager.ledger.flush()
    assert "k99" in (await world.counters.read(OWN)).used
    await recounted(manager, world, 0.0)
    counters = await world.counters.read(OWN)
    assert ("k99" in counters.used, "k99" in counters.grown) == (False, False)


async def test_of_two_recounts_at_once_the_later_counts(client: RedisClient) -> None:
    counters = World(client).counters
    first = await counters.begin_recount("g", 0.0)
    second = await counters.begin_recount("g", 0.0)
    assert not await counters.end_recount("g", first, {"b4": 1})
    assert await counters.end_recount("g", second, {"b4": 2})
    assert (await counters.read("g")).used == {"b4": 2}


# ── Shared limits ──


ON_NFS = StorageKey("s", StorageType.ST_NFS)
POOL = StorageKey("p", StorageType.ST_TAIRMEMPOOL)
GROUPS = {"a": 1, "a {b}*": 2, "c": 3}
A, B, C = GROUPS
STORAGES = {"s": StorageLimit(30 * SIZE, {A: 12 * SIZE, C: 5 * SIZE}), "p": StorageLimit(20 * SIZE, {})}
QUOTA = SharedQuota(GlobalQuota("ab", 28 * SIZE), [A, B])


def limits_of(name: str) -> Limits:
    configured = InstanceGroup(name, ("s", "p"), quota=InstanceGroupQuota(25 * SIZE))
    return Limits(configured, STORAGES, QUOTA if name in QUOTA.group_names else None)


class SharedWorld(Managers):
    """Managers of three groups."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client, GROUPS)

    async def reserve(
        self, manager: Manager, name: str, place: StorageKey, count: int, limits: Limits | None = None
    ) -> bool:
        return await self.take(manager, limits or limits_of(name), place, count, math.inf)

    async def delete(self, manager: Manager, name: str, count: int) -> None:
        await manager.indexes[name].delete((await self.keys(name))[:count])

    async def recount(self, manager: Manager) -> None:
        accounts = [*map(group_account, GROUPS), *map(storage_account, STORAGES), OVERALL]
        await manager.ledger.recount(accounts, self.counted_indexes, now=0.0)

    async def check(self) -> None:
        """Counters are at least the truth, and the truth is within the limits."""
        truth = await count_usage(self.census)
        for account, fields in truth.items():
            counters = await self.counters.read(account)
            for name, value in fields.items():
                if name[0] == "k" or (account, name) == (OVERALL, f"b{C}"):
                    continue  # under no limit: reported some time later, never reserved
                assert counters.used.get(name, 0) + counters.reserved.get(name, 0) >= value, (account, name)
        for storage, limit in STORAGES.items():
            on = {name: truth.get(storage_account(storage), {}).get(f"b{name}", 0) for name in GROUPS}
            assert sum(on.values()) <= limit.capacity_bytes, storage
            for name, kept in limit.guaranteed.items():
                others = sum(size for each, size in on.items() if each != name)
                assert others <= limit.capacity_bytes - kept, "the unused guaranteed bytes are free"
        assert sum(truth[OVERALL][f"b{name}"] for name in QUOTA.group_names) <= QUOTA.quota.capacity_bytes


async def step_of_groups(world: SharedWorld, managers: list[Manager], random: Random) -> None:
    manager, name = random.choice(managers), random.choice(list(GROUPS))
    action = random.choice(["reserve", "reserve", "reserve", "store", "store", "delete", "flush", "recount", "crash"])
    if action == "reserve":
        await world.reserve(manager, name, random.choice([ON_NFS, POOL]), random.randint(1, 6))
    elif action == "store" and manager.open:
        await world.store(manager)
    elif action == "delete":
        await world.delete(manager, name, random.randint(1, 6))
    elif action == "flush":
        await manager.ledger.flush()
    elif action == "recount":
        await world.recount(manager)
    elif action == "crash" and random.random() < 0.3:
        managers[managers.index(manager)] = world.manager()


@pytest.mark.parametrize("seed", range(16 if is_thorough() else 4))
async def test_every_limit_holds_whatever_managers_do_and_lose(client: RedisClient, seed: int) -> None:
    """Invariant 4."""
    random, world = Random(seed), SharedWorld(client)
    managers = [world.manager() for _ in range(3)]
    for _ in range(70):
        await step_of_groups(world, managers, random)
        await world.check()


async def test_writers_at_once_fill_a_storage_to_its_last_byte_and_no_further(client: RedisClient) -> None:
    world = SharedWorld(client)
    managers = [world.manager() for _ in range(4)]
    answers = await asyncio.gather(
        *(world.reserve(m, name, POOL, 1) for m in managers for name in GROUPS for _ in "1234")
    )
    assert sum(answers) == 20


@pytest.mark.parametrize(("name", "count"), [(A, 25), (B, 13), (C, 18)])
async def test_a_group_gets_what_others_are_not_guaranteed(client: RedisClient, name: str, count: int) -> None:
    """30 in all; 12 are kept for the first group, 5 for the third; 25 is the quota of each."""
    world = SharedWorld(client)
    manager = world.manager()
    assert [await world.reserve(manager, name, ON_NFS, 1) for _ in range(count + 1)] == [True] * count + [False]
    rest = {A: 5, B: 0, C: 5}  # of C: its guarantee, which A could not take; of A likewise 12
    if name == C:
        assert await world.reserve(manager, A, ON_NFS, 12)
    elif name == A:
        assert await world.reserve(manager, C, ON_NFS, rest[C])
        assert not await world.reserve(manager, B, ON_NFS, 1)


async def test_what_a_later_account_refuses_is_given_back_in_the_earlier_ones(client: RedisClient) -> None:
    world = SharedWorld(client)
    first, second = world.manager(), world.manager()
    assert await world.reserve(first, A, POOL, 20)
    assert not await world.reserve(second, A, POOL, 1), "the storage is full"
    assert not await world.reserve(second, B, ON_NFS, 9), "the global quota has 8 left"
    for account in (group_account(B), storage_account("s")):
        assert not any((await world.counters.read(account)).reserved.values()), account
    assert (await world.counters.read(group_account(A))).reserved == {"b3/p": 200}
    assert await world.reserve(second, A, ON_NFS, 5), "a refused reservation does not count"


async def test_a_limit_that_is_set_at_runtime_counts_earlier_writes(client: RedisClient) -> None:
    world = SharedWorld(client)
    manager, other = world.manager(), world.manager()
    unlimited = Limits(InstanceGroup(B, ("s",), quota=InstanceGroupQuota(25 * SIZE)))
    assert await world.reserve(manager, B, ON_NFS, 12, unlimited)
    await world.store(manager)
    await manager.ledger.flush()
    assert not await world.reserve(other, B, ON_NFS, 2)
    assert await world.reserve(other, B, ON_NFS, 1)


async def test_a_group_that_changes_its_global_quota_takes_its_usage_along(client: RedisClient) -> None:
    world = SharedWorld(client)
    manager = world.manager()
    assert await world.reserve(manager, C, POOL, 20)
    await world.store(manager)
    await manager.ledger.flush()
    joined = replace(limits_of(A), shared=QUOTA._replace(group_names=[A, B, C]))
    assert await world.reserve(manager, A, ON_NFS, 8, joined)
    assert not await world.reserve(manager, A, ON_NFS, 1, joined)
    assert await world.reserve(manager, A, ON_NFS, 1), "as before it joined"


async def test_spaces_report_what_fits(client: RedisClient) -> None:
    """As the reservation does right afterwards, while no other manager writes."""
    world, random = SharedWorld(client), Random(7)
    manager, answers = world.manager(), Counter[bool]()
    for _ in range(60):
        name, place, count = random.choice(list(GROUPS)), random.choice([ON_NFS, POOL]), random.randint(1, 6)
        space = await manager.ledger.free_space(limits_of(name), GROUPS[name], manager.indexes[name])
        reported = space.limit(place, count * SIZE) is None
        assert reported == await world.reserve(manager, name, place, count), space.limit(place, count * SIZE)
        answers[reported] += 1
    assert min(answers[True], answers[False]) > 5, answers


async def test_usage_is_received_by_group_and_storage(client: RedisClient) -> None:
    world = SharedWorld(client)
    writer, other = world.manager(), world.manager()
    for name, place, count in ((A, ON_NFS, 3), (A, POOL, 2), (C, ON_NFS, 1)):
        assert await world.reserve(writer, name, place, count)
        await world.store(writer)
    await writer.ledger.flush()
    assert (other.ledger.used(A), other.ledger.bytes_on_storage("s")) == ({}, {})
    await other.ledger.refresh_group(A, ["s"])
    assert other.ledger.used(A) == {ON_NFS: 30, POOL: 20}
    assert other.ledger.bytes_on_storage("s") == {A: 30, C: 10}


async def test_newly_stored_bytes_are_held_before_they_are_reported(client: RedisClient) -> None:
    """A write asks right afterwards whether a mark was crossed, and other groups count in what they share."""
    world = SharedWorld(client)
    one, two = world.manager(), world.manager()
    for manager, name in ((one, A), (two, B)):
        assert await world.reserve(manager, name, ON_NFS, 4)
        await world.store(manager)
    assert one.ledger.group_bytes(A) == two.ledger.group_bytes(B) == {ON_NFS: 40}
    assert two.ledger.used(B) == {}
    assert two.ledger.bytes_on_storage("s") == two.ledger.bytes_by_group() == {A: 40, B: 40}
    await two.ledger.flush()
    assert two.ledger.bytes_on_storage("s") == two.ledger.bytes_by_group() == {A: 40, B: 40}
