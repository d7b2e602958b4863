"""Records as bytes: they come back equal, with their types, and share what they can; those of others are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.index import codec
from kvcm.index.backends.memory import unpack
from kvcm.index.codec import (
    ColumnDecoder,
    StampedRecord,
    decode_begun,
    decode_payload,
    decode_payloads,
    decode_record,
    encode_begun,
    encode_payload,
    encode_payloads,
    encode_record,
    header_of,
)
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed_key
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType

NAMES = st.text(max_size=12)
TIMES = st.floats(0, 4e9)
KEYS = st.integers(-(2**63), 2**63 - 1)
LOCATIONS = st.builds(
    Location,
    id=NAMES,
    storage=NAMES,
    storage_type=st.sampled_from(StorageType),
    status=st.sampled_from(LocationStatus),
    spec_names=st.lists(NAMES, max_size=3).map(tuple),
    chunk=st.binary(max_size=40),
    size_bytes=st.integers(0, 2**50),
    written_at=TIMES,
    session_id=NAMES,
    deadline=TIMES,
    priority=st.just(0) | st.integers(-(2**31), 2**31 - 1),
    pinned_until=st.just(0.0) | TIMES,
)
RECORDS = st.builds(
    BlockRecord,
    parent=st.none() | KEYS,
    depth=st.integers(0, 2**40),
    locations=st.lists(LOCATIONS, max_size=4).map(tuple),
)
SEVERAL = st.lists(LOCATIONS, min_size=1, max_size=3).map(tuple)
LOCATION = Location("id", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"chunk", 10, 5.0)

CHUNK = encode_chunk(StorageType.ST_NFS, 1, [SpecUri("tp0", "file://nfs/a")])
PLACE = Location("ab", "nfs", StorageType.ST_NFS, LocationStatus.WRITING, ("tp0",), CHUNK, 300, 1.5, "session", 2.0)
RECORD = BlockRecord(mixed_key(-1), 3, (PLACE,))


@settings(deadline=None)
@given(record=RECORDS)
def test_records_come_back_equal(record: BlockRecord) -> None:
    stamped, plain = decode_record(encode_record(record)), decode_payload(encode_payload(record))
    assert stamped == record == plain
    assert type(plain) is BlockRecord
    assert type(stamped) is StampedRecord
    for location in (*stamped.locations, *plain.locations):
        assert type(location) is Location
        assert type(location.storage_type) is StorageType
        assert type(location.status) is LocationStatus
        assert type(location.spec_names) is tuple
        assert type(location.written_at) is type(location.deadline) is type(location.pinned_until) is float


@settings(deadline=None)
@given(records=st.lists(st.builds(BlockRecord, st.none() | KEYS, st.integers(0, 2**31 - 1), SEVERAL), max_size=9))
def test_columns_hold_what_the_records_do(records: list[BlockRecord]) -> None:
    decoder = ColumnDecoder()
    decoder.decode(list(map(encode_payload, records[::2])))
    columns = decoder.decode(list(map(encode_payload, records)))
    headers = [decoder.headers[kind] for kind in columns.kinds.tolist()]
    assert columns.parents.tolist() == [record.parent or 0 for record in records]
    assert columns.depths.tolist() == [~each.depth if each.parent is None else each.depth for each in records]
    assert list(map(unpack, headers, columns.chunks)) == [record.locations for record in records]
    assert decode_payloads(list(map(encode_payload, records))) == records


def test_a_kind_that_was_forgotten_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MOST_KINDS_KNOWN", 2)
    ids = ["a", "b", "a", "c", "c", "a"]
    decoder = ColumnDecoder()
    payloads = [encode_payload(BlockRecord(None, 0, (LOCATION._replace(id=each),))) for each in ids]
    kinds = decoder.decode(payloads).kinds.tolist()
    assert kinds == [0, 1, 0, 2, 2, 3]
    assert [decoder.headers[kind][0] for kind in kinds] == ids


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b"\x63", "version 99"),
        (b"\x01", "damaged"),
        (b"\x01\x94\xc0\x00\x01\xc4\x00", "damaged"),
        (b"\x01\x92\xc0\x00", "no location"),
        (encode_payload(BlockRecord(None, 2**31, (LOCATION,))), "damaged"),
    ],
)
def test_a_damaged_record_makes_no_columns(payload: bytes, named: str) -> None:
    whole = encode_payload(BlockRecord(None, 0, (LOCATION,)))
    with pytest.raises(StorageIOError, match=named):
        ColumnDecoder().decode([whole, payload])


@settings(deadline=None)
@given(
    keys=st.lists(KEYS, min_size=1, max_size=4),
    parent=st.none() | KEYS,
    depth=st.integers(0, 2**31 - 5),
    location=LOCATIONS,
)
def test_a_run_is_encoded_as_its_records(keys: list[int], parent: int | None, depth: int, location: Location) -> None:
    run = BlockRun(keys, parent, depth, location._replace(chunk=b""), [b"%d" % key for key in keys])
    records = list(run.records())
    parents = np.array([record.parent or 0 for record in records], np.int64)
    depths = np.array([~record.depth if record.parent is None else record.depth for record in records], np.int32)
    payloads = encode_payloads(run.location, parents, depths, run.chunks)
    assert payloads == list(map(encode_payload, records))


@settings(deadline=None)
@given(
    uid=st.integers(0, 2**32 - 1),
    keys=st.lists(KEYS, min_size=1, max_size=9),
    parent=st.none() | KEYS,
    depth=st.integers(0, 2**31 - 1),
    location=LOCATIONS,
    cut=st.floats(0, 1, exclude_max=True),
)
def test_a_run_that_begins_is_read_as_it_was(
    uid: int, keys: list[int], parent: int | None, depth: int, location: Location, cut: float
) -> None:
    run = BlockRun(keys, parent, depth, location._replace(chunk=b""), [b"%d" % key for key in keys])
    encoded = encode_begun(uid, run)
    assert decode_begun(encoded) == (uid, run)
    with pytest.raises(StorageIOError):
        decode_begun(encoded[: int(cut * len(encoded))])


def test_a_run_of_a_later_version_or_without_as_many_chunks_as_keys_is_refused() -> None:
    header = header_of(LOCATION)
    for version, keys, named in ((2, 1, "version 2"), (1, 2, "2 keys and 1 chunks"), (1, 0, "0 keys and 1 chunks")):
        with pytest.raises(StorageIOError, match=named):
            decode_begun(msgspec.msgpack.encode((version, 1, None, 0, header, bytes(8 * keys), [b"x"])))


def test_the_format_is_the_one_that_is_on_disks() -> None:
    """Bytes of version 1. A change that fails here needs a new version."""
    header = bytes.fromhex("99 a2 6162 a3 6e6673 04 02 91 a3 747030 cd 012c cb 3ff8000000000000") + (
        b"\xa7session" + bytes.fromhex("cb 4000000000000000")
    )
    body = b"\x94\xff\x03" + b"\xc4" + bytes((len(header),)) + header + b"\xc4" + bytes((len(CHUNK),)) + CHUNK
    assert encode_payload(RECORD) == b"\x01" + body
    encoded = encode_record(RECORD)
    assert encoded[:1] + encoded[9:] == b"\x01" + body


def test_priority_and_pin_follow_where_there_is_one() -> None:
    """What has neither is written as it was before there were any, and read the same."""
    (plain, pinned, preferred) = (
        encode_payload(RECORD._replace(locations=(place,)))
        for place in (PLACE, PLACE._replace(pinned_until=2.5), PLACE._replace(priority=-7))
    )
    end = b"\xcb\x40" + bytes(7)  # the deadline
    assert plain[6:7] == b"\x99"
    assert end + b"\xc4" in plain
    for encoded, more in ((pinned, b"\x00\xcb\x40\x04" + bytes(6)), (preferred, b"\xf9\xcb" + bytes(8))):
        assert encoded[6:7] == b"\x9b"
        assert end + more + b"\xc4" in encoded


def test_every_write_has_a_stamp_of_its_own() -> None:
    encoded = [encode_record(RECORD) for _ in range(1000)]
    stamps = {decode_record(data).stamp for data in encoded}
    assert stamps == {data[1:9] for data in encoded}
    assert len(stamps) == 1000
    assert not stamps & {bytes(8), b"\xff" * 8}


def test_a_record_derived_from_a_stored_one_has_no_stamp() -> None:
    stored = decode_record(encode_record(RECORD))
    derived = stored._replace(depth=9)
    assert (stored.stamp != b"", getattr(derived, "stamp", b"")) == (True, b"")


def test_another_version_is_refused_with_both_named() -> None:
    for data, decode in ((encode_record(RECORD), decode_record), (encode_payload(RECORD), decode_payload)):
        with pytest.raises(StorageIOError, match=r"version 7, this release reads version 1: start the release that"):
            decode(b"\x07" + data[1:])


@given(data=st.data())
def test_a_damaged_record_is_refused(data: st.DataObject) -> None:
    encoded = encode_payload(RECORD)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(StorageIOError, match=f"of {cut} bytes is damaged"):
        decode_payload(encoded[:cut])


@given(
    garbage=st.binary(max_size=60) | st.sampled_from([b"\x84\x00\x00\x01\x01\x02\x02\x03\x03", b"\x94\x00\x00\x00\x00"])
)
def test_garbage_is_refused_or_a_record(garbage: bytes) -> None:
    try:
        record = decode_record(b"\x01" + bytes(8) + garbage)
    except StorageIOError:
        return
    assert isinstance(record, BlockRecord)


def test_blocks_of_a_session_share_all_but_their_chunk() -> None:
    other = BlockRecord(5, 4, (PLACE._replace(chunk=CHUNK + b"x"),))
    (one,), (two,) = (decode_payload(encode_payload(record)).locations for record in (RECORD, other))
    for name in Location._fields:
        assert (getattr(one, name) is getattr(two, name)) == (name != "chunk"), name


def test_blocks_of_different_sessions_share_their_names() -> None:
    other = BlockRecord(None, 0, (PLACE._replace(id="other", written_at=99.0),))
    (one,), (two,) = (decode_record(encode_record(record)).locations for record in (RECORD, other))
    assert one.id != two.id
    assert one.storage is two.storage
    assert one.spec_names is two.spec_names
