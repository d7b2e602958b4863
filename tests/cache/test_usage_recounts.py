"""Recounts by whoever leads: what differs twice is put right, in every account, and what is at rest is left alone
(invariant 4)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from audit_rig import IndexRig, chain, opened
from redis_servers import Standalone

from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.recount import UsageRecount
from kvcm.cache.shared_usage import SharedLedger
from kvcm.index.search_cache import CacheBudget
from kvcm.registry.closed import ClosedStorages

ACCOUNTS = {"g.g": "b6/one", "s.one": "bg", "a.all": "bg"}
USED = 10 * 50


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    async with opened("redis_standalone", request) as made:
        await made.configure()
        await made.put("i", chain(50))
        yield made


def recount_of(rig: IndexRig) -> UsageRecount:
    usage = rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    caches = OpenCaches(rig.registry, ClosedStorages(), rig.metadata.new_backend, usage, CacheBudget(0))
    return UsageRecount(rig.registry, caches, usage, rig.clock)


async def used(rig: IndexRig) -> dict[str, int]:
    usage = rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    heard = await usage.refresh(list(ACCOUNTS))
    return {account: heard[account].used.get(field, 0) for account, field in ACCOUNTS.items()}


def spoil(rig: IndexRig, server: Standalone, account: str, change: int = 7) -> None:
    assert rig.metadata.client is not None
    with server.server.admin() as client:
        client.hincrby(f"{rig.metadata.client.prefix}:q{{{account}}}", f"u:{ACCOUNTS[account]}", change)


@pytest.mark.parametrize("account", list(ACCOUNTS))
@pytest.mark.parametrize("change", [7, -7])
async def test_what_differs_in_two_looks_in_a_row_is_recounted(
    rig: IndexRig, redis_standalone: Standalone, account: str, change: int
) -> None:
    recount = recount_of(rig)
    await recount.look()
    spoil(rig, redis_standalone, account, change)
    rig.clock.time += 5
    await recount.look()
    assert (await used(rig))[account] == USED + change, "perhaps a report is on its way"
    rig.clock.time += 1
    await recount.look()
    assert await used(rig) == dict.fromkeys(ACCOUNTS, USED)


async def test_what_is_right_again_at_the_second_look_is_left_alone(
    rig: IndexRig, redis_standalone: Standalone
) -> None:
    recount, usage = recount_of(rig), rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    for _ in range(3):
        spoil(rig, redis_standalone, "s.one")
        await recount.look()
        spoil(rig, redis_standalone, "s.one", -7)
        rig.clock.time += 5
        await recount.look()
    assert {each.epoch for each in (await usage.refresh(list(ACCOUNTS))).values()} == {0}


async def test_a_limit_on_what_was_written_before_accounts_were_kept_is_right_after_a_recount(
    rig: IndexRig, redis_standalone: Standalone
) -> None:
    """As in a store that an older release wrote."""
    assert rig.metadata.client is not None
    with redis_standalone.server.admin() as client:
        for account in ACCOUNTS:
            client.delete(f"{rig.metadata.client.prefix}:q{{{account}}}")
    recount = recount_of(rig)
    for _ in range(2):
        await recount.look()
        rig.clock.time += 5
    assert await used(rig) == dict.fromkeys(ACCOUNTS, USED)
