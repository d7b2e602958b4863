"""A load is there as a whole or not at all: bad parts, a store that fails, and others who are faster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_rig import INSTANCE, Opener, SuspendingTable
from snapshot_rig import (
    CONFIG,
    GROUPS,
    BrokenTable,
    DyingTable,
    documents,
    loaded,
    refused_without_a_trace,
    registry_over,
    without,
)

from kvcm.model.accounts import AccountRole
from kvcm.model.errors import (
    InvalidArgumentError,
    KvcmError,
    NotReadyError,
    StorageIOError,
)
from kvcm.model.groups import GlobalQuota
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.registry.configuration import AccountEntry, Configuration
from kvcm.store.memory import MemoryTable

# ── all or nothing ──

_SPOILT: list[Callable[[Configuration], Configuration]] = [
    lambda c: replace(c, storages=(*c.storages, c.storages[0])),
    lambda c: replace(c, storages=(replace(c.storages[0], global_unique_name="a/b"), *c.storages[1:])),
    lambda c: replace(c, storages=(*c.storages, StorageConfig("x", NfsStorageSpec("")))),
    lambda c: replace(c, groups=(*c.groups, replace(c.groups[0], name=""))),
    lambda c: replace(c, groups=(replace(c.groups[0], quota=replace(c.groups[0].quota, capacity=-1)), *c.groups[1:])),
    lambda c: replace(c, quotas=(GlobalQuota("q", 1, float("nan")), *c.quotas)),
    lambda c: replace(c, instances=(*c.instances, replace(c.instances[0], location_spec_infos=()))),
    lambda c: replace(c, instances=(*c.instances, c.instances[0])),
    lambda c: replace(c, accounts=(*c.accounts, AccountEntry("", AccountRole.ROLE_USER))),
    lambda c: replace(c, accounts=(*c.accounts, c.accounts[0])),
]
PARTS = st.fixed_dictionaries(
    {
        name: st.lists(st.sampled_from(getattr(CONFIG, name)), unique=True).map(tuple)
        for name in ("storages", "groups", "quotas", "instances", "accounts")
    }
)


@settings(max_examples=100, deadline=None)
@given(before=PARTS, parts=PARTS, spoil=st.sampled_from(_SPOILT), prune=st.booleans())
async def test_a_load_with_a_bad_part_anywhere_changes_nothing(
    before: dict[str, tuple[object, ...]],
    parts: dict[str, tuple[object, ...]],
    spoil: Callable[[Configuration], Configuration],
    prune: bool,
) -> None:
    table, opener = MemoryTable(), Opener()
    await registry_over(table).snapshots.load(Configuration(**before))  # type: ignore[arg-type]
    registry = registry_over(table, opener)
    named = {name: parts[name] or getattr(CONFIG, name) for name in parts}
    for dry_run in (True, False):
        with pytest.raises(KvcmError):
            await refused_without_a_trace(registry, table, spoil(Configuration(**named)), prune=prune, dry_run=dry_run)
    assert opener.calls == []


@settings(max_examples=100, deadline=None)
@given(before=PARTS, wanted=PARTS)
async def test_after_a_load_all_of_it_is_configured_and_another_load_changes_nothing(
    before: dict[str, tuple[object, ...]], wanted: dict[str, tuple[object, ...]]
) -> None:
    table = MemoryTable()
    await registry_over(table).snapshots.load(Configuration(**before))  # type: ignore[arg-type]
    registry = registry_over(table)
    config = Configuration(**wanted)  # type: ignore[arg-type]
    dry = await registry.snapshots.load(config, dry_run=True)
    assert await registry.snapshots.load(config) == dry
    taken = await registry.snapshots.take()
    assert {entry[:2] for entry in taken.entries()} == {
        entry[:2]
        for part in (config, Configuration(**before))
        for entry in part.entries()  # type: ignore[arg-type]
    }
    assert not [change for change in await registry.snapshots.load(config) if change.action != "keep"]
    assert await (await loaded(taken)).snapshots.take() == taken


async def test_a_store_that_fails_leaves_all_as_it_was() -> None:
    table, opener = BrokenTable(), Opener()
    registry = registry_over(table, opener)
    with pytest.raises(StorageIOError):
        await registry.snapshots.load(CONFIG)
    assert await documents(table) == {}
    assert await registry.snapshots.take() == Configuration()
    assert [verb for verb, _ in opener.calls] == ["discard"] * 3


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_store_that_fails_at_any_call_has_all_of_a_load_or_nothing(is_late: bool) -> None:
    outcomes = []
    for calls in range(20):
        table = MemoryTable()
        await loaded(without(CONFIG, CONFIG.instances[0], GROUPS[2]), table)
        before = await documents(table)
        dying = registry_over(DyingTable(table, calls, is_late=is_late))
        try:
            await dying.snapshots.load(replace(CONFIG, groups=(replace(GROUPS[0], user_data="x"), *GROUPS[1:])))
        except StorageIOError:
            outcomes.append(await documents(table) == before)
        else:
            break
        if not outcomes[-1]:
            seen = (await registry_over(table).snapshots.take()).groups
            assert [group.user_data for group in seen] == ["x", GROUPS[1].user_data, GROUPS[2].user_data]
    assert len(outcomes) > 3
    assert outcomes == [True] * (len(outcomes) - is_late) + [False] * is_late


async def test_documents_that_cannot_be_read_refuse_snapshots() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    await table.replace("group/odd", None, b"{")
    for call in (registry.snapshots.take(), registry.snapshots.load(CONFIG)):
        with pytest.raises(StorageIOError, match="groups 'odd'"):
            await call


# ── others at the same time ──


@settings(max_examples=60, deadline=None)
@given(pauses=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=3, max_size=3), at=st.integers(0, 3))
async def test_a_load_and_changes_of_others_come_one_after_the_other(pauses: list[list[int]], at: int) -> None:
    table = MemoryTable()
    ways = [SuspendingTable(table, each) for each in pauses]
    loader, other, third = (registry_over(way) for way in ways)
    await loaded(without(CONFIG, CONFIG.instances[at]), table)
    for registry in (loader, other, third):
        await registry.load()
    changed = replace(GROUPS[0], version=2, user_data="changed by hand")
    results = await asyncio.gather(
        loader.snapshots.load(replace(CONFIG, groups=(replace(GROUPS[0], user_data="loaded"), *GROUPS[1:]))),
        other.groups.update(changed, 1),
        third.instances.register(CONFIG.instances[at]),
        third.instances.register(replace(INSTANCE, instance_id="new", instance_group_name="b")),
        return_exceptions=True,
    )
    assert not isinstance(results[0], BaseException)
    assert results[1] is None or isinstance(results[1], InvalidArgumentError)
    seen = await registry_over(table).snapshots.take()
    group = next(each for each in seen.groups if each.name == "a")
    # By hand and then loaded over it, or loaded and the version was out of date.
    assert (group.user_data, group.version) == ("loaded", 3 if results[1] is None else 2)
    assert [each.instance_id for each in seen.instances] == ["i0", "i1", "i2", "i3", "new"]
    await loader.refresh()
    uids = {loader.instances.placement(each.instance_id).uid for each in seen.instances}
    assert len(uids) == len(seen.instances)


async def test_two_loads_at_a_time_end_as_one_after_the_other() -> None:
    table = MemoryTable()
    first, second = (registry_over(SuspendingTable(table)) for _ in range(2))
    one = Configuration(quotas=(GlobalQuota("x", 1), GlobalQuota("y", 1)))
    two = Configuration(quotas=(GlobalQuota("x", 2), GlobalQuota("y", 2)))
    await asyncio.gather(first.snapshots.load(one), second.snapshots.load(two))
    seen = await registry_over(table).snapshots.take()
    assert seen in (one, two)


async def test_a_configuration_that_never_rests_refuses_the_load() -> None:
    class Busy(MemoryTable):
        """Somebody is always faster."""

        async def replace_together(self, replacements: object) -> bool:
            await self.replace("quota/busy", await self.get("quota/busy"), None)
            return False

    with pytest.raises(NotReadyError, match="nothing was loaded"):
        await registry_over(Busy()).snapshots.load(CONFIG)


async def test_what_is_loaded_reaches_other_managers() -> None:
    table = MemoryTable()
    opener = Opener()
    other = registry_over(table, opener)
    await other.load()
    await loaded(table=table)
    assert await other.refresh()
    assert await other.snapshots.take() == CONFIG
    assert sorted(opener.calls) == [("open", "dummy"), ("open", "nfs"), ("open", "pool")]
