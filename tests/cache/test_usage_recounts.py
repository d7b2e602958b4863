"""Recounts by whoever leads: what differs twice is put right, in every account, and what is at rest is left alone
(invariant 4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from audit_rig import SHARDS, IndexRig, chain, opened
from redis_servers import Standalone

from kvcm.cache.limits import Limits
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.recount import UsageRecount
from kvcm.cache.shared_usage import SharedLedger
from kvcm.cache.usage import Reservation
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget
from kvcm.model.locations import Place
from kvcm.model.storages import StorageType
from kvcm.registry.closed import ClosedStorages
from kvcm.registry.registry import Registry

ACCOUNTS = {"g.g": "b6/one", "s.one": "bg", "a.all": "bg"}
USED = 10 * 50


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    async with opened("redis_standalone", request) as made:
        await made.configure()
        await made.put("i", chain(50))
        yield made


def recount_of(rig: IndexRig, registry: Registry | None = None) -> UsageRecount:
    usage = rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    registry = registry if registry is not None else rig.registry
    caches = OpenCaches(registry, ClosedStorages(), rig.metadata.new_backend, usage, CacheBudget(0))
    return UsageRecount(registry, caches, usage, rig.clock)


async def epochs(rig: IndexRig) -> set[int]:
    usage = rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    return {each.epoch for each in (await usage.refresh(list(ACCOUNTS))).values()}


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
    recount = recount_of(rig)
    for _ in range(3):
        spoil(rig, redis_standalone, "s.one")
        await recount.look()
        spoil(rig, redis_standalone, "s.one", -7)
        rig.clock.time += 5
        await recount.look()
    assert await epochs(rig) == {0}


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


async def test_a_recount_counts_what_another_manager_registered_and_wrote_meanwhile(
    rig: IndexRig, redis_standalone: Standalone
) -> None:
    """Invariant 4: what an instance uses that whoever recounts has not heard of yet stays counted."""
    leader = Registry(ClosedStorages(), rig.metadata.store.table("registry"), rig.metadata.store.flush)
    await leader.load()
    recount = recount_of(rig, leader)
    spoil(rig, redis_standalone, "a.all")
    await recount.look()
    await rig.registry.instances.register(replace(rig.registry.instances.get("i"), instance_id="new"))
    await rig.put("new", chain(10, start=1000))
    assert not await recount.different(["g.g", "s.one"]), "nothing is wrong with what was written"
    rig.clock.time += 1
    await recount.recount(list(ACCOUNTS))
    assert await used(rig) == dict.fromkeys(ACCOUNTS, USED + 100)


async def test_a_difference_that_is_another_one_at_the_second_look_is_left_alone(
    rig: IndexRig, redis_standalone: Standalone
) -> None:
    """As in an account whose reports are always on their way."""
    recount = recount_of(rig)
    for _ in range(4):
        spoil(rig, redis_standalone, "a.all")
        await recount.look()
        rig.clock.time += 5
    assert (await epochs(rig), (await used(rig))["a.all"]) == ({0}, USED + 4 * 7)


async def test_a_reservation_is_no_reason_for_a_recount_before_its_deadline(rig: IndexRig) -> None:
    recount, usage = recount_of(rig), rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    limits = Limits(rig.registry.groups.get("g"))
    index = MetaIndex(rig.backend("i"), ClosedStorages(), shard_count=SHARDS)
    wanted = {Place("one", StorageType.ST_DUMMY): 70}
    assert await usage.reserve(Reservation("died", limits, 1, wanted, 7, rig.clock.now() + 20), index)
    for _ in range(4):
        await recount.look()
        rig.clock.time += 5
    assert await epochs(rig) == {0}
    for _ in range(2):
        rig.clock.time += 5
        await recount.look()
    heard = (await usage.refresh(["g.g"]))["g.g"]
    assert (heard.epoch, any(heard.reserved.values())) == (2, False)


async def test_reports_that_were_dropped_are_made_up_for(rig: IndexRig, redis_standalone: Standalone) -> None:
    assert rig.metadata.client is not None
    recount = recount_of(rig)
    with redis_standalone.server.admin() as client:
        client.hincrby(f"{rig.metadata.client.prefix}:q{{s.one}}", "dropped", 1)
    for _ in range(2):
        await recount.look()
        rig.clock.time += 5
    assert await epochs(rig) == {0, 2}


class _Leader:
    """Looks after the counters while a verification waits, once in as many of its pauses."""

    def __init__(self, rig: IndexRig, every: int) -> None:
        self._recount = recount_of(rig)
        self._clock = rig.clock
        self._every = every
        self._pauses = 0

    async def pause(self) -> None:
        self._pauses += 1
        self._clock.time += 1
        if self._pauses % self._every == 0:
            await self._recount.look()


async def test_a_verification_leaves_the_leader_the_time_to_recount(
    rig: IndexRig, redis_standalone: Standalone
) -> None:
    spoil(rig, redis_standalone, "g.g")
    assert (await rig.verified(pause=_Leader(rig, every=5).pause)).is_clean
    assert await used(rig) == dict.fromkeys(ACCOUNTS, USED)


async def test_what_nobody_recounts_is_found(rig: IndexRig, redis_standalone: Standalone) -> None:
    spoil(rig, redis_standalone, "g.g")
    (finding,) = (await rig.verified(pause=_Leader(rig, every=1_000).pause)).findings
    assert (finding.check, finding.where) == ("usage", "group 'g'")


async def test_counters_that_change_all_the_time_are_said_to_be_unsettled(
    rig: IndexRig, redis_standalone: Standalone
) -> None:
    spoil(rig, redis_standalone, "a.all")

    async def pause() -> None:
        spoil(rig, redis_standalone, "a.all", change=1)

    report = await rig.verified(pause=pause)
    assert (report.findings, report.unsettled) == ([], ["shared counters of all groups, which change all the time"])
