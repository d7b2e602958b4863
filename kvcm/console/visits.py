"""One request for a page: who asks, what it sent, and how it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kvcm.console.browsers import is_encrypted
from kvcm.console.menu import menu_of
from kvcm.console.rendering import render
from kvcm.console.resources import Answer, ResourceClient
from kvcm.model.principals import Principal, Verb
from kvcm.service.rest.names import decoded_name

__all__ = ["Form", "Page", "Visit", "Visitor"]

Form = Mapping[str, str]
"""Fields of a form by name; of a name that came several times the values stand on lines of their own."""

_MOST_FIELDS: Final = 1000
_ROOT: Final = "/console/"
_SAID: Final = "kvcm_said"
_MOST_SAID: Final = 300  # characters, which become twelve in a cookie at most: browsers keep 4096


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks.

    Attributes:
        principal: what it may do.
        is_required: whether anybody is asked who he is.
    """

    principal: Principal
    is_required: bool

    @property
    def name(self) -> str:
        """Its name, "" where nobody is asked."""
        return self.principal.account or self.principal.name

    @property
    def menu(self) -> list[tuple[str, str]]:
        """Pages that it may see: paths and names."""
        return menu_of(self)

    @property
    def may_operate(self) -> bool:
        """Whether it may switch storages, drain them and start tasks."""
        return not self.is_required or (Verb.OPERATE in self.principal.verbs and self.principal.has_all_groups)

    @property
    def may_administer(self) -> bool:
        """Whether it may change what is configured."""
        return not self.is_required or (Verb.ADMINISTER in self.principal.verbs and self.principal.has_all_groups)

    @property
    def sees_everything(self) -> bool:
        """Whether it may look at what concerns the whole deployment: storages, tasks, managers."""
        return not self.is_required or (Verb.VIEW in self.principal.verbs and self.principal.has_all_groups)

    def administers(self, group: str) -> bool:
        """Whether it may remove instances of a group."""
        return not self.is_required or (Verb.ADMINISTER in self.principal.verbs and self.principal.covers(group))

    @property
    def may_view(self) -> bool:
        """Whether it may look at all."""
        return not self.is_required or Verb.VIEW in self.principal.verbs


class Page(HTMLResponse):
    """A page that is yet to be written: of many groups that takes so long that a thread does it.

    Args:
        template: of it.
        status: of HTTP.
        context: what the template shows.
    """

    def __init__(self, template: str, status: int, context: Mapping[str, Any]) -> None:
        super().__init__(None, status)
        self._template, self._context = template, context

    async def write(self) -> None:
        """Write it, so that it can be sent."""
        self.body = (await asyncio.to_thread(render, self._template, **self._context)).encode()
        self.headers["content-length"] = str(len(self.body))


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page.

    Attributes:
        request: that came; its body was read.
        visitor: who asks.
        resources: asked as the visitor.
        version: of the manager.
        recognise: returns who has a key; raises TurnedAwayError where nobody does.
    """

    request: Request
    visitor: Visitor
    resources: ResourceClient
    version: str
    recognise: Callable[[str], Principal]

    def name(self, part: str = "name") -> str:
        """Return the name that a component of the path stands for; "" is nothing's name."""
        try:
            return decoded_name(self.request.path_params[part])
        except ValueError:
            return ""

    def query(self, name: str) -> str:
        """Return a parameter of the query, "" where there is none."""
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
        """Return the fields that were sent.

        Raises:
            HTTPException: they are too many.
        """
        body = (await self.request.body()).decode(errors="replace")
        try:
            pairs = await asyncio.to_thread(parse_qsl, body, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise HTTPException(400, f"A form has {_MOST_FIELDS} fields at most.") from None
        fields: dict[str, str] = {}
        for name, value in pairs:
            text = value.replace("\r\n", "\n")
            fields[name] = f"{fields[name]}\n{text}" if name in fields else text
        return fields

    def page(self, template: str, status: int = 200, **context: Any) -> Page:
        """Return a page."""
        shown = {"visit": self, "visitor": self.visitor, "here": self.request.url.path, "version": self.version}
        is_region = "hx-request" in self.request.headers  # of a page that is there already
        said = "" if is_region else unquote(self.request.cookies.get(_SAID, ""))
        response = Page(template, status, {**shown, "said": said, **context})
        if said:
            response.delete_cookie(_SAID, path=_ROOT, httponly=True, samesite="strict")
        return response

    def fault(self, status: int, detail: str) -> Page:
        """Return a page that says what did not work, and what to do."""
        return self.page("fault.html", status, code=status, detail=detail)

    def back(self, path: str, said: str = "") -> Response:
        """Return that something was done: the browser goes on to a page, which says what.

        The words are no part of the address: nobody else can make a link that has the manager say something.

        Args:
            path: of that page.
            said: one sentence.
        """
        response = RedirectResponse(path, 303)
        if said:
            secure = is_encrypted(self.request.url.scheme, self.request.headers)
            kept = quote(said[:_MOST_SAID], safe="")
            response.set_cookie(_SAID, kept, 60, path=_ROOT, secure=secure, httponly=True, samesite="strict")
        return response
