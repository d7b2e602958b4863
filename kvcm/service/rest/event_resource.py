"""/v1/events."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from kvcm.service.rest.routing import add_route
from kvcm.telemetry.recent_accesses import RecentAccesses

__all__ = ["EventResource"]

_LINES = "application/x-ndjson"


class EventResource:
    """What happened of late.

    Args:
        recent: the accesses that are kept.
    """

    def __init__(self, recent: RecentAccesses) -> None:
        self._recent = recent

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(router, "GET", "/v1/events/recent", self.list_recent_events, media=_LINES)

    async def list_recent_events(self) -> Response:
        """Tell of the last accesses of engines, one event per line, the oldest first; how many are kept says
        `kvcm.optimizer.recent_keys`. The first line, of type `recent`, says from when to when nothing is missing, and
        how much was pushed out before. For administrators: keys and write sessions are among it."""
        return StreamingResponse(self._recent.lines(), media_type=_LINES)
