"""Which window of the coldest blocks comes next, where a store that managers share is looked through in windows.

Windows in which nothing could be had are left behind: everything in them may be pinned for hours. Since something
colder can be had again later, every look tries one of those that were left behind, too, one after the other.
"""

from __future__ import annotations

__all__ = ["WindowWalk"]


class WindowWalk:
    """A walk through the windows for one need, which lasts from look to look.

    Attributes:
        window: the one that comes next.
    """

    def __init__(self) -> None:
        self.window = 0
        self._reached = 0
        self._tried = 0
        self._first = 0
        self._is_trying = False

    def begin_look(self) -> None:
        """Try one of the windows that were left behind first."""
        self._is_trying = self._reached > 0
        if self._is_trying:
            self.window = self._tried = self._tried % self._reached

    def begin_batch(self) -> None:
        """A walk ends where it began: remember that."""
        self._first = self._reached

    def found(self) -> None:
        """Something was had in this window: the next batch looks here again."""
        self._reached = self.window
        self._is_trying = False

    def passed(self, *, is_end: bool) -> bool:
        """Nothing was had in this window; go on, and return whether every window was looked through.

        Args:
            is_end: there was nothing in the window: no block is as warm as that.
        """
        if self._is_trying:
            self._is_trying = False
            self._tried += 1
            self.window = self._reached
            return False
        self.window = self._reached = 0 if is_end else self._reached + 1
        return self._reached == self._first
