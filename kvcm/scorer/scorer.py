"""The life of a scorer: listeners, API key, metrics, health, start and end.

Each listener serves one call of one service, and gRPC's health. Statuses are chosen for the callers: SGLang's router
routes by load on UNAVAILABLE, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED and OUT_OF_RANGE, and answers its user 503 on any
other. So everything that is not the caller's fault is UNAVAILABLE, a fault of this process included.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from kvcm.config import ConfigError
from kvcm.gateway.scoring import ScoreError
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import indexer_pb2, kv_indexer_pb2
from kvcm.scorer.kv_indexer import KvIndexer
from kvcm.scorer.manager_scores import ManagerScores
from kvcm.scorer.pod_scores import PodScores, load_tokenizer
from kvcm.scorer.settings import ListenAddress, ScorerSecrets, ScorerSettings
from kvcm.service.grpc_server import check_free

__all__ = ["Scorer"]

_log = structlog.get_logger("kvcm.scorer")
_MAX_REQUEST_BYTES: Final = 8 << 20
_MAX_RECEIVED_BYTES: Final = 16 << 20  # so that our own status answers requests above the limit
_MAX_CALLS: Final = 128  # of a listener at a time; SGLang's router has 32 in flight
_TOKENIZING_THREADS: Final = 2
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES),
    ("grpc.max_concurrent_streams", _MAX_CALLS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
)
_NOT_SERVED: Final = {
    "kv_indexer.v1.KVIndexer": "this index answers MatchExternalKvPrefix alone: engines report to the manager by "
    "kvcm-subscriber, and the manager answers prefixes, not single hashes",
    "indexer.v1.IndexerService": "this service answers GetPodScores alone",
}
_LATENCIES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class _Call:
    """The call that a listener serves.

    Attributes:
        service: full name.
        name: of the call.
        request_type: of its requests.
        handle: answers a request, given the seconds until the client gives up.
    """

    service: str
    name: str
    request_type: type[Message]
    handle: Callable[[Any, float | None], Awaitable[Message]]


class _Metrics:
    """Metrics of a scorer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvcm_scorer_requests", "Requests by status of gRPC.", ("service", "code"), registry=self.registry
        )
        self.seconds = Histogram(
            "kvcm_scorer_seconds",
            "From a request to its answer.",
            ("service",),
            buckets=_LATENCIES,
            registry=self.registry,
        )


class _CallRefusedError(Exception):
    """A request that is answered with a status.

    Args:
        code: the status.
        text: of it.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Handlers(grpc.GenericRpcHandler):
    """Serves a call, and says of all others of its service why they are not served, whatever releases may add.

    Args:
        call: to serve.
        api_key: that clients must show, "" for none.
        metrics: count requests.
    """

    def __init__(self, call: _Call, api_key: str, metrics: _Metrics) -> None:
        self._call = call
        self._key_hash = hashlib.sha256(f"Bearer {api_key}".encode()).digest() if api_key else b""
        self._metrics = metrics
        # Bodies are bytes, so that our own statuses answer those that are too large, or no requests.
        self._served: Any = grpc.unary_unary_rpc_method_handler(self._serve)
        self._refused: Any = grpc.stream_unary_rpc_method_handler(self._refuse)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        service, _, name = details.method.lstrip("/").partition("/")
        if service != self._call.service:
            return None
        return self._served if name == self._call.name else self._refused

    async def _refuse(self, _bodies: Any, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _NOT_SERVED[self._call.service])
        raise AssertionError  # abort raises

    async def _serve(self, body: bytes, context: Any) -> bytes:
        began = time.perf_counter()
        try:
            answer = await self._answer(body, context)
        except _CallRefusedError as error:
            self._count(error.code, began)
            await context.abort(error.code, str(error))
            raise AssertionError from None  # abort raises
        except asyncio.CancelledError:
            self._count(grpc.StatusCode.CANCELLED, began)
            raise
        self._count(grpc.StatusCode.OK, began)
        return answer.SerializeToString()

    def _count(self, code: grpc.StatusCode, began: float) -> None:
        self._metrics.requests.labels(self._call.service, code.name).inc()
        self._metrics.seconds.labels(self._call.service).observe(time.perf_counter() - began)

    async def _answer(self, body: bytes, context: Any) -> Message:
        self._check_key(context)
        if len(body) > _MAX_REQUEST_BYTES:
            text = f"the request has {len(body)} bytes, at most {_MAX_REQUEST_BYTES} are allowed"
            raise _CallRefusedError(grpc.StatusCode.OUT_OF_RANGE, text)
        try:
            request = self._call.request_type.FromString(body)
            return await self._call.handle(request, context.time_remaining())
        except DecodeError:
            text = f"the request is not a {self._call.request_type.__name__}"
            raise _CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, text) from None
        except InvalidArgumentError as error:
            raise _CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except ScoreError as error:
            text = f"the manager has no scores ({error.reason}): {error}"
            raise _CallRefusedError(grpc.StatusCode.UNAVAILABLE, text) from None
        except Exception:
            _log.exception("request_failed", service=self._call.service)
            raise _CallRefusedError(grpc.StatusCode.UNAVAILABLE, "an error in the scorer; its log has it") from None

    def _check_key(self, context: Any) -> None:
        if not self._key_hash:
            return
        given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        shown = hashlib.sha256(given[0].encode()).digest() if len(given) == 1 and isinstance(given[0], str) else b""
        if not hmac.compare_digest(shown, self._key_hash):
            text = "authorization: the key is missing or another one, must be `Bearer KEY` with the scorer's key"
            raise _CallRefusedError(grpc.StatusCode.UNAUTHENTICATED, text)


class Scorer:
    """One scorer. To be made inside the event loop.

    Args:
        settings: of the scorer.
        secrets: of the scorer.

    Attributes:
        metrics: registry of its metrics.

    Raises:
        ConfigError: a tokenizer cannot be read.
        ModuleNotFoundError: pods are scored, and the package of tokenizers is not installed.
    """

    def __init__(self, settings: ScorerSettings, secrets: ScorerSecrets | None = None) -> None:
        self._settings = settings
        self._secrets = secrets if secrets is not None else ScorerSecrets()
        self._tokenizers = {model: load_tokenizer(model, each.tokenizer) for model, each in settings.models.items()}
        self._metrics = _Metrics()
        self.metrics = self._metrics.registry

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish requests and return; a second signal ends the process.

        Raises:
            ConfigError, StorageIOError: an address cannot be bound.
        """
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            stopping.set()
            loop.remove_signal_handler(number)  # the next one has its effect at once

        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, stop, each)
        async with self.running():
            await stopping.wait()
        _log.info("stopped")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Sequence[ListenAddress]]:
        """Serve inside the block, which gets the bound addresses: those of KVIndexer, then those of IndexerService.

        Raises:
            ConfigError, StorageIOError: an address cannot be bound.
        """
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            scores = ManagerScores(
                settings.managers,
                key=self._secrets.manager_key,
                ca=self._secrets.manager_ca,
                timeout_seconds=settings.score_timeout_ms / 1000,
            )
            stack.push_async_callback(scores.close)
            threads = ThreadPoolExecutor(_TOKENIZING_THREADS, "tokenizer")
            stack.callback(threads.shutdown, wait=False, cancel_futures=True)
            self._serve_metrics(stack)
            bound = [await self._listen(stack, *each) for each in self._calls(scores, threads)]
            yield bound

    def _calls(self, scores: ManagerScores, threads: ThreadPoolExecutor) -> list[tuple[ListenAddress, _Call]]:
        settings = self._settings
        served = [
            (
                each.listen,
                KvIndexer(
                    each.instance,
                    scores,
                    worker_prefix=settings.worker_prefix,
                    workers=settings.workers,
                    max_blocks=settings.max_blocks,
                ),
            )
            for each in settings.kv_indexers
        ]
        pods = PodScores(
            settings.models,
            self._tokenizers,
            scores,
            threads,
            pods=settings.pods,
            weights=settings.weights,
            has_special_tokens=settings.has_special_tokens,
            max_blocks=settings.max_blocks,
        )
        return [*((listen, _kv_indexer_call(index)) for listen, index in served)] + [
            (listen, _pod_scores_call(pods)) for listen in settings.pod_scores
        ]

    def _serve_metrics(self, stack: contextlib.AsyncExitStack) -> None:
        listen = self._settings.metrics
        if listen is None:
            return
        try:
            server, thread = start_http_server(listen.port, listen.host, self.metrics)
        except OSError as error:
            raise ConfigError(f"--metrics {listen} cannot be bound: {error.strerror}") from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        stack.callback(stop)
        _log.info("serving_metrics", host=listen.host, port=server.server_port)

    async def _listen(self, stack: contextlib.AsyncExitStack, listen: ListenAddress, call: _Call) -> ListenAddress:
        check_free(listen.host, listen.port)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        server.add_generic_rpc_handlers((_Handlers(call, self._secrets.api_key, self._metrics),))
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        bound = ListenAddress(listen.host, server.add_insecure_port(str(listen)))
        for service in ("", call.service):
            await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        await server.start()

        async def stop() -> None:
            await servicer.enter_graceful_shutdown()
            await server.stop(self._settings.drain_timeout_ms / 1000)

        stack.push_async_callback(stop)
        _log.info("serving", service=call.service, host=bound.host, port=bound.port)
        return bound


def _kv_indexer_call(index: KvIndexer) -> _Call:
    request_type = kv_indexer_pb2.MatchExternalKvPrefixRequest
    return _Call("kv_indexer.v1.KVIndexer", "MatchExternalKvPrefix", request_type, index.match_prefix)


def _pod_scores_call(pods: PodScores) -> _Call:
    return _Call("indexer.v1.IndexerService", "GetPodScores", indexer_pb2.GetPodScoresRequest, pods.pod_scores)
