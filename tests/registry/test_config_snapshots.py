"""A configuration is taken out and loaded as a whole: what a load changes, what it refuses, and that nothing is half
done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from registry_rig import INSTANCE, Opener
from snapshot_rig import CONFIG, GROUPS, SECRET, documents, loaded, refused_without_a_trace, registry_over, without

from kvcm.model.accounts import AccountRole
from kvcm.model.errors import (
    CapacityError,
    DuplicateEntityError,
    InvalidArgumentError,
    NotReadyError,
    StorageIOError,
)
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.registry.configuration import AccountEntry, ConfigChange, Configuration
from kvcm.store.memory import MemoryTable


def acts(changes: list[ConfigChange]) -> list[tuple[str, str, str]]:
    return [(change.action, change.kind, change.name) for change in changes]


async def test_an_empty_deployment_gets_all_with_versions_and_numbers_that_go_on() -> None:
    registry = registry_over()
    changes = await registry.snapshots.load(CONFIG)
    assert {change.action for change in changes} == {"add"}
    assert [(change.kind, change.name, change.new) for change in changes] == [
        (entry.kind, entry.name, entry.value) for entry in CONFIG.entries()
    ]
    assert await registry.snapshots.take() == CONFIG
    assert [registry.instances.placement(f"i{number}") for number in range(4)] == [(at, 16) for at in range(1, 5)]
    await registry.instances.register(replace(INSTANCE, instance_id="next", instance_group_name="b"))
    assert registry.instances.placement("next").uid == 5


async def test_a_load_of_what_is_there_changes_nothing_not_even_a_document() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    before = await table.version()
    assert await registry.snapshots.load(await registry.snapshots.take()) == []
    assert await table.version() == before


async def test_instances_that_are_loaded_have_seats() -> None:
    registry = await loaded()
    await registry.instances.register(replace(INSTANCE, instance_id="third", instance_group_name="a"))
    with pytest.raises(CapacityError):
        await registry.instances.register(replace(INSTANCE, instance_id="fourth", instance_group_name="a"))
    await registry.instances.remove("i0")
    await registry.instances.register(replace(INSTANCE, instance_id="fourth", instance_group_name="a"))


async def test_a_group_that_would_have_too_many_instances_refuses_the_load() -> None:
    table = MemoryTable()
    registry = await loaded(without(CONFIG, CONFIG.instances[0]), table)
    small = replace(GROUPS[0], max_instance_count=1)
    with pytest.raises(CapacityError, match="'a' has 1 instances and would get 1 more: its max_instance_count is 1"):
        await refused_without_a_trace(registry, table, replace(CONFIG, groups=(small, *GROUPS[1:])))


async def test_a_changed_group_gets_a_version_above_the_stored_one() -> None:
    registry = await loaded()
    for wanted, version in ((1, 2), (7, 7)):
        group = replace(GROUPS[0], user_data=f"{wanted}", version=wanted)
        changes = await registry.snapshots.load(replace(CONFIG, groups=(group, *GROUPS[1:])))
        assert acts(changes) == [("change", "group", "a")]
        assert registry.groups.get("a") == changes[0].new == replace(group, version=version)


async def test_a_version_alone_is_no_change() -> None:
    registry = await loaded()
    other = replace(GROUPS[1], version=1000)
    assert await registry.snapshots.load(replace(CONFIG, groups=(GROUPS[0], other, GROUPS[2]))) == []
    assert registry.groups.get("b").version == GROUPS[1].version


async def test_the_last_version_of_all_refuses_a_change() -> None:
    table = MemoryTable()
    last = replace(GROUPS[0], version=(1 << 63) - 1)
    registry = await loaded(Configuration(groups=(last,)), table)
    with pytest.raises(InvalidArgumentError, match=r"groups\[0\].version.* none above"):
        await refused_without_a_trace(registry, table, Configuration(groups=(replace(last, user_data="x"),)))


async def test_what_is_not_in_a_snapshot_stays_and_is_named() -> None:
    registry = await loaded()
    changes = await registry.snapshots.load(Configuration())
    assert {change.action for change in changes} == {"keep"}
    assert [(change.name, change.old, change.new) for change in changes] == [
        (entry.name, entry.value, entry.value) for entry in CONFIG.entries()
    ]
    assert await registry.snapshots.take() == CONFIG


async def test_a_prune_removes_groups_quotas_and_accounts() -> None:
    registry = await loaded()
    wanted = replace(CONFIG, groups=GROUPS[:2], quotas=CONFIG.quotas[1:], accounts=CONFIG.accounts[:1])
    expected = [("remove", "group", "c"), ("remove", "quota", "all"), ("remove", "account", "bob")]
    dry = await registry.snapshots.load(wanted, prune=True, dry_run=True)
    assert acts(dry) == [*expected, ("remove", "account", "eve")]
    assert await registry.snapshots.take() == CONFIG
    assert await registry.snapshots.load(wanted, prune=True) == dry
    assert await registry.snapshots.take() == wanted


@pytest.mark.parametrize("name", ["instance 'i3'", "storage 'pool'"])
async def test_a_prune_never_deletes_blocks(name: str) -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    some = {"instances": CONFIG.instances[:3]} if "instance" in name else {"storages": CONFIG.storages[:2]}
    with pytest.raises(InvalidArgumentError, match=f"prune would remove {name}, and blocks with it"):
        await refused_without_a_trace(registry, table, replace(CONFIG, **some), prune=True)  # type: ignore[arg-type]


async def test_an_instance_with_another_layout_refuses_the_load() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    other = replace(CONFIG.instances[2], block_size=32)
    wanted = replace(CONFIG, instances=(*CONFIG.instances[:2], other), quotas=())
    with pytest.raises(
        DuplicateEntityError, match=r"instances\[2\]: instance 'i2' is registered with another block_size"
    ):
        await refused_without_a_trace(registry, table, wanted)


async def test_user_data_of_an_instance_stays_as_it_is_registered() -> None:
    registry = await loaded()
    deployment = replace(CONFIG.instances[0].model_deployment, user_data="another")
    again = replace(CONFIG.instances[0], model_deployment=deployment)
    assert await registry.snapshots.load(replace(CONFIG, instances=(again, *CONFIG.instances[1:]))) == []
    assert registry.instances.get("i0") == CONFIG.instances[0]


async def test_an_instance_of_a_removed_group_is_loaded_as_it_is() -> None:
    wanted = without(CONFIG, group=GROUPS[2])
    assert await (await loaded(wanted)).snapshots.take() == wanted


async def test_an_account_is_added_without_a_password_and_keeps_the_one_it_has() -> None:
    registry = await loaded()
    assert [account.password for account in registry.accounts.all()] == [None, None, None]
    await registry.accounts.remove("bob")
    await registry.accounts.add("bob", SECRET, AccountRole.ROLE_ADMIN)
    changes = await registry.snapshots.load(CONFIG)
    assert changes == [
        ConfigChange("account", "bob", "change", AccountEntry("bob", AccountRole.ROLE_ADMIN), CONFIG.accounts[1])
    ]
    (bob,) = (each for each in registry.accounts.all() if each.user_name == "bob")
    assert bob.role is AccountRole.ROLE_USER
    assert bob.password is not None
    assert bob.password.matches(SECRET)


# ── storages ──


async def test_storages_are_opened_switched_and_limited() -> None:
    opener = Opener()
    registry = registry_over(opener=opener)
    await registry.snapshots.load(CONFIG)
    assert sorted(opener.calls) == [("open", "dummy"), ("open", "nfs"), ("open", "pool")]
    opener.calls.clear()
    dummy, nfs, pool = CONFIG.storages
    wanted = (replace(dummy, is_available=True), replace(nfs, capacity_bytes=5), replace(pool, used_percentage=0.5))
    assert len(await registry.snapshots.load(replace(CONFIG, storages=wanted))) == 3
    assert opener.calls == [("enable", "dummy")]
    moved = (wanted[0], replace(nfs, spec=NfsStorageSpec("/other/")), wanted[2])
    assert acts(await registry.snapshots.load(replace(CONFIG, storages=moved))) == [("change", "storage", "nfs")]
    assert opener.calls[1:] == [("open", "nfs")]
    assert registry.storages.all() == list(moved)


async def test_a_drain_goes_on() -> None:
    registry = await loaded()
    await registry.storages.drain("nfs", 12.5)
    changed = replace(CONFIG.storages[1], capacity_bytes=7)
    await registry.snapshots.load(replace(CONFIG, storages=(CONFIG.storages[0], changed, CONFIG.storages[2])))
    (nfs,) = registry.storages.existing(["nfs"])
    assert (nfs.capacity_bytes, nfs.draining_since) == (7, 12.5)


async def test_a_storage_that_does_not_open_refuses_the_load_and_those_that_did_are_closed() -> None:
    class OneBad(Opener):
        def prepare(self, config: StorageConfig, *, is_new: bool) -> StorageConfig:
            if config.global_unique_name == "nfs":
                raise StorageIOError("no such disk")
            return super().prepare(config, is_new=is_new)

    table, opener = MemoryTable(), OneBad()
    with pytest.raises(StorageIOError, match="no such disk"):
        await registry_over(table, opener).snapshots.load(CONFIG)
    assert await documents(table) == {}
    assert opener.calls == [("discard", "dummy")]


async def test_a_dry_run_opens_nothing() -> None:
    table, opener = MemoryTable(), Opener()
    opener.refusal = StorageIOError("opened")
    changes = await registry_over(table, opener).snapshots.load(CONFIG, dry_run=True)
    assert await documents(table) == {}
    assert changes == await registry_over().snapshots.load(CONFIG)


async def test_a_storage_never_becomes_another_kind_or_another_pool() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    dummy, nfs, pool = CONFIG.storages
    for storages, text in (
        ((replace(dummy, spec=NfsStorageSpec("/x")), nfs, pool), "is of type dummy"),
        ((dummy, nfs, replace(pool, spec=replace(pool.spec, capacity_bytes=1 << 31))), "is a pool of"),  # type: ignore[type-var]
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            await refused_without_a_trace(registry, table, replace(CONFIG, storages=storages))


async def test_a_removed_storage_comes_back_with_its_own_medium_only() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    await registry.storages.retire("nfs", 5.0)
    moved = replace(CONFIG.storages[1], spec=NfsStorageSpec("/elsewhere"))
    with pytest.raises(NotReadyError, match="is being forgotten"):
        await refused_without_a_trace(registry, table, Configuration(storages=(moved,)))
    assert acts(await registry.snapshots.load(CONFIG)) == [("add", "storage", "nfs")]
    assert await registry.snapshots.take() == CONFIG
