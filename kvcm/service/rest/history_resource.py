"""/v1/history."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from kvcm.model.principals import Principal
from kvcm.service.calls import LOCAL, Arrival
from kvcm.service.http_server import ARRIVAL
from kvcm.service.rejections import Problem, ProblemError
from kvcm.service.rest.documents import Document, Int64
from kvcm.service.rest.routing import add_route, answer, not_found
from kvcm.service.vitals import VitalsWatch
from kvcm.service.vitals_history import LONGEST_SECONDS, HistoryRange
from kvcm.telemetry.events import RecentAccesses

__all__ = ["EventResource", "HistoryResource"]


class SeriesDocument(Document):
    """One series."""

    name: str
    """Of the measure."""
    labels: dict[str, str]
    """What it is of: a group, a method, a kind of storage (`tier`), hits or misses (`result`)."""
    unit: str
    """Of the values."""
    values: list[float | None]
    """The oldest first; null where nothing is known."""


class HistoryDocument(Document):
    """What the deployment did and held of late."""

    interval_seconds: Int64
    """From one value to the next."""
    until_ms: Int64
    """End of the interval of the last value, unix time in ms."""
    series: list[SeriesDocument]
    """Ordered by name and labels."""


class HistoryQuery(BaseModel):
    """Which part of the history."""

    model_config = ConfigDict(extra="forbid")

    seconds: Annotated[int, Field(ge=60, le=LONGEST_SECONDS, description="How much of it, up to now.")] = 3600
    group: Annotated[str, Field(max_length=256, description="Only what is of this group.")] = ""


class HistoryResource:
    """The history.

    Args:
        watch: keeps it.
    """

    def __init__(self, watch: VitalsWatch) -> None:
        self._watch = watch

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(router, "GET", "/v1/history", self.get_history, HistoryDocument, problems=[404])

    async def get_history(self, request: Request, query: Annotated[HistoryQuery, Query()]) -> Response:
        """Tell rates, hit ratios, latency and usage over time, in 360 values at most: rates over each interval, what is
        used at its end. Over more than two hours they are means, of `match_p99_seconds` the most. Whoever is limited to
        groups is told of those alone."""
        arrival: Arrival = request.scope.get(ARRIVAL, LOCAL)
        principal = arrival.principal
        if query.group:
            self._check(principal, query.group)
        groups = None if principal.has_all_groups else principal.groups
        span = await self._watch.range(query.seconds, query.group, groups)
        return answer(_document(span))

    def _check(self, principal: Principal, group: str) -> None:
        if not principal.covers(group):
            raise ProblemError(Problem(403, f"{principal.name} may not view in this instance group"))
        if not self._watch.has_group(group):
            raise not_found("group", group)


def _document(span: HistoryRange) -> dict[str, Any]:
    return {
        "interval_seconds": span.interval_seconds,
        "until_ms": int(span.until * 1000),
        "series": [each._asdict() for each in span.series],
    }


# /v1/events.

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
