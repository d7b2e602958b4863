"""/v1/usage."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvcm.service.rest.calls import CallRunner
from kvcm.service.rest.conversion import message_to_dict
from kvcm.service.rest.documents import Document, Int64, Ratio, StorageTypeName
from kvcm.service.rest.routing import add_route, answer

__all__ = ["UsageReportDocument", "UsageResource"]


class UsageDocument(Document):
    """One limit and how far it is used."""

    used_bytes: Int64
    """Bytes in use, those being deleted included."""
    deleting_bytes: Int64
    """Bytes of locations that are marked for deletion."""
    capacity_bytes: Int64
    """Bytes allowed; -1 = not limited here."""
    high_mark_bytes: Int64
    """Bytes above which reclaiming begins; -1 = never."""
    low_mark_bytes: Int64
    """Bytes down to which it goes; -1 = never."""


class TypeUsageDocument(Document):
    """A storage type of a group."""

    storage_type: StorageTypeName
    """The type."""
    usage: UsageDocument
    """Usage and limits."""


class GroupStorageUsageDocument(Document):
    """A storage of a group."""

    storage_unique_name: str
    """Name of the storage."""
    used_bytes: Int64
    """Bytes in use."""
    guaranteed_bytes: Int64
    """Bytes that no other group may take."""


class InstanceUsageDocument(Document):
    """An instance of a group."""

    instance_id: str
    """Its id."""
    key_count: Int64
    """Blocks in its index."""
    max_key_count: Int64
    """Most blocks that it may have; -1 = not limited."""
    used_bytes: Int64
    """Bytes in use."""
    policy: str
    """The eviction policy in force."""


class GroupUsageDocument(Document):
    """A group."""

    name: str
    """Its name."""
    total: UsageDocument
    """In total."""
    types: list[TypeUsageDocument]
    """By storage type that it uses or has a quota for."""
    storages: list[GroupStorageUsageDocument]
    """By storage that it uses."""
    instances: list[InstanceUsageDocument]
    """By instance, ordered by id."""
    pinned_bytes: Int64
    """Bytes that pins hold."""
    pin_budget_bytes: Int64
    """Bytes that pins may hold."""
    refused_writes: Int64
    """Writes refused since the manager started, for want of space."""


class StorageUsageDocument(Document):
    """A storage."""

    storage_unique_name: str
    """Its name."""
    usage: UsageDocument
    """Usage and limits."""
    guaranteed_bytes: Int64
    """Sum of the guarantees of groups on it."""
    oversubscription: Ratio | None
    """Sum of the quotas of the groups that may use it, as a ratio of its capacity; above 1 it is oversubscribed."""
    deletion_backlog: Int64
    """Locations that wait for their deletion, and those that failed the last time."""
    deletion_failures: Int64
    """Attempts to delete that failed since the manager started."""


class QuotaUsageDocument(Document):
    """A quota over groups."""

    name: str
    """The global_quota_group_name."""
    usage: UsageDocument
    """Usage and limits."""
    groups: list[str]
    """The groups that draw from it."""


class UsageReportDocument(Document):
    """What groups, storages and global quotas use and may use."""

    groups: list[GroupUsageDocument]
    """By group, ordered by name."""
    storages: list[StorageUsageDocument]
    """By storage, ordered by name."""
    global_quotas: list[QuotaUsageDocument]
    """By global quota, ordered by name."""


class UsageQuery(BaseModel):
    """Whose usage."""

    model_config = ConfigDict(extra="forbid")

    group: Annotated[str, Field(max_length=256, description="Only this group and what it draws from.")] = ""


class UsageResource:
    """Usage.

    Args:
        calls: runs the calls behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(router=router, method="GET", path="/v1/usage", endpoint=self.get_usage, model=UsageReportDocument)

    async def get_usage(self, request: Request, query: Annotated[UsageQuery, Query()]) -> Response:
        """Get usage and limits."""
        usage = await self._calls.run(request, "CapacityService.GetUsage", instance_group=query.group)
        return answer(await asyncio.to_thread(message_to_dict, usage))
