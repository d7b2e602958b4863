"""Claim: metadata that outlives the process costs little more than metadata in memory.

Both sides of every ratio alternate in one process, the median window counts:

* a match of 1,024 keys through the search cache in front of Redis, against the same match on the memory backend;
* the same match past the search cache, against a bare MGET of the same records with redis-py;
* read-modify-write of 1,024 records on every backend, against memory.

Two figures stand alone: resident memory per block of one spec, and the start of a manager's RocksDB with a million
blocks; each is taken in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import redis.asyncio
from report import Row, arguments, publish

from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.backends.rocks import load_index
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget
from kvcm.model.clock import SystemClock
from kvcm.model.keys import mixed
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks import RocksStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from redis_servers import cluster, standalone

BLOCKS = 1024
SHARDS = 16
CHAIN = 4096  # blocks per prefix chain: 256K tokens at 64 per block
MOST_START_SECONDS = 10.0
MOST_RSS_BYTES = 450.0
MOST_CACHED_RATIO = 1.3
MOST_UNCACHED_RATIO = 3.0


class OneStorage:
    """Every storage is available."""

    generation = 0

    def rank(self, _storage: str) -> int | None:
        return 0


def records(start: int, count: int, status: LocationStatus = LocationStatus.SERVING) -> dict[int, BlockRecord]:
    """Return blocks of one write session by their mixed keys: one spec each, in chains."""
    made: dict[int, BlockRecord] = {}
    location_id, parent = f"{start:012x}", None
    keys = [number * 0x9E3779B97F4A7C15 % (1 << 64) - (1 << 63) for number in range(start, start + count)]
    for number, key, mixed_key in zip(range(start, start + count), keys, mixed(keys), strict=True):
        depth = number % CHAIN
        uri = f"file://nfs_01/mnt/kv/86393fc1239c2c13/Qwen3-8B/tp0/{key % (1 << 64):x}.{location_id}?size=1048576"
        chunk = encode_chunk(StorageType.ST_NFS, 1, [SpecUri("tp0", uri)])
        place = Location(location_id, "nfs_01", StorageType.ST_NFS, status, ("tp0",), chunk, 1 << 20, 1.7e9 + start)
        made[mixed_key] = BlockRecord(parent if depth else None, depth, (place,))
        parent = mixed_key
    return made


def index_of(backend: IndexBackend, budget: CacheBudget | None = None) -> MetaIndex:
    """Return an index as the manager opens it."""
    return MetaIndex(backend, OneStorage(), shard_count=SHARDS, batch_key_size=BLOCKS, budget=budget)


@contextlib.asynccontextmanager
async def connected(uri: str) -> AsyncIterator[RedisClient]:
    """A client inside the block."""
    client = RedisClient.of(parse_redis_uri(uri))
    try:
        yield client
    finally:
        await client.close()


Work = Callable[[], Awaitable[Any]]


async def windows(ours: Work, theirs: Work, rounds: int, repeat: int) -> tuple[float, float]:
    """Return the median seconds per call of both sides; windows alternate."""
    taken: tuple[list[float], list[float]] = ([], [])
    await ours()
    await theirs()
    for _ in range(rounds):
        for side, work in zip(taken, (ours, theirs), strict=True):
            begin = time.perf_counter()
            for _ in range(repeat):
                await work()
            side.append((time.perf_counter() - begin) / repeat)
    return statistics.median(taken[0]), statistics.median(taken[1])


async def reads(uri: str, rounds: int, repeat: int) -> list[Row]:
    """Compare matches through and past the search cache."""
    stored = records(0, BLOCKS)
    keys = list(stored)
    memory = index_of(MemoryBackend())
    await memory.put(stored)
    async with connected(uri) as client:
        cached = index_of(RedisBackend(client, 1, SHARDS), CacheBudget(1 << 30))
        bare_index = index_of(RedisBackend(client, 1, SHARDS), CacheBudget(1 << 30, is_coherent=lambda _store: False))
        await cached.put(stored)
        assert await cached.answers(keys) == await memory.answers(keys) == await bare_index.answers(keys)
        rows = [
            _cost(
                f"match of {BLOCKS} keys, redis behind the search cache, against memory",
                await windows(lambda: cached.answers(keys), lambda: memory.answers(keys), rounds, repeat * 20),
                MOST_CACHED_RATIO,
            )
        ]
        bare = redis.asyncio.Redis.from_url(uri.partition("?")[0])
        names = [name async for name in bare.scan_iter(match=f"{client.prefix}:b*", count=1000)]
        assert len(names) == BLOCKS
        rows += [
            _cost(
                f"get of {BLOCKS} records from redis, against a bare MGET",
                await windows(lambda: bare_index.get(keys), lambda: bare.mget(names), rounds, repeat),
                MOST_UNCACHED_RATIO,
            ),
            _cost(
                f"match of {BLOCKS} keys past the search cache, against a bare MGET",
                await windows(lambda: bare_index.answers(keys), lambda: bare.mget(names), rounds, repeat),
            ),
        ]
        await bare.aclose()
    return rows


def _cost(case: str, taken: tuple[float, float], most: float | None = None) -> Row:
    value, baseline = taken
    ratio = value / baseline
    target = f"ratio <= {most}" if most is not None else ""
    return Row(case, "time", value * 1e6, "us", baseline * 1e6, ratio, target, ratio <= most if most else None)


@contextlib.asynccontextmanager
async def rocks_index(directory: Path, fsync: str) -> AsyncIterator[tuple[MetaIndex, RocksStore]]:
    """An index on a new RocksDB inside the block."""
    store = RocksStore(directory, fsync, SystemClock())
    try:
        yield index_of(load_index(store).backend(1)), store
    finally:
        await store.close()


async def changes(uris: dict[str, str], directory: Path, rounds: int) -> list[Row]:
    """Compare read-modify-write of blocks: writing to serving and back, made durable."""
    memory = index_of(MemoryBackend())

    async def nothing() -> None:
        """Memory is never flushed."""

    rows: list[Row] = []
    for fsync in ("always", "everysec"):
        async with rocks_index(directory / fsync, fsync) as (index, store):
            rows.append(await _change_row(f"rocksdb, fsync {fsync}", index, store.flush, memory, nothing, rounds))
    for kind, uri in uris.items():
        async with connected(uri) as client:
            index = index_of(RedisBackend(client, 2, SHARDS))
            rows.append(await _change_row(kind, index, nothing, memory, nothing, rounds))
    return rows


async def _change_row(kind: str, index: MetaIndex, flush: Work, memory: MetaIndex, nothing: Work, rounds: int) -> Row:
    stored = records(0, BLOCKS)

    def toggled(_key: int, old: BlockRecord | None) -> BlockRecord | None:
        assert old is not None
        (place,) = old.locations
        other = LocationStatus.WRITING if place.status is LocationStatus.SERVING else LocationStatus.SERVING
        return old._replace(locations=(place._replace(status=other, deadline=2e9),))

    async def change(target: MetaIndex, durable: Work) -> None:
        await target.read_modify_write(stored, toggled)
        await durable()

    await index.put(stored)
    await memory.put(stored)
    taken = await windows(lambda: change(index, flush), lambda: change(memory, nothing), rounds, 3)
    return _cost(f"read-modify-write of {BLOCKS} records, {kind}, against memory", taken)


# ---- processes of their own -----------------------------------------------------------------------------------------


def child(role: str, *words: str) -> float:
    """Run this file in a process of its own and return the figure that it prints."""
    run = subprocess.run(
        [sys.executable, __file__, "--child", role, *words], capture_output=True, text=True, check=True
    )
    return float(run.stdout.split()[-1])


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def child_memory(count: int) -> float:
    """Return resident bytes per block of an index in memory whose blocks were written and finished."""
    index = index_of(MemoryBackend())
    await index.put(records(0, BLOCKS))
    gc.collect()
    before = resident_bytes()
    for start in range(BLOCKS, BLOCKS + count, BLOCKS):
        page = records(start, BLOCKS, LocationStatus.WRITING)
        await index.put(page)
        # The keys of a finish were read again, from the session: other objects than those of the start.
        await index.update({int(str(key)): _serving(record) for key, record in page.items()})
    gc.collect()
    return (resident_bytes() - before) / count


def _serving(record: BlockRecord) -> BlockRecord:
    (place,) = record.locations
    return record._replace(locations=(place._replace(status=LocationStatus.SERVING),))


async def child_fill(count: int, directory: Path) -> float:
    """Fill a RocksDB."""
    async with rocks_index(directory, "never") as (index, store):
        for start in range(0, count, BLOCKS):
            await index.put(records(start, BLOCKS))
            await store.flush()
        return float(index.key_count)


async def child_start(count: int, directory: Path) -> float:
    """Return the seconds that it takes to open and load a RocksDB."""
    begin = time.perf_counter()
    async with rocks_index(directory, "never") as (index, _):
        taken = time.perf_counter() - begin
        assert index.key_count >= count
    return taken


def alone(count: int, directory: Path) -> list[Row]:
    """Take the figures that need a process of their own."""
    bytes_per_block = child("memory", str(count))
    target = f"<= {MOST_RSS_BYTES:.0f}"
    rows = [
        Row(
            f"{count:,} blocks of one spec in memory",
            "resident memory per block",
            bytes_per_block,
            "B",
            target=target,
            ok=bytes_per_block <= MOST_RSS_BYTES,
        )
    ]
    child("fill", str(count), str(directory / "start"))
    seconds = child("start", str(count), str(directory / "start"))
    ok = seconds <= MOST_START_SECONDS * count / 1e6
    rows.append(Row(f"rocksdb with {count:,} blocks", "time to load", seconds, "s", target="10 s per million", ok=ok))
    return rows


def run_child(role: str, words: list[str]) -> None:
    """Do one part in this process and print its figure."""
    count, *paths = words
    roles: dict[str, Callable[..., Awaitable[float]]] = {
        "memory": child_memory,
        "fill": child_fill,
        "start": child_start,
    }
    print(asyncio.run(roles[role](int(count), *map(Path, paths))))  # type: ignore[arg-type]


def main() -> int:
    """Run everything."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--child", nargs="+", help="for this file itself")
    options = parser.parse_args()
    if options.child:
        run_child(options.child[0], options.child[1:])
        return 0
    rounds, repeat, count = (5, 3, 65_536) if options.quick else (31, 10, 1_000_448)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(standalone(directory / "one"))
        nodes = stack.enter_context(cluster(directory / "three"))
        uris = {"redis": server.uri("bench"), "redis cluster of three": nodes.uri("bench")}
        rows = asyncio.run(reads(uris["redis"], rounds, repeat))
        rows += asyncio.run(changes(uris, directory, rounds))
        rows += alone(count, directory)
    return 0 if publish("index: durable metadata against memory", rows, options.json) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
