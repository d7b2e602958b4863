"""The base class of all documents of resources, the types of their fields, and pages of lists.

Field names are those of the wire messages. Integers are JSON numbers, also those of 64 bits; block keys alone are
texts, since they do not fit into the numbers of many JSON readers. Enums are their names.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import check_name
from kvcm.service.rejections import FieldError, Problem, ProblemError
from kvcm.service.request_limits import MAX_ENTRIES, MAX_FREE_TEXT_BYTES, MAX_TEXT_BYTES
from kvcm.service.rest.conversion import decode_name, message_to_dict

__all__ = [
    "MAX_ENTRIES",
    "BlockKey",
    "Document",
    "FreeText",
    "Int32",
    "Int64",
    "Name",
    "NamePath",
    "Page",
    "PageQuery",
    "Ratio",
    "StoragePath",
    "StorageTypeName",
    "Text",
    "TokenPath",
    "Whole",
    "page_of",
]

_INT64: Final = 1 << 63
_INT32: Final = 1 << 31
_STORAGE: Final = r"^[A-Za-z0-9._-]{1,128}$"
_ID: Final = r"^[A-Za-z0-9._:-]{1,256}$"
_EXACT: Final = 1 << 53


class Document(BaseModel):
    """A JSON object with known fields of exact types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _json_integer(value: Any) -> Any:
    """Return 5 for 5.0, as JSON Schema does; floats that have lost digits are no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


Whole = Annotated[int, BeforeValidator(_json_integer)]
Int32 = Annotated[Whole, Field(ge=-_INT32, lt=_INT32)]
Int64 = Annotated[Whole, Field(ge=-_INT64, lt=_INT64)]
Ratio = float
Text = Annotated[str, Field(max_length=MAX_TEXT_BYTES)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_BYTES)]
FreeText = Annotated[str, Field(max_length=MAX_FREE_TEXT_BYTES)]
StorageTypeName = Literal[
    "ST_UNSPECIFIED", "ST_3FS", "ST_MOONCAKE", "ST_TAIRMEMPOOL", "ST_NFS", "ST_VCNS_3FS", "ST_DUMMY",
    "ST_EVENT_REPORT_L1P5", "ST_EVENT_REPORT_L2", "ST_TAIRMEMPOOL_SSD",
]  # fmt: skip
BlockKey = Annotated[str, Field(pattern=r"^-?(0|[1-9][0-9]{0,18})$", examples=["9007199254740993"])]


def _name(value: Any) -> str:
    """Decode a name in a path.

    Raises:
        ValueError: it is not a valid name.
    """
    name = decode_name(value)
    try:
        check_name("it", name)
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None
    return name


def _schema(**keywords: Any) -> WithJsonSchema:
    """Return the schema of a parameter whose validators hide it."""
    return WithJsonSchema({"type": "string", **keywords})


NamePath = Annotated[
    str,
    BeforeValidator(_name),
    Path(description="The name, percent-encoded as one path component: `/` is `%2F`.", min_length=1, max_length=256),
    _schema(pattern=r"^[^\u0000-\u001f\u007f-\u009f]+$", maxLength=256),
]
StoragePath = Annotated[
    str,
    BeforeValidator(decode_name),
    Path(description="The storage's name.", pattern=_STORAGE),
    _schema(pattern=_STORAGE),
]
TokenPath = Annotated[
    str,
    BeforeValidator(decode_name),
    Path(description="The id.", pattern=_ID),
    _schema(pattern=_ID),
]

# Pages of lists: each begins after the last entry of the page before, so entries may be added and removed meanwhile.

Item = TypeVar("Item")
Key = tuple[str | int, ...]
_MAX_TOKEN_CHARACTERS = 4096


class Page(Document, Generic[Item]):
    """Some entries of a list."""

    items: list[Item]
    """The entries, ordered by name."""
    next_page_token: str | None
    """The `page_token` of the next page; null for none."""


class PageQuery(BaseModel):
    """Which page of a list."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=1000, description="Most entries of one page.")] = 100
    page_token: Annotated[
        str,
        Field(
            max_length=_MAX_TOKEN_CHARACTERS, description="`next_page_token` of the page before; none for the first."
        ),
    ] = ""


def page_of(
    items: Iterable[Any], key: Callable[[Any], Key], query: PageQuery, show: Callable[[Any], Any] = message_to_dict
) -> dict[str, Any]:
    """Return one page.

    Args:
        items: all entries, in any order.
        key: unique, orders the entries.
        query: which page.
        show: makes a document of an entry of the page.

    Raises:
        ProblemError: 400, the token is malformed.
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
