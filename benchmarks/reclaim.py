"""Claim: readers hardly notice that a manager evicts 10,000 blocks a second, over Redis 3,000.

Part one: a manager process with its metadata in RocksDB or on one Redis, and a group on a storage that moves no bytes.
Windows without and with eviction alternate under one load: prefix matches of hot prefixes that come at random, each
timed from the moment at which it was to be sent; fresh blocks, written at a fixed rate; and updates of the group's soft
mark at a fixed rate. Only the mark that these set differs. Without eviction it is far away. With eviction it follows
the writes and sinks, a little forty times a second, so that everything that is written displaces as much, and a backlog
of cold blocks goes beside that: together 10,000 blocks a second and a few more, over Redis 3,000. Writes as fast as
that would take half a core for themselves in both kinds of windows, which would hide the cost of eviction. The blocks
evicted and deleted are those that the manager's own counters say. Before each window the index is filled up again.

Part two, in one process: time of the event loop per evicted block, by policy and store, also of chains of 4,096 blocks
that were written in parts of 256; CPU of Redis; and memory per block of the order in this process.

Longer than 400 lines because one claim is one file, and both parts set up the same group.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from report import Row, arguments, publish
from server_process import META, Server, free_port, process
from service_site import Store, opened

from kvcm.app import Manager
from kvcm.components import Components
from kvcm.config import Settings
from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceGroupQuota,
    TriggerStrategy,
)
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.calls import Call, Caller, CallRecorder
from kvcm.service.meta_api import MetaApi
from kvcm.service.request_limits import RequestLimits
from kvcm.telemetry.logs import LEVELS, configure_logs
from kvcm.telemetry.metrics import ApiMetrics

ADMIN = "/kv_cache_manager.proto.admin.AdminService/"
NAME = "bench"  # of the storage, the group and the instance
BLOCK_BYTES = 4096
CHAIN = 256  # blocks of a prefix
BATCH = 64  # blocks of a write
HOT_CHAINS = 64
DRAIN_SECONDS = 2.0  # after which reads are known to the order of eviction
FAR = 1 << 40  # bytes that no window gets to
LONG_CHAIN = 4096
MOST_RATIO = 2.0
POLICIES = ("leaf_lru", "lru", "lfu", "fifo", "sieve", "s3fifo")


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, per second, and the windows.

    Attributes:
        store: of the metadata.
        blocks: resident at the beginning of a round.
        evicted: blocks to be evicted.
        written: fresh blocks.
        reads: prefix matches, of 64 and of 256 blocks in turn.
        updates: of the group.
        seconds: of a window.
        rounds: windows of each kind.
    """

    store: str = "rocksdb"
    blocks: int = 200_000
    evicted: int = 10_300
    written: int = 1_280
    reads: int = 200
    updates: int = 40
    seconds: float = 6.0
    rounds: int = 5

    @property
    def least(self) -> int:
        """Blocks that are to be evicted at least."""
        return int(self.evicted / 1.03)


PLANS = (Plan(), Plan("redis", evicted=3_090))
QUICK = (Plan(blocks=30_000, evicted=3_000, seconds=2.0, rounds=2), Plan("redis", 20_000, 1_500, seconds=2.0, rounds=2))


class Case(NamedTuple):
    """A measurement in one process.

    Attributes:
        policy: how blocks are ordered.
        store: of the metadata.
        length: of a chain.
        is_live: whether the order is there while blocks are written, and not made of all of them, as after a start.
    """

    policy: str
    store: str = "rocksdb"
    length: int = CHAIN
    is_live: bool = False


CASES = (
    *map(Case, POLICIES),
    Case("leaf_lru", "memory", is_live=True),
    Case("leaf_lru", is_live=True),
    Case("leaf_lru", length=LONG_CHAIN, is_live=True),
    Case("leaf_lru", "redis"),
    Case("leaf_lru", "redis", LONG_CHAIN),
    Case("lfu", "redis"),
)


class Window(NamedTuple):
    """What one window showed.

    Attributes:
        latencies: of prefix matches, in ms, ascending.
        evicted: blocks per second.
        deleted: blocks per second.
        cpu: of the manager, in cores.
    """

    latencies: list[float]
    evicted: float
    deleted: float
    cpu: float

    def percentile(self, part: float) -> float:
        """Return the latency that such a part of the reads did not exceed."""
        return self.latencies[min(len(self.latencies) - 1, int(part * len(self.latencies)))]


def registration() -> pb.RegisterInstanceRequest:
    """Return the registration of an instance with one spec per block."""
    request = pb.RegisterInstanceRequest(instance_group=NAME, instance_id=NAME, block_size=64)
    request.model_deployment.model_name, request.model_deployment.dtype = "model", "float16"
    request.location_spec_infos.add(name="kv", size=BLOCK_BYTES)
    return request


def match_request(keys: list[int]) -> pb.GetCacheLocationRequest:
    """Return a prefix match."""
    return pb.GetCacheLocationRequest(instance_id=NAME, query_type=pb.QT_PREFIX_MATCH, block_keys=keys)


def start_request(keys: list[int]) -> pb.StartWriteCacheRequest:
    """Return the start of a write of fresh blocks that follow one another."""
    return pb.StartWriteCacheRequest(instance_id=NAME, block_keys=keys, write_timeout_seconds=60)


def finish_request(started: pb.StartWriteCacheResponse, blocks: int) -> pb.FinishWriteCacheRequest:
    """Return the end of a write that went well."""
    assert started.header.status.code == pb.OK, started
    request = pb.FinishWriteCacheRequest(instance_id=NAME, write_session_id=started.write_session_id)
    request.success_blocks.offset = blocks
    return request


# ---- part one: a manager under load ---------------------------------------------------------------------------------


class Load:
    """One instance of a manager, and the load on it.

    Args:
        server: the manager.
        plan: the load.
    """

    def __init__(self, server: Server, plan: Plan) -> None:
        self._server = server
        self._plan = plan
        self._random = random.Random(1)
        self._version = 0
        self._one_update = asyncio.Lock()
        self._hot: list[tuple[bytes, int]] = []

    async def call(self, method: str, body: bytes) -> bytes:
        """Send a request; return the answer."""
        answer: bytes = await self._server.channel.unary_unary(method)(body)
        return answer

    async def checked(self, method: str, request: Any) -> None:
        """Send a request that has to be answered with OK."""
        answer = pb.CommonResponse.FromString(await self.call(method, request.SerializeToString()))
        assert answer.header.status.code == pb.OK, f"{method}: {answer}"

    async def set_up(self) -> None:
        """Create everything, and the prefixes that are read."""
        dummy = admin_pb.DummyStorageSpec(root_path=NAME, key_count_per_file=1)
        storage = admin_pb.StorageConfig(global_unique_name=NAME, dummy=dummy)
        await self.checked(f"{ADMIN}AddStorage", admin_pb.AddStorageRequest(storage=storage))
        create = admin_pb.CreateInstanceGroupRequest(instance_group=self._group(FAR))
        await self.checked(f"{ADMIN}CreateInstanceGroup", create)
        await self.checked(f"{META}RegisterInstance", registration())
        for number in range(HOT_CHAINS):
            keys = await self.write(CHAIN)
            body = match_request(keys if number % 2 else keys[:BATCH]).SerializeToString()
            self._hot.append((body, len(await self.call(f"{META}GetCacheLocation", body))))

    def _group(self, mark_bytes: int) -> admin_pb.InstanceGroup:
        self._version += 1
        group = admin_pb.InstanceGroup(name=NAME, storage_candidates=[NAME], global_quota_group_name=NAME)
        group.version, group.max_instance_count, group.quota.capacity = self._version, 1, FAR
        group.cache_config.data_storage_strategy = admin_pb.CPS_PREFER_3FS
        indexer = group.cache_config.meta_indexer_config
        indexer.mutex_shard_num, indexer.meta_storage_backend_config.storage_type = 16, "local"
        indexer.meta_cache_policy_config.type = "LRU"
        reclaim = group.cache_config.reclaim_strategy
        reclaim.storage_unique_name = NAME
        reclaim.trigger_strategy.used_size, reclaim.trigger_strategy.hysteresis = mark_bytes, 0.0
        return group

    async def set_mark(self, mark_bytes: int) -> None:
        """Update the group: above so many bytes blocks are evicted."""
        async with self._one_update:
            known = self._version
            update = admin_pb.UpdateInstanceGroupRequest(instance_group=self._group(mark_bytes), current_version=known)
            await self.checked(f"{ADMIN}UpdateInstanceGroup", update)

    async def write(self, blocks: int) -> list[int]:
        """Write fresh blocks that follow one another; return their keys."""
        keys = [self._random.getrandbits(62) for _ in range(blocks)]
        answer = await self.call(f"{META}StartWriteCache", start_request(keys).SerializeToString())
        await self.checked(
            f"{META}FinishWriteCache", finish_request(pb.StartWriteCacheResponse.FromString(answer), blocks)
        )
        return keys

    async def read(self) -> None:
        """Match a hot prefix, which has to be there as a whole."""
        body, size = self._random.choice(self._hot)
        answer = await self.call(f"{META}GetCacheLocation", body)
        assert len(answer) == size, "a prefix that is read all the time was evicted"

    async def metrics(self) -> dict[str, float]:
        """Return the manager's metrics, summed over their tags."""
        answer = await self.call(f"{ADMIN}GetMetrics", b"")
        sums: dict[str, float] = {}
        for metric in admin_pb.GetMetricsResponse.FromString(answer).metrics:
            value = metric.metric_value.float_value or metric.metric_value.int_value
            sums[metric.metric_name] = sums.get(metric.metric_name, 0) + value
        return sums

    async def fill(self) -> None:
        """Fill the index up, once all that was evicted is deleted."""
        await self.set_mark(FAR)
        while True:
            now = await self.metrics()
            if now["cache_reclaimer.block_del_count"] >= now["kvcm_evicted_keys_total"]:
                break
            await asyncio.sleep(0.1)
        for _ in range(int(now["meta_indexer.total_key_count"]), self._plan.blocks, CHAIN):
            await self.write(CHAIN)
        for body, _ in self._hot:  # read all the time, so never the coldest, after any writes
            await self.call(f"{META}GetCacheLocation", body)
        await asyncio.sleep(DRAIN_SECONDS)

    async def window(self, *, evicts: bool) -> Window:
        """Run the load for a while, with or without eviction."""
        plan, before = self._plan, await self.metrics()
        blocks, cpu_seconds = before["meta_indexer.total_key_count"], self._server.cpu_seconds()
        begin = time.perf_counter()

        async def update() -> None:
            gone = (plan.evicted - plan.written) * (time.perf_counter() - begin)
            await self.set_mark(int(blocks - gone) * BLOCK_BYTES if evicts else FAR)

        latencies, _, _ = await asyncio.gather(
            self._paced(plan.reads, self.read),
            self._paced(plan.written // BATCH, lambda: self.write(BATCH), is_random=False),
            self._paced(plan.updates, update, is_random=False),
        )
        after, seconds = await self.metrics(), time.perf_counter() - begin

        def rate(name: str) -> float:
            return (after[name] - before[name]) / seconds

        cpu = (self._server.cpu_seconds() - cpu_seconds) / seconds
        deleted = rate("cache_reclaimer.block_del_count")
        return Window(sorted(latencies), rate("kvcm_evicted_keys_total"), deleted, cpu)

    async def _paced(self, rate: int, job: Callable[[], Awaitable[Any]], *, is_random: bool = True) -> list[float]:
        """Begin jobs at a rate, whether or not those before are done; return what each took from its time on, in ms."""
        due = time.perf_counter()
        end, running, taken = due + self._plan.seconds, set[asyncio.Task[None]](), list[float]()

        async def timed(due: float) -> None:
            await job()
            taken.append((time.perf_counter() - due) * 1e3)

        while (due := due + (self._random.expovariate(rate) if is_random else 1 / rate)) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.add(asyncio.create_task(timed(due)))
        await asyncio.gather(*running)
        return taken


@contextlib.asynccontextmanager
async def manager(store: str) -> AsyncIterator[Server]:
    """Yield a manager process with its metadata in a store."""
    ports = {name: free_port() for name in ("rpc_port", "http_port", "admin_http_port")}
    ports["admin_rpc_port"] = ports["rpc_port"]
    settings = [option for name, port in ports.items() for option in ("-e", f"kvcm.service.{name}={port}")]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        kept = stack.enter_context(opened(store, Path(directory)))
        settings += ["-e", f"kvcm.registry_storage.uri={kept.uri}"]
        words = ("-m", "kvcm", "serve", "--data-dir", f"{directory}/manager", *settings)
        running = stack.enter_context(process(*words, stderr=subprocess.DEVNULL))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['rpc_port']}") as channel:
            await asyncio.wait_for(_serving(channel), 60)
            yield Server(running.pid, channel)


async def _serving(channel: grpc.aio.Channel) -> None:
    """Wait until a manager that has just been started serves: its ports are open before that."""
    await channel.channel_ready()
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


async def under_load(plan: Plan) -> list[Row]:
    """Measure part one."""
    calm: list[Window] = []
    evicting: list[Window] = []
    async with manager(plan.store) as server:
        load = Load(server, plan)
        await load.set_up()
        gc.freeze()
        for _ in range(plan.rounds):
            for windows, evicts in ((calm, False), (evicting, True)):
                await load.fill()
                windows.append(await load.window(evicts=evicts))
    return load_rows(plan, calm, evicting)


def load_rows(plan: Plan, calm: list[Window], evicting: list[Window]) -> list[Row]:
    """Return the rows of part one; of each figure the median window counts."""

    def both(metric: str, of: Callable[[Window], float], unit: str = "ms", most: float = 0.0) -> Row:
        value, baseline = (statistics.median(map(of, windows)) for windows in (evicting, calm))
        ratio = value / baseline if baseline else None
        ok = ratio is not None and ratio <= most if most else None
        return Row(case, metric, value, unit, baseline, ratio, f"value/baseline <= {most}" if most else "", ok)

    meanwhile = f"while {plan.evicted:,} blocks/s are evicted, against while none are"
    case = f"{plan.store}: GetCacheLocation, {plan.reads}/s, {meanwhile}"
    least, needless = min(each.evicted for each in evicting), max(each.evicted for each in calm)
    case_of_rate = f"{plan.store}: eviction in windows of {plan.seconds:.0f} s, {plan.written:,} blocks/s written"
    return [
        both("p50", lambda window: window.percentile(0.5)),
        both("p99", lambda window: window.percentile(0.99), most=MOST_RATIO),
        both("longest", lambda window: window.latencies[-1]),
        both("CPU of the manager", lambda window: window.cpu, "cores"),
        Row(case_of_rate, "evicted, slowest window", least, "1/s", target=f">= {plan.least:,}", ok=least >= plan.least),
        Row(case_of_rate, "deleted, slowest window", min(each.deleted for each in evicting), "1/s"),
        Row(case_of_rate, "evicted without need", needless, "1/s", target="= 0", ok=needless == 0),
    ]


# ---- part two: in one process ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_components(store: Store) -> AsyncIterator[Components]:
    """Yield the components of a manager, without background tasks."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(data_dir=directory, registry_storage_uri=store.uri)
        async with Manager(settings).opened() as components:
            await components.leadership.tick()
            await components.registry.storages.add(StorageConfig(NAME, DummyStorageSpec()))
            yield components


def group_of(policy: str, mark_bytes: int, version: int) -> InstanceGroup:
    """Return a group with a policy."""
    trigger = TriggerStrategy(used_size=mark_bytes, hysteresis=0.0)
    strategy = CacheReclaimStrategy(NAME, trigger_strategy=trigger, policy=EvictionPolicy(policy))
    return InstanceGroup(NAME, (NAME,), NAME, 1, InstanceGroupQuota(FAR), CacheConfig(strategy), version=version)


class Blocks:
    """Writes and reads blocks of an instance through the manager's own calls."""

    def __init__(self, opened: Components) -> None:
        self._components = opened
        api = MetaApi(opened.cache, opened.registry, opened.leadership, RequestLimits())
        self._calls: dict[str, Call] = {call.name: call for call in api.calls()}
        self._caller = Caller(CallRecorder(ApiMetrics()), lambda _plane: None, lambda _id: {})

    async def answer(self, name: str, request: Any) -> Any:
        """Return the answer of a call."""
        return (await self._caller.answer(self._calls[name], request)).complete()

    async def write(self, count: int, rng: random.Random, length: int) -> None:
        """Write chains of fresh blocks, each in parts, and read half of them once."""
        for number in range(count // length):
            keys = [rng.getrandbits(62) for _ in range(length)]
            for end in range(CHAIN, length + 1, CHAIN):
                started = await self.answer("StartWriteCache", start_request(keys[:end]))
                await self.answer("FinishWriteCache", finish_request(started, CHAIN))
            if number % 2:
                await self.answer("GetCacheLocation", match_request(keys))
        await self._components.cache.accesses.drain()


async def in_process(case: Case, count: int, store: Store) -> list[Row]:
    """Measure what one policy takes to evict a fifth of so many blocks, and what its order takes to keep."""
    policy, count = case.policy, count // case.length * case.length
    async with open_components(store) as components:
        await components.registry.groups.create(group_of(policy, FAR, 1))
        blocks = Blocks(components)
        await blocks.answer("RegisterInstance", registration())
        if case.is_live:
            components.reclaimer.update_orders()
        await blocks.write(count, random.Random(1), case.length)
        gc.collect()
        gc.freeze()
        kept_bytes = _traced(components.reclaimer.update_orders) / count
        await components.registry.groups.update(group_of(policy, count * 4 // 5 * BLOCK_BYTES, 2), 1)
        marking, deletion, begin_redis = 0.0, 0.0, redis_seconds(store)
        while components.reclaimer.stats.submitted_blocks < count // 5:  # a look lasts a second at most
            marking += await _loop_seconds(components.reclaimer.reclaim)
        evicted = components.reclaimer.stats.submitted_blocks
        while components.deletions.deleted.blocks < evicted:
            deletion += await _loop_seconds(components.deletions.run_due)
        assert components.deletions.deleted.blocks == evicted >= count // 5
        of_redis = redis_seconds(store) - begin_redis
    since = ", ordered as they came" if case.is_live else ""
    name = f"{case.store}: {policy}, {count:,} blocks in chains of {case.length:,}{since}, in process"
    rows = [
        Row(name, "choice and mark of a block", marking / evicted * 1e6, "us"),
        Row(name, "deletion of a block", deletion / evicted * 1e6, "us"),
    ]
    if store.server is not None:
        return [*rows, Row(name, "Redis, both", of_redis / evicted * 1e6, "us")]
    if case.is_live:
        return rows
    return [*rows, Row(name, "memory of the order per block", kept_bytes, "B")]


def redis_seconds(store: Store) -> float:
    """Return the CPU time of Redis so far, 0 without one."""
    if store.server is None:
        return 0.0
    with store.server.admin() as client:
        found: dict[str, float] = client.info("cpu")  # type: ignore[assignment]
    return found["used_cpu_user"] + found["used_cpu_sys"]


def _traced(job: Callable[[], None]) -> int:
    """Return the bytes that a job leaves behind."""
    tracemalloc.start()
    job()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept


async def _loop_seconds(job: Callable[[], Awaitable[int]]) -> float:
    """Return the CPU seconds that a job takes of the event loop's thread."""
    begin = time.thread_time()
    await job()
    return time.thread_time() - begin


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    configure_logs(LEVELS["ERROR"])
    count = 10_240 if options.quick else 102_400
    rows = [row for plan in (QUICK if options.quick else PLANS) for row in uvloop.run(under_load(plan))]
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory, opened(case.store, Path(directory)) as store:
            rows += uvloop.run(in_process(case, count, store))
        gc.unfreeze()
    met = publish("reclaim: readers while blocks are evicted", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
