"""/v1/groups/{name}/curve."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvcm.service.rest.call_book import CallBook
from kvcm.service.rest.changing import unless_absent
from kvcm.service.rest.documents import Document, Int64, NamePath, Ratio
from kvcm.service.rest.messages import plain
from kvcm.service.rest.problem import Problem, ProblemError
from kvcm.service.rest.routing import add_route, answer, not_found

__all__ = ["CurveDocument", "CurveResource"]


class CurvePointDocument(Document):
    """One point of a curve."""

    bytes: Int64
    """Capacity."""
    hit_ratio: Ratio
    """Share of the blocks asked for that are found with it."""


class CurveTargetDocument(Document):
    """A capacity that gives a part of the attainable hits."""

    part: Ratio
    """The part."""
    hit_ratio: Ratio
    """The share of the blocks asked for which that is."""
    bytes: Int64
    """The capacity."""


class CurvePresentDocument(Document):
    """Where a group stands on its curve."""

    quota_bytes: Int64
    """Its quota."""
    kept_bytes: Int64
    """What eviction keeps it at: the soft mark, or the quota where there is none."""
    used_bytes: Int64
    """What it uses."""
    predicted_ratio: Ratio
    """Share of the blocks asked for that are found with `kept_bytes`."""


class CurveDocument(Document):
    """What capacity is worth to a group, estimated from a sample of the lookups of the manager that answers."""

    since_ms: Int64
    """Since when lookups of the group are counted, unix time in ms. What is older than an hour counts half, and so
    on."""
    lookups: Int64
    """Blocks that were asked for, older ones counted less."""
    sampled_keys: Int64
    """Keys that are followed."""
    attainable_ratio: Ratio
    """Share of the blocks asked for that a cache of any size would find."""
    points: list[CurvePointDocument]
    """The curve, ascending: where it rises."""
    targets: list[CurveTargetDocument]
    """Capacities for 60, 80, 90, 95 and 99 % of what is attainable; empty while nothing was found again."""
    present: CurvePresentDocument
    """Where the group stands now."""


class CurveResource:
    """Curves of groups.

    Args:
        book: runs the calls behind it.
    """

    def __init__(self, book: CallBook) -> None:
        self._book = book

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        path = "/v1/groups/{name}/curve"
        add_route(router, "GET", path, self.get_group_curve, CurveDocument, problems=[404, 409])

    async def get_group_curve(self, request: Request, name: NamePath) -> Response:
        """Tell what more or less capacity is worth to a group. 409 while there is no estimate: `detail` says what to
        set, or what to wait for."""
        look = self._book.run(request, "InsightService.GetCurve", instance_group=name)
        found = plain(await unless_absent(look, lambda: self._check_group(request, name)))
        why_not = found.pop("why_not")
        if not found.pop("is_known"):
            raise ProblemError(Problem(409, f"of group {name!r} there is no estimate: {why_not}"))
        return answer(found)

    async def _check_group(self, request: Request, name: str) -> None:
        if await self._book.find(request, "AdminService.GetInstanceGroup", name=name) is None:
            raise not_found("group", name)
