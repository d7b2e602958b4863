"""Hostile requests over gRPC: nothing breaks, hangs, leaks or writes where it must not.

1,000 requests in every run, 24,000 with `make thorough`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass
from hostile_messages import HostileRequests
from secured import Tenants, secured
from test_transport_drivers import SERVICES
from test_transport_sites import Site

_REQUESTS = 24_000 if os.environ.get("KVCM_TESTS") == "thorough" else 1_000
_AT_ONCE = 16
_DEADLINE_SECONDS = 30.0
_INTERNAL_ERROR = 3
_ALLOWED = {
    grpc.StatusCode.INVALID_ARGUMENT,  # no message
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}
_DATA_SERVICES = {"MetaService", "LeaseService", "PinService", "PoolService"}
_CALLS = [(service, method) for service in SERVICES.values() for method in service.methods]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("fuzzed")
    settings = (f"kvcm.storage.allowed_roots={folder / 'roots'}", "kvcm.storage.allowed_hosts=127.0.0.1")
    with secured(folder, *settings) as server:
        yield Tenants.on(server)


def outcome(answer_type: type, body: bytes) -> str:
    """Return the code of an answer's header."""
    status = answer_type.FromString(body).header.status
    assert status.code not in {0, _INTERNAL_ERROR}, status
    return f"answered {status.code}"


async def hammer(tenants: Tenants, seed: int, count: int) -> Counter[str]:
    """Send requests, some of them with a tenant's key or none, and return what became of them."""
    address = tenants.server.process.address
    names = (*tenants.groups.values(), *tenants.instances.values())
    requests = HostileRequests(seed, names)
    found: Counter[str] = Counter()
    keys = (*[tenants.server.admin_key] * 6, tenants.keys["engine"], "~" * 40)
    metadata = [*((("authorization", f"Bearer {key}"),) for key in keys), ()]
    options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    async with (
        grpc.aio.insecure_channel(address.rpc, options) as data,
        grpc.aio.insecure_channel(address.admin_rpc, options) as admin,
    ):

        async def send(number: int) -> None:
            service, method = _CALLS[number % len(_CALLS)]
            channel = data if service.name in _DATA_SERVICES else admin
            body = requests.request(method.input_type)
            call = channel.unary_unary(f"/{service.full_name}/{method.name}")
            try:
                answer = await call(body, timeout=_DEADLINE_SECONDS, metadata=metadata[number % len(metadata)])
            except grpc.aio.AioRpcError as error:
                found[allowed(method.full_name, error)] += 1
            else:
                found[outcome(GetMessageClass(method.output_type), answer)] += 1

        waiting = iter(range(count))

        async def worker() -> None:
            for number in waiting:
                await send(number)

        await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
    return found


def allowed(method: str, error: grpc.aio.AioRpcError) -> str:
    """Return the name of a refusal's code."""
    assert error.code() in _ALLOWED, (method, error)
    return error.code().name


def outside(folder: Path) -> set[Path]:
    """Everything beside the manager's own folders where a name could have led."""
    return {*folder.parent.glob("*"), *Path("/tmp").glob("kvcm-escaped*")}


@pytest.mark.timeout(1800)
def test_hostile_requests_do_no_harm(tenants: Tenants) -> None:
    process = tenants.server.process
    folder = process.data_dir.parent
    before = outside(folder)
    with tenants.server.api(key=tenants.keys["foreign"]) as api:
        Site(api).write(tenants.instances["b"], [1, 2, 3])
    found = asyncio.run(hammer(tenants, 20_261_123, _REQUESTS))
    assert found.total() == _REQUESTS
    assert found["answered 1"] > 0
    assert found["answered 5"] > _REQUESTS / 10
    assert {grpc.StatusCode.INVALID_ARGUMENT.name, grpc.StatusCode.UNAUTHENTICATED.name} <= found.keys()
    assert process.process.poll() is None
    log = process.log_text()
    assert "Traceback" not in log
    assert process.events("failed") == []
    assert outside(folder) == before
    with tenants.server.api() as api:  # and it still serves
        site = Site(api)
        instance = site.instance(site.group())
        site.write(instance, [4, 5])
        assert site.hits(instance, [4, 5]) == [4, 5]
