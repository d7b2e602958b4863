"""Verification of stores of every kind: findings, their order, repairs, and recounts of usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import pytest
from audit_rig import KINDS, SHARDS, IndexRig, chain, location, opened, record
from cache_rig import Rig, group, instance
from hypothesis import given
from hypothesis import strategies as st
from redis_servers import Standalone

from kvcm.cache import audit
from kvcm.cache.audit import DocumentAudit, ExtentPart, Owner, part_count
from kvcm.cache.audit_report import AuditReport, Repair
from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.pins import Pin, PinnedLocation, PinnedLocations
from kvcm.cache.quotas import Limits, Reservation, SharedLedger
from kvcm.cache.read_leases import ReadLease
from kvcm.cache.usage_recount import UsageRecount
from kvcm.cache.write_sessions import WriteSession
from kvcm.index.backends.backend import Access, Sum
from kvcm.index.backends.redis_audit import LostRuns
from kvcm.index.backends.redis_runs import TagKeys
from kvcm.index.backends.redis_runs_audit import RunsAudit
from kvcm.index.backends.rocks import audit_rows, drop_rows
from kvcm.index.codec import encode_payload
from kvcm.index.locking import shards_of
from kvcm.index.meta_index import MetaIndex
from kvcm.index.run_codec import decode_runs
from kvcm.index.search_cache import CacheBudget
from kvcm.model.clock import SystemClock
from kvcm.model.instances import Placement
from kvcm.model.keys import NO_MASK, pack_keys, unmixed_key
from kvcm.model.locations import BlockRecord, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.registry.registry import Registry
from kvcm.registry.storages import ClosedStorages
from kvcm.store.memory import MemoryTable
from kvcm.store.rocks import RocksStore

# ── Index audit ──


ONE, TWO = (StorageKey(name, StorageType.ST_DUMMY) for name in ("one", "two"))
SHARED = KINDS[2:]
NOW = 1_000_000.0  # what the clock of the rig says


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A sound deployment on every kind of store."""
    async with opened(request.param, request) as made:
        await _fill(made)
        yield made


@pytest.fixture
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A sound deployment on Redis."""
    async with opened("redis_standalone", request) as made:
        await _fill(made)
        yield made


async def _fill(rig: IndexRig) -> None:
    await rig.configure()
    deleting = location("gone", LocationStatus.DELETING, storage="two", deadline=NOW + 5)
    both = BlockRecord(99, 4, (location("x"), deleting))
    going = location("going", LocationStatus.DELETING, deadline=NOW + 5)
    await rig.put("i", {**chain(1500, salt="i-"), -7: both, -8: BlockRecord(None, 0, (going,))})
    await rig.put("j", chain(20, salt="j-"))
    await rig.backend("i").touch({1: 3}, 5000.0)
    await _write(rig, "i", 5000, "open", deadline=NOW + 30)


async def _write(rig: IndexRig, instance_id: str, key: int, session_id: str, deadline: float) -> None:
    """Leave a block as a start leaves it."""
    uid = rig.registry.instances.placement(instance_id).uid
    session = WriteSession(session_id, uid, deadline, f"w{key}", (key,))
    await rig.metadata.store.table("sessions", 16).replace(session_id, None, session.encoded(), deadline)
    writing = location(f"w{key}", LocationStatus.WRITING, session_id=session_id, deadline=deadline)
    await rig.put(instance_id, {key: BlockRecord(None, 0, (writing,))})


async def _mended(rig: IndexRig, **options: bool) -> AuditReport:
    """Look, repair and look again: found both times, mended, then clean."""
    found = await rig.verified()
    repaired = await rig.verified(repair=True, **options)
    # A finding that only follows from another one disappears with the repair of that one.
    assert {each[:2] for each in repaired.findings} <= {each[:2] for each in found.findings} != set()
    assert not any(each.is_mended for each in found.findings)
    assert repaired.is_repaired, repaired.findings
    assert (await rig.verified()).is_clean, (await rig.verified()).findings
    return found


def _name(rig: IndexRig, kind: str, instance_id: str, key: int) -> bytes:
    """The name of a key of the shard of a block, which is given by its mixed key, as everywhere here."""
    assert rig.metadata.client is not None
    placement = rig.registry.instances.placement(instance_id)
    (shard,) = shards_of([key], placement.shard_count)
    return f"{rig.metadata.client.prefix}:{kind}{{{placement.uid}.{shard}}}".encode()


def _member(*keys: int) -> bytes:
    """What stands in Redis for mixed keys."""
    return b"".join(pack_keys(keys))


def _where(rig: IndexRig, instance_id: str, key: int) -> str:
    uid = rig.registry.instances.placement(instance_id).uid
    return f"block {unmixed_key(key)} of instance {instance_id!r} (registration {uid})"


async def test_a_sound_store_is_clean_at_once(rig: IndexRig) -> None:
    report = await rig.verified()
    assert (report.findings, report.unconfirmed, rig.pauses) == ([], [], 0)
    assert report.checked["records"] == 1500 + 2 + 20 + 1
    assert report.checked["extents"] == 2 * (1500 + 3 + 20 + 1)
    assert (report.checked["instances"], report.checked["documents"]) == (2, 7)
    assert await _deleting(rig) == ({"one": 10, "two": 10}, 1)
    before = [await rig.blocks("i"), await rig.blocks("j"), rig.configured()]
    await rig.verified(repair=True)
    assert [await rig.blocks("i"), await rig.blocks("j"), rig.configured()] == before


async def _deleting(rig: IndexRig) -> tuple[dict[str, int], int]:
    """Bytes by storage and blocks of an instance that are being deleted (invariant 4)."""
    backend = rig.backend("i")
    await backend.refresh()
    return {place.storage: size for place, size in backend.deleting_bytes.items() if size}, backend.deleting_keys


# ── Writers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_block_that_is_written_past_its_deadline_is_rolled_back(rig: IndexRig) -> None:
    """Invariant 3: after its session's end nothing is being written."""
    await _write(rig, "j", 77, "late", deadline=NOW - 60)
    found = await _mended(rig)
    assert [(each.where, "past the deadline" in each.what) for each in found.findings] == [(_where(rig, "j", 77), True)]
    (record_now, _) = (await rig.blocks("j"))[77]
    assert [place.status for place in record_now.locations] == [LocationStatus.DELETING]
    assert (await rig.blocks("i"))[5000][0].locations[0].status is LocationStatus.WRITING


async def test_a_block_of_a_session_that_is_gone_is_rolled_back(rig: IndexRig) -> None:
    writing = location("w", LocationStatus.WRITING, session_id="nobody", deadline=NOW + 30)
    await rig.put("i", {8000: BlockRecord(None, 0, (location("serving"), writing))})
    found = await _mended(rig)
    assert [(each.where, each.what) for each in found.findings] == [
        (_where(rig, "i", 8000), "location w is being written by a session that is gone")
    ]
    (record_now, _) = (await rig.blocks("i"))[8000]
    assert [place.status for place in record_now.locations] == [LocationStatus.SERVING, LocationStatus.DELETING]


# ── Documents ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_sessions_leases_and_pins_of_instances_that_are_gone_are_removed(rig: IndexRig) -> None:
    store = rig.metadata.store
    session = WriteSession("ab" * 16, 999, NOW + 30, "l", (1,))
    lease = ReadLease("cd" * 16, 998, NOW + 30, ((998, 1, "l"),))
    pin = Pin("ef" * 8, 997, "g", "me", NOW + 30, PinnedLocations.of([PinnedLocation(1, "l", 1)]))
    await store.table("sessions", 16).replace(session.id, None, session.encoded(), session.deadline)
    await store.table("leases", 16).replace(lease.id, None, lease.encoded(), lease.deadline)
    await store.table("pins", 16).replace(pin.id, None, pin.encoded(), pin.deadline)
    found = await _mended(rig)
    assert [(each.check, each.where, each.what) for each in found.findings] == [
        ("session", "session ababab…", "belongs to registration 999, which is gone"),
        ("lease", "lease cdcdcd…", "belongs to registration 998, which is gone"),
        ("pin", "pin efefef…", "belongs to registration 997, which is gone"),
    ]


async def test_documents_that_cannot_be_read_go_only_when_asked_for(rig: IndexRig) -> None:
    store = rig.metadata.store
    await store.table("leases", 16).replace("x" * 32, None, b"\xc1", NOW)
    await store.table("registry").replace("group/bad", None, b"{")
    for _ in range(2):
        kept = await rig.verified(repair=True)
        assert [(each.check, each.is_mended) for each in kept.findings] == [("registry", False), ("lease", False)]
    await _mended(rig, drop_unreadable=True)
    assert await store.table("registry").get("group/bad") is None


async def test_a_session_that_never_becomes_due_is_scheduled(rig: IndexRig) -> None:
    sessions = rig.metadata.store.table("sessions", 16)
    document = await sessions.get("open")
    assert await sessions.replace("open", document, document, due=0.0)
    found = await _mended(rig)
    assert [each.what for each in found.findings] == ["never becomes due"]
    assert await sessions.due(NOW + 30, 10) == ["open"]
    assert await sessions.due(NOW + 29, 10) == []


# ── Instances that are gone ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", SHARED)
async def test_keys_of_an_instance_that_is_gone_are_forgotten(request: pytest.FixtureRequest, kind: str) -> None:
    async with opened(kind, request) as rig:
        await rig.configure(instances=("i", "k"))
        await rig.put("k", chain(50))
        await rig.put("i", chain(5, salt="i-"))
        uid = rig.registry.instances.placement("k").uid
        await rig.registry.instances.remove("k")
        found = await rig.verified()
        assert found.is_clean, "while it is being removed all is well"
        await rig.registry.instances.forget_removal(uid)
        found = await _mended(rig)
        assert [(each.check, each.where) for each in found.findings] == [
            ("stray", f"registration {uid}"),
            ("usage", "group 'g'"),
            ("usage", "storage 'one'"),
            ("usage", "all groups"),
        ]
        assert len(await rig.blocks("i")) == 5


async def test_rows_of_an_instance_that_is_gone_are_forgotten(request: pytest.FixtureRequest) -> None:
    async with opened("rocksdb", request) as rig:
        await rig.configure(instances=("i", "k"))
        await rig.put("k", chain(50))
        backend, uid = rig.backend("k"), rig.registry.instances.placement("k").uid
        await rig.registry.instances.remove("k")
        await rig.registry.instances.forget_removal(uid)
        repaired = await rig.verified(repair=True, rows=Counter({uid: 50}))
        assert [(each.where, each.is_mended) for each in repaired.findings] == [(f"registration {uid}", True)]
        assert backend.key_count == 0
        assert rig.metadata.new_backend(Placement(uid, 1)) is not backend, "the removed instance freed its memory"
        await rig.settle()


# ── Data derived from records ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_wrong_usage_is_found_and_recounted(shared: IndexRig, redis_standalone: Standalone) -> None:
    """Invariant 4, per shard: the counters are the sums of the records."""
    with redis_standalone.server.admin() as client:
        client.hincrby(_name(shared, "u", "i", 1), "6/one", 1234)
        client.hset(_name(shared, "u", "j", 2), "4/two", 5)
        client.hset(_name(shared, "u", "j", 2), "6", 40)  # a sum of an unknown name counts nothing
    found = await _mended(shared)
    assert [(each.check, each.what.partition(": ")[2]) for each in found.findings if "instance" in each.where] == [
        ("usage", "+1234 bytes on storage 'one' (type 6)"),
        ("usage", "+5 bytes on storage 'two' (type 4)"),
    ]
    assert await shared.usage("i") == {ONE: 10 * (1500 + 2 + 1), TWO: 10}
    assert await shared.usage("j") == {ONE: 200}


async def test_wrong_counters_that_managers_share_are_found_and_recounted(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    """Invariant 4, per group, per storage and over all: what managers share is the sum of all shards."""
    assert shared.metadata.client is not None
    prefix = shared.metadata.client.prefix
    with redis_standalone.server.admin() as client:
        client.hincrby(f"{prefix}:q{{g.g}}", "u:b6/one", -70)
        client.hincrby(f"{prefix}:q{{s.two}}", "u:bg", 3)
        client.hset(f"{prefix}:q{{a.all}}", "u:bgone", 9)
    found = await _mended(shared)
    assert [(each.where, each.what.partition(": ")[2]) for each in found.findings] == [
        ("group 'g'", "bytes on one (dummy) -70"),
        ("storage 'two'", "bytes of group 'g' +3"),
        ("all groups", "bytes of group 'gone' +9"),
    ]


async def test_strays_of_the_pending_set_are_found_and_mended(shared: IndexRig, redis_standalone: Standalone) -> None:
    with redis_standalone.server.admin() as client:
        client.zadd(_name(shared, "p", "j", 3), {_member(3): 5.0})  # a block that only serves
        client.zadd(_name(shared, "p", "j", 4444), {_member(4444): 5.0})  # no block at all
        client.zrem(_name(shared, "p", "i", -7), _member(-7))
        client.zadd(_name(shared, "p", "i", 5000), {_member(5000): NOW + 31})
    found = await _mended(shared)
    assert {each.where: each.what for each in found.findings} == {
        _where(shared, "j", 3): "the pending set says 5.0, the record None",
        _where(shared, "j", 4444): "the pending set names a block that has no record",
        _where(shared, "i", -7): f"the pending set says None, the record {NOW + 5}",
        _where(shared, "i", 5000): f"the pending set says {NOW + 31}, the record {NOW + 30}",
    }
    assert await shared.backend("i").due(NOW + 30, 10) == [*sorted([-8, -7], key=_member), 5000]
    assert await shared.backend("j").due(NOW + 30, 10) == []


async def test_children_that_do_not_agree_are_found_and_mended(shared: IndexRig, redis_standalone: Standalone) -> None:
    with redis_standalone.server.admin() as client:
        client.zrem(_name(shared, "c", "j", 10), _member(9, 10))  # 10 misses its parent
        client.zadd(_name(shared, "c", "j", 11), {_member(500, 11): 0})  # 11 has one too many
        client.zadd(_name(shared, "c", "j", 900), {_member(899, 900): 0})  # a child without record
    found = await _mended(shared)
    assert {each.where: each.what for each in found.findings} == {
        _where(shared, "j", 10): f"the record is missing among the children of {unmixed_key(9)}",
        _where(shared, "j", 11): f"it stands among the children of {unmixed_key(500)}",
        _where(shared, "j", 900): f"the children of {unmixed_key(899)} name a block that has no record",
    }
    assert [await shared.backend("j").children(key) for key in (9, 10, 500, 899)] == [[10], [11], [], []]


async def test_a_record_that_no_scan_finds_is_put_in_order(shared: IndexRig, redis_standalone: Standalone) -> None:
    with redis_standalone.server.admin() as client:
        client.zrem(_name(shared, "z", "j", 5), _member(5))
    found = await shared.verified(repair=True)
    assert [(each.where, each.is_mended) for each in found.findings] == [(_where(shared, "j", 5), True)]
    assert (await shared.verified()).is_clean
    assert 5 in await shared.blocks("j")


async def test_an_order_entry_without_a_record_goes(shared: IndexRig, redis_standalone: Standalone) -> None:
    with redis_standalone.server.admin() as client:
        client.unlink(_name(shared, "b", "j", 20) + _member(20))
    found = await shared.verified(repair=True)
    assert [each.check for each in found.findings] == ["block", *["usage"] * 4]
    assert (await shared.verified()).is_clean
    assert await shared.usage("j") == {ONE: 190}


async def test_an_unreadable_record_goes_only_when_asked_for(shared: IndexRig, redis_standalone: Standalone) -> None:
    with redis_standalone.server.admin() as client:
        client.set(_name(shared, "b", "j", 20) + _member(20), b"\x01" + b"s" * 8 + b"\xc1")
        client.set(_name(shared, "b", "j", 19) + _member(19), b"\x07" + b"s" * 8)
    kept = await shared.verified(repair=True)
    assert {each.where: each.is_mended for each in kept.findings if each.check == "block"} == {
        _where(shared, "j", 19): False,
        _where(shared, "j", 20): False,
    }
    assert (await shared.verified(repair=True, drop_unreadable=True)).is_repaired
    assert (await shared.verified()).is_clean
    assert sorted(await shared.blocks("j")) == list(range(1, 19))
    assert await shared.backend("j").children(18) == await shared.backend("j").children(19) == []


async def test_what_puts_itself_right_meanwhile_is_no_finding(shared: IndexRig, redis_standalone: Standalone) -> None:
    """As a manager's write in flight does: what looks wrong is looked at again."""
    name, member = _name(shared, "p", "j", 3), _member(3)
    with redis_standalone.server.admin() as client:
        client.zadd(name, {member: 5.0})
        client.hincrby(_name(shared, "u", "i", 1), "6/one", 1)
        pauses = iter(range(9))

        async def settle() -> None:
            if next(pauses) == 0:
                client.zrem(name, member)
                client.hincrby(_name(shared, "u", "i", 1), "6/one", -1)

        shared._pause = settle  # type: ignore[method-assign]
        assert (await shared.verified()).is_clean
    assert next(pauses) == 1


@pytest.mark.parametrize("kind", ["memory", "rocksdb"])
async def test_what_an_index_in_memory_derives_is_checked_too(request: pytest.FixtureRequest, kind: str) -> None:
    async with opened(kind, request) as rig:
        await _fill(rig)
        backend = rig.backend("j")
        backend._tally.change(None, record(99))  # type: ignore[attr-defined]
        backend._due.put(3, 5.0)  # type: ignore[attr-defined]
        report = await rig.verified(repair=True)
        assert [(each.check, each.is_mended) for each in report.findings] == [("block", False), ("usage", False)]
        assert all("next start of the manager" in each.repair for each in report.findings)


# ── Extents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_locations_that_share_an_extent_are_found_and_forgotten(rig: IndexRig) -> None:
    """Invariant 5."""
    same = location("same", size=20)
    await rig.put("i", {7001: BlockRecord(None, 0, (same, location("kept", storage="two")))})
    await rig.put("j", {7002: BlockRecord(None, 0, (same._replace(id="other"),))})
    found = await rig.verified()
    assert [(each.check, each.what) for each in found.findings] == [
        ("extent", "they share bytes of dummy://one/p/same-a?")
    ]
    await _mended(rig)
    (left, _) = (await rig.blocks("i"))[7001]
    assert [place.id for place in left.locations] == ["kept"]
    assert 7002 not in await rig.blocks("j")


async def test_two_locations_of_one_block_must_not_share_an_extent_either(rig: IndexRig) -> None:
    same = location("same")
    await rig.put("i", {7001: BlockRecord(None, 0, (same, same._replace(id="other"), location("kept")))})
    assert [each.check for each in (await _mended(rig)).findings] == ["extent"]
    assert [place.id for place in (await rig.blocks("i"))[7001][0].locations] == ["kept"]


# ── Index audit order ──


RETIRED = 2.0**33


async def test_a_block_on_the_wrong_side_of_the_order_is_found_and_moved(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    with redis_standalone.server.admin() as client:
        client.zadd(_name(shared, "z", "i", 1), {_member(1): RETIRED + 5.25})
        client.zadd(_name(shared, "z", "i", -8), {_member(-8): 7.0})
    assert sorted(each.what for each in (await _mended(shared)).findings) == [
        "the access order has it among the blocks that can be evicted",
        "the access order has it behind the blocks that can be evicted",
    ]
    backend = shared.backend("i")
    assert await backend.accesses([1, -8]) == [Access(5, 1024), Access(7, 0)]
    assert (await backend.coldest(2))[0] == (1, Access(5, 1024))


async def test_wrong_sums_of_blocks_in_deletion_are_found_and_recounted(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    """Invariant 4."""
    with redis_standalone.server.admin() as client:
        client.hincrby(_name(shared, "u", "i", 1), "-6/one", 7)
        client.hincrby(_name(shared, "u", "i", 1), "-", -2)
    assert [each.what.partition(": ")[2] for each in (await _mended(shared)).findings] == [
        "-2 blocks that are being deleted, +7 bytes on storage 'one' (type 6) that are being deleted"
    ]
    assert await _deleting(shared) == ({"one": 10, "two": 10}, 1)


# ── Data derived from records that lie in runs ──
#
# Keys here are given as they are mixed, too. What is derived of a run is a finding of each of its blocks.

RUN_KINDS = KINDS[4:]
MISSING = "the record is missing in the access order: scans do not find it"
NO_RECORD = "the access order names a block that has no record"
ABSENT_RUN = 999


@pytest.fixture(params=RUN_KINDS)
async def runs(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A sound deployment with runs of many blocks."""
    async with opened(request.param, request) as made:
        await made.configure()
        await made.put("i", {**_uniform(150), **_uniform(70, 1000, LocationStatus.DELETING, deadline=NOW + 5)})
        await made.put("j", _uniform(20, salt="j"))
        yield made


def _uniform(
    count: int, start: int = 1, status: LocationStatus = LocationStatus.SERVING, salt: str = "i", **more: float
) -> dict[int, BlockRecord]:
    """A chain of blocks as one write leaves them."""
    same = location("u", status, **more)
    records = chain(count, start, salt=f"{salt}-")
    return {
        key: each._replace(locations=(same._replace(chunk=each.locations[0].chunk),)) for key, each in records.items()
    }


async def _ask(rig: IndexRig, *command: object) -> Any:
    assert rig.metadata.client is not None
    (answer,) = await rig.metadata.client.execute([command])  # type: ignore[list-item]
    return answer


def _tag(rig: IndexRig, instance_id: str, key: int) -> TagKeys:
    assert rig.metadata.client is not None
    placement = rig.registry.instances.placement(instance_id)
    (tag,) = shards_of([key], placement.tags)
    return TagKeys.of(rig.metadata.client.prefix, placement.uid, tag)


async def _run_of(rig: IndexRig, instance_id: str, key: int) -> tuple[bytes, list[int]]:
    """The id of a block's run, and the blocks in it."""
    names = _tag(rig, instance_id, key)
    run = await _ask(rig, b"HGET", names.places, _member(key))
    return run, list(decode_runs([await _ask(rig, b"GET", names.runs + run)]))


def _id(number: int, near: bytes) -> bytes:
    """The id of a number in the tag of another id."""
    return near[:2] + number.to_bytes(6)


async def _blocks_found(rig: IndexRig, **options: bool) -> dict[str, str]:
    """Find, mend and look again; return what was found of blocks."""
    return {each.where: each.what for each in (await _mended(rig, **options)).findings if each.check == "block"}


def _of_each(rig: IndexRig, keys: Iterable[int], what: str) -> dict[str, str]:
    return {_where(rig, "i", key): what for key in keys}


async def _check_all_there(rig: IndexRig) -> None:
    blocks = await rig.blocks("i")
    assert {key: each for key, (each, _) in blocks.items()} == {
        **_uniform(150),
        **_uniform(70, 1000, LocationStatus.DELETING, deadline=NOW + 5),
    }
    assert {key: each for key, (each, _) in (await rig.blocks("j")).items()} == _uniform(20, salt="j")
    families = await rig.backend("i").families(range(1, 151))
    assert families == [[key + 1] for key in range(1, 150)] + [[]]


async def test_sound_runs_are_clean_at_once(runs: IndexRig) -> None:
    report = await runs.verified()
    assert (report.findings, report.unconfirmed, runs.pauses) == ([], [], 0)
    assert report.checked["records"] == 150 + 70 + 20
    _, members = await _run_of(runs, "i", 1)
    assert len(members) > 16
    await runs.verified(repair=True)
    await _check_all_there(runs)


async def test_blocks_that_the_index_does_not_lead_to_are_found_in_their_runs(runs: IndexRig) -> None:
    for key in (5, 1002):
        await _ask(runs, b"HDEL", _tag(runs, "i", key).places, _member(key))
    assert await _blocks_found(runs) == _of_each(runs, [5, 1002], MISSING)
    await _check_all_there(runs)


@pytest.mark.parametrize("is_unordered", [False, True])
@pytest.mark.parametrize("key", [70, 1002])
async def test_a_run_that_no_index_entry_leads_to_is_found(runs: IndexRig, key: int, is_unordered: bool) -> None:
    names, (run, members) = _tag(runs, "i", key), await _run_of(runs, "i", key)
    for member in members:
        await _ask(runs, b"HDEL", names.places, _member(member))
    if is_unordered:
        await _ask(runs, b"ZREM", names.order, run)
        await _ask(runs, b"ZREM", names.pending, run)
    found = await _blocks_found(runs)
    assert found.keys() == _of_each(runs, members, "").keys()
    assert all(MISSING in each for each in found.values())
    await _check_all_there(runs)


async def test_an_index_entry_to_a_run_that_is_gone_goes(runs: IndexRig) -> None:
    names, (run, _) = _tag(runs, "i", 4444), await _run_of(runs, "i", 1)
    await _ask(runs, b"HSET", names.places, _member(4444), _id(ABSENT_RUN, run))
    assert await _blocks_found(runs) == _of_each(runs, [4444], NO_RECORD)
    assert await _ask(runs, b"HEXISTS", names.places, _member(4444)) == 0
    await _check_all_there(runs)


async def test_an_index_entry_to_a_run_without_the_block_goes(runs: IndexRig) -> None:
    names = _tag(runs, "i", 4444)
    run = await _ask(runs, b"ZRANGE", names.order, 0, 0)
    await _ask(runs, b"HSET", names.places, _member(4444), *run)
    assert await _blocks_found(runs) == _of_each(runs, [4444], NO_RECORD)
    await _check_all_there(runs)


async def test_index_entries_order_and_due_time_of_a_run_that_is_gone_go(runs: IndexRig) -> None:
    names, (run, members) = _tag(runs, "i", 1002), await _run_of(runs, "i", 1002)
    await _ask(runs, b"UNLINK", names.runs + run)
    found = await runs.verified(repair=True)
    assert found.is_repaired, found.findings
    assert (await runs.verified()).is_clean, (await runs.verified()).findings
    assert {each.where for each in found.findings if each.check == "block"} >= _of_each(runs, members, "").keys()
    assert sorted(await runs.blocks("i")) == sorted([*range(1, 151), *(set(range(1000, 1070)) - set(members))])
    assert await _ask(runs, b"ZSCORE", names.order, run) is None
    assert await _ask(runs, b"ZSCORE", names.pending, run) is None
    assert await runs.usage("i") == {ONE: 10 * (150 + 70 - len(members))}


async def test_a_run_that_is_missing_in_the_access_order_is_put_there(runs: IndexRig) -> None:
    names, (run, members) = _tag(runs, "i", 1), await _run_of(runs, "i", 1)
    await _ask(runs, b"ZREM", names.order, run)
    assert await _blocks_found(runs) == _of_each(runs, members, MISSING)
    assert await runs.backend("i").accesses(members) == [Access(1000, 0)] * len(members)
    await _check_all_there(runs)


@pytest.mark.parametrize("number", [ABSENT_RUN, 1 << 43])
async def test_members_of_runs_that_are_gone_leave_order_and_pending(runs: IndexRig, number: int) -> None:
    names, (run, _) = _tag(runs, "i", 1), await _run_of(runs, "i", 1)
    ids = [_id(number + at, run) for at in range(3)]
    await _ask(runs, b"ZADD", names.order, 5.0, ids[0], 5.0, ids[1])
    await _ask(runs, b"ZADD", names.pending, 5.0, ids[1], 6.0, ids[2])
    pending = "the pending set names a block that has no record"
    found = await _blocks_found(runs)
    assert sorted(found.values()) == sorted([NO_RECORD, f"{NO_RECORD}; {pending}", pending])
    assert await _ask(runs, b"ZMSCORE", names.order, *ids) == await _ask(runs, b"ZMSCORE", names.pending, *ids)
    assert [access for _, access in await runs.backend("i").coldest(1)] == [Access(1000, 0)]
    await _check_all_there(runs)


async def test_wrong_due_times_of_runs_are_found_and_mended(runs: IndexRig) -> None:
    (serving, served), (deleting, going) = await _run_of(runs, "i", 1), await _run_of(runs, "i", 1002)
    (others_run, others) = await _run_of(runs, "j", 1)
    await _ask(runs, b"ZADD", _tag(runs, "i", 1).pending, 5.0, serving)
    await _ask(runs, b"ZREM", _tag(runs, "i", 1002).pending, deleting)
    await _ask(runs, b"ZADD", _tag(runs, "j", 1).pending, 7.0, others_run)
    assert await _blocks_found(runs) == {
        **_of_each(runs, served, "the pending set says 5.0, the record None"),
        **_of_each(runs, going, f"the pending set says None, the record {NOW + 5}"),
        **{_where(runs, "j", key): "the pending set says 7.0, the record None" for key in others},
    }
    assert sorted(await runs.backend("i").due(NOW + 5, 1000)) == list(range(1000, 1070))
    assert await runs.backend("j").due(NOW + 5, 10) == []


async def test_a_run_on_the_wrong_side_of_the_order_is_found_and_moved(runs: IndexRig) -> None:
    (serving, served), (deleting, going) = await _run_of(runs, "i", 1), await _run_of(runs, "i", 1002)
    await _ask(runs, b"ZADD", _tag(runs, "i", 1).order, RETIRED + 5.25, serving)
    await _ask(runs, b"ZADD", _tag(runs, "i", 1002).order, 7.0, deleting)
    assert await _blocks_found(runs) == {
        **_of_each(runs, served, "the access order has it behind the blocks that can be evicted"),
        **_of_each(runs, going, "the access order has it among the blocks that can be evicted"),
    }
    backend = runs.backend("i")
    assert await backend.accesses([1, 1002]) == [Access(5, 1024), Access(7, 0)]
    assert {access for _, access in await backend.coldest(len(served))} == {Access(5, 1024)}


async def _first_child(rig: IndexRig, *, is_stored: bool) -> int:
    """A block whose relation with its parent is stored, or follows from their run."""
    for key in range(2, 150):
        score = await _ask(rig, b"ZSCORE", _tag(rig, "i", key).children, _member(key - 1, key))
        if (score is not None) == is_stored:
            return key
    raise AssertionError("no such block")


async def test_relations_of_runs_that_do_not_agree_are_found_and_mended(runs: IndexRig) -> None:
    first = await _first_child(runs, is_stored=True)
    await _ask(runs, b"ZREM", _tag(runs, "i", first).children, _member(first - 1, first))
    await _ask(runs, b"ZADD", _tag(runs, "j", 11).children, 0, _member(500, 11))  # 11 has one too many
    await _ask(runs, b"ZADD", _tag(runs, "j", 1).children, 0, _member(501, 1))  # so has a head
    await _ask(runs, b"ZADD", _tag(runs, "j", 900).children, 0, _member(899, 900))  # a child without record
    assert await _blocks_found(runs) == {
        _where(runs, "i", first): f"the record is missing among the children of {unmixed_key(first - 1)}",
        _where(runs, "j", 11): f"it stands among the children of {unmixed_key(500)}",
        _where(runs, "j", 1): f"it stands among the children of {unmixed_key(501)}",
        _where(runs, "j", 900): f"the children of {unmixed_key(899)} name a block that has no record",
    }
    assert await runs.backend("j").families([500, 501, 899, 10]) == [[], [], [], [11]]
    await _check_all_there(runs)


@pytest.mark.parametrize("runs", ["redis_runs"], indirect=True)
async def test_a_relation_that_a_run_has_already_is_one_too_many(runs: IndexRig) -> None:
    """Else the block would be its parent's child twice."""
    first = await _first_child(runs, is_stored=False)
    await _ask(runs, b"ZADD", _tag(runs, "i", first).children, 0, _member(first - 1, first))
    assert await runs.backend("i").children(first - 1) == [first, first]
    assert (await _blocks_found(runs)).keys() == {_where(runs, "i", first)}
    await _check_all_there(runs)


async def test_wrong_usage_of_runs_is_found_and_recounted(runs: IndexRig) -> None:
    """Invariant 4."""
    usage = _tag(runs, "i", 1).usage
    await _ask(runs, b"HINCRBY", usage, b"6/one", 1234)
    await _ask(runs, b"HINCRBY", usage, b"-6/one", 7)
    await _ask(runs, b"HINCRBY", usage, b"-", -2)
    await _ask(runs, b"HSET", usage, b"6", 40)  # a sum of an unknown name counts nothing
    found = await _mended(runs)
    assert [(each.check, each.what.partition(": ")[2]) for each in found.findings if "instance" in each.where] == [
        (
            "usage",
            "-2 blocks that are being deleted, +1234 bytes on storage 'one' (type 6), "
            "+7 bytes on storage 'one' (type 6) that are being deleted",
        )
    ]
    assert await runs.usage("i") == {ONE: 2200}
    assert await _deleting(runs) == ({"one": 700}, 70)


UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda value: b"\x02" + bytes(range(200)),
    "another version": lambda value: b"\x07" + value[1:],
    "cut in the keys": lambda value: value[:20],
    "cut after the keys": lambda value: value[: 10 + 8 * value[9]],
    "cut after the parents": lambda value: value[: 10 + 16 * value[9]],
    "cut at the end": lambda value: value[:-1],
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("damage", UNREADABLE)
@pytest.mark.parametrize("key", [1, 1002])
async def test_an_unreadable_run_goes_only_when_asked_for(runs: IndexRig, key: int, damage: str) -> None:
    names, (run, members) = _tag(runs, "i", key), await _run_of(runs, "i", key)
    await _ask(runs, b"SET", names.runs + run, UNREADABLE[damage](await _ask(runs, b"GET", names.runs + run)))
    for _ in range(2):
        kept = await runs.verified(repair=True)
        found = {each.where: each for each in kept.findings if each.check == "block"}
        assert found.keys() >= {_where(runs, "i", member) for member in members}
        assert not any(each.is_mended for each in found.values())
        assert all("the record cannot be read" in each.what for each in found.values())
    assert (await runs.verified(repair=True, drop_unreadable=True)).is_repaired
    assert (await runs.verified()).is_clean, (await runs.verified()).findings
    left = sorted({*range(1, 151), *range(1000, 1070)} - set(members))
    assert sorted(await runs.blocks("i")) == left
    assert await runs.usage("i") == {ONE: 10 * len(left)}
    families = [[child for child in (parent + 1,) if child in left and child != 1000] for parent in range(1, 151)]
    assert await runs.backend("i").families(range(1, 151)) == families
    assert await _ask(runs, b"EXISTS", names.runs + run) == 0


async def test_a_change_in_flight_of_a_run_is_no_finding(runs: IndexRig) -> None:
    names, (run, _) = _tag(runs, "i", 1), await _run_of(runs, "i", 1)
    await _ask(runs, b"ZADD", names.pending, 5.0, run)
    pauses = iter(range(9))

    async def settle() -> None:
        if next(pauses) == 0:
            await _ask(runs, b"ZREM", names.pending, run)

    runs._pause = settle  # type: ignore[method-assign]
    assert (await runs.verified()).is_clean
    assert next(pauses) == 1


async def test_a_run_that_changed_since_it_was_judged_is_not_mended(runs: IndexRig) -> None:
    """A repair changes what is derived only while the record is the one that was judged."""
    assert runs.metadata.client is not None
    placement = runs.registry.instances.placement("i")
    audit = RunsAudit(runs.metadata.client, placement.uid, placement.tags, LostRuns())
    (shard,) = shards_of([1], placement.tags)
    (view,) = await audit.read_blocks(shard, {1: frozenset()})
    await runs.put("i", {1: None})
    assert not await audit.mend(shard, view)
    await runs.put("i", _uniform(1))
    assert not await audit.mend(shard, view)
    assert not await audit.drop_record(shard, view)
    await _check_all_there(runs)


async def test_what_a_repair_mends_beside_runs_is_read_again(request: pytest.FixtureRequest) -> None:
    """Managers are notified of changes of runs only; nothing of the notification stays."""
    async with opened("redis_runs", request) as rig:
        await rig.configure()
        await rig.put("i", _uniform(3))
        names = _tag(rig, "i", 1)
        before = await _ask(rig, b"KEYS", names.runs + b"*")
        assert rig.metadata.client is not None
        audit = RunsAudit(rig.metadata.client, rig.registry.instances.placement("i").uid, 1, LostRuns())
        await audit.add_usage(0, {Sum(ONE, is_deleting=False): 5})
        assert await _ask(rig, b"KEYS", names.runs + b"*") == before
        assert await rig.usage("i") == {ONE: 35}


# ── Audit suspects ──


async def test_due_times_are_asked_for_once_per_table_and_not_per_suspect() -> None:
    sessions, report = _Counted(), AuditReport()
    for number in range(40):
        assert await sessions.replace(f"odd{number}", None, b"\xc1", NOW + 9)
    documents = DocumentAudit(lambda: (), Repair(), report)
    await documents.check_sessions(sessions)
    sessions.due_count = 0
    await documents.confirm()
    assert (len(report.findings), sessions.due_count) == (40, 2)


class _Counted(MemoryTable):
    """A table that counts how often its due times are asked for."""

    due_count = 0

    async def due(self, now: float, most: int) -> list[str]:
        self.due_count += 1
        return await super().due(now, most)


async def test_more_suspects_than_are_remembered_are_judged_as_they_come(
    shared: IndexRig, redis_standalone: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MOST_SUSPECTS", 100)
    with redis_standalone.server.admin() as client:
        for key in range(1, 181):
            client.zadd(_name(shared, "p", "i", key), {_member(key): 5.0})
    found = await shared.verified()
    assert (len(found.findings), found.more) == (180, 0)
    assert shared.pauses > 1
    assert len((await shared.verified(repair=True)).findings) == 180
    assert (await shared.verified()).is_clean


# ── Index extents ──


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)), max_size=12), st.integers(1, 4))
def test_overlaps_are_found_however_objects_are_cut(extents: list[tuple[int, int, int]], parts: int) -> None:
    """Blocks whose slots overlap in some object, and only those, are suspects of exactly one part."""
    blocks = {}
    for key, (name, blkid, size) in enumerate(extents):
        chunk = encode_chunk(StorageType.ST_NFS, 1, [SpecUri("a", f"file://s/o{name}?blkid={blkid}&size={size}")])
        blocks[key] = BlockRecord(None, 0, (location("l")._replace(chunk=chunk),))
    clashing = {
        key
        for key, (name, blkid, size) in enumerate(extents)
        for other, (other_name, other_blkid, other_size) in enumerate(extents)
        if key != other and name == other_name
        and blkid * size < (other_blkid + 1) * other_size and other_blkid * other_size < (blkid + 1) * size
    }  # fmt: skip
    found: set[int] = set()
    for number in range(parts):
        part = ExtentPart(number, parts)
        for key, each in blocks.items():
            assert part.add(Owner(1, key), each) == ""
        found |= {owner.key for pair in part.suspects(1000) for owner in pair}
    assert found == clashing


def test_the_number_of_parts_grows_with_the_extents() -> None:
    assert [part_count(extents) for extents in (0, 1, 2_000_000, 2_000_001, 100_000_000)] == [1, 1, 1, 2, 50]


def test_a_uri_that_cannot_be_read_is_reported() -> None:
    chunk = encode_chunk(StorageType.ST_NFS, 1, [SpecUri("a", "nonsense")])
    part = ExtentPart(0, 1)
    assert "nonsense" in part.add(Owner(1, 1), BlockRecord(None, 0, (location("l")._replace(chunk=chunk),)))


# ── Rows of a RocksDB ────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_looked_at_one_by_one(tmp_path: Path) -> None:
    def address(kind: bytes, uid: int, key: int) -> bytes:
        return kind + pack(">Iq", uid, key)

    good = encode_payload(record(1))
    store = RocksStore(tmp_path / "db", "never", SystemClock())
    store.log.append(
        [
            *((address(b"b", 1, key), good) for key in (1, 2, 5)),
            (address(b"b", 1, 3), b"\x09later release"),
            (address(b"b", 2, 9), b"\x01\xc1"),
            (b"bshort", good),
            (address(b"a", 1, 2), pack(">IH", 7, 1)),
            (address(b"a", 1, 4), pack(">IH", 7, 1)),  # its block is gone
            (address(b"a", 1, 5), b"odd"),
            (address(b"a", 7, 1), pack(">IH", 7, 1)),
        ]
    )
    store.log.close_at_once()
    store = RocksStore(tmp_path / "db", "never", SystemClock())
    found = audit_rows(store.log)
    assert found.records == {1: 3}
    assert [(row.where, row.holds_data, row.stops_loading) for row in found.bad] == [
        ("block 3 of registration 1", True, True),
        ("reads of block 4 of registration 1", False, False),
        ("reads of block 5 of registration 1", False, True),
        ("block 9 of registration 2", True, True),
        ("reads of block 1 of registration 7", False, False),
        ("row 6273686f7274", True, True),
    ]
    drop_rows(store.log, found.bad)
    store.log.close_at_once()
    store = RocksStore(tmp_path / "db", "never", SystemClock())
    found = audit_rows(store.log)
    store.log.close_at_once()
    assert (found.bad, found.records) == ([], {1: 3})


# ── Unreadable documents ──


GARBAGE = [
    b"",
    b"garbage",
    msgspec.msgpack.encode([99, 1, 0.0, "l", b"12345678", None]),
    msgspec.msgpack.encode([1, 1, 0.0, "l", b"123", None]),
]


@pytest.fixture
def memory_rig() -> Rig:
    return Rig(group(delay_ms=0), instance())


@pytest.mark.parametrize("document", GARBAGE)
@pytest.mark.parametrize(("table", "left"), [("sessions", ["bad"]), ("leases", [])])
async def test_sessions_expire_and_blocks_are_deleted_beside_an_unreadable_document(
    memory_rig: Rig, table: str, left: list[str], document: bytes
) -> None:
    await memory_rig.tables.table(table).replace("bad", None, document, due=memory_rig.clock.now() + 1)
    await memory_rig.manager.load()
    await memory_rig.store([1, 2])
    await memory_rig.start([3, 4], timeout_seconds=2)
    await memory_rig.manager.remove(memory_rig.manager.cache("i"), [1], NO_MASK)
    await memory_rig.manager.remove(memory_rig.manager.cache("i"), [2], NO_MASK)
    memory_rig.wait(3)
    await memory_rig.manager.expire()
    await memory_rig.executor.run_due()
    assert await memory_rig.statuses([1, 2, 3, 4]) == [[], [], [], []]
    assert list(await memory_rig.tables.table(table).all()) == left


async def test_a_writer_whose_session_cannot_be_read_keeps_only_its_own_blocks(memory_rig: Rig) -> None:
    first = await memory_rig.start([1], timeout_seconds=2)
    await memory_rig.start([2], timeout_seconds=2)
    table = memory_rig.tables.table("sessions")
    held = await table.get(first.session.id)
    assert held is not None
    await table.replace(first.session.id, held, b"garbage")
    memory_rig.wait(3)
    await memory_rig.executor.run_due()
    assert await memory_rig.statuses([1, 2]) == [["WRITING"], []]


# ── Usage recounts ──


ACCOUNTS = {"g.g": "b6/one", "s.one": "bg", "a.all": "bg"}
USED = 10 * 50


@pytest.fixture
async def recount_rig(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    async with opened("redis_standalone", request) as made:
        await made.configure()
        await made.put("i", chain(50))
        yield made


def recount_of(recount_rig: IndexRig, registry: Registry | None = None) -> UsageRecount:
    usage = recount_rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    registry = registry if registry is not None else recount_rig.registry
    caches = OpenCaches(registry, ClosedStorages(), recount_rig.metadata.new_backend, usage, CacheBudget(0))
    return UsageRecount(registry, caches, usage, recount_rig.clock)


async def epochs(recount_rig: IndexRig) -> set[int]:
    usage = recount_rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    return {each.epoch for each in (await usage.refresh(list(ACCOUNTS))).values()}


async def used(recount_rig: IndexRig) -> dict[str, int]:
    usage = recount_rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    counters = await usage.refresh(list(ACCOUNTS))
    return {account: counters[account].used.get(field, 0) for account, field in ACCOUNTS.items()}


def spoil(recount_rig: IndexRig, server: Standalone, account: str, change: int = 7) -> None:
    assert recount_rig.metadata.client is not None
    with server.server.admin() as client:
        client.hincrby(f"{recount_rig.metadata.client.prefix}:q{{{account}}}", f"u:{ACCOUNTS[account]}", change)


@pytest.mark.parametrize("account", list(ACCOUNTS))
@pytest.mark.parametrize("change", [7, -7])
async def test_a_difference_in_two_checks_in_a_row_is_recounted(
    recount_rig: IndexRig, redis_standalone: Standalone, account: str, change: int
) -> None:
    recount = recount_of(recount_rig)
    await recount.check()
    spoil(recount_rig, redis_standalone, account, change)
    recount_rig.clock.time += 5
    await recount.check()
    assert (await used(recount_rig))[account] == USED + change, "perhaps a report is on its way"
    recount_rig.clock.time += 1
    await recount.check()
    assert await used(recount_rig) == dict.fromkeys(ACCOUNTS, USED)


async def test_an_account_that_is_right_again_at_the_second_check_is_left_alone(
    recount_rig: IndexRig, redis_standalone: Standalone
) -> None:
    recount = recount_of(recount_rig)
    for _ in range(3):
        spoil(recount_rig, redis_standalone, "s.one")
        await recount.check()
        spoil(recount_rig, redis_standalone, "s.one", -7)
        recount_rig.clock.time += 5
        await recount.check()
    assert await epochs(recount_rig) == {0}


async def test_a_recount_counts_what_another_manager_registered_and_wrote_meanwhile(
    recount_rig: IndexRig, redis_standalone: Standalone
) -> None:
    """Invariant 4: the usage of an instance that the recounting manager does not know yet stays counted."""
    leader = Registry(ClosedStorages(), recount_rig.metadata.store.table("registry"), recount_rig.metadata.store.flush)
    await leader.load()
    recount = recount_of(recount_rig, leader)
    spoil(recount_rig, redis_standalone, "a.all")
    await recount.check()
    await recount_rig.registry.instances.register(replace(recount_rig.registry.instances.get("i"), instance_id="new"))
    await recount_rig.put("new", chain(10, start=1000))
    assert not await recount.different_accounts(["g.g", "s.one"]), "the written blocks make no difference"
    recount_rig.clock.time += 1
    await recount.recount(list(ACCOUNTS))
    assert await used(recount_rig) == dict.fromkeys(ACCOUNTS, USED + 100)


async def test_a_difference_that_is_another_one_at_the_second_check_is_left_alone(
    recount_rig: IndexRig, redis_standalone: Standalone
) -> None:
    """As in an account whose reports are always on their way."""
    recount = recount_of(recount_rig)
    for _ in range(4):
        spoil(recount_rig, redis_standalone, "a.all")
        await recount.check()
        recount_rig.clock.time += 5
    assert (await epochs(recount_rig), (await used(recount_rig))["a.all"]) == ({0}, USED + 4 * 7)


async def test_a_reservation_is_no_reason_for_a_recount_before_its_deadline(recount_rig: IndexRig) -> None:
    recount, usage = recount_of(recount_rig), recount_rig.metadata.usage
    assert isinstance(usage, SharedLedger)
    limits = Limits(recount_rig.registry.groups.get("g"))
    index = MetaIndex(recount_rig.backend("i"), ClosedStorages(), shard_count=SHARDS)
    wanted = {StorageKey("one", StorageType.ST_DUMMY): 70}
    assert await usage.reserve(Reservation("died", limits, 1, wanted, 7, recount_rig.clock.now() + 20), index)
    for _ in range(4):
        await recount.check()
        recount_rig.clock.time += 5
    assert await epochs(recount_rig) == {0}
    for _ in range(2):
        recount_rig.clock.time += 5
        await recount.check()
    received = (await usage.refresh(["g.g"]))["g.g"]
    assert (received.epoch, any(received.reserved.values())) == (2, False)


async def test_reports_that_were_dropped_are_made_up_for(recount_rig: IndexRig, redis_standalone: Standalone) -> None:
    assert recount_rig.metadata.client is not None
    recount = recount_of(recount_rig)
    with redis_standalone.server.admin() as client:
        client.hincrby(f"{recount_rig.metadata.client.prefix}:q{{s.one}}", "dropped", 1)
    for _ in range(2):
        await recount.check()
        recount_rig.clock.time += 5
    assert await epochs(recount_rig) == {0, 2}


class _Leader:
    """Looks after the counters while a verification waits, once in as many of its pauses."""

    def __init__(self, recount_rig: IndexRig, every: int) -> None:
        self._recount = recount_of(recount_rig)
        self._clock = recount_rig.clock
        self._every = every
        self._pauses = 0

    async def pause(self) -> None:
        self._pauses += 1
        self._clock.time += 1
        if self._pauses % self._every == 0:
            await self._recount.check()


async def test_a_verification_leaves_the_leader_the_time_to_recount(
    recount_rig: IndexRig, redis_standalone: Standalone
) -> None:
    spoil(recount_rig, redis_standalone, "g.g")
    assert (await recount_rig.verified(pause=_Leader(recount_rig, every=5).pause)).is_clean
    assert await used(recount_rig) == dict.fromkeys(ACCOUNTS, USED)


async def test_a_difference_no_manager_recounts_is_found(recount_rig: IndexRig, redis_standalone: Standalone) -> None:
    spoil(recount_rig, redis_standalone, "g.g")
    (finding,) = (await recount_rig.verified(pause=_Leader(recount_rig, every=1_000).pause)).findings
    assert (finding.check, finding.where) == ("usage", "group 'g'")


async def test_counters_that_change_all_the_time_are_said_to_be_unsettled(
    recount_rig: IndexRig, redis_standalone: Standalone
) -> None:
    spoil(recount_rig, redis_standalone, "a.all")

    async def pause() -> None:
        spoil(recount_rig, redis_standalone, "a.all", change=1)

    report = await recount_rig.verified(pause=pause)
    assert (report.findings, report.unconfirmed) == ([], ["shared counters of all groups, which change all the time"])
    assert not report.is_clean
