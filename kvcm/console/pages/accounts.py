"""Accounts: names and passwords of people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response

from kvcm.console.confirming import Question, confirmed_routes
from kvcm.console.forms import Field, Sheet
from kvcm.console.resources import RefusedError
from kvcm.console.views.roles import ACCOUNT_ROLES
from kvcm.console.visits import Visit
from kvcm.service.rest.names import encoded_name

__all__ = ["ROUTES"]

_LIST: Final = "/console/accounts"
_ONE: Final = "/console/accounts/{name}"
_ADD: Final = "/console/accounts/+add"  # in names of accounts + is encoded

_NEW: Final = (
    Field("name", "User name", is_required=True),
    Field("role", "Role", kind="choice", choices=tuple(ACCOUNT_ROLES.items()), initial="ROLE_USER"),
    Field("password", "Password", kind="password", is_required=True, completion="new-password"),
)
_PASSWORD: Final = Field("password", "New password", kind="password", is_required=True, completion="new-password")
_OLD: Final = Field("old_password", "Present password", "", "password", True, completion="current-password")


async def _list(visit: Visit) -> Response:
    return visit.page("accounts.html", accounts=await visit.items("/v1/accounts"))


async def _ask_to_add(visit: Visit) -> Response:
    return visit.page("account_add.html", sheet=Sheet.blank(_NEW))


async def _add(visit: Visit) -> Response:
    sheet = Sheet.filled(_NEW, await visit.form())
    try:
        document = sheet.document()
        name = document.pop("name")
        await visit.send("PUT", f"/v1/accounts/{encoded_name(name)}", document)
    except RefusedError as error:
        return visit.page("account_add.html", error.status, sheet=sheet.refused(error))
    return visit.back(_LIST, f"Account {name} was added.")


def _password_fields(visit: Visit) -> Sequence[Field]:
    """Whoever is logged in as the account gives its present password, too."""
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
        f"Delete account {name}",
        ("Whoever is logged in as it is logged out at once.", "Keys that were made by it stay as they are."),
        "Delete it",
        _LIST,
        name,
    )


async def _delete(visit: Visit) -> Response:
    await visit.send("DELETE", f"/v1/accounts/{visit.request.path_params['name']}")
    return visit.back(_LIST, f"Account {visit.name()} was deleted.")


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", _LIST, _list),
    ("GET", _ADD, _ask_to_add),
    ("POST", _ADD, _add),
    ("GET", f"{_ONE}/password", _ask_for_password),
    ("POST", f"{_ONE}/password", _set_password),
    *confirmed_routes(f"{_ONE}/delete", _deleting, _delete),
)
