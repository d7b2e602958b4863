"""Hostile requests over gRPC: nothing breaks, hangs, leaks or writes where it must not.

1,000 requests in every run, 24,000 with `make thorough`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
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
_DATA_SERVICES = {"MetaService", "LeaseService", "PinService", "PoolService", "ResidencyService"}
_CALLS = [(service, method) for service in SERVICES.values() for method in service.methods]


_HOSTILE_NAMES = (
    *("../", "../../../../tmp/kvcm-escaped", "..", ".", "/", "/etc/passwd", "a/b", "a\\b", "%2e%2e%2f", "%00", "%"),
    *("?", "a?b=c", "@", "user:pw@host", "file:///etc", "\0", "a\0b", "\n", "\r\nset-cookie: a=b", "\x1b[31m", "\x7f"),
    *("ü", "日本語", "\u202egnp.exe", "\u2066a\u2069", "\ufeff", "\U0001f600", "é", "A" * 10_240, "é" * 5_000),
    *("*", "{}", "{0}", "%s%n", "$(id)", "'; --", "<b>", "None", "null", "-1", "~", "a~0123456789abcdef", "con", ""),
)
_NUMBERS = (0, 1, -1, 2, 7, 100, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_MOST_DEPTH = 4


_UNSIGNED = {FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_UINT64}


class HostileRequests:
    """Makes requests.

    Args:
        seed: the same seed gives the same requests.
        names: that exist, so that some requests get far.
    """

    def __init__(self, seed: int, names: tuple[str, ...] = ()) -> None:
        self._random = Random(seed)
        self._names = names

    def request(self, kind: Descriptor) -> bytes:
        """Return the bytes of a request that wants to be one of a kind."""
        sort = self._random.random()
        if sort < 0.6:
            return self.message(kind).SerializeToString()
        if sort < 0.9:
            return self._mutated(bytearray(self.message(kind).SerializeToString()))
        return self._raw()

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """Return a message whose fields hold anything."""
        message: Any = GetMessageClass(kind)()
        for field in kind.fields:
            if self._random.random() < 0.7:
                self._set(message, field, depth)
        return message

    def _set(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        if field.is_repeated:
            for _ in range(self._random.choice((0, 1, 1, 2, 5, 70, 3000)) if depth < 2 else 1):
                self._append(message, field, depth)
        elif field.message_type is not None:
            if depth < _MOST_DEPTH:
                getattr(message, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._value(field))

    def _append(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        repeated = getattr(message, field.name)
        if field.message_type is None:
            repeated.append(self._value(field))
        elif field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            repeated[self._value(key)] = self._value(value)
        elif len(repeated) < 20 and depth < _MOST_DEPTH:
            repeated.add().CopyFrom(self.message(field.message_type, depth + 1))

    def _value(self, field: FieldDescriptor) -> Any:
        random, kind = self._random, field.type
        if field.enum_type is not None:
            return random.choice([*field.enum_type.values_by_number, 4242, -1])
        if kind == FieldDescriptor.TYPE_STRING:
            return self._text()
        if kind == FieldDescriptor.TYPE_BYTES:
            return random.randbytes(random.choice((0, 1, 7, 8, 64, 70_000)))
        if kind == FieldDescriptor.TYPE_BOOL:
            return random.random() < 0.5
        if kind == FieldDescriptor.TYPE_DOUBLE:
            return random.choice(_FLOATS)
        number = random.choice((*_NUMBERS, random.getrandbits(63)))
        if kind == FieldDescriptor.TYPE_INT32:
            return max(-(2**31), min(number, 2**31 - 1))
        return number % 2**64 if kind in _UNSIGNED else number

    def _text(self) -> str:
        random = self._random
        if self._names and random.random() < 0.4:
            return random.choice(self._names)
        if random.random() < 0.8:
            return random.choice(_HOSTILE_NAMES)
        return "".join(
            chr(random.choice((random.randrange(1, 128), random.randrange(0xA0, 0xD800)))) for _ in range(12)
        )

    def _mutated(self, body: bytearray) -> bytes:
        random = self._random
        for _ in range(random.randint(1, 4)):
            if not body:
                body = bytearray(random.randbytes(8))
            place, sort = random.randrange(len(body)), random.randrange(5)
            if sort == 0:
                body[place] ^= 1 << random.randrange(8)
            elif sort == 1:
                del body[place:]
            elif sort == 2:
                body[place:place] = random.randbytes(random.randint(1, 9))
            elif sort == 3:
                body += body[place : place + 2000]
            else:
                del body[place : place + random.randint(1, 9)]
        return bytes(body)

    def _raw(self) -> bytes:
        random = self._random
        return random.choice(
            (
                lambda: random.randbytes(random.randint(1, 200)),
                lambda: b"\x0a" * random.randint(1, 5000),  # field 1 in field 1 in field 1
                lambda: b"\x0b" * 20_000,  # groups that never end
                lambda: b"\x0a\xff\xff\xff\xff\x0f" + b"a" * 100,  # a text of 4 GB
                lambda: b"\xff" * 11,  # a number that never ends
                lambda: b"\x12\x80\x80\x04" + b"\xc0\xaf" * 32_768,  # no UTF-8
                lambda: b"",
            )
        )()


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("fuzzed")
    settings = (f"kvcm.storage.allowed_roots={folder / 'roots'}", "kvcm.storage.allowed_hosts=127.0.0.1")
    with secured(folder, *settings) as server:
        yield Tenants.on(server)


async def hammer(tenants: Tenants, seed: int, count: int) -> Counter[str]:
    """Send requests, some of them with a tenant's key or none, and return the outcomes."""
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
                status = GetMessageClass(method.output_type).FromString(answer).header.status  # type: ignore[attr-defined]
                assert status.code not in {0, _INTERNAL_ERROR}, status
                found[f"answered {status.code}"] += 1

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
