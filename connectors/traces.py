"""The correlation id of calls to the manager: that of the request which an engine works on, else a random one.

The manager returns it in its answers and writes it to its access log, so a request can be followed through both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from uuid import uuid4

__all__ = ["new_trace_id", "traced"]

_MOST_CHARACTERS = 128
_UNUSUAL = re.compile(r"[^A-Za-z0-9._:/-]")

_current: ContextVar[str] = ContextVar("kvcm_trace_id", default="")


def new_trace_id() -> str:
    """Return the id for one call."""
    return _current.get() or uuid4().hex


@contextmanager
def traced(request_id: str) -> Iterator[None]:
    """Let calls of this thread or task carry the id of a request, cut to what logs can hold."""
    token = _current.set(_UNUSUAL.sub("_", request_id[:_MOST_CHARACTERS]))
    try:
        yield
    finally:
        _current.reset(token)
