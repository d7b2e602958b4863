"""Clients that write and read while managers are restarted, and repeat requests that were not carried out.

Every request ends in one of four ways: it is answered; it is turned away by a manager that says that it stops, or,
rarely, cancelled by one that closes its port; or it never left the client, since no manager listens. Anything else is
wrong: a client would not know whether to repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf import json_format

from kvcm.protocol import meta_service_pb2 as pb

_DEADLINE_SECONDS = 60.0
_PAUSE_SECONDS = 0.01
_RETRY_SECONDS = 0.05
_LONG_EVERY = 10
_CHANNEL = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # of clients, which count rejected requests
)
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([0-9]+)", re.IGNORECASE)
_RESPONSES: dict[str, type[Any]] = {
    "StartWriteCache": pb.StartWriteCacheResponse,
    "FinishWriteCache": pb.CommonResponse,
    "GetCacheLocationLen": pb.GetCacheLocationLenResponse,
}


class NotCarriedOutError(Exception):
    """A request may be repeated.

    Attributes:
        reason: "turned away", "refused", or "cancelled" as gRPC cancels what it has not begun.
        after_seconds: when, as a well-behaved client does.
    """

    def __init__(self, reason: str, after_seconds: float = _RETRY_SECONDS) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after_seconds = after_seconds


class Port(Protocol):
    """One connection to a manager, opened when it is needed."""

    async def send(self, name: str, request: Any) -> Any:
        """Return the answer's message; raises `NotCarriedOutError`, or anything for what may not happen."""

    async def close(self) -> None:
        """Close it."""


class GrpcPort:
    """Over gRPC."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", _CHANNEL)

    async def send(self, name: str, request: Any) -> Any:
        call = self._channel.unary_unary(f"/kv_cache_manager.proto.meta.MetaService/{name}")
        try:
            body = await call(request.SerializeToString(), timeout=_DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise _not_carried_out(error) from error
            if error.code() is grpc.StatusCode.CANCELLED:  # grpc/grpc#41785: it came while the port was being closed
                raise NotCarriedOutError("cancelled") from error
            raise
        return _RESPONSES[name].FromString(body)

    async def close(self) -> None:
        await self._channel.close()


def _not_carried_out(error: grpc.aio.AioRpcError) -> NotCarriedOutError:
    details = error.details() or ""
    pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
    if pushback is not None:
        return NotCarriedOutError("turned away", int(pushback) / 1000)
    if "failed to connect" in details.lower():
        return NotCarriedOutError("refused")
    raise AssertionError(f"UNAVAILABLE without a reason to repeat it: {details}") from error


class HttpPort:
    """Over HTTP, on a connection that is kept alive as long as the manager wants that."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, name: str, request: Any) -> Any:
        body = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None).encode()
        path = f"/api/{name[0].lower()}{name[1:]}"
        async with asyncio.timeout(_DEADLINE_SECONDS):
            head, answer = await self._exchange(path, body)
        retry_after = _RETRY_AFTER.search(head)
        if head.startswith(b"HTTP/1.1 503") and retry_after is not None:
            raise NotCarriedOutError("turned away", float(retry_after[1]))
        assert head.startswith(b"HTTP/1.1 200"), head
        return json_format.ParseDict(json.loads(answer), _RESPONSES[name]())

    async def _exchange(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        reader, writer = await self._open()
        writer.write(f"POST {path} HTTP/1.1\r\nhost: kvcm\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None, head
        answer = await reader.readexactly(int(length[1]))
        if b"\r\nconnection: close" in head.lower():
            await self.close()
        return head, answer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():
            await self.close()  # the manager closed it; nothing was sent
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
            except ConnectionRefusedError as error:
                raise NotCarriedOutError("refused") from error
        return self._streams

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()
            self._streams = None


@dataclass(frozen=True, slots=True)
class Way:
    """How a client reaches a manager.

    Attributes:
        transport: "grpc" or "http".
        port: of the data service.
        manager: number of the manager.
    """

    transport: str
    port: int
    manager: int

    def open(self) -> Port:
        """Return a connection."""
        return GrpcPort(self.port) if self.transport == "grpc" else HttpPort(self.port)


@dataclass(slots=True)
class Load:
    """What clients share.

    Attributes:
        blocks: of most writes.
        long_blocks: of every tenth.
        is_over: clients stop after their current block.
        outcomes: requests by manager and how they ended.
        wrong: what may not happen, in words.
        longest_seconds: of an answer, by manager.
    """

    blocks: int = 16
    long_blocks: int = 4096
    is_over: bool = False
    outcomes: Counter[tuple[int, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0


class Client:
    """One client with an instance of its own: writes, reads what it wrote, and goes on.

    Args:
        load: that the clients share.
        way: to its manager.
        instance: id.
    """

    def __init__(self, load: Load, way: Way, instance: str) -> None:
        self._load, self.way, self.instance = load, way, instance
        self._port = way.open()
        self._phase = zlib.crc32(instance.encode())  # long writes of all clients do not come together
        self.rounds = 0
        self.confirmed: list[range] = []

    async def run(self) -> None:
        """Work until the load is over."""
        try:
            while not self._load.is_over:
                await self.write_and_read()
                await asyncio.sleep(_PAUSE_SECONDS)
        except Exception as error:  # of any kind: nothing may fail
            self._load.wrong.append(f"{self.instance} over {self.way.transport}: {error!r}")
        finally:
            await self.close()

    async def close(self) -> None:
        """Close its connection."""
        await self._port.close()

    async def write_and_read(self) -> None:
        """Write new blocks, and look them up."""
        load = self._load
        is_long = (self.rounds + self._phase) % _LONG_EVERY == _LONG_EVERY - 1
        count = load.long_blocks if is_long else load.blocks
        keys = range(self.rounds << 20, (self.rounds << 20) + count)
        started = await self._ask(
            "StartWriteCache",
            pb.StartWriteCacheRequest(instance_id=self.instance, block_keys=keys, write_timeout_seconds=300),
        )
        assert len(started.locations) == count, f"{len(started.locations)} of {count} blocks can be written"
        finish = pb.FinishWriteCacheRequest(instance_id=self.instance, write_session_id=started.write_session_id)
        finish.success_blocks.offset = count
        await self._ask("FinishWriteCache", finish)
        self.confirmed.append(keys)
        await self.check(keys)
        self.rounds += 1

    async def check(self, keys: range) -> None:
        """All blocks of a confirmed write are found."""
        request = pb.GetCacheLocationLenRequest(
            instance_id=self.instance, query_type=pb.QT_PREFIX_MATCH, block_keys=keys
        )
        found = (await self._ask("GetCacheLocationLen", request)).cache_location_len
        assert found == len(keys), f"{found} of {len(keys)} confirmed blocks are found"

    async def _ask(self, name: str, request: Any) -> Any:
        """Send a request until it is carried out."""
        outcomes, manager = self._load.outcomes, self.way.manager
        deadline = time.monotonic() + 2 * _DEADLINE_SECONDS
        while True:
            begin = time.monotonic()
            try:
                answer = await self._port.send(name, request)
            except NotCarriedOutError as error:
                assert time.monotonic() < deadline, f"{name} is not carried out"
                outcomes[manager, error.reason] += 1
                await asyncio.sleep(error.after_seconds)
                continue
            self._load.longest_seconds = max(self._load.longest_seconds, time.monotonic() - begin)
            outcomes[manager, "answered"] += 1
            status = answer.header.status
            assert status.code == pb.OK, f"{name}: code {status.code}, {status.message}"
            return answer
