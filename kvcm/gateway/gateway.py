"""The life of a gateway: wiring, start, service, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random as system_random
import secrets as system_secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import structlog

from kvcm.gateway.app import GatewayApp
from kvcm.gateway.engine_client import EngineClient, EngineTimeouts
from kvcm.gateway.engines import Engine, HealthRules
from kvcm.gateway.metrics import GatewayMetrics
from kvcm.gateway.policies import REGISTRY
from kvcm.gateway.proxy import Proxy, ProxyLimits
from kvcm.gateway.routing import Choice, Router
from kvcm.gateway.scoring import ScoreClient
from kvcm.gateway.settings import GatewaySecrets, GatewaySettings
from kvcm.gateway.waiting_line import WaitingLine
from kvcm.model.clock import Clock, SystemClock
from kvcm.model.tasks import end_tasks
from kvcm.service.http_connections import ConnectionLimits
from kvcm.service.http_server import HttpServer

__all__ = ["Gateway"]

_log = structlog.get_logger("kvcm.gateway")
_UNFINISHED: Final = "ASGI callable returned without completing response."


class Gateway:
    """One gateway.

    Args:
        settings: of the gateway.
        secrets: of the gateway.
        clock: for the health of engines.
        random: numbers from 0 to 1, for jitter.
        new_id: makes ids of requests.

    Raises:
        StorageIOError: the address cannot be bound.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        secrets: GatewaySecrets | None = None,
        *,
        clock: Clock | None = None,
        random: Callable[[], float] = system_random.random,
        new_id: Callable[[], str] = lambda: system_secrets.token_hex(16),
    ) -> None:
        self._settings = settings
        self._secrets = secrets if secrets is not None else GatewaySecrets()
        self._clock = clock if clock is not None else SystemClock()
        self._random = random
        self._new_id = new_id
        self._stopping = asyncio.Event()
        self._line: WaitingLine[Choice] = WaitingLine(settings.max_queued, lambda choice: choice.flight.end())
        rules = HealthRules(settings.eject_after, settings.eject_ms / 1000, settings.max_eject_ms / 1000)
        self.engines = tuple(Engine(each, rules, self._clock, random, self._line.advance) for each in settings.engines)
        self.metrics = GatewayMetrics(settings.policy, self.engines, lambda: self._line.waiting)
        self._client = EngineClient(_timeouts(settings))
        limits = ConnectionLimits(most=settings.max_connections)
        self._http = HttpServer(settings.bind_address, settings.port, limits)
        self.port = self._http.port

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish requests and return; a second signal ends the process."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._stop, each)
        async with self.running():
            await self._stopping.wait()
        _log.info("stopped")

    def _stop(self, number: signal.Signals) -> None:
        self._stopping.set()
        asyncio.get_running_loop().remove_signal_handler(number)  # the next one has its effect at once

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[GatewayApp]:
        """Serve inside the block; at its end, drain."""
        settings = self._settings
        _silence_broken_answers()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._client)
            app = self._app(await self._scorer(stack))
            await self.probe_all()  # so that the first request finds engines
            await self._http.start(app)
            _log.info("serving", host=settings.bind_address, port=self.port, policy=settings.policy)
            probing = asyncio.create_task(self._probe_for_ever())
            try:
                yield app
                await self._drain(app)
            finally:
                await app.cut_off()
                await self._http.stop()
                await end_tasks([probing])

    async def _scorer(self, stack: contextlib.AsyncExitStack) -> ScoreClient | None:
        settings, secrets = self._settings, self._secrets
        if settings.policy != "kvcm":
            return None
        scorer = ScoreClient(
            settings.manager,
            key=secrets.manager_key,
            ca=secrets.manager_ca,
            timeout_seconds=settings.score_timeout_ms / 1000,
            tokens_per_second=settings.compute_tokens_per_second,
        )
        stack.push_async_callback(scorer.close)
        return scorer

    def _app(self, scorer: ScoreClient | None) -> GatewayApp:
        settings = self._settings
        rate = settings.compute_tokens_per_second
        policy = REGISTRY[settings.policy](rate, settings.hash_load_factor)
        router = Router(policy, self._client, scorer, self.metrics, tokens_per_second=rate)
        limits = ProxyLimits(
            in_flight=settings.max_in_flight,
            in_flight_per_engine=settings.max_in_flight_per_engine,
            queued=settings.max_queued,
            queue_seconds=settings.queue_timeout_ms / 1000,
            attempts=settings.max_attempts,
        )
        proxy = Proxy(self.engines, router, self._client, self.metrics, limits=limits, line=self._line)
        return GatewayApp(
            settings,
            self._secrets,
            engines=self.engines,
            proxy=proxy,
            metrics=self.metrics,
            clock=self._clock,
            new_id=self._new_id,
        )

    async def probe_all(self) -> None:
        """Probe each engine once."""
        await asyncio.gather(*map(self._probe, self.engines))

    async def _probe(self, engine: Engine) -> None:
        engine.record_probe(is_healthy=await self._client.is_healthy(engine.url, self._probe_headers()))

    def _probe_headers(self) -> Mapping[str, str]:
        key = self._secrets.engine_key
        return {"authorization": f"Bearer {key}"} if key else {}

    async def _probe_for_ever(self) -> None:
        async def watch(engine: Engine) -> None:
            while True:
                # Several gateways must not probe in step.
                await asyncio.sleep(self._settings.probe_interval_ms / 1000 * (0.9 + 0.2 * self._random()))
                try:
                    await self._probe(engine)
                except Exception:  # one engine must not end the probes of the others
                    _log.exception("probe_failed", engine=engine.name)

        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(watch(engine))

    async def _drain(self, app: GatewayApp) -> None:
        seconds = self._settings.drain_timeout_ms / 1000
        app.is_draining = True
        self._http.stop_accepting()
        _log.info("draining", seconds=seconds)
        if not await app.wait_until_idle(seconds):
            _log.warning("requests_cut_off", after_seconds=seconds)


def _timeouts(settings: GatewaySettings) -> EngineTimeouts:
    return EngineTimeouts(
        connect=settings.connect_timeout_ms / 1000,
        first_byte=settings.first_byte_timeout_ms / 1000,
        idle=settings.idle_timeout_ms / 1000,
        probe=settings.probe_timeout_ms / 1000,
        tokenize=settings.tokenize_timeout_ms / 1000,
    )


def _silence_broken_answers() -> None:
    """Let uvicorn not log as an error what a gateway does on purpose: end a connection as the engine's ended."""
    logger = logging.getLogger("uvicorn.error")
    if _is_a_fault not in logger.filters:
        logger.addFilter(_is_a_fault)


def _is_a_fault(record: logging.LogRecord) -> bool:
    return record.msg != _UNFINISHED
