"""Messages out of JSON documents that are kept and edited by hand: what is not understood is refused, with its path.

Bodies of requests are read by `json_codec`, which ignores what it does not know. Here its rules for values hold, too,
but unknown fields, unknown names and numbers of enums, nulls and repeated keys are errors.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvcm.model.errors import InvalidArgumentError
from kvcm.service.json_codec import MAX_DEPTH, MalformedBody, parse_request

__all__ = ["decoded", "read_message", "refuse_unknown"]

M = TypeVar("M", bound=Message)

_SHOWN_CHARACTERS = 80


def decoded(text: str, title: str) -> Any:
    """Return the values of a JSON document.

    Args:
        text: the document.
        title: what it is called in messages.

    Raises:
        InvalidArgumentError: it is no JSON, is nested too deep, repeats a key or holds a number that JSON has not.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgumentError(f"{title} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{title} is no JSON document: {error}") from None
    _check_depth(value, title)
    return value


def read_message(value: Any, message_type: type[M], path: str) -> M:
    """Return the message that a decoded value describes.

    Args:
        value: of a document.
        message_type: class of the message.
        path: of the value, for messages.

    Raises:
        InvalidArgumentError: naming the path of the first thing that is wrong.
    """
    _check_known(value, message_type.DESCRIPTOR, path)
    try:
        return parse_request(json.dumps(value).encode(), message_type)
    except MalformedBody as error:
        place, _, problem = str(error).partition(": ")
        where = path if place == "body" else f"{path}.{place}"
        raise InvalidArgumentError(f"{where} {problem}") from None


def refuse_unknown(given: Iterable[str], known: Iterable[str], path: str) -> None:
    """Refuse keys of an object that are not known.

    Raises:
        InvalidArgumentError: naming the first, and what may have been meant.
    """
    allowed = list(known)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(key[:_SHOWN_CHARACTERS], allowed, 1) or allowed
            where = f"{path}.{_shown(key)}".lstrip(".")
            raise InvalidArgumentError(f"{where} is unknown, allowed is {' or '.join(near)}")


def _shown(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half of a surrogate pair is in no answer
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {_shown(repeated)!r} is given twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: Any, title: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise InvalidArgumentError(f"{title} is nested deeper than {MAX_DEPTH} levels")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_known(value: Any, descriptor: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path} must be an object")
    fields = {field.name: field for field in descriptor.fields}
    refuse_unknown(value, fields, path)
    for name, item in value.items():
        for place, each in _each(item, f"{path}.{name}"):
            _check_value(each, fields[name], place)


def _each(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, list):
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(item))
    else:
        yield path, item


def _check_value(value: Any, field: FieldDescriptor, path: str) -> None:
    if value is None:
        raise InvalidArgumentError(f"{path} is null: leave it out, or give a value")
    if field.message_type is not None:
        _check_known(value, field.message_type, path)
    elif field.enum_type is not None and isinstance(value, str | int):
        known = {each.name: each.number for each in field.enum_type.values}
        if value not in known and (isinstance(value, str) or value not in known.values()):
            shown = _shown(value) if isinstance(value, str) else value
            raise InvalidArgumentError(f"{path} is {shown!r}, allowed are {', '.join(known)}")
