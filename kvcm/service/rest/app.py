"""The resources under /v1 as one ASGI application of the admin port, and their OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kvcm.service.calls import LOCAL, Arrival, Call, Caller
from kvcm.service.http_server import ARRIVAL, Receive, Send
from kvcm.service.rejections import MEDIA_TYPE, Problem, RejectedError, problem_of_refusal
from kvcm.service.rest.account_resource import AccountResource
from kvcm.service.rest.alert_resource import AlertResource
from kvcm.service.rest.calls import CallRunner
from kvcm.service.rest.group_resource import CurveResource, GroupResource, GroupStoreResource
from kvcm.service.rest.instance_resource import ExploreResource, InstanceResource
from kvcm.service.rest.key_resource import KeyResource
from kvcm.service.rest.pin_resource import PinResource
from kvcm.service.rest.residency_resource import ResidencyResource, ScoreResource
from kvcm.service.rest.routing import ProblemRoute, answer, answer_problem
from kvcm.service.rest.session_resource import SessionResource
from kvcm.service.rest.storage_resource import StorageResource
from kvcm.service.rest.task_resource import TaskResource
from kvcm.service.rest.usage_resource import UsageResource

__all__ = ["OPENAPI_PATH", "RESOURCES", "Resource", "RestApp"]

# The OpenAPI document: the framework makes most of it; problems, entity tags and credentials are added here.

OPENAPI_PATH: Final = "/v1/openapi.json"
_DESCRIPTION: Final = (
    "The configuration and the state of a KVCM deployment as resources. Field names are those of the wire messages. "
    "Integers are JSON numbers, those of 64 bits, too; block keys are texts, since they do not fit into the numbers "
    "of many JSON readers. Names in paths are percent-encoded, `/` as `%2F`. Errors are application/problem+json."
)
_Json = dict[str, Any]
_IF_MATCH: Final = ("If-Match", "Only that state is changed: an entity tag of an earlier answer, or `*`.")
_IF_NONE_MATCH: Final = ("If-None-Match", "`*` only creates; an entity tag: that state is not replaced.")
_IF_CHANGED: Final = ("If-None-Match", "An entity tag of an earlier answer: 304 while that is still the state.")
_TRACE: Final = ("X-Request-Id", "Id of the request in logs; the answer's begins with it.")
_ETAG: Final = {"ETag": {"description": "Stands for this state.", "schema": {"type": "string"}}}
_TAGGED: Final = re.compile(r"/v1/(storages|groups|instances|accounts)/\{name\}")
_MEANINGS: Final = {
    400: "A field is missing, malformed or out of range; `errors` names it.",
    401: "Credentials are missing or not valid.",
    403: "The credentials do not allow this.",
    404: "There is no such thing.",
    409: "It contradicts the stored state.",
    412: "The stored state is not the one that the client means.",
    413: "The body is too large.",
    415: "The body is of another content type.",
    429: "The client asks for more than it may.",
    500: "The manager failed.",
    502: "A store or a storage failed.",
    503: "The manager is starting, stopping or overloaded; `Retry-After` says when to try again.",
    507: "A quota or a limit is reached.",
}
_PROBLEM: Final[_Json] = {
    "type": "object",
    "description": "An error, and what to do (RFC 9457).",
    "required": ["type", "title", "status", "detail", "code", "request_id"],
    "properties": {
        "type": {"type": "string", "description": "A urn with the outcome code, or about:blank."},
        "title": {"type": "string", "description": "The phrase of the status."},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string", "description": "The error and what to do; not meant to be parsed."},
        "code": {"type": "string", "description": "Outcome code of the call behind it; empty where none was run."},
        "request_id": {"type": "string", "description": "The call in logs; empty where none was run."},
        "errors": {
            "type": "array",
            "description": "The fields that are wrong.",
            "items": {
                "type": "object",
                "required": ["field", "value", "allowed"],
                "properties": {
                    "field": {"type": "string", "description": "Its path in the request."},
                    "value": {"description": "What was given, shortened; null where nothing was, or it is secret."},
                    "allowed": {"type": "string", "description": "What may stand there."},
                },
            },
        },
    },
}


def _complete_document(document: _Json) -> _Json:
    """Return the framework's document with problems, entity tags, conditions and credentials."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = _PROBLEM
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where they are required."}
    }
    document["security"] = [{"bearer": []}, {}]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            _complete(path, method, operation)
    exact: _Json = _exact(document)
    return exact


def _exact(value: Any) -> Any:
    """Return limits as the integers that they are: the framework makes floats of them, which have fewer digits."""
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_exact(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _complete(path: str, method: str, operation: _Json) -> None:
    operation["tags"] = [path.split("/")[2]]
    responses = operation["responses"]
    responses.pop("422", None)
    for status in [each for each in responses if int(each) >= 400]:
        responses[status] = _problem(int(status))
    if method == "put" and "200" in responses:
        responses["201"] = {**responses["200"], "description": "It was created."}
    if path == "/v1/tasks" and method == "post":
        responses["200"] = {**responses["202"], "description": "It was carried out."}
    _add_conditions(path, method, operation)
    _add_header(operation, *_TRACE)


def _add_conditions(path: str, method: str, operation: _Json) -> None:
    responses = operation["responses"]
    if method == "get" and _TAGGED.fullmatch(path):
        responses["304"] = {"description": "The client has this state already."}
        _add_header(operation, *_IF_CHANGED)
    if "412" in responses:
        _add_header(operation, *_IF_MATCH)
        if method in {"put", "patch"}:
            _add_header(operation, *_IF_NONE_MATCH)
    if method in {"get", "put", "patch"} and _TAGGED.fullmatch(path):
        for status in {"200", "201"} & set(responses):
            responses[status] = {**responses[status], "headers": _ETAG}


def _problem(status: int) -> _Json:
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: _Json = {"description": _MEANINGS.get(status, HTTPStatus(status).phrase), "content": content}
    if status in {429, 503}:
        found["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return found


def _add_header(operation: _Json, name: str, description: str) -> None:
    parameter = {"name": name, "in": "header", "required": False, "description": description}
    operation.setdefault("parameters", []).append({**parameter, "schema": {"type": "string"}})


# The application.

RESOURCES: Final = (
    StorageResource,
    GroupResource,
    InstanceResource,
    AccountResource,
    KeyResource,
    UsageResource,
    TaskResource,
    PinResource,
    SessionResource,
    ExploreResource,
    CurveResource,
    GroupStoreResource,
    AlertResource,
    ResidencyResource,
    ScoreResource,
)
"""Those of the admin port."""


class Resource(Protocol):
    """A resource under /v1."""

    def routes(self, router: APIRouter) -> None:
        """Add its routes."""


class RestApp:
    """Answers requests for /v1. The transport has read and limited their bodies, and put `ARRIVAL` in their scopes.

    Args:
        calls: of both planes.
        caller: runs them.
        version: of the manager.
        others: resources without calls.
        kinds: resources over calls.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        caller: Caller,
        version: str,
        others: Iterable[Resource] = (),
        kinds: Iterable[Callable[[CallRunner], Resource]] = RESOURCES,
    ) -> None:
        runner = CallRunner(calls, caller)
        app = FastAPI(
            title="KVCM",
            version=version,
            description=_DESCRIPTION,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            separate_input_output_schemas=False,
        )
        app.router.route_class = ProblemRoute
        for resource in (*(kind(runner) for kind in kinds), *others):
            resource.routes(app.router)
        app.add_exception_handler(HTTPException, self._refuse)
        self.openapi = _complete_document(app.openapi())
        app.add_api_route(OPENAPI_PATH, self._document, methods=["GET"], include_in_schema=False)
        self._routes = list(app.router.routes)
        self._app = app
        self._access = caller.access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request. Paths are matched percent-encoded; HEAD is GET, and the server leaves the body out."""
        raw = scope["raw_path"].decode("ascii", "replace")
        arrival: Arrival = scope.get(ARRIVAL, LOCAL)
        try:
            self._access.check_page(raw, arrival.principal)  # the transport did, but the console calls without it
        except RejectedError as error:
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
        """Return the methods that a path allows."""
        found: set[str] = set()
        for route in self._routes:
            match, _ = route.matches(request.scope)
            if match is not Match.NONE:
                found |= set(getattr(route, "methods", None) or ())
        if "GET" in found:
            found.add("HEAD")
        return ", ".join(sorted(found))
