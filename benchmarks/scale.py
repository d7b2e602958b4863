"""Claim: nothing that a manager does grows with the number of blocks in the store.

One Redis is filled with blocks of one spec, first a million, then many more; at both sizes a new manager takes over
(opens, leads, recounts the usage, looks for due sessions), looks up 1,024 random blocks past its search cache, removes
1,024 and deletes them, and samples 1,024. The second size is compared with the first, in one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import redis
from index import BLOCKS, records, resident_bytes
from report import Row, arguments, publish

from kvcm.app import Manager
from kvcm.components import Components
from kvcm.config import Settings
from kvcm.index.backends.backend import Change
from kvcm.index.backends.redis import RedisBackend
from kvcm.model.errors import DuplicateEntityError
from kvcm.model.groups import CacheConfig, CacheReclaimStrategy, InstanceGroup, InstanceGroupQuota
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import NO_MASK
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.telemetry.logs import LEVELS, configure_logs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from redis_servers import standalone

INSTANCE = "Qwen3-8B"
LOADERS = 2
ROUNDS = 15
MOST_RATIO = 2.0
MOST_BYTES = 600.0


@contextlib.asynccontextmanager
async def opened(uri: str) -> AsyncIterator[Components]:
    """A manager over the store inside the block, with a group whose blocks may be deleted at once."""
    settings = Settings(registry_storage_uri=uri, search_cache_bytes=0)
    async with Manager(settings).opened() as components:
        reclaim = CacheReclaimStrategy("nfs_01", delay_before_delete_ms=0)
        quota = InstanceGroupQuota(1 << 60)
        group = InstanceGroup("scale", ("nfs_01",), "all", quota=quota, cache_config=CacheConfig(reclaim))
        with contextlib.suppress(DuplicateEntityError):  # the other loader was faster
            await components.registry.storages.add(StorageConfig("nfs_01", DummyStorageSpec()))
        with contextlib.suppress(DuplicateEntityError):
            await components.registry.groups.create(group)
        specs = (LocationSpecInfo("tp0", 1 << 20),)
        await components.cache.register_instance(
            Instance("", "scale", INSTANCE, 64, specs, ModelDeployment("m", "bf16"))
        )
        yield components


async def child_load(uri: str, first: int, end: int) -> dict[str, float]:
    """Store blocks, as a manager that writes them for the first time."""
    async with opened(uri) as components:
        placement = components.registry.instances.placement(INSTANCE)
    client = RedisClient.of(parse_redis_uri(uri))
    backend = RedisBackend(client, placement.uid, placement.shard_count)
    for start in range(first, end, BLOCKS):
        written = await backend.write_many([Change(key, None, new) for key, new in records(start, BLOCKS).items()])
        assert not written.lost, "somebody else writes"
    await client.close()
    return {}


async def timed(work: Callable[..., Awaitable[Any]], *words: Any) -> float:
    """Return the seconds that one call takes."""
    begin = time.perf_counter()
    await work(*words)
    return time.perf_counter() - begin


async def reclaim(components: Components, keys: list[int]) -> None:
    """Remove blocks and delete them."""
    await components.cache.remove(components.cache.cache(INSTANCE), keys, NO_MASK)
    await components.deletions.run_due()


async def child_measure(uri: str, count: int, _unused: int) -> dict[str, float]:
    """Measure what a manager does over so many blocks."""
    configure_logs(LEVELS["ERROR"])
    before = resident_bytes()
    choice, figures = random.Random(7), {}
    begin = time.perf_counter()
    async with opened(uri) as components:
        await components.leadership.tick()
        assert components.leadership.is_leader
        assert components.sharing is not None
        await components.sharing.recount.recount("scale")
        await components.cache.expire()
        await components.cache.purge_removed()
        await components.deletions.run_due()
        figures["takeover"] = time.perf_counter() - begin
        index = components.cache.cache(INSTANCE).index
        lookups, matches, removals, samples = [], [], [], []
        for start in choice.sample(range(0, count, BLOCKS), ROUNDS):
            stored = records(start, BLOCKS)
            page = list(stored)
            lookups.append(await timed(index.get, page))
            matches.append(await timed(index.answers, page))
            samples.append(await timed(index.random_sample, BLOCKS, choice))
            removals.append(await timed(reclaim, components, page))
            assert await index.get(page) == [None] * BLOCKS
            await index.put(stored)
        figures |= {
            "lookup": statistics.median(lookups),
            "match": statistics.median(matches),
            "reclaim": statistics.median(removals),
            "sample": statistics.median(samples),
            "keys": float(index.key_count),
            "rss": float(resident_bytes() - before),
        }
        await components.leadership.withdraw()
    return figures


def child(role: str, *words: object) -> subprocess.Popen[str]:
    """Run this file in a process of its own."""
    command = [sys.executable, __file__, "--child", role, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for a process and return the figures that it prints."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a part of the benchmark failed with {process.returncode}")
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def fill(uri: str, first: int, end: int) -> None:
    """Store blocks from several processes."""
    step = -(-(end - first) // LOADERS // BLOCKS) * BLOCKS
    parts = [(start, min(end, start + step)) for start in range(first, end, step)]
    for process in [child("load", uri, *part) for part in parts]:
        answer(process)


def used_bytes(port: int) -> int:
    """Return the memory that the server uses for data."""
    client = redis.Redis(port=port)
    try:
        return int(client.info("memory")["used_memory"])  # type: ignore[index]
    finally:
        client.close()


def rows_of(small: dict[str, float], large: dict[str, float], counts: tuple[int, int]) -> list[Row]:
    """Compare the figures of both sizes."""
    names = {
        "lookup": f"get of {BLOCKS} random blocks",
        "match": f"match of {BLOCKS} blocks past the search cache",
        "sample": f"sample of {BLOCKS} blocks",
        "reclaim": f"reclaim round: {BLOCKS} blocks removed and deleted",
        "takeover": "takeover by a new leader: open, lead, recount, first duties",
    }
    rows = []
    for name, text in names.items():
        ratio = large[name] / small[name]
        case = f"{text}, {counts[1]:,} blocks against {counts[0]:,}"
        target = f"ratio <= {MOST_RATIO}"
        rows.append(Row(case, "time", large[name] * 1e3, "ms", small[name] * 1e3, ratio, target, ratio <= MOST_RATIO))
    for count, figures in zip(counts, (small, large), strict=True):
        value = figures["bytes"]
        case = f"redis with {count:,} blocks of one spec"
        rows.append(Row(case, "bytes per block", value, "B", target=f"<= {MOST_BYTES:.0f}", ok=value <= MOST_BYTES))
    value, baseline = large["rss"] / 2**20, small["rss"] / 2**20
    rows.append(Row("memory of the manager", "resident memory grown", value, "MiB", baseline, value / baseline))
    return rows


def main() -> int:
    """Run everything."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--blocks", type=int, default=20_000_000, help="blocks of the larger size")
    parser.add_argument("--child", nargs="+", help="for this file itself")
    options = parser.parse_args()
    if options.child:
        role, uri, *numbers = options.child
        roles = {"load": child_load, "measure": child_measure}
        print(json.dumps(asyncio.run(roles[role](uri, *map(int, numbers)))))
        return 0
    counts = (BLOCKS * 16, BLOCKS * 64) if options.quick else (BLOCKS * 977, options.blocks // BLOCKS * BLOCKS)
    with tempfile.TemporaryDirectory() as directory, standalone(Path(directory)) as server:
        uri = server.uri("scale", timeout_ms=10_000)
        empty, first, measured = used_bytes(server.server.port), 0, []
        for count in counts:
            begin = time.perf_counter()
            fill(uri, first, count)
            print(f"{count:,} blocks after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
            figures = answer(child("measure", uri, count, 0))
            figures["bytes"] = (used_bytes(server.server.port) - empty) / count
            measured.append(figures)
            first = count
        rows = rows_of(measured[0], measured[1], counts)
    return 0 if publish("scale: many blocks in one Redis", rows, options.json) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
