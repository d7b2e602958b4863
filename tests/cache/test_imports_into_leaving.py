"""Imports of storages whose names are still being forgotten: refused before anything is written, or taken back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from audit_rig import IndexRig, opened

from kvcm.model.errors import NotReadyError
from kvcm.model.storages import DummyStorageSpec


@pytest.fixture
async def archive(request: pytest.FixtureRequest) -> AsyncIterator[bytes]:
    """An export with the storages `one` and `two`."""
    async with opened("memory", request) as rig:
        await rig.configure()
        yield (await rig.exported())[0]


@pytest.fixture
async def target(request: pytest.FixtureRequest) -> AsyncIterator[IndexRig]:
    """A deployment from which storage `two` was removed a moment ago."""
    async with opened("memory", request) as rig:
        await rig.configure(instances=())
        yield rig


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_name_that_is_still_kept_from_other_media_refuses_the_whole_import(
    archive: bytes, target: IndexRig, dry_run: bool
) -> None:
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


async def test_a_removed_storage_with_its_own_medium_comes_back(archive: bytes, target: IndexRig) -> None:
    await target.registry.storages.retire("two", 1.0)
    imported = await target.imported(archive)
    assert imported.created["storage"] == ["two"]
    assert target.registry.storages.drains() == []
