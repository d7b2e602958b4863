"""Exports and imports on every kind of store: what goes out comes back, and nothing else is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from io import BytesIO

import pytest
from audit_rig import KINDS, IndexRig, chain, location, opened, record
from hypothesis import given
from hypothesis import strategies as st

from kvcm.cache.archive import (
    ArchiveReader,
    ArchiveWriter,
    Document,
    ExportedPin,
    Exporter,
    Head,
    Importer,
    PinImport,
    Row,
    Rows,
    Trailer,
    decode_exported,
    exported_pins,
)
from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.pins import PinnedLocation
from kvcm.index.backends.backend import Access
from kvcm.index.search_cache import CacheBudget
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.groups import GlobalQuota, MetaIndexerConfig, MetaStorageBackendConfig
from kvcm.model.keys import unmixed_key
from kvcm.model.locations import BlockRecord, LocationStatus, StorageKey
from kvcm.model.principals import AccountRole, Role, new_key
from kvcm.model.storages import DummyStorageSpec, EventReportStorageSpec, StorageConfig, StorageType
from kvcm.registry.api_keys import NewKey
from kvcm.registry.storages import ClosedStorages
from kvcm.store.store import Table

# ── Index archive ──


HEAD = Head("0", "c", "", 1.0)
ONE, TWO = (StorageKey(name, StorageType.ST_DUMMY) for name in ("one", "two"))


@pytest.fixture
async def source(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A deployment with two instances, in memory."""
    async with opened("memory", request) as rig:
        await rig.configure()
        yield rig


@pytest.fixture
async def target(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """An empty deployment in memory."""
    async with opened("memory", request) as rig:
        yield rig


def frames(archive: bytes) -> list[Document | Rows | Trailer]:
    return list(ArchiveReader(BytesIO(archive), "file").frames())


# ── Round trips ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_deployment_moves_from_store_to_store_intact(request: pytest.FixtureRequest, source: IndexRig) -> None:
    """Memory → file → RocksDB → file → Redis → file → Cluster: registry, records, access, usage and families stay."""
    await source.registry.quotas.set(GlobalQuota("q", 1 << 40, 0.7))
    await source.registry.quotas.set(GlobalQuota("of no group", 0))
    await source.registry.storages.update(replace(source.registry.storages.all()[0], capacity_bytes=1 << 41))
    deleting = location("d", LocationStatus.DELETING, deadline=2000.25, session_id="s", storage="two")
    await source.put("i", chain(2500, salt="i-"))
    await source.put("j", {-5: BlockRecord(7, 3, (location("x"), deleting)), 1: record(1), -(2**63): record(9)})
    await source.backend("i").touch({1: 3, 2: 1}, 5000.0)
    await source.backend("i").touch({3: 1}, 6000.0)
    blocks = {name: await source.blocks(name) for name in ("i", "j")}
    async with AsyncExitStack() as stack:
        rig = source
        for kind in KINDS[1:]:
            archive, _ = await rig.exported()
            rig = await stack.enter_async_context(opened(kind, request))
            imported = await rig.imported(archive)
            assert imported.stored == {"i": 2500, "j": 3}, kind
            # Once for each storage of packed blocks: managers on a shared store see its mark before the blocks.
            assert rig.import_pauses == ([2.0, 2.0] if rig.metadata.store.is_shared else []), kind
            assert rig.configured() == source.configured(), kind
            assert {name: await rig.blocks(name) for name in ("i", "j")} == blocks, kind
            assert await rig.usage("i") == {ONE: 25_000}, kind
            assert await rig.usage("j") == {ONE: 30, TWO: 10}, kind
            assert await rig.backend("i").children(17) == [18], kind
            assert await rig.backend("j").due(2001.0, 10) == [-5], kind
            assert (await rig.verified()).findings == [], kind


@pytest.mark.parametrize("kind", ["memory", "rocksdb"])
async def test_a_group_of_a_redis_comes_to_a_store_of_one_manager_and_back(
    request: pytest.FixtureRequest, source: IndexRig, kind: str
) -> None:
    """The import stores `local` for the name of the store; back in Redis, a group that differs only there is equal."""
    async with opened("redis_standalone", request) as there, opened(kind, request) as here:
        await there.configure(instances=("i",))
        named = MetaStorageBackendConfig("redis", "redis://:secret@host/")
        await _change_indexer(there, meta_storage_backend_config=named)
        await there.put("i", chain(5))
        archive, _ = await there.exported()
        imported = await here.imported(archive)
        assert imported.stored == {"i": 5}
        assert imported.adapted == [f"group 'g' names the store 'redis', this one is {kind}: stored as 'local'"]
        assert _indexer(here).meta_storage_backend_config == MetaStorageBackendConfig()
        again = await here.imported(archive)
        assert (again.skipped, again.created, again.adapted) == ({"i": 5}, {}, [])
        back = await there.imported((await here.exported())[0])
        assert (back.skipped, _indexer(there).meta_storage_backend_config) == ({"i": 5}, named)


async def test_lock_shards_that_a_redis_refuses_become_fewer(request: pytest.FixtureRequest, source: IndexRig) -> None:
    await _change_indexer(source, mutex_shard_num=4096)
    archive, _ = await source.exported()
    async with opened("redis_standalone", request) as rig:
        dry = await rig.imported(archive, dry_run=True)
        imported = await rig.imported(archive)
        assert dry.adapted == imported.adapted == ["group 'g' has 4096 lock shards, redis takes 1024"]
        assert _indexer(rig).mutex_shard_num == 1024


def _indexer(rig: IndexRig) -> MetaIndexerConfig:
    return rig.registry.groups.get("g").cache_config.meta_indexer_config


async def _change_indexer(rig: IndexRig, **changes: object) -> None:
    group = rig.registry.groups.get("g")
    indexer = replace(_indexer(rig), **changes)  # type: ignore[arg-type]
    changed = replace(
        group, cache_config=replace(group.cache_config, meta_indexer_config=indexer), version=group.version + 1
    )
    await rig.registry.groups.update(changed, group.version)


async def test_the_archive_of_an_import_is_the_archive_again(source: IndexRig, target: IndexRig) -> None:
    await source.put("i", chain(30))
    archive, _ = await source.exported()
    await target.imported(archive)
    assert (await target.exported())[0] == archive


async def test_pins_stay_behind(source: IndexRig, target: IndexRig) -> None:
    """A mark without its pin would take no budget, and no client could end it."""
    pinned = location("x", deadline=7e9, priority=-3, pinned_until=8e9)
    await source.put("i", {1: BlockRecord(None, 0, (pinned,))})
    await target.imported((await source.exported())[0])
    assert (await target.blocks("i"))[1][0].locations == (pinned._replace(pinned_until=0.0),)


async def test_locations_in_writing_are_left_out(source: IndexRig) -> None:
    writing = location("w", LocationStatus.WRITING, session_id="s", deadline=9e9)
    await source.put("i", {1: BlockRecord(None, 0, (writing,)), 2: BlockRecord(None, 0, (writing, location("x")))})
    archive, exported = await source.exported()
    assert (exported.skipped, exported.records) == (1, {"i": 1, "j": 0})
    assert [frame for frame in frames(archive) if isinstance(frame, Rows)] == [
        Rows("i", [Row(2, BlockRecord(None, 0, (location("x"),)), Access(1000, 0))])
    ]


async def test_accounts_go_along_only_when_asked_for(source: IndexRig, target: IndexRig) -> None:
    await source.registry.accounts.add("root", "secret", AccountRole.ROLE_ADMIN)
    await target.imported((await source.exported())[0])
    assert target.registry.accounts.all() == []
    archive, _ = await source.exported(with_accounts=True)
    assert b"secret" not in archive
    await target.imported(archive)
    await target.registry.refresh()
    assert target.registry.accounts.all() == source.registry.accounts.all() != []


async def test_one_group_goes_out_with_the_storages_that_it_uses(source: IndexRig, target: IndexRig) -> None:
    await source.configure("h", ("k",))
    await source.put("k", {1: record(1, storage="two"), 2: record(2)})
    await source.put("i", chain(5))
    archive, _ = await source.exported("h")
    imported = await target.imported(archive)
    assert imported.created == {"storage": ["one", "two"], "group": ["h"], "instance": ["k"]}
    assert imported.stored == {"k": 2}
    (found, _) = (await target.blocks("k"))[1]
    assert found == record(1, storage="two")  # the uri still leads to the first deployment's directory


async def test_a_group_takes_its_event_report_storages_along(source: IndexRig, target: IndexRig) -> None:
    reports = StorageConfig("reports", EventReportStorageSpec(), report_type=StorageType.ST_EVENT_REPORT_L2)
    await source.registry.storages.add(reports)
    group = source.registry.groups.get("g")
    newer = replace(group, version=group.version + 1, event_report_storage_candidates=("reports",))
    await source.registry.groups.update(newer, group.version)
    imported = await target.imported((await source.exported("g"))[0])
    assert imported.created["storage"] == ["one", "reports"]
    assert target.registry.storages.find("reports") == reports
    assert target.registry.groups.get("g") == newer


async def test_a_storage_that_a_group_does_not_use_stays_behind(source: IndexRig) -> None:
    await source.put("i", chain(3))
    archive, _ = await source.exported("g")
    kinds = [frame.kind for frame in frames(archive) if isinstance(frame, Document)]
    assert kinds == ["storage", "group", "instance", "instance"]


async def test_one_group_of_a_whole_export_is_imported(source: IndexRig, target: IndexRig) -> None:
    await source.configure("h", ("k",))
    await source.put("k", {1: record(1)})
    await source.put("i", chain(5))
    archive, _ = await source.exported()
    imported = await target.imported(archive, "h")
    assert (imported.created["group"], imported.created["instance"], imported.stored) == (["h"], ["k"], {"k": 1})
    with pytest.raises(InvalidArgumentError, match=r"holds no group 'nope', only \['g', 'h'\]"):
        await target.imported(archive, "nope")


# ── What exists ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_import_is_run_again_without_harm(source: IndexRig, target: IndexRig) -> None:
    await source.put("i", chain(3000))
    archive, _ = await source.exported()
    kept = frames(archive)
    importer = Importer(target.registry, target.metadata.new_backend, target.metadata.usage, target.metadata.store)
    for frame in kept[:-2]:  # cut off before the last page
        await importer.load(frame)
    again = await target.imported(archive)
    assert again.created == {}
    assert (again.stored["i"], again.skipped["i"]) == (3000 - 2048, 2048)
    assert await target.blocks("i") == await source.blocks("i")
    assert await target.usage("i") == await source.usage("i")


async def test_a_block_that_exists_is_kept_as_it_is(source: IndexRig, target: IndexRig) -> None:
    await target.configure()
    await target.put("i", {2: record(2, size=500)})
    await source.put("i", chain(3))
    imported = await target.imported((await source.exported())[0])
    assert (imported.stored["i"], imported.skipped["i"]) == (2, 1)
    assert (await target.blocks("i"))[2][0] == record(2, size=500)


async def test_a_different_group_refuses_the_import_before_any_write(source: IndexRig, target: IndexRig) -> None:
    await source.put("i", chain(3))
    archive, _ = await source.exported()
    await target.configure(instances=(), capacity=7)
    before = target.configured()
    with pytest.raises(
        DuplicateEntityError, match=r"group 'g' exists and differs: quota.capacity is 7 here and \d+ in"
    ):
        await target.imported(archive)
    assert target.configured() == before


async def test_a_group_takes_its_global_quota_along_and_no_other(source: IndexRig, target: IndexRig) -> None:
    for name in ("q", "other"):
        await source.registry.quotas.set(GlobalQuota(name, 100))
    await target.registry.quotas.set(GlobalQuota("other", 5))
    everything, _ = await source.exported()
    only, _ = await source.exported("g")
    with pytest.raises(
        DuplicateEntityError, match=r"global quota 'other' exists and differs: capacity_bytes is 5 here"
    ):
        await target.imported(everything)
    await target.imported(only)
    assert target.registry.quotas.all() == [GlobalQuota("other", 5), GlobalQuota("q", 100)]
    await target.registry.quotas.remove("q")
    assert (await target.imported(everything, "g")).created == {"global quota": ["q"], "storage": ["two"]}


async def test_a_different_instance_is_named_with_its_difference(source: IndexRig, target: IndexRig) -> None:
    archive, _ = await source.exported()
    await target.configure(instances=())
    other = replace(source.registry.instances.get("j"), block_size=32)
    await target.registry.instances.register(other)
    with pytest.raises(DuplicateEntityError, match="instance 'j' exists and differs: block_size; nothing is changed"):
        await target.imported(archive)
    assert [each.instance_id for each in target.registry.instances.all()] == ["j"]


async def test_a_switched_off_storage_and_a_newer_version_of_a_group_are_no_difference(
    source: IndexRig, target: IndexRig
) -> None:
    archive, _ = await source.exported()
    await target.configure()
    await target.registry.storages.set_enabled("one", enabled=False)
    await target.registry.groups.update(replace(target.registry.groups.get("g"), version=9), 3)
    assert (await target.imported(archive)).created == {}


async def test_a_dry_run_writes_nothing_and_says_the_same(source: IndexRig, target: IndexRig) -> None:
    await source.put("i", chain(10))
    archive, _ = await source.exported()
    planned = await target.imported(archive, dry_run=True)
    assert target.configured() == []
    done = await target.imported(archive)
    assert (planned.created, planned.stored, planned.skipped) == (done.created, done.stored, done.skipped)
    planned = await target.imported(archive, dry_run=True)
    assert (planned.created, +planned.stored, planned.skipped["i"]) == ({}, {}, 10)


async def test_a_quota_that_is_exceeded_is_reported_and_not_enforced(
    request: pytest.FixtureRequest, source: IndexRig
) -> None:
    async with opened("memory", request) as tight:
        await tight.configure(capacity=50)
        archive, _ = await tight.exported()
        await tight.put("i", chain(10))
        archive, _ = await tight.exported()
    async with opened("memory", request) as rig:
        imported = await rig.imported(archive)
        assert imported.stored["i"] == 10
        assert imported.exceeded == ["group 'g' uses 100 bytes, its quota is 50"]


# ── Damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def small_archive() -> bytes:
    file = BytesIO()
    writer = ArchiveWriter(file, HEAD)
    writer.document(Document("group", b"{}"))
    writer.rows(Rows("i", [Row(1, record(1), Access(1, 2))]))
    writer.finish()
    return file.getvalue()


@given(st.data())
def test_every_cut_and_every_flipped_bit_is_noticed(data: st.DataObject) -> None:
    archive = small_archive()
    at = data.draw(st.integers(0, len(archive) - 1))
    with pytest.raises(InvalidArgumentError, match=r"cut off|is not an export"):
        frames(archive[:at])
    flipped = bytearray(archive)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidArgumentError, match=r"damaged|not an export|version|cut off"):
        frames(bytes(flipped))


def test_a_frame_that_is_missing_or_comes_twice_is_noticed() -> None:
    first, second = BytesIO(), BytesIO()
    for file, times in ((first, 1), (second, 2)):
        writer = ArchiveWriter(file, HEAD)
        for _ in range(times):
            writer.rows(Rows("i", [Row(1, record(1), Access(1, 2))]))
        size = file.tell()
        writer.finish()
        if file is first:
            start = size
    swapped = first.getvalue()[:start] + second.getvalue()[size:]
    with pytest.raises(InvalidArgumentError, match="holds 0 documents and 1 records instead of 0 and 2"):
        frames(swapped)


def test_another_version_is_refused_by_name() -> None:
    archive = bytearray(small_archive())
    archive[7] = 2
    with pytest.raises(InvalidArgumentError, match="file has format version 2, this release reads version 1"):
        frames(bytes(archive))


def test_something_behind_the_end_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="behind its end"):
        frames(small_archive() + b"x")


async def test_blocks_of_an_instance_that_the_export_lacks_are_refused(target: IndexRig) -> None:
    file = BytesIO()
    writer = ArchiveWriter(file, HEAD)
    writer.rows(Rows("i", [Row(1, record(1), Access(1, 2))]))
    writer.finish()
    with pytest.raises(InvalidArgumentError, match="blocks of instance 'i', but not the instance"):
        await target.imported(file.getvalue())


@given(
    st.dictionaries(
        st.integers(-(2**63), 2**63 - 1),
        st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1)),
        max_size=5,
    )
)
def test_rows_come_back_as_they_were_written(blocks: dict[int, tuple[int | None, int, int]]) -> None:
    rows = Rows(
        "i",
        [
            Row(key, BlockRecord(parent, depth, (location("l"),)), Access(at, depth % 4096))
            for key, (parent, depth, at) in blocks.items()
        ],
    )
    file = BytesIO()
    writer = ArchiveWriter(file, HEAD)
    writer.rows(rows)
    writer.finish()
    assert frames(file.getvalue()) == [rows, Trailer(0, len(blocks))]


# ── Imports where a storage was removed a moment ago ──


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_name_that_is_still_kept_from_other_media_refuses_the_whole_import(
    source: IndexRig, target: IndexRig, dry_run: bool
) -> None:
    archive, _ = await source.exported()
    await target.configure(instances=())
    storages = target.registry.storages
    (two,) = storages.existing(["two"])
    await storages.retire("one", 1.0)  # the same medium: would be added
    await storages.update(replace(two, spec=DummyStorageSpec("/elsewhere")))
    await storages.retire("two", 1.0)
    before = target.configured()
    with pytest.raises(NotReadyError, match="storage 'two' is being forgotten"):
        await target.imported(archive, dry_run=dry_run)
    assert target.configured() == before
    assert [drain.name for drain in storages.drains()] == ["one", "two"]


async def test_a_removed_storage_with_its_own_medium_comes_back(source: IndexRig, target: IndexRig) -> None:
    archive, _ = await source.exported()
    await target.configure(instances=())
    await target.registry.storages.retire("two", 1.0)
    imported = await target.imported(archive)
    assert imported.created["storage"] == ["two"]
    assert target.registry.storages.drains() == []


# ── Pin transfer ──


_BYTES = 10  # of a block of the rig
_LIFE = 1000.0


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A deployment with blocks 1 to 9 of instance `i`, whose group may pin five of them."""
    async with opened(request.param, request) as made:
        await made.configure()
        group = made.registry.groups.get("g")
        await made.registry.groups.update(replace(group, pin_budget_bytes=5 * _BYTES, version=4), group.version)
        await made.put("i", chain(9))
        yield made


def _pin(rig: IndexRig, pin_id: str, keys: range, life: float = _LIFE) -> ExportedPin:
    """A pin of blocks that have these keys here."""
    places = tuple(PinnedLocation(unmixed_key(key), f"l{key}", _BYTES) for key in keys)
    return ExportedPin(pin_id, "i", "me", rig.clock.now() + life, places)


def _import(rig: IndexRig) -> PinImport:
    metadata = rig.metadata
    caches = OpenCaches(rig.registry, ClosedStorages(), metadata.new_backend, metadata.usage, CacheBudget())
    return PinImport(rig.registry, caches, metadata.store, rig.clock)


async def _marked(rig: IndexRig) -> list[int]:
    """Blocks that are marked as pinned."""
    return sorted(
        key
        for key, (record, _) in (await rig.blocks("i")).items()
        if any(each.pinned_until for each in record.locations)
    )


async def _there(rig: IndexRig) -> list[ExportedPin]:
    return await exported_pins(rig.metadata.store, rig.registry, rig.clock.now())


async def test_a_pin_holds_the_same_again_and_a_second_import_changes_nothing(rig: IndexRig) -> None:
    pin = _pin(rig, "p", range(1, 4))
    for _ in range(2):
        work = _import(rig)
        await work.restore([pin])
        assert (work.restored, work.rejected) == (["p"], [])
        assert (await _there(rig), await _marked(rig)) == ([pin], [1, 2, 3])
    assert (await rig.verified()).is_clean


async def test_pins_that_expired_or_do_not_fit_or_have_no_blocks_are_left_out(rig: IndexRig) -> None:
    work = _import(rig)
    fits = _pin(rig, "a", range(1, 5))
    await work.restore(
        [_pin(rig, "over", range(5, 7), -1.0), fits, _pin(rig, "large", range(5, 7)), _pin(rig, "gone", range(20, 21))]
    )
    assert work.restored == ["a"]
    assert [sentence.split(" ")[1] for sentence in work.rejected] == ["large", "gone"]
    assert "pin_budget_bytes of group 'g' is 50, 40 bytes are pinned" in work.rejected[0]
    assert (await _there(rig), await _marked(rig)) == ([fits], [1, 2, 3, 4])
    assert (await rig.verified()).is_clean


async def test_of_a_prefix_that_ends_sooner_here_only_that_is_held(rig: IndexRig) -> None:
    work = _import(rig)
    await work.restore([_pin(rig, "p", range(7, 12))])
    assert work.restored == ["p"]
    assert (await _there(rig), await _marked(rig)) == ([_pin(rig, "p", range(7, 10))], [7, 8, 9])


async def test_a_pin_that_was_begun_and_cut_off_is_finished(rig: IndexRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of its steps: the budget, the document, the marks."""
    table = type(rig.metadata.store.table("pins", 16))
    real = table.replace
    for most in range(4):  # changes of documents before the death
        pin, calls = _pin(rig, "p", range(1, 4)), 0

        async def dying(
            self: Table, name: str, old: bytes | None, new: bytes | None, due: float = 0.0, *, most: int = most
        ) -> bool:
            nonlocal calls
            calls += 1
            if calls > most:
                raise StorageIOError("killed")
            return await real(self, name, old, new, due)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(table, "replace", dying)
            try:
                await _import(rig).restore([pin])
            except StorageIOError:
                assert most < 2
        work = _import(rig)
        await work.restore([pin])
        assert (work.restored, await _there(rig), await _marked(rig)) == (["p"], [pin], [1, 2, 3])
        assert (await rig.verified()).is_clean
        for name, key in (("pins", "p"), ("pinbudgets", "g")):
            documents = rig.metadata.store.table(name, 16)
            await documents.replace(key, await documents.get(key), None)


async def test_keys_move_with_accounts_and_stay_with_groups(rig: IndexRig, request: pytest.FixtureRequest) -> None:
    key, secret = await rig.registry.keys.create(NewKey("engine", Role.ROLE_ENGINE, ("g",)))
    assert secret is not None
    await rig.registry.keys.log_in("nobody", Role.ROLE_ADMIN, 3600.0)
    admin = new_key()
    await rig.registry.taken_keys.import_key("admin", admin)
    await rig.registry.keys.revoke(admin.id)
    for with_accounts in (False, True):
        archive, _ = await rig.exported(with_accounts=with_accounts)
        documents = [frame for frame in frames(archive) if isinstance(frame, Document)]
        kinds = Counter(type(decode_exported(each)).__name__ for each in documents)
        expected = (1, 1) if with_accounts else (0, 0)
        assert (kinds["ApiKey"], kinds["ImportedKey"]) == expected, "logins end with the store"
    async with opened("memory", request) as target:
        for _ in range(2):
            imported = await target.imported(archive)
            await target.registry.refresh()
            assert target.registry.keys.authenticate(secret) == key
            assert await target.registry.taken_keys.import_key("admin", admin) is None, "a revoked key stays revoked"
        assert imported.created == {}
    async with opened("memory", request) as part:
        await part.imported(archive, "g")
        assert (part.registry.keys.all(), await part.registry.taken_keys.all()) == ([], [])


async def test_pins_of_an_archive_are_those_of_instances_that_are_wanted(rig: IndexRig) -> None:
    file = BytesIO()
    pins = [_pin(rig, "p", range(1, 3)), replace(_pin(rig, "q", range(1, 2)), instance_id="j")]
    written = await Exporter(rig.registry, rig.metadata.new_backend, ArchiveWriter(file, Head("1", "c", "", 0.0))).run(
        pins=pins
    )
    assert written.pins == 2
    importer = Importer(rig.registry, rig.metadata.new_backend, rig.metadata.usage, rig.metadata.store)
    for frame in ArchiveReader(BytesIO(file.getvalue()), "file").frames():
        await importer.load(frame)
    assert importer.pins == pins
