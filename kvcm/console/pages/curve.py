"""The page with the hit rate of a group by its capacity."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup
from starlette.responses import Response

from kvcm.console.formats import percent, size
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.service.rest.conversion import encode_name

__all__ = ["ROUTES", "Change", "CurveView", "curve_of"]

# The curve as a drawing, with the hit rates of more and less capacity.

_WIDTH: Final = 640
_HEIGHT: Final = 260
_LEFT: Final = 68
_RIGHT: Final = 16
_TOP: Final = 26
_BOTTOM: Final = 28
_FACTORS: Final = ((0.25, "a quarter of it"), (0.5, "half of it"), (1.0, "as now"), (2.0, "twice"), (4.0, "four times"))
_GRID: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Change:
    """The hit rate of another capacity.

    Attributes:
        what: the capacity in words.
        bytes: the capacity.
        ratio: hit rate with it.
        gain: the difference from now.
        is_present: whether it is the present capacity.
    """

    what: str
    bytes: int
    ratio: float
    gain: float
    is_present: bool


@dataclass(frozen=True, slots=True)
class CurveView:
    """A curve with its conclusions.

    Attributes:
        document: of `/v1/groups/{name}/curve`.
        headline: in one sentence.
        changes: other capacities, ascending.
        targets: capacities for parts of the attainable hits, each with the bytes that are missing, 0 if none are.
        drawing: the curve.
    """

    document: Any
    headline: str
    changes: Sequence[Change]
    targets: Sequence[tuple[Any, int]]
    drawing: Markup


def curve_of(document: Any) -> CurveView:
    """Return the view of a curve."""
    present = document["present"]
    kept, ratio = present["kept_bytes"], present["predicted_ratio"]
    points = [(point["bytes"], point["hit_ratio"]) for point in document["points"]]
    changes = [
        Change(what, int(kept * factor), found := _ratio_at(points, int(kept * factor)), found - ratio, factor == 1)
        for factor, what in _FACTORS
    ]
    targets = [(target, max(0, target["bytes"] - kept)) for target in document["targets"]]
    return CurveView(document, _headline(document), changes, targets, _drawing(document, points))


def _headline(document: Any) -> str:
    present, attainable = document["present"], document["attainable_ratio"]
    if not document["points"]:
        return "Nothing was asked for twice: no cache of any size would find any of it."
    if present["predicted_ratio"] >= 0.95 * attainable:
        return (
            f"The group has what it needs: {percent(present['predicted_ratio'])} of the blocks asked for are found, "
            f"and no cache finds more than {percent(attainable)}."
        )
    return (
        f"With {size(present['kept_bytes'])} the group finds {percent(present['predicted_ratio'])} of the blocks asked "
        f"for; a cache of any size would find {percent(attainable)}."
    )


def _ratio_at(points: Sequence[tuple[int, float]], capacity: int) -> float:
    found = bisect_right([point[0] for point in points], capacity)
    return points[found - 1][1] if found else 0.0


class _Plane:
    """Where capacities and ratios are on the drawing: capacities by their logarithm."""

    def __init__(self, capacities: Sequence[int]) -> None:
        known = [each for each in capacities if each > 0] or [1]
        self.low = math.floor(math.log2(min(known)) - 0.5)
        self.high = max(self.low + 2, math.ceil(math.log2(max(known)) + 0.5))

    def x(self, capacity: float) -> float:
        share = (math.log2(max(1.0, capacity)) - self.low) / (self.high - self.low)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, share))

    def y(self, ratio: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - ratio)

    def ticks(self) -> Iterator[int]:
        step = max(1, math.ceil((self.high - self.low) / 5))
        yield from (1 << power for power in range(max(0, self.low), self.high + 1, step))


def _drawing(document: Any, points: Sequence[tuple[int, float]]) -> Markup:
    if not points:
        return Markup("")
    present = document["present"]
    plane = _Plane([*(point[0] for point in points), present["kept_bytes"]])
    parts = [*_axes(plane), _attainable(plane, document["attainable_ratio"]), _line(plane, points)]
    parts.append(_mark(plane, present))
    return Markup(
        '<svg class="curve" viewBox="0 0 {} {}" role="img"><title>Hit rate by capacity. {}</title>{}</svg>'
    ).format(_WIDTH, _HEIGHT, _headline(document), Markup("").join(parts))


def _axes(plane: _Plane) -> Iterator[Markup]:
    for ratio in _GRID:
        y = plane.y(ratio)
        yield Markup(
            '<path class="grid" d="M{} {:.1f}H{}"/><text class="tick y" x="{}" y="{:.1f}">{:.0f} %</text>'
        ).format(_LEFT, y, _WIDTH - _RIGHT, _LEFT - 6, y + 4, 100 * ratio)
    for tick in plane.ticks():
        x = plane.x(tick)
        anchor = "end" if x > _WIDTH - 60 else "start" if x < _LEFT + 20 else "middle"
        yield Markup('<text class="tick" text-anchor="{}" x="{:.1f}" y="{}">{}</text>').format(
            anchor, x, _HEIGHT - 8, size(tick).replace(".0 ", " ")
        )


def _line(plane: _Plane, points: Sequence[tuple[int, float]]) -> Markup:
    """Return the curve as steps: between two points there are no further hits."""
    path, ratio = f"M{_LEFT} {plane.y(0):.1f}", 0.0
    for capacity, ratio in points:
        path += f"H{plane.x(capacity):.1f}V{plane.y(ratio):.1f}"
    return Markup('<path class="line c0" d="{}H{}"/>').format(path, _WIDTH - _RIGHT)


def _attainable(plane: _Plane, ratio: float) -> Markup:
    y = plane.y(ratio)
    return Markup('<path class="limit" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT)


def _mark(plane: _Plane, present: Any) -> Markup:
    x, y = plane.x(present["kept_bytes"]), plane.y(present["predicted_ratio"])
    anchor = "end" if x > _WIDTH / 2 else "start"
    return Markup(
        '<path class="now" d="M{x:.1f} {top}V{bottom}"/><circle class="now" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        '<text class="tick now" text-anchor="{anchor}" x="{x:.1f}" y="{label}">now: {size}</text>'
    ).format(
        x=x, y=y, top=_TOP, bottom=_HEIGHT - _BOTTOM, anchor=anchor, label=_TOP - 10, size=size(present["kept_bytes"])
    )


async def _show(visit: Visit) -> Response:
    name = visit.name()
    base = f"{visit.request.url.scheme}://{visit.request.headers.get('host', '')}"
    try:
        document = await visit.get(f"/v1/groups/{encode_name(name)}/curve")
    except RefusedError as error:
        if error.status != 409:  # there is none: the reason says what to set
            raise
        return visit.page("curve.html", name=name, curve=None, why_not=error.detail, base=base)
    return visit.page("curve.html", name=name, curve=curve_of(document), why_not="", base=base)


ROUTES: Final[Routes] = (("GET", "/console/groups/{name}/curve", _show),)
