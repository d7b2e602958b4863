"""What managers of one store know without asking: it is as they read it, until an invalidation says otherwise."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from index_backends import connected
from redis_servers import Servers, Standalone, standalone

from kvcm.cache.manager import CacheManager
from kvcm.cache.quotas import SharedLedger
from kvcm.components import Metadata, Sharing
from kvcm.index.backends.backend import Change, Sum
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.redis import BlockKeys, RedisBackend
from kvcm.index.backends.redis_audit import LostRuns, RedisAudit
from kvcm.index.backends.redis_runs import RunsBackend
from kvcm.index.backends.redis_runs_audit import RunsAudit
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.storages import StorageType
from kvcm.reclaim.reclaimer import WakeBroadcast
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryTable
from kvcm.store.redis import tracking
from kvcm.store.redis.client import Command, RedisClient
from kvcm.store.redis.eviction_watch import EvictionWatch
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.store import RedisLease, RedisStore, RedisTable
from kvcm.store.redis.tracking import Invalidations, Revisions, owner_of

KINDS = ["standalone", "cluster", "sentinel"]
ON_EVERY_SERVER = pytest.mark.parametrize("kind", KINDS)
WAIT_SECONDS = 40.0
UID, SHARDS = 7, 4
SERVING = Location("a", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"chunk", 10, 1700000000.9)
WRITING = SERVING._replace(id="w", status=LocationStatus.WRITING, session_id="s", deadline=30.0)


@pytest.fixture(autouse=True)
def no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may be late."""
    monkeypatch.setattr(tracking, "_PING_SECONDS", 600.0)
    monkeypatch.setattr(tracking, "_PONG_SECONDS", 600.0)


class Notified:
    """A manager's store, which is notified of changes, and that of another manager.

    Attributes:
        asked: how many commands the first one sent.

    Args:
        have_flags: whether both are of this release.
    """

    def __init__(self, mine: RedisClient, other: RedisClient, *, have_flags: bool) -> None:
        self.store, self.other = RedisStore(mine), RedisStore(other)
        self.asked = 0
        self._execute, self._run = mine.execute, mine.run
        mine.execute, mine.run = self.execute, self.run  # type: ignore[method-assign]
        prefixes = [BlockKeys(mine.prefix).prefix, *self.store.notified_prefixes(have_flags=have_flags)]
        revisions, flags = self.store.revisions, self.store.flags
        self.on_names: Callable[[Sequence[bytes]], None] = lambda _names: None

        def record(names: Sequence[bytes]) -> None:
            flags.record([name for name in names if name.startswith(self.store.flag_prefix)])
            revisions.record([name for name in names if not name.startswith(self.store.flag_prefix)])
            self.on_names(names)

        def reset() -> None:
            revisions.reset()
            flags.reset()

        self.invalidations = Invalidations(mine, [*prefixes, self.store.flag_prefix], record, reset)
        revisions.is_live = flags.is_live = lambda: self.invalidations.is_live

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        self.asked += len(commands)
        return await self._execute(commands)

    async def run(self, calls: Any) -> list[Any]:
        self.asked += len(calls)
        return await self._run(calls)

    def backend(self, store: RedisStore) -> RedisBackend:
        return RedisBackend(store.client, UID, SHARDS, store.revisions)


async def until(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_SECONDS
        await asyncio.sleep(0.002)


@asynccontextmanager
async def notified(servers: Servers, *, have_flags: bool = True) -> AsyncIterator[Notified]:
    uri = servers.uri(f"r{uuid4().hex}")
    async with connected(uri) as mine, connected(uri) as other:
        rig = Notified(mine, other, have_flags=have_flags)
        running = asyncio.create_task(rig.invalidations.run())
        try:
            await until(lambda: rig.invalidations.is_live)
            yield rig
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def rig(request: pytest.FixtureRequest, kind: str) -> AsyncIterator[Notified]:
    async with notified(request.getfixturevalue(f"redis_{kind}")) as made:
        yield made


@ON_EVERY_SERVER
async def test_due_documents_of_another_manager_are_known_in_time(rig: Notified) -> None:
    mine, other = rig.store.table("sessions", 16), rig.other.table("sessions", 16)
    assert mine.due_from == 0.0, "it never asked"
    assert await mine.due(5.0, 10) == []
    assert mine.due_from == math.inf
    for name, due in (("late", 9.0), ("soon", 7.0)):
        await other.replace(name, None, b"1", due)
        await until(lambda: mine.due_from == 0.0)
        assert await mine.due(5.0, 10) == []
        await settled(mine, 5.0)
    assert mine.due_from == 7.0
    assert await mine.due(7.0, 10) == ["soon"]
    assert await mine.due(math.inf, 10) == ["soon", "late"]
    assert await other.finish("soon", b"1", b"over", 7.0, 60.0)
    assert await mine.due(8.0, 10) == []
    assert mine.due_from == 9.0
    assert other.due_from == 0.0, "it is not notified"


async def settled(table: RedisTable, now: float) -> None:
    """Wait for the notification of the manager's own flags, and ask once more, as managers do all the time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while table.due_from == 0.0:
        assert time.monotonic() < deadline
        await table.due(now, 10)
        await asyncio.sleep(0.01)


@ON_EVERY_SERVER
async def test_a_table_that_changes_all_the_time_notifies_no_more_than_it_is_asked(rig: Notified) -> None:
    mine, other = rig.store.table("sessions", 1), rig.other.table("sessions", 1)
    await mine.due(5.0, 10)
    notified_names = list[bytes]()
    rig.on_names = notified_names.extend
    for number in range(50):
        await other.replace(f"s{number}", None, b"1", 100.0 + number)
    await other_table_changes(rig)
    assert len([name for name in notified_names if b"{sessions" in name]) == 1
    assert mine.due_from == 0.0


async def test_a_manager_of_the_release_before_counts_only_and_that_is_enough(redis_standalone: Servers) -> None:
    async with notified(redis_standalone, have_flags=False) as rig:
        mine, prefix = rig.store.table("sessions", 1), rig.store.client.prefix.encode()
        await mine.due(5.0, 10)
        assert mine.due_from == math.inf
        add = [(b"ZADD", prefix + b":d{sessions.0}", 7.0, b"s"), (b"INCR", prefix + b":v{sessions.0}")]
        await rig.other.client.execute(add)
        await until(lambda: mine.due_from == 0.0)
        assert await mine.due(7.0, 10) == ["s"]


@ON_EVERY_SERVER
async def test_the_revision_of_a_table_is_another_one_after_every_change_and_no_other(rig: Notified) -> None:
    mine, other = rig.store.table("wakes"), rig.other.table("wakes")
    assert other.revision is None
    seen = {mine.revision}
    for old, new in ((None, b"1"), (b"1", b"2"), (b"2", None)):
        before = mine.revision
        assert await other.replace("wake", old, new)
        await until(lambda before=before: mine.revision != before)
        assert mine.revision not in seen
        seen.add(mine.revision)
    now = mine.revision
    assert not await other.replace("wake", b"?", b"1")
    assert await other_table_changes(rig)
    assert mine.revision == now


async def other_table_changes(rig: Notified) -> bool:
    """Change another table, and wait until that is known: what came before is known, too."""
    beside = rig.store.table("losses")
    before = beside.revision
    await rig.other.table("losses").replace(uuid4().hex, None, b"1")
    await until(lambda: beside.revision != before)
    return True


async def write(backend: RedisBackend | RunsBackend, key: int, location: Location | None) -> None:
    (old,) = await backend.get_many([key])
    new = BlockRecord(None, 0, (location,)) if location is not None else None
    assert not (await backend.write_many([Change(key, old, new)])).lost


@ON_EVERY_SERVER
async def test_blocks_of_another_manager_are_known_in_time(rig: Notified) -> None:
    mine, other = rig.backend(rig.store), rig.backend(rig.other)
    assert await mine.due(20.0, 10) == []
    assert mine.due_from == math.inf
    await write(other, 1, WRITING)
    await until(lambda: mine.due_from == 0.0)
    assert await mine.due(20.0, 10) == []
    assert mine.due_from == 30.0
    assert await mine.due(30.0, 10) == [1]
    await write(other, 1, SERVING)
    await until(lambda: mine.due_from == 0.0)
    assert await mine.due(30.0, 10) == []
    assert mine.due_from == math.inf


@ON_EVERY_SERVER
async def test_sums_are_read_again_after_a_change_only(rig: Notified) -> None:
    mine, other = rig.backend(rig.store), rig.backend(rig.other)
    for key in range(3):
        before = mine.revision
        await write(other, key, SERVING)
        await until(lambda before=before: mine.revision != before)
        await mine.refresh(is_exact=False)
        assert (mine.key_count, mine.usage_bytes[SERVING.place]) == (key + 1, 10 * (key + 1))
        rig.asked = 0
        await mine.refresh(is_exact=False)
        assert rig.asked == 0
    await mine.refresh()
    assert rig.asked == SHARDS, "where that decides something"
    await write(mine, 9, SERVING)
    assert mine.key_count == 4, "its own writes count at once"


async def until_quiet(rig: Notified, ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until that costs nothing: the notifications of the manager's own flags are over."""
    deadline = time.monotonic() + WAIT_SECONDS
    rig.asked = 1
    while rig.asked:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
        rig.asked = 0
        await ask()


@ON_EVERY_SERVER
async def test_runs_of_another_manager_are_known_in_time_and_cost_nothing_while_quiet(rig: Notified) -> None:
    mine = RunsBackend(rig.store.client, UID, SHARDS, rig.store.flags)
    other = RunsBackend(rig.other.client, UID, SHARDS, rig.other.flags)
    notified_names = list[bytes]()
    rig.on_names = notified_names.extend

    async def refresh() -> None:
        await mine.refresh(is_exact=False)
        if mine.due_from <= 20.0:
            await mine.due(20.0, 10)

    for key, location in enumerate((SERVING, SERVING, WRITING)):
        await until_quiet(rig, refresh)
        notified_names.clear()
        await write(other, key, location)
        for _ in range(10):
            await write(other, 100, SERVING)
            await write(other, 100, None)
        await until(lambda: mine.due_from == 0.0)
        await other_table_changes(rig)
        assert 1 <= len([name for name in notified_names if b":w{7." in name]) <= 2, "once per tag"
        await refresh()
        assert (mine.key_count, mine.usage_bytes[SERVING.place]) == (key + 1, 10 * (key + 1))
    await until_quiet(rig, refresh)
    assert mine.due_from == 30.0
    assert await mine.due(30.0, 10) == [2]


@ON_EVERY_SERVER
async def test_what_a_repair_mends_of_runs_is_read_again(rig: Notified) -> None:
    mine, audit = (
        RunsBackend(rig.store.client, UID, 1, rig.store.flags),
        RunsAudit(rig.other.client, UID, 1, LostRuns()),
    )
    await until_quiet(rig, lambda: mine.refresh(is_exact=False))
    await audit.add_usage(0, {Sum(SERVING.place, is_deleting=False): 5})
    await until(lambda: mine.revision is None)
    await mine.refresh(is_exact=False)
    assert mine.usage_bytes[SERVING.place] == 5


async def test_what_a_repair_mends_beside_the_records_is_read_again(redis_standalone: Standalone) -> None:
    async with notified(redis_standalone) as rig:
        mine, audit = rig.backend(rig.store), RedisAudit(rig.other.client, UID, 1)
        before = mine.revision
        await audit.add_usage(0, {Sum(SERVING.place, is_deleting=False): 5})
        await until(lambda: mine.revision != before)
        await mine.refresh(is_exact=False)
        assert mine.usage_bytes[SERVING.place] == 5
        with redis_standalone.server.admin() as admin:
            assert not admin.keys(f"{rig.other.client.prefix}:b*"), "nothing stays"


@pytest.mark.parametrize("tags", [0, 1])
async def test_a_manager_is_wired_to_be_notified(redis_standalone: Standalone, tags: int) -> None:
    """Of blocks, of sums that are mended, of documents and of the lease; beside the release before, and not."""
    uri = redis_standalone.uri(f"r{uuid4().hex}")
    async with connected(uri) as client, connected(uri) as another:
        store, other, clock, storages = RedisStore(client), RedisStore(another), FakeClock(), StorageDirectory("c")
        usage = SharedLedger(QuotaCounters(client), "n")
        registry, lease = Registry(storages, tags=tags), RedisLease(client, store.revisions)
        cache = CacheManager(registry, storages, clock, store=store, usage=usage)
        eviction = EvictionWatch(client, store.table("losses"))
        metadata = Metadata("redis", store, lambda _: MemoryBackend(), lease, usage, client=client, eviction=eviction)
        wakes = WakeBroadcast(store.table("wakes"), lambda: None, lambda: True)
        sharing = Sharing.of(metadata, registry, cache, wakes, clock)
        assert sharing is not None
        leads = asyncio.Event()
        (follower,) = sharing.followers
        duties = (follower.invalidations.run(), follower.flags.run_while(leads.is_set, 0.01))
        running = [asyncio.create_task(duty) for duty in duties]
        await until(lambda: sharing.is_coherent(""))
        assert not follower.flags.is_live
        leads.set()
        await until(lambda: follower.flags.is_live)
        mine, table = RedisBackend(client, UID, SHARDS, store.revisions), store.table("wakes")
        sessions = store.table("sessions", 16)
        runs, their_runs = RunsBackend(client, UID, 1, store.flags), RunsBackend(another, UID, 1)
        await sessions.due(5.0, 10)
        await runs.due(5.0, 10)
        audit, theirs = RedisAudit(another, UID, SHARDS), RedisBackend(another, UID, SHARDS)
        changes: list[tuple[Callable[[], object], Callable[[], Awaitable[object]]]] = [
            (lambda: mine.revision, lambda: write(theirs, 1, SERVING)),
            (lambda: mine.revision, lambda: audit.add_usage(3, {Sum(SERVING.place, is_deleting=False): 5})),
            (lambda: table.revision, lambda: other.table("wakes").replace("s", None, b"1")),
            (lambda: sessions.due_from, lambda: other.table("sessions", 16).replace("s", None, b"1", 9.0)),
            (lambda: runs.due_from, lambda: write(their_runs, 1, WRITING)),
            (lambda: lease.revision, lambda: RedisLease(another).acquire("other", 60.0)),
        ]
        for revision, change in changes:
            before = revision()
            await change()
            await until(lambda revision=revision, before=before: revision() != before)
        cached = cache.open_caches
        forgotten = list[dict[int, Any]]()
        cached.invalidate = forgotten.append  # type: ignore[method-assign, assignment]
        await write(their_runs, 2, SERVING)
        await write(their_runs, 2, None)
        await until(lambda: forgotten)
        assert [*forgotten[-1]] == [UID]
        resets = list[str]()
        cached.invalidate_all = lambda: resets.append("all")  # type: ignore[method-assign]
        for listener in eviction.listeners:
            listener(1)
        assert resets == ["all"], "blocks that a server drops are published by none"
        leads.clear()
        await until(lambda: not follower.flags.is_live)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_what_changed_while_it_was_read_is_read_again(redis_standalone: Servers) -> None:
    """The invalidation may come before the answer."""
    async with notified(redis_standalone) as rig:
        table, flags = rig.store.table("sessions", 2), rig.store.flags
        asked = rig.store.client.execute

        async def changed_meanwhile(commands: Sequence[Command]) -> list[Any]:
            answers = await asked(commands)
            flags.record([f"{rig.store.client.prefix}:w{{sessions.1}}".encode()])
            return answers

        rig.store.client.execute = changed_meanwhile  # type: ignore[method-assign]
        assert await table.due(5.0, 10) == []
        assert table.due_from == 0.0


async def test_while_invalidations_do_not_arrive_everything_is_asked(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with notified(servers) as rig:
            table, backend, wakes = rig.store.table("sessions", 2), rig.backend(rig.store), rig.store.table("wakes")
            await table.due(5.0, 10)
            await backend.due(5.0, 10)
            await backend.refresh()
            assert table.due_from == backend.due_from == math.inf
            with servers.server.admin() as admin:
                admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await until(lambda: not rig.invalidations.is_live)
            assert (table.due_from, backend.due_from, wakes.revision) == (0.0, 0.0, None)
            rig.asked = 0
            await backend.refresh(is_exact=False)
            assert rig.asked == SHARDS
            await until(lambda: rig.invalidations.is_live)
            assert table.due_from == backend.due_from == 0.0, "something may have changed meanwhile"
            await table.due(5.0, 10)
            assert table.due_from == math.inf


async def test_a_flushed_server_changes_every_revision(tmp_path: Path) -> None:
    with standalone(tmp_path) as servers:
        async with notified(servers) as rig:
            table = rig.store.table("wakes")
            before = table.revision
            with servers.server.admin() as admin:
                admin.flushall()
            await until(lambda: table.revision != before)


def test_counts_of_gone_instances_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_MOST_OWNERS", 10)
    revisions, seen = Revisions(), set()
    revisions.is_live = lambda: True
    for uid in range(100):
        revisions.record([b"p:b{%d.0}12345678" % uid, b"p:b{%d.0}87654321" % uid])
        seen.add(revisions.of(b"p:b{%d" % uid))
        assert len(revisions._changes) <= 11
    before = revisions.of(b"p:b{0")
    revisions.record([b"p:b{1.0}12345678", b"p:b{00.0}.{}.{0}."])
    assert revisions.of(b"p:b{0") == before
    revisions.record([b"p:b{0.15}}.{}.{0}"])
    assert revisions.of(b"p:b{0") != before


def test_parts_and_shards_have_one_owner() -> None:
    names = [b"a.b:v{sessions.3}", b"a.b:l{leader}", b"a:b{7.15}.}{8.1}."]
    assert [*map(owner_of, names)] == [b"a.b:v{sessions", b"a.b:l{leader", b"a:b{7"]


# ── The lease ──


LEASE_SECONDS = 60.0


class Elector:
    """One manager in an election, on a lease that says which changes came."""

    def __init__(self, name: str, store: RedisStore, clock: FakeClock) -> None:
        self.lease = RedisLease(store.client, store.revisions)
        self.leadership = Leadership(name, clock, LEASE_SECONDS, self.lease, MemoryTable())


@ON_EVERY_SERVER
async def test_the_lease_of_another_is_not_asked_for_until_it_changes(rig: Notified) -> None:
    clock = FakeClock(1000.0)
    mine = Elector("mine", rig.store, clock)
    other = Elector("other", rig.other, clock)
    await seen_change(mine, other.leadership.tick())
    rig.asked = 0
    for _ in range(9):
        clock.time += 0.1
        await mine.leadership.tick()
    assert rig.asked == 0
    clock.time += 0.2
    await mine.leadership.tick()
    assert rig.asked == 1, "once a second at least"
    await seen_change(mine, other.leadership.withdraw())
    assert mine.leadership.is_leader, "at once"


async def seen_change(elector: Elector, change: Awaitable[object]) -> None:
    """Change the lease once, and let a manager see that."""
    before = elector.lease.revision
    await change
    await until(lambda: elector.lease.revision != before)
    await elector.leadership.tick()


async def test_a_lease_that_is_gone_is_missed_at_the_next_tick(redis_standalone: Servers) -> None:
    async with notified(redis_standalone) as rig:
        clock = FakeClock(1000.0)
        mine = Elector("mine", rig.store, clock)
        await seen_change(mine, mine.leadership.tick())
        assert mine.leadership.is_leader
        rig.asked = 0
        await mine.leadership.tick()
        assert (rig.asked, mine.leadership.is_leader) == (0, True)
        taken = (b"SET", f"{rig.other.client.prefix}:l{{leader}}".encode(), b"other")
        await seen_change(mine, rig.other.client.execute([taken]))
        assert not mine.leadership.is_leader
