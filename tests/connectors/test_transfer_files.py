"""The engine over real files: neighbours move together and fail alone, and no link leads out of a storage."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_parts import bytes_of
from thoroughness import examples
from transfer_parts import DEADLINE, failures

from kvcm.connectors.transfer import Failure, FileMover, TransferEngine, TransferItem, paths
from kvcm.connectors.transfer.engine import MOVERS
from kvcm.model.storages import (
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import LocationUri

STORAGE = "nfs_01"
SIZE = 512


@pytest.fixture
def engine(root: Path) -> Iterator[TransferEngine]:
    engine = TransferEngine({("file", STORAGE): FileMover({STORAGE: str(root)})})
    yield engine
    engine.close()


@pytest.fixture(params=[True, False], ids=["openat2", "without-openat2"])
def any_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open files as a kernel with and one without `openat2` does."""
    if not request.param:
        monkeypatch.setattr(paths, "open_without_links", lambda *_: None)


def item(path: Path, slot: int | None = None, size: int = SIZE, fill: int = 0) -> TransferItem:
    return TransferItem(
        LocationUri("file", STORAGE, str(path), size, slot), [memoryview(bytearray(bytes([fill % 256]) * size))]
    )


@pytest.mark.usefixtures("any_kernel")
def test_one_damaged_file_among_hundreds_costs_only_its_own_items(engine: TransferEngine, root: Path) -> None:
    cluster = root / "cluster"
    items = [item(cluster / "inst" / f"f{index}", fill=index) for index in range(300)]
    items += [item(cluster / "inst" / f"p{index // 32}", index % 32, fill=index) for index in range(320)]
    assert failures(engine.save(items, DEADLINE)) == [None] * 620
    (cluster / "inst" / "f7").unlink()
    os.truncate(cluster / "inst" / "f9", SIZE - 1)
    os.truncate(cluster / "inst" / "p2", 20 * SIZE + 100)
    (cluster / "inst" / "f11").unlink()
    (cluster / "inst" / "f11").symlink_to("/etc/hostname")
    (cluster / "inst" / "f13").unlink()
    (cluster / "inst" / "f13").mkdir()
    expected: list[Failure | None] = [None] * 620
    for lost in (7, 9, *range(300 + 64 + 20, 300 + 96)):
        expected[lost] = Failure.LOST
    read = [TransferItem(part.uri, [memoryview(bytearray(SIZE))]) for part in items]
    results = engine.load(read, DEADLINE)
    expected[11] = Failure.REFUSED
    expected[13] = results[13].failure
    assert results[13].failure in {Failure.REFUSED, Failure.ERROR}
    assert failures(results) == expected
    assert not (cluster / "inst" / "f7").exists()
    assert all(
        bytes_of(got) == bytes_of(put) for got, put, result in zip(read, items, results, strict=True) if result.ok
    )


@given(
    slots=st.lists(st.integers(0, 12), max_size=30),
    stored=st.integers(0, 13 * 16),
    misfits=st.sets(st.integers(0, 29), max_size=3),
)
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_neighbours_that_move_together_end_as_if_each_had_moved_alone(
    engine: TransferEngine, root: Path, slots: list[int], stored: int, misfits: set[int]
) -> None:
    """Whatever order, gaps and repetitions: the file's length and the item itself decide, not what lies beside it."""
    size, path = 16, root / "cluster" / "packed"
    data = os.urandom(stored)
    path.write_bytes(data)
    items = [item(path, slot, size) for slot in slots]
    for index in misfits & set(range(len(items))):
        items[index] = TransferItem(items[index].uri, [memoryview(bytearray(size + 1))])
    results = engine.load(items, DEADLINE)
    for index, (part, result) in enumerate(zip(items, results, strict=True)):
        wanted = data[part.uri.offset : part.uri.offset + size]
        if index in misfits:
            assert result.failure is Failure.REFUSED
        elif len(wanted) < size:
            assert result.failure is Failure.LOST
            assert result.moved_bytes == len(wanted)
        else:
            assert (result.ok, bytes_of(part)) == (True, wanted)


def test_more_neighbours_than_one_system_call_takes(engine: TransferEngine, root: Path) -> None:
    slots = range(2 * os.sysconf("SC_IOV_MAX") + 3)
    items = [item(root / "cluster" / "packed", slot, 3, fill=slot) for slot in slots]
    assert all(result.ok for result in engine.save(items[::-1], DEADLINE))
    assert (root / "cluster" / "packed").read_bytes() == b"".join(bytes_of(part) for part in items)


@pytest.mark.usefixtures("any_kernel")
def test_links_below_the_root_lead_nowhere(engine: TransferEngine, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s" * SIZE)
    (root / "linked").symlink_to(outside)
    (root / "cluster" / "linked").symlink_to(outside)
    (root / "cluster" / "file").symlink_to(outside / "secret")
    (root / "cluster" / "up").symlink_to("..")
    places = ["linked/secret", "cluster/linked/secret", "cluster/file", "cluster/linked/new", "cluster/up/cluster/new"]
    for move in (engine.load, engine.save):
        results = move([item(root / place, fill=1) for place in places], DEADLINE)
        assert failures(results) == [Failure.REFUSED] * len(places)
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"s" * SIZE


@pytest.mark.usefixtures("any_kernel")
def test_a_directory_that_is_swapped_for_a_link_is_safe(engine: TransferEngine, root: Path, tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", root / "cluster" / "inst"
    outside.mkdir()
    inside.mkdir()
    (outside / "f").write_bytes(b"s" * SIZE)
    (inside / "f").write_bytes(b"i" * SIZE)
    stop = threading.Event()

    def swap() -> None:
        aside = root / "cluster" / "aside"
        while not stop.is_set():
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(OSError):  # a save may have made the directory again
                inside.rename(aside)
                inside.symlink_to(outside)
                inside.unlink()
                aside.rename(inside)
            if inside.is_symlink():
                inside.unlink()

    swapping = threading.Thread(target=swap, daemon=True)
    swapping.start()
    try:
        found: set[Failure | None] = set()
        for _ in range(300):
            part = item(inside / "f")
            [result] = engine.load([part], DEADLINE)
            found.add(result.failure)
            assert not result.ok or bytes_of(part) == b"i" * SIZE
            assert b"s" not in bytes_of(part)
            engine.save([item(inside / "f", fill=ord("i"))], DEADLINE)
    finally:
        stop.set()
        swapping.join()
    assert found & {None, Failure.REFUSED, Failure.LOST}
    assert (outside / "f").read_bytes() == b"s" * SIZE
    assert [path.name for path in outside.iterdir()] == ["f"]


@pytest.mark.usefixtures("any_kernel")
def test_a_root_behind_a_link_may_be_moved_to_another_place(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "cluster").mkdir(parents=True)
        (tmp_path / name / "cluster" / "f").write_bytes(name.encode()[:1] * SIZE)
    alias = tmp_path / "alias"
    engine = TransferEngine({("file", STORAGE): FileMover({STORAGE: str(alias)})})
    for name in ("first", "second"):
        alias.unlink(missing_ok=True)
        alias.symlink_to(tmp_path / name)
        part = item(alias / "cluster" / "f")
        assert failures(engine.load([part], DEADLINE)) == [None]
        assert bytes_of(part) == name.encode()[:1] * SIZE
    engine.close()


def test_no_file_stays_open_and_no_mount_is_kept_busy(engine: TransferEngine, root: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    items = [item(root / "cluster" / "inst" / str(index)) for index in range(50)]
    engine.save(items, DEADLINE)
    engine.load([*items, item(root / "cluster" / "gone"), item(root / "cluster")], DEADLINE)
    assert set(Path("/proc/self/fd").iterdir()) == before


# ---- Storages of all types of directories: each by its own scheme ----

SCHEMES = {"nfs": "file", "fs": "hf3fs", "vcns": "hf3fs"}


@pytest.fixture
def storages(tmp_path: Path) -> list[StorageConfig]:
    (tmp_path / "r" / "cluster").mkdir(parents=True)
    return [
        StorageConfig("nfs", NfsStorageSpec(f"{tmp_path}/r")),
        StorageConfig("fs", ThreeFSStorageSpec("", f"{tmp_path}/", "/r/")),
        StorageConfig("vcns", VcnsThreeFSStorageSpec("", str(tmp_path), "r", 1, False, "host", 1, "redis://meta")),
    ]


@pytest.fixture
def mover(storages: list[StorageConfig]) -> FileMover:
    return FileMover.for_storages(storages)


def part_of(tmp_path: Path, scheme: str, storage: str, content: bytes = b"12345678") -> TransferItem:
    uri = LocationUri(scheme, storage, f"{tmp_path}/r/cluster/i/kv/{storage}.aa", 8)
    return TransferItem(uri, [memoryview(bytearray(content))])


@pytest.mark.parametrize("storage", SCHEMES)
def test_a_scheme_of_another_type_is_refused(mover: FileMover, tmp_path: Path, storage: str) -> None:
    """Also behind an item of the same file that is right."""
    right = SCHEMES[storage]
    wrong = "hf3fs" if right == "file" else "file"
    items = [part_of(tmp_path, scheme, storage) for scheme in (right, wrong, "nfs")]
    first, *others = mover.save(items, DEADLINE)
    assert first.ok
    assert [each.failure for each in others] == [Failure.REFUSED] * 2
    assert f"begin with {right}://, not {wrong}://" in others[0].reason
    assert [each.ok for each in mover.load(items, DEADLINE)] == [True, False, False]


def test_an_engine_moves_what_lies_on_any_of_them(storages: list[StorageConfig], tmp_path: Path) -> None:
    engine = TransferEngine.for_storages(storages)
    items = [part_of(tmp_path, scheme, storage) for storage, scheme in SCHEMES.items()]
    assert all(each.ok for each in engine.save(items, DEADLINE))
    loaded = [part_of(tmp_path, scheme, storage, bytes(8)) for storage, scheme in SCHEMES.items()]
    assert all(each.ok for each in engine.load(loaded, DEADLINE))
    assert [bytes(each.buffers[0]) for each in loaded] == [b"12345678"] * 3
    engine.close()


def test_another_mover_of_mooncake_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster").mkdir()
    mover = FileMover.for_storages([StorageConfig("other", NfsStorageSpec(str(tmp_path)))])
    monkeypatch.setitem(MOVERS, "mooncake", lambda _: mover)
    engine = TransferEngine.for_storages([StorageConfig("store", MooncakeStorageSpec())])
    assert set(engine.statistics().storages) == {"store"}
    uri = LocationUri("mooncake", "store", "/x", 1)
    (result,) = engine.load([TransferItem(uri, [memoryview(bytearray(1))])], DEADLINE)
    assert "is none of ['other']" in result.reason  # the other mover's word
    engine.close()
