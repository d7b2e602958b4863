"""A client process of the overload benchmark: offers requests at a rate, whether they are answered or not.

Requests come at random times at the rate that is asked for and are sent as soon as a connection is free: a client of
HTTP has one request on a connection at a time, one of HTTP/2 as many as the server allows. A request without a
connection within `PATIENCE_SECONDS` is given up, and counted as kept back. Times are those from the sending, and beside
them those from the coming. One job a line on stdin, as JSON; one line of outcomes for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter, deque
from functools import partial
from typing import Any

import uvloop
from overload_wires import WIRES
from service_client import META, json_of_start, key_of, start_request

from kvcm.protocol import meta_service_pb2 as pb

LOOKUPS = {"lookup 64": 64, "lookup 1,024": 1024, "lookup 16,384": 16_384}
WRITE_BLOCKS = 64
MIX = {"lookup 64": 0.5, "lookup 1,024": 0.25, "write 64": 0.15, "lookup 16,384": 0.1}
"""Shares of requests."""

_SESSION = re.compile(rb'"write_session_id":"([0-9a-f]+)"')
_KEPT_BACK = "kept back"
_UNANSWERED = "unanswered"
_LAST_SECONDS = 20.0
PATIENCE_SECONDS = 0.1


class Requests:
    """Prepared requests of one transport.

    Args:
        transport: "grpc" or "http".
        first: number of the first block that is written.
    """

    def __init__(self, transport: str, first: int) -> None:
        self._is_http = transport == "http"
        self._prepare = WIRES[transport].prepared
        self._next = first
        self._lookups = {name: self._lookup(keys) for name, keys in LOOKUPS.items()}

    def _lookup(self, keys: int) -> bytes:
        message = pb.GetCacheLocationRequest(
            trace_id="bench", instance_id="hot", query_type=pb.QT_PREFIX_MATCH, block_keys=map(key_of, range(keys))
        )
        body = {
            "trace_id": "bench",
            "instance_id": "hot",
            "query_type": 2,
            "block_keys": list(map(str, message.block_keys)),
        }
        return self._made(
            "GetCacheLocation", json.dumps(body).encode() if self._is_http else message.SerializeToString()
        )

    def of(self, kind: str) -> bytes:
        """Return a request of a kind."""
        if kind in self._lookups:
            return self._lookups[kind]
        first, self._next = self._next, self._next + WRITE_BLOCKS
        start = start_request("fresh", range(first, self._next))
        start.write_timeout_seconds = 5
        return self._made("StartWriteCache", json_of_start(start) if self._is_http else start.SerializeToString())

    def finish(self, answer: bytes) -> bytes:
        """Return the request that ends the write of that answer."""
        if self._is_http:
            session = _SESSION.search(answer)
            assert session is not None, answer[:300]
            body = {
                "instance_id": "fresh",
                "write_session_id": session[1].decode(),
                "success_blocks": {"offset": WRITE_BLOCKS},
            }
            return self._made("FinishWriteCache", json.dumps(body).encode())
        session_id = pb.StartWriteCacheResponse.FromString(answer).write_session_id
        request = pb.FinishWriteCacheRequest(instance_id="fresh", write_session_id=session_id)
        request.success_blocks.offset = WRITE_BLOCKS
        return self._made("FinishWriteCache", request.SerializeToString())

    def _made(self, name: str, body: bytes) -> bytes:
        return self._prepare(f"/api/{name[0].lower()}{name[1:]}" if self._is_http else f"{META}{name}", body)


class Offer:
    """One run.

    Args:
        job: the offer.
        wires: connections.
        requests: to send.
    """

    def __init__(self, job: dict[str, Any], wires: list[Any], requests: Requests) -> None:
        self._job = job
        self._wires = wires
        self._requests = requests
        self._random = random.Random(job["seed"])
        self._kinds = list(MIX)
        self._shares = list(MIX.values())
        self._waiting: deque[tuple[float, str, bytes | None]] = deque()
        self._open = 0
        self._is_closed = False
        self._next_wire = 0
        self.offered: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}
        self.times_us: dict[str, list[int]] = {}

    async def run(self) -> dict[str, Any]:
        """Offer, then wait for the requests in flight."""
        begin = time.perf_counter()
        end = begin + self._job["seconds"]
        if self._job["rate"]:
            await self._at_rate(begin, end)
        else:
            await self._read_queued(end)
        wall = time.perf_counter() - begin
        self._abandon(float("inf"))
        patience = time.perf_counter() + _LAST_SECONDS
        while self._open and time.perf_counter() < patience:  # noqa: ASYNC110 - nothing else runs
            await asyncio.sleep(0.01)
        if self._open:
            self.outcomes.setdefault("all", Counter())[_UNANSWERED] = self._open
        return {"wall": wall, "offered": self.offered, "outcomes": self.outcomes, "times_us": self.times_us}

    async def _at_rate(self, begin: float, end: float) -> None:
        due = begin
        while (now := time.perf_counter()) < end:
            while due <= now:
                self._come(due)
                due += self._random.expovariate(self._job["rate"])
            self._send()
            self._abandon(now - PATIENCE_SECONDS)
            await asyncio.sleep(0.001)

    async def _read_queued(self, end: float) -> None:
        """Keep so many requests on their way: each that ends is followed by another one."""
        for _ in range(self._job["concurrency"]):
            self._come(time.perf_counter())
        self._is_closed = True
        self._send()
        await asyncio.sleep(end - time.perf_counter())
        self._is_closed = False

    def _come(self, due: float) -> None:
        kind = self._random.choices(self._kinds, self._shares)[0]
        self.offered[kind] += 1
        self._waiting.append((due, kind, None))

    def _send(self) -> None:
        while self._waiting and (wire := self._free()) is not None:
            due, kind, prepared = self._waiting.popleft()
            self._open += 1
            data = prepared if prepared is not None else self._requests.of(kind)
            starts = kind.startswith("write")
            wire.send(data, partial(self._ended, due, time.perf_counter(), kind), starts)

    def _abandon(self, before: float) -> None:
        while self._waiting and self._waiting[0][0] < before:
            self._count(self._waiting.popleft()[1], _KEPT_BACK)

    def _free(self) -> Any:
        for _ in self._wires:
            self._next_wire = (self._next_wire + 1) % len(self._wires)
            if self._wires[self._next_wire].space > 0:
                return self._wires[self._next_wire]
        return None

    def _ended(self, due: float, sent: float, kind: str, status: str, answer: bytes) -> None:
        self._open -= 1
        now = time.perf_counter()
        self._count(kind, status)
        if status in {"200", "grpc 0"}:
            self.times_us.setdefault(kind, []).append(round((now - sent) * 1e6))
            self.times_us.setdefault(f"{kind}, from its coming", []).append(round((now - due) * 1e6))
            if kind.startswith("write"):
                self.offered["finish 64"] += 1
                self._waiting.append((now, "finish 64", self._requests.finish(answer)))
        if self._is_closed and not self._waiting:
            self._come(now)
        self._send()

    def _count(self, kind: str, status: str) -> None:
        self.outcomes.setdefault(kind, Counter())[status] += 1


async def main() -> None:
    wires: dict[tuple[str, int], list[Any]] = {}
    requests: dict[str, Requests] = {}
    loop = asyncio.get_running_loop()
    for line in sys.stdin:
        job = json.loads(line)
        if "core" in job:
            os.sched_setaffinity(0, [job["core"]])
        transport, port = job["transport"], job["port"]
        of_port = wires.setdefault((transport, port), [])
        of_port[:] = [wire for wire in of_port if wire.is_open]
        while len(of_port) < job["connections"]:
            _, wire = await loop.create_connection(WIRES[transport], "127.0.0.1", port)
            of_port.append(wire)
        while not all(wire.space for wire in of_port):  # noqa: ASYNC110 - those of HTTP/2 say how much
            await asyncio.sleep(0.01)
        if transport not in requests:
            requests[transport] = Requests(transport, job["first"])
        print(json.dumps(await Offer(job, of_port, requests[transport]).run()), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
