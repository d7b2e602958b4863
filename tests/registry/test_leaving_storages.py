"""Storages that are drained or removed, as the registry keeps them: over two managers, and for other releases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from registry_rig import Opener

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.registry.codec import decode_document, encode_document
from kvcm.registry.registry import Registry
from kvcm.registry.storages import StorageDrain
from kvcm.store.memory import MemoryTable

NFS = StorageConfig("nfs", NfsStorageSpec("/r"))
MOVED = replace(NFS, spec=NfsStorageSpec("/elsewhere"))


class Pair(NamedTuple):
    """Two managers on one table, and what the second has open."""

    a: Registry
    b: Registry
    opened: Opener


@pytest.fixture
async def pair() -> Pair:
    """Two managers that know one storage."""
    table, opened = MemoryTable(), Opener()
    a, b = Registry(Opener(), table), Registry(opened, table)
    await a.storages.add(NFS)
    await b.refresh()
    return Pair(a, b, opened)


async def test_a_drain_is_heard_of_by_every_manager_and_ends_there(pair: Pair) -> None:
    await pair.a.storages.drain("nfs", 7.0)
    await pair.a.storages.drain("nfs", 8.0)
    await pair.b.refresh()
    assert pair.b.storages.drains() == [StorageDrain("nfs", 7.0, is_removal=False)]
    await pair.b.storages.cancel_drain("nfs")
    await pair.a.refresh()
    assert pair.a.storages.drains() == []
    assert pair.opened.calls == [("open", "nfs"), ("drain", "nfs"), ("fill", "nfs")]


async def test_no_other_change_ends_a_drain(pair: Pair) -> None:
    storages = pair.a.storages
    await storages.drain("nfs", 7.0)
    await storages.update(MOVED)
    await storages.update_while_serving(replace(MOVED, capacity_bytes=5))
    await storages.set_enabled("nfs", enabled=False)
    assert storages.drains() == [StorageDrain("nfs", 7.0, is_removal=False)]
    assert storages.all() == [replace(MOVED, capacity_bytes=5, is_available=False, draining_since=7.0)]


async def test_a_removed_storage_is_seen_by_nobody_but_those_who_forget_it(pair: Pair) -> None:
    storages = pair.a.storages
    await storages.drain("nfs", 7.0)
    await storages.retire("nfs", 9.0)
    await pair.b.refresh()
    for view in (storages, pair.b.storages):
        assert (view.all(), view.existing(["nfs"]), view.is_configured("nfs")) == ([], [], False)
        assert view.drains() == [StorageDrain("nfs", 9.0, is_removal=True)]
    assert pair.opened.state() == {}
    for call in (storages.retire("nfs", 9.0), storages.drain("nfs", 9.0)):
        with pytest.raises(InvalidArgumentError, match="does not exist"):
            await call
    for call in (storages.cancel_drain("nfs"), storages.set_enabled("nfs", enabled=True), storages.update(NFS)):
        with pytest.raises(InvalidArgumentError, match="does not exist"):
            await call


@pytest.mark.parametrize("spec", [NfsStorageSpec("/elsewhere"), NfsStorageSpec("/r", 4), DummyStorageSpec("/r")])
async def test_a_name_that_is_not_free_goes_to_no_other_medium(pair: Pair, spec: NfsStorageSpec) -> None:
    await pair.a.storages.retire("nfs", 9.0)
    for add in (pair.a.storages.add, pair.b.storages.add_while_serving):  # the second one has not heard
        with pytest.raises(NotReadyError, match="storage 'nfs' is being forgotten"):
            await add(replace(NFS, spec=spec))
    await pair.b.storages.add(NFS)
    with pytest.raises(DuplicateEntityError):
        await pair.a.storages.add(NFS)
    assert (pair.a.storages.drains(), pair.a.storages.all()) == ([], [NFS])


async def test_only_the_removal_that_is_over_is_forgotten(pair: Pair) -> None:
    storages = pair.a.storages
    await storages.retire("nfs", 9.0)
    (first,) = storages.drains()
    await storages.add(NFS)
    await storages.forget(first)
    await storages.forget(StorageDrain("nfs", 0.0, is_removal=False))
    assert storages.all() == [NFS]
    await storages.retire("nfs", 10.0)
    await storages.forget(first)
    (second,) = storages.drains()
    assert second.started_at == 10.0
    await storages.forget(second)
    await storages.forget(second)
    assert storages.drains() == []
    await storages.add(MOVED)


def test_a_release_that_knows_no_drains_does_not_take_such_a_storage_for_any_other() -> None:
    for leaving in (replace(NFS, draining_since=7.5), replace(NFS, removed_at=9.5)):
        document = encode_document(leaving)
        assert json.loads(document)["version"] == 2
        assert decode_document(StorageConfig, document) == leaving
    assert json.loads(encode_document(NFS))["version"] == 1
    with pytest.raises(StorageIOError, match=r"version 3.*reads version 2"):
        decode_document(StorageConfig, encode_document(NFS).replace(b'"version":1', b'"version":3'))
    with pytest.raises(StorageIOError, match=r"version 2.*reads version 1"):
        decode_document(InstanceGroup, b'{"version":2,"value":{"name":"g"}}')
