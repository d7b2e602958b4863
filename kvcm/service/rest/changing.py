"""Reading a document, changing it and putting it back, without overwriting what somebody else changed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from kvcm.model.errors import ErrorCode
from kvcm.service.rest.call_book import RefusedError
from kvcm.service.rest.merge_patch import merge_patch
from kvcm.service.rest.problem import FieldError, Problem, ProblemError

__all__ = ["MOST_TRIES", "Turns", "check_same_name", "fields_of", "lost", "merged", "unless_absent"]

MOST_TRIES = 5
"""Of a change that others are faster than."""

Answer = TypeVar("Answer")
Doc = TypeVar("Doc", bound=BaseModel)


class Turns:
    """One change of each thing at a time, of those that come through this manager's resources."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Be the only one who changes this."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        async with lock:
            yield


async def unless_absent(change: Awaitable[Answer], check: Callable[[], Awaitable[Any]]) -> Answer:
    """Carry out a change of something that may not be there, which calls refuse as they refuse wrong fields.

    Args:
        change: runs the call.
        check: raises ProblemError where the thing is not there.

    Raises:
        ProblemError: that of `check`, or the call's own.
    """
    try:
        return await change
    except RefusedError as error:
        if error.code is ErrorCode.INVALID_ARGUMENT:
            await check()
        raise


def merged(model: type[Doc], document: Mapping[str, Any], patch: Mapping[str, Any]) -> Doc:
    """Return a document with a merge patch applied (RFC 7396).

    Raises:
        RequestValidationError: what comes out is no such document.
    """
    try:
        return model.model_validate(merge_patch(document, patch))
    except ValidationError as error:
        found: list[Any] = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found) from None


def fields_of(document: BaseModel, **others: Any) -> dict[str, Any]:
    """Return a document as the fields of a message, with others in place of its own."""
    return {**document.model_dump(exclude_none=True), **others}


def check_same_name(field: str, given: str, name: str) -> None:
    """Refuse a document that names something else than its path.

    Raises:
        ProblemError: 400.
    """
    if given and given != name:
        error = FieldError(f"body.{field}", given[:256], f"{name!r}, or nothing")
        raise ProblemError(Problem(400, f"{field} is {given[:256]!r}, but the path is of {name!r}", errors=[error]))


def lost(request: Request, name: str) -> ProblemError:
    """Return the error that says that others were faster all the time."""
    text = f"{name!r} was changed by others while {request.method} was trying to: try again"
    return ProblemError(Problem(409, text, headers=[("retry-after", "1")]))
