"""Changes of documents of any kind that are made together or not at all.

A change by a shelf alone (`Shelf.change`) decides again when somebody was faster; a batch was decided from many
documents, so it is refused as a whole then, and whoever made it begins anew.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, TypeVar

from kvcm.registry.shelf import Shelf
from kvcm.store.store import Replacement, Table

__all__ = ["Batch"]

Value = TypeVar("Value")


class _Staged(NamedTuple):
    shelf: Shelf[Any]
    name: str
    replacement: Replacement
    new: Any


class Batch:
    """Changes to come, each of another document, based on what the shelves knew when it was staged."""

    def __init__(self) -> None:
        self._staged: list[_Staged] = []

    def __bool__(self) -> bool:
        return bool(self._staged)

    def stage(self, shelf: Shelf[Value], name: str, new: Value | None) -> None:
        """Add a change of a document of a shelf or of its copy; None removes the document."""
        self._staged.append(_Staged(shelf.origin, name, shelf.replacement(name, new), new))

    async def commit(self, table: Table) -> bool:
        """Make all changes. False: a document is another one by now, and nothing was changed.

        Raises:
            StorageIOError: the store cannot be asked; all may have happened nevertheless, or nothing.
        """
        with contextlib.ExitStack() as watches:
            watched = {id(each.shelf): each.shelf for each in self._staged}
            changed = {key: watches.enter_context(shelf.watching()) for key, shelf in watched.items()}
            won = await table.replace_together([each.replacement for each in self._staged])
        if won:
            for each in self._staged:
                each.shelf.tell(each.replacement, each.new)
                await self._follow(each, is_newer=each.name in changed[id(each.shelf)])
        return won

    async def _follow(self, staged: _Staged, *, is_newer: bool) -> None:
        if is_newer:  # somebody went on from what was just written, or came before it
            await staged.shelf.read(staged.name)
        else:
            staged.shelf.follow(staged.replacement, staged.new)
