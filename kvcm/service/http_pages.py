"""What GET of a path answers: probes, metrics and the like. Small, made on the spot, and not one of the calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from kvcm.model.principals import EVERYBODY, Principal

__all__ = ["Page", "PageRequest", "PageRoute"]


class PageRequest(NamedTuple):
    """A GET.

    Attributes:
        query: what stands behind the question mark, as it came.
        headers: by lower-case name, as they came.
        principal: who asks.
    """

    query: bytes
    headers: Mapping[bytes, bytes]
    principal: Principal = EVERYBODY


class Page(NamedTuple):
    """The answer.

    Attributes:
        status: of HTTP.
        body: its bytes; content-length follows from them.
        headers: lower-case names and values.
    """

    status: int
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"text/plain; charset=utf-8"),)


PageRoute = Callable[[PageRequest], Awaitable[Page]]
"""Answers GET of one path. It is asked on the event loop, so it does little or awaits."""
