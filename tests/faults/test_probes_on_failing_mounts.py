"""Probes of a storage that fails: each fault that an engine would meet is found, and its end too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_clock import FakeClock
from fault_mount import FaultMount
from storage_rig import FILE_8, Written, allocation

from kvcm.model.errors import StorageIOError
from kvcm.storage.backend import StorageBackend
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthState
from kvcm.storage.prober import Prober

NAME = "s-1"  # as storage_rig calls it
TURN_SECONDS = 20.0
BRIEFLY_SECONDS = 0.05

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{operation}-{error}": (operation, {"error": error})
        for operation in ("create", "write", "flush", "unlink")
        for error in ("EIO", "ENOSPC", "ESTALE", "EROFS")
    },
    **{
        f"{operation}-{error}": (operation, {"error": error})
        for operation in ("open", "read")
        for error in ("EIO", "ESTALE")
    },
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
async def test_a_storage_that_moves_less_at_a_time_is_sound(
    fault_mount: FaultMount, backend: StorageBackend, most_bytes: int
) -> None:
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


class Probed:
    """A prober over one storage on a mount; time passes as told."""

    def __init__(self, mount: FaultMount) -> None:
        (mount.directory / "cluster").mkdir()
        self.storages = StorageDirectory("cluster")
        self.storages.open(FILE_8.config(mount.path))
        self.clock = FakeClock(1000.0)
        self.prober = Prober(self.storages, self.clock, interval_seconds=5.0, timeout_seconds=5.0)

    @property
    def state(self) -> HealthState:
        health = self.storages.health(NAME)
        assert health is not None
        return health.state

    async def until(
        self, condition: Callable[[], bool], step_seconds: float, patience_seconds: float = TURN_SECONDS
    ) -> float:
        """Let time pass in steps until a condition holds, and return how much.

        Args:
            condition: what is waited for.
            step_seconds: until the prober looks again.
            patience_seconds: real time for what a look began; a step goes on without what hangs longer.
        """
        begin = self.clock.time
        async with asyncio.timeout(2 * TURN_SECONDS):
            while not condition():
                self.clock.time += step_seconds
                self.prober.start_due()
                await asyncio.sleep(0)
                probes = asyncio.all_tasks() - {asyncio.current_task()}
                if probes:
                    await asyncio.wait(probes, timeout=patience_seconds)
        return self.clock.time - begin


async def test_a_storage_that_fails_is_down_in_a_few_seconds_and_comes_back(fault_mount: FaultMount) -> None:
    probed = Probed(fault_mount)
    fault_mount.inject("write", error="EIO")
    seconds = await probed.until(lambda: probed.state is HealthState.SH_DOWN, 0.5)
    assert seconds <= 10.0
    assert probed.storages.rank(NAME) is None
    fault_mount.clear()
    assert await probed.until(lambda: probed.state is HealthState.SH_UP, 0.5) <= 10.0
    assert probed.storages.rank(NAME) is not None
    probed.prober.stop()


async def test_a_storage_that_hangs_is_down_and_one_request_waits_for_it(fault_mount: FaultMount) -> None:
    probed = Probed(fault_mount)
    probe = fault_mount.inject("create", hang=True)
    await probed.until(lambda: probed.state is HealthState.SH_DOWN, 1.0, BRIEFLY_SECONDS)
    await probed.until(lambda: probed.clock.time > 1060, 5.0, BRIEFLY_SECONDS)
    assert probed.state is HealthState.SH_DOWN
    assert fault_mount.met(probe) == 1
    await asyncio.to_thread(fault_mount.clear)
    await probed.until(lambda: probed.state is HealthState.SH_UP, 1.0)
    probed.prober.stop()
