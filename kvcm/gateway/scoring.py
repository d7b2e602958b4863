"""Scores from the manager: what each engine saves on a prompt (`kvcm.v1.ResidencyService/Score`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog

from kvcm.gateway.engines import Engine
from kvcm.model.errors import ErrorCode
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import residency_service_pb2_grpc as pb_grpc

__all__ = ["CHANNEL_OPTIONS", "EngineScore", "ScoreClient", "ScoreError"]

_log = structlog.get_logger("kvcm.gateway")
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default is two minutes, in which nothing is scored
    ("grpc.keepalive_time_ms", 10_000),  # a host that vanished without a word is noticed
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),  # proxies of the environment are for downloads, and would see the key
)
"""Of connections to a manager that is asked for scores."""


@dataclass(frozen=True, slots=True)
class EngineScore:
    """What an engine has of a prompt; tokens count those of faster media, too.

    Attributes:
        seconds_saved: against computing all of it.
        gpu_tokens: in GPU memory.
        host_tokens: or in host memory.
        loadable_tokens: or anywhere it can be loaded from.
        rank: the data-parallel rank that has this, None where the engine has one rank only.
    """

    seconds_saved: float = 0.0
    gpu_tokens: int = 0
    host_tokens: int = 0
    loadable_tokens: int = 0
    rank: int | None = None


class ScoreError(Exception):
    """There are no scores.

    Args:
        reason: one of few words, a label of metrics: timeout, unavailable or refused.
        text: of the error.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ScoreClient:
    """Asks a manager.

    Args:
        address: `host:port` of its gRPC calls.
        key: API key to show, "" for none.
        ca: certificates (PEM) to trust, empty for plain text.
        timeout_seconds: for an answer.
        tokens_per_second: that an engine computes; with it scores are in the same seconds as waits.
    """

    def __init__(self, address: str, *, key: str, ca: bytes, timeout_seconds: float, tokens_per_second: float) -> None:
        if ca:
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        make_stub: Any = pb_grpc.ResidencyServiceStub  # which has no types
        self._stub = make_stub(self._channel)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._timeout_seconds = timeout_seconds
        self._costs = pb.ScoreCosts(compute_tokens_per_second=tokens_per_second)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def scores(
        self, tokens: Sequence[int], engines: Sequence[Engine], trace_id: str, cache_salt: str
    ) -> Mapping[str, EngineScore]:
        """Return the score of each engine that the manager knows, by its name. One call per instance; where some fail,
        the engines of the others have scores.

        Raises:
            ScoreError: all calls failed.
        """
        instances = sorted({engine.instance for engine in engines})
        calls = [
            self._call(
                pb.ScoreRequest(
                    trace_id=trace_id,
                    instance_id=instance,
                    token_ids=tokens,
                    engines=[engine.name for engine in engines if engine.instance == instance],
                    costs=self._costs,
                    cache_salt=cache_salt,
                )
            )
            for instance in instances
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, ScoreError):
                raise error
            _log.debug("score_failed", reason=error.reason, text=str(error))
        if len(errors) == len(answers):
            raise errors[0]
        found: dict[str, EngineScore] = {}
        for answer in answers:
            if not isinstance(answer, BaseException):
                found.update(_by_engine(answer))
        return found

    async def _call(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        try:
            answer: pb.ScoreResponse = await self._stub.Score(
                request, timeout=self._timeout_seconds, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            is_away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            reason = "timeout" if is_late else "unavailable" if is_away else "refused"
            raise ScoreError(reason, f"{error.code().name}: {error.details()}") from None
        status = answer.header.status
        if int(status.code) != ErrorCode.OK:
            raise ScoreError("refused", status.message or str(status.code))
        return answer


def _by_engine(answer: pb.ScoreResponse) -> Mapping[str, EngineScore]:
    """Return the best rank of each engine: the answer is ordered, best first."""
    ranks: dict[str, list[pb.EngineScore]] = {}
    for each in answer.engines:
        ranks.setdefault(each.engine, []).append(each)
    return {
        engine: EngineScore(
            seconds_saved=best.score if math.isfinite(best.score) else 0.0,  # comparisons with NaN choose at random
            gpu_tokens=best.gpu_tokens,
            host_tokens=best.host_tokens,
            loadable_tokens=best.storage_tokens,
            rank=best.rank if others else None,
        )
        for engine, (best, *others) in ranks.items()
    }
