"""/v1/history and /v1/events."""

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
    """A group, a method, a kind of storage (`tier`), hits or misses (`result`)."""
    unit: str
    """Of the values."""
    values: list[float | None]
    """The oldest first; null where nothing is known."""


class HistoryDocument(Document):
    """Activity and usage of the deployment over the last hours."""

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
    group: Annotated[str, Field(max_length=256, description="Only series of this group.")] = ""


class HistoryResource:
    """The history.

    Args:
        watch: keeps it.
    """

    def __init__(self, watch: VitalsWatch) -> None:
        self._watch = watch

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(
            router=router,
            method="GET",
            path="/v1/history",
            endpoint=self.get_history,
            model=HistoryDocument,
            problems=[404],
        )

    async def get_history(self, request: Request, query: Annotated[HistoryQuery, Query()]) -> Response:
        """Get rates, hit ratios, latency and usage over time, in 360 values at most: rates over each interval, usage at
        its end. Over more than two hours they are means, of `match_p99_seconds` the maximum. A principal of some groups
        gets the series of these alone."""
        arrival: Arrival = request.scope.get(ARRIVAL, LOCAL)
        principal = arrival.principal
        if query.group:
            self._check(principal, query.group)
        groups = None if principal.has_all_groups else principal.groups
        return answer(_document(await self._watch.range(query.seconds, query.group, groups)))

    def _check(self, principal: Principal, group: str) -> None:
        if not principal.covers(group):
            raise ProblemError(Problem(403, f"{principal.name} may not view in this instance group"))
        if not self._watch.has_group(group):
            raise not_found("group", group)


def _document(found: HistoryRange) -> dict[str, Any]:
    return {
        "interval_seconds": found.interval_seconds,
        "until_ms": int(found.until * 1000),
        "series": [each._asdict() for each in found.series],
    }


# /v1/events.

_LINES = "application/x-ndjson"


class EventResource:
    """Recent accesses.

    Args:
        recent: the accesses that are kept.
    """

    def __init__(self, recent: RecentAccesses) -> None:
        self._recent = recent

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(router=router, method="GET", path="/v1/events/recent", endpoint=self.list_recent_events, media=_LINES)

    async def list_recent_events(self) -> Response:
        """Stream the last accesses of engines, one event per line, the oldest first; `kvcm.optimizer.recent_keys` says
        how many are kept. The first line, of type `recent`, says from when to when no access is missing, and how many
        were dropped before. For administrators, since keys and write sessions are among the fields."""
        return StreamingResponse(self._recent.lines(), media_type=_LINES)
