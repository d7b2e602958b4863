"""StorageService and PoolService: drains, and memory pools. Thin translation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcm.cache.drains import CANCEL_SECONDS, DrainProgress, StorageDrains
from kvcm.model.errors import InvalidArgumentError, NotReadyError
from kvcm.model.storages import TairMemPoolStorageSpec
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pool_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as pb
from kvcm.reclaim.deletion_executor import LATE_SECONDS, DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.translate import fill
from kvcm.service.usage_values import DrainState, DrainStatus
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.mempool import PoolReport

__all__ = ["DrainView", "PoolApi", "StorageApi"]

# The progress of drains, and the reason why one does not go on, for operators.
#
# Field names are those of the wire messages, as in `usage_values`.


class DrainView:
    """Looks at the drains.

    Args:
        drains: with their progress.
        storages: the open storages, whose health may be the reason.
        deletions: the pending ones.
        leadership: whether this manager carries them out.
    """

    def __init__(
        self, drains: StorageDrains, storages: StorageDirectory, deletions: DeletionExecutor, leadership: Leadership
    ) -> None:
        self._drains = drains
        self._storages = storages
        self._deletions = deletions
        self._leadership = leadership

    async def list_drains(self) -> list[DrainStatus]:
        """Return every drain, ordered by name.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        is_leader = self._leadership.is_leader
        return [self._status(each, is_leader=is_leader) for each in await self._drains.progress(is_leader=is_leader)]

    def _status(self, progress: DrainProgress, *, is_leader: bool) -> DrainStatus:
        drain = progress.drain
        reasons = self._reasons(progress) if is_leader else self._reasons_of_other_managers()
        return DrainStatus(
            storage_unique_name=drain.name,
            is_removal=drain.is_removal,
            state=DrainState.DRAIN_DONE if progress.is_done else DrainState.DRAIN_RUNNING,
            started_ms=int(drain.started_at * 1000),
            left_bytes=progress.remaining_bytes,
            reason="" if progress.is_done else "; ".join(reasons),
        )

    def _reasons_of_other_managers(self) -> Iterator[str]:
        leader = self._leadership.leader_node_id
        if leader:
            yield f"manager {leader} leads and carries it out: ask that one what it waits for"
        else:
            yield "no manager leads at the moment"

    def _reasons(self, progress: DrainProgress) -> Iterator[str]:
        if not progress.has_started:
            yield f"it begins {CANCEL_SECONDS:g} s after the removal, so that it can be added again as it was"
        troubles = [] if progress.drain.is_removal else list(self._troubles(progress.drain.name))
        yield from troubles
        if unreadable := progress.unreadable:
            yield (
                f"{len(unreadable)} stored instances cannot be read, {unreadable[0]!r} for one, so that nobody knows "
                "what they have there: run `kvcm index verify`"
            )
        if progress.pinned:
            yield f"{progress.pinned} locations are pinned (kvcm pin list)"
        if progress.writing:
            yield f"{progress.writing} locations are being written"
        if progress.is_marked and progress.remaining_bytes and not troubles:
            yield "the rest goes when delay_before_delete_ms, read leases and write sessions allow it"

    def _troubles(self, name: str) -> Iterator[str]:
        health = self._storages.health(name)
        if health is None:
            yield "the storage is not open on this manager, which leads: nothing can be deleted"
        elif not health.is_usable:
            yield f"the storage is down: {health.reason}"
        backlog = self._deletions.backlog(name)
        if backlog.waiting and backlog.failures:
            yield f"{backlog.waiting} locations wait for their deletion, which failed {backlog.failures} times"
        if backlog.late:
            yield f"{backlog.late} locations are being deleted for more than {LATE_SECONDS:g} s: the storage hangs"


_SERVICE = "kvcm.v1.StorageService"


class StorageApi:
    """Handlers of the calls that empty storages.

    Args:
        drains: begins and ends drains.
        view: of their progress.
    """

    def __init__(self, drains: StorageDrains, view: DrainView) -> None:
        self._drains = drains
        self._view = view

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane."""

        def call(name: str, request: type[Any], response: type[Any], handler: Any) -> Call:
            return Call(_SERVICE, name, Plane.ADMIN, request, response, handler=handler)

        done = admin_pb.CommonResponse
        return [
            call("DrainStorage", pb.DrainStorageRequest, done, self.drain_storage),
            call("CancelDrain", pb.CancelDrainRequest, done, self.cancel_drain),
            call("ListDrain", pb.ListDrainRequest, pb.ListDrainResponse, self.list_drains),
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
        """List drains and removals, by name."""
        message = pb.ListDrainResponse()
        for status in await self._view.list_drains():
            fill(message.drains.add(), status)
        return Reply(message)


# The call of kvcm.v1.PoolService: hosts report their memory pools.

_POOL_SERVICE = "kvcm.v1.PoolService"


class PoolApi:
    """Handler of PoolService.

    Args:
        registry: the configuration.
        storages: the open storages.
    """

    def __init__(self, registry: Registry, storages: StorageDirectory) -> None:
        self._registry = registry
        self._storages = storages

    def calls(self) -> list[Call]:
        """Return every call of the service."""
        return [
            Call(
                service=_POOL_SERVICE,
                name="ReportPool",
                plane=Plane.DATA,
                request_type=pool_pb.ReportPoolRequest,
                response_type=pool_pb.ReportPoolResponse,
                handler=self.report_pool,
            )
        ]

    async def report_pool(self, request: Any) -> Reply:
        """Answer ReportPool."""
        name = request.storage_unique_name
        for field in ("storage_unique_name", "node_id", "generation", "capacity_bytes"):
            require(getattr(request, field), f"ReportPool.{field}")
        report = PoolReport(request.node_id, request.generation, request.capacity_bytes, request.valid_ms)
        report.check(name, self._spec(name))
        pool = self._storages.pools().get(name)
        if pool is None:
            raise NotReadyError(f"storage {name!r} is not open on this manager yet: report again shortly")
        return Reply(pool_pb.ReportPoolResponse(is_new_generation=await pool.report(report)))

    def _spec(self, name: str) -> TairMemPoolStorageSpec:
        configs = self._registry.storages.existing([name])
        if not configs:
            raise InvalidArgumentError(f"storage {name!r} does not exist")
        spec = configs[0].spec
        if not isinstance(spec, TairMemPoolStorageSpec) or not spec.node_id:
            kind = configs[0].storage_type.kind
            raise InvalidArgumentError(f"storage {name!r} is of type {kind}, it is not a memory pool of a node")
        return spec
