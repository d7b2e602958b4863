"""Two registries on one table are two managers: one wins, and both see the same soon."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from registry_rig import GROUP, INSTANCE, Opener, SuspendingTable

from kvcm.model.accounts import AccountRole
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, StorageIOError, UnknownInstanceError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.instances import Placement
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.registry.registry import Registry, kept_cluster_id
from kvcm.registry.storages import StorageDrain
from kvcm.store.memory import MemoryTable

NFS = StorageConfig("nfs", NfsStorageSpec("/r"))
ID = INSTANCE.instance_id


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


async def outcomes(*calls: Awaitable[object]) -> list[str]:
    """Names of the classes of what concurrent calls returned or raised, sorted."""
    return sorted(type(each).__name__ for each in await asyncio.gather(*calls, return_exceptions=True))


Change = Callable[[Registry, int], Awaitable[object]]


@pytest.mark.parametrize(
    "create",
    [
        lambda registry, n: registry.groups.create(replace(GROUP, user_data=str(n))),
        lambda registry, n: registry.storages.add(replace(NFS, spec=NfsStorageSpec(f"/{n}"))),
        lambda registry, n: registry.storages.add_while_serving(replace(NFS, spec=NfsStorageSpec(f"/{n}"))),
        lambda registry, n: registry.accounts.add("ann", str(n), AccountRole.ROLE_USER),
    ],
)
async def test_of_two_who_create_the_same_one_wins(pair: Pair, create: Change) -> None:
    assert await outcomes(create(pair.a, 1), create(pair.b, 2)) == ["DuplicateEntityError", "NoneType"]
    assert len(await pair.table.all()) == 1
    await pair.a.refresh()
    await pair.b.refresh()
    assert len(pair.opened_a.calls) == len(pair.opened_b.calls)  # the winner's storage is open on both
    for one, other in ((pair.a.storages, pair.b.storages), (pair.a.groups, pair.b.groups)):
        assert one.all() == other.all()
    assert pair.a.accounts.all() == pair.b.accounts.all()


async def test_of_two_who_update_from_one_version_one_wins(pair: Pair) -> None:
    await pair.a.groups.create(GROUP)
    updates = [each.groups.update(replace(GROUP, version=2), 1) for each in (pair.a, pair.b)]
    assert await outcomes(*updates) == ["InvalidArgumentError", "NoneType"]


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


async def test_two_registrations_of_one_instance_are_one(grouped: Pair) -> None:
    a, b = grouped.a, grouped.b
    assert await outcomes(a.instances.register(INSTANCE), b.instances.register(INSTANCE)) == ["Instance"] * 2
    assert a.instances.placement(ID) == b.instances.placement(ID)
    assert a.instances.get(ID) == b.instances.get(ID)


async def test_of_two_layouts_of_one_instance_one_wins(grouped: Pair) -> None:
    calls = [each.instances.register(replace(INSTANCE, block_size=n)) for n, each in enumerate(grouped[:2], 1)]
    assert await outcomes(*calls) == ["DuplicateEntityError", "Instance"]


async def test_no_two_registrations_ever_share_a_uid(grouped: Pair) -> None:
    """Also those of one id: what the first one left in the store is not the second one's."""
    a, b = grouped.a, grouped.b
    names = [f"i{n}" for n in range(12)]
    calls = [(a, b)[n % 2].instances.register(replace(INSTANCE, instance_id=name)) for n, name in enumerate(names)]
    await asyncio.gather(*calls)
    await a.refresh()
    uids = {a.instances.placement(name).uid for name in names}
    await b.instances.remove("i0")
    await a.instances.register(replace(INSTANCE, instance_id="i0"))
    assert len(uids | {a.instances.placement("i0").uid}) == 13


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


async def test_an_instance_that_was_registered_anew_is_not_the_one_that_is_removed(grouped: Pair) -> None:
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
    while await grouped.table.get(f"removal/{uid}") is None:  # noqa: ASYNC110 - a table tells nobody
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
    while not await grouped.table.get(f"removal/{a.instances.placement(ID).uid}"):  # noqa: ASYNC110 - tells nobody
        await asyncio.sleep(0)
    await b.instances.remove(ID)
    await b.instances.register(INSTANCE)
    answer.set()
    with pytest.raises(UnknownInstanceError):
        await removal
    assert a.instances.placement(ID) == b.instances.placement(ID)


async def test_of_two_who_remove_an_instance_one_wins(grouped: Pair) -> None:
    a, b = grouped.a, grouped.b
    await a.instances.register(INSTANCE)
    calls = a.instances.remove(ID), b.instances.remove(ID)
    assert await outcomes(*calls) == ["Instance", "UnknownInstanceError"]
    await b.refresh()
    assert len(b.instances.removals()) == 1
    with pytest.raises(UnknownInstanceError):
        b.instances.placement(ID)


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
    for call in (
        registry.storages.add(NFS),
        registry.storages.update(replace(NFS, spec=NfsStorageSpec("/o"))),
        registry.storages.set_enabled("nfs", enabled=False),
        registry.storages.retire("nfs", 9.0),
        registry.groups.create(GROUP),
        registry.groups.update(replace(GROUP, version=2), 1),
        registry.instances.register(INSTANCE),
        registry.instances.remove(ID),
        registry.instances.forget_removal(1),
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
    assert await kept_cluster_id(pair.table, "third") == ids[0]
