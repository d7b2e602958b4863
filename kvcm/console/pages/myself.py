"""Who the visitor is, and what it may."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response

from kvcm.console.views.keys import key_views
from kvcm.console.visits import Visit

__all__ = ["ROUTES"]


async def _show(visit: Visit) -> Response:
    told = await visit.get("/v1/whoami")
    key = told.get("key")
    found = key_views([key], time.time() * 1000)[0] if key else None
    return visit.page("myself.html", is_required=told["is_required"], key=found)


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (("GET", "/console/me", _show),)
