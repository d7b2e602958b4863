"""Write sessions that are open: whose they are, what they hold, and how long they may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console.views.sessions import sessions_of
from kvcm.console.visits import Visit

__all__ = ["ROUTES"]

_MOST_SHOWN: Final = 500


async def _show(visit: Visit) -> Response:
    asked = {name: value for name in ("group", "instance") if (value := visit.query(name).strip())}
    found = await visit.items("/v1/sessions" + (f"?{urlencode(asked)}" if asked else ""))
    return visit.page(
        "sessions.html",
        sessions=sessions_of(found),
        shown=found[:_MOST_SHOWN],
        group=asked.get("group", ""),
        instance=asked.get("instance", ""),
    )


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", "/console/sessions", _show),
)
