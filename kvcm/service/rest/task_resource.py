"""/v1/tasks: background tasks, and tasks that a client starts; and the drains below /v1/storages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from kvcm.service.rejections import Problem, ProblemError
from kvcm.service.rest.calls import CallRunner, change_existing
from kvcm.service.rest.conversion import message_to_dict
from kvcm.service.rest.documents import Document, Int64, Page, PageQuery, StoragePath, Text, TokenPath, page_of
from kvcm.service.rest.routing import add_route, answer, not_found

__all__ = ["TaskDocument", "TaskResource"]

_LIST = "StorageService.ListDrain"
_DRAIN = "StorageService.DrainStorage"
_CANCEL = "StorageService.CancelDrain"
_STATES = {"DRAIN_RUNNING": "running", "DRAIN_DONE": "done"}


class TaskDocument(Document):
    """A background task."""

    id: str
    """Its kind and the storage."""
    kind: Literal["drain", "removal"]
    """drain: a storage is being emptied. removal: the blocks of a removed storage are being forgotten."""
    storage: str
    """Name of the storage."""
    state: Literal["running", "done"]
    """A drain that is done keeps its storage closed to writes until it is deleted; a removal that is done vanishes."""
    started_ms: Int64
    """When it was started, unix time in ms."""
    left_bytes: Int64
    """Bytes that are still to be freed, pending deletions included."""
    reason: str
    """Why it is stuck; empty while it makes progress."""


class DrainOrder(Document):
    """Empty a storage, in the background."""

    kind: Literal["drain"]
    """The kind of task."""
    storage: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    """Name of the storage."""


class GarbageOrder(Document):
    """Look for blocks without their prefix or bytes, and free them; answered when that is done."""

    kind: Literal["collect_garbage"]
    """The kind of task."""
    instance: Annotated[str, Field(max_length=256)] = ""
    """Only this instance; empty = all."""
    dry_run: bool = False
    """Count only."""
    check_bytes: bool = False
    """Also ask the storages whether the bytes are there, which is slow."""


class ScrubOrder(Document):
    """Look for orphans, bytes without metadata, and delete them; answered when that is done."""

    kind: Literal["scrub"]
    """The kind of task."""
    storage: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    """Name of the storage."""
    cluster_id: Text = ""
    """The deployment of the bytes; empty = this one. Another one must be gone for good."""
    dry_run: bool = False
    """Count only."""
    min_age_seconds: Int64 = 0
    """Leave objects that changed within this time alone; 0 = 3600."""


class GarbageReport(Document):
    """The result of garbage collection."""

    blocks: Int64
    """Blocks that were checked."""
    without_bytes: Int64
    """Locations whose bytes are missing."""
    without_prefix: Int64
    """Blocks whose prefix is gone for longer than the grace."""
    expired_sessions: Int64
    """Write sessions that were overdue."""
    freed_bytes: Int64
    """Bytes that were freed, or would be."""


class ScrubReport(Document):
    """The result of a scrub."""

    objects: Int64
    """Objects that were checked."""
    bytes: Int64
    """Their bytes."""
    orphans: Int64
    """Objects without metadata."""
    orphan_bytes: Int64
    """Their bytes."""
    too_young: Int64
    """Orphans that are too young to be sure."""
    deleted: Int64
    """Orphans that were deleted."""
    failed: Int64
    """Objects that could not be checked or deleted."""


class ReportDocument(Document):
    """A task that ran while its client waited."""

    kind: Literal["collect_garbage", "scrub"]
    """The kind of task."""
    state: Literal["done"]
    """It is over, and is not listed later."""
    report: GarbageReport | ScrubReport
    """Its result."""


Order = Annotated[DrainOrder | GarbageOrder | ScrubOrder, Field(discriminator="kind")]


class TaskResource:
    """Tasks: drains and removals of storages are listed, others answer when they are done.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one, drain = "/v1/tasks/{task_id}", "/v1/storages/{name}/drain"
        add_route(router=router, method="GET", path="/v1/tasks", endpoint=self.list_tasks, model=Page[TaskDocument])
        made = TaskDocument | ReportDocument
        add_route(
            router=router,
            method="POST",
            path="/v1/tasks",
            endpoint=self.create_task,
            model=made,
            status=202,
            problems=[502],
        )
        add_route(router=router, method="GET", path=one, endpoint=self.get_task, model=TaskDocument, problems=[404])
        add_route(router=router, method="DELETE", path=one, endpoint=self.delete_task, status=204, problems=[404, 409])
        add_route(
            router=router,
            method="POST",
            path=drain,
            endpoint=self.drain_storage,
            model=TaskDocument,
            status=202,
            problems=[404],
        )
        add_route(router=router, method="DELETE", path=drain, endpoint=self.cancel_drain, status=204, problems=[404])

    async def list_tasks(self, request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List drains and removals of storages, ordered by id."""
        return answer(page_of(await self._all(request), lambda task: (task["id"],), query, dict))

    async def get_task(self, request: Request, task_id: TokenPath) -> Response:
        """Get a task."""
        return answer(await self._existing(request, task_id))

    async def create_task(self, request: Request, body: Annotated[Order, Body()]) -> Response:
        """Run a task. A drain goes on in the background (202); the others are answered when they are done (200)."""
        if isinstance(body, DrainOrder):
            await self._calls.run(request, _DRAIN, storage_unique_name=body.storage)
            return await self._accepted(request, body.storage)
        if isinstance(body, GarbageOrder):
            fields: dict[str, Any] = {"instance_id": body.instance, "check_bytes": body.check_bytes}
            call = "CapacityService.CollectGarbage"
        else:
            fields = {"storage_unique_name": body.storage, "cluster_id": body.cluster_id}
            fields["min_age_seconds"] = body.min_age_seconds
            call = "CapacityService.ScrubStorage"
        report = await self._calls.run(request, call, dry_run=body.dry_run, **fields)
        return answer({"kind": body.kind, "state": "done", "report": message_to_dict(report)})

    async def delete_task(self, request: Request, task_id: TokenPath) -> Response:
        """Cancel a drain: the storage accepts writes again, and blocks that are left on it stay."""
        task = await self._existing(request, task_id)
        if task["kind"] == "removal":
            text = f"the removal of storage {task['storage']!r} cannot be cancelled: add the storage again as it was"
            raise ProblemError(Problem(409, text))
        await self._calls.run(request, _CANCEL, storage_unique_name=task["storage"])
        return Response(status_code=204)

    async def drain_storage(self, request: Request, name: StoragePath) -> Response:
        """Start to empty a storage: it gets no more writes, and its blocks are evicted."""
        begin = self._calls.run(request, _DRAIN, storage_unique_name=name)
        await change_existing(begin, lambda: self._check_storage(request, name))
        return await self._accepted(request, name)

    async def cancel_drain(self, request: Request, name: StoragePath) -> Response:
        """Let a storage accept writes again; one that is not drained is no error."""
        end = self._calls.run(request, _CANCEL, storage_unique_name=name)
        await change_existing(end, lambda: self._check_storage(request, name))
        return Response(status_code=204)

    async def _check_storage(self, request: Request, name: str) -> None:
        listed = await self._calls.run(request, "AdminService.ListStorage")
        if name not in {storage.global_unique_name for storage in listed.storage}:
            raise not_found("storage", name)

    async def _accepted(self, request: Request, storage: str) -> Response:
        task = await self._existing(request, f"drain:{storage}")
        return answer(task, 202, {"location": f"/v1/tasks/{task['id']}"})

    async def _all(self, request: Request) -> list[dict[str, Any]]:
        listed = await self._calls.run(request, _LIST)
        return [_task(message_to_dict(drain)) for drain in listed.drains]

    async def _existing(self, request: Request, task_id: str) -> dict[str, Any]:
        found = [task for task in await self._all(request) if task["id"] == task_id]
        if not found:
            raise not_found("task", task_id)
        return found[0]


def _task(drain: dict[str, Any]) -> dict[str, Any]:
    kind = "removal" if drain["is_removal"] else "drain"
    return {
        "id": f"{kind}:{drain['storage_unique_name']}",
        "kind": kind,
        "storage": drain["storage_unique_name"],
        "state": _STATES.get(drain["state"], "running"),
        "started_ms": drain["started_ms"],
        "left_bytes": drain["left_bytes"],
        "reason": drain["reason"],
    }
