"""What verification reads beside the index: extents gathered part by part, and the rows of a RocksDB."""

from __future__ import annotations

from pathlib import Path
from struct import pack

from audit_rig import location, record
from hypothesis import given
from hypothesis import strategies as st

from kvcm.cache.extents import ExtentPart, Owner, part_count
from kvcm.index.backends.rocks_audit import drop_rows, look_at_rows
from kvcm.index.codec import encode_payload
from kvcm.model.clock import SystemClock
from kvcm.model.locations import BlockRecord, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.rocks.store import RocksStore


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)), max_size=12),
    st.integers(1, 4),
)
def test_overlaps_are_found_in_whatever_parts_the_objects_are_cut(
    extents: list[tuple[int, int, int]], parts: int
) -> None:
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


def test_a_uri_that_cannot_be_read_is_told() -> None:
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
    found = look_at_rows(store.log)
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
    found = look_at_rows(store.log)
    store.log.close_at_once()
    assert (found.bad, found.records) == ([], {1: 3})
