"""Requests in columns while they are read: one number per request and column, their keys one behind another."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.trace import Int32Column, Int64Column

__all__ = ["Columns", "in_order", "numbered_values"]

Value = TypeVar("Value")


class Columns:
    """What was read, by name; every column has a number per request.

    Args:
        names: of the columns.

    Attributes:
        keys: of all requests.
    """

    def __init__(self, *names: str) -> None:
        self.keys = array("q")
        self._ends = array("q")
        self._values = {name: array("q") for name in names}

    def __len__(self) -> int:
        return len(self._ends)

    def end(self, **values: int) -> None:
        """End a request, whose keys were just added; `values` has one of each column."""
        self._ends.append(len(self.keys))
        for name, value in values.items():
            self._values[name].append(value)

    def sorted_by(self, name: str) -> tuple[Int64Column, Int64Column, dict[str, Int64Column], Int64Column | None]:
        """Return everything stably sorted by one column.

        Returns:
            [N] keys, [R + 1] offsets of the requests into them, the columns, and the [R] order of the requests; None
            where they are sorted as they are.
        """
        keys, ends = np.asarray(self.keys), np.array(self._ends, np.int64)
        lengths = np.diff(ends, prepend=0)
        columns = {each: np.array(values, np.int64) for each, values in self._values.items()}
        order = _order(columns[name])
        if order is not None:
            keys = keys[_places(ends - lengths, lengths, order)]
            lengths = lengths[order]
            columns = {each: values[order] for each, values in columns.items()}
        return keys, np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))), columns, order


def _order(values: Int64Column) -> Int64Column | None:
    if bool((values[1:] >= values[:-1]).all()):
        return None
    order: Int64Column = np.argsort(values, kind="stable")
    return order


def _places(starts: Int64Column, lengths: Int64Column, order: Int64Column) -> Int64Column:
    """Return where the keys of the requests stand, in this order of the requests."""
    lengths = lengths[order]
    ends = np.cumsum(lengths)
    shifts: Int64Column = np.repeat(starts[order] - (ends - lengths), lengths)
    return shifts + np.arange(ends[-1], dtype=np.int64)


def in_order(values: Mapping[int, Value], order: Int64Column | None) -> dict[int, Value]:
    """Return values that only some requests have, by the numbers that requests have in an order."""
    if order is None or not values:
        return dict(values)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return dict(sorted((int(places[number]), value) for number, value in values.items()))


def numbered_values(values: Int64Column) -> tuple[Int32Column, npt.NDArray[Any]]:
    """Return values, -1 or more, as numbers in the order of first appearance, and which value each number is."""
    unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    order = order[unique[order] >= 0]
    numbers = np.full(len(unique), -1, np.int32)
    numbers[order] = np.arange(len(order), dtype=np.int32)
    return numbers[inverse], unique[order]
