"""Pages of accounts, and signing in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kvcm.console.formats import ACCOUNT_ROLES
from kvcm.console.forms import Field, Question, Sheet, confirmed_routes
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit, is_encrypted
from kvcm.service.rejections import RejectedError
from kvcm.service.rest.conversion import encode_name

__all__ = ["ROUTES", "SIGN_IN_ROUTES", "authorization", "elsewhere"]

# Signing in and out. The cookie holds an API key; that of a login with a password ends within hours.

_COOKIE: Final = "kvcm_key"
_PATH: Final = "/console/login"
_SECONDS: Final = 12 * 3600
_STILL_VALID: Final = "This browser has forgotten the login, which could not be ended and ends within twelve hours:"
_UNKNOWN: Final = "This key is not known: it is misspelt, was revoked, or has ended."


def authorization(request: Request) -> str:
    """Return the credentials of a browser's cookie, in the form of the header `authorization`."""
    parts = [part.strip().partition("=") for part in request.headers.get("cookie", "").split(";")]
    kept = [value for name, _, value in parts if name == _COOKIE]  # cookies of others on this host may be malformed
    return f"Bearer {kept[0]}" if len(kept) == 1 else "twice" if kept else ""


def elsewhere(request: Request) -> Response:
    """Redirect to the page for signing in, which leads back."""
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
    except RejectedError as error:
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
    """Let the browser forget the key. The key of a login ends, too; other keys are in use elsewhere."""
    response: Response = RedirectResponse(_PATH, 303)
    try:
        await visit.send("DELETE", "/v1/login")
    except RefusedError as error:
        response = visit.fault(error.status, f"{_STILL_VALID} {error.detail}")
    response.delete_cookie(_COOKIE, path="/console/", httponly=True, samesite="strict")
    return response


def _keep(response: Response, visit: Visit, key: str) -> None:
    """Let the browser keep a key until it is closed."""
    secure = is_encrypted(visit.request.url.scheme, visit.request.headers)
    response.set_cookie(_COOKIE, key, path="/console/", secure=secure, httponly=True, samesite="strict")


def _own_path(path: str) -> str:
    """Return a path if it is one of the console: links must not redirect to other sites."""
    parts = urlsplit(path)
    is_own = not parts.scheme and not parts.netloc and path.startswith("/console/") and "\\" not in path
    return path if is_own and path.isprintable() else "/console/"


SIGN_IN_ROUTES: Final[Routes] = (
    ("GET", _PATH, _show),
    ("POST", _PATH, _enter),
    ("POST", "/console/logout", _leave),
)

# Accounts.

_LIST: Final = "/console/accounts"
_ONE: Final = "/console/accounts/{name}"
_ADD: Final = "/console/accounts/+add"  # in names of accounts + is encoded
_NEW: Final = (
    Field("name", "User name", is_required=True),
    Field("role", "Role", kind="choice", choices=tuple(ACCOUNT_ROLES.items()), initial="ROLE_USER"),
    Field("password", "Password", kind="password", is_required=True, completion="new-password"),
)
_PASSWORD: Final = Field("password", "New password", kind="password", is_required=True, completion="new-password")
_OLD: Final = Field(
    name="old_password",
    label="Present password",
    hint="",
    kind="password",
    is_required=True,
    completion="current-password",
)


async def _list(visit: Visit) -> Response:
    return visit.page("accounts.html", accounts=await visit.items("/v1/accounts"))


async def _ask_to_add(visit: Visit) -> Response:
    return visit.page("account_add.html", sheet=Sheet.blank(_NEW))


async def _add(visit: Visit) -> Response:
    sheet = Sheet.filled(_NEW, await visit.form())
    try:
        document = sheet.document()
        name = document.pop("name")
        await visit.send("PUT", f"/v1/accounts/{encode_name(name)}", document)
    except RefusedError as error:
        return visit.page("account_add.html", error.status, sheet=sheet.refused(error))
    return visit.back(_LIST, f"Account {name} was added.")


def _password_fields(visit: Visit) -> Sequence[Field]:
    """Return the fields; an account that changes its own password gives the present one, too."""
    return (_OLD, _PASSWORD) if visit.name() == visit.visitor.principal.account else (_PASSWORD,)


async def _ask_for_password(visit: Visit) -> Response:
    return visit.page("account_password.html", name=visit.name(), sheet=Sheet.blank(_password_fields(visit)))


async def _set_password(visit: Visit) -> Response:
    sheet = Sheet.filled(_password_fields(visit), await visit.form())
    try:
        await visit.send("PUT", f"/v1/accounts/{visit.request.path_params['name']}/password", sheet.document())
    except RefusedError as error:
        return visit.page("account_password.html", error.status, name=visit.name(), sheet=sheet.refused(error))
    if visit.name() == visit.visitor.principal.account:
        return visit.back("/console/login")  # its logins have ended, this one too
    return visit.back(_LIST, f"Account {visit.name()} has another password, and its logins have ended.")


async def _deleting(visit: Visit) -> Question:
    name = visit.name()
    await visit.get(f"/v1/accounts/{visit.request.path_params['name']}")
    return Question(
        title=f"Delete account {name}",
        consequences=("Its logins end at once.", "Keys that were made by it stay as they are."),
        button="Delete it",
        back=_LIST,
        name=name,
    )


async def _delete(visit: Visit) -> Response:
    await visit.send("DELETE", f"/v1/accounts/{visit.request.path_params['name']}")
    return visit.back(_LIST, f"Account {visit.name()} was deleted.")


ROUTES: Final[Routes] = (
    ("GET", _LIST, _list),
    ("GET", _ADD, _ask_to_add),
    ("POST", _ADD, _add),
    ("GET", f"{_ONE}/password", _ask_for_password),
    ("POST", f"{_ONE}/password", _set_password),
    *confirmed_routes(f"{_ONE}/delete", _deleting, _delete),
)
