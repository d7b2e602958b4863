"""How much of everything a request may hold, looked at before any work: entries of lists, bytes of texts.

Every field of every request has a limit, by what it holds: nothing that a client sends is without one. What is named
for keys may have as many entries as there may be keys. Parts of locations and of reports are as many: their handlers
look at them when they read them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from kvcm.model.errors import InvalidArgumentError
from kvcm.service.limits import RequestLimits

__all__ = [
    "MOST_ENTRIES",
    "MOST_FREE_TEXT_BYTES",
    "MOST_NAME_BYTES",
    "MOST_SNAPSHOT_BYTES",
    "MOST_TEXT_BYTES",
    "RequestSizes",
    "check_text",
]

MOST_ENTRIES: Final = 1024
"""Of a list that has nothing to do with keys; more than any model has parts."""
MOST_NAME_BYTES: Final = 256
MOST_TEXT_BYTES: Final = 1024
"""Of texts that are no names: uris, paths, trace ids."""
MOST_FREE_TEXT_BYTES: Final = 1 << 16
MOST_SNAPSHOT_BYTES: Final = 8 << 20
"""Of a whole configuration: some thousand instances."""

_PER_KEY: Final = {"block_keys", "values", "location_spec_group_names", "locations", "parts"}
_NAMES: Final = {"instance_id", "node_id", "owner", "location_spec_names", "location_spec_group_names"}
_FREE_TEXTS: Final = {"extra", "user_data", "lora_name"}


class _List(NamedTuple):
    """Limit of a list: of so many entries, 0 as many as keys, -1 as many as tokens; and of `most` bytes each if they
    are texts. `has_parts` if they are messages to be looked at, too."""

    field: str
    entries: int
    most: int
    has_parts: bool


class _Bounds(NamedTuple):
    """Limits of a message: its texts with their most bytes, its lists, the messages in it."""

    texts: tuple[tuple[str, int], ...]
    lists: tuple[_List, ...]
    parts: tuple[str, ...]


class RequestSizes:
    """Checks requests.

    Args:
        limits: of keys and tokens.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    def check(self, request: Any) -> None:
        """Refuse a request that holds too much of anything.

        Raises:
            InvalidArgumentError: naming the field, its size and the limit.
        """
        self._check(request, "")

    def _check(self, message: Any, path: str) -> None:
        bounds = _known.get(type(message)) or _bounds(type(message))
        for field, most in bounds.texts:
            text = getattr(message, field)
            if len(text) * 4 > most:
                check_text(f"{path}{field}", text, most)
        for bound in bounds.lists:
            if items := getattr(message, bound[0]):
                self._check_list(items, path, *bound)
        for field in bounds.parts:
            if message.HasField(field):
                self._check(getattr(message, field), f"{path}{field}.")

    def _check_list(self, items: Any, path: str, field: str, entries: int, most: int, has_parts: bool) -> None:
        count = len(items)
        if entries <= 0:
            entries = self._limits.max_tokens if entries else self._limits.max_keys
        if count > entries:
            raise InvalidArgumentError(f"{path}{field} has {count} entries, at most {entries} are allowed")
        if most and max(map(len, items)) * 4 > most:
            for position, text in enumerate(items):
                check_text(f"{path}{field}[{position}]", text, most)
        if has_parts:
            for position, item in enumerate(items):
                self._check(item, f"{path}{field}[{position}].")


def check_text(name: str, text: str, most: int) -> None:
    """Refuse a text of more bytes than that.

    Raises:
        InvalidArgumentError: naming it, its size and the limit.
    """
    length = len(text.encode()) if len(text) * 4 > most else 0
    if length > most:
        raise InvalidArgumentError(f"{name} has {length} bytes of UTF-8, at most {most} are allowed")


_known: dict[type[Any], _Bounds] = {}


def _bounds(message_type: type[Any]) -> _Bounds:
    texts: list[tuple[str, int]] = []
    lists: list[_List] = []
    parts: list[str] = []
    for field in message_type.DESCRIPTOR.fields:
        name, is_text = field.name, field.type in {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        most = _most_bytes(name) if is_text else 0
        if field.is_repeated:
            entries = -1 if name == "token_ids" else 0 if name in _PER_KEY else MOST_ENTRIES
            lists.append(_List(name, entries, most, is_message and entries > 0))
        elif is_text:
            texts.append((name, most))
        elif is_message:
            parts.append(name)
    bounds = _known[message_type] = _Bounds(tuple(texts), tuple(lists), tuple(parts))
    return bounds


def _most_bytes(name: str) -> int:
    if name == "config_snapshot":
        return MOST_SNAPSHOT_BYTES
    return MOST_NAME_BYTES if name in _NAMES else MOST_FREE_TEXT_BYTES if name in _FREE_TEXTS else MOST_TEXT_BYTES
