"""What every store's tables and leases promise to the managers that share them. A new store joins with one line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.clock import SystemClock
from kvcm.store.file_lease import FileLease
from kvcm.store.memory import MemoryLease, MemoryStore
from kvcm.store.redis.client import RedisClient, Script, ScriptCall
from kvcm.store.redis.store import RedisLease, RedisStore
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks import RocksStore
from kvcm.store.store import Lease, LeaseState, Replacement, Store

# ── Table contract ──


Opened = AbstractAsyncContextManager[tuple[Store, Store]]


class Kind(NamedTuple):
    """How to make empty stores of a kind.

    Attributes:
        name: of the kind.
        open: opens a new store twice, as two managers do; the same one twice where they cannot share it.
    """

    name: str
    open: Callable[[], Opened]


@asynccontextmanager
async def opened(first: Store, second: Store) -> AsyncIterator[tuple[Store, Store]]:
    try:
        yield first, second
    finally:
        for store in {first, second}:
            await store.close()


# Behind Sentinel is a Redis like any other, which the client finds in another way: CI tries that.
SENTINEL = pytest.param("redis_sentinel", marks=pytest.mark.ci)
STORES = ["memory", "rocks", "redis_standalone", "redis_cluster", SENTINEL]


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    if request.param == "memory":
        return Kind("memory", lambda: opened(*[MemoryStore()] * 2))
    if request.param == "rocks":
        directory = tmp_path_factory.mktemp("rocks")
        return Kind("rocks", lambda: opened(*[RocksStore(directory / uuid4().hex, "never", SystemClock())] * 2))
    servers = request.getfixturevalue(request.param)

    def stores() -> Opened:
        uri = parse_redis_uri(servers.uri(uuid4().hex))
        return opened(RedisStore(RedisClient.of(uri)), RedisStore(RedisClient.of(uri)))

    return Kind(request.param, stores)


NAMES = st.sampled_from(["a", "b", "ä/{x}", "", "long" * 50])
DOCUMENTS = st.none() | st.sampled_from([b"", b"1", b"\x00\xff\r\n", b"x" * 3000])
STEPS = st.tuples(NAMES, DOCUMENTS, DOCUMENTS, st.booleans(), st.sampled_from([0.0, 0.5, 10.25, 1763700000.123456]))


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=30), parts=st.sampled_from([1, 4]), most=st.integers(1, 6))
async def test_a_table_is_a_dict_with_compare_and_set(
    kind: Kind, steps: list[tuple[str, bytes | None, bytes | None, bool, float]], parts: int, most: int
) -> None:
    documents: dict[str, bytes] = {}
    dues: dict[str, float] = {}
    async with kind.open() as (store, other):
        table, seen_by_other = store.table("things", parts), other.table("things", parts)
        for name, guess, new, is_right, due in steps:
            old = documents.get(name) if is_right else guess
            before = await table.version()
            replaced = await table.replace(name, old, new, due)
            assert replaced == (old == documents.get(name))
            if replaced:
                documents.pop(name, None)
                dues.pop(name, None)
                if new is not None:
                    documents[name] = new
                    dues |= {name: due} if due else {}
                assert await table.version() > before
            else:
                assert await table.version() == before
            assert await seen_by_other.get(name) == documents.get(name)
            assert await seen_by_other.version() == await table.version()
        assert await seen_by_other.all() == documents
        for now in (0.4, 0.5, 11.0, 2e9):
            found = await seen_by_other.due(now, most)
            assert len(set(found)) == len(found)
            assert [dues[name] for name in found] == sorted(due for due in dues.values() if due <= now)[:most]


CHANGES = st.lists(st.tuples(NAMES, DOCUMENTS, DOCUMENTS, st.booleans()), max_size=4, unique_by=lambda each: each[0])


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(CHANGES, max_size=12))
async def test_several_documents_change_together_or_not_at_all(
    kind: Kind, steps: list[list[tuple[str, bytes | None, bytes | None, bool]]]
) -> None:
    documents: dict[str, bytes] = {}
    async with kind.open() as (store, other):
        table, seen_by_other = store.table("things"), other.table("things")
        for step in steps:
            changes = [
                Replacement(name, documents.get(name) if is_right else guess, new)
                for name, guess, new, is_right in step
            ]
            before = await table.version()
            replaced = await table.replace_together(changes)
            assert replaced == all(each.old == documents.get(each.name) for each in changes)
            if replaced:
                documents |= {each.name: each.new for each in changes if each.new is not None}
                for each in changes:
                    if each.new is None:
                        documents.pop(each.name, None)
            assert (await table.version() > before) == (replaced and bool(changes))
            assert await seen_by_other.all() == documents


async def test_what_changes_together_is_never_due(kind: Kind) -> None:
    async with kind.open() as (store, _):
        table = store.table("things")
        assert await table.replace("a", None, b"1", due=5.0)
        assert await table.replace_together([Replacement("a", b"1", b"2"), Replacement("b", None, b"1")])
        assert await table.due(10.0, 9) == []


async def test_changes_of_several_documents_and_of_one_never_overwrite_each_other(kind: Kind) -> None:
    async with kind.open() as (store, other):
        tables = [store.table("things"), other.table("things")]

        async def count(at: int) -> None:
            table, wins = tables[at % 2], 0
            while wins < 5:
                names = ["a", "b"] if at % 4 < 2 else ["a"]
                found = [(name, await table.get(name)) for name in names]
                changes = [Replacement(name, old, b"%d" % (int(old or b"0") + 1)) for name, old in found]
                wins += await (table.replace_together(changes) if len(names) > 1 else table.replace(*changes[0]))

        await asyncio.gather(*(count(at) for at in range(8)))
        assert await store.table("things").all() == {"a": b"40", "b": b"20"}


ENDS = st.tuples(NAMES, st.sampled_from([b"", b"1", b"\x00\xff\r\n", b"x" * 3000]), st.booleans(), st.booleans())


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(ENDS, max_size=20), parts=st.sampled_from([1, 4]))
async def test_how_documents_ended_is_reported_beside_those_that_are_there(
    kind: Kind, steps: list[tuple[str, bytes, bool, bool]], parts: int
) -> None:
    documents: dict[str, bytes] = {}
    outcomes: dict[str, bytes] = {}
    now = 1763700000.5
    async with kind.open() as (store, other):
        table, seen_by_other = store.table("things", parts), other.table("things", parts)
        for name, body, ends, is_right in steps:
            if not ends:
                assert await table.replace(name, documents.get(name), body, now)
                documents[name] = body
                continue
            old = documents.get(name, b"?") if is_right else b"other"
            before = await table.version()
            concluded = await table.finish(name, old, body, now, 60.0)
            assert concluded == (old == documents.get(name))
            assert (await table.version() > before) == concluded
            if concluded:
                del documents[name]
                outcomes[name] = body
            assert await seen_by_other.outcome(name, now) == outcomes.get(name)
        assert await seen_by_other.all() == documents
        assert set(await seen_by_other.due(now, 100)) == documents.keys()
        for name in ("a", "b", "ä/{x}", "", "long" * 50):
            assert await seen_by_other.outcome(name, now) == outcomes.get(name)
            assert await store.table("things2", parts).outcome(name, now) is None


async def test_of_many_concurrent_finishes_one_wins_and_its_outcome_is_reported(kind: Kind) -> None:
    async with kind.open() as (store, other):
        tables = [store.table("things", 4), other.table("things", 4)]
        for name in ("a", "b", "c"):
            assert await tables[0].replace(name, None, b"open", 5.0)
            ends = [tables[at % 2].finish(name, b"open", b"%d" % at, 1.0, 60.0) for at in range(8)]
            won = await asyncio.gather(*ends)
            assert sum(won) == 1
            assert await tables[1].outcome(name, 1.0) == b"%d" % won.index(True)


async def test_an_outcome_is_forgotten_in_time(kind: Kind) -> None:
    async with kind.open() as (store, other):
        table, begun = store.table("things"), time.time()
        assert await table.replace("name", None, b"x")
        assert await table.finish("name", b"x", b"short", begun, 0.2)
        while True:
            if await other.table("things").outcome("name", time.time()) is None:
                break
            await asyncio.sleep(0.01)
        assert time.time() >= begun + 0.19, "a server counts milliseconds"
        assert await other.table("things").get("name") is None


async def test_tables_are_apart(kind: Kind) -> None:
    async with kind.open() as (store, _):
        one, two = store.table("one"), store.table("two", 4)
        assert await one.replace("name", None, b"1", 5.0)
        assert await two.replace("name", None, b"2")
        assert await one.all() == {"name": b"1"}
        assert await two.all() == {"name": b"2"}
        assert await two.due(10.0, 10) == []
        assert (await one.version(), await two.version()) == (1, 1)


async def test_documents_may_be_large_and_many(kind: Kind) -> None:
    async with kind.open() as (store, other):
        table = store.table("things", 4)
        documents = {f"name{at}": b"%d" % at * 20_000 for at in range(40)}
        done = await asyncio.gather(*(table.replace(name, None, value) for name, value in documents.items()))
        assert all(done)
        await store.flush()
        assert await other.table("things", 4).all() == documents


async def test_managers_share_exactly_the_stores_that_say_so(kind: Kind) -> None:
    async with kind.open() as (store, other):
        assert store.is_shared == (store is not other)
        assert store.is_shared == kind.name.startswith("redis")


# ── Lease contract ──


LEASES = ["memory", "file", "redis_standalone", "redis_cluster", SENTINEL]
SHORT_SECONDS, LONG_SECONDS = 60.0, 600.0
# The server's clock decides, and a test cannot move it: it moves the end of the lease.
PASS = Script("""
local left = redis.call('PTTL', KEYS[1])
if left >= 0 then redis.call('PEXPIRE', KEYS[1], left - ARGV[1]) end
return left
""")


class Rig(NamedTuple):
    """One lease as two managers see it, and a way to let more than so many seconds pass."""

    lease: Lease
    other: Lease
    pass_more_than: Callable[[float], Awaitable[None]]


@pytest.fixture(params=LEASES)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    clock = FakeClock()

    async def pass_more_than(seconds: float) -> None:
        clock.time += 2 * seconds

    if request.param == "memory":
        lease = MemoryLease(clock)
        yield Rig(lease, lease, pass_more_than)
    elif request.param == "file":
        yield Rig(FileLease(tmp_path, clock), FileLease(tmp_path, clock), pass_more_than)
    else:
        settings = parse_redis_uri(request.getfixturevalue(request.param).uri(uuid4().hex))
        clients = [RedisClient.of(settings) for _ in range(2)]
        leases = [RedisLease(client) for client in clients]

        async def move_the_end(seconds: float) -> None:
            await clients[0].run([ScriptCall(PASS, leases[0]._keys, (int(1100 * seconds),))])

        yield Rig(*leases, move_the_end)
        for client in clients:
            await client.close()


async def test_looking_takes_nothing(rig: Rig) -> None:
    assert (await rig.other.get()).holder == ""
    taken = await rig.lease.acquire("a", SHORT_SECONDS)
    assert await rig.other.get() == taken
    await rig.pass_more_than(SHORT_SECONDS)
    assert (await rig.other.get()).holder == ""
    assert (await rig.other.acquire("b", LONG_SECONDS)).holder == "b"


async def test_renewing_keeps_it_and_its_token(rig: Rig) -> None:
    taken = await rig.lease.acquire("a", SHORT_SECONDS)
    assert await rig.lease.acquire("a", LONG_SECONDS) == taken
    await rig.pass_more_than(SHORT_SECONDS)
    assert await rig.other.acquire("b", LONG_SECONDS) == taken


async def test_asking_in_vain_does_not_prolong_it(rig: Rig) -> None:
    await rig.lease.acquire("a", SHORT_SECONDS)
    await rig.other.acquire("b", LONG_SECONDS)
    await rig.pass_more_than(SHORT_SECONDS)
    assert (await rig.other.acquire("b", LONG_SECONDS)).holder == "b"


async def test_after_it_ran_out_another_takes_it_with_a_greater_token(rig: Rig) -> None:
    first = await rig.lease.acquire("a", SHORT_SECONDS)
    await rig.pass_more_than(SHORT_SECONDS)
    second = await rig.other.acquire("b", LONG_SECONDS)
    assert second.holder == "b"
    assert second.token > first.token
    assert await rig.lease.acquire("a", LONG_SECONDS) == second


async def test_a_released_lease_is_free_at_once(rig: Rig) -> None:
    first = await rig.lease.acquire("a", LONG_SECONDS)
    await rig.lease.release("a")
    second = await rig.other.acquire("b", LONG_SECONDS)
    assert second == LeaseState("b", second.token)
    assert second.token > first.token


async def test_only_the_holder_releases_it(rig: Rig) -> None:
    taken = await rig.lease.acquire("a", LONG_SECONDS)
    await rig.other.release("b")
    assert await rig.other.acquire("b", LONG_SECONDS) == taken


async def test_releasing_a_free_lease_has_no_effect(rig: Rig) -> None:
    await rig.lease.release("a")
    assert (await rig.lease.acquire("a", LONG_SECONDS)).holder == "a"


async def test_of_many_exactly_one_gets_it(rig: Rig) -> None:
    contenders = [(rig.lease, rig.other)[at % 2].acquire(f"node{at}", LONG_SECONDS) for at in range(10)]
    assert len(set(await asyncio.gather(*contenders))) == 1
