"""The resources as one ASGI application, which the admin port hands requests for /v1 to."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kvcm.service.asgi import Receive, Send
from kvcm.service.calls import LOCAL, Arrival, Call, Caller
from kvcm.service.http_app import ARRIVAL
from kvcm.service.rest.account_resource import AccountResource
from kvcm.service.rest.alert_resource import AlertResource
from kvcm.service.rest.call_book import CallBook
from kvcm.service.rest.curve_resource import CurveResource
from kvcm.service.rest.explore_resource import ExploreResource
from kvcm.service.rest.group_resource import GroupResource
from kvcm.service.rest.instance_resource import InstanceResource
from kvcm.service.rest.key_resource import KeyResource
from kvcm.service.rest.openapi import DESCRIPTION, OPENAPI_PATH, completed
from kvcm.service.rest.pin_resource import PinResource
from kvcm.service.rest.problem import Problem, problem_of_refusal
from kvcm.service.rest.routing import ProblemRoute, answer, answer_problem
from kvcm.service.rest.session_resource import SessionResource
from kvcm.service.rest.storage_resource import StorageResource
from kvcm.service.rest.task_resource import TaskResource
from kvcm.service.rest.usage_resource import UsageResource
from kvcm.service.turned_away import TurnedAwayError

__all__ = ["Resource", "RestApp"]

_RESOURCES = (
    *(StorageResource, GroupResource, InstanceResource, AccountResource, KeyResource, UsageResource, TaskResource),
    *(PinResource, SessionResource, ExploreResource, CurveResource, AlertResource),
)


class Resource(Protocol):
    """Something below /v1."""

    def routes(self, router: APIRouter) -> None:
        """Add its routes."""


class RestApp:
    """Answers requests for /v1. Their bodies have been read and limited, and `ARRIVAL` stands in their scopes.

    Args:
        calls: those that are served, of both planes.
        caller: runs them.
        version: of the manager.
        others: resources that no calls are behind.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        caller: Caller,
        version: str,
        others: Iterable[Resource] = (),
    ) -> None:
        book = CallBook(calls, caller)
        app = FastAPI(
            title="KVCM",
            version=version,
            description=DESCRIPTION,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            separate_input_output_schemas=False,
        )
        app.router.route_class = ProblemRoute
        for resource in (*(made(book) for made in _RESOURCES), *others):
            resource.routes(app.router)
        app.add_exception_handler(HTTPException, self._refuse)
        self.openapi = completed(app.openapi())
        app.add_api_route(OPENAPI_PATH, self._document, methods=["GET"], include_in_schema=False)
        self._routes = list(app.router.routes)
        self._app = app
        self._access = caller.access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request. Paths are matched as they came; HEAD is GET, of which the server sends the head alone."""
        raw = scope["raw_path"].decode("ascii", "replace")
        arrival: Arrival = scope.get(ARRIVAL, LOCAL)
        try:
            self._access.check_page(raw, arrival.principal)  # the console asks without the transport, which did
        except TurnedAwayError as error:
            await answer_problem(Request(scope), problem_of_refusal(error))(scope, receive, send)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._app({**scope, "path": raw, "method": method}, receive, send)

    async def _document(self) -> Response:
        return answer(self.openapi)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = self._methods(request)
            text = f"{request.method} is not allowed here, {allowed} are"
            return answer_problem(request, Problem(405, text, headers=[("allow", allowed)]))
        if error.status_code == 404:
            return answer_problem(
                request, Problem(404, "there is nothing under this path; /v1/openapi.json has them all")
            )
        return answer_problem(request, Problem(error.status_code, str(error.detail)))

    def _methods(self, request: Request) -> str:
        """Return what a path allows."""
        found: set[str] = set()
        for route in self._routes:
            match, _ = route.matches(request.scope)
            if match is not Match.NONE:
                found |= set(getattr(route, "methods", None) or ())
        if "GET" in found:
            found.add("HEAD")
        return ", ".join(sorted(found))
