"""What operators configure, of one manager and of several over one table."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from registry_rig import GROUP, INSTANCE, Opener, SuspendingTable

from kvcm.model.errors import (
    DuplicateEntityError,
    InvalidArgumentError,
    NotReadyError,
    StorageIOError,
    UnknownInstanceError,
)
from kvcm.model.groups import GlobalQuota, MetaIndexerConfig
from kvcm.model.instances import LocationSpecGroup, Placement, QueryType
from kvcm.model.principals import AccountRole
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.registry.document_cache import decode_document, encode_document
from kvcm.registry.registry import Registry, ensure_cluster_id
from kvcm.registry.storages import StorageDrain
from kvcm.store.memory import MemoryTable

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


async def test_an_update_cannot_change_the_type(registry: Registry, opener: Opener) -> None:
    """Blocks of the old type would be served with addresses of a storage that is not there any more."""
    await registry.storages.add(NFS)
    with pytest.raises(InvalidArgumentError, match=r"file.*dummy.*remove it and add it again"):
        await registry.storages.update(replace(NFS, spec=DummyStorageSpec()))
    assert registry.storages.all() == [NFS]
    assert opener.calls == [("open", "nfs")]


async def test_a_storage_that_does_not_open_is_not_stored(registry: Registry, opener: Opener) -> None:
    opener.refusal = StorageIOError("no such mount")
    with pytest.raises(StorageIOError):
        await registry.storages.add(NFS)
    assert registry.storages.all() == []
    opener.refusal = None
    await registry.storages.add(NFS)
    opener.refusal = StorageIOError("no such mount")
    with pytest.raises(StorageIOError):
        await registry.storages.update(replace(NFS, spec=NfsStorageSpec("/other")))
    assert registry.storages.all() == [NFS]


@pytest.mark.parametrize("config", [StorageConfig("", DummyStorageSpec()), StorageConfig("nfs", NfsStorageSpec(""))])
async def test_malformed_storages_are_not_opened(registry: Registry, opener: Opener, config: StorageConfig) -> None:
    for call in (registry.storages.add, registry.storages.update):
        with pytest.raises(InvalidArgumentError):
            await call(config)
    assert opener.calls == []


async def test_storages_are_added_and_updated_while_serving(registry: Registry, opener: Opener) -> None:
    await registry.storages.add_in_background(NFS)
    await registry.storages.set_enabled("nfs", enabled=False)
    await registry.storages.update_in_background(replace(NFS, spec=NfsStorageSpec("/other")))
    assert registry.storages.all() == [replace(NFS, spec=NfsStorageSpec("/other"), is_available=False)]
    assert opener.calls == [("open", "nfs"), ("disable", "nfs"), ("open", "nfs")]
    opener.refusal = StorageIOError("no such mount")
    with pytest.raises(StorageIOError):
        await registry.storages.update_in_background(NFS)
    with pytest.raises(DuplicateEntityError):
        await registry.storages.add_in_background(NFS)
    assert registry.storages.all()[0].spec == NfsStorageSpec("/other")


async def test_a_storage_removed_during_its_update_stays_removed(registry: Registry, opener: Opener) -> None:
    await registry.storages.add(NFS)
    update = asyncio.create_task(registry.storages.update_in_background(replace(NFS, spec=NfsStorageSpec("/other"))))
    await asyncio.sleep(0)
    await registry.storages.retire("nfs", 9.0)
    with pytest.raises(InvalidArgumentError, match="'nfs' does not exist"):
        await update
    assert registry.storages.all() == []
    assert opener.calls == [("open", "nfs"), ("close", "nfs")]


# Groups.


@pytest.mark.parametrize(
    ("current", "new", "named"),
    [(0, 2, "current_version is 0, stored is 1"), (2, 3, "stored is 1"), (1, 1, "must be above 1"), (1, 0, "above 1")],
)
async def test_an_update_must_fit_the_stored_version(registry: Registry, current: int, new: int, named: str) -> None:
    await registry.groups.create(GROUP)
    with pytest.raises(InvalidArgumentError, match=named):
        await registry.groups.update(replace(GROUP, version=new), current)
    assert registry.groups.get("group") is GROUP


async def test_a_malformed_update_changes_nothing(registry: Registry) -> None:
    await registry.groups.create(GROUP)
    with pytest.raises(InvalidArgumentError):
        await registry.groups.update(replace(GROUP, storage_candidates=(), version=2), 1)
    assert registry.groups.get("group") is GROUP


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


async def test_a_different_layout_is_refused_with_the_field(with_group: Registry) -> None:
    stored = await with_group.instances.register(INSTANCE)
    with pytest.raises(DuplicateEntityError, match="another block_size: registered is 16, this registration has 32;"):
        await with_group.instances.register(replace(INSTANCE, block_size=32))
    again = replace(INSTANCE, default_query_type=QueryType.QT_PREFIX_MATCH)
    with pytest.raises(DuplicateEntityError, match="default_query_type: registered is 'QT_UNSPECIFIED', this reg"):
        await with_group.instances.register(again)
    eagle = replace(INSTANCE, model_deployment=replace(INSTANCE.model_deployment, use_eagle_pop=True))
    with pytest.raises(DuplicateEntityError, match=r"another model_deployment\.use_eagle_pop: registered is False"):
        await with_group.instances.register(eagle)
    assert with_group.instances.get(INSTANCE.instance_id) is stored


# Accounts.


@pytest.mark.parametrize(
    ("name", "password", "named"), [("", "p", "user_name"), ("a\n", "p", "user_name"), ("a", "", "password")]
)
async def test_malformed_accounts_are_refused(registry: Registry, name: str, password: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        await registry.accounts.add(name, password, AccountRole.ROLE_USER)
    assert registry.accounts.all() == []


async def test_an_unknown_account_is_named(registry: Registry) -> None:
    with pytest.raises(InvalidArgumentError, match="'x' does not exist"):
        await registry.accounts.remove("x")


# ── Storages that are drained or removed, as the registry keeps them ──


class Pair(NamedTuple):
    """Two managers, what they opened, and their ways to the table."""

    a: Registry
    b: Registry
    opened_a: Opener
    opened_b: Opener
    way_a: SuspendingTable
    way_b: SuspendingTable
    table: MemoryTable


@pytest.fixture
def pair() -> Pair:
    table = MemoryTable()
    ways = SuspendingTable(table), SuspendingTable(table)
    openers = Opener(), Opener()
    return Pair(Registry(openers[0], ways[0]), Registry(openers[1], ways[1]), *openers, *ways, table)


MOVED = replace(NFS, spec=NfsStorageSpec("/elsewhere"))


@pytest.fixture
async def leaving(pair: Pair) -> Pair:
    """Two managers that know one storage."""
    await pair.a.storages.add(NFS)
    await pair.b.refresh()
    return pair


async def test_every_manager_sees_a_drain_and_can_end_it(leaving: Pair) -> None:
    await leaving.a.storages.drain("nfs", 7.0)
    await leaving.a.storages.drain("nfs", 8.0)
    await leaving.b.refresh()
    assert leaving.b.storages.drains() == [StorageDrain("nfs", 7.0, is_removal=False)]
    await leaving.b.storages.cancel_drain("nfs")
    await leaving.a.refresh()
    assert leaving.a.storages.drains() == []
    assert leaving.opened_b.calls == [("open", "nfs"), ("drain", "nfs"), ("fill", "nfs")]


async def test_no_other_change_ends_a_drain(leaving: Pair) -> None:
    storages = leaving.a.storages
    await storages.drain("nfs", 7.0)
    await storages.update(MOVED)
    await storages.update_in_background(replace(MOVED, capacity_bytes=5))
    await storages.set_enabled("nfs", enabled=False)
    assert storages.drains() == [StorageDrain("nfs", 7.0, is_removal=False)]
    assert storages.all() == [replace(MOVED, capacity_bytes=5, is_available=False, draining_since=7.0)]


async def test_a_removed_storage_is_visible_only_as_a_drain(leaving: Pair) -> None:
    storages = leaving.a.storages
    await storages.drain("nfs", 7.0)
    await storages.retire("nfs", 9.0)
    await leaving.b.refresh()
    for view in (storages, leaving.b.storages):
        assert (view.all(), view.existing(["nfs"]), view.is_configured("nfs")) == ([], [], False)
        assert view.drains() == [StorageDrain("nfs", 9.0, is_removal=True)]
    assert leaving.opened_b.state() == {}
    for call in (storages.retire("nfs", 9.0), storages.drain("nfs", 9.0)):
        with pytest.raises(InvalidArgumentError, match="does not exist"):
            await call
    for call in (storages.cancel_drain("nfs"), storages.set_enabled("nfs", enabled=True), storages.update(NFS)):
        with pytest.raises(InvalidArgumentError, match="does not exist"):
            await call


@pytest.mark.parametrize("spec", [NfsStorageSpec("/elsewhere"), NfsStorageSpec("/r", 4), DummyStorageSpec("/r")])
async def test_a_name_that_is_not_free_goes_to_no_other_medium(leaving: Pair, spec: NfsStorageSpec) -> None:
    await leaving.a.storages.retire("nfs", 9.0)
    for add in (leaving.a.storages.add, leaving.b.storages.add_in_background):  # the second one has not refreshed
        with pytest.raises(NotReadyError, match="storage 'nfs' is being forgotten"):
            await add(replace(NFS, spec=spec))
    await leaving.b.storages.add(NFS)
    with pytest.raises(DuplicateEntityError):
        await leaving.a.storages.add(NFS)
    assert (leaving.a.storages.drains(), leaving.a.storages.all()) == ([], [NFS])


async def test_only_the_removal_that_is_over_is_forgotten(leaving: Pair) -> None:
    storages = leaving.a.storages
    await storages.retire("nfs", 9.0)
    (first,) = storages.drains()
    await storages.add(NFS)
    await storages.forget(first)
    await storages.forget(StorageDrain("nfs", 0.0, is_removal=False))
    assert storages.all() == [NFS]
    await storages.retire("nfs", 10.0)
    await storages.forget(first)
    (second,) = storages.drains()
    assert second.started_at == 10.0
    await storages.forget(second)
    await storages.forget(second)
    assert storages.drains() == []
    await storages.add(MOVED)


def test_a_release_that_knows_no_drains_does_not_take_such_a_storage_for_any_other() -> None:
    for leaving in (replace(NFS, draining_since=7.5), replace(NFS, removed_at=9.5)):
        document = encode_document(leaving)
        assert json.loads(document)["version"] == 2
        assert decode_document(StorageConfig, document) == leaving
    assert json.loads(encode_document(NFS))["version"] == 1
    with pytest.raises(StorageIOError, match=r"version 3.*reads version 2"):
        decode_document(StorageConfig, encode_document(NFS).replace(b'"version":1', b'"version":3'))
    with pytest.raises(StorageIOError, match=r"version 2.*reads version 1"):
        decode_document(GlobalQuota, b'{"version":2,"value":{"name":"g","capacity_bytes":1}}')


# ── Media that hang while they are opened ──


PROGRAM = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.store.memory import MemoryTable

HEALTHY = StorageConfig("here", DummyStorageSpec("/here"))
HANGING = StorageConfig("here", DummyStorageSpec("/hangs"))
hangs, begun, table = threading.Event(), threading.Semaphore(0), MemoryTable()

def open_or_hang(config, cluster_id):
    if config.spec.root_path == "/hangs":
        begun.release()
        hangs.wait()
    return DummyStorage.open(config, cluster_id)

def registry(opener):
    return Registry(StorageDirectory("c", openers={StorageType.ST_DUMMY: opener}), table)

async def check():
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    storages = registry(open_or_hang).storages
    await storages.add_in_background(HEALTHY)
    await registry(DummyStorage.open).storages.add(replace(HANGING, global_unique_name="away"))
    waiting = [
        asyncio.create_task(storages.update_in_background(HANGING)),
        asyncio.create_task(storages.add_in_background(replace(HANGING, global_unique_name="new"))),
        asyncio.create_task(registry(open_or_hang).refresh()),
    ]
    for _ in waiting:
        while not begun.acquire(blocking=False):
            await asyncio.sleep(0.01)
    await asyncio.to_thread(int)
    corrected = replace(HANGING, spec=DummyStorageSpec("/corrected"))
    await storages.update_in_background(corrected)
    assert storages.existing(["here"]) == [corrected]

async def main():
    async with asyncio.timeout(60):
        await check()

asyncio.run(main())
"""


def test_media_that_hang_hold_up_neither_the_manager_nor_its_end() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=90)


# ── Two registries on one table are two managers ──


ID = INSTANCE.instance_id


async def outcomes(*calls: Awaitable[object]) -> list[str]:
    """Names of the classes of what concurrent calls returned or raised, sorted."""
    return sorted(type(each).__name__ for each in await asyncio.gather(*calls, return_exceptions=True))


Change = Callable[[Registry, int], Awaitable[object]]


@pytest.mark.parametrize(
    "create",
    [
        lambda registry, n: registry.storages.add_in_background(replace(NFS, spec=NfsStorageSpec(f"/{n}"))),
        lambda registry, n: registry.accounts.add("ann", str(n), AccountRole.ROLE_USER),
    ],
)
async def test_of_two_managers_that_create_the_same_entity_one_wins(pair: Pair, create: Change) -> None:
    assert await outcomes(create(pair.a, 1), create(pair.b, 2)) == ["DuplicateEntityError", "NoneType"]
    assert len(await pair.table.all()) == 1
    await pair.a.refresh()
    await pair.b.refresh()
    assert len(pair.opened_a.calls) == len(pair.opened_b.calls)  # the winner's storage is open on both
    for one, other in ((pair.a.storages, pair.b.storages), (pair.a.groups, pair.b.groups)):
        assert one.all() == other.all()
    assert pair.a.accounts.all() == pair.b.accounts.all()


async def test_changes_begin_with_what_the_store_holds_not_with_the_view(pair: Pair) -> None:
    """No refresh happens here: each change reads what the other manager made a moment ago."""
    a, b = pair.a, pair.b
    await a.groups.create(GROUP)
    with pytest.raises(DuplicateEntityError):
        await b.groups.create(GROUP)
    await b.groups.update(replace(GROUP, version=2), 1)
    await a.groups.remove(GROUP.name)
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        await b.groups.update(replace(GROUP, version=3), 2)
    await b.groups.create(GROUP)
    assert await a.groups.read(GROUP.name) == GROUP
    await a.storages.add(NFS)
    await b.storages.set_enabled("nfs", enabled=False)
    await a.storages.update(replace(NFS, spec=NfsStorageSpec("/other")))
    assert a.storages.all() == [replace(NFS, spec=NfsStorageSpec("/other"), is_available=False)]


# Registrations.


@pytest.fixture
async def grouped(pair: Pair) -> Pair:
    await pair.a.groups.create(GROUP)
    return pair


@pytest.mark.parametrize(("configured", "shards"), [(0, 16), (64, 64)])
async def test_a_placement_never_changes(pair: Pair, configured: int, shards: int) -> None:
    config = replace(GROUP.cache_config, meta_indexer_config=MetaIndexerConfig(mutex_shard_num=configured))
    await pair.a.groups.create(replace(GROUP, cache_config=config))
    await pair.a.instances.register(INSTANCE)
    placement = pair.a.instances.placement(ID)
    assert placement == Placement(placement.uid, shards)
    other = replace(config, meta_indexer_config=MetaIndexerConfig(mutex_shard_num=2))
    await pair.a.groups.update(replace(GROUP, cache_config=other, version=2), 1)
    await pair.b.instances.register(INSTANCE)
    assert pair.b.instances.placement(ID) == placement


# Removals.


async def test_a_removal_is_remembered_until_it_is_forgotten(grouped: Pair) -> None:
    a, b = grouped.a, grouped.b
    await a.instances.register(INSTANCE)
    placement = a.instances.placement(ID)
    assert a.instances.removals() == []
    removed = await a.instances.remove(ID)
    await a.instances.register(INSTANCE)  # a registration of its own
    await b.refresh()
    for each in (a, b):
        assert [(r.instance, r.placement) for r in each.instances.removals()] == [(removed, placement)]
    await b.instances.forget_removal(placement.uid)
    await b.instances.forget_removal(placement.uid)
    await a.refresh()
    assert (a.instances.removals(), b.instances.removals()) == ([], [])
    assert a.instances.placement(ID) != placement


async def test_an_instance_that_was_registered_again_is_not_the_one_that_is_removed(grouped: Pair) -> None:
    a, b = grouped.a, grouped.b
    await a.instances.register(INSTANCE)
    meant = a.instances.placement(ID).uid
    await b.instances.remove(ID)
    await b.instances.register(INSTANCE)
    with pytest.raises(UnknownInstanceError):
        await a.instances.remove(ID, meant)
    assert b.instances.placement(ID).uid != meant
    await a.instances.remove(ID, b.instances.placement(ID).uid)


async def test_a_removal_that_stopped_half_way_removes_nothing_and_can_be_repeated(grouped: Pair) -> None:
    """The manager dies between its two steps: the instance was not reported as removed, so it stays."""
    a, b = grouped.a, grouped.b
    await a.instances.register(INSTANCE)
    uid = a.instances.placement(ID).uid
    removal = asyncio.create_task(a.instances.remove(ID))
    while await grouped.table.get(f"removal/{uid}") is None:  # noqa: ASYNC110 - a table has no events
        await asyncio.sleep(0)
    removal.cancel()
    await asyncio.gather(removal, return_exceptions=True)
    await b.refresh()
    assert b.instances.get(ID) == a.instances.get(ID)
    assert b.instances.removals() == []
    await b.instances.remove(ID)
    assert [each.placement.uid for each in b.instances.removals()] == [uid]


async def test_a_slow_removal_does_not_hit_the_next_registration(grouped: Pair) -> None:
    a, b = grouped.a, grouped.b
    await a.instances.register(INSTANCE)
    answer = grouped.way_a.hold("replace")
    removal = asyncio.create_task(a.instances.remove(ID))
    while not await grouped.table.get(f"removal/{a.instances.placement(ID).uid}"):  # noqa: ASYNC110 - has no events
        await asyncio.sleep(0)
    await b.instances.remove(ID)
    await b.instances.register(INSTANCE)
    answer.set()
    with pytest.raises(UnknownInstanceError):
        await removal
    assert a.instances.placement(ID) == b.instances.placement(ID)


# Refreshes.


async def test_a_refresh_brings_everything(pair: Pair) -> None:
    a, b = pair.a, pair.b
    await a.storages.add(NFS)
    await a.groups.create(GROUP)
    await a.instances.register(INSTANCE)
    await a.accounts.add("ann", "p", AccountRole.ROLE_ADMIN)
    assert await b.refresh()
    assert b.storages.all() == [NFS]
    assert b.groups.all() == [GROUP]
    assert b.instances.all() == a.instances.all()
    assert b.accounts.all() == a.accounts.all()
    assert not await b.refresh()
    for removal in (
        a.storages.retire("nfs", 9.0),
        a.groups.remove(GROUP.name),
        a.instances.remove(ID),
        a.accounts.remove("ann"),
    ):
        await removal
    assert await b.refresh()
    assert [each.all() for each in (b.storages, b.groups, b.instances, b.accounts)] == [[], [], [], []]


async def test_a_refresh_opens_switches_and_closes_storages(pair: Pair) -> None:
    a, b, opener = pair.a, pair.b, pair.opened_b
    await a.storages.add(NFS)
    await a.storages.set_enabled("nfs", enabled=False)
    await b.refresh()
    await a.storages.set_enabled("nfs", enabled=True)
    await b.refresh()
    await a.storages.update(replace(NFS, spec=NfsStorageSpec("/other")))
    await b.refresh()
    await b.refresh()
    assert opener.calls == [("open", "nfs"), ("enable", "nfs"), ("open", "nfs")]
    await a.storages.retire("nfs", 7.0)
    await a.storages.forget(StorageDrain("nfs", 7.0, is_removal=True))
    await a.storages.add(replace(NFS, spec=DummyStorageSpec()))
    await b.refresh()
    assert opener.calls[3:] == [("close", "nfs"), ("open", "nfs")]
    await a.storages.retire("nfs", 9.0)
    await b.refresh()
    assert opener.calls[5:] == [("close", "nfs")]


async def test_a_storage_that_does_not_open_here_is_tried_again_less_and_less_often(pair: Pair) -> None:
    a, b, opener = pair.a, pair.b, pair.opened_b
    await a.storages.add(NFS)
    opener.refusal = StorageIOError("no such mount")
    await b.load()
    assert (b.storages.all(), opener.calls) == ([NFS], [])
    assert [b.storages.is_configured(name) for name in ("nfs", "never-was")] == [True, False]
    for _ in range(30):
        await b.refresh()
    assert opener.refused == 5  # in rounds 1, 3, 7, 15 and 31
    await b.storages.set_enabled("nfs", enabled=False)
    opener.refusal = None
    await a.storages.update(replace(NFS, spec=NfsStorageSpec("/mounted")))
    await b.refresh()
    assert opener.calls == [("open", "nfs")]


async def test_a_medium_that_hangs_holds_up_no_refresh(pair: Pair) -> None:
    a, b, opener = pair.a, pair.b, pair.opened_b
    opener.gate = threading.Event()
    try:
        await a.storages.add(NFS)
        await b.refresh()
        assert opener.calls == []
        await a.groups.create(GROUP)
        await b.refresh()
        assert b.groups.all() == [GROUP]
    finally:
        opener.gate.set()
    while not opener.calls:  # noqa: ASYNC110 - it is opened in a thread
        await asyncio.sleep(0)
    assert opener.calls == [("open", "nfs")]
    await b.refresh()
    assert opener.calls == [("open", "nfs")]


async def test_a_medium_that_opens_too_late_is_not_installed(pair: Pair) -> None:
    a, b, opener = pair.a, pair.b, pair.opened_b
    hanging = opener.gate = threading.Event()
    try:
        await a.storages.add(NFS)
        await b.refresh()
        opener.gate = None
        await a.storages.update(replace(NFS, spec=NfsStorageSpec("/other")))
        await b.refresh()
        assert opener.state() == {"nfs": ("/other", True)}
    finally:
        hanging.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert opener.calls == [("open", "nfs")]


async def test_a_refresh_asks_for_documents_only_when_something_changed(pair: Pair) -> None:
    await pair.a.groups.create(GROUP)
    await pair.b.refresh()
    before = len(pair.way_b.asked)
    for _ in range(3):
        assert not await pair.b.refresh()
    assert pair.way_b.asked[before:] == ["version"] * 3


async def test_an_unreadable_document_hides_no_other_and_ends_nothing(pair: Pair) -> None:
    a, b = pair.a, pair.b
    for name in ("a", "b"):
        await a.groups.create(replace(GROUP, name=name))
    await b.refresh()
    known = await pair.table.get("group/a")
    await pair.table.replace("group/a", known, b'{"version":99,"value":{}}')
    await pair.table.replace("group/c", None, b"damaged")
    await a.groups.update(replace(GROUP, name="b", version=2), 1)
    await b.refresh()
    assert [(group.name, group.version) for group in b.groups.all()] == [("a", 1), ("b", 2)]
    with pytest.raises(StorageIOError, match="version 99"):
        await b.groups.remove("a")
    with pytest.raises(StorageIOError, match="damaged"):
        await b.groups.create(replace(GROUP, name="c"))


async def test_a_change_whose_answer_is_lost_is_found_by_the_next_refresh(pair: Pair) -> None:
    pair.way_a.lost_answer = StorageIOError("connection lost")
    with pytest.raises(StorageIOError):
        await pair.a.groups.create(GROUP)
    pair.way_a.lost_answer = None
    assert await pair.a.refresh()
    assert pair.a.groups.all() == [GROUP]


async def test_nothing_changes_while_the_store_is_away(pair: Pair) -> None:
    await pair.a.groups.create(GROUP)
    pair.way_a.outage = StorageIOError("refused")
    for call in (
        pair.a.groups.create(replace(GROUP, name="other")),
        pair.a.groups.remove(GROUP.name),
        pair.a.instances.register(INSTANCE),
        pair.a.refresh(),
        pair.a.cluster_id("c"),
    ):
        with pytest.raises(StorageIOError):
            await call
    assert pair.a.groups.all() == [GROUP]


async def test_a_change_is_answered_when_it_is_durable() -> None:
    flushed: list[int] = []
    table = MemoryTable()

    async def flush() -> None:
        flushed.append(await table.version())

    registry = Registry(Opener(), table, flush)

    async def forget_removal() -> None:
        (removal,) = registry.instances.removals()
        await registry.instances.forget_removal(removal.placement.uid)

    for call in (
        registry.storages.add(NFS),
        registry.storages.update(replace(NFS, spec=NfsStorageSpec("/o"))),
        registry.storages.set_enabled("nfs", enabled=False),
        registry.storages.retire("nfs", 9.0),
        registry.groups.create(GROUP),
        registry.groups.update(replace(GROUP, version=2), 1),
        registry.instances.register(INSTANCE),
        registry.instances.remove(ID),
        forget_removal(),
        registry.groups.remove(GROUP.name),
        registry.accounts.add("ann", "p", AccountRole.ROLE_USER),
        registry.accounts.remove("ann"),
        registry.cluster_id("c"),
    ):
        before = await table.version()
        await call
        assert flushed[-1] == await table.version() > before


async def test_the_cluster_id_is_kept_once(pair: Pair) -> None:
    ids = await asyncio.gather(pair.a.cluster_id("first"), pair.b.cluster_id("second"))
    assert ids in (["first"] * 2, ["second"] * 2)
    assert await ensure_cluster_id(pair.table, "third") == ids[0]
