"""Administrators' keys that lay in files when a manager started, such as mounted secrets.

Each is taken over once, and that is never forgotten: a key that was revoked or rotated, or has ended, stays ended,
though it still lies in the file at the next start.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcm.model.api_keys import ApiKey, PresentedKey
from kvcm.model.clock import Clock
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.principals import ALL_GROUPS, Role
from kvcm.registry.batch import Batch
from kvcm.registry.shelf import Flush, Shelf
from kvcm.store.store import Table

__all__ = ["TakenKey", "TakenKeys"]


@dataclass(frozen=True, slots=True)
class TakenKey:
    """That a key was taken over.

    Attributes:
        id: names the key.
        at: when, unix seconds.
    """

    id: str
    at: float


class TakenKeys:
    """Takes keys over.

    Args:
        table: holds the documents.
        keys: those that there are.
        taken: when keys were taken over, unix seconds by id.
        flush: returns when what was changed is durable.
        clock: time source.
    """

    def __init__(self, table: Table, keys: Shelf[ApiKey], taken: Shelf[float], flush: Flush, clock: Clock) -> None:
        self._table = table
        self._keys = keys
        self._taken = taken
        self._flush = flush
        self._clock = clock

    async def take_over(self, name: str, presented: PresentedKey) -> ApiKey | None:
        """Have a key of an administrator, unless it was had before.

        Args:
            name: of its principal.
            presented: the key.

        Returns:
            What is kept of the key, None when it has ended.

        Raises:
            InvalidArgumentError: the key of its id has another secret.
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        new = ApiKey(presented.id, name, Role.ROLE_ADMIN, (ALL_GROUPS,), (), now, 0.0, presented.digest())
        while await self._taken.read(presented.id) is None:
            await self._take(new)
        known = await self._keys.read(presented.id)
        if known is not None and not known.is_proven_by(presented):
            raise InvalidArgumentError(f"key {presented.id!r} has another secret")
        return known if known is not None and not known.is_over(now) else None

    async def all(self) -> list[TakenKey]:
        """Return what was taken over so far, ordered by id.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._taken.take(await self._table.all(), ())
        return [TakenKey(key_id, at) for key_id in self._taken.names() if (at := self._taken.get(key_id)) is not None]

    async def remember(self, taken: TakenKey) -> None:
        """Note that a key was taken over, elsewhere; what is noted already stays.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._taken.change(taken.id, lambda known: known or taken.at)

    async def _take(self, new: ApiKey) -> None:
        known, batch = await self._keys.read(new.id), Batch()
        if known is None:
            batch.stage(self._keys, new.id, new)
        batch.stage(self._taken, new.id, new.created_at)
        await batch.commit(self._table)  # if somebody else was faster, it is looked at again
        await self._flush()
