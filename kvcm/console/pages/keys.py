"""Pages of API keys, and of the visitor itself. A secret is on the page that made it, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import Response

from kvcm.console.formats import KEY_ROLES, VERBS, shown_role
from kvcm.console.forms import Field, Question, Sheet, confirmed_routes
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.model.principals import ALL_GROUPS

__all__ = ["ROUTES", "WHOAMI_ROUTES", "KeyView", "key_views"]

# Keys.

Document = Mapping[str, Any]
_SOON_MS: Final = 14 * 86_400_000


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key, without its secret.

    Attributes:
        document: the resource.
        now_ms: Unix time in ms.
    """

    document: Document
    now_ms: float

    @property
    def key_id(self) -> str:
        """Names it."""
        return str(self.document["key_id"])

    @property
    def name(self) -> str:
        """Of its principal."""
        return str(self.document["name"])

    @property
    def role(self) -> str:
        """In one word."""
        return shown_role(self.document["role"])

    @property
    def scope(self) -> str:
        """Its instance groups."""
        groups: Sequence[str] = self.document["instance_groups"]
        return "all groups" if not groups or ALL_GROUPS in groups else ", ".join(groups)

    @property
    def verbs(self) -> str:
        """Verbs of an engine; "" for other roles."""
        return ", ".join(verb.lower() for verb in self.document["verbs"])

    @property
    def ends_soon(self) -> bool:
        """Whether it should be rotated. Logins end by themselves."""
        ends = self.document["expires_at_ms"]
        return bool(ends and not self.document["account"] and ends - self.now_ms < _SOON_MS)


def key_views(keys: Sequence[Document], now_ms: float) -> list[KeyView]:
    """Return keys, in their order."""
    return [KeyView(key, now_ms) for key in keys]


_LIST: Final = "/console/keys"
_ONE: Final = "/console/keys/{name}"
_ADD: Final = "/console/keys/+add"  # no key has such an id
_GROUPS: Final = Field(
    name="instance_groups",
    label="Groups",
    hint="Where it counts. An engine needs some; other roles have all if no box is ticked.",
    kind="several",
)
_NEW: Final = (
    Field("name", "Name", "Letters, digits, dots, dashes and underscores; 128 at most.", is_required=True),
    Field("role", "Role", kind="choice", choices=tuple(KEY_ROLES.items()), initial="ROLE_ENGINE"),
    _GROUPS,
    Field(
        name="verbs",
        label="What an engine may do",
        hint="All, if no box is ticked.",
        kind="several",
        choices=tuple(VERBS.items()),
    ),
    Field(
        name="ttl_seconds", label="Ends after", hint="As in 30d, 12h or 15m. Empty: never.", kind="span", initial="90d"
    ),
    Field(
        "certificate_name",
        "Name in client certificates",
        "A certificate with this name authenticates, and no secret is made. Empty: a secret is made.",
    ),
)
_ROTATION: Final = (
    Field(
        name="overlap_seconds",
        label="The old key goes on for",
        hint="As in 1h. Empty: it ends at once.",
        kind="span",
        initial="1h",
    ),
    Field(
        name="ttl_seconds", label="The new key ends after", hint="As in 90d. Empty: never.", kind="span", initial="90d"
    ),
)


async def _list(visit: Visit) -> Response:
    with_logins = visit.query("logins") == "yes"
    keys = await visit.items(f"/v1/keys{'?with_logins=true' if with_logins else ''}")
    return visit.page("keys.html", keys=key_views(keys, time.time() * 1000), with_logins=with_logins)


async def _fields(visit: Visit) -> Sequence[Field]:
    groups = await visit.items("/v1/groups")
    choices = ((ALL_GROUPS, "all groups"), *((group["name"], group["name"]) for group in groups))
    return [replace(field, choices=choices) if field is _GROUPS else field for field in _NEW]


async def _ask_to_add(visit: Visit) -> Response:
    return visit.page("key_add.html", sheet=Sheet.blank(await _fields(visit)))


async def _add(visit: Visit) -> Response:
    sheet = Sheet.filled(await _fields(visit), await visit.form())
    try:
        made = (await visit.send("POST", "/v1/keys", sheet.document())).document
    except RefusedError as error:
        return visit.page("key_add.html", error.status, sheet=sheet.refused(error))
    return _created(visit, made, "was made")


async def _ask_to_rotate(visit: Visit) -> Response:
    return visit.page("key_rotate.html", key=await _found(visit), sheet=Sheet.blank(_ROTATION))


async def _rotate(visit: Visit) -> Response:
    sheet = Sheet.filled(_ROTATION, await visit.form())
    try:
        path = f"/v1/keys/{visit.request.path_params['name']}/rotate"
        made = (await visit.send("POST", path, sheet.document())).document
    except RefusedError as error:
        return visit.page("key_rotate.html", error.status, key=await _found(visit), sheet=sheet.refused(error))
    return _created(visit, made, "replaces the one before")


def _created(visit: Visit, made: Any, what: str) -> Response:
    """Return the only page with the secret, which neither the manager nor the browser keeps."""
    (key,) = key_views([made["key"]], time.time() * 1000)
    return visit.page("key_made.html", 201, key=key, secret=made["secret"], what=what)


async def _revoking(visit: Visit) -> Question:
    key = await _found(visit)
    is_own = key.key_id == visit.visitor.principal.key_id
    return Question(
        title=f"Revoke the key of {key.name}",
        consequences=(
            "It ends at once: requests with it are rejected, and engines that have it compute everything themselves.",
            "It cannot be brought back. To replace it without a gap, rotate it instead.",
            *(["It is the key that you are signed in with."] if is_own else []),
        ),
        button="Revoke it",
        back=_LIST,
        name=key.name,
    )


async def _revoke(visit: Visit) -> Response:
    key = await _found(visit)
    await visit.send("DELETE", f"/v1/keys/{visit.request.path_params['name']}")
    return visit.back(_LIST, f"A key of {key.name} was revoked.")


async def _found(visit: Visit) -> KeyView:
    """Raises RefusedError: there is no such key."""
    document = await visit.get(f"/v1/keys/{visit.request.path_params['name']}")
    return key_views([document], time.time() * 1000)[0]


ROUTES: Final[Routes] = (
    ("GET", _LIST, _list),
    ("GET", _ADD, _ask_to_add),
    ("POST", _ADD, _add),
    ("GET", f"{_ONE}/rotate", _ask_to_rotate),
    ("POST", f"{_ONE}/rotate", _rotate),
    *confirmed_routes(f"{_ONE}/revoke", _revoking, _revoke),
)

# The visitor itself.


async def _show(visit: Visit) -> Response:
    document = await visit.get("/v1/whoami")
    key = document.get("key")
    found = key_views([key], time.time() * 1000)[0] if key else None
    return visit.page("myself.html", is_required=document["is_required"], key=found)


WHOAMI_ROUTES: Final[Routes] = (("GET", "/console/me", _show),)
