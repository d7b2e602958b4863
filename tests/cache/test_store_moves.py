"""Blocks of a group lie in the store that it was given, and move there while engines go on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from inspect import isasyncgenfunction, iscoroutinefunction
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cache_rig import group, instance
from fake_clock import FakeClock
from redis_servers import Servers, Standalone, standalone

from kvcm.app import Manager
from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.store_moves import READ_SECONDS, StoreMoves
from kvcm.cache.write_sessions import WriteRequest
from kvcm.components import Components
from kvcm.config import BlockStoreUri, Settings
from kvcm.index.backends.backend import Change
from kvcm.index.backends.redis_runs import Fence
from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.keys import BlockMask
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.store import BlocksMovedError

KINDS = ("standalone", "cluster", "sentinel")


async def until(condition: Callable[[], object]) -> None:
    """Return when a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it is another task's or process's
            await asyncio.sleep(0.001)


class Site:
    """Managers over one registry and one further store, without ports."""

    def __init__(self, registry_uri: str, block_uri: str, stack: AsyncExitStack) -> None:
        self.clock = FakeClock()
        self._uris = registry_uri, block_uri
        self._stack = stack
        self.managers: list[Components] = []

    @property
    def names(self) -> list[str]:
        """What the keys of both stores begin with."""
        return [parse_redis_uri(uri).cluster_name for uri in self._uris]

    async def manager(self) -> Components:
        """Return another manager that follows the changes of the others."""
        registry_uri, block_uri = self._uris
        stores = (BlockStoreUri("b", block_uri),) if block_uri else ()
        settings = Settings(registry_storage_uri=registry_uri, block_stores=stores, node_id=f"node{len(self.managers)}")
        components = await self._stack.enter_async_context(Manager(settings, self.clock).opened())
        followers = [run() for name, run in components.background_tasks() if name.startswith("invalidations")]
        tasks = [asyncio.ensure_future(each) for each in followers]
        self._stack.callback(lambda: [task.cancel() for task in tasks])
        names = [each.name for each in components.sharing.followers]
        await until(lambda: all(components.sharing.is_coherent(name) for name in names))
        self.managers.append(components)
        return components


@asynccontextmanager
async def site(registry: Servers, blocks: Servers | None) -> AsyncIterator[Site]:
    """A deployment whose group of one instance has its blocks in the registry's store."""
    name = secrets.token_hex(8)
    block_uri = blocks.uri(f"{name}-b") if blocks is not None else ""
    async with AsyncExitStack() as stack:
        made = Site(registry.uri(name), block_uri, stack)
        await prepared(made)
        yield made


async def prepared(site: Site) -> Components:
    """Return the first manager of a deployment, which gets its storages, group and instance."""
    first = await site.manager()
    for storage in ("slow", "slow2"):
        await first.registry.storages.add(StorageConfig(storage, DummyStorageSpec()))
    await first.registry.groups.create(group())
    await first.cache.register_instance(instance())
    return first


@pytest.fixture(params=KINDS)
async def deployment(request: pytest.FixtureRequest, redis_standalone: Standalone) -> AsyncIterator[Site]:
    """A registry on one server, and a store for blocks of each kind."""
    async with site(redis_standalone, request.getfixturevalue(f"redis_{request.param}")) as made:
        yield made


@pytest.fixture
async def on_one_server(redis_standalone: Standalone) -> AsyncIterator[Site]:
    """Both stores on one server, under names of their own."""
    async with site(redis_standalone, redis_standalone) as made:
        yield made


async def store(manager: Components, keys: Sequence[int], **fields: Any) -> None:
    """Write blocks, and have it acknowledged."""
    started = await manager.cache.start_write(manager.cache.cache("i"), WriteRequest(keys, **fields))
    await finish(manager, started.session.id, len(started.session.keys))


async def finish(manager: Components, session_id: str, count: int) -> None:
    await manager.cache.finish_write(manager.cache.cache("i"), session_id, BlockMask(offset=count))


async def found(manager: Components, keys: Sequence[int]) -> Sequence[int]:
    query = MatchQuery(keys=keys, mode=MatchMode.PREFIX_MATCH)
    return (await manager.cache.match(manager.cache.cache("i"), query)).keys


def place_of(manager: Components) -> str:
    return manager.registry.instances.placement("i").store


def chains(number: int, length: int = 40) -> list[list[int]]:
    return [list(range(1000 * each + 1, 1000 * each + 1 + length)) for each in range(1, number + 1)]


async def settle(site: Site, leader: Components, store: str) -> None:
    """Let the leader work until a group's blocks are in a store, and nothing is left in another one."""
    await leader.registry.group_stores.assign("group", store)
    while leader.registry.group_stores.misplaced() or leader.registry.group_stores.moves():
        await leader.moves.resume(lambda: True)
        site.clock.time += READ_SECONDS
        await asyncio.sleep(0)


async def check_sound(site: Site) -> None:
    """Invariant 4 of the design: usage is what the records take, in the counters and in every tag."""
    for each in site.managers:
        assert each.sharing is not None
        await each.sharing.ledger.flush()
    manager = site.managers[-1]
    assert manager.sharing is not None
    recount, index = manager.sharing.recount, manager.cache.cache("i").index
    different = await recount.different_accounts(recount.accounts())
    excess = [number for fields in different.values() for number in fields.values()]
    assert all(number > 0 for number in excess), "never below the truth"
    if excess:  # a write was refused by the fence, and it is not known by how much of it
        assert await recount.recount(recount.accounts())
        assert await recount.different_accounts(recount.accounts()) == {}
    await index.refresh()
    handle = manager.metadata.new_backend(manager.registry.instances.placement("i"))
    counted = 0
    async for keys in handle.scan(512):
        counted += sum(record is not None for record in await handle.get_many(keys))
    assert index.key_count == counted


def left_in(server: Servers, store: str) -> list[bytes]:
    """Keys of blocks in a store, but for fences."""
    with server.server.admin() as admin:  # type: ignore[attr-defined]
        return [name for kind in "kxzcpu" for name in admin.keys(f"{store}:{kind}{{[0-9]*")]


async def test_blocks_move_while_two_managers_write_and_read_and_nothing_acknowledged_is_lost(
    deployment: Site,
) -> None:
    """No call fails, whichever manager it comes to, and wherever the blocks are just now."""
    managers = [await deployment.manager() for _ in range(2)]
    written: list[list[int]] = []
    ends, random = asyncio.Event(), Random(7)

    async def engine(number: int) -> None:
        for turn in range(1, 10_000):
            if ends.is_set():
                return
            base = (number << 40) + (turn << 20)
            keys = list(range(base, base + random.randrange(1, 100)))
            writer, reader = random.sample(managers, 2)
            await store(writer, keys)
            written.append(keys)
            old = random.choice(written)
            assert await found(random.choice([writer, reader]), old) == old
            await asyncio.sleep(0)

    engines = [asyncio.create_task(engine(number)) for number in range(1, 5)]
    try:
        for target in ("b", "", "b"):
            before = len(written)
            await until(lambda before=before: len(written) >= before + 20 or any(each.done() for each in engines))
            await settle(deployment, managers[0], target)
            assert place_of(managers[0]) == target
    finally:
        ends.set()
        await asyncio.gather(*engines)
    for manager in managers:
        await manager.registry.refresh()
        for keys in written:
            assert await found(manager, keys) == keys
        await check_sound(deployment)


async def test_a_session_that_began_before_a_move_ends_after_it(deployment: Site) -> None:
    first, second = await deployment.manager(), await deployment.manager()
    mine, late, partly, gone = chains(4)
    cache = first.cache.cache("i")
    sessions = [await first.cache.start_write(cache, WriteRequest(keys)) for keys in (mine, late, partly)]
    overdue = await first.cache.start_write(cache, WriteRequest(gone, timeout_seconds=5))
    assert overdue.session.keys
    await settle(deployment, first, "b")
    await finish(first, sessions[0].session.id, len(mine))
    await second.registry.refresh()
    await finish(second, sessions[1].session.id, len(late))
    assert (await finish_again(second, sessions[1].session.id, len(late))) == len(late), "as the first time"
    ended = await first.cache.finish_write(first.cache.cache("i"), sessions[2].session.id, BlockMask(offset=30))
    assert (ended.served, ended.dropped) == (30, 10)
    deployment.clock.time += 10
    await first.cache.expire()
    for manager in (first, second):
        assert [len(await found(manager, keys)) for keys in (mine, late, partly, gone)] == [40, 40, 30, 0]
    await check_sound(deployment)


async def finish_again(manager: Components, session_id: str, count: int) -> int:
    cache = manager.cache.cache("i")
    return (await manager.cache.finish_write(cache, session_id, BlockMask(offset=count))).served


async def test_a_copy_has_records_accesses_and_children_as_they_were(deployment: Site) -> None:
    """Locations, states, deadlines, parents and the order of eviction."""
    first = await deployment.manager()
    long, other, short = chains(1, 300)[0], [9001, 9002, 9003], [77]
    await store(first, long)
    await store(first, other, parent_key=long[9])
    await store(first, long[:5], min_replica_count=2)
    await first.cache.start_write(first.cache.cache("i"), WriteRequest(short))
    deployment.clock.time += 60
    await found(first, long[:130])
    await first.cache.accesses.drain()
    await first.cache.remove(first.cache.cache("i"), long[200:210], BlockMask())
    keys = [*long, *other, *short]
    before = await snapshot(first, keys)
    await settle(deployment, first, "b")
    after = await snapshot(first, keys)
    assert after == before
    assert sum(each is not None for each in before["records"]) == len(keys)


async def snapshot(manager: Components, keys: Sequence[int]) -> Mapping[str, Any]:
    backend = manager.metadata.new_backend(manager.registry.instances.placement("i"))
    coldest = await backend.coldest(1000)
    return {
        "records": await backend.get_many(keys),
        "accesses": await backend.accesses(keys),
        "families": await backend.families(keys),
        "coldest": sorted((access, key) for key, access in coldest),
        "due": sorted(await backend.due(1e12, 1000)),
    }


class _Died(BaseException):
    """The process of the mover is gone."""


class Mortal:
    """Calls of an object, of which one more than there are steps left never begins."""

    def __init__(self, of: Any, steps: list[int]) -> None:
        self._of = of
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._of, name)
        if isasyncgenfunction(method):

            async def listed(*arguments: Any) -> AsyncIterator[Any]:
                self._step()
                async for each in method(*arguments):
                    yield each

            return listed
        if not iscoroutinefunction(method):
            return method

        async def awaited(*arguments: Any) -> Any:
            self._step()
            return await method(*arguments)

        return awaited

    def _step(self) -> None:
        if not self._steps[0]:
            raise _Died
        self._steps[0] -= 1


def mortal_moves(manager: Components, steps: int) -> StoreMoves:
    """What moves in a process that dies after so many steps."""
    open_runs, left = manager.metadata.open_runs, [steps]
    assert open_runs is not None
    moves = StoreMoves(manager.registry, lambda *of: Mortal(open_runs(*of), left), manager.clock)  # type: ignore[arg-type, return-value]
    moves._stores = Mortal(moves._stores, left)  # type: ignore[assignment]
    return moves


async def test_a_leader_that_dies_at_any_step_leaves_its_successor_all_it_needs(
    on_one_server: Site, redis_standalone: Standalone
) -> None:
    """Writes that wait for it go on when the successor came that far; nothing stays behind in the other store."""
    first, second = await on_one_server.manager(), await on_one_server.manager()
    written = chains(3)
    for keys in written:
        await store(first, keys)
    target, died = "b", 0
    for steps in count(1):
        moves = mortal_moves(first, steps)
        await first.registry.group_stores.assign("group", target)
        try:
            for _ in range(3):
                await moves.resume(lambda: True)
                on_one_server.clock.time += READ_SECONDS
            break
        except _Died:
            died += 1
        new = [1_000_000 + steps, 2_000_000 + steps]
        await second.registry.refresh()
        waiting = asyncio.create_task(store(second, new))
        await settle(on_one_server, second, target)
        await waiting
        await first.registry.refresh()
        for manager in (first, second):
            assert place_of(manager) == target
            for keys in (written[0], new):
                assert await found(manager, keys) == keys
        await second.cache.remove(second.cache.cache("i"), new, BlockMask())
        on_one_server.clock.time += 10
        await second.deletions.run_due()
        target = "" if target else "b"
    assert died > 15, "at every step of a whole move"
    for keys in written:
        assert await found(second, keys) == keys
    await check_sound(on_one_server)
    left = [bool(left_in(redis_standalone, store)) for store in on_one_server.names]
    assert left == [target == "", target == "b"]


class Interrupted(Mortal):
    """Calls of an object; once there are no steps left something happens to the server, and calls go on."""

    def __init__(self, of: Any, steps: list[int], interrupt: Callable[[], None]) -> None:
        super().__init__(of, steps)
        self._interrupt = interrupt

    def _step(self) -> None:
        self._steps[0] -= 1
        if not self._steps[0]:
            self._interrupt()


@pytest.mark.parametrize("interruption", ["kill", "pause"])
async def test_a_server_that_dies_or_hangs_during_a_move_delays_it_and_loses_nothing(
    interruption: str, redis_standalone: Standalone, tmp_path: Path
) -> None:
    """At each step of the copy, the last one behind the fence, and the change of the registration."""
    with standalone(tmp_path, appendonly=True) as blocks:
        server, name = blocks.server, secrets.token_hex(8)
        interrupt = server.kill if interruption == "kill" else server.pause
        mend = server.restart if interruption == "kill" else server.resume
        async with AsyncExitStack() as stack:
            deployment = Site(redis_standalone.uri(name), blocks.uri(f"{name}-b", timeout_ms=200), stack)
            first = await prepared(deployment)
            written = chains(2)
            for keys in written:
                await store(first, keys)
            for steps in (1, 3, 5, 8, 10, 12, 14):
                await first.registry.group_stores.assign("group", "b")
                await moves_interrupted(first, steps, interrupt).resume(lambda: True)
                new = [1_000_000 + steps, 2_000_000 + steps]
                if place_of(first) == "":
                    await store(first, new)
                    written.append(new)
                await asyncio.to_thread(mend)
                deployment.clock.time += 100
                await settle(deployment, first, "b")
                for keys in written:
                    assert await found(first, keys) == keys
                await settle(deployment, first, "")
            assert len(written) > 5, "most interruptions come before the registration names the store"
            await check_sound(deployment)


def moves_interrupted(manager: Components, steps: int, interrupt: Callable[[], None]) -> StoreMoves:
    """What moves, and something happens to the server of the target after so many steps."""
    open_runs, left = manager.metadata.open_runs, [steps]
    assert open_runs is not None
    return StoreMoves(
        manager.registry,
        lambda *of: Interrupted(open_runs(*of), left, interrupt),  # type: ignore[arg-type, return-value]
        manager.clock,
    )


async def test_a_mover_that_comes_too_late_changes_nothing(on_one_server: Site) -> None:
    first = await on_one_server.manager()
    (keys,) = chains(1)
    await store(first, keys)
    open_runs, stores = first.metadata.open_runs, first.registry.group_stores
    assert open_runs is not None
    await stores.assign("group", "b")
    (registration,) = stores.misplaced()
    late = await stores.begin(registration)
    assert late is not None
    await settle(on_one_server, first, "b")
    uid, tags = registration.placement.uid, registration.placement.tags
    for name in ("", "b"):
        of_late = open_runs(name, uid, tags, late.number)
        for fence in Fence:
            with pytest.raises(BlocksMovedError):
                await of_late.set_fence(fence)
        with pytest.raises(BlocksMovedError):
            await of_late.drop()
        with pytest.raises(BlocksMovedError):
            await of_late.write_many([Change(5, None, (await first.cache.cache("i").index.get(keys))[0])])
    assert await stores.place(late, registration, 0.0) is None
    await stores.end(late)
    assert await found(first, keys) == keys
    source = open_runs("", uid, tags, 0)
    with pytest.raises(BlocksMovedError):
        await source.get_many(keys)
    with pytest.raises(BlocksMovedError):
        await source.refresh()
    with pytest.raises(BlocksMovedError):
        [page async for page in source.scan(10)]


async def test_a_leader_that_does_not_know_of_the_last_move_yet_moves_and_clears_nothing(on_one_server: Site) -> None:
    """Its view of the registry is that from before."""
    first, second = await on_one_server.manager(), await on_one_server.manager()
    (keys,) = chains(1)
    await store(first, keys)
    await first.registry.group_stores.assign("group", "b")
    with pytest.raises(_Died):
        await mortal_moves(first, 8).resume(lambda: True)
    await second.registry.refresh()
    await settle(on_one_server, second, "b")
    stores = first.registry.group_stores
    assert (len(stores.misplaced()), [move.is_placed for move in stores.moves()]) == (1, [False])
    await first.moves.resume(lambda: True)
    assert await found(second, keys) == keys
    stale = await on_one_server.manager()
    await stale.registry.group_stores.assign("group", "")
    with pytest.raises(_Died):
        await mortal_moves(stale, 8).resume(lambda: True)
    await second.registry.refresh()
    await settle(on_one_server, second, "")
    await stale.registry.group_stores.assign("group", "b")  # where its view has them
    assert (stale.registry.group_stores.misplaced(), len(stale.registry.group_stores.moves())) == ([], 1)
    await stale.moves.resume(lambda: True)
    await second.registry.refresh()
    assert second.registry.group_stores.moves() == []
    assert await found(second, keys) == keys


async def test_a_fence_whose_attempt_has_ended_stops_no_write(on_one_server: Site) -> None:
    first = await on_one_server.manager()
    stores, open_runs = first.registry.group_stores, first.metadata.open_runs
    assert open_runs is not None
    await stores.assign("group", "b")
    (registration,) = stores.misplaced()
    move = await stores.begin(registration)
    assert move is not None
    placement = registration.placement
    await open_runs("", placement.uid, placement.tags, move.number).set_fence(Fence.LEAVING)
    await stores.assign("group", "")
    await stores.end(move)
    (keys,) = chains(1)
    await store(first, keys)
    assert await found(first, keys) == keys


async def test_an_instance_that_is_removed_on_its_way_is_gone_from_both_stores(
    on_one_server: Site, redis_standalone: Standalone
) -> None:
    first, died = await on_one_server.manager(), 0
    (keys,) = chains(1)
    await store(first, keys)
    for steps in range(3, 18, 2):
        await first.registry.group_stores.assign("group", "b")
        with suppress(_Died):
            await mortal_moves(first, steps).resume(lambda: True)
            continue
        died += 1
        await first.cache.remove_instance("i")
        while first.registry.instances.removals():
            await first.moves.resume(lambda: True)
            await first.cache.purge_removed()
            on_one_server.clock.time += 10
            await first.deletions.run_due()
        assert first.registry.group_stores.moves() == []
        assert not [name for store in on_one_server.names for name in left_in(redis_standalone, store)]
        await first.registry.group_stores.assign("group", "")
        await first.cache.register_instance(instance())
        await store(first, keys)
        assert await found(first, keys) == keys
        await check_sound(on_one_server)
    assert died > 3


async def test_a_store_that_is_away_costs_its_own_groups_only(on_one_server: Site) -> None:
    """A move to it says why it does not go on; writes and reads of the instance do."""
    first = await on_one_server.manager()
    (keys, more) = chains(2)
    await store(first, keys)
    gate = first.metadata.block_stores["b"].store.client.gate
    gate.closed = "it is away"
    await first.registry.group_stores.assign("group", "b")
    await first.moves.resume(lambda: True)
    (progress,) = first.moves.progress.values()
    assert (progress.failures, progress.trouble) == (1, "it is away")
    await store(first, more)
    assert await found(first, keys) == keys
    gate.closed = ""
    await settle(on_one_server, first, "b")
    gate.closed = "it is away"
    with pytest.raises(StorageIOError, match="it is away"):
        await found(first, [*more, 5])
    gate.closed = ""
    assert await found(first, more) == more


async def test_a_store_of_another_deployment_is_not_used(redis_standalone: Standalone) -> None:
    name = secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        mine = Site(redis_standalone.uri(name), redis_standalone.uri(f"{name}-b"), stack)
        assert (await mine.manager()).metadata.block_stores["b"].trouble == ""
        other = Site(redis_standalone.uri(f"{name}-other"), redis_standalone.uri(f"{name}-b"), stack)
        assert "has the blocks of another deployment" in (await other.manager()).metadata.block_stores["b"].trouble
        same = Site(redis_standalone.uri(name), redis_standalone.uri(f"{name}-other"), stack)
        assert (
            "is the registry's store of another deployment" in (await same.manager()).metadata.block_stores["b"].trouble
        )


async def test_a_group_is_given_only_what_there_is(on_one_server: Site) -> None:
    first = await on_one_server.manager()
    stores = first.registry.group_stores
    with pytest.raises(InvalidArgumentError, match=r"store is 'c': kvcm\.store\.block_stores names 'b'"):
        await stores.assign("group", "c")
    with pytest.raises(InvalidArgumentError, match="instance group 'absent' does not exist"):
        await stores.assign("absent", "b")


async def test_a_manager_without_the_store_says_so_and_serves_the_others(
    on_one_server: Site, redis_standalone: Standalone
) -> None:
    first = await on_one_server.manager()
    (keys,) = chains(1)
    await store(first, keys)
    await settle(on_one_server, first, "b")
    async with AsyncExitStack() as stack:
        poor = Site(on_one_server._uris[0], "", stack)
        without = await poor.manager()
        with pytest.raises(KvcmError, match=r"store 'b', and kvcm\.store\.block_stores of this manager"):
            await found(without, keys)
        await without.registry.groups.create(replace(group(), name="other"))
        assert [cache.placement.store for cache in without.cache.open_caches.all()] == ["b"]


async def test_an_emptied_store_costs_hits_alone(on_one_server: Site, redis_standalone: Standalone) -> None:
    first = await on_one_server.manager()
    (keys,) = chains(1)
    await store(first, keys)
    await settle(on_one_server, first, "b")
    assert first.metadata.journal is not None
    on_one_server.clock.time += 1
    await first.metadata.journal.beat()
    name = on_one_server.names[1]
    with redis_standalone.server.admin() as admin:
        for each in admin.keys(f"{name}:*"):
            admin.delete(each)
    on_one_server.clock.time += 1
    await first.metadata.journal.beat()
    await first.metadata.check_block_stores()
    assert first.metadata.health().losses == 1
    first.cache.open_caches.invalidate_all()
    assert await found(first, keys) == []
    await store(first, keys)
    assert await found(first, keys) == keys
