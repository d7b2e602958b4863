"""The console's client of the resources under /v1, inside the process and with the visitor's principal.

Permissions, limits, the audit log and metrics hold for the console as for every other client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from kvcm.service.calls import Arrival
from kvcm.service.http_server import ARRIVAL, Resources
from kvcm.service.rest.routing import RECEIVED

__all__ = ["Answer", "RefusedError", "ResourceClient"]

_TRACE_ID = b"console"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a resource.

    Attributes:
        document: decoded JSON, None without a body.
        headers: by lower-case name.
    """

    document: Any
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        """Entity tag of the document, "" for none."""
        return self.headers.get("etag", "")


@dataclass(frozen=True, slots=True)
class _FieldFault:
    """The error of one field.

    Attributes:
        field: path in the request's document, e.g. `quota.capacity`.
        allowed: allowed values.
    """

    field: str
    allowed: str


class RefusedError(Exception):
    """A resource refused a request.

    Attributes:
        status: of HTTP.
        detail: the error and what to do.
        faults: errors of fields.
    """

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.detail = str(problem.get("detail", "the manager gave no reason"))
        self.faults = tuple(
            _FieldFault(str(each["field"]).removeprefix("body."), str(each["allowed"]))
            for each in problem.get("errors", ())
        )
        super().__init__(self.detail)


class ResourceClient:
    """Calls resources for one visitor.

    Args:
        resources: the application that answers.
        arrival: the visitor's transport and principal.
    """

    def __init__(self, resources: Resources, arrival: Arrival) -> None:
        self._resources = resources
        self._arrival = arrival

    async def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Return the answer of a resource.

        Args:
            method: of HTTP.
            path: below `/v1`, percent-encoded, with its query.
            body: sent as JSON, a merge patch with PATCH; None for none.
            headers: further ones, e.g. `if-match`.

        Raises:
            RefusedError: it answers with a problem.
        """
        collected = _Collected()
        received: list[Any] = []
        scope = _scope(method, path, body, headers or {}) | {ARRIVAL: self._arrival, RECEIVED: received}
        await self._resources(scope, _received(b"" if body is None else json.dumps(body).encode()), collected.send)
        document = received[0] if received else json.loads(b"".join(collected.parts) or b"null")
        if collected.status >= 400:
            raise RefusedError(collected.status, document or {})
        return Answer(document, collected.headers)


@dataclass(slots=True)
class _Collected:
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    async def send(self, event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
            self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in event["headers"]}
        elif event["type"] == "http.response.body":
            self.parts.append(event.get("body", b""))


def _scope(method: str, path: str, body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    raw, _, query = path.partition("?")
    sent = {
        b"x-request-id": _TRACE_ID,
        **{name.encode(): value.encode("latin-1", "replace") for name, value in headers.items()},
    }
    if body is not None:
        sent[b"content-type"] = b"application/merge-patch+json" if method == "PATCH" else b"application/json"
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw,
        "raw_path": raw.encode("ascii", "replace"),
        "query_string": query.encode("ascii"),
        "root_path": "",
        "headers": [*sent.items()],
        "client": ("console", 0),
        "server": ("console", 0),
    }


def _received(body: bytes) -> Any:
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
