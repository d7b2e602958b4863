"""Gateways in this process, in front of engines and a manager that are small real servers and do what tests say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
from aiohttp import web
from fake_clock import FakeClock
from yarl import URL

from kvcm.gateway.app import GatewayApp
from kvcm.gateway.gateway import Gateway
from kvcm.gateway.settings import EngineAddress, GatewaySecrets, GatewaySettings
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import residency_service_pb2_grpc as pb_grpc

__all__ = ["CHAT", "FakeEngine", "FakeManager", "Rig", "engines", "eventually", "gateway", "metric", "score"]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Seen:
    """A request that an engine got."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


class FakeEngine:
    """Speaks enough of the OpenAI API.

    Attributes:
        seen: requests below /v1.
        asked: bodies of tokenizations.
        answer: answers requests below /v1.
        tokens: that a tokenization answers; None for that there is no such call.
        tokenizing: answers tokenizations in their place.
        is_healthy: what /health says.
        cancelled: requests whose clients went away.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Seen] = []
        self.asked: list[Mapping[str, Any]] = []
        self.tokenize_headers: list[Mapping[str, str]] = []
        self.tokenizing: Answer | None = None
        self.probes: list[Mapping[str, str]] = []
        self.answer: Answer = self.plain
        self.tokens: list[int] | list[list[int]] | None = [1, 2, 3]
        self.is_healthy = True
        self.cancelled = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        made = web.Application(client_max_size=1 << 30)
        made.router.add_get("/health", self._health)
        made.router.add_post("/tokenize", self._tokenize)
        made.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(made, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _health(self, request: web.Request) -> web.Response:
        self.probes.append(_lowered(request.headers))
        return web.Response(status=200 if self.is_healthy else 503)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.tokenize_headers.append(_lowered(request.headers))
        if self.tokenizing is not None:
            return await self.tokenizing(request)
        if self.tokens is None:
            return web.Response(status=404)
        return web.json_response({"tokens": self.tokens, "count": 1, "max_model_len": 9})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.method, request.raw_path, _lowered(request.headers), body))
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def plain(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"engine": self.name})

    def status(self, status: int, **headers: str) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(status=status, text=f"{self.name} says {status}", headers=headers)

        return answer

    def stream(
        self, pieces: Sequence[bytes], *, wait: asyncio.Event | None = None, breaks: bool = False, length: int = 0
    ) -> Answer:
        """Answer with pieces as they are, the last one when `wait` is set; then perhaps break off."""

        async def answer(request: web.Request) -> web.StreamResponse:
            kept = {"content-length": str(length)} if length else {}
            response = web.StreamResponse(headers={"content-type": "text/event-stream", **kept})
            await response.prepare(request)
            for place, piece in enumerate(pieces):
                if wait is not None and place == len(pieces) - 1:
                    await wait.wait()
                await response.write(piece)
            if breaks:
                assert request.transport is not None
                request.transport.close()  # after everything that was written
                return response
            await response.write_eof()
            return response

        return answer

    def hang(self, until: asyncio.Event) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            await until.wait()
            return await self.plain(request)

        return answer

    def abort(self) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        return answer


def _lowered(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class FakeManager(pb_grpc.ResidencyServiceServicer):
    """Scores as a test says.

    Attributes:
        asked: requests.
        scores: by engine.
        code: of the answer's header.
        wait: before it answers.
        failing: instances whose calls fail.
    """

    def __init__(self) -> None:
        self.asked: list[pb.ScoreRequest] = []
        self.metadata: list[Mapping[str, str]] = []
        self.scores: dict[str, list[pb.EngineScore]] = {}
        self.code = meta.OK
        self.wait: asyncio.Event | None = None
        self.failing: set[str] = set()
        self.address = ""

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:  # noqa: N802
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.wait is not None:
            await self.wait.wait()
        if request.instance_id in self.failing:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such instance")
        found = [each for name in request.engines for each in self.scores.get(name, [pb.EngineScore(engine=name)])]
        header = meta.CommonResponseHeader(status=meta.Status(code=self.code))
        return pb.ScoreResponse(header=header, engines=sorted(found, key=lambda each: -each.score))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeManager]:
        server = grpc.aio.server()
        pb_grpc.add_ResidencyServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)


def score(engine: FakeEngine, seconds: float, tokens: tuple[int, int, int] = (0, 0, 0), rank: int = 0) -> Any:
    """Return a score: tokens in GPU memory, or in the host's, or anywhere."""
    gpu, host, storage = tokens
    return pb.EngineScore(
        engine=engine.address, rank=rank, score=seconds, gpu_tokens=gpu, host_tokens=host, storage_tokens=storage
    )


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[FakeEngine]]:
    """Engines named a, b, c..."""
    made = [FakeEngine(name) for name in "abcdefgh"[:count]]
    async with contextlib.AsyncExitStack() as stack:
        for engine in made:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield made


@dataclass(slots=True)
class Rig:
    """A running gateway, and a client of it."""

    gateway: Gateway
    app: GatewayApp
    client: aiohttp.ClientSession
    clock: FakeClock

    def state(self, engine: FakeEngine) -> str:
        return next(each for each in self.gateway.engines if each.url == engine.url).state.value

    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.gateway.engines)

    def url(self, path: str) -> URL:
        return URL(f"http://127.0.0.1:{self.gateway.port}{path}", encoded=True)

    async def post(self, body: object = CHAT, path: str = "/v1/chat/completions", **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        async with self.client.post(self.url(path), data=data, headers=sent, allow_redirects=False) as response:
            return Reply(response.status, _lowered(response.headers), await response.read())

    async def get(self, path: str, **headers: str) -> Reply:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        async with self.client.get(self.url(path), headers=sent, allow_redirects=False) as response:
            return Reply(response.status, _lowered(response.headers), await response.read())


@dataclass(slots=True)
class Reply:
    """An answer of a gateway."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def engine(self) -> str:
        """Name of the fake engine that answered."""
        return str(json.loads(self.body)["engine"])

    @property
    def error(self) -> Mapping[str, Any]:
        """The error of the OpenAI API."""
        found = json.loads(self.body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        return dict(found["error"])


@contextlib.asynccontextmanager
async def gateway(
    behind: Sequence[FakeEngine], policy: str = "round_robin", secrets: GatewaySecrets | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """A gateway that probes nothing by itself, with time that stands still."""
    addresses = tuple(EngineAddress(each.url, settings.pop(f"instance_{each.name}", "i")) for each in behind)
    defaults = {"port": 0, "probe_interval_ms": 3_600_000, "drain_timeout_ms": 60_000, "score_timeout_ms": 30_000}
    patient = {"tokenize_timeout_ms": 30_000}
    made = GatewaySettings(engines=addresses, policy=policy, **{**defaults, **patient, **settings})
    clock = FakeClock()
    found = Gateway(made, secrets, clock=clock, random=lambda: 0.5, new_id=lambda: "made-here")
    async with found.running() as app, aiohttp.ClientSession(f"http://127.0.0.1:{found.port}") as client:
        yield Rig(found, app, client, clock)


async def eventually(condition: Callable[[], object]) -> None:
    """Return when a condition holds that other tasks bring about."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing says when it does
            await asyncio.sleep(0.005)


def metric(rig: Rig, name: str, **labels: str) -> float:
    """Return the value of a series, 0 where there is none."""
    found = rig.gateway.metrics.registry.get_sample_value(name, labels)
    return 0.0 if found is None else found
