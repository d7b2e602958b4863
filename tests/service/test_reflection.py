"""gRPC reflection: each port lists its services, and describes them as the contract does."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from test_transport_drivers import ON_ADMIN_PORT, SERVICES, Address
from test_transport_process import ManagerProcess, manager

OURS = {"data": set(SERVICES) - ON_ADMIN_PORT, "admin": ON_ADMIN_PORT}
ITS_OWN = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def _ask(address: str, **fields: str) -> reflection_pb2.ServerReflectionResponse:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**fields)]), timeout=10)
    return answer


def _listed(address: str) -> set[str]:
    return {service.name for service in _ask(address, list_services="*").list_services_response.service}


def _port(address: Address, plane: str) -> str:
    return address.rpc if plane == "data" else address.admin_rpc


@pytest.mark.parametrize("plane", OURS)
def test_each_port_lists_every_service_that_it_serves(server: ManagerProcess, plane: str) -> None:
    names = {SERVICES[name].full_name for name in OURS[plane]}
    assert _listed(_port(server.address, plane)) == names | ITS_OWN


def test_a_port_that_serves_both_planes_lists_both(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.admin_rpc_port=0", "kvcm.service.enable_debug_service=true") as process:
        names = {service.full_name for service in SERVICES.values()}
        debug = "kv_cache_manager.proto.debug.DebugService"
        assert _listed(process.address.rpc) == names | ITS_OWN | {debug}


@pytest.mark.parametrize("plane", OURS)
def test_every_service_is_described(server: ManagerProcess, plane: str) -> None:
    for name in OURS[plane]:
        symbol = SERVICES[name].full_name
        answer = _ask(_port(server.address, plane), file_containing_symbol=symbol)
        files = map(
            descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto
        )
        described = {f"{file.package}.{service.name}": service for file in files for service in file.service}
        assert {method.name for method in described[symbol].method} == set(SERVICES[name].methods_by_name)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.reflection=false") as process:
        with pytest.raises(grpc.RpcError) as refused:
            _listed(process.address.rpc)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "Cannot register" not in process.log_text()


def test_nothing_is_logged_about_it(server: ManagerProcess) -> None:
    assert "Cannot register" not in server.log_text()
