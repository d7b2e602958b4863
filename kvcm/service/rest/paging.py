"""Pages of lists: each begins behind the last entry of the one before, so entries may come and go meanwhile."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kvcm.service.rest.documents import Document
from kvcm.service.rest.messages import plain
from kvcm.service.rest.problem import FieldError, Problem, ProblemError

__all__ = ["Page", "PageQuery", "page_of"]

Item = TypeVar("Item")
Key = tuple[str | int, ...]

_MOST_TOKEN_CHARACTERS = 4096


class Page(Document, Generic[Item]):
    """Some entries of a list."""

    items: list[Item]
    """The entries, ordered by name."""
    next_page_token: str | None
    """What to send as `page_token` for those that follow; null when there are none."""


class PageQuery(BaseModel):
    """Which page of a list."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=1000, description="Most entries of one page.")] = 100
    page_token: Annotated[
        str,
        Field(
            max_length=_MOST_TOKEN_CHARACTERS, description="`next_page_token` of the page before; none for the first."
        ),
    ] = ""


def page_of(
    items: Iterable[Any], key: Callable[[Any], Key], query: PageQuery, show: Callable[[Any], Any] = plain
) -> dict[str, Any]:
    """Return one page.

    Args:
        items: all entries, in any order.
        key: that orders them, and is each one's own.
        query: which page.
        show: makes documents of entries; only of those on the page, since there may be many.

    Raises:
        ProblemError: 400, the token is none of ours.
    """
    ordered = sorted(items, key=key)
    if query.page_token:
        behind = _read(query.page_token, len(key(ordered[0])) if ordered else 0)
        ordered = [item for item in ordered if _is_behind(key(item), behind)]
    page = ordered[: query.limit]
    token = _token(key(page[-1])) if len(ordered) > len(page) else None
    return {"items": [show(item) for item in page], "next_page_token": token}


def _is_behind(key: Key, behind: Key) -> bool:
    try:
        return key > behind
    except TypeError:
        raise _refused() from None


def _token(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _read(token: str, length: int) -> Key:
    try:
        padded = token.encode("ascii") + b"=" * (-len(token) % 4)
        key = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise _refused() from None
    if not isinstance(key, list) or not all(isinstance(part, str | int) for part in key):
        raise _refused()
    if length and len(key) != length:
        raise _refused()
    return tuple(key)


def _refused() -> ProblemError:
    error = FieldError("query.page_token", None, "the next_page_token of an earlier page of this list")
    return ProblemError(Problem(400, "page_token is none of this list: begin again without one", errors=[error]))
