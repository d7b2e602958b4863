"""gRPC's own services of a listener: health (grpc.health.v1) and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvcm.model.tasks import end_tasks

__all__ = ["GrpcHealth", "reflection_of"]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcHealth(health.aio.HealthServicer):
    """Health of the listener as a whole ("") and of each service, which is always the same. To be told once before the
    server is started.

    Args:
        servers: where it is served, before they are started.
    """

    def __init__(self, servers: Iterable[grpc.aio.Server]) -> None:
        super().__init__()
        self._services = [""]
        self._is_serving = False
        self._is_over = asyncio.Event()
        for server in servers:
            health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def cover(self, services: Sequence[str]) -> None:
        """Tell of these services, too."""
        self._services += services
        await self.note(self._is_serving)

    async def note(self, is_serving: bool) -> None:
        """Tell whoever watches."""
        self._is_serving = is_serving
        for service in self._services:
            await self.set(service, _SERVING if is_serving else _NOT_SERVING)

    def end(self) -> None:
        """End the streams of those who watch: they would hold up the end of the server."""
        self._is_over.set()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the name of the rpc
        """Stream the status of a service, until the server ends."""
        watch = asyncio.create_task(super().Watch(request, context))
        end = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait({watch, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([watch, end])
        if self._is_over.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the manager is stopping")


def reflection_of(services: Sequence[str]) -> grpc.GenericRpcHandler:
    """Return what lets clients ask a listener for its services and messages (`grpcurl`). It may be added after the
    server was started, which grpc_reflection's own way cannot do."""
    servicer = reflection.aio.ReflectionServicer([*services, health.SERVICE_NAME, reflection.SERVICE_NAME])
    method: Any = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})
