"""What every storage promises the manager. A new storage type joins with one line in storage_rig.KINDS.

Packing is that of wire.md 8 under design.md decisions 1 and 12.
"""

import asyncio
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_rig import KINDS, Kind, addresses, allocation, fill_objects

from kvcm.model.names import path_component
from kvcm.model.storages import StorageType
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, StorageBackend

UGLY_NAMES = [
    "..",
    ".",
    "../../etc",
    "/",
    "//",
    "a/b",
    "%2e%2e",
    "%",
    "ключ 鍵",
    "a?b#c&d=e",
    "~",
    "n" * 256,
    "鍵" * 85,
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(kind: Kind, root: Path) -> StorageBackend:
    return kind.open(root)


def expected_chunks(what: Allocation, keys_per_object: int) -> list[list[int]]:
    """Wire.md 8: one list where all parts are of one size, one list per spec otherwise, cut into chunks."""
    lists = [list(range(len(what.parts)))]
    if len({part.size_bytes for part in what.parts}) > 1:
        specs = list(dict.fromkeys(part.spec_name for part in what.parts))
        lists = [[i for i, part in enumerate(what.parts) if part.spec_name == spec] for spec in specs]
    per = max(1, keys_per_object)
    return [each[start : start + per] for each in lists for start in range(0, len(each), per)]


def hex_of(key: int) -> str:
    return format(key % 2**64, "x")


def check_packing(kind: Kind, what: Allocation, places: list[LocationUri]) -> None:
    chunks = expected_chunks(what, kind.keys_per_object)
    paths = [{places[i].path for i in chunk} for chunk in chunks]
    assert all(len(each) == 1 for each in paths)
    assert len(set.union(set(), *paths)) == len(chunks), "chunks never share an object"
    for chunk in chunks:
        first = what.parts[chunk[0]]
        name = PurePosixPath(places[chunk[0]].path)
        folder = f"/cluster/{path_component(what.instance_id)}/{path_component(first.spec_name)}"
        assert str(name.parent).endswith(folder)
        stem, _, location_id = name.name.rpartition(".")
        assert location_id == what.location_id
        logical, underscore, packed = stem.partition("_")
        count, _, digest = packed.partition("x")
        assert logical == hex_of(first.key)
        assert count == (str(len(chunk)) if len(chunk) > 1 else ""), "whoever deletes the last slot knows that it is"
        assert bool(underscore) == (len(chunk) > 1)
        assert len(digest) == (16 if len(chunk) > 1 else 0), "a 64-bit hash in hex"
        for slot, index in enumerate(chunk):
            assert places[index].blkid == (slot if kind.keys_per_object > 1 else None)
            assert places[index].size == what.parts[index].size_bytes


@pytest.mark.parametrize(
    "specs",
    [
        {"tp0": 512, "tp1": 512},
        {"tp0": 512, "tp1": 256},
        {"one": 64},
        {"a": 8, "b": 16, "c": 8},
        {"empty": 0, "also": 0},
    ],
    ids=["equal", "different", "single", "mixed", "zero"],
)
@pytest.mark.parametrize("keys", [[5], [1, 2, 3, 4, 5, 6], list(range(8)), list(range(-10, 9)), [-1, 2**63 - 1]])
def test_parts_are_packed_as_wire_md_8_says(
    kind: Kind, storage: StorageBackend, specs: dict[str, int], keys: list[int]
) -> None:
    what = allocation(specs, keys)
    check_packing(kind, what, addresses(asyncio.run(storage.allocate(what))))


def test_the_example_of_wire_md_8(root: Path) -> None:
    """6 keys × 2 specs of equal size, 8 parts to a file."""
    places = addresses(
        asyncio.run(KINDS["file-8"].open(root).allocate(allocation({"tp0": 512, "tp1": 512}, range(1, 7))))
    )
    first, second = places[0].path, places[8].path
    assert [place.path for place in places] == [first] * 8 + [second] * 4
    assert [place.blkid for place in places] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert first.startswith(f"{root}/cluster/inst/tp0/1_")
    assert second.startswith(f"{root}/cluster/inst/tp1/3_")


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20, unique=True),
    per=st.sampled_from([-1, 0, 1, 2, 3, 8, 100]),
    storage_type=st.sampled_from([StorageType.ST_NFS, StorageType.ST_3FS, StorageType.ST_DUMMY]),
)
def test_any_allocation_is_packed_as_wire_md_8_says(
    tmp_path: Path, sizes: list[int], keys: list[int], per: int, storage_type: StorageType
) -> None:
    kind = Kind(storage_type, per)
    what = allocation({f"spec{i}": size for i, size in enumerate(sizes)}, keys)
    check_packing(kind, what, addresses(asyncio.run(kind.open(tmp_path).allocate(what))))


def test_uris_name_kind_and_storage(kind: Kind, storage: StorageBackend, root: Path) -> None:
    for place in addresses(asyncio.run(storage.allocate(allocation({"tp0": 5, "tp1": 6}, [1, 2])))):
        assert (place.scheme, place.storage, place.key) == (kind.scheme, "s-1", None)
        assert place.path.startswith(f"{root}/cluster/inst/tp")


def test_nothing_is_allocated_for_nothing(storage: StorageBackend) -> None:
    assert asyncio.run(storage.allocate(allocation({"tp0": 5}, []))) == []


def test_sessions_and_clusters_never_share_an_object(kind: Kind, root: Path) -> None:
    """The same blocks, written again and again and by a second cluster on the same root (decision 1)."""
    seen: set[str] = set()
    for cluster in ("cluster", "cluster2", "clus/ter", ".."):
        storage = kind.open(root, cluster)
        for location_id in ("aa", "ab", "b"):
            uris = asyncio.run(storage.allocate(allocation({"tp0": 8, "tp1": 8}, [1, 2, 3], location_id)))
            objects = {place.path for place in addresses(uris)}
            assert seen.isdisjoint(objects)
            seen |= objects


def test_parts_of_one_session_never_share_an_extent(kind: Kind, storage: StorageBackend) -> None:
    """Invariant 5, with names that look alike."""
    what = Allocation("i", "aa", allocation({"a": 8, "a/0": 8, "a_0": 8, "a.0": 4, "A": 8}, [0, 1, 16, -1]).parts)
    places = addresses(asyncio.run(storage.allocate(what)))
    assert len({(place.path, place.blkid) for place in places}) == len(places)


@pytest.mark.parametrize("where", ["instance", "spec", "cluster"])
@pytest.mark.parametrize("name", UGLY_NAMES, ids=range(len(UGLY_NAMES)))
def test_no_name_leaves_the_root(kind: Kind, root: Path, name: str, where: str) -> None:
    storage = kind.open(root, name if where == "cluster" else "cluster")
    what = allocation({name if where == "spec" else "kv": 8}, [7], instance_id=name if where == "instance" else "inst")
    (place,) = addresses(asyncio.run(storage.allocate(what)))
    relative = PurePosixPath(place.path).relative_to(root)
    assert len(relative.parts) == 4
    assert not {".", "..", ""} & set(relative.parts)
    assert all(len(component.encode()) <= 255 for component in relative.parts)
    assert not set("?#&= ") & set(place.path)


async def test_deletions_are_idempotent(storage: StorageBackend) -> None:
    uris = await storage.allocate(allocation({"tp0": 8, "tp1": 8}, range(6)))
    for _ in range(3):
        assert await storage.delete(uris[:4]) == [None] * 4
        assert await storage.delete(list(reversed(uris))) == [None] * len(uris)
    assert await storage.delete([]) == []


async def test_space_is_sane(storage: StorageBackend) -> None:
    space = await storage.space()
    assert 0 <= space.free_bytes <= space.capacity_bytes
    assert space.capacity_bytes > 0


async def test_what_was_deleted_does_not_exist(storage: StorageBackend) -> None:
    """`exists` says whether all bytes of a part are there; those of a deleted part are not, neighbours or none."""
    uris = await storage.allocate(allocation({"tp0": 8}, range(3)))
    fill_objects(uris, 8 * 3)
    assert await storage.exists(uris) == [True] * 3
    assert await storage.delete(uris[1:2]) == [None]
    assert await storage.exists(uris) == [True, False, True]


async def test_a_replacement_inherits_what_exists(kind: Kind, root: Path, storage: StorageBackend) -> None:
    uris = await storage.allocate(allocation({"tp0": 8}, range(3)))
    fill_objects(uris, 8 * 3)
    successor = kind.open(root)
    successor.inherit(storage)
    storage.close()
    assert await successor.exists(uris) == [True] * 3
    assert await successor.delete(uris) == [None] * 3
    assert await successor.exists(uris) == [False] * 3
