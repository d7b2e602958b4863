"""The call of kvcm.v1.PoolService: hosts tell of their memory pools."""

from __future__ import annotations

from typing import Any

from kvcm.model.errors import InvalidArgumentError, NotReadyError
from kvcm.model.storages import TairMemPoolStorageSpec
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pb
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Plane, Reply
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.pool_state import PoolReport

__all__ = ["PoolApi"]

_SERVICE = "kvcm.v1.PoolService"


class PoolApi:
    """Handler of PoolService.

    Args:
        registry: what is configured.
        storages: the open storages.
    """

    def __init__(self, registry: Registry, storages: StorageDirectory) -> None:
        self._registry = registry
        self._storages = storages

    def calls(self) -> list[Call]:
        """Return every call of the service."""
        return [Call(_SERVICE, "ReportPool", Plane.DATA, pb.ReportPoolRequest, pb.ReportPoolResponse, self.report_pool)]

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
        return Reply(pb.ReportPoolResponse(is_new_generation=await pool.report(report)))

    def _spec(self, name: str) -> TairMemPoolStorageSpec:
        configs = self._registry.storages.existing([name])
        if not configs:
            raise InvalidArgumentError(f"storage {name!r} does not exist")
        spec = configs[0].spec
        if not isinstance(spec, TairMemPoolStorageSpec) or not spec.node_id:
            kind = configs[0].storage_type.kind
            raise InvalidArgumentError(f"storage {name!r} is of type {kind}, it is not a memory pool of a node")
        return spec
