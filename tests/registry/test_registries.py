"""The registries: what they store, refuse and list; what fails changes nothing."""

import asyncio
from dataclasses import replace

import pytest
from registry_rig import GROUP, INSTANCE, Opener

from kvcm.model.accounts import AccountRole
from kvcm.model.errors import (
    CapacityError,
    DuplicateEntityError,
    InvalidArgumentError,
    StorageIOError,
    UnknownInstanceError,
)
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.registry.registry import Registry

NFS = StorageConfig("nfs", NfsStorageSpec("/r"))


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def registry(opener: Opener) -> Registry:
    return Registry(opener)


# Storages.


async def test_storages_are_opened_listed_and_closed(registry: Registry, opener: Opener) -> None:
    for name in ("b", "a", "c"):
        await registry.storages.add(replace(NFS, global_unique_name=name))
    await registry.storages.retire("b", 9.0)
    assert [config.global_unique_name for config in registry.storages.all()] == ["a", "c"]
    assert opener.calls == [("open", "b"), ("open", "a"), ("open", "c"), ("close", "b")]
    assert [config.global_unique_name for config in registry.storages.existing(["c", "x", "a", "c"])] == ["a", "c"]


async def test_a_storage_that_does_not_open_is_not_stored(registry: Registry, opener: Opener) -> None:
    opener.refusal = StorageIOError("no such mount")
    with pytest.raises(StorageIOError):
        await registry.storages.add(NFS)
    assert registry.storages.all() == []
    opener.refusal = None
    await registry.storages.add(NFS)


async def test_a_taken_name_is_refused_before_anything_is_opened(registry: Registry, opener: Opener) -> None:
    await registry.storages.add(NFS)
    with pytest.raises(DuplicateEntityError, match=r"'nfs'.*UpdateStorage"):
        await registry.storages.add(replace(NFS, spec=NfsStorageSpec("/other")))
    assert opener.calls == [("open", "nfs")]
    assert registry.storages.all() == [NFS]


async def test_an_update_keeps_the_operators_switch(registry: Registry) -> None:
    await registry.storages.add(NFS)
    await registry.storages.set_enabled("nfs", enabled=False)
    await registry.storages.update(replace(NFS, spec=NfsStorageSpec("/other"), is_available=True))
    (config,) = registry.storages.all()
    assert (config.spec, config.is_available) == (NfsStorageSpec("/other"), False)


async def test_an_update_cannot_change_the_type(registry: Registry, opener: Opener) -> None:
    """Blocks of the old type would be served with addresses of a storage that is not there any more."""
    await registry.storages.add(NFS)
    with pytest.raises(InvalidArgumentError, match=r"file.*dummy.*remove it and add it again"):
        await registry.storages.update(replace(NFS, spec=DummyStorageSpec()))
    assert registry.storages.all() == [NFS]
    assert opener.calls == [("open", "nfs")]


async def test_an_update_that_does_not_open_changes_nothing(registry: Registry, opener: Opener) -> None:
    await registry.storages.add(NFS)
    opener.refusal = StorageIOError("no such mount")
    with pytest.raises(StorageIOError):
        await registry.storages.update(replace(NFS, spec=NfsStorageSpec("/other")))
    assert registry.storages.all() == [NFS]


@pytest.mark.parametrize("enabled", [True, False])
async def test_the_switch_is_stored_and_passed_on(registry: Registry, opener: Opener, enabled: bool) -> None:
    await registry.storages.add(replace(NFS, is_available=not enabled))
    await registry.storages.set_enabled("nfs", enabled=enabled)
    assert registry.storages.all()[0].is_available is enabled
    assert opener.calls[-1] == ("enable" if enabled else "disable", "nfs")


async def test_unknown_storages_are_named(registry: Registry, opener: Opener) -> None:
    for call in (
        lambda: registry.storages.retire("x", 9.0),
        lambda: registry.storages.set_enabled("x", enabled=True),
        lambda: registry.storages.update(replace(NFS, global_unique_name="x")),
    ):
        with pytest.raises(InvalidArgumentError, match="'x' does not exist"):
            await call()
    assert opener.calls == []


@pytest.mark.parametrize("config", [StorageConfig("", DummyStorageSpec()), StorageConfig("nfs", NfsStorageSpec(""))])
async def test_malformed_storages_are_not_opened(registry: Registry, opener: Opener, config: StorageConfig) -> None:
    for call in (registry.storages.add, registry.storages.update):
        with pytest.raises(InvalidArgumentError):
            await call(config)
    assert opener.calls == []


async def test_storages_are_added_and_updated_while_serving(registry: Registry, opener: Opener) -> None:
    await registry.storages.add_while_serving(NFS)
    await registry.storages.set_enabled("nfs", enabled=False)
    await registry.storages.update_while_serving(replace(NFS, spec=NfsStorageSpec("/other")))
    assert registry.storages.all() == [replace(NFS, spec=NfsStorageSpec("/other"), is_available=False)]
    assert opener.calls == [("open", "nfs"), ("disable", "nfs"), ("open", "nfs")]
    opener.refusal = StorageIOError("no such mount")
    with pytest.raises(StorageIOError):
        await registry.storages.update_while_serving(NFS)
    with pytest.raises(DuplicateEntityError):
        await registry.storages.add_while_serving(NFS)
    assert registry.storages.all()[0].spec == NfsStorageSpec("/other")


async def test_two_at_once_cannot_add_one_storage(registry: Registry, opener: Opener) -> None:
    """Opening happens in threads; both calls saw the name free."""
    adds = [registry.storages.add_while_serving(replace(NFS, spec=NfsStorageSpec(root))) for root in ("/a", "/b")]
    outcomes = await asyncio.gather(*adds, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["DuplicateEntityError", "NoneType"]
    assert opener.calls == [("open", "nfs")]


async def test_a_storage_removed_during_its_update_stays_removed(registry: Registry, opener: Opener) -> None:
    await registry.storages.add(NFS)
    update = asyncio.create_task(registry.storages.update_while_serving(replace(NFS, spec=NfsStorageSpec("/other"))))
    await asyncio.sleep(0)
    await registry.storages.retire("nfs", 9.0)
    with pytest.raises(InvalidArgumentError, match="'nfs' does not exist"):
        await update
    assert registry.storages.all() == []
    assert opener.calls == [("open", "nfs"), ("close", "nfs")]


# Groups.


async def test_groups_are_listed_by_name(registry: Registry) -> None:
    for name in ("b", "c", "a"):
        await registry.groups.create(replace(GROUP, name=name))
    await registry.groups.remove("c")
    assert [group.name for group in registry.groups.all()] == ["a", "b"]
    assert registry.groups.find("c") is None
    assert registry.groups.get("a") is registry.groups.find("a")


async def test_a_taken_group_name_is_refused(registry: Registry) -> None:
    await registry.groups.create(GROUP)
    with pytest.raises(DuplicateEntityError, match=r"'group'.*UpdateInstanceGroup"):
        await registry.groups.create(replace(GROUP, version=2))
    assert registry.groups.get("group") is GROUP


@pytest.mark.parametrize(
    ("current", "new", "named"),
    [(0, 2, "current_version is 0, stored is 1"), (2, 3, "stored is 1"), (1, 1, "must be above 1"), (1, 0, "above 1")],
)
async def test_an_update_must_fit_the_stored_version(registry: Registry, current: int, new: int, named: str) -> None:
    await registry.groups.create(GROUP)
    with pytest.raises(InvalidArgumentError, match=named):
        await registry.groups.update(replace(GROUP, version=new), current)
    assert registry.groups.get("group") is GROUP


async def test_an_update_is_in_force_at_once(registry: Registry) -> None:
    await registry.groups.create(GROUP)
    await registry.groups.update(replace(GROUP, user_data="new", version=5), 1)
    assert (registry.groups.get("group").user_data, registry.groups.get("group").version) == ("new", 5)


async def test_a_malformed_update_changes_nothing(registry: Registry) -> None:
    await registry.groups.create(GROUP)
    with pytest.raises(InvalidArgumentError):
        await registry.groups.update(replace(GROUP, storage_candidates=(), version=2), 1)
    assert registry.groups.get("group") is GROUP


async def test_unknown_groups_are_named(registry: Registry) -> None:
    for call in (
        lambda: registry.groups.read("x"),
        lambda: registry.groups.remove("x"),
        lambda: registry.groups.update(replace(GROUP, name="x"), 1),
    ):
        with pytest.raises(InvalidArgumentError, match="'x' does not exist"):
            await call()
    with pytest.raises(InvalidArgumentError, match="'x' does not exist"):
        registry.groups.get("x")


# Instances.


@pytest.fixture
async def with_group(registry: Registry) -> Registry:
    await registry.groups.create(GROUP)
    return registry


async def test_spec_groups_are_sorted_and_the_quota_group_is_kept(with_group: Registry) -> None:
    stored = await with_group.instances.register(INSTANCE)
    assert stored.location_spec_groups == (LocationSpecGroup("a", ("tp0",)), LocationSpecGroup("full", ("tp0", "tp1")))
    assert stored.quota_group_name == "quota-group"
    await with_group.groups.update(replace(GROUP, global_quota_group_name="other", version=2), 1)
    assert (await with_group.instances.register(INSTANCE)).quota_group_name == "quota-group"


async def test_registering_again_in_any_order_of_groups_is_fine(with_group: Registry) -> None:
    stored = await with_group.instances.register(INSTANCE)
    shuffled = tuple(
        LocationSpecGroup(group.name, tuple(reversed(group.spec_names)) * 2)
        for group in reversed(INSTANCE.location_spec_groups)
    )
    deployment = replace(INSTANCE.model_deployment, user_data="changed")
    again = replace(INSTANCE, location_spec_groups=shuffled, model_deployment=deployment)
    assert await with_group.instances.register(again) is stored
    assert len(with_group.instances.all()) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 32}, "block_size"),
        ({"location_spec_infos": (LocationSpecInfo("tp1", 64), LocationSpecInfo("tp0", 64))}, "location_spec_infos"),
        ({"location_spec_groups": ()}, "location_spec_groups"),
        ({"model_deployment": replace(INSTANCE.model_deployment, dtype="fp8")}, "model_deployment"),
        ({"instance_group_name": "other"}, "instance_group"),
    ],
)
async def test_a_different_layout_is_refused_with_the_field(
    with_group: Registry, change: dict[str, object], named: str
) -> None:
    stored = await with_group.instances.register(INSTANCE)
    with pytest.raises(DuplicateEntityError, match=f"another {named}:"):
        await with_group.instances.register(replace(INSTANCE, **change))  # type: ignore[arg-type]
    assert with_group.instances.get(INSTANCE.instance_id) is stored


async def test_an_unknown_group_is_refused(registry: Registry) -> None:
    with pytest.raises(InvalidArgumentError, match="'group' does not exist"):
        await registry.instances.register(INSTANCE)
    assert registry.instances.all() == []


async def test_a_group_takes_so_many_instances(registry: Registry) -> None:
    await registry.groups.create(replace(GROUP, max_instance_count=2))
    await registry.groups.create(replace(GROUP, name="other"))
    await registry.instances.register(replace(INSTANCE, instance_group_name="other", instance_id="z"))
    for instance_id in ("b", "a"):
        await registry.instances.register(replace(INSTANCE, instance_id=instance_id))
    with pytest.raises(CapacityError, match="max_instance_count of 2"):
        await registry.instances.register(replace(INSTANCE, instance_id="c"))
    await registry.instances.register(replace(INSTANCE, instance_id="a"))
    await registry.instances.remove("b")
    await registry.instances.register(replace(INSTANCE, instance_id="c"))
    assert [each.instance_id for each in registry.instances.all()] == ["a", "c", "z"]
    assert [each.instance_id for each in registry.instances.all("group")] == ["a", "c"]


async def test_unknown_instances_are_named_with_what_to_do(registry: Registry) -> None:
    for call in (registry.instances.get, registry.instances.placement):
        with pytest.raises(UnknownInstanceError, match=r"'x'.*RegisterInstance"):
            call("x")
    with pytest.raises(UnknownInstanceError, match=r"'x'.*RegisterInstance"):
        await registry.instances.remove("x")


# Accounts.


async def test_accounts_are_listed_by_name_and_their_passwords_only_match(registry: Registry) -> None:
    await registry.accounts.add("zoe", "secret", AccountRole.ROLE_USER)
    await registry.accounts.add("ann", "other", AccountRole.ROLE_ADMIN)
    accounts = registry.accounts.all()
    assert [(account.user_name, account.role) for account in accounts] == [
        ("ann", AccountRole.ROLE_ADMIN),
        ("zoe", AccountRole.ROLE_USER),
    ]
    assert accounts[1].password.matches("secret")
    assert not accounts[0].password.matches("secret")
    await registry.accounts.remove("ann")
    assert [account.user_name for account in registry.accounts.all()] == ["zoe"]


@pytest.mark.parametrize(
    ("name", "password", "named"), [("", "p", "user_name"), ("a\n", "p", "user_name"), ("a", "", "password")]
)
async def test_malformed_accounts_are_refused(registry: Registry, name: str, password: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        await registry.accounts.add(name, password, AccountRole.ROLE_USER)
    assert registry.accounts.all() == []


async def test_two_at_once_cannot_take_one_name(registry: Registry) -> None:
    """The hash is made in a thread; both calls saw the name free."""
    adds = [registry.accounts.add("ann", password, AccountRole.ROLE_USER) for password in ("first", "second")]
    outcomes = await asyncio.gather(*adds, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["DuplicateEntityError", "NoneType"]
    assert len(registry.accounts.all()) == 1


async def test_an_unknown_account_is_named(registry: Registry) -> None:
    with pytest.raises(InvalidArgumentError, match="'x' does not exist"):
        await registry.accounts.remove("x")
