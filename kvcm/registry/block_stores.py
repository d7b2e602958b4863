"""A further metadata store, which keeps the blocks of some groups (`GroupStores`).

It has the blocks and nothing else: no registry, no sessions, no usage. So one that is away costs its groups alone, and
one that was emptied costs hits alone. Two things must not happen: that a deployment takes another one's store for its
own, and that a store which went back in time is answered from as if it had not (`LossJournal`, of which each server of
it is a part).
"""

from __future__ import annotations

from typing import Final

import structlog

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.eviction_watch import EvictionWatch
from kvcm.store.redis.store import RedisStore, RedisTable

__all__ = ["BlockStore"]

_OWNER: Final = "deployment"
_log = structlog.get_logger("kvcm.store")


class BlockStore:
    """One further store.

    Args:
        name: that groups name it by.
        client: of its servers.
        tags: of instances in it (`Placement.tags`).

    Attributes:
        name: as given.
        store: its tables, whose names end with `@` and its name.
        eviction: whether its servers drop keys.
        tags: as given.
        trouble: why it is not used, "" while it is.
    """

    def __init__(self, name: str, client: RedisClient, tags: int) -> None:
        self.name = name
        self.tags = tags
        self.store = RedisStore(client, name)
        self.eviction = EvictionWatch(client, self.store.table(f"losses@{name}"))
        client.gate.closed = self.trouble = f"block store {name!r} was not reached yet"
        self._owner = RedisTable(client.ungated(), "blocks", 1)
        self._registry = RedisTable(client.ungated(), "registry", 1)

    async def check(self, deployment: str) -> None:
        """Close the store for this manager unless it is this deployment's; an unclaimed one becomes that.

        Args:
            deployment: random id of the deployment.
        """
        try:
            trouble = await self._foreign(deployment.encode())
        except StorageIOError as error:
            trouble = str(error)
        else:
            self.store.client.gate.closed = trouble
        if trouble != self.trouble:
            self.trouble = trouble
            _log.log(30 if trouble else 20, "block_store", name=self.name, reason=trouble or "it is in use")

    async def _foreign(self, deployment: bytes) -> str:
        """Return why the store is not this deployment's, "" where it is."""
        owner = await self._owner.get(_OWNER)
        if owner is None and await self._registry.get("meta/incarnation") is None:
            await self._owner.replace(_OWNER, None, deployment)
            owner = await self._owner.get(_OWNER)
        if owner == deployment:
            return ""
        what = "has the blocks of" if owner is not None else "is the registry's store of"
        return (
            f"block store {self.name!r} {what} another deployment, or of this one under the same cluster_name: give it "
            "a cluster_name of its own in kvcm.store.block_stores"
        )
