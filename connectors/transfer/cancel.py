"""A token with which one thread ends the transfers of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["CancelToken"]


class CancelToken:
    """Handed to calls of the transfer engine; once cancelled it stays so. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._is_cancelled

    def cancel(self) -> None:
        """End all calls that were given this token, now and later ones."""
        with self._lock:
            self._is_cancelled = True
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` when the token is cancelled while the context lasts, at once when it already is."""
        with self._lock:
            self._listeners.append(listener)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            listener()
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)
