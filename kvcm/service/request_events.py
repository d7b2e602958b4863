"""Calls as events, in the original's format (wire.md 10.3): what engines asked for, so that it can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcm.cache.match import Match, MatchQuery
from kvcm.cache.sessions import StartedWrite
from kvcm.model.masks import BlockMask
from kvcm.telemetry.events import CACHE_MANAGER, EventLog
from kvcm.telemetry.recent_accesses import RecentAccesses

__all__ = ["RequestEvents"]

_READ, _STARTED, _FINISHED = "GetCacheLocation", "StartWriteCache", "FinishWriteCache"


class RequestEvents:
    """Tells an event log of calls that succeeded, and has them kept for a while. Nothing is built while nobody listens
    and nothing is kept.

    Args:
        log: where events go.
        recent: keeps the latest, without the tokens of prompts; with what became of them beside.
    """

    def __init__(self, log: EventLog, recent: RecentAccesses) -> None:
        self._log = log
        self._recent = recent

    def read(self, request: Any, query: MatchQuery, found: Match) -> None:
        """GetCacheLocation, unless it is not to count as an access."""
        if request.peek or not (self._log.is_active or self._recent.is_active):
            return
        fields: dict[str, Any] = {
            "query_type": query.mode.name.lower(),
            "block_mask": _mask(query.mask),
            "sw_size": query.window,
            "location_spec_names": list(request.location_spec_names),
        }
        if self._recent.is_active:
            told = {**fields, "hit_keys": len(found.keys)}
            self._recent.add(request.instance_id, _READ, told, query.keys, flags=_flags(query.mask))
        if self._log.is_active:
            told = {**fields, "keys": query.keys, "tokens": list(request.token_ids)}
            self._log.publish(request.instance_id, CACHE_MANAGER, _READ, told)

    def write_started(self, request: Any, keys: Sequence[int], started: StartedWrite) -> None:
        """StartWriteCache."""
        if not (self._log.is_active or self._recent.is_active):
            return
        fields = {
            "write_session_id": started.session.id,
            "block_mask": _mask(started.mask),
            "location_spec_group_names": list(request.location_spec_group_names),
            "write_timeout_seconds": request.write_timeout_seconds,
        }
        if self._recent.is_active:
            told = {**fields, "refused_keys": started.refused}
            self._recent.add(request.instance_id, _STARTED, told, keys, flags=_flags(started.mask))
        if self._log.is_active:
            told = {**fields, "keys": keys, "tokens": list(request.token_ids)}
            self._log.publish(request.instance_id, CACHE_MANAGER, _STARTED, told)

    def write_refused(self, request: Any, keys: Sequence[int]) -> None:
        """StartWriteCache that found no room at all: no event, but kept as one without a session."""
        if self._recent.is_active:
            fields = {"write_session_id": "", "block_mask": len(keys), "refused_keys": len(keys)}
            self._recent.add(request.instance_id, _STARTED, fields, keys)

    def write_finished(self, request: Any, success: BlockMask) -> None:
        """FinishWriteCache."""
        if not (self._log.is_active or self._recent.is_active):
            return
        fields = {"write_session_id": request.write_session_id, "success_block": _mask(success)}
        if self._recent.is_active:
            self._recent.add(request.instance_id, _FINISHED, fields, flags=_flags(success))
        if self._log.is_active:
            self._log.publish(request.instance_id, CACHE_MANAGER, _FINISHED, fields)


def _mask(mask: BlockMask) -> int | list[bool]:
    return mask.offset if mask.offset is not None else list(mask.flags or ())


def _flags(mask: BlockMask) -> int:
    return len(mask.flags or ())
