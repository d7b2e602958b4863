"""Every kind of index backend, empty, on real servers where it needs one. A new one joins with one line in RIGS."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.backends.redis_runs import RunsBackend
from kvcm.index.backends.rocks import load_index
from kvcm.model.clock import SystemClock
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks import RocksStore

__all__ = ["ALONE", "KINDS", "RIGS", "SHARED", "Rig", "connected", "opened"]

_SHARD_COUNT = 4

_uids = count(1)


@dataclass(frozen=True)
class Rig:
    """Makes backends of one kind.

    Attributes:
        fresh: a backend of an instance that has no blocks yet.
        beside: what another manager has: its own backend of the same instance. Only of shared kinds.
    """

    fresh: Callable[[], IndexBackend]
    beside: Callable[[Any], IndexBackend] | None = None


@asynccontextmanager
async def connected(uri: str) -> AsyncIterator[RedisClient]:
    """A client inside the block."""
    client = RedisClient.of(parse_redis_uri(uri))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def _memory(_request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    yield Rig(MemoryBackend)


@asynccontextmanager
async def _rocks(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    directory = request.getfixturevalue("tmp_path_factory").mktemp("rocks")
    store = RocksStore(directory, "never", SystemClock())
    try:
        index = load_index(store)
        yield Rig(lambda: index.backend(next(_uids)))
        await store.flush()
    finally:
        await store.close()


def _redis(
    servers: str, new: Callable[[RedisClient, int, int], IndexBackend], parts: int = _SHARD_COUNT
) -> Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[Rig]]:
    """Return what makes a rig on servers that a fixture runs."""

    @asynccontextmanager
    async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
        uri = request.getfixturevalue(servers).uri(f"test-{secrets.token_hex(8)}")
        async with connected(uri) as one, connected(uri) as another:
            made: dict[IndexBackend, int] = {}

            def fresh() -> IndexBackend:
                uid = next(_uids)
                backend = new(one, uid, parts)
                made[backend] = uid
                return backend

            yield Rig(fresh, lambda backend: new(another, made[backend], parts))

    return rig


RIGS: dict[str, Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[Rig]]] = {
    "memory": _memory,
    "rocksdb": _rocks,
    "redis": _redis("redis_standalone", RedisBackend),
    "redis-cluster": _redis("redis_cluster", RedisBackend),
    "redis-sentinel": _redis("redis_sentinel", RedisBackend),
    "redis-runs": _redis("redis_standalone", RunsBackend, 1),
    "redis-runs-cluster": _redis("redis_cluster", RunsBackend),
}
# Behind Sentinel is a Redis like any other, which the client finds in another way: CI tries that.
KINDS = [pytest.param(kind, marks=pytest.mark.ci) if kind == "redis-sentinel" else kind for kind in RIGS]
ALONE, SHARED = KINDS[:2], KINDS[2:]


@asynccontextmanager
async def opened(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """A rig of that kind inside the block."""
    async with RIGS[kind](request) as rig:
        yield rig
