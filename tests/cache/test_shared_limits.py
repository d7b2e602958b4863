"""Limits above the group that several managers share, on a real Redis: capacities of storages, what groups are
guaranteed on them, and global quotas. They hold for what is stored, and counters are never below that (invariant 4)."""

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

from kvcm.cache.accounts import OVERALL, Census, counted, group_account, storage_account
from kvcm.cache.limits import Limits, SharedQuota, StorageLimit
from kvcm.cache.shared_usage import SharedLedger
from kvcm.cache.usage import Reservation
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import GlobalQuota, InstanceGroup, InstanceGroupQuota
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.uri import parse_redis_uri

SIZE = 10
NFS = Place("s", StorageType.ST_NFS)
POOL = Place("p", StorageType.ST_TAIRMEMPOOL)
GROUPS = {"a": 1, "a {b}*": 2, "c": 3}
A, B, C = GROUPS
STORAGES = {"s": StorageLimit(30 * SIZE, {A: 12 * SIZE, C: 5 * SIZE}), "p": StorageLimit(20 * SIZE, {})}
QUOTA = SharedQuota(GlobalQuota("ab", 28 * SIZE), [A, B])


def limits_of(name: str) -> Limits:
    configured = InstanceGroup(name, ("s", "p"), quota=InstanceGroupQuota(25 * SIZE))
    return Limits(configured, STORAGES, QUOTA if name in QUOTA.group_names else None)


class AnyStorage:
    """Every storage is available."""

    generation = 0

    def rank(self, _storage: str) -> int | None:
        return 0


def block(place: Place) -> BlockRecord:
    chunk = encode_chunk(place.storage_type, 1, [SpecUri("tp0", f"dummy://{place.storage}/x?size={SIZE}")])
    return BlockRecord(None, 0, (Location("x", *place, LocationStatus.SERVING, ("tp0",), chunk, SIZE, 1.0),))


@dataclass
class Manager:
    """One manager's ledger, its view of the indexes by group, and its open reservations."""

    ledger: SharedLedger
    indexes: Mapping[str, MetaIndex]
    open: list[tuple[Reservation, Place, int]] = field(default_factory=list)


class World:
    """Managers over one Redis."""

    def __init__(self, client: RedisClient) -> None:
        self.counters = QuotaCounters(client)
        self._client = client
        self._keys = iter(range(1, 1 << 40))
        self._nodes = iter(range(1 << 20))
        self.truth = {name: self._index(uid) for name, uid in GROUPS.items()}
        self.census = {name: {uid: self.truth[name]} for name, uid in GROUPS.items()}

    def _index(self, uid: int, ledger: SharedLedger | None = None) -> MetaIndex:
        backend = RedisBackend(self._client, uid, 2)
        if ledger is None:
            return MetaIndex(backend, AnyStorage(), shard_count=2)
        name = next(name for name, number in GROUPS.items() if number == uid)
        return MetaIndex(backend, AnyStorage(), shard_count=2, on_usage=ledger.listener(name, uid))

    def manager(self) -> Manager:
        ledger = SharedLedger(self.counters, f"node-{next(self._nodes)}")
        return Manager(ledger, {name: self._index(uid, ledger) for name, uid in GROUPS.items()})

    async def reserve(
        self, manager: Manager, name: str, place: Place, count: int, limits: Limits | None = None
    ) -> bool:
        limits = limits if limits is not None else limits_of(name)
        wanted = {place: count * SIZE}
        reservation = Reservation(secrets.token_hex(4), limits, GROUPS[name], wanted, count, math.inf)
        fits = await manager.ledger.reserve(reservation, manager.indexes[name])
        if fits:
            manager.open.append((reservation, place, count))
        return fits

    async def store(self, manager: Manager) -> None:
        reservation, place, count = manager.open.pop()
        index = manager.indexes[reservation.limits.group.name]
        await index.put({next(self._keys): block(place) for _ in range(count)})
        manager.ledger.settle(reservation, index)

    async def delete(self, manager: Manager, name: str, count: int) -> None:
        keys = [key async for page in self.truth[name].scan() for key in page]
        await manager.indexes[name].delete(keys[:count])

    async def counted_indexes(self) -> Census:
        return self.census

    async def recount(self, manager: Manager) -> None:
        accounts = [*map(group_account, GROUPS), *map(storage_account, STORAGES), OVERALL]
        await manager.ledger.recount(accounts, self.counted_indexes, now=0.0)

    async def check(self) -> None:
        """Counters are at least the truth, and the truth is within the limits."""
        truth = await counted(self.census)
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
                assert others <= limit.capacity_bytes - kept, "the rest of what is guaranteed is free"
        assert sum(truth[OVERALL][f"b{name}"] for name in QUOTA.group_names) <= QUOTA.quota.capacity_bytes


@pytest.fixture
async def client(redis_standalone: Standalone) -> AsyncIterator[RedisClient]:
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"t{secrets.token_hex(6)}")))
    yield client
    await client.close()


async def step(world: World, managers: list[Manager], random: Random) -> None:
    manager, name = random.choice(managers), random.choice(list(GROUPS))
    action = random.choice(["reserve", "reserve", "reserve", "store", "store", "delete", "flush", "recount", "crash"])
    if action == "reserve":
        await world.reserve(manager, name, random.choice([NFS, POOL]), random.randint(1, 6))
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


@pytest.mark.parametrize("seed", range(16))
async def test_every_limit_holds_whatever_managers_do_and_lose(client: RedisClient, seed: int) -> None:
    """Invariant 4."""
    random, world = Random(seed), World(client)
    managers = [world.manager() for _ in range(3)]
    for _ in range(70):
        await step(world, managers, random)
        await world.check()


async def test_writers_at_once_fill_a_storage_to_its_last_byte_and_no_further(client: RedisClient) -> None:
    world = World(client)
    managers = [world.manager() for _ in range(4)]
    answers = await asyncio.gather(
        *(world.reserve(m, name, POOL, 1) for m in managers for name in GROUPS for _ in "1234")
    )
    assert sum(answers) == 20


@pytest.mark.parametrize(("name", "count"), [(A, 25), (B, 13), (C, 18)])
async def test_a_group_gets_what_others_are_not_guaranteed(client: RedisClient, name: str, count: int) -> None:
    """30 in all; 12 are kept for the first group, 5 for the third; 25 is the quota of each."""
    world = World(client)
    manager = world.manager()
    assert [await world.reserve(manager, name, NFS, 1) for _ in range(count + 1)] == [True] * count + [False]
    rest = {A: 5, B: 0, C: 5}  # of C: what is kept for it, which A could not take; of A likewise 12
    if name == C:
        assert await world.reserve(manager, A, NFS, 12)
    elif name == A:
        assert await world.reserve(manager, C, NFS, rest[C])
        assert not await world.reserve(manager, B, NFS, 1)


async def test_what_a_later_account_refuses_is_given_back_in_the_earlier_ones(client: RedisClient) -> None:
    world = World(client)
    first, second = world.manager(), world.manager()
    assert await world.reserve(first, A, POOL, 20)
    assert not await world.reserve(second, A, POOL, 1), "the storage is full"
    assert not await world.reserve(second, B, NFS, 9), "the global quota has 8 left"
    for account in (group_account(B), storage_account("s")):
        assert not any((await world.counters.read(account)).reserved.values()), account
    assert (await world.counters.read(group_account(A))).reserved == {"b3/p": 200}
    assert await world.reserve(second, A, NFS, 5), "nothing of what was refused counts"


async def test_a_limit_that_is_set_at_runtime_counts_what_was_written_before(client: RedisClient) -> None:
    world = World(client)
    manager, other = world.manager(), world.manager()
    unlimited = Limits(InstanceGroup(B, ("s",), quota=InstanceGroupQuota(25 * SIZE)))
    assert await world.reserve(manager, B, NFS, 12, unlimited)
    await world.store(manager)
    await manager.ledger.flush()
    assert not await world.reserve(other, B, NFS, 2)
    assert await world.reserve(other, B, NFS, 1)


async def test_a_group_that_changes_its_global_quota_takes_its_usage_along(client: RedisClient) -> None:
    world = World(client)
    manager = world.manager()
    assert await world.reserve(manager, C, POOL, 20)
    await world.store(manager)
    await manager.ledger.flush()
    joined = replace(limits_of(A), shared=QUOTA._replace(group_names=[A, B, C]))
    assert await world.reserve(manager, A, NFS, 8, joined)
    assert not await world.reserve(manager, A, NFS, 1, joined)
    assert await world.reserve(manager, A, NFS, 1), "as before it joined"


async def test_rooms_tell_what_fits(client: RedisClient) -> None:
    """As the reservation does right afterwards, while nobody else writes."""
    world, random = World(client), Random(7)
    manager, answers = world.manager(), Counter[bool]()
    for _ in range(60):
        name, place, count = random.choice(list(GROUPS)), random.choice([NFS, POOL]), random.randint(1, 6)
        room = await manager.ledger.room(limits_of(name), GROUPS[name], manager.indexes[name])
        told = room.limit(place, count * SIZE) is None
        assert told == await world.reserve(manager, name, place, count), room.limit(place, count * SIZE)
        answers[told] += 1
    assert min(answers[True], answers[False]) > 5, answers


async def test_what_is_used_is_heard_by_group_and_storage(client: RedisClient) -> None:
    world = World(client)
    writer, other = world.manager(), world.manager()
    for name, place, count in ((A, NFS, 3), (A, POOL, 2), (C, NFS, 1)):
        assert await world.reserve(writer, name, place, count)
        await world.store(writer)
    await writer.ledger.flush()
    assert (other.ledger.used(A), other.ledger.held_on("s")) == ({}, {})
    await other.ledger.hear(A, ["s"])
    assert other.ledger.used(A) == {NFS: 30, POOL: 20}
    assert other.ledger.held_on("s") == {A: 30, C: 10}


async def test_what_was_just_stored_is_held_before_it_is_reported(client: RedisClient) -> None:
    """A write asks right afterwards whether a mark was crossed, and other groups count in what they share."""
    world = World(client)
    one, two = world.manager(), world.manager()
    for manager, name in ((one, A), (two, B)):
        assert await world.reserve(manager, name, NFS, 4)
        await world.store(manager)
    assert one.ledger.held(A) == two.ledger.held(B) == {NFS: 40}
    assert two.ledger.used(B) == {}
    assert two.ledger.held_on("s") == two.ledger.held_by_group() == {A: 40, B: 40}
    await two.ledger.flush()
    assert two.ledger.held_on("s") == two.ledger.held_by_group() == {A: 40, B: 40}
