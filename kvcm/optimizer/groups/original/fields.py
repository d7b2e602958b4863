"""Reads fields of a JSON document one by one, and says what is wrong with the first that is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcm.optimizer.errors import OptionError

__all__ = ["Fields"]

_MISSING = object()


class Fields:
    """An object of a document.

    Args:
        path: where it stands, "" for the document itself.
        value: what stands there.

    Raises:
        OptionError: it is no object.
    """

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise OptionError(f"{path or 'config'}: {_shown(value)}; allowed: an object")
        self._path = path
        self._values: Mapping[str, Any] = value

    def text(self, name: str, *, allowed: Sequence[str] = (), default: str | None = None) -> str:
        """Return a text, one of those allowed.

        Raises:
            OptionError: it is none.
        """
        value = self._get(name, default)
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise self._refused(name, value, ", ".join(allowed) or "a text")
        return value

    def whole(self, name: str, least: int, most: int, *, default: int | None = None) -> int:
        """Return a whole number within bounds.

        Raises:
            OptionError: it is none.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refused(name, value, f"a whole number from {least} to {most}")
        return value

    def ratio(self, name: str, *, default: float | None = None, above_zero: bool = False) -> float:
        """Return a number from 0 to 1.

        Raises:
            OptionError: it is none.
        """
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1 or (above_zero and not value):
            raise self._refused(name, value, "a number above 0 up to 1" if above_zero else "a number from 0 to 1")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            OptionError: it is neither.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._refused(name, value, "true, false")
        return value

    def child(self, name: str, *, default: Mapping[str, Any] | None = None) -> Fields:
        """Return an object.

        Raises:
            OptionError: it is none.
        """
        return Fields(self._at(name), self._get(name, default))

    def children(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list that has at least one.

        Raises:
            OptionError: it is no such list.
        """
        values = self._get(name, None)
        if not isinstance(values, list) or not values:
            raise self._refused(name, values, "a list of at least one object")
        for place, value in enumerate(values):
            yield Fields(f"{self._at(name)}[{place}]", value)

    def _get(self, name: str, default: object) -> Any:
        value = self._values.get(name, _MISSING if default is None else default)
        if value is _MISSING:
            raise OptionError(f"{self._at(name)}: missing; it has to be there")
        return value

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _refused(self, name: str, value: object, allowed: str) -> OptionError:
        return OptionError(f"{self._at(name)}: {_shown(value)}; allowed: {allowed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
