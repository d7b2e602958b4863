"""A Redis at its `maxmemory`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from redis_servers import standalone
from waiting import until

from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import parse_redis_uri

__all__ = ["FULL", "FullServer", "full_server"]

FULL = "memory of the server is full"
_MIB = 1 << 20


class FullServer:
    """A server with some free memory, a client of it, and calls that fill and free the memory."""

    def __init__(self, admin: redis.Redis, client: RedisClient) -> None:
        self._admin, self.client = admin, client
        admin.config_set("maxmemory", self._used_bytes() + 4 * _MIB)

    def fill(self) -> None:
        """Write until the server refuses; the last bytes by small values."""
        for size_bytes in (_MIB // 4, 1024, 16):
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                self._write(size_bytes)

    def free(self) -> None:
        """Take the large values away."""
        self._admin.delete(*(f"ballast{_MIB // 4}.{number}" for number in range(100)))
        until(lambda: self._used_bytes() < int(self._admin.config_get("maxmemory")["maxmemory"]))

    def _write(self, size_bytes: int) -> None:
        for number in range(100_000):
            self._admin.set(f"ballast{size_bytes}.{number}", bytes(size_bytes))

    def _used_bytes(self) -> int:
        return int(self._admin.info("memory")["used_memory"])


@asynccontextmanager
async def full_server(directory: Path) -> AsyncIterator[FullServer]:
    """A server of its own inside the block."""
    with standalone(directory) as server, server.server.admin() as admin:
        client = RedisClient.of(parse_redis_uri(server.uri("full", timeout_ms=10_000)))
        await client.ping()
        yield FullServer(admin, client)
        await client.close()
