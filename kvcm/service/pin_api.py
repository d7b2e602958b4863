"""The calls of kvcm.v1.PinService: pins, and reports of missing bytes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kvcm.cache.manager import CacheManager
from kvcm.cache.pins import Pin, PinRequest
from kvcm.cache.removal import MissingPart
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import mixed, unmixed_key
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pb
from kvcm.registry.validation import require
from kvcm.service.calls import Call, Reply, instance_call
from kvcm.service.meta_api import block_keys_of
from kvcm.service.request_limits import MAX_TEXT_BYTES, RequestLimits, check_text

__all__ = ["PinApi"]

_SERVICE = "kvcm.v1.PinService"


class PinApi:
    """Handlers of PinService.

    Args:
        cache: blocks.
        limits: sizes of requests.
    """

    def __init__(self, cache: CacheManager, limits: RequestLimits) -> None:
        self._cache = cache
        self._limits = limits

    def calls(self) -> list[Call]:
        """Return every call of the service."""

        call = partial(instance_call, _SERVICE)
        return [
            call("PinPrefix", pb.PinPrefixRequest, pb.PinPrefixResponse, self.pin_prefix),
            call("UnpinPrefix", pb.UnpinPrefixRequest, meta.CommonResponse, self.unpin_prefix),
            call("ListPins", pb.ListPinsRequest, pb.ListPinsResponse, self.list_pins),
            call("ReportMissing", pb.ReportMissingRequest, pb.ReportMissingResponse, self.report_missing),
        ]

    async def pin_prefix(self, request: Any) -> Reply:
        """Answer PinPrefix; without a pin when nothing of the prefix can be read."""
        cache = self._cache.cache(request.instance_id)
        require(request.owner, "PinPrefix.owner")
        keys = await block_keys_of("PinPrefix", request, cache.instance)
        pin = await self._cache.pin(cache, PinRequest(keys, request.owner, request.ttl_seconds))
        if pin is None:
            return Reply(pb.PinPrefixResponse())
        return Reply(
            pb.PinPrefixResponse(
                pin_id=pin.id,
                pinned_blocks=pin.block_count,
                pinned_bytes=pin.size_bytes,
                deadline_ms=int(pin.deadline * 1000),
            )
        )

    async def unpin_prefix(self, request: Any) -> Reply:
        """Answer UnpinPrefix."""
        cache = self._cache.cache(request.instance_id)
        require(request.pin_id, "UnpinPrefix.pin_id")
        await self._cache.unpin(cache, request.pin_id)
        return Reply(meta.CommonResponse())

    async def list_pins(self, request: Any) -> Reply:
        """Answer ListPins."""
        pins = await self._cache.pins.of_instance(self._cache.cache(request.instance_id))
        answer = pb.ListPinsResponse()
        for pin in pins:
            answer.pins.append(_message(pin))
            await asyncio.sleep(0)  # a pin of 65,536 blocks takes milliseconds to count
        return Reply(answer)

    async def report_missing(self, request: Any) -> Reply:
        """Answer ReportMissing."""
        cache = self._cache.cache(request.instance_id)
        require(request.parts, "ReportMissing.parts")
        if len(request.parts) > self._limits.max_keys:
            raise InvalidArgumentError(
                f"parts has {len(request.parts)} entries, at most {self._limits.max_keys} are allowed"
            )
        for position, part in enumerate(request.parts):
            check_text(f"parts[{position}].uri", part.uri, MAX_TEXT_BYTES)
        keys = mixed([part.block_key for part in request.parts])
        parts = [
            MissingPart(key, part.uri, part.mismatched_checksum) for key, part in zip(keys, request.parts, strict=True)
        ]
        report = await self._cache.report_missing(cache, parts)
        return Reply(pb.ReportMissingResponse(**report._asdict()))


def _message(pin: Pin) -> Any:
    return pb.Pin(
        pin_id=pin.id,
        owner=pin.owner,
        blocks=pin.block_count,
        bytes=pin.size_bytes,
        deadline_ms=int(pin.deadline * 1000),
        last_block_key=unmixed_key(pin.last_key) if pin.block_count else 0,
    )
