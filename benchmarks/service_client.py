"""A client process of the service benchmark: sends prepared requests and keeps times.

It reads nothing of an answer that the next request does not need. One job a line on stdin, as JSON. The requests are
made first and "ready" is printed; the next line starts the run, whose times are printed as one line. So the making of
requests is in no figure.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import cycle, islice
from typing import Any, NamedTuple

import grpc
import grpc.aio
import uvloop
from server_process import META

from kvcm.protocol import meta_service_pb2 as pb

_OBSERVE_SECONDS = 0.05

Send = Callable[[str, bytes], Awaitable[bytes]]


class Exchange(NamedTuple):
    """A request: where to, and its bytes. `finish` marks the end of a write, made of the answer before it."""

    target: str
    body: bytes
    finish: bool = False


Unit = list[Exchange]
"""Requests one after the other, timed together."""


class GrpcConnection:
    """A channel of its own."""

    def __init__(self, port: int, key: str = "") -> None:
        self._metadata = (("authorization", f"Bearer {key}"),) if key else None
        options = (
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels of a process share one connection
        )
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._calls: dict[str, Any] = {}

    async def open(self) -> None:
        await asyncio.wait_for(self._channel.channel_ready(), 30)

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed it: a channel opens connections by itself."""
        return False

    async def send(self, target: str, body: bytes) -> bytes:
        call = self._calls.get(target)
        if call is None:
            call = self._calls[target] = self._channel.unary_unary(target)
        answer: bytes = await call(body, metadata=self._metadata)
        return answer

    async def close(self) -> None:
        await self._channel.close()


class HttpConnection:
    """A connection that is kept alive, with no more of HTTP than a client needs."""

    _LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)

    def __init__(self, port: int, key: str = "") -> None:
        self._port = port
        self._credentials = f"\r\nauthorization: Bearer {key}" if key else ""

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed it."""
        return self._reader.at_eof()

    async def send(self, target: str, body: bytes) -> bytes:
        head = f"POST {target} HTTP/1.1\r\nhost: kvcm\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self._writer.write((head + self._credentials).encode() + b"\r\n\r\n" + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = self._LENGTH.search(answer)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert length is not None, answer
        return await self._reader.readexactly(int(length[1]))

    async def close(self) -> None:
        self._writer.close()


CONNECTIONS: dict[str, type[GrpcConnection | HttpConnection]] = {"grpc": GrpcConnection, "http": HttpConnection}


def sent_units(job: dict[str, Any]) -> list[Unit]:
    """Return units of prepared requests, repeated in turn."""
    prepared = [[Exchange(target, base64.b64decode(body)) for target, body in unit] for unit in job["units"]]
    return list(islice(cycle(prepared), job["count"]))


def write_units(job: dict[str, Any]) -> list[Unit]:
    """Return starts and finishes of writes of new blocks."""
    write = job["write"]
    over_http = job["transport"] == "http"
    units = []
    for number in range(job["count"]):
        first = write["first"] + number * write["blocks"]
        start = start_request(write["instance"], range(first, first + write["blocks"]))
        if over_http:
            units.append([Exchange("/api/startWriteCache", json_of_start(start)), Exchange("", b"", finish=True)])
        else:
            units.append(
                [Exchange(f"{META}StartWriteCache", start.SerializeToString()), Exchange("", b"", finish=True)]
            )
    return units


def key_of(number: int) -> int:
    """Return a key that looks like a hash, another one for every number."""
    return (number * 0x9E3779B97F4A7C15 + (1 << 63)) % (1 << 64) - (1 << 63)


def start_request(instance: str, numbers: range) -> Any:
    """Return a request to write blocks."""
    return pb.StartWriteCacheRequest(
        trace_id="bench", instance_id=instance, block_keys=map(key_of, numbers), write_timeout_seconds=60
    )


def json_of_start(start: Any) -> bytes:
    """Return it as a client of HTTP writes it: 64-bit numbers are texts."""
    body = {
        "trace_id": start.trace_id,
        "instance_id": start.instance_id,
        "block_keys": list(map(str, start.block_keys)),
        "write_timeout_seconds": start.write_timeout_seconds,
    }
    return json.dumps(body).encode()


def finish_of(job: dict[str, Any], answer: bytes) -> Exchange:
    """Return the request that ends a write, from the answer that began it."""
    write = job["write"]
    if job["transport"] == "http":
        body = {
            "trace_id": "bench",
            "instance_id": write["instance"],
            "write_session_id": _SESSION_TEXT.search(answer)[1].decode(),  # type: ignore[index]
            "success_blocks": {"offset": write["blocks"]},
        }
        return Exchange("/api/finishWriteCache", json.dumps(body).encode())
    session = pb.StartWriteCacheResponse.FromString(answer).write_session_id
    request = pb.FinishWriteCacheRequest(trace_id="bench", instance_id=write["instance"], write_session_id=session)
    request.success_blocks.offset = write["blocks"]
    return Exchange(f"{META}FinishWriteCache", request.SerializeToString())


_SESSION_TEXT = re.compile(rb'"write_session_id":"([0-9a-f]+)"')


async def send_unit(job: dict[str, Any], send: Send, unit: Unit) -> tuple[float, list[bytes], list[Exchange]]:
    """Return the seconds that the answers took, the answers and the requests."""
    seconds, answers, sent = 0.0, [b""], []
    for planned in unit:
        exchange = finish_of(job, answers[-1]) if planned.finish else planned
        begin = time.perf_counter()
        answers.append(await send(exchange.target, exchange.body))
        seconds += time.perf_counter() - begin
        sent.append(exchange)
    return seconds, answers[1:], sent


async def run(job: dict[str, Any], units: list[Unit], connections: list[Any]) -> dict[str, Any]:
    """Send all units, each connection one at a time, and return the times."""
    left = iter(units)
    times: list[float] = []
    smallest = 1 << 62
    last: tuple[list[bytes], list[Exchange]] = ([], [])

    async def work(connection: Any) -> None:
        nonlocal smallest, last
        for unit in left:
            seconds, answers, sent = await send_unit(job, connection.send, unit)
            times.append(seconds)
            smallest = min(smallest, sum(map(len, answers)))
            last = answers, sent

    begin = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    wall = time.perf_counter() - begin
    answers, sent = last
    return {
        "times_us": [round(seconds * 1e6) for seconds in times],
        "wall": wall,
        "smallest": smallest,
        "answers": [base64.b64encode(answer).decode() for answer in answers],
        "sent": [[exchange.target, base64.b64encode(exchange.body).decode()] for exchange in sent],
    }


async def main() -> None:
    connections: dict[tuple[str, int], list[Any]] = {}
    for line in sys.stdin:
        job = json.loads(line)
        units = write_units(job) if "write" in job else sent_units(job)
        of_port = connections.setdefault((job["transport"], job["port"]), [])
        await asyncio.sleep(_OBSERVE_SECONDS)  # the wait for the line did not read the server's messages
        of_port[:] = [connection for connection in of_port if not connection.is_closed]
        while len(of_port) < job["concurrency"]:
            of_port.append(CONNECTIONS[job["transport"]](job["port"], job["key"]))
            await of_port[-1].open()
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(await run(job, units, of_port[: job["concurrency"]])), flush=True)
    for connection in (each for of_port in connections.values() for each in of_port):
        await connection.close()


if __name__ == "__main__":
    uvloop.run(main())
