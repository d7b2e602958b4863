"""An operator who also says what storages hold and how drains go, and removes storages.

python host_watcher.py <admin address of the manager>
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
from outage_watcher import Watcher

from asked_process import serve  # isort: skip
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_pb
from kvcm.protocol.kvcm.v1.capacity_service_pb2_grpc import CapacityServiceStub
from kvcm.protocol.kvcm.v1.storage_service_pb2_grpc import StorageServiceStub

__all__ = ["command_of"]

_SECONDS = 10.0


class HostWatcher(Watcher):
    """Each method without an underscore is a call from outside."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        channel = grpc.insecure_channel(address)
        self._capacity: Any = CapacityServiceStub(channel)  # type: ignore[no-untyped-call]
        self._drains: Any = StorageServiceStub(channel)  # type: ignore[no-untyped-call]

    def used(self) -> dict[str, int]:
        """Return the bytes that each storage holds by its name."""
        answer = self._capacity.GetUsage(capacity_pb.GetUsageRequest(), timeout=_SECONDS)
        self._done(answer)
        return {each.storage_unique_name: each.usage.used_bytes for each in answer.storages}

    def used_by_groups(self) -> int:
        """Return the bytes that all groups use."""
        answer = self._capacity.GetUsage(capacity_pb.GetUsageRequest(), timeout=_SECONDS)
        self._done(answer)
        return sum(each.total.used_bytes for each in answer.groups)

    def evicted(self) -> int:
        """Return how many blocks the manager evicted for the marks of storages, since it was started."""
        answer = self._admin.GetMetrics(pb.GetMetricsRequest(), timeout=_SECONDS)
        self._done(answer)
        counted = [each for each in answer.metrics if each.metric_name == "kvcm_evicted_keys_total"]
        tags = [{tag.tag_key: tag.tag_value for tag in each.metric_tags} for each in counted]
        return sum(
            each.metric_value.int_value for each, tag in zip(counted, tags, strict=True) if tag["reason"] == "storage"
        )

    def drain(self, storage: str) -> dict[str, str] | None:
        """Return how far the drain or the removal of a storage is, None when there is none."""
        answer = self._drains.ListDrain(storage_pb.ListDrainRequest(), timeout=_SECONDS)
        self._done(answer)
        found = [each for each in answer.drains if each.storage_unique_name == storage]
        return {"state": storage_pb.DrainState.Name(found[0].state), "reason": found[0].reason} if found else None

    def remove(self, storage: str) -> None:
        """Remove a storage."""
        self._done(self._admin.RemoveStorage(pb.RemoveStorageRequest(storage_unique_name=storage), timeout=_SECONDS))


def command_of(address: str) -> list[str]:
    """Return the command line of a watcher."""
    return [sys.executable, __file__, address]


if __name__ == "__main__":
    serve(HostWatcher(sys.argv[1]))
