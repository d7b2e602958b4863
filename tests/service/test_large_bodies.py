"""Reading a large body does not hold up others: a small request that comes later is answered first."""

import asyncio
import json
import time
from typing import Any

import pytest

from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.bodies import BodyReader
from kvcm.service.calls import Call, Caller, Plane, Reply
from kvcm.service.gate import Gate, Phase
from kvcm.service.http_app import HttpApp
from kvcm.service.lanes import Lane
from kvcm.service.limits import RequestLimits

BLOCKS, PARTS = 1024, 8


class Served:
    """An application with a call for large bodies and one for small ones.

    Attributes:
        seen: what reached the handlers, in order.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._gate = Gate()
        self.app = HttpApp(self._gate, 16 << 20)

    async def open(self) -> None:
        await self._gate.enter_phase(Phase.SERVING)
        calls = [
            Call("s", "FinishWriteCache", Plane.DATA, pb.FinishWriteCacheRequest, pb.CommonResponse, self._handle),
            Call("s", "GetClusterInfo", Plane.DATA, pb.GetClusterInfoRequest, pb.GetClusterInfoResponse, self._handle),
        ]
        bodies = BodyReader(RequestLimits(), Lane(time.monotonic, 1, 1, 0.0))
        self.app.serve(calls, Caller([], lambda _plane: None, lambda _instance: {}), bodies=bodies)

    async def _handle(self, request: Any) -> Reply:
        self.seen.append(request)
        return Reply(pb.CommonResponse())

    async def post(self, path: str, body: bytes) -> int:
        """Return the status of the answer to a request."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(event: dict[str, Any]) -> None:
            sent.append(event)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": ("127.0.0.1", 1)}
        await self.app(scope, receive, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])


@pytest.fixture
async def served() -> Served:
    served = Served()
    await served.open()
    return served


def finish_body(**more: Any) -> bytes:
    parts = [{"name": f"tp{number}", "checksum": str((1 << 63) + number)} for number in range(PARTS)]
    locations = [{"location_specs": parts} for _ in range(BLOCKS)]
    return json.dumps({"write_session_id": "s", "locations": locations, **more}).encode()


async def test_small_requests_are_answered_while_a_large_body_is_read(served: Served) -> None:
    large = asyncio.create_task(served.post("/api/finishWriteCache", finish_body()))
    await asyncio.sleep(0)  # it came first
    assert await served.post("/api/getClusterInfo", b"{}") == 200
    assert await large == 200
    small, finish = served.seen
    assert isinstance(small, pb.GetClusterInfoRequest)
    assert [len(location.location_specs) for location in finish.locations] == [PARTS] * BLOCKS
    assert finish.locations[-1].location_specs[-1].checksum == (1 << 63) + PARTS - 1


async def test_a_large_body_that_cannot_be_read_is_refused_as_a_small_one(served: Served) -> None:
    wrong = finish_body(trace_id=[])
    assert await served.post("/api/finishWriteCache", wrong) == 400
    assert served.seen == []
