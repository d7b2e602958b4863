"""Reads a connector's options, as an engine hands them over: a mapping of names to values from JSON.

A misspelt option is an error that names the nearest known one: otherwise an option would silently have no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from kvcm.model.errors import InvalidArgumentError

__all__ = ["parse_options"]

_T = TypeVar("_T")
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def parse_options(kind: type[_T], given: Mapping[str, object], others: Collection[str] = ()) -> _T:
    """Return an options dataclass, whose fields are of type int, float, bool or str.

    Args:
        kind: the dataclass; its `__post_init__` checks the values.
        given: the options.
        others: names of other readers' options, which are ignored.

    Raises:
        InvalidArgumentError: an option is unknown, missing or of the wrong type; names it.
    """
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            values[name] = _typed(name, value, known[name])
        elif name not in others:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise InvalidArgumentError(f"option {name!r} is unknown; {hint}")
    try:
        return kind(**values)
    except TypeError:
        missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]  # type: ignore[arg-type]
        raise InvalidArgumentError(f"option {missing[0]!r} is missing") from None


def _typed(name: str, value: object, kind: str) -> object:
    if type(value) not in _KINDS[kind]:  # bool is an int, and not meant
        raise InvalidArgumentError(f"option {name!r} is {value!r}, must be {_WORDS[kind]}")
    return float(value) if kind == "float" else value  # type: ignore[arg-type]
