"""What a match returns for one block (invariant 1, decision 14)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_rig import TableView, location, record

from kvcm.index.answers import compose_answer, filter_specs
from kvcm.model.locations import Location, LocationStatus, SpecUri, decode_chunk, encode_chunk, with_checksums
from kvcm.model.storages import StorageType

SERVING, WRITING, DELETING = LocationStatus.SERVING, LocationStatus.WRITING, LocationStatus.DELETING
VIEW = TableView({"pool": 0, "mc": 1, "fs": 2, "nfs": 3, "nfs2": 3, "off": None})
TYPES = {
    "pool": StorageType.ST_TAIRMEMPOOL,
    "mc": StorageType.ST_MOONCAKE,
    "fs": StorageType.ST_3FS,
    "nfs": StorageType.ST_NFS,
    "nfs2": StorageType.ST_NFS,
    "off": StorageType.ST_NFS,
    "unknown": StorageType.ST_NFS,
}


def at(storage: str, *specs: str, status: LocationStatus = SERVING) -> Location:
    return location(storage, storage, TYPES[storage], status, specs or ("kv",))


def answered(*locations: Location) -> tuple[StorageType, int, dict[str, str]] | None:
    chunk = compose_answer(record(*locations), VIEW)
    if chunk is None:
        return None
    decoded = decode_chunk(chunk)
    assert len({spec.name for spec in decoded.specs}) == len(decoded.specs)
    return decoded.storage_type, decoded.spec_size, {spec.name: spec.uri.split("/")[2] for spec in decoded.specs}


@pytest.mark.parametrize("status", [WRITING, DELETING])
def test_only_serving_locations_are_returned(status: LocationStatus) -> None:
    assert answered(at("pool", status=status)) is None
    assert answered(at("pool", status=status), at("nfs")) == (StorageType.ST_NFS, 1, {"kv": "nfs"})


@pytest.mark.parametrize("storage", ["off", "unknown"])
def test_only_available_storages_are_returned(storage: str) -> None:
    assert answered(at(storage)) is None
    assert answered(at(storage), at("nfs")) == (StorageType.ST_NFS, 1, {"kv": "nfs"})


@pytest.mark.parametrize(
    ("storages", "best"),
    [
        (["nfs", "pool"], "pool"),
        (["pool", "nfs"], "pool"),
        (["fs", "mc", "nfs"], "mc"),
        (["nfs", "nfs2"], "nfs"),
        (["nfs2", "nfs"], "nfs2"),
        (["off", "nfs2", "nfs"], "nfs2"),
    ],
)
def test_the_fastest_location_wins_and_ties_go_to_the_first(storages: list[str], best: str) -> None:
    assert answered(*map(at, storages)) == (TYPES[best], 1, {"kv": best})


def test_specs_are_joined_each_from_its_fastest_location() -> None:
    joined = answered(at("nfs", "tp0", "tp1", "state"), at("pool", "tp1"), at("fs", "tp0", "tp1"))
    assert joined == (StorageType.ST_TAIRMEMPOOL, 3, {"tp1": "pool", "tp0": "fs", "state": "nfs"})


def test_a_single_location_is_answered_with_its_own_bytes() -> None:
    """Nearly every block has one location; no second copy of its chunk may exist."""
    only = at("nfs", "tp0", "tp1")
    assert compose_answer(record(only, at("pool", status=WRITING)), VIEW) is only.chunk


LOCATIONS = st.lists(
    st.builds(
        lambda storage, status, specs: at(storage, *specs, status=status),
        st.sampled_from(sorted(TYPES)),
        st.sampled_from([SERVING, SERVING, WRITING, DELETING]),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(locations=LOCATIONS)
def test_any_record_is_answered_by_decision_14(locations: list[Location]) -> None:
    ranks = [VIEW.rank(each.storage) if each.status is SERVING else None for each in locations]
    expected = {}
    for spec in "abc":
        having = [(rank, i) for i, rank in enumerate(ranks) if rank is not None and spec in locations[i].spec_names]
        if having:
            expected[spec] = locations[min(having)[1]].storage
    first = min(((rank, i) for i, rank in enumerate(ranks) if rank is not None), default=None)
    if first is None:
        assert answered(*locations) is None
    else:
        assert answered(*locations) == (locations[first[1]].storage_type, len(expected), expected)


def test_checksums_stay_with_their_specs() -> None:
    """Where specs of several locations are joined, and where some are asked for."""
    slow, fast = at("nfs", "tp0", "tp1"), at("pool", "tp1")
    checked = [
        each._replace(chunk=with_checksums(each.chunk, dict.fromkeys(each.spec_names, checksum)))
        for each, checksum in ((slow, 1), (fast, 2**64 - 1))
    ]
    chunk = compose_answer(record(*checked), VIEW)
    assert chunk is not None
    assert {spec.name: spec.checksum for spec in decode_chunk(chunk).specs} == {"tp1": 2**64 - 1, "tp0": 1}
    (kept,) = decode_chunk(filter_specs(chunk, frozenset(["tp0"]))).specs
    assert kept.checksum == 1


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [({"a"}, ["a"]), ({"b", "a"}, ["a", "b"]), ({"nothing"}, []), (set(), []), ({"c", "x"}, ["c"])],
)
def test_filtered_specs_keep_their_order_and_spec_size_counts_all(wanted: set[str], kept: list[str]) -> None:
    chunk = encode_chunk(StorageType.ST_3FS, 3, [SpecUri(name, f"u-{name}") for name in "abc"])
    filtered = decode_chunk(filter_specs(chunk, frozenset(wanted)))
    assert filtered == (StorageType.ST_3FS, 3, tuple(SpecUri(name, f"u-{name}") for name in kept))
