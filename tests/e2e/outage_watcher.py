"""An operator as a process of its own: sets a site up, and says what the manager says of its storages.

python outage_watcher.py <admin address of the manager>
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
from google.protobuf import json_format

from asked_process import serve  # isort: skip
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub

__all__ = ["command_of"]

_SECONDS = 10.0


class Watcher:
    """Each method without an underscore is a call from outside."""

    def __init__(self, address: str) -> None:
        self._admin: Any = AdminServiceStub(grpc.insecure_channel(address))  # type: ignore[no-untyped-call]

    def set_up(self, storages: list[str], groups: list[str]) -> None:
        """Add storages and groups, given as JSON of their messages."""
        for text in storages:
            storage = json_format.Parse(text, pb.StorageConfig())
            self._done(self._admin.AddStorage(pb.AddStorageRequest(storage=storage), timeout=_SECONDS))
        for text in groups:
            group = json_format.Parse(text, pb.InstanceGroup())
            request = pb.CreateInstanceGroupRequest(instance_group=group)
            self._done(self._admin.CreateInstanceGroup(request, timeout=_SECONDS))

    def health(self) -> dict[str, str]:
        """Return the health of every storage by its name: SH_UP, SH_DEGRADED or SH_DOWN."""
        answer = self._admin.ListStorage(pb.ListStorageRequest(), timeout=_SECONDS)
        self._done(answer)
        return {each.storage_unique_name: pb.StorageHealth.Name(each.health) for each in answer.storage_status}

    def _done(self, answer: Any) -> None:
        assert answer.header.status.code == pb.OK, answer.header.status.message


def command_of(address: str) -> list[str]:
    """Return the command line of a watcher."""
    return [sys.executable, __file__, address]


if __name__ == "__main__":
    serve(Watcher(sys.argv[1]))
