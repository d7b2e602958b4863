"""The managers of a deployment by node id, each with the addresses that it serves.

A node's document has a deadline and is renewed long before it, so that nodes that were killed vanish by themselves.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.model.nodes import Endpoint
from kvcm.registry.codec import decode_document, encode_document
from kvcm.store.store import Table

__all__ = ["Nodes"]

_LIFE_SECONDS = 60.0
_RENEWAL_SECONDS = 20.0
_MOST_FORGOTTEN = 16  # at one renewal


@dataclass(frozen=True, slots=True)
class _Node:
    """What is stored. The deadline is inside too: those who remove the dead must see a renewal that changed nothing
    else."""

    endpoint: Endpoint
    until: float


class Nodes:
    """The table of nodes, and this node's own entry.

    Args:
        node_id: id of this manager.
        clock: time source.
        table: one document per node.
    """

    def __init__(self, node_id: str, clock: Clock, table: Table) -> None:
        self._node_id = node_id
        self._clock = clock
        self._table = table
        self._own: Endpoint | None = None
        self._renew_at = 0.0

    async def publish(self, endpoint: Endpoint) -> None:
        """Tell all managers where this one is; they keep knowing it while `renew` is called.

        Raises:
            StorageIOError: the store cannot be asked; `renew` tries again.
        """
        self._own, self._renew_at = endpoint, 0.0
        await self.renew()

    async def renew(self) -> None:
        """When it is time, renew the own entry and remove entries of others that nobody renewed.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        if self._own is None or now < self._renew_at:
            return
        node = _Node(self._own, now + _LIFE_SECONDS)
        old = await self._table.get(self._node_id)
        if await self._table.replace(self._node_id, old, encode_document(node), due=node.until):
            self._renew_at = now + _RENEWAL_SECONDS
        await self._forget_dead(now)

    async def withdraw(self) -> None:
        """Remove the own entry.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._own = None
        document = await self._table.get(self._node_id)
        if document is not None:
            await self._table.replace(self._node_id, document, None)

    async def find(self, node_id: str) -> Endpoint | None:
        """Return where a node is, None when that is not known.

        Raises:
            StorageIOError: the store cannot be asked, or the entry cannot be read.
        """
        if self._own is not None and node_id == self._node_id:
            return self._own
        document = await self._table.get(node_id)
        return None if document is None else decode_document(_Node, document).endpoint

    async def all(self) -> list[tuple[Endpoint, float]]:
        """Return where the nodes are that live, and when each said so, in unix seconds.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now, found = self._clock.now(), []
        for document in (await self._table.all()).values():
            with suppress(StorageIOError):  # of a release that knows better
                node = decode_document(_Node, document)
                if node.until > now:
                    found.append((node.endpoint, node.until - _LIFE_SECONDS))
        return found

    async def _forget_dead(self, now: float) -> None:
        for node_id in await self._table.due(now, _MOST_FORGOTTEN):
            document = await self._table.get(node_id)
            if document is not None and _ended(document, now):
                await self._table.replace(node_id, document, None)


def _ended(document: bytes, now: float) -> bool:
    try:
        return decode_document(_Node, document).until <= now
    except StorageIOError:
        return True  # nobody can use what nobody can read
