"""Movers of directories serve `file` and `hf3fs` storages, each by its own scheme."""

from pathlib import Path

import pytest

from kvcm.connectors.transfer.engine import MOVERS, TransferEngine
from kvcm.connectors.transfer.file import FileMover
from kvcm.connectors.transfer.mover import Failure, TransferItem
from kvcm.model.storages import (
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import LocationUri

SCHEMES = {"nfs": "file", "fs": "hf3fs", "vcns": "hf3fs"}
DEADLINE = 60.0


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


def item(tmp_path: Path, scheme: str, storage: str, content: bytes = b"12345678") -> TransferItem:
    uri = LocationUri(scheme, storage, f"{tmp_path}/r/cluster/i/kv/{storage}.aa", 8)
    return TransferItem(uri, [memoryview(bytearray(content))])


@pytest.mark.parametrize("storage", SCHEMES)
def test_a_scheme_of_another_type_is_refused(mover: FileMover, tmp_path: Path, storage: str) -> None:
    """Also behind an item of the same file that is right."""
    right = SCHEMES[storage]
    wrong = "hf3fs" if right == "file" else "file"
    items = [item(tmp_path, scheme, storage) for scheme in (right, wrong, "nfs")]
    first, *others = mover.save(items, DEADLINE)
    assert first.ok
    assert [each.failure for each in others] == [Failure.REFUSED] * 2
    assert f"begin with {right}://, not {wrong}://" in others[0].reason
    assert [each.ok for each in mover.load(items, DEADLINE)] == [True, False, False]


def test_an_engine_moves_what_lies_on_any_of_them(storages: list[StorageConfig], tmp_path: Path) -> None:
    engine = TransferEngine.for_storages(storages)
    items = [item(tmp_path, scheme, storage) for storage, scheme in SCHEMES.items()]
    assert all(each.ok for each in engine.save(items, DEADLINE))
    loaded = [item(tmp_path, scheme, storage, bytes(8)) for storage, scheme in SCHEMES.items()]
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
    (result,) = engine.load([TransferItem(uri, [memoryview(bytearray(1))])], 5.0)
    assert "is none of ['other']" in result.reason  # the other mover's word
    engine.close()
