"""CapacityService: usage and limits, quotas above the group, garbage collection. Thin translation."""

from __future__ import annotations

import asyncio
from typing import Any

from kvcm.model.groups import GlobalQuota
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as pb
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.registry.groups import QuotaRegistry
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.translate import fill, read
from kvcm.service.usage_report import UsageView

__all__ = ["CapacityApi"]

_SERVICE = "kvcm.v1.CapacityService"
_ANSWERS = {
    "GetUsage": pb.GetUsageResponse,
    "ListGlobalQuota": pb.ListGlobalQuotaResponse,
    "CollectGarbage": pb.CollectGarbageResponse,
    "ScrubStorage": pb.ScrubStorageResponse,
}


class CapacityApi:
    """Handlers of the capacity calls.

    Args:
        view: of the usage.
        quotas: the global quotas.
        garbage: finds blocks that are worth nothing.
        scrubber: finds bytes that no metadata knows.
    """

    def __init__(
        self,
        view: UsageView,
        quotas: QuotaRegistry,
        garbage: GarbageCollector,
        scrubber: StorageScrubber,
    ) -> None:
        self._view = view
        self._quotas = quotas
        self._garbage = garbage
        self._scrubber = scrubber

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane."""
        handlers = {
            "GetUsage": self.get_usage,
            "SetGlobalQuota": self.set_quota,
            "ListGlobalQuota": self.list_quotas,
            "RemoveGlobalQuota": self.remove_quota,
            "CollectGarbage": self.collect_garbage,
            "ScrubStorage": self.scrub_storage,
        }
        return [
            Call(
                service=_SERVICE,
                name=name,
                plane=Plane.ADMIN,
                request_type=getattr(pb, f"{name}Request"),
                response_type=_ANSWERS.get(name, admin_pb.CommonResponse),
                handler=handler,
            )
            for name, handler in handlers.items()
        ]

    async def get_usage(self, request: Any) -> Reply:
        """Return usage and limits."""
        message = pb.GetUsageResponse()
        report = await self._view.current(request.instance_group)
        await asyncio.to_thread(fill, message, report)  # thousands of instances take a while
        return Reply(message)

    async def set_quota(self, request: Any) -> Reply:
        """Set the limit of all groups of one name."""
        require(request.HasField("global_quota"), "SetGlobalQuota.global_quota")
        await self._quotas.set(read(GlobalQuota, request.global_quota))
        return _empty_reply()

    async def list_quotas(self, _request: Any) -> Reply:
        """List the limits by name."""
        message = pb.ListGlobalQuotaResponse()
        for quota in self._quotas.all():
            fill(message.global_quotas.add(), quota)
        return Reply(message)

    async def remove_quota(self, request: Any) -> Reply:
        """Forget a limit."""
        require(request.name, "RemoveGlobalQuota.name")
        await self._quotas.remove(request.name)
        return _empty_reply()

    async def collect_garbage(self, request: Any) -> Reply:
        """Look for blocks that are worth nothing."""
        report = await self._garbage.collect(
            request.instance_id, dry_run=request.dry_run, check_bytes=request.check_bytes
        )
        message = pb.CollectGarbageResponse()
        fill(message, report)
        return Reply(message)

    async def scrub_storage(self, request: Any) -> Reply:
        """Look for bytes that no metadata knows."""
        require(request.storage_unique_name, "ScrubStorage.storage_unique_name")
        report = await self._scrubber.scrub(
            request.storage_unique_name,
            cluster_id=request.cluster_id,
            dry_run=request.dry_run,
            min_age_seconds=request.min_age_seconds,
        )
        message = pb.ScrubStorageResponse()
        fill(message, report)
        return Reply(message)


def _empty_reply() -> Reply:
    return Reply(admin_pb.CommonResponse())
