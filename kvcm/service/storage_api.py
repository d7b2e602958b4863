"""StorageService: emptying storages. Thin translation."""

from __future__ import annotations

from typing import Any

from kvcm.cache.drains import StorageDrains
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as pb
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.drain_view import DrainView
from kvcm.service.translate import fill

__all__ = ["StorageApi"]

_SERVICE = "kvcm.v1.StorageService"


class StorageApi:
    """Handlers of the calls that empty storages.

    Args:
        drains: begins and ends drains.
        view: tells how far they are.
    """

    def __init__(self, drains: StorageDrains, view: DrainView) -> None:
        self._drains = drains
        self._view = view

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane."""
        done = admin_pb.CommonResponse
        return [
            Call(_SERVICE, "DrainStorage", Plane.ADMIN, pb.DrainStorageRequest, done, self.drain_storage),
            Call(_SERVICE, "CancelDrain", Plane.ADMIN, pb.CancelDrainRequest, done, self.cancel_drain),
            Call(_SERVICE, "ListDrain", Plane.ADMIN, pb.ListDrainRequest, pb.ListDrainResponse, self.list_drains),
        ]

    async def drain_storage(self, request: Any) -> Reply:
        """Begin to empty a storage."""
        require(request.storage_unique_name, "DrainStorage.storage_unique_name")
        await self._drains.drain(request.storage_unique_name)
        return Reply(admin_pb.CommonResponse())

    async def cancel_drain(self, request: Any) -> Reply:
        """Let a storage take writes again."""
        require(request.storage_unique_name, "CancelDrain.storage_unique_name")
        await self._drains.cancel(request.storage_unique_name)
        return Reply(admin_pb.CommonResponse())

    async def list_drains(self, _request: Any) -> Reply:
        """List what is being emptied or forgotten, by name."""
        message = pb.ListDrainResponse()
        for status in await self._view.look():
            fill(message.drains.add(), status)
        return Reply(message)
