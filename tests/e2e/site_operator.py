"""An operator as a process of its own: sets a site up, and says what the manager says of its storages.

python site_operator.py <admin address of the manager>
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
from asked_process import serve
from google.protobuf import json_format

from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_pb
from kvcm.protocol.kvcm.v1.capacity_service_pb2_grpc import CapacityServiceStub
from kvcm.protocol.kvcm.v1.storage_service_pb2_grpc import StorageServiceStub

_SECONDS = 40.0


class SiteOperator:
    """Each method without an underscore is a call from outside."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address)
        self._admin: Any = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        self._capacity: Any = CapacityServiceStub(channel)  # type: ignore[no-untyped-call]
        self._storages: Any = StorageServiceStub(channel)  # type: ignore[no-untyped-call]

    def set_up(self, storages: list[str], groups: list[str]) -> None:
        """Add storages and groups, given as JSON of their messages."""
        for text in storages:
            _answer(self._admin.AddStorage, pb.AddStorageRequest(storage=json_format.Parse(text, pb.StorageConfig())))
        for text in groups:
            group = json_format.Parse(text, pb.InstanceGroup())
            _answer(self._admin.CreateInstanceGroup, pb.CreateInstanceGroupRequest(instance_group=group))

    def health(self) -> dict[str, str]:
        """Return the health of every storage by its name: SH_UP, SH_DEGRADED or SH_DOWN."""
        answer = _answer(self._admin.ListStorage, pb.ListStorageRequest())
        return {each.storage_unique_name: pb.StorageHealth.Name(each.health) for each in answer.storage_status}

    def used(self) -> dict[str, int]:
        """Return the bytes that each storage holds by its name."""
        answer = _answer(self._capacity.GetUsage, capacity_pb.GetUsageRequest())
        return {each.storage_unique_name: each.usage.used_bytes for each in answer.storages}

    def evicted(self) -> int:
        """Return how many blocks the manager evicted for the marks of storages, since it was started."""
        answer = _answer(self._admin.GetMetrics, pb.GetMetricsRequest())
        counted = [each for each in answer.metrics if each.metric_name == "kvcm_evicted_keys_total"]
        tags = [{tag.tag_key: tag.tag_value for tag in each.metric_tags} for each in counted]
        return sum(
            each.metric_value.int_value for each, tag in zip(counted, tags, strict=True) if tag["reason"] == "storage"
        )

    def drain(self, storage: str) -> dict[str, str] | None:
        """Return how far the drain or the removal of a storage is, None when there is none."""
        answer = _answer(self._storages.ListDrain, storage_pb.ListDrainRequest())
        found = [each for each in answer.drains if each.storage_unique_name == storage]
        return {"state": storage_pb.DrainState.Name(found[0].state), "reason": found[0].reason} if found else None


def _answer(call: Any, request: Any) -> Any:
    answer = call(request, timeout=_SECONDS)
    assert answer.header.status.code == pb.OK, answer.header.status.message
    return answer


def command_of(address: str) -> list[str]:
    """Return the command line of an operator."""
    return [sys.executable, __file__, address]


if __name__ == "__main__":
    serve(SiteOperator(sys.argv[1]))
