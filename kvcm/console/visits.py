"""One request for a page: protection against other sites, templates, the visitor and its menu, the answer."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kvcm.console import charts, formats
from kvcm.console.formats import shown_role
from kvcm.console.resources import Answer, ResourceClient
from kvcm.model.principals import Principal, Verb
from kvcm.registry.secrets import redacted_text
from kvcm.service.rest.conversion import decode_name, encode_name

__all__ = ["Form", "Handler", "Page", "Routes", "Visit", "Visitor", "foreign_request", "is_encrypted", "render"]

# Requests from other sites.
#
# A page of another site must neither make changes here (CSRF) nor read: a change must come from a page of this site, by
# the header `Origin`. While authentication is disabled, a page of another site must also not become one of this site by
# pointing its name to this address (DNS rebinding): then names that others can own are rejected.

_SAFE: Final = {"GET", "HEAD"}
_OWN: Final = {"same-origin", "none", ""}


def foreign_request(method: str, headers: Mapping[str, str], *, is_open: bool) -> str:
    """Return why a request may come from a page of another site, "" if it does not.

    Args:
        method: of HTTP.
        headers: by lower-case name.
        is_open: whether authentication is disabled.
    """
    host = headers.get("host", "")
    if is_open and not _is_local_host(host):
        return f"host is {host[:80]!r}: while no keys are required, open the console by an address or as localhost"
    if not host or _netloc(f"//{host}") != host.lower():
        return f"host is {host[:80]!r}: must be a name or an address, and a port"
    if method in _SAFE:
        return ""
    origin = headers.get("origin", "")
    if _netloc(origin) != host.lower() or headers.get("sec-fetch-site", "") not in _OWN:
        return "what changes something has to come from a page of the console"
    return ""


def is_encrypted(scheme: str, headers: Mapping[str, str]) -> bool:
    """Return whether the browser speaks TLS, also with a proxy in between: only then it keeps secure cookies."""
    return scheme == "https" or headers.get("origin", "").startswith("https://")


def _netloc(address: str) -> str:
    """Return the host and the port of an address, "" without a host or if it is malformed."""
    try:
        return urlsplit(address).netloc.lower()
    except ValueError:
        return ""


def _is_local_host(host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if "." not in name and ":" not in name:
        return bool(name)  # localhost, or the name of a host or service of the own network
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(".localhost") or name == socket.gethostname().lower()
    return True


# Templates and their filters.

_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "ago": lambda at_ms: formats.ago(at_ms, time.time() * 1000),
    "bytes": formats.size,
    "capitalised": formats.capitalised,
    "count": formats.count,
    "duration": formats.duration,
    "moment": formats.moment,
    "percent": formats.percent,
    "rate": formats.rate,
    "redacted": redacted_text,
    "role": shown_role,
    "step": encode_name,
    "storage_kind": formats.storage_kind,
    "words": formats.words,
}


def render(template: str, **context: Any) -> str:
    """Return a page. All values of the context are escaped, except `Markup`."""
    return _environment().get_template(template).render(**context)


@lru_cache(1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvcm.console"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    environment.filters.update(_FILTERS)
    environment.globals.update({"chart": charts.chart, "sparkline": charts.sparkline})
    return environment


# The menu: the pages that a visitor may see.

_ENTRIES: Final[Sequence[tuple[str, str, Callable[[Visitor], bool]]]] = (
    ("/console/", "Overview", lambda visitor: visitor.may_view),
    ("/console/groups", "Groups", lambda visitor: visitor.may_view),
    ("/console/storages", "Storages", lambda visitor: visitor.sees_all_groups),
    ("/console/instances", "Instances", lambda visitor: visitor.may_view),
    ("/console/explorer", "Prefix explorer", lambda visitor: True),
    ("/console/residency", "KV residency", lambda visitor: visitor.may_view or visitor.may_score),
    ("/console/sessions", "Sessions", lambda visitor: visitor.may_view),
    ("/console/tasks", "Tasks", lambda visitor: visitor.sees_all_groups),
    ("/console/managers", "Managers", lambda visitor: visitor.sees_all_groups),
    ("/console/accounts", "Accounts", lambda visitor: visitor.may_operate),
    ("/console/keys", "Keys", lambda visitor: visitor.may_operate),
)


# Visits.

Form = Mapping[str, str]
"""Fields of a form by name; of a name that came several times the values stand on lines of their own."""
_MAX_FIELDS: Final = 1000
_ROOT: Final = "/console/"
_MESSAGES: Final = "kvcm_said"
_MAX_MESSAGES: Final = 300  # characters, which become twelve in a cookie at most: browsers keep 4096


@dataclass(frozen=True, slots=True)
class Visitor:
    """The user of a browser.

    Attributes:
        principal: its principal.
        is_required: whether authentication is required.
    """

    principal: Principal
    is_required: bool

    @property
    def name(self) -> str:
        """Its name, "" without authentication."""
        return self.principal.account or self.principal.name

    @property
    def menu(self) -> list[tuple[str, str]]:
        """Pages that it may see: paths and names."""
        return [(path, name) for path, name, is_for in _ENTRIES if is_for(self)]

    @property
    def may_operate(self) -> bool:
        """Whether it may switch storages, drain them and start tasks."""
        return not self.is_required or (Verb.OPERATE in self.principal.verbs and self.principal.has_all_groups)

    @property
    def may_administer(self) -> bool:
        """Whether it may change the configuration."""
        return not self.is_required or (Verb.ADMINISTER in self.principal.verbs and self.principal.has_all_groups)

    @property
    def sees_all_groups(self) -> bool:
        """Whether it may view pages of the whole deployment: storages, tasks, managers."""
        return not self.is_required or (Verb.VIEW in self.principal.verbs and self.principal.has_all_groups)

    def administers(self, group: str) -> bool:
        """Whether it may remove instances of a group."""
        return not self.is_required or (Verb.ADMINISTER in self.principal.verbs and self.principal.covers(group))

    @property
    def may_view(self) -> bool:
        """Whether it may view pages."""
        return not self.is_required or Verb.VIEW in self.principal.verbs

    @property
    def may_score(self) -> bool:
        """Whether it may ask for the scores of a prompt."""
        return not self.is_required or Verb.SCORE in self.principal.verbs


class Page(HTMLResponse):
    """A page that is rendered later, on a thread: a page of many groups takes long.

    Args:
        template: of it.
        status: of HTTP.
        context: values of the template.
    """

    def __init__(self, template: str, status: int, context: Mapping[str, Any]) -> None:
        super().__init__(None, status)
        self._template, self._context = template, context

    async def write(self) -> None:
        """Render the page, so that it can be sent."""
        self.body = (await asyncio.to_thread(render, self._template, **self._context)).encode()
        self.headers["content-length"] = str(len(self.body))


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page.

    Attributes:
        request: of the browser; its body was read.
        visitor: user of the browser.
        resources: client with the visitor's principal.
        version: of the manager.
        recognise: returns the principal of a key; raises RejectedError if it is not valid.
    """

    request: Request
    visitor: Visitor
    resources: ResourceClient
    version: str
    recognise: Callable[[str], Principal]

    def name(self, part: str = "name") -> str:
        """Return the name in a component of the path, "" if it is malformed."""
        try:
            return decode_name(self.request.path_params[part])
        except ValueError:
            return ""

    def query(self, name: str) -> str:
        """Return a parameter of the query, "" for none."""
        return str(self.request.query_params.get(name, ""))

    async def get(self, path: str) -> Any:
        """Return the document of a resource.

        Raises:
            RefusedError: it answers with a problem.
        """
        return (await self.resources.ask("GET", path)).document

    async def items(self, path: str) -> list[Any]:
        """Return the entries of all pages of a list.

        Raises:
            RefusedError: it answers with a problem.
        """
        found: list[Any] = []
        token: str | None = ""
        sign = "&" if "?" in path else "?"
        while token is not None:
            page = await self.get(
                f"{path}{sign}" + urlencode({"limit": 1000, **({"page_token": token} if token else {})})
            )
            found += page["items"]
            token = page["next_page_token"]
        return found

    async def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Change something through a resource.

        Raises:
            RefusedError: it answers with a problem.
        """
        return await self.resources.ask(method, path, body, headers)

    async def form(self) -> Form:
        """Return the submitted fields.

        Raises:
            HTTPException: there are too many.
        """
        body = (await self.request.body()).decode(errors="replace")
        try:
            pairs = await asyncio.to_thread(parse_qsl, body, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError:
            raise HTTPException(400, f"A form has {_MAX_FIELDS} fields at most.") from None
        fields: dict[str, str] = {}
        for name, value in pairs:
            text = value.replace("\r\n", "\n")
            fields[name] = f"{fields[name]}\n{text}" if name in fields else text
        return fields

    def page(self, template: str, status: int = 200, **context: Any) -> Page:
        """Return a page."""
        shown = {"visit": self, "visitor": self.visitor, "here": self.request.url.path, "version": self.version}
        is_region = "hx-request" in self.request.headers  # htmx replaces a part of the page that is shown
        said = "" if is_region else unquote(self.request.cookies.get(_MESSAGES, ""))
        response = Page(template, status, {**shown, "said": said, **context})
        if said:
            response.delete_cookie(_MESSAGES, path=_ROOT, httponly=True, samesite="strict")
        return response

    def fault(self, status: int, detail: str) -> Page:
        """Return a page with an error, and what to do."""
        return self.page("fault.html", status, code=status, detail=detail)

    def back(self, path: str, said: str = "") -> Response:
        """Redirect to a page after a change, with a message that the page shows.

        The message is no part of the address, so that no link can make the console show a text of its author.

        Args:
            path: of that page.
            said: one sentence.
        """
        response = RedirectResponse(path, 303)
        if said:
            secure = is_encrypted(self.request.url.scheme, self.request.headers)
            kept = quote(said[:_MAX_MESSAGES], safe="")
            response.set_cookie(_MESSAGES, kept, 60, path=_ROOT, secure=secure, httponly=True, samesite="strict")
        return response


Handler = Callable[[Visit], Awaitable[Response]]
Routes = Sequence[tuple[str, str, Handler]]
"""Method, path and handler of each page."""
