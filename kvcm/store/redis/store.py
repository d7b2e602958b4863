"""The store that several managers share."""

from __future__ import annotations

from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.tables import RedisTable

__all__ = ["RedisStore"]


class RedisStore:
    """Documents in Redis.

    Args:
        client: of the servers; closed with the store.
    """

    is_shared = True

    def __init__(self, client: RedisClient) -> None:
        self.client = client

    def table(self, name: str, shard_count: int = 1) -> RedisTable:
        return RedisTable(self.client, name, shard_count)

    async def flush(self) -> None:
        """Return at once: a change is as durable as the server is configured when it is answered."""

    async def sync(self) -> None:
        """As `flush`: when a server syncs is its own affair."""

    async def close(self) -> None:
        await self.client.close()
