"""Rejections of requests before any work. They have no header: transports answer in their own way (design.md decision
9).

The answer to a missing permission reveals nothing of the content: neither blocks nor instances.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Final, NamedTuple

from kvcm.model.errors import ErrorCode, KvcmError

__all__ = [
    "MEDIA_TYPE",
    "FieldError",
    "ForbiddenError",
    "Problem",
    "ProblemError",
    "RateLimitedError",
    "RejectedError",
    "UnauthenticatedError",
    "problem_of_code",
    "problem_of_refusal",
]


class RejectedError(Exception):
    """Overload or draining: the client may try again, here or elsewhere.

    Args:
        message: the reason and the remedy.
        reason: one of few words, fit for a label of a metric.
        retry_after_seconds: when to try again, > 0; None for that it is of no use.
    """

    http_status: ClassVar[int] = 503

    def __init__(self, message: str, reason: str, retry_after_seconds: float | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Further headers of the HTTP answer."""
        if self.retry_after_seconds is None:
            return []
        return [("retry-after", str(max(1, math.ceil(self.retry_after_seconds))))]


class RateLimitedError(RejectedError):
    """The client asks for more than it may."""

    http_status = 429


class UnauthenticatedError(RejectedError):
    """The client is not authenticated."""

    http_status = 401

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason, None)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Further headers of the HTTP answer (RFC 6750 section 3)."""
        return [("www-authenticate", 'Bearer realm="kvcm"')]


class ForbiddenError(RejectedError):
    """The client may not do this, or not there."""

    http_status = 403

    def __init__(self, message: str) -> None:
        super().__init__(message, "forbidden", None)


# Errors of resources as RFC 9457 asks for them. Free of the web framework, so that the transport can answer with
# them before the framework sees a request.

MEDIA_TYPE: Final = "application/problem+json"
Headers = Sequence[tuple[str, str]]


class FieldError(NamedTuple):
    """One invalid field.

    Attributes:
        field: its path in the request, e.g. `body.quota.capacity`.
        value: as given, shortened; None for a missing or secret one.
        allowed: what may stand there.
    """

    field: str
    value: Any
    allowed: str


class Problem(NamedTuple):
    """An error answer.

    Attributes:
        status: of HTTP.
        detail: the error and the remedy.
        code: outcome code of the call behind it, "" where no call was run.
        errors: the fields that are wrong.
        request_id: of the call behind it.
        headers: further ones of the answer.
    """

    status: int
    detail: str
    code: str = ""
    errors: Sequence[FieldError] = ()
    request_id: str = ""
    headers: Headers = ()

    def body(self) -> bytes:
        """Return it as JSON."""
        kind = f"urn:kvcm:error:{self.code.lower()}" if self.code else "about:blank"
        shown: dict[str, Any] = {"type": kind, "title": HTTPStatus(self.status).phrase, "status": self.status}
        shown |= {"detail": self.detail, "code": self.code, "request_id": self.request_id}
        if self.errors:
            shown["errors"] = [error._asdict() for error in self.errors]
        return json.dumps(shown).encode()


class ProblemError(Exception):
    """A request for a resource cannot be served."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def problem_of_code(code: ErrorCode, text: str, request_id: str) -> Problem:
    """Return the outcome of a call as an HTTP error."""
    status = _STATUS.get(code, 500)
    headers = [("retry-after", "1")] if status == 503 else []
    return Problem(status, text, code.name, request_id=request_id, headers=headers)


def problem_of_refusal(error: RejectedError) -> Problem:
    """Return the answer to a rejected request."""
    return Problem(error.http_status, str(error), headers=error.headers)


def _errors(kind: type[KvcmError]) -> Iterator[type[KvcmError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _errors(each)


_STATUS: Final = {kind.code: kind.http_status for kind in reversed([*_errors(KvcmError)])}
