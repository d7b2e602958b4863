"""How tests talk to a manager: one driver per transport behind one face, so that a case is written once.

gRPC requests go through the stubs of kvcm/protocol. HTTP requests are the proto3 JSON of the same messages, printed and
read by protobuf's own json_format (an answer with an unknown field or a wrong type fails there), over http.client.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvcm.protocol import admin_service_pb2 as admin

DEADLINE_SECONDS = 30.0
_MODULES = {"MetaService": "kvcm.protocol.meta_service", "AdminService": "kvcm.protocol.admin_service"} | {
    f"{name}Service": f"kvcm.protocol.kvcm.v1.{name.lower()}_service"
    for name in ("Lease", "Pin", "Pool", "Residency", "Group", "Capacity", "Insight", "Storage", "Config", "Access")
}
SERVICES: dict[str, ServiceDescriptor] = {
    name: import_module(f"{module}_pb2").DESCRIPTOR.services_by_name[name] for name, module in _MODULES.items()
}
"""Every service that a manager serves."""

ON_ADMIN_PORT = SERVICES.keys() - {"MetaService", "LeaseService", "PinService", "PoolService", "ResidencyService"}
"""Those of them that are served on the admin port."""

_CODES = admin.ErrorCode  # numbers agree in all packages

_HTTP_NAMES = {("GroupService", "ListInstanceGroup"): "listInstanceGroups"}
"""Of calls whose path is not that of their name, which another one has."""

Value = TypeVar("Value")


class Address(NamedTuple):
    """Where a manager listens."""

    rpc: str
    http: str
    admin_rpc: str
    admin_http: str


class Refusal(NamedTuple):
    """Outcome of a call that was not OK."""

    code: str
    message: str


class Turn(NamedTuple):
    """How a transport took a request: the status of HTTP that fits, its text or that of the answer, and what else it
    says."""

    status: int
    text: str
    headers: dict[str, str]


_STATUS_OF_CODE = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}


class Driver(Protocol):
    """One transport to one manager."""

    name: str

    def send(self, service: str, rpc: str, request: Message) -> Any:
        """Return the answer to a request; any outcome but a proper answer raises."""

    def attempt(self, service: str, rpc: str, request: Message, authorization: str | None = None) -> Turn:
        """Return how the transport takes a request, with another authorization than the driver's own if one is given;
        "" for none."""

    def refuses_unparsable(self, service: str, rpc: str) -> bool:
        """Send bytes that are no request; return whether the transport refuses them as its documentation says."""

    def close(self) -> None:
        """Close the connections."""


class ClientTls(NamedTuple):
    """TLS settings of a client: the authority that it trusts, and its own certificate, if it has one."""

    ca_file: Path
    cert_file: Path | None = None
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the same for gRPC."""
        own = [file.read_bytes() if file is not None else None for file in (self.key_file, self.cert_file)]
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), *own)

    def context(self) -> ssl.SSLContext:
        """Return the same for HTTP."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class GrpcDriver:
    """The calls over gRPC."""

    name = "grpc"

    def __init__(self, address: Address, key: str = "", tls: ClientTls | None = None) -> None:
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        options = (
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            *((("grpc.use_local_subchannel_pool", 1),) if tls is not None else ()),  # else sessions are resumed
        )
        data, admin_channel = (_channel(target, options, tls) for target in (address.rpc, address.admin_rpc))
        self.channels = {name: admin_channel if name in ON_ADMIN_PORT else data for name in SERVICES}
        self._stubs = {
            name: getattr(import_module(f"{module}_pb2_grpc"), f"{name}Stub")(self.channels[name])
            for name, module in _MODULES.items()
        }

    def send(self, service: str, rpc: str, request: Message) -> Any:
        return getattr(self._stubs[service], rpc)(request, timeout=DEADLINE_SECONDS, metadata=self._metadata)

    def attempt(self, service: str, rpc: str, request: Message, authorization: str | None = None) -> Turn:
        given = (
            self._metadata if authorization is None else (("authorization", authorization),) if authorization else ()
        )
        try:
            answer = getattr(self._stubs[service], rpc)(request, timeout=DEADLINE_SECONDS, metadata=given)
        except grpc.RpcError as error:
            return Turn(_STATUS_OF_CODE[error.code()], error.details(), dict(error.trailing_metadata()))
        return Turn(200, answer.header.status.message, {})

    def refuses_unparsable(self, service: str, rpc: str) -> bool:
        call = self.channels[service].unary_unary(f"/{SERVICES[service].full_name}/{rpc}")
        try:
            call(b"\xff\xff\xff", timeout=DEADLINE_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            request_name = SERVICES[service].methods_by_name[rpc].input_type.name
            return error.code() is grpc.StatusCode.INVALID_ARGUMENT and request_name in error.details()
        return False

    def close(self) -> None:
        for channel in set(self.channels.values()):
            channel.close()


def _channel(target: str, options: Sequence[tuple[str, int]], tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, tls.credentials(), options)


class HttpAnswer(NamedTuple):
    """A raw HTTP answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def post(
    connection: http.client.HTTPConnection,
    path: str,
    body: bytes,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Send a body and return the raw answer; on a new connection where the server closed the idle one."""
    sent = dict(headers or {})
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
    except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
        connection.close()
        connection.request(method, path, body, sent)
        response = connection.getresponse()
    received = {name.lower(): value for name, value in response.getheaders()}
    return HttpAnswer(response.status, received, response.read())


class HttpDriver:
    """The calls over HTTP with JSON bodies, on kept-alive connections."""

    name = "http"

    def __init__(self, address: Address, key: str = "", tls: ClientTls | None = None) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.data, self.admin = (_connection(target, tls) for target in (address.http, address.admin_http))

    def _post(self, service: str, rpc: str, body: bytes, authorization: str | None = None) -> HttpAnswer:
        connection = self.admin if service in ON_ADMIN_PORT else self.data
        headers = self._headers if authorization is None else {"authorization": authorization} if authorization else {}
        name = _HTTP_NAMES.get((service, rpc), rpc[0].lower() + rpc[1:])
        return post(connection, f"/api/{name}", body, headers=headers)

    def attempt(self, service: str, rpc: str, request: Message, authorization: str | None = None) -> Turn:
        body = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None)
        answer = self._post(service, rpc, body.encode(), authorization)
        if answer.status == 200:
            return Turn(200, json.loads(answer.body)["header"]["status"]["message"], answer.headers)
        return Turn(answer.status, answer.headers.get("x-kvcm-error", ""), answer.headers)

    def send(self, service: str, rpc: str, request: Message) -> Any:
        body = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None)
        answer = self._post(service, rpc, body.encode())
        assert answer.status == 200, answer
        assert answer.headers["content-type"] == "application/json"
        response = GetMessageClass(SERVICES[service].methods_by_name[rpc].output_type)()
        return json_format.Parse(answer.body, response)

    def refuses_unparsable(self, service: str, rpc: str) -> bool:
        answer = self._post(service, rpc, b'{"trace_id":')
        return answer.status == 400 and answer.body == b"{}" and "content-type" not in answer.headers

    def close(self) -> None:
        self.data.close()
        self.admin.close()


def _connection(target: str, tls: ClientTls | None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(target, timeout=DEADLINE_SECONDS)
    return http.client.HTTPSConnection(target, timeout=DEADLINE_SECONDS, context=tls.context())


@dataclass(frozen=True)
class Api:
    """All calls of a manager over one transport, named `Service.Rpc` or, for MetaService, just `Rpc`."""

    driver: Driver

    @staticmethod
    def _request(rpc: str, fields: dict[str, Any]) -> tuple[str, str, Message]:
        service, _, name = rpc.rpartition(".")
        service = service or "MetaService"
        return service, name, GetMessageClass(SERVICES[service].methods_by_name[name].input_type)(**fields)

    def call(self, rpc: str, **fields: Any) -> Any:
        """Return the answer to a request of these fields, whatever its outcome."""
        return self.driver.send(*self._request(rpc, fields))

    def ok(self, rpc: str, **fields: Any) -> Any:
        """Return the answer, which must be OK."""
        answer = self.call(rpc, **fields)
        status = answer.header.status
        assert status.code == _CODES.Value("OK"), f"{rpc}: {_CODES.Name(status.code)}: {status.message}"
        return answer

    def attempt(self, rpc: str, authorization: str | None = None, **fields: Any) -> Turn:
        """Return how the transport takes a request of these fields."""
        return self.driver.attempt(*self._request(rpc, fields), authorization)

    def refused(self, rpc: str, **fields: Any) -> Refusal:
        """Return code and message of the answer, which must not be OK."""
        answer = self.call(rpc, **fields)
        status = answer.header.status
        assert status.code != _CODES.Value("OK"), f"{rpc} was accepted: {answer}"
        return Refusal(_CODES.Name(status.code), status.message)


def eventually(probe: Callable[[], Value], seconds: float = 20.0) -> Value:
    """Return the first true value of `probe`; fail when there is none within the deadline.

    That is long for a busy machine, and shorter than write sessions and leases last by default: the end of one
    does not make a probe true.
    """
    deadline = time.monotonic() + seconds
    while not (value := probe()):
        assert time.monotonic() < deadline, f"not within {seconds} s; the last value was {value!r}"
        time.sleep(0.01)
    return value
