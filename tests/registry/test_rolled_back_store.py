"""A store that went back in time: nothing new is given what a manager remembers of the lost history."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from redis_dumps import dumped, put_in_place
from redis_servers import Standalone
from registry_rig import GROUP, INSTANCE, Opener

from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.quotas import UsageLedger
from kvcm.components import Metadata, _ComponentFactory
from kvcm.config import Settings
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.search_cache import CacheBudget
from kvcm.model.instances import Placement, Registration
from kvcm.registry.config_snapshots import Configuration
from kvcm.registry.document_cache import DocumentCache, encode_document
from kvcm.registry.instances import Uids
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryTable
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.store import RedisLease, RedisStore
from kvcm.store.redis.uri import parse_redis_uri


class Deployment:
    """Managers' views of one store."""

    def __init__(self, server: Standalone) -> None:
        self.name = f"t{uuid4().hex[:12]}"
        self.server = server
        self.stores: list[RedisStore] = []

    def store(self) -> RedisStore:
        self.stores.append(RedisStore(RedisClient.of(parse_redis_uri(self.server.uri(self.name)))))
        return self.stores[-1]

    def registry(self) -> Registry:
        return Registry(Opener(), self.store().table("registry"), store_kind="redis")


@pytest.fixture
async def deployment(redis_standalone: Standalone) -> AsyncIterator[Deployment]:
    made = Deployment(redis_standalone)
    yield made
    for store in made.stores:
        await store.close()


@pytest.mark.parametrize("lost", [1, 2, 7])
async def test_a_manager_follows_a_store_that_came_to_the_same_number_on_another_way(
    deployment: Deployment, lost: int
) -> None:
    """The counter of changes alone says that nothing happened."""
    writer, reader, later = deployment.registry(), deployment.registry(), deployment.registry()
    await writer.groups.create(GROUP)
    with deployment.server.server.admin() as admin:
        old = dumped(admin, deployment.name)
        for number in range(lost):
            await writer.instances.register(replace(INSTANCE, instance_id=f"lost{number}"))
        await reader.refresh()
        count = admin.get(f"{deployment.name}:v{{registry.0}}")
        put_in_place(admin, deployment.name, old)
        await later.load()
        for number in range(lost):
            await later.instances.register(replace(INSTANCE, instance_id=f"new{number}"))
        assert admin.get(f"{deployment.name}:v{{registry.0}}") == count, "the histories are of the same length"
    assert await reader.refresh()
    assert [each.instance_id for each in reader.instances.all()] == [f"new{number}" for number in range(lost)]


async def test_a_manager_follows_a_store_that_went_back_and_no_further(deployment: Deployment) -> None:
    writer, reader = deployment.registry(), deployment.registry()
    await writer.groups.create(GROUP)
    with deployment.server.server.admin() as admin:
        old = dumped(admin, deployment.name)
        await writer.instances.register(replace(INSTANCE, instance_id="lost"))
        await reader.refresh()
        put_in_place(admin, deployment.name, old)
    assert await reader.refresh()
    assert reader.instances.all() == []


async def test_a_uid_is_not_given_again_after_the_store_went_back(deployment: Deployment) -> None:
    """By single registrations and by loads of a configuration: the blocks of one instance would be another one's."""
    writer, later = deployment.registry(), deployment.registry()
    await writer.groups.create(GROUP)
    uids = set[int]()
    with deployment.server.server.admin() as admin:
        old = dumped(admin, deployment.name)
        for registry, way in itertools.product((writer, later), ("alone", "loaded")):
            put_in_place(admin, deployment.name, old)
            await registry.load()
            if way == "alone":
                await registry.instances.register(replace(INSTANCE, instance_id="i"))
            else:
                await registry.snapshots.load(
                    Configuration(groups=(GROUP,), instances=(replace(INSTANCE, instance_id="i"),))
                )
            uids.add(registry.instances.placement("i").uid)
    assert len(uids) == 4
    assert all(1 << 32 <= uid < 1 << 63 for uid in uids), "earlier releases count from 1"


@pytest.mark.parametrize("store_kind", ["memory", "rocksdb"])
async def test_uids_of_rows_have_32_bits(store_kind: str) -> None:
    """Also where a repair lost the counter that earlier releases kept."""
    uids = set[int]()
    for _ in range(20):
        registry = Registry(Opener(), store_kind=store_kind)
        await registry.groups.create(GROUP)
        await registry.instances.register(replace(INSTANCE, instance_id="i"))
        uids.add(registry.instances.placement("i").uid)
    assert len(uids) == 20
    assert all(1 << 24 <= uid < 1 << 32 for uid in uids)


def test_a_uid_that_is_taken_is_drawn_again() -> None:
    table, least = MemoryTable(), 1 << 24
    registrations = DocumentCache(table, "instance/", Registration)
    removals = DocumentCache(table, "removal/", Registration)
    known = [
        Registration(replace(INSTANCE, instance_id=name), Placement(least + at, 16)) for at, name in enumerate("ab")
    ]
    registrations.refresh_from({"instance/a": encode_document(known[0])}, ())
    removals.refresh_from({f"removal/{least + 1}": encode_document(known[1])}, ())
    drawn = iter([0, 1, 2, 2, 0, 3])
    stores = Registry(StorageDirectory("c")).group_stores
    placements = Uids(registrations, removals, "rocksdb", lambda _: next(drawn), stores).place([None, None])
    assert [each.uid for each in placements] == [least + 2, least + 3]


async def test_a_cache_is_not_that_of_another_registration_with_its_uid() -> None:
    """As earlier releases gave them: the stored uids of two histories may be the same."""
    table = MemoryTable()
    registry = Registry(Opener(), table)
    caches = OpenCaches(registry, StorageDirectory("c"), lambda _: MemoryBackend(), UsageLedger(), CacheBudget(1 << 20))
    for name in ("lost", "new", "new"):
        stored = Registration(replace(INSTANCE, instance_id=name), Placement(7, 16))
        old = await table.get(f"instance/{name}")
        assert await table.replace(f"instance/{name}", old, encode_document(stored))
        if name == "new":
            assert await table.replace("instance/lost", await table.get("instance/lost"), None)
        await registry.refresh()
        assert caches.resolve(name).instance == stored.instance
        assert caches.resolve(name) is caches.resolve(name)
        assert [cache.instance.instance_id for cache in caches.all()] == [name]


async def test_a_term_is_another_one_though_its_token_came_again(deployment: Deployment) -> None:
    """Free slots of packed files are those of a term: others may have given them away meanwhile."""
    clock, store, storages = FakeClock(1000.0), deployment.store(), StorageDirectory("c")
    lease = RedisLease(store.client)
    leadership = Leadership("a", clock, 60.0, lease, store.table("nodes"))
    metadata = Metadata("redis", store, lambda _: MemoryBackend(), lease, UsageLedger())
    factory = _ComponentFactory(metadata, deployment.registry(), storages, leadership, clock, Settings())
    factory.configure_slot_reuse()
    terms, tokens = [], []
    with deployment.server.server.admin() as admin:
        for _ in range(2):
            await leadership.tick()
            terms.append(storages.slot_reuse.term())
            tokens.append(leadership.token)
            admin.delete(*admin.keys(f"{deployment.name}:[lf]*"))
            await lease.acquire("b", 60.0)
            await leadership.tick()
            assert storages.slot_reuse.term() is None
            admin.delete(*admin.keys(f"{deployment.name}:[lf]*"))
    assert tokens == [1, 1]
    assert None not in terms
    assert len(set(terms)) == 2
