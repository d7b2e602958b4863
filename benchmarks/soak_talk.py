"""One connection to a manager, over gRPC or HTTP: the same question, the same answer."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from google.protobuf import json_format
from service_client import CONNECTIONS, GrpcConnection, HttpConnection

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease_pb
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin_pb

__all__ = ["TRANSPORTS", "Answer", "Ask", "Talk"]

TRANSPORTS = ("grpc", "http")

_META, _ADMIN = "kv_cache_manager.proto.meta.MetaService", "kv_cache_manager.proto.admin.AdminService"
_PINS, _LEASES, _CAPACITY = "kvcm.v1.PinService", "kvcm.v1.LeaseService", "kvcm.v1.CapacityService"

_CALLS: dict[type[Any], tuple[str, str, type[Any]]] = {
    pb.GetCacheLocationRequest: (_META, "GetCacheLocation", pb.GetCacheLocationResponse),
    pb.GetCacheLocationLenRequest: (_META, "GetCacheLocationLen", pb.GetCacheLocationLenResponse),
    pb.StartWriteCacheRequest: (_META, "StartWriteCache", pb.StartWriteCacheResponse),
    pb.FinishWriteCacheRequest: (_META, "FinishWriteCache", pb.CommonResponse),
    pb.GetCacheMetaRequest: (_META, "GetCacheMeta", pb.GetCacheMetaResponse),
    pb.RemoveCacheRequest: (_META, "RemoveCache", pb.CommonResponse),
    pb.TrimCacheRequest: (_META, "TrimCache", pb.CommonResponse),
    pb.RegisterInstanceRequest: (_META, "RegisterInstance", pb.RegisterInstanceResponse),
    pb.GetInstanceInfoRequest: (_META, "GetInstanceInfo", pb.GetInstanceInfoResponse),
    pb.GetClusterInfoRequest: (_META, "GetClusterInfo", pb.GetClusterInfoResponse),
    pin_pb.PinPrefixRequest: (_PINS, "PinPrefix", pin_pb.PinPrefixResponse),
    pin_pb.UnpinPrefixRequest: (_PINS, "UnpinPrefix", pb.CommonResponse),
    pin_pb.ListPinsRequest: (_PINS, "ListPins", pin_pb.ListPinsResponse),
    lease_pb.RenewReadLeaseRequest: (_LEASES, "RenewReadLease", lease_pb.RenewReadLeaseResponse),
    lease_pb.ReleaseReadLeaseRequest: (_LEASES, "ReleaseReadLease", pb.CommonResponse),
    lease_pb.RenewWriteSessionRequest: (_LEASES, "RenewWriteSession", lease_pb.RenewWriteSessionResponse),
    admin_pb.GetMetricsRequest: (_ADMIN, "GetMetrics", admin_pb.GetMetricsResponse),
    admin_pb.ListStorageRequest: (_ADMIN, "ListStorage", admin_pb.ListStorageResponse),
    admin_pb.GetInstanceGroupRequest: (_ADMIN, "GetInstanceGroup", admin_pb.GetInstanceGroupResponse),
    admin_pb.ListInstanceInfoRequest: (_ADMIN, "ListInstanceInfo", admin_pb.ListInstanceInfoResponse),
    admin_pb.CheckHealthRequest: (_ADMIN, "CheckHealth", admin_pb.CheckHealthResponse),
    capacity_pb.GetUsageRequest: (_CAPACITY, "GetUsage", capacity_pb.GetUsageResponse),
}


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        call: name of the rpc.
        code: of the header.
        text: of the header.
        fields: the response: a message, or decoded JSON.
    """

    call: str
    code: int
    text: str
    fields: Any

    def get(self, name: str) -> str:
        """Return a text field."""
        return str(self.fields.get(name, "") if isinstance(self.fields, dict) else getattr(self.fields, name))

    def count(self, name: str) -> int:
        """Return the length of a repeated field."""
        return len(self.fields.get(name, ()) if isinstance(self.fields, dict) else getattr(self.fields, name))


class Ask(Protocol):
    """Sends a request."""

    async def __call__(self, request: Any) -> Answer: ...


class Talk:
    """A connection, opened with the first request and again after `close`.

    Args:
        transport: "grpc" or "http".
        port: of the manager.
    """

    def __init__(self, transport: str, port: int) -> None:
        self._transport = transport
        self._port = port
        self._connection: GrpcConnection | HttpConnection | None = None

    async def ask(self, request: Any) -> Answer:
        """Send a request and return its answer; raises what the transport raises."""
        if self._connection is not None and self._connection.is_closed:
            await self.close()  # idle for longer than the manager keeps connections
        if self._connection is None:
            self._connection = CONNECTIONS[self._transport](self._port)
            await self._connection.open()
        service, name, response_type = _CALLS[type(request)]
        if self._transport == "grpc":
            body = await self._connection.send(f"/{service}/{name}", request.SerializeToString())
            message = response_type.FromString(body)
            return Answer(name, message.header.status.code, message.header.status.message, message)
        text = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None)
        body = await self._connection.send(f"/api/{name[0].lower()}{name[1:]}", text.encode())
        fields = json.loads(body)
        status = fields["header"]["status"]
        return Answer(name, pb.ErrorCode.Value(status["code"]), status.get("message", ""), fields)

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
