"""A manager process that starts anew while the storage of its startup document is not mounted."""

from pathlib import Path

import pytest

from kvcm.app import Manager
from kvcm.config import Settings

STORAGE = "nfs_01"


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "empty"])
async def test_nothing_is_made_in_place_of_a_storage_that_is_away(tmp_path: Path, is_there: bool) -> None:
    """Its store knows the storage already, though the document names it again at every start."""
    settings = Settings(data_dir=str(tmp_path / "data"))
    root = tmp_path / "data" / "nfs"
    async with Manager(settings).opened() as rooms:
        assert rooms.storages.backend(STORAGE) is not None
    (cluster,) = root.iterdir()
    root.rename(tmp_path / "away")
    if is_there:
        root.mkdir()
    async with Manager(settings).opened() as rooms:
        assert rooms.storages.backend(STORAGE) is None
        assert rooms.registry.storages.is_configured(STORAGE)
    assert [*root.rglob("*")] == []
    if is_there:
        root.rmdir()
    (tmp_path / "away").rename(root)
    async with Manager(settings).opened() as rooms:
        assert rooms.storages.backend(STORAGE) is not None
    assert [*root.iterdir()] == [cluster]
