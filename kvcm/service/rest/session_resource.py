"""/v1/sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from kvcm.service.rest.calls import CallRunner
from kvcm.service.rest.documents import Document, Int64, Page, PageQuery, page_of
from kvcm.service.rest.routing import add_route, answer

__all__ = ["SessionDocument", "SessionResource"]


class SessionDocument(Document):
    """A write session that did not end yet."""

    short_id: str
    """The first 8 characters of its id; the whole id is the right to finish it."""
    instance_id: str
    """The instance that it writes to."""
    instance_group: str
    """The group of that."""
    blocks: Int64
    """Blocks that it writes."""
    bytes: Int64
    """Bytes that they take when each of them is written with all of its specs."""
    begun_at_ms: Int64
    """When it began, unix time in ms; 0 = not known, since its blocks were removed meanwhile."""
    deadline_ms: Int64
    """When it ends by itself unless it is renewed, unix time in ms."""
    starter: str
    """Principal that began it: the name of a key or of an account; empty without authentication."""
    is_overdue: bool
    """Whether its deadline is over and it was not ended yet."""
    is_ending: bool
    """Whether it was finished a moment ago and is being carried out."""


class SessionQuery(PageQuery):
    """Which sessions."""

    instance: Annotated[str, Field(max_length=256, description="Only those of this instance.")] = ""
    group: Annotated[str, Field(max_length=256, description="Only those of this group.")] = ""


class SessionResource:
    """Write sessions.

    Args:
        calls: runs the calls behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(
            router=router,
            method="GET",
            path="/v1/sessions",
            endpoint=self.list_sessions,
            model=Page[SessionDocument],
            problems=[404],
        )

    async def list_sessions(self, request: Request, query: Annotated[SessionQuery, Query()]) -> Response:
        """List the open write sessions of all managers, ordered by deadline. A principal of some groups gets those of
        these groups."""
        fields = {"instance_id": query.instance, "instance_group": query.group}
        listed = await self._calls.run(request, "InsightService.ListSessions", **fields)
        return answer(page_of(listed.sessions, lambda each: (each.deadline_ms, each.short_id), query))
