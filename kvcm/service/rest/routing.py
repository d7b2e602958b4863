"""Routes of resources: reading requests strictly, entity tags and preconditions, answers and problems."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NoReturn

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvcm.cache.instance_cache import batches
from kvcm.service.rejections import MEDIA_TYPE, FieldError, Problem, ProblemError, RejectedError, problem_of_refusal

__all__ = [
    "MERGE_PATCH",
    "RECEIVED",
    "add_route",
    "answer",
    "answer_item",
    "answer_problem",
    "check_preconditions",
    "etag_of",
    "is_known",
    "not_found",
]

# Entity tags: the state of a resource that a client has read, so that it does not overwrite a newer one (RFC 9110, 13).

_TAG = re.compile(r'(W/)?("[\x21\x23-\x7e\x80-\xff]*")')


def etag_of(item: Any, version: int | None = None) -> str:
    """Return the tag of a representation, with its version in front if it has one."""
    digest = sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:24]
    return f'"{digest}"' if version is None else f'"{version}-{digest}"'


def check_preconditions(headers: Headers, etag: str | None) -> None:
    """Refuse a change of a state other than that of the client's precondition.

    Args:
        headers: of the request.
        etag: of the stored state, None for no state.

    Raises:
        ProblemError: 412.
    """
    wanted = _joined(headers, "if-match")
    if wanted is not None and (etag is None or (wanted != "*" and etag not in _strong(wanted))):
        raise _failed("If-Match", wanted, etag)
    unwanted = _joined(headers, "if-none-match")
    if unwanted is not None and etag is not None and (unwanted == "*" or etag in _any(unwanted)):
        raise _failed("If-None-Match", unwanted, etag)


def is_known(headers: Headers, etag: str) -> bool:
    """Return whether the client has a state already."""
    known = _joined(headers, "if-none-match")
    return known is not None and (known == "*" or etag in _any(known))


def _joined(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    return ",".join(values).strip() if values else None


def _strong(text: str) -> set[str]:
    return {tag for weak, tag in _TAG.findall(text) if not weak}


def _any(text: str) -> set[str]:
    return {tag for _, tag in _TAG.findall(text)}


def _failed(name: str, value: str, etag: str | None) -> ProblemError:
    state = "nothing is stored under this name" if etag is None else f"the stored state has the tag {etag}"
    return ProblemError(Problem(412, f"{name} is {value[:200]!r}, but {state}: read it again"))


# Requests and answers.

MERGE_PATCH: Final = "application/merge-patch+json"
RECEIVED: Final = "kvcm.received"
"""Key of a scope whose value, if present, is a list: it gets the answer's values, and the answer has no body then."""
_log = structlog.get_logger("kvcm.service")
_MAX_SHOWN_ERRORS: Final = 20
_ENCODE_BATCH: Final = 32  # some milliseconds for the longest entries, those of histories
_MAX_SHOWN_CHARACTERS: Final = 80
_MAX_SIGNS: Final = {b"{": 16_384, b":": 65_536, b",": 262_144}  # a body with more is an attack on the parser
_MAX_SHOWN_NUMBER: Final = 1 << 64
_SECRET: Final = {"old_password", "password", "secret"}
_ALWAYS: Final = (400, 401, 403, 429, 500, 503)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _StrictRequest(Request):
    """A request whose body is strict JSON: readers disagree about anything else."""

    async def json(self) -> Any:
        """Return the body's values.

        Raises:
            JSONDecodeError: it is no JSON, a key is given twice, or a number is NaN or infinite.
        """
        body = await self.body()
        for sign, most in _MAX_SIGNS.items():
            if body.count(sign) > most:
                raise json.JSONDecodeError(f"it has more than {most} {sign.decode()!r}", "", 0)
        try:
            return json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError:
            raise
        except RecursionError:
            raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
        except ValueError as error:  # no UTF-8, or a number of thousands of digits
            raise json.JSONDecodeError(str(error), "", 0) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise json.JSONDecodeError(f"the key {counts.most_common(1)[0][0]!r:.80} is given twice", "", 0)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no JSON number", "", 0)


class ProblemRoute(APIRoute):
    """A route whose errors are problems, and whose bodies are JSON."""

    def get_route_handler(self) -> Handler:
        """Return the handler of requests."""
        handle = super().get_route_handler()
        media = {"application/json"} | ({MERGE_PATCH} if "PATCH" in (self.methods or ()) else set())
        has_body, has_query = self.body_field is not None, bool(self.dependant.query_params)

        async def handle_safely(request: Request) -> Response:
            try:
                if not has_query:
                    _refuse_query(request)
                if has_body:
                    _check_media_type(request, media)
                response = await handle(_StrictRequest(request.scope, request.receive))
            except ProblemError as error:
                return answer_problem(request, error.problem)
            except RejectedError as error:
                return answer_problem(request, problem_of_refusal(error))
            except RequestValidationError as error:
                return answer_problem(request, _problem_of_fields(error.errors()))
            except HTTPException:
                raise
            except Exception:
                _log.exception("failed", resource=self.path)
                return answer_problem(request, Problem(500, "the manager failed to answer; its log has the reason"))
            _add_state_headers(request, response)
            return response

        return handle_safely


def add_route(
    router: APIRouter,
    method: str,
    path: str,
    endpoint: Callable[..., Any],
    model: Any = None,
    status: int = 200,
    problems: Sequence[int] = (),
    media: str = "",
) -> None:
    """Add a route; its documentation is the endpoint's docstring, and its operation id the endpoint's name.

    `media` is the type of an answer that is no JSON.
    """
    first, *rest = endpoint.__name__.split("_")
    statuses = {*_ALWAYS, *problems, *((413, 415) if method in {"PUT", "PATCH", "POST"} else ())}
    responses: dict[int | str, dict[str, Any]] = {code: {"description": ""} for code in sorted(statuses)}
    if media:
        responses[status] = {"description": "The answer.", "content": {media: {"schema": {"type": "string"}}}}
    router.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_model=model,
        status_code=status,
        response_description="It was done." if model is None else "The answer.",
        operation_id=first + "".join(word.capitalize() for word in rest),
        responses=responses,  # those of problems are described where the document is completed
        response_class=Response if model is None else _Json,
    )


class _Json(JSONResponse):
    """JSON in ASCII. It is encoded when it is sent, with pauses, or not at all: the console, in the same process,
    receives the values."""

    def render(self, content: Any) -> bytes:
        """Keep the content for later."""
        self._content = content
        return b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, or append it to the list under `RECEIVED`."""
        received = scope.get(RECEIVED)
        if received is None:
            self.body = (await _encode(self._content)).encode()
            self.headers["content-length"] = str(len(self.body))
        else:
            received.append(self._content)
        await super().__call__(scope, receive, send)


async def _encode(content: Any) -> str:
    """Return a value as JSON; other tasks have turns between the entries of its lists."""
    if not isinstance(content, dict):
        return json.dumps(content)
    return "{" + ", ".join([f"{json.dumps(name)}: {await _value(value)}" for name, value in content.items()]) + "}"


async def _value(value: Any) -> str:
    if not isinstance(value, list) or len(value) <= _ENCODE_BATCH:
        return json.dumps(value)
    parts = []
    for batch in batches(value, _ENCODE_BATCH):
        parts.append(json.dumps(batch)[1:-1])
        await asyncio.sleep(0)
    return f"[{', '.join(parts)}]"


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer with a JSON body."""
    return _Json(content, status, headers)


def answer_item(
    request: Request, item: Any, etag: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an entity with its tag, or 304 if the client has that state."""
    tagged = {"etag": etag, **(headers or {})}
    if request.method == "GET" and is_known(request.headers, etag):
        return Response(status_code=304, headers=tagged)
    return answer(item, status, tagged)


def answer_problem(request: Request, problem: Problem) -> Response:
    """Return an error."""
    request_id = problem.request_id or getattr(request.state, "request_id", "")
    response = Response(problem._replace(request_id=request_id).body(), problem.status, media_type=MEDIA_TYPE)
    for name, value in problem.headers:
        response.headers.append(name, value)
    _add_state_headers(request, response)
    return response


def not_found(what: str, name: str) -> ProblemError:
    """Return the error of an entity that does not exist."""
    return ProblemError(Problem(404, f"{what} {name!r} does not exist"))


def _add_state_headers(request: Request, response: Response) -> None:
    """Add the headers with the request id and the warning of a call."""
    for key, name in (("request_id", "x-request-id"), ("warning", "x-kvcm-warning")):
        text = getattr(request.state, key, "")
        if text:
            printable = "".join(letter if letter.isprintable() else "?" for letter in text)[:500]
            response.headers[name] = printable.encode("latin-1", "replace").decode("latin-1")
    response.headers["cache-control"] = "no-store" if "etag" not in response.headers else "no-cache"


def _check_media_type(request: Request, allowed: set[str]) -> None:
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() not in allowed:
        error = FieldError("header.content-type", given[:_MAX_SHOWN_CHARACTERS], " or ".join(sorted(allowed)))
        raise ProblemError(Problem(415, f"content-type is {given[:80]!r}, must be {error.allowed}", errors=[error]))


def _refuse_query(request: Request) -> None:
    """Refuse parameters that would be ignored: with `dry_run`, say, a client wants no change."""
    if request.query_params:
        errors = [FieldError(f"query.{name[:80]}", None, "no parameter") for name in request.query_params]
        raise ProblemError(Problem(400, "there are no query parameters here", errors=errors[:_MAX_SHOWN_ERRORS]))


def _problem_of_fields(errors: Sequence[Any]) -> Problem:
    """Return the problem of a request that violates its schema, from pydantic's errors."""
    shown = [_field_error(error) for error in errors[:_MAX_SHOWN_ERRORS]]
    first = shown[0]
    detail = f"{first.field}: {first.allowed}" + (f"; and {len(errors) - 1} more" if len(errors) > 1 else "")
    return Problem(400, detail, "INVALID_ARGUMENT", errors=shown)


def _field_error(error: Mapping[str, Any]) -> FieldError:
    most = _MAX_SHOWN_CHARACTERS  # of a name, which may be one that the client made up
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:most]}" for part in error["loc"])[1:]
    is_absent = error["type"] in {"missing", "json_invalid"}
    is_secret = bool(_SECRET & {str(part) for part in error["loc"]})
    reason = str(error["ctx"]["error"]) if error["type"] in {"json_invalid", "value_error"} else error["msg"]
    return FieldError(path, None if is_absent or is_secret else _shown(error["input"]), reason)


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_SHOWN_CHARACTERS]
    if isinstance(value, int | float | None):
        return value if -_MAX_SHOWN_NUMBER < (value or 0) < _MAX_SHOWN_NUMBER else "a number"
    return "an array" if isinstance(value, list) else "an object"
