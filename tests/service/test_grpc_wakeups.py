"""gRPC's thread wakes the event loop without ever waiting for it, and several servers take the requests of one port."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcm.model.errors import StorageIOError
from kvcm.service.gate import Gate
from kvcm.service.grpc_server import GrpcLimits, GrpcServer
from kvcm.service.grpc_wakeups import WholeReads, whole_wakeups

_MANY = GrpcLimits(1 << 20, 4096, 100, 10_000)
_FEW = GrpcLimits(1 << 20, 8, 100, 10_000)

_SERVES = """
import asyncio, gc
from kvcm.service.gate import Gate
from kvcm.service.grpc_server import GrpcLimits, GrpcServer
from kvcm.service.grpc_wakeups import WholeReads

async def main():
    server = GrpcServer("127.0.0.1", 0, GrpcLimits(1 << 20, 4096, 100, 10_000), Gate())
    await server.start()
    print(sum(type(each) is WholeReads for each in gc.get_objects()))
    await server.stop()

asyncio.run(main())
"""


def test_all_wakeups_are_taken_at_once() -> None:
    plain = socket.socketpair
    with whole_wakeups():
        reads, writes = socket.socketpair()
    assert socket.socketpair is plain
    with reads, writes:
        assert isinstance(reads, WholeReads)
        reads.setblocking(False)
        for _ in range(100):
            writes.send(b"1")
        assert reads.recv(1) == b"1" * 100
        with pytest.raises(BlockingIOError):
            reads.recv(1)


def test_grpc_is_woken_so() -> None:
    """gRPC makes the pair itself, in a way that is nowhere promised: a release that changes it is noticed here."""
    ran = subprocess.run([sys.executable, "-c", _SERVES], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "1\n"


async def test_a_port_with_several_servers_is_taken_for_everybody_else() -> None:
    server = GrpcServer("127.0.0.1", 0, _MANY, Gate())
    with pytest.raises(StorageIOError, match=f"127.0.0.1:{server.port} cannot be bound"):
        GrpcServer("127.0.0.1", server.port, _MANY, Gate())
    with pytest.raises(StorageIOError, match=f"127.0.0.1:{server.port} cannot be bound"):
        GrpcServer("127.0.0.1", server.port, _FEW, Gate())
    await server.stop()


@pytest.mark.parametrize("limits", [_MANY, _FEW])
async def test_every_connection_is_served_until_the_end(limits: GrpcLimits) -> None:
    server = GrpcServer("127.0.0.1", 0, limits, Gate())
    await server.start()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) for _ in range(8)]
    request = health_pb2.HealthCheckRequest()

    async def asked() -> list[int]:
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        return [answer.status for answer in await asyncio.gather(*(stub.Check(request, timeout=60) for stub in stubs))]

    assert await asked() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 8
    await server.health.note(is_serving=True)
    assert await asked() == [health_pb2.HealthCheckResponse.SERVING] * 8
    await server.stop()
    for channel in channels:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
