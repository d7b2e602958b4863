"""Between wire messages and plain JSON values of resources."""

from __future__ import annotations

import math
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = ["plain"]

_AS_TEXT: Final = {"block_key", "block_keys", "last_block_key"}


def plain(message: Message) -> dict[str, Any]:
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
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.name in _AS_TEXT:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such numbers
    return value
