"""The console as one ASGI application of the admin port: authentication, routing, errors, headers, static files."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any, Final

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route, Router

from kvcm.console.pages import ROUTES, accounts
from kvcm.console.resources import RefusedError, ResourceClient
from kvcm.console.visits import Handler, Page, Visit, Visitor, foreign_request, render
from kvcm.model.principals import ANONYMOUS, Principal
from kvcm.service.access import CERTIFICATE_NAMES, Credentials
from kvcm.service.calls import Arrival, Caller
from kvcm.service.http_server import ARRIVAL, Receive, Resources, Send
from kvcm.service.rejections import ForbiddenError, RejectedError

__all__ = ["HOME", "ConsoleApp"]

# Static files: those listed here, and no others.

_TYPES: Final = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "theme.js": "text/javascript; charset=utf-8",
    "vendor/htmx.min.js": "text/javascript; charset=utf-8",
}


async def _static_file(request: Request) -> Response:
    """Return a file; browsers cache it and revalidate by its entity tag."""
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


# The application.

HOME: Final = "/console/"
_OPEN_PATHS: Final = ("/console/login",)
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",  # stricter ones would hide where forms come from
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
}
_log = structlog.get_logger("kvcm.console")


class ConsoleApp:
    """Answers requests of browsers. The transport has read and limited their bodies, and put `ARRIVAL` in their scopes.

    Args:
        resources: the resources under /v1.
        caller: authenticates.
        version: of the manager.
    """

    def __init__(self, resources: Resources, caller: Caller, version: str) -> None:
        self._resources = resources
        self._caller = caller
        self._version = version
        routes = [Route(path, partial(self._answer, handler), methods=[method]) for method, path, handler in ROUTES]
        routes.append(Route("/console/static/{file:path}", _static_file, methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request. Paths are matched percent-encoded: `%2F` in a name is no separator."""
        request = Request(scope, receive)
        response = self._unless_foreign(request) or self._elsewhere(request)
        if response is not None:
            await response(scope, receive, _hardened(send))
            return
        raw = scope["raw_path"].decode("ascii", "replace")
        await self._router({**scope, "path": raw}, receive, _hardened(send))

    def _unless_foreign(self, request: Request) -> Response | None:
        reason = foreign_request(request.method, request.headers, is_open=not self._caller.access.requires_credentials)
        return self._fault(403, reason) if reason else None

    @staticmethod
    def _elsewhere(request: Request) -> Response | None:
        return RedirectResponse(HOME, 307) if request.scope["path"] == "/" else None

    async def _answer(self, handler: Handler, request: Request) -> Response:
        try:
            visit = self._visit(request)
        except RejectedError as error:
            if isinstance(error, ForbiddenError):
                return self._fault(403, str(error))
            return accounts.elsewhere(request)
        try:
            return await _written(await handler(visit))
        except RefusedError as error:
            if error.status == 401:  # the key has ended
                return accounts.elsewhere(request)
            return await _written(visit.fault(error.status, error.detail))
        except HTTPException as error:
            return await _written(visit.fault(error.status_code, error.detail))
        except Exception:
            _log.exception("failed", page=request.url.path)
            return await _written(visit.fault(500, "The manager failed to answer; its log has the reason."))

    def _visit(self, request: Request) -> Visit:
        """Raises RejectedError: the credentials are not valid."""
        arrival: Arrival = request.scope[ARRIVAL]
        if request.scope["path"] in _OPEN_PATHS:
            principal = ANONYMOUS
        else:
            names = request.scope.get(CERTIFICATE_NAMES, ())
            principal = self._authenticated(Credentials(accounts.authorization(request), names))
        client = ResourceClient(self._resources, arrival._replace(principal=principal))
        visitor = Visitor(principal, self._caller.access.requires_credentials)
        return Visit(
            request, visitor, client, self._version, lambda key: self._authenticated(Credentials(f"Bearer {key}"))
        )

    def _authenticated(self, credentials: Credentials) -> Principal:
        return self._caller.authenticate_page(HOME, credentials)

    async def _not_found(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await self._fault(404, "There is no such page.")(scope, receive, send)

    def _fault(self, status: int, detail: str) -> Response:
        page = render("fault_alone.html", code=status, detail=detail, version=self._version)
        return HTMLResponse(page, status)


async def _written(response: Response) -> Response:
    if isinstance(response, Page):
        await response.write()
    return response


def _hardened(send: Send) -> Send:
    async def hardened(event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            given = {name.lower() for name, _ in event["headers"]}
            more = {"cache-control": "no-store", **_HEADERS}
            added = [(name.encode(), value.encode()) for name, value in more.items() if name.encode() not in given]
            event["headers"] = [*event["headers"], *added]
        await send(event)

    return hardened
