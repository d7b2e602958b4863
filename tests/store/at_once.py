"""Coroutines over a store in memory never suspend: rigs that are made synchronously run them in one step."""

from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["now"]

T = TypeVar("T")


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not suspend."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError(f"{coroutine} suspends")
