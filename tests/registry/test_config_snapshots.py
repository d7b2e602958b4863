"""The whole configuration taken out and loaded, beside other managers, and without its secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_rig import INSTANCE, DyingTable, Opener, SuspendingTable
from snapshot_rig import CONFIG, GROUPS, MOONCAKE, SECRET, loaded, refused_without_a_trace, registry_over, without
from thoroughness import examples

from kvcm.model.errors import (
    CapacityError,
    DuplicateEntityError,
    InvalidArgumentError,
    KvcmError,
    NotReadyError,
    StorageIOError,
)
from kvcm.model.groups import GlobalQuota
from kvcm.model.instances import ModelDeployment
from kvcm.model.principals import AccountRole
from kvcm.model.storages import MooncakeStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.registry.audit_trail import described
from kvcm.registry.config_snapshots import AccountEntry, ConfigChange, Configuration
from kvcm.registry.secrets import HIDDEN, redacted, redacted_text
from kvcm.store.memory import MemoryTable


def acts(changes: list[ConfigChange]) -> list[tuple[str, str, str]]:
    return [(change.action, change.kind, change.name) for change in changes]


async def test_an_empty_deployment_gets_all_with_versions_and_numbers_of_their_own() -> None:
    registry = registry_over()
    changes = await registry.snapshots.load(CONFIG)
    assert {change.action for change in changes} == {"add"}
    assert [(change.kind, change.name, change.new) for change in changes] == [
        (entry.kind, entry.name, entry.value) for entry in CONFIG.entries()
    ]
    assert await registry.snapshots.export() == CONFIG
    await registry.instances.register(replace(INSTANCE, instance_id="next", instance_group_name="b"))
    placements = [registry.instances.placement(name) for name in ("i0", "i1", "i2", "i3", "next")]
    assert len({each.uid for each in placements}) == 5
    assert {each.shard_count for each in placements} == {16}


async def test_a_load_of_the_present_configuration_changes_no_document() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    before = await table.version()
    assert await registry.snapshots.load(await registry.snapshots.export()) == []
    assert await table.version() == before


async def test_instances_that_are_loaded_have_slots() -> None:
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


async def test_a_prune_removes_groups_quotas_and_accounts() -> None:
    registry = await loaded()
    wanted = replace(CONFIG, groups=GROUPS[:2], quotas=CONFIG.quotas[1:], accounts=CONFIG.accounts[:1])
    expected = [("remove", "group", "c"), ("remove", "quota", "all"), ("remove", "account", "bob")]
    dry = await registry.snapshots.load(wanted, prune=True, dry_run=True)
    assert acts(dry) == [*expected, ("remove", "account", "eve")]
    assert await registry.snapshots.export() == CONFIG
    assert await registry.snapshots.load(wanted, prune=True) == dry
    assert await registry.snapshots.export() == wanted


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
    assert await table.all() == {}
    assert opener.calls == [("discard", "dummy")]


async def test_a_dry_run_opens_nothing() -> None:
    table, opener = MemoryTable(), Opener()
    opener.refusal = StorageIOError("opened")
    changes = await registry_over(table, opener).snapshots.load(CONFIG, dry_run=True)
    assert await table.all() == {}
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
    assert await registry.snapshots.export() == CONFIG


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


@settings(max_examples=examples(100), deadline=None)
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


@settings(max_examples=examples(100), deadline=None)
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
    taken = await registry.snapshots.export()
    assert {entry[:2] for entry in taken.entries()} == {
        entry[:2]
        for part in (config, Configuration(**before))
        for entry in part.entries()  # type: ignore[arg-type]
    }
    assert not [change for change in await registry.snapshots.load(config) if change.action != "keep"]
    assert await (await loaded(taken)).snapshots.export() == taken


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_store_that_fails_at_any_call_has_all_of_a_load_or_nothing(is_late: bool) -> None:
    """Storages that were opened for it are let go of."""
    outcomes, discarded = [], 0
    for calls in range(20):
        table, opener = MemoryTable(), Opener()
        await loaded(replace(without(CONFIG, CONFIG.instances[0], GROUPS[2]), storages=()), table)
        before = await table.all()
        dying = registry_over(DyingTable(table, calls, is_late=is_late), opener)
        try:
            await dying.snapshots.load(replace(CONFIG, groups=(replace(GROUPS[0], user_data="x"), *GROUPS[1:])))
        except StorageIOError:
            outcomes.append(await table.all() == before)
            assert {verb for verb, _ in opener.calls} <= {"discard"}
            discarded = max(discarded, len(opener.calls))
        else:
            break
        if not outcomes[-1]:
            seen = (await registry_over(table).snapshots.export()).groups
            assert [group.user_data for group in seen] == ["x", GROUPS[1].user_data, GROUPS[2].user_data]
    assert (len(outcomes) > 3, discarded) == (True, 3)
    assert outcomes == [True] * (len(outcomes) - is_late) + [False] * is_late


async def test_documents_that_cannot_be_read_refuse_snapshots() -> None:
    table = MemoryTable()
    registry = await loaded(table=table)
    await table.replace("group/odd", None, b"{")
    for call in (registry.snapshots.export(), registry.snapshots.load(CONFIG)):
        with pytest.raises(StorageIOError, match="groups 'odd'"):
            await call


# ── others at the same time ──


@settings(max_examples=examples(60), deadline=None)
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
    seen = await registry_over(table).snapshots.export()
    group = next(each for each in seen.groups if each.name == "a")
    # By hand and then loaded over it, or loaded and the version was out of date.
    assert (group.user_data, group.version) == ("loaded", 3 if results[1] is None else 2)
    assert [each.instance_id for each in seen.instances] == ["i0", "i1", "i2", "i3", "new"]
    await loader.refresh()
    uids = {loader.instances.placement(each.instance_id).uid for each in seen.instances}
    assert len(uids) == len(seen.instances)


async def test_a_configuration_that_never_rests_refuses_the_load() -> None:
    class Busy(MemoryTable):
        """Another writer is always faster."""

        async def replace_together(self, replacements: object) -> bool:
            await self.replace("quota/busy", await self.get("quota/busy"), None)
            return False

    with pytest.raises(NotReadyError, match="nothing was loaded"):
        await registry_over(Busy()).snapshots.load(CONFIG)


# ── Secrets leave the manager with no snapshot ──


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://:{SECRET}@h:1/0?cluster_name=a", f"redis://{HIDDEN}@h:1/0?cluster_name=a"),
        (f"redis://h/?password={SECRET}&cluster_name=a", f"redis://h/?password={HIDDEN}&cluster_name=a"),
        (f"etcd://a:{SECRET}@h1,etcd://b:{SECRET}@h2", f"etcd://{HIDDEN}@h2"),
        (f"redis://u:a/b<{SECRET} c@h", f"redis://{HIDDEN}@h"),
        (f"redis://{SECRET}@h", f"redis://{HIDDEN}@h"),
        (f"root:{SECRET}@tcp(h)/db", f"{HIDDEN}@tcp(h)/db"),
        (f"redis://u:a/{SECRET}/b@h:6379/0", f"redis://{HIDDEN}@h:6379/0"),
        (f"corp/u:{SECRET}@h:6379", f"{HIDDEN}@h:6379"),
        (f"{SECRET}@h:6379", f"{HIDDEN}@h:6379"),
        (f"http://h/?access_key={SECRET}&a=1&api_key={SECRET}", f"http://h/?access_key={HIDDEN}&a=1&api_key={HIDDEN}"),
        ("http://10.0.0.1:8080/metadata", "http://10.0.0.1:8080/metadata"),
        ("P2PHANDSHAKE", "P2PHANDSHAKE"),
    ],
)
def test_addresses_lose_their_logins_and_nothing_else(text: str, shown: str) -> None:
    config = replace(MOONCAKE, spec=MooncakeStorageSpec("h", text, "tcp", "", "m"))
    expected = replace(config, spec=MooncakeStorageSpec("h", shown, "tcp", "", "m"))
    assert redacted(config) == expected == redacted(expected)
    assert SECRET not in str(described(config))


@pytest.mark.parametrize(
    "text",
    [
        f'{{"password": "{SECRET} and more {SECRET}", "owner": "me@example.org"}}',
        f"see redis://u:{SECRET}@h, api-key={SECRET}; Authorization: Bearer {SECRET}",
        f"DB_PASSWD='{SECRET}' token: {SECRET}",
        f"dsn u:{SECRET}@h:5432 then {SECRET}@h:22",
        f"redis://u:{SECRET}/x@h, secret={SECRET}, REDIS_PASS={SECRET} token%3D{SECRET}",
        f'{{"tokens": ["{SECRET}", "{SECRET}"], "secret": {{"a": "{SECRET}"}}, "password": "{SECRET}',
        f'{{\\"password\\": \\"a b {SECRET}\\"}}',
    ],
)
def test_free_texts_lose_values_named_as_secrets(text: str) -> None:
    group = redacted(replace(GROUPS[0], user_data=text))
    assert SECRET not in group.user_data
    assert redacted(group) == group
    deployment = ModelDeployment("m", "bf16", extra=text, user_data=text)
    assert SECRET not in repr(redacted(replace(CONFIG.instances[0], model_deployment=deployment)))


@given(st.text(max_size=60), st.sampled_from(["", "a:b@c", "x://u:p@h", "password=", "token: "]))
def test_leaving_out_twice_is_leaving_out_once(text: str, more: str) -> None:
    group = redacted(replace(GROUPS[0], user_data=text + more + text))
    assert redacted(group) == group
    storage = redacted(replace(MOONCAKE, spec=MooncakeStorageSpec(text + more, more + text, "tcp", "", more)))
    assert redacted(storage) == storage


_IN_LOGIN = st.text("abcXYZ059/:@=&?;,-_.~%", max_size=12)
_IN_VALUE = st.text("abcXYZ059/:@=-_.~%+", max_size=12)
_NAMES = st.sampled_from(["password", "token", "access_key", "secret", "api_key", "apiKey", "DB_PASS", "SecretKey"])


@given(_IN_LOGIN, _IN_LOGIN, st.sampled_from(["redis://u:", "u:", "//u:", "x=etcd://"]), st.booleans())
def test_no_login_is_left_whatever_is_in_it(before: str, after: str, start: str, is_audited: bool) -> None:
    login = f"{start}{before}{SECRET}{after}@h:1"
    text = f"see '{login}' and {login}"
    assert SECRET not in (described(text) if is_audited else redacted_text(text))
    spec = MooncakeStorageSpec(metadata_connstring=login)
    config = replace(MOONCAKE, spec=spec)
    assert SECRET not in (str(described(config)) if is_audited else repr(redacted(config)))


@given(_NAMES, st.sampled_from(["=", ": ", " = ", '":"']), _IN_VALUE, _IN_VALUE, st.sampled_from(["?", "&", " ", "{"]))
def test_no_value_of_a_name_is_left(name: str, sign: str, before: str, after: str, start: str) -> None:
    closing = '"' if sign.endswith('"') else ""
    text = f"a=1{start}{name}{sign}{before}{SECRET}{after}{closing}&b=2 c=3"
    assert SECRET not in redacted_text(text)
    assert redacted_text(text).endswith("&b=2 c=3")
    assert SECRET not in str(described(replace(GROUPS[0], user_data=text)))


def test_audited_text_is_cut_after_secrets_are_left_out() -> None:
    """Its end may be what says that it is a login."""
    text = f"redis://u:{SECRET}{'x' * 2000}@h"
    assert described(text) == described(replace(GROUPS[0], user_data=text))["user_data"] == f"redis://{HIDDEN}@h"


@pytest.mark.parametrize("unit", ["/", "//", "token", "token ", "a:", '"', 'token="', "\\", "token=[", "bearer ", "a-"])
def test_a_text_made_to_be_slow_is_not(unit: str) -> None:
    """With patterns that try again, this would take hours."""
    text = unit * (50_000 // len(unit))
    assert redacted_text(text).startswith(unit[:1])
    assert redacted(replace(MOONCAKE, spec=MooncakeStorageSpec(metadata_connstring=text)))


def test_names_and_paths_are_left_as_they_are() -> None:
    config = StorageConfig("a.b", NfsStorageSpec("/mnt//token=1/u:p@h/"))
    assert redacted(config) == config


# ── secrets ──


async def test_secrets_that_were_left_out_are_those_that_are_configured() -> None:
    config = replace(CONFIG, storages=(MOONCAKE,))
    registry = await loaded(config)
    hidden = redacted(MOONCAKE)
    assert SECRET not in repr(hidden)
    assert await registry.snapshots.load(replace(config, storages=(hidden,))) == []
    limited = replace(hidden, capacity_bytes=9)
    await registry.snapshots.load(replace(config, storages=(limited,)))
    assert registry.storages.all() == [replace(MOONCAKE, capacity_bytes=9)]


async def test_a_secret_that_is_nowhere_refuses_the_load() -> None:
    table = MemoryTable()
    wanted = Configuration(storages=(redacted(MOONCAKE),))
    text = rf"storages\[0\].mooncake.metadata_connstring lacks a secret, {HIDDEN}"
    with pytest.raises(InvalidArgumentError, match=text):
        await refused_without_a_trace(registry_over(table), table, wanted)
    other = replace(MOONCAKE, spec=replace(MOONCAKE.spec, metadata_connstring="etcd://kvcm:x@another"))  # type: ignore[type-var]
    registry = await loaded(Configuration(storages=(other,)), table)
    with pytest.raises(InvalidArgumentError, match=text):
        await refused_without_a_trace(registry, table, wanted)


async def test_a_new_secret_replaces_the_old_one() -> None:
    registry = await loaded(Configuration(storages=(MOONCAKE,)))
    assert isinstance(MOONCAKE.spec, MooncakeStorageSpec)
    other = replace(MOONCAKE, spec=replace(MOONCAKE.spec, metadata_connstring="etcd://kvcm:new@meta:2379"))
    assert acts(await registry.snapshots.load(Configuration(storages=(other,)))) == [("change", "storage", "mc")]
    assert registry.storages.all() == [other]
