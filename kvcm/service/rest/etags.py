"""Entity tags: what a client saw of a resource, so that it does not overwrite what it has not seen (RFC 9110, 13)."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers

from kvcm.service.rest.problem import Problem, ProblemError

__all__ = ["check_preconditions", "etag_of", "has_match", "is_known"]

_TAG = re.compile(r'(W/)?("[\x21\x23-\x7e\x80-\xff]*")')


def etag_of(item: Any, version: int | None = None) -> str:
    """Return the tag of a representation, with its version in front where there is one."""
    digest = sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:24]
    return f'"{digest}"' if version is None else f'"{version}-{digest}"'


def has_match(headers: Headers) -> bool:
    """Return whether the client names the state that it wants to change."""
    return "if-match" in headers


def check_preconditions(headers: Headers, etag: str | None) -> None:
    """Refuse a change of a state that is not the one that the client means.

    Args:
        headers: of the request.
        etag: of the stored state, None where there is nothing.

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
    """Return whether the client that asks for a state has it already."""
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
