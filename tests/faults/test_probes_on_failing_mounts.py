"""Probes of a storage that fails: each fault that an engine would meet is found, and its end too."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from fault_mount import FaultMount
from storage_rig import FILE_8, Written, allocation

from kvcm.model.errors import StorageIOError
from kvcm.storage.backend import StorageBackend

_CHANGING = itertools.product(("create", "write", "flush", "unlink"), ("EIO", "ENOSPC", "ESTALE", "EROFS"))
_READING = itertools.product(("open", "read"), ("EIO", "ESTALE"))
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{operation}-{error}": (operation, {"error": error}) for operation, error in (*_CHANGING, *_READING)},
    "short read": ("read", {"ends_at": 100}),
    "corrupted byte": ("read", {"flip_at": 4000}),
}


@pytest.fixture
def backend(fault_mount: FaultMount) -> StorageBackend:
    (fault_mount.directory / "cluster").mkdir()
    return FILE_8.open(fault_mount.path)


@pytest.mark.parametrize("name", FAULTS)
async def test_a_probe_finds_the_fault_and_its_end(fault_mount: FaultMount, backend: StorageBackend, name: str) -> None:
    operation, fault = FAULTS[name]
    fault_mount.inject(operation, path="/cluster*", **fault)
    for _ in range(2):
        with pytest.raises(StorageIOError, match="storage s-1"):
            await backend.probe()
    fault_mount.clear()
    await backend.probe()
    written = await Written.into(backend, allocation({"kv": 5000}, range(8)))
    assert all(await backend.exists(written.uris))
    assert [page.objects[0].size_bytes async for page in backend.objects("cluster")] == [40_000]


@pytest.mark.parametrize("most_bytes", [1, 1000])
async def test_short_transfers_are_sound(fault_mount: FaultMount, backend: StorageBackend, most_bytes: int) -> None:
    fault_mount.inject("read", "write", most_bytes=most_bytes)
    await backend.probe()


async def test_a_probe_finds_a_mount_whose_server_died(fault_mount: FaultMount, backend: StorageBackend) -> None:
    await asyncio.to_thread(fault_mount.die)
    with pytest.raises(StorageIOError):
        await backend.probe()
    fault_mount.close()
    with pytest.raises(StorageIOError, match="mounted"):
        await backend.probe()
    assert list(fault_mount.path.iterdir()) == []
    fault_mount.mount()
    await backend.probe()
