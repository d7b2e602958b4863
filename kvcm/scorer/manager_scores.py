"""The client of managers: `kvcm.v1.ResidencyService/Score`, of the first manager that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc
import structlog

from kvcm.gateway.scoring import CHANNEL_OPTIONS, ScoreError
from kvcm.model.errors import ErrorCode
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import residency_service_pb2_grpc as pb_grpc

__all__ = ["ManagerScores"]

_log = structlog.get_logger("kvcm.scorer")
_LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
_AWAY: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_NOT_NOW: Final = {ErrorCode.SERVICE_NOT_READY, ErrorCode.SERVER_NOT_LEADER}


class ManagerScores:
    """Asks managers for scores.

    Managers share no residency: reporters report to each of them, so any one's answer is complete. The one that
    answered last is asked first, and each has an equal part of the time that is left.

    Args:
        addresses: `host:port` of their gRPC calls.
        key: API key to show, "" for none.
        ca: certificates (PEM) to trust, empty for plain text.
        timeout_seconds: for an answer, over all managers.
    """

    def __init__(self, addresses: Sequence[str], *, key: str, ca: bytes, timeout_seconds: float) -> None:
        make_stub: Any = pb_grpc.ResidencyServiceStub  # which has no types
        self._channels = [_channel(address, ca) for address in addresses]
        self._stubs = [make_stub(channel) for channel in self._channels]
        self._addresses = tuple(addresses)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._timeout_seconds = timeout_seconds
        self._first = 0
        self._trouble = ""

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def score(self, request: pb.ScoreRequest, seconds_left: float | None = None) -> pb.ScoreResponse:
        """Return the answer to a request; its counts are whole blocks of `block_tokens` each, which is above 0.

        Args:
            request: to send.
            seconds_left: until the client gives up; None for no deadline.

        Raises:
            ScoreError: no manager answers in time, or one refuses the request.
        """
        loop = asyncio.get_running_loop()
        seconds = self._timeout_seconds if seconds_left is None else min(seconds_left, self._timeout_seconds)
        end, count = loop.time() + seconds, len(self._stubs)
        begin = self._first
        for turn in range(count):
            place = (begin + turn) % count
            try:
                answer = await self._call(place, request, (end - loop.time()) / (count - turn))
            except ScoreError as error:
                self._on_trouble(place, error)
                if error.reason == "refused" or turn == count - 1:
                    raise
            else:
                self._first = place
                self._on_answer(place)
                return answer
        raise AssertionError  # the last turn returns or raises

    async def _call(self, place: int, request: pb.ScoreRequest, seconds: float) -> pb.ScoreResponse:
        try:
            answer: pb.ScoreResponse = await self._stubs[place].Score(
                request, timeout=max(seconds, 0), metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            reason = "timeout" if error.code() is _LATE else "unavailable" if error.code() in _AWAY else "refused"
            raise ScoreError(reason, f"{error.code().name}: {error.details()}") from None
        status = answer.header.status
        if int(status.code) != ErrorCode.OK:
            reason = "unavailable" if int(status.code) in _NOT_NOW else "refused"
            raise ScoreError(reason, status.message or str(status.code))
        if answer.block_tokens <= 0:
            raise ScoreError("refused", "the answer has no block_tokens: the manager is of an earlier release")
        return answer

    # A gateway asks many times in a second: a trouble is logged when it begins, and when it is over.

    def _on_trouble(self, place: int, error: ScoreError) -> None:
        _log.debug("score_failed", manager=self._addresses[place], reason=error.reason, text=str(error))
        if error.reason != self._trouble:
            self._trouble = error.reason
            _log.warning("scores_failing", manager=self._addresses[place], reason=error.reason, text=str(error))

    def _on_answer(self, place: int) -> None:
        if self._trouble:
            self._trouble = ""
            _log.info("scores_again", manager=self._addresses[place])


def _channel(address: str, ca: bytes) -> grpc.aio.Channel:
    if ca:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
