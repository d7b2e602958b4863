"""What every lease promises to the managers that contend for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest

from kvcm.store.file_lease import FileLease
from kvcm.store.memory import MemoryLease
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.lease import RedisLease
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.store import Lease, LeaseState

LEASES = ["memory", "file", "redis_standalone", "redis_cluster", "redis_sentinel"]
SHORT_SECONDS, LONG_SECONDS = 0.05, 600.0
MODERATE_SECONDS = 1.0  # for what has to be done before they are over


class HandClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def pass_more_than(self, seconds: float) -> None:
        self.time += 2 * seconds


class Rig(NamedTuple):
    """One lease as two managers see it, and a way to let more than so many seconds pass."""

    lease: Lease
    other: Lease
    pass_more_than: Callable[[float], Awaitable[None]]


@pytest.fixture(params=LEASES)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    clock = HandClock()
    if request.param == "memory":
        lease = MemoryLease(clock)
        yield Rig(lease, lease, clock.pass_more_than)
    elif request.param == "file":
        yield Rig(FileLease(tmp_path, clock), FileLease(tmp_path, clock), clock.pass_more_than)
    else:
        settings = parse_redis_uri(request.getfixturevalue(request.param).uri(uuid4().hex))
        clients = [RedisClient.of(settings) for _ in range(2)]
        # The server's clock decides, and nobody can move it.
        yield Rig(RedisLease(clients[0]), RedisLease(clients[1]), lambda seconds: asyncio.sleep(1.1 * seconds))
        for client in clients:
            await client.close()


async def test_the_first_takes_it_and_the_others_hear_who_holds_it(rig: Rig) -> None:
    taken = await rig.lease.hold("a", LONG_SECONDS)
    assert taken.holder == "a"
    assert await rig.other.hold("b", LONG_SECONDS) == taken


async def test_looking_takes_nothing(rig: Rig) -> None:
    assert (await rig.other.look()).holder == ""
    taken = await rig.lease.hold("a", MODERATE_SECONDS)
    assert await rig.other.look() == taken
    await rig.pass_more_than(MODERATE_SECONDS)
    assert (await rig.other.look()).holder == ""
    assert (await rig.other.hold("b", LONG_SECONDS)).holder == "b"


async def test_renewing_keeps_it_and_its_token(rig: Rig) -> None:
    taken = await rig.lease.hold("a", MODERATE_SECONDS)
    assert await rig.lease.hold("a", LONG_SECONDS) == taken
    await rig.pass_more_than(MODERATE_SECONDS)
    assert await rig.other.hold("b", LONG_SECONDS) == taken


async def test_asking_in_vain_does_not_prolong_it(rig: Rig) -> None:
    await rig.lease.hold("a", SHORT_SECONDS)
    await rig.other.hold("b", LONG_SECONDS)
    await rig.pass_more_than(SHORT_SECONDS)
    assert (await rig.other.hold("b", LONG_SECONDS)).holder == "b"


async def test_after_it_ran_out_another_takes_it_with_a_greater_token(rig: Rig) -> None:
    first = await rig.lease.hold("a", SHORT_SECONDS)
    await rig.pass_more_than(SHORT_SECONDS)
    second = await rig.other.hold("b", LONG_SECONDS)
    assert second.holder == "b"
    assert second.token > first.token
    assert await rig.lease.hold("a", LONG_SECONDS) == second


async def test_what_is_released_is_free_at_once(rig: Rig) -> None:
    first = await rig.lease.hold("a", LONG_SECONDS)
    await rig.lease.release("a")
    second = await rig.other.hold("b", LONG_SECONDS)
    assert second == LeaseState("b", second.token)
    assert second.token > first.token


async def test_only_the_holder_releases_it(rig: Rig) -> None:
    taken = await rig.lease.hold("a", LONG_SECONDS)
    await rig.other.release("b")
    assert await rig.other.hold("b", LONG_SECONDS) == taken


async def test_releasing_what_nobody_holds_is_nothing(rig: Rig) -> None:
    await rig.lease.release("a")
    assert (await rig.lease.hold("a", LONG_SECONDS)).holder == "a"


async def test_of_many_exactly_one_gets_it(rig: Rig) -> None:
    contenders = [(rig.lease, rig.other)[at % 2].hold(f"node{at}", LONG_SECONDS) for at in range(10)]
    assert len(set(await asyncio.gather(*contenders))) == 1


async def test_tokens_never_repeat_over_holders(rig: Rig) -> None:
    tokens = []
    for turn in range(6):
        lease = (rig.lease, rig.other)[turn % 2]
        tokens.append((await lease.hold(f"node{turn % 2}", LONG_SECONDS)).token)
        await lease.release(f"node{turn % 2}")
    assert tokens == sorted(set(tokens))
