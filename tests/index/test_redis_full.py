"""A server at its `maxmemory`: what is new is refused, what makes room runs, and all works again once there is room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import redis
from redis_servers import standalone
from waiting import until

from kvcm.index.backends.backend import Change
from kvcm.index.backends.redis import RedisBackend
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import BlockRecord, Location, LocationStatus, Place
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.lease import RedisLease
from kvcm.store.redis.script import Script, ScriptCall
from kvcm.store.redis.tables import RedisTable
from kvcm.store.redis.uri import parse_redis_uri

NFS = Place("nfs", StorageType.ST_NFS)
SERVING = Location("a", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), b"chunk", 10, 1700000000.0)
WRITING = SERVING._replace(id="w", status=LocationStatus.WRITING, session_id="s", deadline=1700000030.0)
DELETING = SERVING._replace(status=LocationStatus.DELETING, deadline=1700000060.0)
MIB = 1 << 20
FULL = "memory of the server is full"


class FullServer:
    """A server with some room, a client of it, and what takes the room away and gives it back."""

    def __init__(self, admin: redis.Redis, client: RedisClient) -> None:
        self._admin, self.client = admin, client
        admin.config_set("maxmemory", self._used_bytes() + 4 * MIB)

    def fill(self) -> None:
        """Write until the server refuses; the last bytes by small values."""
        for size_bytes in (MIB // 4, 1024, 16):
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                self._write(size_bytes)

    def free(self) -> None:
        """Take the large values away."""
        self._admin.delete(*(f"ballast{MIB // 4}.{number}" for number in range(100)))
        until(lambda: self._used_bytes() < int(self._admin.config_get("maxmemory")["maxmemory"]))

    def _write(self, size_bytes: int) -> None:
        for number in range(100_000):
            self._admin.set(f"ballast{size_bytes}.{number}", bytes(size_bytes))

    def _used_bytes(self) -> int:
        return int(self._admin.info("memory")["used_memory"])


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullServer]:
    with standalone(tmp_path) as server, server.server.admin() as admin:
        client = RedisClient.of(parse_redis_uri(server.uri("full", timeout_ms=10_000)))
        await client.ping()
        yield FullServer(admin, client)
        await client.close()


def record(*locations: Location, parent: int | None = 9) -> BlockRecord:
    return BlockRecord(parent, 0, locations)


async def write(backend: RedisBackend, keys: Iterable[int], new: BlockRecord | None) -> None:
    olds = await backend.get_many(list(keys))
    written = await backend.write_many([Change(key, old, new) for key, old in zip(keys, olds, strict=True)])
    assert not written.lost


async def test_blocks_are_decided_marked_and_removed_on_a_full_server(full: FullServer) -> None:
    """Invariant 4: what is refused changes nothing, what runs changes all that belongs together."""
    backend = RedisBackend(full.client, 1, 1)
    await write(backend, range(100), record(WRITING))
    await write(backend, range(100, 200), record(SERVING))
    full.fill()
    with pytest.raises(StorageIOError, match=FULL):
        await write(backend, range(190, 210), record(SERVING, parent=8))
    assert await backend.get_many([190, 200]) == [record(SERVING), None]
    await write(backend, range(100), record(SERVING))
    await write(backend, range(100, 200), record(DELETING))
    assert sorted(await backend.due(1700000060.0, 1000)) == [*range(100, 200)]
    await write(backend, range(100, 200), None)
    assert await backend.children(9) == [*range(100)]
    assert await backend.due(1.8e9, 1000) == []
    await backend.refresh()
    assert (backend.key_count, backend.usage_bytes) == (100, {NFS: 1000})
    full.free()
    await write(backend, range(200, 210), record(WRITING))
    assert await backend.get_many(range(200, 210)) == [record(WRITING)] * 10


async def test_blocks_of_a_removed_instance_go_on_a_full_server(full: FullServer) -> None:
    backend = RedisBackend(full.client, 1, 2)
    await write(backend, range(600), record(SERVING))
    full.fill()
    await backend.drop()
    assert await RedisBackend(full.client, 1, 2).get_many(range(600)) == [None] * 600
    assert await backend.children(9) == []


async def test_documents_are_decided_and_ended_on_a_full_server(full: FullServer) -> None:
    table = RedisTable(full.client, "sessions", 4)
    assert await table.replace("open", None, b"open", 5.0)
    assert await table.replace("late", None, b"open", 6.0)
    full.fill()
    version = await table.version()
    with pytest.raises(StorageIOError, match=FULL):
        await table.replace("new", None, b"open", 7.0)
    assert await table.version() == version
    assert not await table.replace("open", b"other", b"decided", 8.0)
    assert await table.replace("open", b"open", b"decided", 8.0)
    assert await table.replace("late", b"open", None)
    assert (await table.all(), await table.due(9.0, 9)) == ({"open": b"decided"}, ["open"])
    assert await table.version() == version + 2
    full.free()
    assert await table.replace("new", None, b"open", 7.0)


async def test_leadership_changes_hands_on_a_full_server(full: FullServer) -> None:
    full.fill()
    lease = RedisLease(full.client)
    assert await lease.hold("first", 60.0) == ("first", 1)
    assert await lease.hold("first", 60.0) == ("first", 1)
    assert await lease.hold("second", 60.0) == ("first", 1)
    await lease.release("first")
    assert await lease.hold("second", 60.0) == ("second", 2)


async def test_only_scripts_that_say_so_run_on_a_full_server(full: FullServer) -> None:
    text = "return redis.call('SET', KEYS[1], ARGV[1])"
    full.fill()
    with pytest.raises(StorageIOError, match=FULL):
        await full.client.run([ScriptCall(Script(text), [b"full:x"], [b"value"])])
    await full.client.run([ScriptCall(Script(text, allow_oom=True), [b"full:x"], [b"value"])])
    assert await full.client.mget([[b"full:x"]]) == [[b"value"]]
