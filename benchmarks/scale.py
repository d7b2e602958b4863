"""Claim: nothing that a manager does grows with the blocks in its store, and readers hardly notice its duties.

Managers are processes that a client calls over gRPC. Blocks of one spec are written in chains of 1,024. Over RocksDB
and on one Redis the same is measured with a million blocks and with ten million: lookups of random prefixes, nearly all
of which no search cache has, quiet and while the manager writes, evicts at its watermark, recounts usage and takes over
from a killed leader; the start of a manager; bytes per block.

A hundred million blocks are ten groups in ten Redis stores behind one registry. As many stores as `--stores` says are
filled, each with as many blocks as the first; the same is measured over all of them and compared with one store. What
ten stores take is extrapolated from these, and the row says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
from report import Row, arguments, publish
from server_process import META
from service_site import startup_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from manager_process import ManagerProcess, start_manager
from redis_servers import Standalone, standalone

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import admin_service_pb2_grpc
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import group_service_pb2, group_service_pb2_grpc

CHAIN = 1024
PREFIXES = (64, 256, 1024)
BLOCK_BYTES = 4096
WRITERS = 3
READS_PER_SECOND = 60
WRITES_PER_SECOND = 20  # of 64 blocks
MOST_RATIO = 2.0
MOST_REDIS_BYTES = 260.0
MOST_RESIDENT_BYTES = 400.0
MOST_START_US = 6.0
NO_MARK = 1 << 60
START_SECONDS = 300.0
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        steps: what stores have when they are measured: blocks of each.
        seconds: of a window.
    """

    steps: Sequence[Sequence[int]]
    seconds: float

    @property
    def stores(self) -> int:
        """Stores in the end."""
        return len(self.steps[-1])


_FRESH = count()  # chains of which 64 blocks are written


class Figures(NamedTuple):
    """What was measured at one size: by name, and the times of reads in ms by what the manager did meanwhile."""

    blocks: int
    values: dict[str, float]
    reads: dict[str, list[float]]

    def p99(self, meanwhile: str) -> float:
        """Return the 99th percentile of reads, ms."""
        return float(np.percentile(self.reads[meanwhile], 99))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, as clock_getcpuclockid(3) names it."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def chain_keys(group: int, chain: int) -> list[int]:
    """Return the keys of a chain."""
    keys: list[int] = np.random.default_rng((group, chain)).integers(1, (1 << 63) - 1, CHAIN).tolist()
    return keys


@dataclass
class Site:
    """Managers over one registry, and the groups whose blocks lie in its stores.

    Attributes:
        manager: that clients ask; it leads.
        redis: the servers, none over RocksDB.
        blocks: in chains, by group.
        others: of the first group, besides.
    """

    directory: Path
    redis: Sequence[Standalone]
    manager: ManagerProcess = field(init=False)
    blocks: list[int] = field(default_factory=list)
    others: int = 0
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.manager = self.started()

    def started(self) -> ManagerProcess:
        """Start one more manager; over RocksDB the same one again."""
        settings = [
            "kvcm.leader_elector.lease_ms=2000",
            "kvcm.limits.keys_per_second=0",
            "kvcm.limits.max_queue_ms=0",
            f"kvcm.startup_config={startup_config(self.directory)}",
        ]
        if not self.redis:
            return start_manager(self.directory / "rocksdb", settings=settings, start_seconds=START_SECONDS)
        uris = [server.uri(f"scale{number}") for number, server in enumerate(self.redis)]
        settings.append(f"kvcm.registry_storage.uri={uris[0]}")
        if uris[1:]:
            stores = " ".join(f"s{number}={uri}" for number, uri in enumerate(uris[1:], 1))
            settings.append(f"kvcm.store.block_stores={stores}")
        return start_manager(self.directory / f"manager{next(self._numbers)}", settings=settings)

    def add_group(self) -> None:
        """Add a group with an instance; the blocks of the n-th lie in the n-th store."""
        number = len(self.blocks)
        name = f"g{number}"
        with self._channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            group = admin.GetInstanceGroup(admin_pb.GetInstanceGroupRequest(name="default")).instance_group
            group.name = group.global_quota_group_name = name
            group.cache_config.data_storage_strategy = admin_pb.CPS_PREFER_3FS
            indexer = group.cache_config.meta_indexer_config
            indexer.mutex_shard_num, indexer.meta_storage_backend_config.storage_type = 16, "local"
            indexer.meta_cache_policy_config.type = "LRU"
            status = admin.CreateInstanceGroup(admin_pb.CreateInstanceGroupRequest(instance_group=group)).header.status
        assert status.code == admin_pb.OK, status.message
        if number:
            with self._channel() as channel:
                groups = group_service_pb2_grpc.GroupServiceStub(channel)  # type: ignore[no-untyped-call]
                move = group_service_pb2.MoveInstanceGroupRequest(name=name, store=f"s{number}")
                status = groups.MoveInstanceGroup(move, timeout=10).header.status
            assert status.code == admin_pb.OK, status.message
        self.set_mark(number, NO_MARK)
        self.blocks.append(0)

    def set_mark(self, number: int, blocks: int) -> None:
        """Set the watermark of a group, in blocks."""
        with self._channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            group = admin.GetInstanceGroup(admin_pb.GetInstanceGroupRequest(name=f"g{number}")).instance_group
            version, group.version = group.version, group.version + 1
            group.quota.capacity = 1 << 55
            for quota in group.quota.quota_config:
                quota.capacity = 1 << 55
            group.cache_config.meta_indexer_config.max_key_count = 1 << 30
            strategy = group.cache_config.reclaim_strategy
            strategy.delay_before_delete_ms = 1000
            strategy.trigger_strategy.used_percentage = 2.0  # off
            strategy.trigger_strategy.used_size = min(blocks * BLOCK_BYTES, 1 << 54)
            strategy.trigger_strategy.hysteresis = 0.0
            update = admin_pb.UpdateInstanceGroupRequest(instance_group=group, current_version=version)
            status = admin.UpdateInstanceGroup(update, timeout=30).header.status
        assert status.code == admin_pb.OK, status.message

    def leads(self, manager: ManagerProcess) -> bool:
        """Whether a manager leads."""
        with self._channel(manager) as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            answer = admin.GetManagerClusterInfo(admin_pb.GetManagerClusterInfoRequest(), timeout=10)
        return bool(answer.self_node_id == answer.leader_node_id)

    def evicted(self) -> float:
        """Return how many blocks the manager has evicted."""
        with self._channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            metrics = admin.GetMetrics(admin_pb.GetMetricsRequest(), timeout=30).metrics
        values = [each.metric_value for each in metrics if each.metric_name == "kvcm_evicted_keys_total"]
        return float(sum(value.float_value or value.int_value for value in values))

    def store_bytes(self) -> int:
        """Return the memory of all Redis servers, or the files of the RocksDB."""
        total = 0
        for each in self.redis:
            with each.server.admin() as client:
                total += int(client.info("memory")["used_memory"])  # type: ignore[index]
        if self.redis:
            return total
        folders = [path for path in self.manager.data_dir.iterdir() if path.is_dir() and path.name != "nfs"]
        return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())

    def _channel(self, manager: ManagerProcess | None = None) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{(manager or self.manager).ports['admin_rpc_port']}")


class Client:
    """An engine of all groups."""

    def __init__(self, channel: grpc.aio.Channel, site: Site) -> None:
        self._channel = channel
        self._site = site
        self._random = random.Random(3)

    async def call(self, method: str, request: Any) -> bytes:
        """Return the answer of MetaService."""
        answer: bytes = await self._channel.unary_unary(f"{META}{method}")(request.SerializeToString(), timeout=60)
        return answer

    async def register(self, group: int) -> None:
        """Register the instance of a group."""
        request = pb.RegisterInstanceRequest(instance_group=f"g{group}", instance_id=f"m{group}", block_size=64)
        request.model_deployment.model_name, request.model_deployment.dtype = "Qwen3-8B", "bf16"
        request.location_spec_infos.add(name="tp0", size=BLOCK_BYTES)
        answer = pb.CommonResponse.FromString(await self.call("RegisterInstance", request))
        assert answer.header.status.code == pb.OK, answer

    async def write(self, group: int, keys: Sequence[int]) -> None:
        """Write fresh blocks."""
        start = pb.StartWriteCacheRequest(instance_id=f"m{group}", block_keys=keys, write_timeout_seconds=60)
        started = pb.StartWriteCacheResponse.FromString(await self.call("StartWriteCache", start))
        assert started.header.status.code == pb.OK, started.header
        finish = pb.FinishWriteCacheRequest(instance_id=f"m{group}", write_session_id=started.write_session_id)
        finish.success_blocks.offset = len(keys)
        finished = pb.CommonResponse.FromString(await self.call("FinishWriteCache", finish))
        assert finished.header.status.code == pb.OK, finished

    async def fill(self, group: int, blocks: int) -> None:
        """Write chains until a group has so many blocks."""
        chains = iter(range(self._site.blocks[group] // CHAIN, blocks // CHAIN))

        async def write_chains() -> None:
            for chain in chains:
                await self.write(group, chain_keys(group, chain))

        await asyncio.gather(*(write_chains() for _ in range(WRITERS)))
        self._site.blocks[group] = blocks // CHAIN * CHAIN

    async def read(self) -> None:
        """Match a prefix of a random chain."""
        group = self._random.randrange(len(self._site.blocks))
        keys = chain_keys(group, self._random.randrange(self._site.blocks[group] // CHAIN))
        prefix = keys[: self._random.choice(PREFIXES)]
        request = pb.GetCacheLocationRequest(instance_id=f"m{group}", query_type=pb.QT_PREFIX_MATCH, block_keys=prefix)
        answer = pb.GetCacheLocationResponse.FromString(await self.call("GetCacheLocation", request))
        assert answer.header.status.code == pb.OK, answer.header

    async def reads(self, seconds: float, until: Callable[[], Awaitable[bool]] | None = None) -> list[float]:
        """Read at random moments for so long, and until something is the case; return what each read took from the
        moment at which it was due, in ms."""
        due, running, taken = time.perf_counter(), set[asyncio.Task[None]](), list[float]()
        end = due + seconds

        async def timed(due: float) -> None:
            await self.read()
            taken.append((time.perf_counter() - due) * 1e3)

        reached = asyncio.create_task(_reached(until))
        while due < end or not reached.done():
            due += self._random.expovariate(READS_PER_SECOND)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.add(asyncio.create_task(timed(due)))
        await asyncio.gather(reached, *running)
        return taken

    async def writes(self, seconds: float) -> None:
        """Write fresh blocks for so long, at a fixed rate, to the first group."""
        due = time.perf_counter()
        end = due + seconds
        while (due := due + 1 / WRITES_PER_SECOND) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self.write(0, chain_keys(1 << 20, next(_FRESH))[:64])
            self._site.others += 64


async def _reached(until: Callable[[], Awaitable[bool]] | None) -> None:
    deadline = time.perf_counter() + 120
    while until is not None and not await until():
        assert time.perf_counter() < deadline, "it is not reached"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def client_of(site: Site, manager: ManagerProcess | None = None) -> AsyncIterator[Client]:
    """A client of a manager inside the block."""
    async with grpc.aio.insecure_channel((manager or site.manager).address, OPTIONS) as channel:
        yield Client(channel, site)


async def measured(site: Site, plan: Plan) -> Figures:
    """Measure everything at the size that the site has now."""
    values: dict[str, float] = {}
    reads: dict[str, list[float]] = {}
    async with client_of(site) as client:
        await client.reads(1.0)
        reads["nothing else"] = await client.reads(plan.seconds)
        reads["writes"], _ = await asyncio.gather(client.reads(plan.seconds), client.writes(plan.seconds))
        before = site.evicted()
        site.set_mark(0, site.blocks[0] + site.others)  # the group is as full as it may be

        async def evicts() -> bool:
            return await asyncio.to_thread(site.evicted) > before

        reads["writes and evictions"], _ = await asyncio.gather(
            client.reads(plan.seconds, evicts), client.writes(plan.seconds)
        )
        values["evicted"] = site.evicted() - before
        site.others -= int(values["evicted"])
        site.set_mark(0, NO_MARK)
        if site.redis:
            reads["a recount of usage"] = await recount(site, client, values)
    if site.redis:
        reads["a start of another manager, and its takeover"] = await takeover(site, plan, values)
    else:
        await restart(site, values)
    async with client_of(site) as client:
        await client.reads(1.0)
    return Figures(sum(site.blocks), values, reads)


async def recount(site: Site, client: Client, values: dict[str, float]) -> list[float]:
    """Falsify the usage of a group, and read until the manager has recounted it."""
    begin = time.perf_counter()
    with site.redis[0].server.admin() as admin:
        (name,) = admin.scan_iter("*:q{g.g0}", 1000)
        usage = next(each for each in admin.hkeys(name) if each.startswith(b"u:"))  # type: ignore[union-attr]
        true = int(admin.hget(name, usage))  # type: ignore[arg-type]
        admin.hincrby(name, usage, 77 * BLOCK_BYTES)  # type: ignore[arg-type]

        async def is_right() -> bool:
            return int(admin.hget(name, usage)) <= true  # type: ignore[arg-type]

        reads = await client.reads(1.0, is_right)
    values["recount"] = time.perf_counter() - begin
    return reads


async def takeover(site: Site, plan: Plan, values: dict[str, float]) -> list[float]:
    """Start a manager, kill the leader, and read at the other one until it leads."""
    async with client_of(site) as client:
        begin = time.perf_counter()
        starting = asyncio.create_task(asyncio.to_thread(site.started))

        async def is_up() -> bool:
            return starting.done()

        reads = await client.reads(0.0, is_up)
        other = await starting
        values["start"], values["start_cpu"] = time.perf_counter() - begin, cpu_seconds(other.process.pid)
    assert site.leads(site.manager)
    async with client_of(site, other) as client:
        await client.reads(1.0)
        site.manager.kill()
        site.manager, begin = other, time.perf_counter()

        async def is_leader() -> bool:
            return await asyncio.to_thread(site.leads, other)

        reads += await client.reads(0.0, is_leader)
        values["takeover"] = time.perf_counter() - begin
        return reads + await client.reads(plan.seconds)


async def restart(site: Site, values: dict[str, float]) -> None:
    """Stop the manager over RocksDB and start it again."""
    values["resident"] = resident_bytes(site.manager.process.pid)
    await asyncio.to_thread(site.manager.stop)
    begin = time.perf_counter()
    site.manager = await asyncio.to_thread(site.started)
    values["start"] = time.perf_counter() - begin
    values["start_cpu"] = cpu_seconds(site.manager.process.pid)
    values["restarted"] = resident_bytes(site.manager.process.pid)


async def grown(site: Site, plan: Plan) -> list[Figures]:
    """Measure a store with few blocks and with many, then all stores."""
    empty, idle_bytes = site.store_bytes(), resident_bytes(site.manager.process.pid)
    empty_cpu = cpu_seconds(site.manager.process.pid)
    found: list[Figures] = []
    for sizes in plan.steps:
        begin = time.perf_counter()
        async with client_of(site) as client:
            for group, blocks in enumerate(sizes):
                if group == len(site.blocks):
                    site.add_group()
                    await client.register(group)
                await client.fill(group, blocks)
        print(f"{sum(site.blocks):,} blocks after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        stored = site.store_bytes() - empty
        figures = await measured(site, plan)
        figures.values["bytes"] = stored / figures.blocks
        figures.values.update({"idle_bytes": idle_bytes, "idle_cpu": empty_cpu})
        found.append(figures)
    return found


def compared(store: str, one: Figures, other: Figures) -> list[Row]:
    """Compare two sizes."""
    target = f"ratio <= {MOST_RATIO}"
    against = f"{store}, {other.blocks:,} blocks against {one.blocks:,}"
    rows = []
    for meanwhile in other.reads:
        value, baseline = other.p99(meanwhile), one.p99(meanwhile)
        ok = value / baseline <= MOST_RATIO
        rows.append(
            Row(f"{against}, {meanwhile}", "p99 of lookups", value, "ms", baseline, value / baseline, target, ok)
        )
    for name, text in (("takeover", "a killed leader's successor leads"), ("recount", "usage is recounted")):
        if name in other.values:
            value, baseline = other.values[name], one.values[name]
            ok = value / baseline <= MOST_RATIO
            rows.append(Row(f"{against}: {text}", "time", value, "s", baseline, value / baseline, target, ok))
    return rows


def alone(store: str, figures: Figures) -> list[Row]:
    """Return the rows of one size."""
    case, values = f"{store} with {figures.blocks:,} blocks", figures.values
    evicted = values["evicted"]
    rows = [
        Row(f"{case}: evicted at the watermark, in one window", "blocks", evicted, "", None, None, "> 0", evicted > 0)
    ]
    start = (values["start_cpu"] - values["idle_cpu"]) / figures.blocks * 1e6
    if store == "Redis":
        value = values["bytes"]
        ok = value <= MOST_REDIS_BYTES
        rows.append(Row(case, "bytes per block", value, "B", target=f"<= {MOST_REDIS_BYTES:.0f}", ok=ok))
        rows.append(Row(f"{case}: start of one more manager", "time", values["start"], "s"))
        return rows
    for name, text in (("resident", "filled"), ("restarted", "started again")):
        value = (values[name] - values["idle_bytes"]) / figures.blocks
        target, ok = f"<= {MOST_RESIDENT_BYTES:.0f}", value <= MOST_RESIDENT_BYTES
        rows.append(Row(f"{case}, {text}", "resident memory per block", value, "B", target=target, ok=ok))
    rows.append(Row(case, "disk per block", values["bytes"], "B"))
    ok = start <= MOST_START_US
    rows.append(Row(f"{case}: start", "CPU per block", start, "us", target=f"<= {MOST_START_US:.0f}", ok=ok))
    rows.append(Row(f"{case}: start", "time", values["start"], "s"))
    return rows


def rows_of(store: str, found: Sequence[Figures], plan: Plan) -> list[Row]:
    """Return all rows of a store."""
    rows = [row for each in found for row in alone(store, each)]
    for (one, other), sizes in zip(pairwise(found), plan.steps[1:], strict=True):
        rows += compared(store if len(sizes) == 1 else f"{len(sizes)} {store} stores", one, other)
    if plan.stores > 1:
        largest = plan.steps[-1][-1]
        case = f"ten stores of {largest:,} blocks, of which {plan.stores} were filled: memory of {store}"
        rows.append(Row(case, "extrapolated", found[-1].values["bytes"] * 10 * largest / 2**30, "GiB"))
    return rows


@contextlib.contextmanager
def opened(store: str, directory: Path, stores: int) -> Iterator[Site]:
    """Run a manager over so many stores."""
    with contextlib.ExitStack() as stack:
        servers = []
        if store == "Redis":
            servers = [stack.enter_context(standalone(directory / f"redis{number}")) for number in range(stores)]
        site = Site(directory, servers)
        stack.callback(lambda: site.manager.stop())
        yield site


def main() -> int:
    """Run everything."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="blocks of a full store")
    parser.add_argument("--stores", type=int, default=5, help="Redis stores to fill")
    parser.add_argument("--only", choices=("Redis", "RocksDB"), help="one kind of store")
    options = parser.parse_args()
    small, large = 976 * CHAIN, options.blocks // CHAIN * CHAIN
    plans = {"RocksDB": [[small], [large]], "Redis": [[small], [large], [large] * options.stores]}
    if options.quick:
        plans = {"RocksDB": [[32 * CHAIN]], "Redis": [[32 * CHAIN] * 2]}
    rows: list[Row] = []
    for store, steps in plans.items():
        if options.only in (None, store):
            plan = Plan(steps, 1.0 if options.quick else 10.0)
            with tempfile.TemporaryDirectory() as directory, opened(store, Path(directory), plan.stores) as site:
                rows += rows_of(store, asyncio.run(grown(site, plan)), plan)
    met = publish("scale: many blocks in one store, and in several", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
