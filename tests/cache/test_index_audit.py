"""Verification: a sound store is clean, every kind of damage is found where it is, mended, and gone afterwards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from struct import pack

import pytest
import redis
from audit_rig import KINDS, IndexRig, chain, location, opened, record
from redis_servers import Standalone

from kvcm.cache.audit_report import AuditReport
from kvcm.cache.leases import ReadLease
from kvcm.cache.pin_values import HeldPlace, HeldPlaces, Pin
from kvcm.cache.write_values import WriteSession
from kvcm.index.shards import shard_of
from kvcm.model.instances import Placement
from kvcm.model.locations import BlockRecord, LocationStatus, Place, SpecUri, encode_chunk
from kvcm.model.storages import StorageType

ONE, TWO = (Place(name, StorageType.ST_DUMMY) for name in ("one", "two"))
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
    await rig.put("i", {**chain(1500, salt="i-"), -7: BlockRecord(99, 4, (location("x"), deleting))})
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
    # What is wrong only because of something else is right as soon as that is mended.
    assert {each[:2] for each in repaired.findings} <= {each[:2] for each in found.findings} != set()
    assert not any(each.is_mended for each in found.findings)
    assert repaired.is_mended, repaired.findings
    assert (await rig.verified()).is_clean, (await rig.verified()).findings
    return found


@contextmanager
def _admin(server: Standalone) -> Iterator[redis.Redis]:
    with server.server.admin() as client:
        yield client


def _name(rig: IndexRig, kind: str, instance_id: str, key: int) -> bytes:
    """The name of a key of the shard of a block."""
    assert rig.metadata.client is not None
    placement = rig.registry.instances.placement(instance_id)
    shard = shard_of(key, placement.shard_count)
    return f"{rig.metadata.client.prefix}:{kind}{{{placement.uid}.{shard}}}".encode()


def _where(rig: IndexRig, instance_id: str, key: int) -> str:
    uid = rig.registry.instances.placement(instance_id).uid
    return f"block {key} of instance {instance_id!r} (registration {uid})"


async def test_a_sound_store_is_clean_at_once(rig: IndexRig) -> None:
    report = await rig.verified()
    assert (report.findings, report.unsettled, rig.pauses) == ([], [], 0)
    assert report.looked_at["records"] == 1500 + 1 + 20 + 1
    assert report.looked_at["extents"] == 2 * (1500 + 2 + 20 + 1)
    assert (report.looked_at["instances"], report.looked_at["documents"]) == (2, 8)


async def test_verifying_changes_nothing(rig: IndexRig) -> None:
    before = [await rig.blocks("i"), await rig.blocks("j"), rig.configured()]
    await rig.verified(repair=True)
    assert [await rig.blocks("i"), await rig.blocks("j"), rig.configured()] == before


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
    pin = Pin("ef" * 8, 997, "g", "me", NOW + 30, HeldPlaces.of([HeldPlace(1, "l", 1)]))
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
        assert rig.metadata.new_backend(Placement(uid, 1)) is not backend, "the memory of what is gone is given back"
        await rig.settle()


# ── What is derived from records ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_wrong_usage_is_found_and_recounted(shared: IndexRig, redis_standalone: Standalone) -> None:
    """Invariant 4, per shard: the counters are the sums of the records."""
    with _admin(redis_standalone) as client:
        client.hincrby(_name(shared, "u", "i", 1), "6/one", 1234)
        client.hset(_name(shared, "u", "j", 2), "4/two", 5)
    found = await _mended(shared)
    assert [(each.check, each.what.partition(": ")[2]) for each in found.findings if "instance" in each.where] == [
        ("usage", "+1234 bytes on storage 'one' (type 6)"),
        ("usage", "+5 bytes on storage 'two' (type 4)"),
    ]
    assert await shared.usage("i") == {ONE: 10 * (1500 + 1 + 1), TWO: 10}
    assert await shared.usage("j") == {ONE: 200}


async def test_wrong_counters_that_managers_share_are_found_and_recounted(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    """Invariant 4, per group, per storage and over all: what managers share is the sum of all shards."""
    assert shared.metadata.client is not None
    prefix = shared.metadata.client.prefix
    with _admin(redis_standalone) as client:
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
    with _admin(redis_standalone) as client:
        client.zadd(_name(shared, "p", "j", 3), {pack(">q", 3): 5.0})  # a block that only serves
        client.zadd(_name(shared, "p", "j", 4444), {pack(">q", 4444): 5.0})  # no block at all
        client.zrem(_name(shared, "p", "i", -7), pack(">q", -7))
        client.zadd(_name(shared, "p", "i", 5000), {pack(">q", 5000): NOW + 31})
    found = await _mended(shared)
    assert {each.where: each.what for each in found.findings} == {
        _where(shared, "j", 3): "the pending set says 5.0, the record None",
        _where(shared, "j", 4444): "the pending set names a block that has no record",
        _where(shared, "i", -7): f"the pending set says None, the record {NOW + 5}",
        _where(shared, "i", 5000): f"the pending set says {NOW + 31}, the record {NOW + 30}",
    }
    assert await shared.backend("i").due(NOW + 30, 10) == [-7, 5000]
    assert await shared.backend("j").due(NOW + 30, 10) == []


async def test_children_that_do_not_agree_are_found_and_mended(shared: IndexRig, redis_standalone: Standalone) -> None:
    with _admin(redis_standalone) as client:
        client.zrem(_name(shared, "c", "j", 10), pack(">qq", 9, 10))  # 10 misses its parent
        client.zadd(_name(shared, "c", "j", 11), {pack(">qq", 500, 11): 0})  # 11 has one too many
        client.zadd(_name(shared, "c", "j", 900), {pack(">qq", 899, 900): 0})  # a child without record
    found = await _mended(shared)
    assert {each.where: each.what for each in found.findings} == {
        _where(shared, "j", 10): "the record is missing among the children of 9",
        _where(shared, "j", 11): "it stands among the children of 500",
        _where(shared, "j", 900): "the children of 899 name a block that has no record",
    }
    assert [await shared.backend("j").children(key) for key in (9, 10, 500, 899)] == [[10], [11], [], []]


async def test_a_record_that_no_scan_finds_is_put_in_order(shared: IndexRig, redis_standalone: Standalone) -> None:
    with _admin(redis_standalone) as client:
        client.zrem(_name(shared, "z", "j", 5), pack(">q", 5))
    found = await shared.verified(repair=True)
    assert [(each.where, each.is_mended) for each in found.findings] == [(_where(shared, "j", 5), True)]
    assert (await shared.verified()).is_clean
    assert 5 in await shared.blocks("j")


async def test_an_order_entry_without_a_record_goes(shared: IndexRig, redis_standalone: Standalone) -> None:
    with _admin(redis_standalone) as client:
        client.unlink(_name(shared, "b", "j", 20) + pack(">q", 20))
    found = await shared.verified(repair=True)
    assert [each.check for each in found.findings] == ["block", *["usage"] * 4]
    assert (await shared.verified()).is_clean
    assert await shared.usage("j") == {ONE: 190}


async def test_a_record_that_cannot_be_read_goes_only_when_asked_for(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    with _admin(redis_standalone) as client:
        client.set(_name(shared, "b", "j", 20) + pack(">q", 20), b"\x01" + b"s" * 8 + b"\xc1")
        client.set(_name(shared, "b", "j", 19) + pack(">q", 19), b"\x07" + b"s" * 8)
    kept = await shared.verified(repair=True)
    assert {each.where: each.is_mended for each in kept.findings if each.check == "block"} == {
        _where(shared, "j", 19): False,
        _where(shared, "j", 20): False,
    }
    assert (await shared.verified(repair=True, drop_unreadable=True)).is_mended
    assert (await shared.verified()).is_clean
    assert sorted(await shared.blocks("j")) == list(range(1, 19))
    assert await shared.backend("j").children(18) == await shared.backend("j").children(19) == []


async def test_what_puts_itself_right_in_the_meantime_is_no_finding(
    shared: IndexRig, redis_standalone: Standalone
) -> None:
    """As a manager's write in flight does: what looks wrong is looked at again."""
    name, member = _name(shared, "p", "j", 3), pack(">q", 3)
    with _admin(redis_standalone) as client:
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


async def test_slots_of_one_file_are_extents_of_their_own(rig: IndexRig) -> None:
    """Invariant 5 is about bytes, not about files."""

    def slot(blkid: int | None, size: int) -> BlockRecord:
        middle = "" if blkid is None else f"blkid={blkid}&"
        uri = SpecUri("a", f"file://one/packed?{middle}size={size}")
        chunk = encode_chunk(StorageType.ST_NFS, 1, [uri])
        return BlockRecord(None, 0, (location("l")._replace(chunk=chunk, spec_names=("a",)),))

    await rig.put("i", {9000 + number: slot(number, 100) for number in range(50)})
    assert (await rig.verified()).is_clean
    await rig.put("j", {9100: slot(1, 150)})  # bytes 150 to 300
    report = await rig.verified()
    pairs = {tuple(sorted(re.findall(r"block (\d+)", each.where))) for each in report.findings}
    assert pairs == {("9001", "9100"), ("9002", "9100")}
