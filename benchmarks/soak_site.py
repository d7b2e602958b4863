"""What the soak runs: a manager over a store, with groups so small that it evicts all the time, and a storage that is
drained now and then."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from manager_site import GroupPlan, Manager, Wire, code_of, running
from service_site import Store, opened
from soak_actions import GROUPS, PART_BYTES, registration

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_pb
from kvcm.protocol.kvcm.v1.storage_service_pb2_grpc import StorageServiceStub

__all__ = ["Drains", "ports_of", "set_up", "settled", "soaked", "verified"]

_STAYS, _SPARE = "stays", "spare"
_BLOCKS = {"soak-one": 20_000, "soak-eight": 4_000}
_PATIENCE_SECONDS = 180.0  # read leases and pins hold back deletions meanwhile


@contextlib.contextmanager
def soaked(directory: Path, store: str) -> Iterator[tuple[Manager, Store]]:
    """Run a manager over a store inside the block."""
    settings = {
        "kvcm.logger.access_log_sample": "0.01",
        # Slots of deleted blocks are remembered for so long; by default as long as the whole warm-up lasts.
        "kvcm.storage.slot_reuse_grace_ms": "5000",
    }
    with opened(store, directory) as kept:
        manager = Manager(directory / "manager", {"kvcm.registry_storage.uri": kept.uri, **settings})
        with running(manager):
            yield manager, kept


def ports_of(manager: Manager) -> dict[str, dict[str, int]]:
    """Return the ports by plane and transport."""

    def port(name: str) -> int:
        return int(manager.settings[f"kvcm.service.{name}"])

    return {
        "data": {"grpc": port("rpc_port"), "http": port("http_port")},
        "admin": {"grpc": port("admin_rpc_port"), "http": port("admin_http_port")},
    }


async def set_up(wire: Wire, directory: Path) -> None:
    """Make storages, groups and instances."""
    for name in (_STAYS, _SPARE):
        spec = admin_pb.NfsStorageSpec(root_path=f"{directory / name}/", key_count_per_file=8)
        storage = admin_pb.StorageConfig(global_unique_name=name, nfs=spec)
        _check(await wire.admin.AddStorage(admin_pb.AddStorageRequest(storage=storage)))
    for name, parts in GROUPS.items():
        capacity = _BLOCKS[name] * parts * PART_BYTES
        group = GroupPlan(name, (name,), capacity, mark=0.6, delay_ms=1000).group
        group.storage_candidates[:] = [_SPARE, _STAYS]  # the drained storage is preferred as long as it is there
        group.pin_budget_bytes = capacity // 5
        group.cache_config.reclaim_strategy.storage_unique_name = _STAYS
        _check(await wire.admin.CreateInstanceGroup(admin_pb.CreateInstanceGroupRequest(instance_group=group)))
        _check(await wire.meta.RegisterInstance(registration(name)))


def _check(answer: object) -> None:
    assert code_of(answer) == pb.OK, answer


class Drains:
    """Drains a storage again and again, and takes it into use again.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._address = f"127.0.0.1:{manager.settings['kvcm.service.admin_rpc_port']}"
        self.done = self.cancelled = 0

    async def run(self, pause_seconds: float) -> None:
        """Work until cancelled."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = StorageServiceStub(channel)  # type: ignore[no-untyped-call]
            while True:
                await asyncio.sleep(pause_seconds)
                try:
                    _check(await stub.DrainStorage(storage_pb.DrainStorageRequest(storage_unique_name=_SPARE)))
                    await self._watch(stub, time.monotonic() + 3 * pause_seconds)
                finally:
                    _check(await stub.CancelDrain(storage_pb.CancelDrainRequest(storage_unique_name=_SPARE)))

    async def _watch(self, stub: StorageServiceStub, deadline: float) -> None:
        while time.monotonic() < deadline:
            drains = await stub.ListDrain(storage_pb.ListDrainRequest())
            _check(drains)
            if all(drain.state == storage_pb.DRAIN_DONE for drain in drains.drains):
                self.done += 1
                return
            await asyncio.sleep(0.2)
        self.cancelled += 1


async def settled(wire: Wire) -> capacity_pb.GetUsageResponse:
    """Return the usage when nothing happens any more: no open session is overdue, nothing is being deleted or evicted.

    Raises:
        AssertionError: it goes on.
    """
    deadline, last = time.monotonic() + _PATIENCE_SECONDS, capacity_pb.GetUsageResponse()
    while time.monotonic() < deadline:
        await asyncio.sleep(2.5)  # several looks of the reclaimer
        usage = await wire.capacity.GetUsage(capacity_pb.GetUsageRequest())
        _check(usage)
        if usage.groups == last.groups and not any(group.total.deleting_bytes for group in usage.groups):
            return usage
        last = usage
    raise AssertionError("eviction and deletion do not come to an end")


def verified(manager: Manager) -> str:
    """Return what `kvcm index verify` finds wrong in the data of a manager that was stopped, "" for nothing."""
    command = [sys.executable, "-m", "kvcm", "index", "verify", *manager.store_options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=manager.directory, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr
