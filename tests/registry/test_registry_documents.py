"""Documents of the registry: their encoding, the cached view, the schema, the vitals of managers."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from random import Random
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import pytest
from fake_clock import FakeClock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis_servers import Standalone
from registry_rig import GROUP, INSTANCE, SuspendingTable
from thoroughness import examples

from kvcm import __version__
from kvcm.app import Manager
from kvcm.cache.audit_report import Repair
from kvcm.commands.index_tools import IndexTools
from kvcm.components import open_metadata
from kvcm.config import ConfigError, Settings
from kvcm.model.clock import SystemClock
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    GlobalQuota,
    InstanceGroup,
    InstanceOverride,
    PrefixClass,
    ReclaimPolicy,
)
from kvcm.model.instances import Instance, Placement, Registration
from kvcm.model.nodes import Endpoint, GroupTotals, Vitals
from kvcm.model.principals import Account, AccountRole, PasswordHash
from kvcm.model.storages import NfsStorageSpec, StorageConfig, StorageSpec
from kvcm.registry.document_cache import DocumentCache, decode_document, encode_document
from kvcm.registry.instances import ReservedInstances
from kvcm.registry.leadership import VitalsTable
from kvcm.registry.registry import NEWEST_SCHEMA, Registry, Schema, check_schema, ensure_schema, finalize_schema
from kvcm.registry.storages import ClosedStorages
from kvcm.store.memory import MemoryTable
from kvcm.store.store import Table

PLAIN: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=6),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Draw values of a class of the model, all fields at random."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, UnionType):
        return st.one_of(*map(values, get_args(kind)))
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if issubclass(kind, IntEnum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})


VALUES = st.one_of(
    *map(values, (StorageConfig, InstanceGroup, GlobalQuota, Registration, Account, Endpoint, int, str)),
    st.builds(
        ReservedInstances, st.dictionaries(values(int), values(str), max_size=3), values(tuple[Registration, ...])
    ),
)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(value=VALUES)
def test_every_value_reads_back_and_prints_the_same_again(value: Any) -> None:
    document = encode_document(value)
    again = decode_document(type(value), document)
    assert (again, type(again)) == (value, type(value))
    assert encode_document(again) == document


def test_the_values_hold_every_kind_of_storage() -> None:
    """The test above draws from all members of the union, so that none lacks its printed form."""
    for spec in StorageSpec.__args__:
        config = StorageConfig("s", spec(), check_storage_available_when_open=True, is_available=False)
        assert decode_document(StorageConfig, encode_document(config)) == config


def test_documents_have_the_format_that_other_releases_read() -> None:
    assert json.loads(encode_document(StorageConfig("s", NfsStorageSpec("/r é", 8)))) == {
        "version": 1,
        "value": {
            "global_unique_name": "s",
            "spec_type": "NfsStorageSpec",
            "spec": {"root_path": "/r é", "key_count_per_file": 8},
            "check_storage_available_when_open": False,
            "is_available": True,
            "capacity_bytes": 0,
            "used_percentage": 0.0,
        },
    }
    account = Account("ann", AccountRole.ROLE_ADMIN, PasswordHash(b"\x00\xff", b"\x01"))
    assert json.loads(encode_document(account))["value"] == {
        "user_name": "ann",
        "role": 1,
        "password": {"salt": "AP8=", "digest": "AQ=="},
    }
    registration = json.loads(encode_document(Registration(INSTANCE, Placement(7, 16))))["value"]
    assert registration["placement"] == [7, 16]
    assert registration["instance"]["location_spec_infos"][0] == {"name": "tp0", "size": 64, "kind": 0}


class _PlacementBefore(NamedTuple):
    """As releases had it that knew schema 1 only."""

    uid: int
    shard_count: int


@dataclass(frozen=True, slots=True)
class _RegistrationBefore:
    instance: Instance
    placement: _PlacementBefore


@given(values(Instance), st.integers(0, 2**63 - 1), st.integers(1, 64))
@example(INSTANCE, 7, 16)
def test_an_instance_without_runs_has_the_document_that_earlier_releases_wrote(
    instance: Instance, uid: int, shard_count: int
) -> None:
    document = encode_document(Registration(instance, Placement(uid, shard_count)))
    before = _RegistrationBefore(instance, _PlacementBefore(uid, shard_count))
    assert document == b'{"version":1,"value":' + msgspec.json.encode(before) + b"}"
    assert decode_document(_RegistrationBefore, document) == before
    assert decode_document(Registration, document) == Registration(instance, Placement(uid, shard_count, 0))


@pytest.mark.parametrize("tags", [1, 16])
def test_an_earlier_release_refuses_an_instance_with_runs(tags: int) -> None:
    registration = Registration(INSTANCE, Placement(7, 16, tags))
    document = encode_document(registration)
    assert json.loads(document)["version"] == 2
    assert json.loads(document)["value"]["placement"] == [7, 16, tags]
    assert decode_document(Registration, document) == registration
    with pytest.raises(StorageIOError, match="document of version 2, this release reads version 1"):
        decode_document(_RegistrationBefore, document)


def test_a_registration_of_a_later_version_is_refused() -> None:
    document = encode_document(Registration(INSTANCE, Placement(7, 16, 1))).replace(b'"version":2', b'"version":3')
    with pytest.raises(StorageIOError, match="document of version 3, this release reads version 2"):
        decode_document(Registration, document)


def test_reservations_keep_the_tags_of_registrations_under_way() -> None:
    """Another manager completes them, where the first one died."""
    plain, with_runs = (Registration(INSTANCE, Placement(7, 16, tags)) for tags in (0, 4))
    for pending in ((plain,), (with_runs,), (plain, with_runs)):
        reserved = ReservedInstances({1: "a"}, pending)
        assert decode_document(ReservedInstances, encode_document(reserved)) == reserved


@dataclass(frozen=True, slots=True)
class _ReservedBefore:
    held: dict[int, str]
    pending: tuple[_RegistrationBefore, ...]


def test_a_reservation_of_an_instance_without_runs_is_read_by_earlier_releases() -> None:
    """They run beside this one until the schema is finalized."""
    document = encode_document(ReservedInstances({1: "a"}, (Registration(INSTANCE, Placement(7, 16)),)))
    before = _ReservedBefore({1: "a"}, (_RegistrationBefore(INSTANCE, _PlacementBefore(7, 16)),))
    assert decode_document(_ReservedBefore, document) == before
    assert document == b'{"version":1,"value":' + msgspec.json.encode(before) + b"}"


def test_what_an_older_release_did_not_write_has_its_default() -> None:
    storage = (
        b'{"version":1,"value":{"global_unique_name":"s","spec_type":"NfsStorageSpec","spec":{"root_path":"/r"},'
        b'"check_storage_available_when_open":true,"is_available":false}}'
    )
    assert decode_document(StorageConfig, storage) == StorageConfig(
        "s", NfsStorageSpec("/r"), check_storage_available_when_open=True, is_available=False
    )
    assert decode_document(InstanceGroup, b'{"version":1,"value":{"name":"g"}}') == InstanceGroup("g")


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (InstanceGroup, b""),
        (InstanceGroup, b"\xff\xfe"),
        (InstanceGroup, b"[]"),
        (InstanceGroup, b'{"version":1}'),
        (InstanceGroup, b'{"version":1,"value":{}}'),
        (InstanceGroup, b'{"version":1,"value":{"name":5}}'),
        (InstanceGroup, b'{"version":1,"value":{"name":"\xff"}}'),
        (Account, b'{"version":1,"value":{"user_name":"a","role":77,"password":{"salt":"","digest":""}}}'),
        (StorageConfig, b'{"version":1,"value":{"global_unique_name":"s"}}'),
    ],
)
def test_a_damaged_document_is_refused(kind: type[Any], document: bytes) -> None:
    with pytest.raises(StorageIOError, match="damaged"):
        decode_document(kind, document)


def test_an_unknown_storage_spec_is_named() -> None:
    document = encode_document(StorageConfig("s", NfsStorageSpec("/r"))).replace(b"NfsStorageSpec", b"TapeStorageSpec")
    with pytest.raises(StorageIOError, match=r"'TapeStorageSpec'.*NfsStorageSpec"):
        decode_document(StorageConfig, document)


@pytest.mark.parametrize(
    "value",
    [
        replace(GROUP, user_data="\ud800"),
        replace(INSTANCE, instance_id="\udfff"),
        StorageConfig("s", NfsStorageSpec("/\ud800")),
    ],
)
def test_texts_that_are_not_utf8_are_refused(value: InstanceGroup | Instance | StorageConfig) -> None:
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        encode_document(value)


def test_an_account_without_a_password_is_nothing_that_an_older_release_takes_for_one_with() -> None:
    locked = Account("ann", AccountRole.ROLE_ADMIN, None)
    assert json.loads(encode_document(locked))["version"] == 2
    assert decode_document(Account, encode_document(locked)) == locked
    stored = b'{"version":1,"value":{"user_name":"ann","role":1,"password":{"salt":"AAE=","digest":"/w=="}}}'
    assert decode_document(Account, stored) == replace(locked, password=PasswordHash(b"\x00\x01", b"\xff"))
    assert encode_document(decode_document(Account, stored)) == stored


# ── The local view of one kind of documents never goes back in time ──


class Site:
    """A shelf, its slow way to the table, and another manager's fast one."""

    def __init__(self) -> None:
        table = MemoryTable()
        self.way = SuspendingTable(table)
        self.cabinet = DocumentCache(self.way, "n/", int)
        self.other = DocumentCache(table, "n/", int)


@pytest.fixture
def site() -> Site:
    return Site()


async def put(cabinet: DocumentCache[int], value: int | None) -> None:
    await cabinet.change("x", lambda _: value)


async def reached(task: asyncio.Task[object], way: SuspendingTable, call: str) -> None:
    """Wait until a task's call is at the table, its answer held."""
    count = way.asked.count(call)
    while way.asked.count(call) == count:  # noqa: ASYNC110 - in steps, to see each one
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()


@pytest.mark.parametrize("value", [2, None])
async def test_an_old_answer_to_a_read_replaces_no_later_change(site: Site, value: int | None) -> None:
    """Invariant 2."""
    await put(site.cabinet, 1)
    await put(site.other, 3)
    answer = site.way.hold("get")
    read = asyncio.create_task(site.cabinet.read("x"))
    await reached(read, site.way, "get")
    await put(site.cabinet, value)
    answer.set()
    assert await read == value
    assert site.cabinet.get("x") == value


@pytest.mark.parametrize("value", [2, None])
async def test_an_old_answer_to_a_refresh_replaces_no_later_change(site: Site, value: int | None) -> None:
    """Invariant 2."""
    await put(site.cabinet, 1)
    answer = site.way.hold("all")

    async def refresh() -> None:
        with site.cabinet.watching() as changed:
            documents = await site.way.all()
        site.cabinet.refresh_from(documents, changed)

    refreshing = asyncio.create_task(refresh())
    await reached(refreshing, site.way, "all")
    await put(site.cabinet, value)
    answer.set()
    await refreshing
    assert site.cabinet.get("x") == value


async def test_an_old_answer_to_a_change_replaces_no_later_one(site: Site) -> None:
    """Invariant 2: the change was made, another manager went on from it, and that is known here already."""
    answer = site.way.hold("replace")
    change = asyncio.create_task(put(site.cabinet, 1))
    await reached(change, site.way, "replace")
    await put(site.other, 2)
    await site.cabinet.read("x")
    answer.set()
    await change
    assert site.cabinet.get("x") == 2


async def test_a_change_that_lost_decides_again_from_what_the_winner_made(site: Site) -> None:
    seen: list[int | None] = []
    answer = site.way.hold("get")

    def decide(known: int | None) -> int:
        seen.append(known)
        return (known or 0) + 1

    change = asyncio.create_task(site.cabinet.change("x", decide))
    await reached(change, site.way, "get")
    await put(site.other, 10)
    answer.set()
    assert await change == 11
    assert seen == [None, 10]


async def test_what_does_not_change_is_not_written(site: Site) -> None:
    await put(site.cabinet, 1)
    generation = site.cabinet.generation
    await put(site.cabinet, 1)
    assert (site.way.asked.count("replace"), site.cabinet.generation) == (1, generation)


async def test_other_kinds_of_documents_are_not_touched(site: Site) -> None:
    await put(site.cabinet, 1)
    site.cabinet.refresh_from({"n/x": b'{"version":1,"value":1}', "m/x": b"?", "n": b"?", "": b"?"}, set())
    assert site.cabinet.names() == ["x"]


async def test_values_stay_in_the_order_of_their_names() -> None:
    """After every single step, since the order is kept between them."""
    table, generator = MemoryTable(), Random(1)
    cabinet, other = DocumentCache(table, "n/", int), DocumentCache(table, "n/", int)
    known: dict[str, int] = {}
    for _ in range(300):
        name, value = generator.choice("abcdef"), generator.choice([None, 1, 2])
        await generator.choice([cabinet, other]).change(name, lambda _, new=value: new)
        cabinet.refresh_from(await table.all(), ())
        known[name] = value or 0
        known = {name: value for name, value in known.items() if value}
        assert cabinet.names() == sorted(known)
        assert cabinet.all() == [known[name] for name in sorted(known)]


# ── A store of a schema that this release does not know is refused before anything of it is read ──


async def _flushed() -> None:
    pass


def _cabinet(table: Table) -> DocumentCache[Schema]:
    return DocumentCache(table, "meta/", Schema)


@pytest.fixture(params=["rocksdb", "redis"])
def configured(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    ports = {"rpc_port": 0, "http_port": 0, "admin_rpc_port": 0, "admin_http_port": 0}
    if request.param == "rocksdb":
        return Settings(**ports, data_dir=str(tmp_path))
    server: Standalone = request.getfixturevalue("redis_standalone")
    return Settings(**ports, registry_storage_uri=server.uri(f"schema-{secrets.token_hex(8)}"))


async def _put(configured: Settings, schema: Schema) -> None:
    metadata = await open_metadata(configured, SystemClock(), "test")
    try:
        await _cabinet(metadata.store.table("registry")).change("schema", lambda _known: schema)
        await metadata.store.flush()
    finally:
        await metadata.close()


async def test_a_store_keeps_the_release_that_gave_it_its_schema() -> None:
    table = MemoryTable()
    await check_schema(table)
    assert await table.all() == {}, "the check writes nothing"
    await ensure_schema(table, _flushed)
    first = await table.all()
    assert await _cabinet(table).read("schema") == Schema(1, __version__)
    await ensure_schema(table, _flushed)
    assert await table.all() == first


@pytest.mark.parametrize("first", [1, 2])
async def test_a_new_store_has_the_schema_it_is_given(first: int) -> None:
    table = MemoryTable()
    await table.replace("meta/cluster", None, encode_document("c"))  # no document of a deployment
    assert await ensure_schema(table, _flushed, first) == Schema(first, __version__)
    assert await _cabinet(table).read("schema") == Schema(first, __version__)
    for other in (1, 2):
        assert await ensure_schema(table, _flushed, other) == Schema(first, __version__), "it keeps its schema"


async def test_a_store_of_a_release_without_schemas_has_the_first() -> None:
    """What runs beside this release may be the one before."""
    table = MemoryTable()
    await table.replace("group/g", None, encode_document(GROUP))
    assert await ensure_schema(table, _flushed, 2) == Schema(1, __version__)
    await table.replace("group/g", await table.get("group/g"), None)
    assert await ensure_schema(table, _flushed, 2) == Schema(1, __version__), "an empty one, too"


async def test_of_managers_that_start_at_once_one_gives_a_new_store_its_schema() -> None:
    table = SuspendingTable(MemoryTable())
    given_schemas = await asyncio.gather(*(ensure_schema(table, _flushed, first) for first in (2, 1, 2, 1)))
    assert set(given_schemas) == {await _cabinet(table).read("schema")}


async def test_a_schema_is_finalized_once() -> None:
    table, flushes = MemoryTable(), list[Schema | None]()

    async def flush() -> None:
        flushes.append(await _cabinet(table).read("schema"))

    await _cabinet(table).change("schema", lambda _known: Schema(1, "0.9.0"))
    assert await finalize_schema(table, flush) == Schema(1, "0.9.0")
    newest = Schema(NEWEST_SCHEMA, __version__)
    assert flushes[-1] == newest, "it is durable when the call returns"
    assert await finalize_schema(table, flush) == newest
    assert await _cabinet(table).read("schema") == newest
    assert await ensure_schema(table, _flushed) == newest


async def test_a_finalized_store_keeps_the_release_that_finalized_it() -> None:
    table = MemoryTable()
    await _cabinet(table).change("schema", lambda _known: Schema(NEWEST_SCHEMA, "1.0.0"))
    assert await finalize_schema(table, _flushed) == Schema(NEWEST_SCHEMA, "1.0.0")
    assert await _cabinet(table).read("schema") == Schema(NEWEST_SCHEMA, "1.0.0")


async def test_a_schema_that_is_too_new_is_not_finalized() -> None:
    table = MemoryTable()
    await _cabinet(table).change("schema", lambda _known: Schema(NEWEST_SCHEMA + 1, "7.1.0"))
    before = await table.all()
    with pytest.raises(StorageIOError, match=r"run 7\.1\.0"):
        await finalize_schema(table, _flushed)
    assert await table.all() == before


@pytest.mark.parametrize("tags", [0, 1, 16])
async def test_registered_instances_have_the_tags_of_their_registry(tags: int) -> None:
    """Those that are registered already keep theirs."""
    table = MemoryTable()
    before = Registry(ClosedStorages(), table, tags=0)
    await before.groups.create(GROUP)
    await before.instances.register(INSTANCE)
    registry = Registry(ClosedStorages(), table, tags=tags)
    await registry.load()
    await registry.instances.register(replace(INSTANCE, instance_id="new"))
    await registry.instances.register(INSTANCE)
    other = Registry(ClosedStorages(), table, tags=7)
    await other.load()
    for each in (registry, other):
        assert each.instances.placement(INSTANCE.instance_id).tags == 0
        assert each.instances.placement("new").tags == tags


@pytest.mark.parametrize("read_schema", [check_schema, lambda table: ensure_schema(table, _flushed)])
async def test_a_schema_that_is_too_new_names_the_release_to_run(read_schema: object) -> None:
    table = MemoryTable()
    await _cabinet(table).change("schema", lambda _known: Schema(NEWEST_SCHEMA + 1, "7.1.0"))
    before = await table.all()
    with pytest.raises(StorageIOError, match=rf"schema {NEWEST_SCHEMA + 1}, given by release 7\.1\.0.*run 7\.1\.0"):
        await read_schema(table)  # type: ignore[operator]
    assert await table.all() == before


async def test_a_schema_that_cannot_be_read_is_refused() -> None:
    table = MemoryTable()
    await table.replace("meta/schema", None, b"{")
    with pytest.raises(StorageIOError, match="document is damaged"):
        await ensure_schema(table, _flushed)


def test_managers_and_commands_refuse_a_store_of_a_newer_schema(configured: Settings, tmp_path: Path) -> None:
    """And the store keeps its contents."""

    async def serve() -> None:
        async with Manager(configured).running():
            pass

    tools = IndexTools(configured, SystemClock())

    async def export() -> None:
        with (tmp_path / "export").open("wb") as file:
            await tools.export(file, "", with_accounts=False)

    asyncio.run(serve())
    asyncio.run(_put(configured, Schema(NEWEST_SCHEMA + 1, "7.1.0")))
    for attempt in (serve, export, lambda: tools.verify(Repair())):
        with pytest.raises((StorageIOError, ConfigError), match="run 7"):
            asyncio.run(attempt())
    asyncio.run(_put(configured, Schema(NEWEST_SCHEMA, "7.1.0")))
    asyncio.run(serve())


# ── Managers report their state to each other through a table ──


def vitals(node_id: str, requests: int = 1) -> Vitals:
    return Vitals(
        Endpoint(node_id, "h", 1, 2, 3, 4), "1", 1.5, 2.5, "serving", True, {"match": requests}, {"match": 0},
        (0.1,), (1, 2), {"a": GroupTotals(1, 2, 3, 4)}, 0.25, 3, {"a": {"nfs": 5}},
    )  # fmt: skip


async def test_everybody_reads_what_everybody_reports() -> None:
    clock, table = FakeClock(), MemoryTable()
    one, other = VitalsTable(clock, table), VitalsTable(clock, table)
    await one.publish(vitals("m1"))
    await other.publish(vitals("m2"))
    await one.publish(vitals("m1", 7))
    assert await other.all() == await one.all() == {"m1": vitals("m1", 7), "m2": vitals("m2")}


async def test_a_silent_manager_is_not_listed_and_others_remove_it() -> None:
    clock, table = FakeClock(), MemoryTable()
    await VitalsTable(clock, table).publish(vitals("dead"))
    clock.time += 30
    living = VitalsTable(clock, table)
    assert await living.all() == {}
    await living.publish(vitals("m2"))
    assert set(await table.all()) == {"m2"}


async def test_a_manager_takes_over_what_a_run_before_left_and_what_others_removed() -> None:
    clock, table = FakeClock(), MemoryTable()
    await VitalsTable(clock, table).publish(vitals("m1", 9))
    board = VitalsTable(clock, table)
    await board.publish(vitals("m1", 1))
    await table.replace("m1", await table.get("m1"), None)
    await board.publish(vitals("m1", 2))
    assert await board.all() == {"m1": vitals("m1", 2)}


async def test_a_manager_that_leaves_is_forgotten_at_once() -> None:
    clock, table = FakeClock(), MemoryTable()
    board = VitalsTable(clock, table)
    await board.withdraw("m1")
    await board.publish(vitals("m1"))
    await board.withdraw("m1")
    assert await table.all() == {}


async def test_fields_of_later_releases_are_ignored_and_unreadable_entries_expire() -> None:
    clock, table = FakeClock(), MemoryTable()
    board = VitalsTable(clock, table)
    await board.publish(vitals("m1"))
    document = await table.get("m1")
    assert document is not None
    newer = document.replace(b'"phase":', b'"mood":"good","phase":')
    await table.replace("m1", document, newer, due=clock.time + 60)
    await table.replace("m2", None, b"{", due=clock.time + 60)
    await table.replace("m3", None, newer.replace(b'{"version":1', b'{"version":9'), due=clock.time - 1)
    assert await board.all() == {"m1": vitals("m1")}
    await board.publish(replace(vitals("m4"), version="2"))
    assert set(await table.all()) == {"m1", "m2", "m4"}


def _group_with(strategy: CacheReclaimStrategy) -> InstanceGroup:
    return InstanceGroup("g", cache_config=CacheConfig(reclaim_strategy=strategy))


@pytest.mark.parametrize(
    "strategy",
    [
        CacheReclaimStrategy(reclaim_policy=ReclaimPolicy.POLICY_LFU),
        CacheReclaimStrategy(policy=EvictionPolicy("lfu")),
        CacheReclaimStrategy(prefix_classes=(PrefixClass("c", policy=EvictionPolicy("lfu")),)),
        CacheReclaimStrategy(instance_overrides=(InstanceOverride("i", EvictionPolicy("lfu"), 2.0),)),
    ],
)
def test_a_group_of_a_release_whose_lfu_aged_goes_on_ageing(strategy: CacheReclaimStrategy) -> None:
    group = _group_with(strategy)
    document = encode_document(group)
    assert json.loads(document)["version"] == 2  # an older release would age
    assert decode_document(InstanceGroup, document) == group
    old = decode_document(InstanceGroup, document.replace(b'"version":2', b'"version":1'))
    assert old.policy_names == {"lfu_aging" if name == "lfu" else name for name in group.policy_names}
    assert "lfu_aging" in old.policy_names
    assert old.override_of("i").weight == group.override_of("i").weight
    assert old.cache_config.reclaim_strategy.reclaim_policy is strategy.reclaim_policy
    assert decode_document(InstanceGroup, encode_document(old)) == old


def test_a_number_that_a_name_wins_over_is_no_reason_for_another_name() -> None:
    group = _group_with(CacheReclaimStrategy(reclaim_policy=ReclaimPolicy.POLICY_LFU, policy=EvictionPolicy("lru")))
    document = encode_document(group)
    assert json.loads(document)["version"] == 1
    assert decode_document(InstanceGroup, document) == group
