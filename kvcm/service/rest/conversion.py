"""Conversions: wire messages to JSON, names to path components, JSON merge patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value

__all__ = ["decode_name", "encode_name", "merge_patch", "message_to_dict"]

_AS_TEXT: Final = {"block_key", "block_keys", "last_block_key"}


def message_to_dict(message: Message) -> dict[str, Any]:
    """Return the fields of a message but its header: integers as numbers, block keys as texts, enums by name."""
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.name != "header" and not (field.has_presence and not message.HasField(field.name))
    }


def _value(field: Any, value: Any) -> Any:
    return [_single(field, item) for item in value] if field.is_repeated else _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return value.value if isinstance(value, Int64Value) else message_to_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.name in _AS_TEXT:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such numbers
    return value


# Names as path components. Routes match percent-encoded paths, so that `%2F` in a name is no separator.


def decode_name(value: Any) -> str:
    """Return the name of a path component.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return unquote_to_bytes(str(value)).decode()
    except UnicodeDecodeError:
        raise ValueError("must be percent-encoded UTF-8") from None


def encode_name(name: str) -> str:
    """Return a name as a path component; clients resolve `.` and `..`, so those are encoded, too."""
    encoded = quote(name, safe="")
    return encoded.replace(".", "%2E") if encoded in {".", ".."} else encoded


# JSON merge patches (RFC 7396).


def merge_patch(target: Any, patch: Any) -> Any:
    """Return a JSON value with a patch applied: null removes, lists are replaced."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result
