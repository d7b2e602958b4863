"""Signing in and out. What a browser keeps is a key: one that ends within hours where somebody gave a password."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kvcm.console.browsers import is_encrypted
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Visit
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["ROUTES", "authorization", "elsewhere"]

_COOKIE: Final = "kvcm_key"
_PATH: Final = "/console/login"
_SECONDS: Final = 12 * 3600
_STILL_THERE: Final = "This browser has forgotten the login, which could not be ended and ends within twelve hours:"
_UNKNOWN: Final = "This key is not known: it is misspelt, was revoked, or has ended."


def authorization(request: Request) -> str:
    """Return what a browser shows of whoever signed in, as the header `authorization` has it."""
    parts = [part.strip().partition("=") for part in request.headers.get("cookie", "").split(";")]
    kept = [value for name, _, value in parts if name == _COOKIE]  # what others of this host keep may be malformed
    return f"Bearer {kept[0]}" if len(kept) == 1 else "twice" if kept else ""


def elsewhere(request: Request) -> Response:
    """Send somebody to sign in, and back."""
    back = request.url.path if request.method == "GET" else "/console/"
    return RedirectResponse(f"{_PATH}?next={quote(back, safe='')}", 303)


async def _show(visit: Visit) -> Response:
    return visit.page("sign_in.html", next=_own_path(visit.query("next")), user_name="", fault="")


async def _enter(visit: Visit) -> Response:
    form = await visit.form()
    following, user_name = _own_path(form.get("next", "")), form.get("user_name", "").strip()
    try:
        key = form.get("key", "").strip() or await _logged_in(visit, user_name, form.get("password", ""))
        visit.recognise(key)
    except RefusedError as error:
        return _again(visit, following, user_name, error.status, error.detail)
    except TurnedAwayError as error:
        said = _UNKNOWN if error.http_status == 401 else str(error)
        return _again(visit, following, user_name, error.http_status, said)
    response = RedirectResponse(following, 303)
    _keep(response, visit, key)
    return response


def _again(visit: Visit, following: str, user_name: str, status: int, fault: str) -> Response:
    return visit.page("sign_in.html", status, next=following, user_name=user_name, fault=fault)


async def _logged_in(visit: Visit, user_name: str, password: str) -> str:
    wanted = {"user_name": user_name, "password": password, "ttl_seconds": _SECONDS}
    return str((await visit.send("POST", "/v1/login", wanted)).document["secret"])


async def _leave(visit: Visit) -> Response:
    """Let the browser forget the key. That of a login ends, too; one's own is needed elsewhere."""
    response: Response = RedirectResponse(_PATH, 303)
    try:
        await visit.send("DELETE", "/v1/login")
    except RefusedError as error:
        response = visit.fault(error.status, f"{_STILL_THERE} {error.detail}")
    response.delete_cookie(_COOKIE, path="/console/", httponly=True, samesite="strict")
    return response


def _keep(response: Response, visit: Visit, key: str) -> None:
    """Let the browser keep a key until it is closed."""
    secure = is_encrypted(visit.request.url.scheme, visit.request.headers)
    response.set_cookie(_COOKIE, key, path="/console/", secure=secure, httponly=True, samesite="strict")


def _own_path(path: str) -> str:
    """Return a page of the console to go on to: links from elsewhere are not to lead anywhere else."""
    parts = urlsplit(path)
    is_own = not parts.scheme and not parts.netloc and path.startswith("/console/") and "\\" not in path
    return path if is_own and path.isprintable() else "/console/"


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", _PATH, _show),
    ("POST", _PATH, _enter),
    ("POST", "/console/logout", _leave),
)
