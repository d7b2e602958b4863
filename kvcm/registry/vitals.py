"""The vitals of the managers of a deployment, in a table of their own.

A document has a deadline and is replaced long before it, so that those of managers that were killed vanish by
themselves. Managers of other releases need not know the table, and what they wrote and nobody can read is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.model.vitals import Vitals
from kvcm.registry.codec import decode_document, encode_document
from kvcm.store.store import Table

__all__ = ["VitalsBoard"]

_LIFE_SECONDS = 20.0
_MOST_FORGOTTEN = 16  # at one publication


@dataclass(frozen=True, slots=True)
class _Entry:
    vitals: Vitals
    until: float


class VitalsBoard:
    """The table, and this manager's own entry.

    Args:
        clock: time source.
        table: one document per manager.
    """

    def __init__(self, clock: Clock, table: Table) -> None:
        self._clock = clock
        self._table = table
        self._written: bytes | None = None

    async def publish(self, vitals: Vitals) -> None:
        """Tell the others, and remove what managers left that are gone.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        name, entry = vitals.endpoint.node_id, _Entry(vitals, now + _LIFE_SECONDS)
        new = encode_document(entry)
        if not await self._table.replace(name, self._written, new, due=entry.until):
            self._written = await self._table.get(name)  # of a run before, or others forgot it
            if not await self._table.replace(name, self._written, new, due=entry.until):
                return  # the next time
        self._written = new
        for each in await self._table.due(now, _MOST_FORGOTTEN):
            await self._forget_dead(each, now)

    async def _forget_dead(self, name: str, now: float) -> None:
        document = await self._table.get(name)
        entry = None if document is None else _read(document)
        if document is not None and (entry is None or entry.until <= now):
            await self._table.replace(name, document, None)

    async def withdraw(self, node_id: str) -> None:
        """Remove the own entry.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        document = await self._table.get(node_id)
        if document is not None:
            await self._table.replace(node_id, document, None)

    async def all(self) -> Mapping[str, Vitals]:
        """Return the vitals of every manager that lives, by node id.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return dict(_living(await self._table.all(), self._clock.now()))


def _living(documents: Mapping[str, bytes], now: float) -> Iterator[tuple[str, Vitals]]:
    for name, document in documents.items():
        entry = _read(document)
        if entry is not None and entry.until > now:
            yield name, entry.vitals


def _read(document: bytes) -> _Entry | None:
    try:
        return decode_document(_Entry, document)
    except StorageIOError:
        return None
