"""Calls as events, in the original's format (wire.md 10.3): what engines asked for, so that it can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcm.cache.match import MatchQuery
from kvcm.cache.sessions import StartedWrite
from kvcm.model.masks import BlockMask
from kvcm.telemetry.events import CACHE_MANAGER, EventLog

__all__ = ["RequestEvents"]


class RequestEvents:
    """Tells an event log of calls that succeeded. Nothing is built while nobody listens.

    Args:
        log: where events go.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def read(self, request: Any, query: MatchQuery) -> None:
        """GetCacheLocation, unless it is not to count as an access."""
        if not self._log.is_active or request.peek:
            return
        fields = {
            "query_type": query.mode.name.lower(),
            "keys": query.keys,
            "tokens": list(request.token_ids),
            "block_mask": _mask(query.mask),
            "sw_size": query.window,
            "location_spec_names": list(request.location_spec_names),
        }
        self._log.publish(request.instance_id, CACHE_MANAGER, "GetCacheLocation", fields)

    def write_started(self, request: Any, keys: Sequence[int], started: StartedWrite) -> None:
        """StartWriteCache."""
        if not self._log.is_active:
            return
        fields = {
            "write_session_id": started.session.id,
            "keys": keys,
            "tokens": list(request.token_ids),
            "block_mask": _mask(started.mask),
            "location_spec_group_names": list(request.location_spec_group_names),
            "write_timeout_seconds": request.write_timeout_seconds,
        }
        self._log.publish(request.instance_id, CACHE_MANAGER, "StartWriteCache", fields)

    def write_finished(self, request: Any, success: BlockMask) -> None:
        """FinishWriteCache."""
        if not self._log.is_active:
            return
        fields = {"write_session_id": request.write_session_id, "success_block": _mask(success)}
        self._log.publish(request.instance_id, CACHE_MANAGER, "FinishWriteCache", fields)


def _mask(mask: BlockMask) -> int | list[bool]:
    return mask.offset if mask.offset is not None else list(mask.flags or ())
