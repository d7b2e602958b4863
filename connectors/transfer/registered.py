"""Memory that a storage's client knows by address: the engine's own, and slots that everything else goes through.

Numpy copies between them, since it lets other threads run meanwhile.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char
from typing import NamedTuple, TypeVar

import numpy as np

from kvcm.model.errors import InvalidArgumentError

__all__ = ["RegisteredMemory", "Span", "StagingMemory", "fitting", "gather", "scatter", "span_of"]

T = TypeVar("T")

_SLOTS = 4
_BEHIND_ALL = 1 << 64  # no span has so many bytes


class Span(NamedTuple):
    """Bytes of this process from an address on."""

    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.address + self.size_bytes


def span_of(memory: memoryview) -> Span:
    """Return where memory lies.

    Raises:
        InvalidArgumentError: it is not contiguous.
    """
    if not memory.c_contiguous:
        raise InvalidArgumentError("memory is not contiguous")
    size_bytes = memory.nbytes
    if not size_bytes:
        return Span(0, 0)
    if not memory.readonly:
        return Span(addressof(c_char.from_buffer(memory)), size_bytes)
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]  # slower, and for constants too
    return Span(address, size_bytes)


def fitting(things: Sequence[T], size_of: Callable[[T], int], room_bytes: int) -> Iterator[list[T]]:
    """Yield the things in order, in groups that fit the room; those that are larger are left out."""
    group: list[T] = []
    left = room_bytes
    for thing in things:
        if size_of(thing) > room_bytes:
            continue
        if size_of(thing) > left:
            yield group
            group, left = [], room_bytes
        group.append(thing)
        left -= size_of(thing)
    if group:
        yield group


def gather(views: Sequence[memoryview], place: memoryview) -> None:
    """Copy pieces of memory to one place, one behind the other; all are flat bytes."""
    target, start = np.frombuffer(place, np.uint8), 0
    for view in views:
        target[start : start + view.nbytes] = np.frombuffer(view, np.uint8)
        start += view.nbytes


def scatter(place: memoryview, views: Sequence[memoryview]) -> None:
    """Copy what lies at one place to pieces of memory; all are flat bytes."""
    source, start = np.frombuffer(place, np.uint8), 0
    for view in views:
        np.frombuffer(view, np.uint8)[:] = source[start : start + view.nbytes]
        start += view.nbytes


class RegisteredMemory:
    """Spans that do not overlap. Changed by one thread at a time, asked by any."""

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()

    def add(self, span: Span) -> None:
        """Remember a span.

        Raises:
            InvalidArgumentError: it is empty or overlaps another.
        """
        if not span.size_bytes:
            raise InvalidArgumentError("memory of 0 bytes cannot be registered")
        if any(span.address < other.end and other.address < span.end for other in self.spans):
            raise InvalidArgumentError(f"{span.size_bytes} bytes of memory overlap what is registered already")
        self.spans = tuple(sorted((*self.spans, span)))

    def remove(self, span: Span) -> None:
        """Forget a span."""
        self.spans = tuple(other for other in self.spans if other != span)

    def holds(self, span: Span) -> bool:
        """Whether a span lies inside one of them."""
        address, size_bytes = span
        spans = self.spans
        index = bisect_right(spans, (address, _BEHIND_ALL)) - 1
        return index >= 0 and address + size_bytes <= spans[index].end


class StagingMemory:
    """Slots of equal size in one piece of memory, each lent to one thread at a time.

    Args:
        size_bytes: of all slots together; untouched slots take up nothing.
    """

    def __init__(self, size_bytes: int) -> None:
        self.slot_bytes = size_bytes // _SLOTS
        self._memory = np.empty(self.slot_bytes * _SLOTS, np.uint8).data
        self._free = list(range(_SLOTS))
        self._returned = threading.Condition()

    @property
    def span(self) -> Span:
        """All of it."""
        return span_of(self._memory)

    def batches(self, things: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield the things in order, in groups that fit a slot; those that are larger are left out."""
        return fitting(things, size_of, self.slot_bytes)

    @contextmanager
    def slot(self, seconds_left: Callable[[], float]) -> Iterator[memoryview | None]:
        """Lend a slot; None when none is returned in time."""
        with self._returned:
            index = self._free.pop() if self._returned.wait_for(lambda: self._free, max(0.0, seconds_left())) else None
        if index is None:
            yield None
            return
        try:
            yield self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]
        finally:
            with self._returned:
                self._free.append(index)
                self._returned.notify()
