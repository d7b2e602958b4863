"""What all documents of resources have in common, and the kinds of values in them.

Field names are those of the wire messages. Integers are JSON numbers, also those of 64 bits; block keys alone are
texts, since they do not fit into the numbers of many JSON readers. Enums are their names.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.names import check_name
from kvcm.service.request_sizes import MOST_ENTRIES, MOST_FREE_TEXT_BYTES, MOST_TEXT_BYTES
from kvcm.service.rest.names import decoded_name

__all__ = [
    "MOST_ENTRIES",
    "BlockKey",
    "Document",
    "FreeText",
    "Int32",
    "Int64",
    "Name",
    "NamePath",
    "Ratio",
    "StoragePath",
    "Text",
    "TokenPath",
    "Whole",
]

_INT64: Final = 1 << 63
_INT32: Final = 1 << 31
_STORAGE: Final = r"^[A-Za-z0-9._-]{1,128}$"
_ID: Final = r"^[A-Za-z0-9._:-]{1,256}$"
_EXACT: Final = 1 << 53


class Document(BaseModel):
    """A JSON object whose fields are known, and of exactly the kinds that they say."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _whole(value: Any) -> Any:
    """Take 5.0 for 5, as JSON Schema does; floats that have lost digits are no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


Whole = Annotated[int, BeforeValidator(_whole)]
Int32 = Annotated[Whole, Field(ge=-_INT32, lt=_INT32)]
Int64 = Annotated[Whole, Field(ge=-_INT64, lt=_INT64)]
Ratio = float
Text = Annotated[str, Field(max_length=MOST_TEXT_BYTES)]
Name = Annotated[str, Field(min_length=1, max_length=MOST_TEXT_BYTES)]
FreeText = Annotated[str, Field(max_length=MOST_FREE_TEXT_BYTES)]
BlockKey = Annotated[str, Field(pattern=r"^-?(0|[1-9][0-9]{0,18})$", examples=["9007199254740993"])]


def _name(value: Any) -> str:
    """Decode a name that is a part of a path.

    Raises:
        ValueError: it cannot be the name of anything.
    """
    name = decoded_name(value)
    try:
        check_name("it", name)
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None
    return name


def _shown(**keywords: Any) -> WithJsonSchema:
    """Return what the document says of a parameter whose validators hide it."""
    return WithJsonSchema({"type": "string", **keywords})


NamePath = Annotated[
    str,
    BeforeValidator(_name),
    Path(description="The name, percent-encoded as one path component: `/` is `%2F`.", min_length=1, max_length=256),
    _shown(pattern=r"^[^\u0000-\u001f\u007f-\u009f]+$", maxLength=256),
]
StoragePath = Annotated[
    str,
    BeforeValidator(decoded_name),
    Path(description="The storage's name.", pattern=_STORAGE),
    _shown(pattern=_STORAGE),
]
TokenPath = Annotated[
    str,
    BeforeValidator(decoded_name),
    Path(description="The id.", pattern=_ID),
    _shown(pattern=_ID),
]
