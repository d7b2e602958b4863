"""The style sheet and the scripts of the console: those that lie in its package, and nothing else."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["static_file"]

_TYPES: Final = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "theme.js": "text/javascript; charset=utf-8",
    "vendor/htmx.min.js": "text/javascript; charset=utf-8",
}


async def static_file(request: Request) -> Response:
    """Return a file; browsers keep it and ask whether it is still the same."""
    name = request.path_params["file"]
    if name not in _TYPES:
        return Response("404 Not Found", 404, media_type="text/plain")
    content, etag = _read(name)
    headers = {"etag": etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[name], headers=headers)


@lru_cache(len(_TYPES))
def _read(name: str) -> tuple[bytes, str]:
    content = files("kvcm.console").joinpath("static", name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
