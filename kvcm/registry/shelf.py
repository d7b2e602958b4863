"""Documents of one kind, as this manager saw them last, changed by compare-and-set in a table that managers share.

Every change reads the document first, validates against that, and writes only if nobody was faster; so of several
managers one wins, and the others validate again against what the winner made. No lock is held meanwhile: one slow
answer of the store holds up nobody else. Reads ask the local view alone; `take` brings what others changed.

Invariants:
1. What is here was in the table.
2. What was read before a change made here never replaces that change (`watching`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from typing import Generic, TypeVar

import structlog

from kvcm.model.errors import StorageIOError
from kvcm.registry.codec import decode_document, encode_document
from kvcm.store.store import Replacement, Table

__all__ = ["ChangeListener", "Flush", "Shelf"]

_log = structlog.get_logger("kvcm.registry")

Value = TypeVar("Value")
Flush = Callable[[], Awaitable[None]]
"""Returns when every change made so far is as durable as configured."""
ChangeListener = Callable[[str, object, object], None]
"""Told of a change that was made here: full name of the document, old and new value, None for none."""


class Shelf(Generic[Value]):
    """Documents whose names begin alike.

    Args:
        table: holds them.
        prefix: what their names begin with.
        kind: class of the values.
        listener: told of changes that are made here.
    """

    def __init__(self, table: Table, prefix: str, kind: type[Value], listener: ChangeListener | None = None) -> None:
        self._listener = listener
        self._table = table
        self._prefix = prefix
        self._kind = kind
        self._values: dict[str, Value] = {}
        self._documents: dict[str, bytes] = {}
        self._order: list[str] | None = None  # of the names, until one comes or goes: duties ask for it all the time
        self._unreadable: dict[str, bytes] = {}  # said once each
        self._watchers: list[set[str]] = []
        self.origin = self
        self.generation = 0

    def copy(self) -> Shelf[Value]:
        """Return the local view as it is now, whose `origin` is this shelf: for a thread to read while this goes on."""
        copied = Shelf(self._table, self._prefix, self._kind)
        copied._values, copied._documents = dict(self._values), dict(self._documents)
        copied._unreadable = dict(self._unreadable)
        copied.origin = self
        return copied

    @property
    def unreadable(self) -> list[str]:
        """Names of documents that cannot be read, in order: their old values are in force, if there were any."""
        return sorted(self._unreadable)

    def get(self, name: str) -> Value | None:
        """Return a value, None when there is none of that name."""
        return self._values.get(name)

    def names(self) -> list[str]:
        """Return all names in order."""
        if self._order is None:
            self._order = sorted(self._values)
        return list(self._order)

    def all(self) -> list[Value]:
        """Return all values, ordered by name."""
        return [self._values[name] for name in self.names()]

    async def read(self, name: str) -> Value | None:
        """Bring one document up to date and return its value.

        Raises:
            StorageIOError: the table cannot be asked, or the document cannot be read.
        """
        while True:
            with self.watching() as changed:
                document = await self._table.get(self._prefix + name)
            if name not in changed:
                self._put(name, document)
                return self._values.get(name)

    async def change(self, name: str, decide: Callable[[Value | None], Value | None]) -> Value | None:
        """Put what `decide` makes of the present value in its place.

        Args:
            name: of the document.
            decide: from the present value, None for none, to the new one, None to remove it; raises to refuse. Called
                again whenever somebody else was faster.

        Returns:
            The new value.

        Raises:
            StorageIOError: as `read`.
        """
        while True:
            known = await self.read(name)
            new = decide(known)
            if new == known:
                return new
            if await self._replace(name, new):
                if self._listener is not None:
                    self._listener(self._prefix + name, known, new)
                return new

    def replacement(self, name: str, new: Value | None) -> Replacement:
        """Return what puts a value in the place of the one that is known here, None for none."""
        document = None if new is None else encode_document(new)
        return Replacement(self._prefix + name, self._documents.get(name), document)

    def follow(self, replacement: Replacement, new: Value | None) -> None:
        """Take over what was just put into the table, and what nobody changed here meanwhile."""
        self._put(replacement.name.removeprefix(self._prefix), replacement.new, new)

    def tell(self, replacement: Replacement, new: Value | None) -> None:
        """Tell the listener of what was just put into the table."""
        if self._listener is not None:
            old = None if replacement.old is None else decode_document(self._kind, replacement.old)
            self._listener(replacement.name, old, new)

    async def _replace(self, name: str, new: Value | None) -> bool:
        document = None if new is None else encode_document(new)
        with self.watching() as changed:
            won = await self._table.replace(self._prefix + name, self._documents.get(name), document)
        if won and name in changed:  # somebody went on from what was just written, or came before it
            await self.read(name)
        elif won:
            self._put(name, document, new)
        return won

    @contextlib.contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Yield the names that change here while the block runs: what it read of them may be out of date."""
        changed: set[str] = set()
        self._watchers.append(changed)
        try:
            yield changed
        finally:
            # By identity: equal sets of other watchers stay.
            self._watchers = [watcher for watcher in self._watchers if watcher is not changed]

    def take(self, documents: Mapping[str, bytes], changed: Container[str]) -> None:
        """Make the view that of the whole table; a document that cannot be read leaves its old value in force.

        Args:
            documents: everything in the table, by full name.
            changed: names here that are newer than `documents`.
        """
        start = len(self._prefix)
        found = {name[start:]: document for name, document in documents.items() if name.startswith(self._prefix)}
        for name in found.keys() | self._documents.keys() | self._unreadable.keys():
            if name not in changed:
                self._put_if_readable(name, found.get(name))

    def _put_if_readable(self, name: str, document: bytes | None) -> None:
        try:
            self._put(name, document)
        except StorageIOError as error:
            if self._unreadable.get(name) != document:
                _log.warning("document_unreadable", name=self._prefix + name, reason=str(error))
            self._unreadable[name] = document or b""

    def _put(self, name: str, document: bytes | None, value: Value | None = None) -> None:
        if document == self._documents.get(name):
            self._unreadable.pop(name, None)  # it was mended
            return
        if document is None or name not in self._values:
            self._order = None
        if document is None:
            del self._documents[name], self._values[name]
        else:
            self._values[name] = decode_document(self._kind, document) if value is None else value
            self._documents[name] = document
        self._unreadable.pop(name, None)
        self.generation += 1
        for watcher in self._watchers:
            watcher.add(name)
