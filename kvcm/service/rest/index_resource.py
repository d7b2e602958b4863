"""The index API (RFC 1403) on both HTTP ports: /register, /unregister, /query, /query_by_hash, and three lists.

Each request becomes one of the calls of ResidencyService, with the admission, permissions, metrics and logs of calls.
Unlike the resources under /v1 it has no document, and errors are those of the dialects: {error, reason, field, index},
in the encoding of the request. It is made without the web framework, whose import would keep a router's first query
waiting.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import structlog

from kvcm.model.errors import ErrorCode
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.residency.index_dialects import (
    Dialect,
    Encoding,
    ErrorReason,
    Fields,
    Query,
    RequestError,
    dialect_named,
    encode,
    encoding_of,
    error_answer,
    global_view_answer,
    group_of_tenant,
    hash_query_of,
    query_answer,
    read_fields,
    registered_answer,
    registration_of,
    removal_of,
    removed_answer,
    services_answer,
    token_query_of,
    workers_answer,
)
from kvcm.service.calls import LOCAL, Arrival, Call, Caller
from kvcm.service.http_server import ARRIVAL, Headers, Receive, Send
from kvcm.service.rejections import Problem, RejectedError, problem_of_code
from kvcm.service.request_limits import BodyReader, RequestLimits

__all__ = ["IndexApp"]

_log = structlog.get_logger("kvcm.service")
_TRACE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_SERVICE: Final = "kvcm.v1.ResidencyService"
_MOST_SHOWN: Final = 2000


class _Answer(NamedTuple):
    status: int
    content: Any
    headers: Headers = []  # noqa: RUF012 - never changed


class _RefusedError(Exception):
    """A call was refused."""

    def __init__(self, code: ErrorCode, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.code = code
        self.problem = problem


class _Request(NamedTuple):
    """A request whose body was read.

    Attributes:
        path: of it.
        parameters: of its query.
        headers: by lower-case name.
        arrival: how it came.
        body: of it.
        encoding: of body and answer.
    """

    path: str
    parameters: Mapping[str, list[str]]
    headers: Mapping[bytes, bytes]
    arrival: Arrival
    body: bytes
    encoding: Encoding

    def parameter(self, name: str) -> str:
        return self.parameters.get(name, [""])[0]


class IndexApp:
    """Answers requests of the index API. The transport has admitted them, and read and limited their bodies.

    Args:
        calls: of engines.
        caller: runs them.
        bodies: decodes large bodies beside other requests.
        limits: of keys and tokens.
        dialect: of queries that do not say theirs.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        caller: Caller,
        bodies: BodyReader,
        limits: RequestLimits,
        *,
        dialect: Dialect = Dialect.CONDUCTOR,
    ) -> None:
        self._calls = {call.name: call for call in calls if call.service == _SERVICE}
        self._caller = caller
        self._bodies = bodies
        self._limits = limits
        self._dialect = dialect
        self._routes: Mapping[str, tuple[str, Callable[[_Request], Awaitable[_Answer]]]] = {
            "/register": ("POST", self._register),
            "/unregister": ("POST", self._unregister),
            "/query": ("POST", self._query),
            "/query_by_hash": ("POST", self._query_by_hash),
            "/services": ("GET", self._services),
            "/workers": ("GET", self._workers),
            "/global_view": ("GET", self._global_view),
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = dict(scope["headers"])
        encoding = _answer_encoding(headers)
        wanted, handler = self._routes[scope["path"]]
        if scope["method"] != wanted and (scope["method"], wanted) != ("HEAD", "GET"):
            refusal = _Answer(405, {"error": f"{scope['method'][:16]} is not allowed here, {wanted} is"})
            await _send(send, refusal._replace(headers=[(b"allow", wanted.encode())]), encoding)
            return
        body = (await receive()).get("body", b"")
        try:
            parameters = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16)
        except ValueError:
            await _send(send, _Answer(400, {"error": "there are more than 16 query parameters"}), encoding)
            return
        request = _Request(scope["path"], parameters, headers, scope.get(ARRIVAL, LOCAL), body=body, encoding=encoding)
        await _send(send, await self._answer(handler, request), encoding)

    def call_of(self, path: str) -> Call:
        """Return the call that requests of a path become."""
        return self._calls[_CALLS[path]]

    async def refuse(self, scope: MutableMapping[str, Any], send: Send, problem: Problem) -> None:
        """Refuse a request that is not read."""
        await _send(send, _problem_answer(problem), _answer_encoding(dict(scope["headers"])))

    async def _answer(self, handler: Callable[[_Request], Awaitable[_Answer]], request: _Request) -> _Answer:
        try:
            return await handler(request)
        except RequestError as error:
            return _Answer(400, error_answer(error))
        except RejectedError as error:
            headers = [(name.encode(), value.encode()) for name, value in error.headers]
            return _Answer(error.http_status, {"error": str(error), "reason": error.reason}, headers)
        except _RefusedError as error:
            return _problem_answer(error.problem)
        except Exception:
            _log.exception("failed", resource=request.path)
            return _Answer(500, {"error": "the manager failed to answer; its log has the reason"})

    # Queries.

    async def _query(self, request: _Request) -> _Answer:
        return await self._match(request, token_query_of)

    async def _query_by_hash(self, request: _Request) -> _Answer:
        return await self._match(request, hash_query_of)

    async def _match(self, request: _Request, query_of: Callable[[Fields, Dialect | None, Dialect], Query]) -> _Answer:
        named = dialect_named(request.parameter("dialect"))

        def read(body: bytes) -> tuple[Query, Any]:
            query = query_of(read_fields(body, request.encoding, self._limits.max_tokens), named, self._dialect)
            return query, _match_request(query)

        encoding_of(request.headers.get(b"content-type", b"").decode("latin-1"))
        query, message = await self._bodies.read(request.body, read)
        try:
            ranks = (await self._run(request, message)).ranks
        except _RefusedError as error:
            if error.code is ErrorCode.INSTANCE_NOT_EXIST:
                if query.dialect is Dialect.DYNAMO:
                    return _Answer(404, {"error": str(error)})
                return _Answer(200, query_answer(query, ()))
            if error.code is ErrorCode.INVALID_ARGUMENT and query.dialect is not Dialect.DYNAMO:
                raise RequestError(str(error), ErrorReason.OUT_OF_RANGE) from None
            raise
        return _Answer(200, query_answer(query, ranks))

    # Registrations.

    async def _register(self, request: _Request) -> _Answer:
        registration = registration_of(self._fields(request))
        publisher = pb.Publisher(
            engine=str(registration.instance_id),
            rank=registration.rank,
            model_name=registration.model_name,
            lora_name=registration.lora_name,
            block_size=registration.block_size,
            endpoint=registration.endpoint,
            replay_endpoint=registration.replay_endpoint,
            type=registration.type,
            hash_profile=registration.hash_profile,
        )
        message = pb.RegisterPublisherRequest(instance_group=registration.group, publisher=publisher)
        try:
            await self._run(request, message)
        except _RefusedError as error:
            codes = {ErrorCode.INVALID_ARGUMENT, ErrorCode.DUPLICATE_ENTITY}
            if error.code in codes and registration.dialect is Dialect.CONDUCTOR:
                raise RequestError(str(error), ErrorReason.INVALID_REGISTRATION) from None
            raise
        return _Answer(*registered_answer(registration))

    async def _unregister(self, request: _Request) -> _Answer:
        removal = removal_of(self._fields(request))
        message = pb.UnregisterPublisherRequest(
            instance_group=removal.group, engine=removal.engine, rank=removal.rank, model_name=removal.model_name
        )
        try:
            removed = await self._run(request, message)
        except _RefusedError as error:
            if error.code is ErrorCode.INVALID_ARGUMENT and removal.dialect is Dialect.CONDUCTOR:
                raise RequestError(str(error), ErrorReason.INVALID_REGISTRATION) from None
            raise
        return _Answer(*removed_answer(removal, removed.publishers))

    def _fields(self, request: _Request) -> Fields:
        encoding_of(request.headers.get(b"content-type", b"").decode("latin-1"))
        if len(request.body) > _MOST_REGISTRATION_BYTES:
            text = f"the body has {len(request.body)} bytes, at most {_MOST_REGISTRATION_BYTES} are allowed"
            raise RequestError(text, ErrorReason.OUT_OF_RANGE)
        return read_fields(request.body, request.encoding, 0)

    # Lists.

    async def _services(self, request: _Request) -> _Answer:
        return _Answer(200, services_answer((await self._describe(request)).publishers))

    async def _workers(self, request: _Request) -> _Answer:
        index = await self._describe(request)
        return _Answer(200, workers_answer(index.publishers, index.contexts))

    async def _global_view(self, request: _Request) -> _Answer:
        index = await self._describe(request)
        return _Answer(200, global_view_answer(index.publishers, index.contexts))

    async def _describe(self, request: _Request) -> Any:
        tenant = request.parameter("tenant_id") or request.parameter("routing_group")
        message = pb.DescribeIndexRequest(
            instance_group=group_of_tenant(tenant), model_name=request.parameter("model_name")
        )
        return await self._run(request, message)

    # The call behind a request.

    async def _run(self, request: _Request, message: Any) -> Any:
        """Run the call of the request's path, and return its answer.

        Raises:
            _RefusedError: its outcome is not OK.
            RejectedError: its rate, its queue or access rejects it.
        """
        call = self.call_of(request.path)
        given = request.headers.get(b"x-request-id", b"").decode("latin-1")
        message.trace_id = given if _TRACE_ID.fullmatch(given) else "index"
        answer: Any = (await self._caller.answer(call, message, request.arrival)).complete()
        status = answer.header.status
        if status.code != ErrorCode.OK:
            code = ErrorCode(status.code)
            raise _RefusedError(code, problem_of_code(code, status.message, answer.header.request_id))
        return answer


_MOST_REGISTRATION_BYTES: Final = 1 << 16
_CALLS: Final[Mapping[str, str]] = {
    "/register": "RegisterPublisher",
    "/unregister": "UnregisterPublisher",
    "/query": "MatchModel",
    "/query_by_hash": "MatchModel",
    "/services": "DescribeIndex",
    "/workers": "DescribeIndex",
    "/global_view": "DescribeIndex",
}


def _match_request(query: Query) -> Any:
    message = pb.MatchModelRequest(
        model_name=query.model_name,
        instance_group=query.group,
        token_ids=query.token_ids,
        block_hashes=query.hashes,
        block_size=query.block_size,
        lora_name=query.lora_name,
        cache_salt=query.cache_salt,
        engine=query.engine,
    )
    if query.lora_id is not None:
        message.lora_id = query.lora_id
    return message


def _answer_encoding(headers: Mapping[bytes, bytes]) -> Encoding:
    """Return the encoding of an answer: that of the request, or for a request without a body that which it accepts."""
    given = (headers.get(b"content-type") or headers.get(b"accept") or b"").decode("latin-1")
    try:
        return encoding_of(given)
    except RequestError:
        return Encoding.JSON


def _problem_answer(problem: Problem) -> _Answer:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in problem.headers]
    return _Answer(problem.status, {"error": problem.detail[:_MOST_SHOWN]}, headers)


async def _send(send: Send, answer: _Answer, encoding: Encoding) -> None:
    body = encode(answer.content, encoding)
    headers = [
        *answer.headers,
        (b"content-type", encoding.value.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
