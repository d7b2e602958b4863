"""The registry of a store that is emptied or changed for another: step by step, in any order of managers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from redis_dumps import contents
from redis_servers import Standalone, standalone
from registry_rig import GROUP, Opener

from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.principals import ALL_GROUPS, Role
from kvcm.registry.api_keys import NewKey
from kvcm.registry.loss_journal import LossJournal
from kvcm.registry.registry import Registry, ensure_cluster_id, ensure_schema
from kvcm.registry.store_guard import StoreGuard
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.eviction_watch import EvictionWatch
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import parse_redis_uri


class Manager:
    """The registry of a manager, which looks at the store when it is told to."""

    def __init__(self, store: RedisStore, clock: FakeClock, journal: LossJournal | None = None) -> None:
        self.store = store
        self.guard = StoreGuard(store.registry_table(), store.client.gate, clock, journal)
        self.registry = Registry(Opener(), self.guard, store_kind="redis", clock=clock)

    async def start(self, cluster_id: str = "c") -> Manager:
        await self.guard.open()
        await ensure_schema(self.guard, self.store.flush)
        await ensure_cluster_id(self.guard, cluster_id)
        await self.registry.load()
        return self

    async def refresh(self) -> None:
        await self.registry.refresh()

    def groups(self) -> set[str]:
        return {group.name for group in self.registry.groups.all()}

    def keys(self) -> set[str]:
        return {key.name for key in self.registry.keys.all()}


class World:
    """One server, its deployment, and managers of it."""

    def __init__(self, server: Standalone) -> None:
        self.server, self.name, self.clock = server, f"t{uuid4().hex[:12]}", FakeClock(1_000.0)
        self.stores: list[RedisStore] = []

    def manager(self) -> Manager:
        self.stores.append(RedisStore(RedisClient.of(parse_redis_uri(self.server.uri(self.name)))))
        return Manager(self.stores[-1], self.clock)

    def empty(self) -> None:
        with self.server.server.admin() as admin:
            admin.delete(*admin.keys(f"{self.name}:*"))
        self.clock.time += 0.01


@pytest.fixture
async def world(redis_standalone: Standalone) -> AsyncIterator[World]:
    made = World(redis_standalone)
    yield made
    for store in made.stores:
        await store.close()


@pytest.mark.parametrize("seed", range(30))
async def test_what_a_living_manager_acknowledged_is_there_again(world: World, seed: int) -> None:
    """Whichever manager looks first, and whoever starts in between; changes that fail are not acknowledged."""
    random = Random(seed)
    managers = [await world.manager().start() for _ in range(3)]
    acknowledged = set[str]()
    for number in range(25):
        acts = random.choice(managers)
        match random.choice(["create", "create", "refresh", "refresh", "empty", "start"]):
            case "create":
                try:
                    await acts.registry.groups.create(replace(GROUP, name=f"g{number}"))
                    acknowledged.add(f"g{number}")
                except KvcmError:
                    assert acts.guard is not None
            case "empty":
                for each in random.sample(managers, 3):
                    await each.refresh()  # all have seen all; else the newest change may be lost with its manager
                world.empty()
            case "start":
                managers[random.randrange(3)] = await world.manager().start()
                for each in managers:
                    await each.refresh()
            case _:
                await acts.refresh()
    for each in managers * 3:
        await each.refresh()
    assert [each.groups() for each in managers] == [acknowledged] * 3
    assert [each.store.client.gate.closed for each in managers] == [""] * 3


async def test_a_manager_that_starts_in_an_emptied_store_does_not_take_it_over(world: World) -> None:
    first, second = [await world.manager().start() for _ in range(2)]
    await first.registry.groups.create(GROUP)
    await first.registry.keys.create(NewKey("engine", Role.ROLE_ENGINE, (ALL_GROUPS,)))
    await second.refresh()
    world.empty()
    newcomer = await world.manager().start()
    await newcomer.registry.groups.create(replace(GROUP, name="new"))
    for each in (second, first, newcomer, second):
        await each.refresh()
    for each in (first, second, newcomer):
        assert (each.groups(), each.keys()) == ({GROUP.name, "new"}, {"engine"})


async def test_a_manager_that_knew_less_does_not_bring_a_revoked_key_back(world: World) -> None:
    late, current = [await world.manager().start() for _ in range(2)]
    key, _ = await late.registry.keys.create(NewKey("engine", Role.ROLE_ENGINE, (ALL_GROUPS,)))
    await late.refresh()
    await current.refresh()
    await current.registry.keys.revoke(key.id)
    await current.registry.groups.create(GROUP)
    await current.refresh()
    world.empty()
    await late.refresh()
    assert late.keys() == {"engine"}, "it put back what it knew"
    for each in (current, late, current):
        await each.refresh()
    for each in (late, current):
        assert (each.keys(), each.groups()) == (set(), {GROUP.name})


async def test_what_was_changed_after_a_restoration_stays(world: World) -> None:
    """A manager that knew more adds what is lacking then, and takes nothing back."""
    late, current = [await world.manager().start() for _ in range(2)]
    await current.registry.groups.create(GROUP)
    await current.refresh()
    world.empty()
    await late.refresh()
    await late.registry.groups.create(replace(GROUP, name="later"))
    for each in (current, late):
        await each.refresh()
        assert each.groups() == {GROUP.name, "later"}


async def test_long_after_a_restoration_nothing_is_put_over_it(world: World) -> None:
    """A manager that was cut off for long is the one that knows less by then."""
    late, away = [await world.manager().start() for _ in range(2)]
    await away.registry.groups.create(GROUP)
    await away.refresh()
    world.empty()
    await late.refresh()
    world.clock.time += 60
    await away.refresh()
    assert (late.groups(), away.groups()) == (set(), set())


@pytest.mark.parametrize("cluster_id", ["c", "other"])
async def test_a_foreign_store_is_not_followed_and_not_written(world: World, cluster_id: str) -> None:
    own, other = world.manager(), world.manager()
    other.store.client.prefix = own.store.client.prefix + "x"
    foreign = await Manager(other.store, world.clock).start(cluster_id)
    world.clock.time += 1
    await own.start()
    await own.registry.groups.create(GROUP)
    with world.server.server.admin() as admin:
        before = {key: admin.dump(key) for key in admin.keys(f"{world.name}:*")}
        world.empty()
        for key in list(admin.keys(f"{world.name}x:*")):
            admin.copy(key, key.replace(b"x:", b":", 1))
        there = contents(admin, world.name)
        for _ in range(2):
            with pytest.raises(StorageIOError, match="another deployment's"):
                await own.refresh()
        for refused in (
            own.registry.groups.create(replace(GROUP, name="other")),
            own.registry.groups.read(GROUP.name),
            own.store.table("sessions").replace("s", None, b"x"),
            own.store.table("sessions").all(),
        ):
            with pytest.raises(StorageIOError):
                await refused
        assert contents(admin, world.name) == there
        assert own.groups() == {GROUP.name}
        world.empty()
        for key, value in before.items():
            admin.restore(key, 0, value)
    await own.refresh()
    await own.registry.groups.create(replace(GROUP, name="other"))
    assert own.groups() == {GROUP.name, "other"}
    assert foreign.groups() == set()


async def test_a_time_and_a_loss_are_not_written_into_a_foreign_store(world: World) -> None:
    """Nor before the registry is read again, which closes the gate."""
    other, own = world.manager(), world.manager()
    other.store.client.prefix = own.store.client.prefix + "x"
    await Manager(other.store, world.clock, LossJournal(world.clock, other.store)).start()
    world.clock.time += 1
    own = await Manager(own.store, world.clock, LossJournal(world.clock, own.store)).start()
    journal = own.guard.journal
    await journal.beat()
    with world.server.server.admin() as admin:
        world.empty()
        for key in list(admin.keys(f"{world.name}x:*")):
            admin.copy(key, key.replace(b"x:", b":", 1))
        there = contents(admin, world.name)
        assert not own.store.client.gate.closed
        await journal.beat()
        assert journal.losses == 0, "it is another store, not an older one"
        journal.note("blocks are lost", 0.0)
        await journal.beat()
        assert contents(admin, world.name) == there


async def test_an_older_dump_of_a_release_without_the_document_is_ours(world: World) -> None:
    own = await world.manager().start()
    with world.server.server.admin() as admin:
        admin.hdel(f"{world.name}:t{{registry.0}}", "meta/incarnation")
        await own.refresh()
        await own.registry.groups.create(GROUP)
        assert admin.hexists(f"{world.name}:t{{registry.0}}", "meta/incarnation")


async def test_a_store_that_went_back_is_reported_with_its_window(world: World) -> None:
    own, reasons = await world.manager().start(), list[str]()
    own.guard.on_lost = reasons.append
    with world.server.server.admin() as admin:
        old = {key: admin.dump(key) for key in admin.keys(f"{world.name}:*")}
        await own.registry.groups.create(GROUP)
        await own.refresh()
        world.empty()
        for key, value in old.items():
            admin.restore(key, 0, value)
    world.clock.time += 5
    await own.refresh()
    assert own.guard.journal.losses == 1
    assert reasons == ["at least 1 changes of the registry are lost: the store went back in time"]
    assert "between 1970-01-01T00:16:40+00:00 and 1970-01-01T00:16:45+00:00" in own.guard.journal.last_loss


# Policies of eviction.


def watch_of(client: RedisClient) -> EvictionWatch:
    return EvictionWatch(client, RedisStore(client).table("losses"))


@pytest.mark.parametrize(
    ("policy", "is_reported", "is_refused"),
    [
        ("noeviction", False, False),
        ("allkeys-lru", True, True),
        ("allkeys-random", True, True),
        ("volatile-ttl", True, False),
    ],
)
async def test_a_policy_that_drops_keys_is_reported(
    world: World, policy: str, is_reported: bool, is_refused: bool
) -> None:
    client = world.manager().store.client
    watch, table = watch_of(client), RedisStore(client).table("sessions")
    assert await table.replace("known", None, b"1")
    with world.server.server.admin() as admin:
        before = admin.config_get("maxmemory-policy")["maxmemory-policy"]
        try:
            admin.config_set("maxmemory-policy", policy)
            await watch.check()
        finally:
            admin.config_set("maxmemory-policy", before)
    assert (policy in watch.trouble, bool(client.gate.full)) == (is_reported, is_refused)
    if is_refused:
        with pytest.raises(StorageIOError, match=f"maxmemory-policy {policy}"):
            await table.replace("new", None, b"1")
    assert await table.replace("known", b"1", b"2"), "present documents are finished and removed"
    assert await table.replace("known", b"2", None)
    await watch.check()
    assert (watch.trouble, client.gate.full) == ("", "")
    assert await table.replace("new", None, b"1")


async def test_a_server_that_does_not_say_its_policy_is_used(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Access rules may forbid INFO and CONFIG: the manager says once that it does not know."""
    with standalone(tmp_path_factory.mktemp("redis")) as servers:
        with servers.server.admin() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-info", "-config")
        client = RedisClient.of(parse_redis_uri(servers.uri("one")))
        watch = watch_of(client)
        await client.check()
        for _ in range(3):
            await watch.check()
        assert (watch.is_known, watch.trouble, client.gate.full) == (False, "", "")
        assert await RedisStore(client).table("sessions").replace("new", None, b"1")
        await client.close()
    assert capsys.readouterr().out.count("store_policy_unknown") == 1


async def test_keys_that_a_server_dropped_are_counted(tmp_path_factory: pytest.TempPathFactory) -> None:
    with standalone(tmp_path_factory.mktemp("redis"), extra=["--maxmemory-policy", "allkeys-random"]) as servers:
        client = RedisClient.of(parse_redis_uri(servers.uri("one")))
        watch, counts = watch_of(client), list[int]()
        watch.listeners.append(counts.append)
        with servers.server.admin() as admin:
            for number in range(100):
                admin.set(f"one:{number}", b"x" * 1000)
            await watch.check()
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] - 50_000)
            admin.set("one:last", b"x")
            dropped = admin.info("stats")["evicted_keys"]
            admin.config_set("maxmemory", 0)
        await watch.check()
        assert sum(counts) == dropped > 0
        await watch.check()
        later = watch_of(client)
        later.listeners.append(counts.append)
        await later.check()
        assert sum(counts) == dropped, "a manager that starts later reports none of it again"
        await client.close()


async def test_keys_that_a_server_dropped_before_a_manager_ended_are_counted_by_the_next(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It looks every five seconds, and may be killed before."""
    with standalone(tmp_path_factory.mktemp("redis"), extra=["--maxmemory-policy", "volatile-lru"]) as servers:
        client = RedisClient.of(parse_redis_uri(servers.uri("one")))
        await watch_of(client).check()
        with servers.server.admin() as admin:
            for number in range(100):
                admin.set(f"one:{number}", b"x" * 1000, ex=1000)
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] - 20_000)
            admin.set("one:last", b"x")
            dropped = admin.info("stats")["evicted_keys"]
            admin.config_set("maxmemory", 0)
        later, counts = watch_of(client), list[int]()
        later.listeners.append(counts.append)
        await later.check()
        await client.close()
    assert sum(counts) == dropped > 0
