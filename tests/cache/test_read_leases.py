"""Read leases: what a reader was given stays readable while its lease lasts."""

from dataclasses import replace

import pytest
from cache_rig import Rig, group, opened

from kvcm.cache.leases import MAX_LEASE_MS, ReadLease
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.model.errors import CapacityError, InvalidArgumentError
from kvcm.model.masks import NO_MASK


async def lease(rig: Rig, keys: list[int], lease_ms: int) -> ReadLease:
    found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, keys))
    return await rig.manager.lease("i", found, lease_ms)


async def left(rig: Rig, keys: list[int]) -> list[int]:
    """Which blocks still have a record after everything due was deleted."""
    await rig.executor.run_due()
    return [key for key, statuses in zip(keys, await rig.statuses(keys), strict=True) if statuses]


async def test_a_lease_keeps_the_bytes_and_nothing_else() -> None:
    with opened(group(delay_ms=1000)) as rig:
        await rig.store([1, 2, 3])
        held = await lease(rig, [1, 2, 9], 60_000)
        uid = rig.manager.cache("i").placement.uid
        assert [pin[:2] for pin in held.pins] == [(uid, 1), (uid, 2)]
        await rig.manager.trim("i")
        found = await rig.manager.match("i", MatchQuery(MatchMode.BATCH_GET, [1, 2, 3]))
        assert list(found.keys) == []
        rig.wait(1)
        assert await left(rig, [1, 2, 3]) == [1, 2]
        rig.wait(58.5)
        assert await left(rig, [1, 2, 3]) == [1, 2]
        rig.wait(0.5)
        await rig.executor.run_due()
        rig.wait(1)
        assert await left(rig, [1, 2, 3]) == []


async def test_a_renewed_lease_keeps_them_longer() -> None:
    with opened(group(delay_ms=0)) as rig:
        await rig.store([1])
        held = await lease(rig, [1], 5_000)
        await rig.manager.remove("i", [1], NO_MASK)
        assert await left(rig, [1]) == [1]
        rig.wait(4)
        assert (await rig.manager.renew_lease("i", held.id, 10_000)).deadline == rig.clock.now() + 10
        rig.wait(9)
        assert await left(rig, [1]) == [1]
        rig.wait(2)
        assert await left(rig, [1]) == []


async def test_the_last_of_several_leases_counts() -> None:
    with opened(group(delay_ms=0)) as rig:
        await rig.store([1])
        first, second = await lease(rig, [1], 30_000), await lease(rig, [1], 5_000)
        await rig.manager.remove("i", [1], NO_MASK)
        await rig.manager.release_lease("i", first.id)
        assert await left(rig, [1]) == [1]
        await rig.manager.release_lease("i", second.id)
        rig.wait(5)
        assert await left(rig, [1]) == []


async def test_a_released_lease_holds_nothing() -> None:
    with opened(group(delay_ms=1000)) as rig:
        await rig.store([1])
        held = await lease(rig, [1], 60_000)
        await rig.manager.remove("i", [1], NO_MASK)
        await rig.manager.release_lease("i", held.id)
        rig.wait(1)
        assert await left(rig, [1]) == []


async def test_releasing_again_is_fine() -> None:
    """The answer to the first release may have been lost."""
    with opened() as rig:
        await rig.store([1])
        held = await lease(rig, [1], 60_000)
        for _ in range(2):
            await rig.manager.release_lease("i", held.id)
        await rig.manager.release_lease("i", "never-acquired")


@pytest.mark.parametrize("swept", [True, False])
async def test_releasing_an_expired_lease_is_fine(swept: bool) -> None:
    """It has ended already, whether or not anybody has looked since."""
    with opened() as rig:
        await rig.store([1])
        held = await lease(rig, [1], 5_000)
        rig.wait(5)
        if swept:
            await rig.manager.expire()
        await rig.manager.release_lease("i", held.id)


async def test_a_lease_that_is_released_early_does_not_hold_bytes_to_its_old_end() -> None:
    """The executor looked while the lease was open; what was pinned for minutes must go soon after the release."""
    with opened(group(delay_ms=1000)) as rig:
        await rig.store([1])
        held = await lease(rig, [1], MAX_LEASE_MS)
        await rig.manager.remove("i", [1], NO_MASK)
        rig.wait(1)
        assert await left(rig, [1]) == [1]
        await rig.manager.release_lease("i", held.id)
        rig.wait(1)
        assert await left(rig, [1]) == []


async def test_only_the_own_instance_may_renew_or_release() -> None:
    with opened() as rig:
        await rig.store([1])
        await rig.manager.register_instance(replace(rig.manager.cache("i").instance, instance_id="other"))
        held = await lease(rig, [1], 5_000)
        for call in (
            rig.manager.release_lease("other", held.id),
            rig.manager.renew_lease("other", held.id, 1),
        ):
            with pytest.raises(InvalidArgumentError, match="read_lease_id"):
                await call
        await rig.manager.release_lease("i", held.id)


async def test_an_expired_lease_is_unknown() -> None:
    with opened() as rig:
        await rig.store([1])
        held = await lease(rig, [1], 5_000)
        rig.wait(5)
        with pytest.raises(InvalidArgumentError, match="expired"):
            await rig.manager.renew_lease("i", held.id, 5_000)


@pytest.mark.parametrize("lease_ms", [0, -1, MAX_LEASE_MS + 1])
async def test_durations_are_bounded(lease_ms: int) -> None:
    with opened() as rig:
        await rig.store([1])
        held = await lease(rig, [1], MAX_LEASE_MS)
        named = f"read_lease_ms is {lease_ms}, must be from 1 to {MAX_LEASE_MS}"
        with pytest.raises(InvalidArgumentError, match=named):
            await lease(rig, [1], lease_ms)
        with pytest.raises(InvalidArgumentError, match=named):
            await rig.manager.renew_lease("i", held.id, lease_ms)


async def test_leases_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.leases._MAX_LEASES", 2)
    with opened() as rig:
        await rig.store([1])
        for _ in range(2):
            await lease(rig, [1], 1_000)
        with pytest.raises(CapacityError, match="2 read leases"):
            await lease(rig, [1], 1_000)
        rig.wait(1)
        await lease(rig, [1], 1_000)


async def test_a_lease_on_nothing_pins_nothing() -> None:
    with opened() as rig:
        held = await lease(rig, [1], 1_000)
        assert held.pins == ()
        assert len(held.id) == 32


async def test_pinned_locations_are_bounded_over_all_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.leases._MAX_PINS", 5)
    with opened() as rig:
        await rig.store([1, 2, 3])
        first = await lease(rig, [1, 2, 3], 60_000)
        with pytest.raises(CapacityError, match="5 locations"):
            await lease(rig, [1, 2, 3], 60_000)
        await rig.manager.release_lease("i", first.id)
        await lease(rig, [1, 2, 3], 60_000)
