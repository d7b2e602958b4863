"""What more or less capacity is worth to a group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response

from kvcm.console.resources import RefusedError
from kvcm.console.views.curves import curve_of
from kvcm.console.visits import Visit
from kvcm.service.rest.names import encoded_name

__all__ = ["ROUTES"]


async def _show(visit: Visit) -> Response:
    name = visit.name()
    base = f"{visit.request.url.scheme}://{visit.request.headers.get('host', '')}"
    try:
        document = await visit.get(f"/v1/groups/{encoded_name(name)}/curve")
    except RefusedError as error:
        if error.status != 409:  # there is none: the reason says what to set
            raise
        return visit.page("curve.html", name=name, curve=None, why_not=error.detail, base=base)
    return visit.page("curve.html", name=name, curve=curve_of(document), why_not="", base=base)


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", "/console/groups/{name}/curve", _show),
)
