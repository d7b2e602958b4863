"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], what: str = "", seconds: float = 60.0) -> None:
    """Return when a condition holds.

    Args:
        condition: asked again and again.
        what: it says, for the message.
        seconds: how long it is waited for; the default is long for a busy machine.

    Raises:
        AssertionError: it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or condition}"
        time.sleep(0.005)
