"""The managers of the deployment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response

from kvcm.console.visits import Visit

__all__ = ["ROUTES"]


async def _show(visit: Visit) -> Response:
    return visit.page("managers.html", managers=(await visit.get("/v1/managers"))["items"])


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", "/console/managers", _show),
)
