"""Claim: more managers on one Redis cost no more CPU per write.

One, two and four managers share one Redis server, and each of N managers has 1/N of one core. Redis and the writers
have the other core. Writers start and finish sessions of fresh blocks, each the next one when the last one is answered,
so managers are saturated in every case; their number is always the same. "Separate": the writers of an instance use one
manager. "Shared": the writers of each manager write to all instances.

A write costs the CPU of the managers of its case and of Redis, in its window and while what it left behind is done, by
the clocks of the processes. In the window everything counts that the managers of the case do. Subtracted is what they
use idle in the seconds after it, and what Redis is idle. Managers of all cases run the whole time, as deployments of
their own on the one server, windows of the cases alternate, and ratios are those of one round. The leader's search for
garbage is off: its rate is fixed, so what it costs depends on seconds and not on writes.

The shares of the core come in two ways. "In turns": managers run one after the other, each for a twentieth of a second,
and are stopped between. "At once": the managers compete for the core, each limited by a cgroup (version 1, where that
can be written; elsewhere the scheduler is fair). A write changes threads some thirty times, and where four processes
share a core each may find its caches full of another's data, whatever they do: that is no cost of a common Redis. So
this way four managers of one deployment are compared with four that know nothing of each other.

    python benchmarks/managers.py [--managers 1 2 4] [--rounds 7] [--writes 600] [--verbose] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import uvloop
from report import Row, arguments, is_sound, publish
from service_client import start_request
from service_site import Process

from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from manager_site import GroupPlan, Manager, Site, managers_on
from redis_servers import RedisServer, Standalone, standalone

MOST_RATIO = 1.15
"""Most CPU of a write with four managers, beside that with one."""
JUDGED_MANAGERS = 4
BLOCKS = 64, 1024
INSTANCES = tuple(f"model-{number}" for number in range(4))
WRITERS = 32
TURN_SECONDS = 0.05
CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
_SETTLE_SECONDS = 1.5  # usage is reported many times a second, reads are recorded once
_SETTINGS = {
    "kvcm.limits.keys_per_second": "0",  # all writers are one client here
    "kvcm.reclaim.garbage_blocks_per_second": "0",
}
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels to a manager share one connection
)


class Fleet(NamedTuple):
    """Managers: of one deployment, or of as many deployments."""

    count: int
    is_apart: bool = False

    @property
    def name(self) -> str:
        """For people."""
        managers = f"{self.count} manager{'s' * (self.count > 1)}"
        return f"{managers} of {self.count} deployments" if self.is_apart else managers


class Case(NamedTuple):
    """Managers, how instances are spread over them, the size of a write, and how managers share the core."""

    fleet: Fleet
    is_shared: bool
    blocks: int
    is_at_once: bool = False

    @property
    def name(self) -> str:
        """For people."""
        kind, way = "shared" if self.is_shared else "separate", "at once" if self.is_at_once else "in turns"
        return f"{self.blocks:,} fresh blocks, {kind} instances, {self.fleet.name}, {way}"

    @property
    def baseline(self) -> Case:
        """The case that this one is compared with."""
        return self._replace(fleet=Fleet(self.fleet.count, is_apart=True) if self.is_at_once else Fleet(1))


class Cost(NamedTuple):
    """CPU of a write in microseconds, and the cores that managers had in the window."""

    managers_us: float
    redis_us: float
    writers_us: float
    cores: float

    @property
    def total_us(self) -> float:
        """Managers and Redis."""
        return self.managers_us + self.redis_us


class Running:
    """Managers of a fleet that run, and the connections of their writers."""

    def __init__(self, managers: Sequence[Manager]) -> None:
        self.managers = managers
        self.processes = [Process(manager.pid, {}) for manager in managers]
        self.stubs: list[list[Any]] = []

    def cpu_seconds(self) -> float:
        """Return what all of them used so far."""
        return sum(each.cpu_seconds() for each in self.processes)

    async def connect(self, stack: contextlib.AsyncExitStack) -> None:
        """Register the instances and connect the writers."""
        site = Site(GroupPlan("bench", INSTANCES, 1 << 60))
        for manager in self.managers:
            await site.set_up_at(manager)
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(manager.address(), _CHANNEL))
                for _ in range(WRITERS // len(self.managers))
            ]
            await asyncio.gather(*(asyncio.wait_for(channel.channel_ready(), 60) for channel in channels))
            self.stubs.append([MetaServiceStub(channel) for channel in channels])  # type: ignore[no-untyped-call]

    def writers(self, is_shared: bool) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield the connection of each writer and the instances that it writes to in turn."""
        for writer in range(WRITERS):
            own, manager = divmod(writer, len(self.managers))
            # The number of instances is a multiple of that of managers: separate instances have one manager each.
            first = own if is_shared else writer
            instances = [INSTANCES[(first + step) % len(INSTANCES)] for step in range(len(INSTANCES))]
            yield self.stubs[manager][own], tuple(instances if is_shared else instances[:1])

    @contextlib.asynccontextmanager
    async def in_turns(self) -> AsyncIterator[None]:
        """Let the managers run one at a time inside the block."""

        async def change() -> None:
            for process in self.processes[1:]:
                os.kill(process.pid, signal.SIGSTOP)
            for now, following in itertools.pairwise(itertools.cycle(self.processes)):
                await asyncio.sleep(TURN_SECONDS)
                os.kill(now.pid, signal.SIGSTOP)
                os.kill(following.pid, signal.SIGCONT)

        task = asyncio.create_task(change()) if len(self.processes) > 1 else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                for process in self.processes:
                    os.kill(process.pid, signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def at_once(self) -> AsyncIterator[None]:
        """Limit each of N managers to 1/N of a core inside the block, where the system can."""
        groups: list[Path] = []
        try:
            for process in self.processes if has_cgroups() else ():
                groups.append(CGROUP / f"kvcm-benchmark-{process.pid}")
                groups[-1].mkdir()
                (groups[-1] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (groups[-1] / "cpu.cfs_quota_us").write_text(str(PERIOD_US // len(self.processes)))
                (groups[-1] / "cgroup.procs").write_text(str(process.pid))
            yield
        finally:
            for group in groups:
                for pid in (group / "cgroup.procs").read_text().split():
                    (CGROUP / "cgroup.procs").write_text(pid)
                group.rmdir()


def has_cgroups() -> bool:
    """Return whether processes can be limited here."""
    return os.access(CGROUP / "cpu.cfs_quota_us", os.W_OK)


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Let processes that are started inside the block run on one core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Bench:
    """One Redis, the fleets on it, and writers.

    Args:
        fleets: that run.
        server: the Redis of all of them.
    """

    def __init__(self, fleets: Mapping[Fleet, Running], server: RedisServer) -> None:
        self._fleets = fleets
        self._redis = Process(server.process.pid, {})
        self._next_number = 1 << 40

    async def prepare(self, stack: contextlib.AsyncExitStack, idle_seconds: float) -> None:
        """Connect the writers, and measure what everything uses idle."""
        for each in self._fleets.values():
            await each.connect(stack)
        await asyncio.sleep(_SETTLE_SECONDS)
        processes = [process for each in self._fleets.values() for process in each.processes]
        begin, used = time.monotonic(), [each.cpu_seconds() for each in (*processes, self._redis)]
        await asyncio.sleep(idle_seconds)
        passed = time.monotonic() - begin
        rates = [(now.cpu_seconds() - was) / passed for now, was in zip((*processes, self._redis), used, strict=True)]
        self._redis = Process(self._redis.pid, {}, rates.pop())
        for each in self._fleets.values():
            each.processes = [Process(process.pid, {}, rates.pop(0)) for process in each.processes]

    async def window(self, case: Case, count: int) -> Cost:
        """Start and finish so many writes."""
        fleet = self._fleets[case.fleet]
        jobs = self._jobs(fleet, case, count)
        async with fleet.at_once() if case.is_at_once else fleet.in_turns():
            begin, managers, redis = time.monotonic(), fleet.cpu_seconds(), self._redis.cpu_seconds()
            writers = time.process_time()
            await asyncio.gather(*(write(stub, requests) for stub, requests in jobs))
            busy_seconds, writers = time.monotonic() - begin, time.process_time() - writers
            cores = (fleet.cpu_seconds() - managers) / busy_seconds
        await asyncio.sleep(_SETTLE_SECONDS)
        passed = time.monotonic() - begin
        idle = sum(each.idle for each in fleet.processes)
        managers = fleet.cpu_seconds() - managers - idle * (passed - busy_seconds)
        redis = self._redis.cpu_seconds() - redis - self._redis.idle * passed
        return Cost(*(used / count * 1e6 for used in (managers, redis, writers)), cores)

    def _jobs(self, fleet: Running, case: Case, count: int) -> list[tuple[Any, list[Any]]]:
        """Return the connection and the requests of each writer, made before they are sent."""
        jobs = []
        for writer, (stub, instances) in enumerate(fleet.writers(case.is_shared)):
            requests = []
            for instance in itertools.islice(itertools.cycle(instances), len(range(writer, count, WRITERS))):
                requests.append(start_request(instance, range(self._next_number, self._next_number + case.blocks)))
                self._next_number += case.blocks
            jobs.append((stub, requests))
        return jobs

    async def forget(self) -> None:
        """Remove all blocks, so that every round begins with as many."""
        for fleet in self._fleets.values():
            for stubs, instance in itertools.product(fleet.stubs, INSTANCES):
                request = pb.TrimCacheRequest(instance_id=instance, strategy=pb.TS_REMOVE_ALL_META)
                answer = await stubs[0].TrimCache(request)
                assert answer.header.status.code == pb.OK, answer.header
        await asyncio.sleep(_SETTLE_SECONDS)


async def write(stub: Any, requests: Sequence[Any]) -> None:
    """Start and finish writes, one after the other."""
    for request in requests:
        started = await stub.StartWriteCache(request)
        assert started.header.status.code == pb.OK, started.header
        finish = pb.FinishWriteCacheRequest(instance_id=request.instance_id, write_session_id=started.write_session_id)
        finish.success_blocks.offset = len(started.locations)
        finished = await stub.FinishWriteCache(finish)
        assert finished.header.status.code == pb.OK, finished.header


def cases_of(counts: Sequence[int], is_quick: bool) -> list[Case]:
    """Return the cases."""
    cases = [
        Case(Fleet(count), is_shared, blocks)
        for blocks, is_shared, count in itertools.product(BLOCKS, (False, True), counts)
    ]
    if JUDGED_MANAGERS in counts and not is_quick:
        fleets = Fleet(JUDGED_MANAGERS), Fleet(JUDGED_MANAGERS, is_apart=True)
        cases += [Case(fleet, is_shared=True, blocks=BLOCKS[0], is_at_once=True) for fleet in fleets]
    return cases


async def measured(bench: Bench, cases: Sequence[Case], options: argparse.Namespace) -> dict[Case, list[Cost]]:
    """Return what a write of each case costs, once for each round."""
    costs: dict[Case, list[Cost]] = {case: [] for case in cases}
    async with contextlib.AsyncExitStack() as stack:
        await bench.prepare(stack, 2.0 if options.quick else 30.0)
        for case in cases:
            await bench.window(case, WRITERS)  # everything has run once
        for number in range(options.rounds):
            await bench.forget()
            for case in cases if number % 2 else cases[::-1]:
                count = options.writes if case.blocks == BLOCKS[0] else options.writes // 4
                costs[case].append(await bench.window(case, count))
                if options.verbose:
                    print(f"round {number + 1}, {case.name}: {costs[case][-1]}", file=sys.stderr)
    return costs


def rows_of(costs: Mapping[Case, Sequence[Cost]]) -> Iterator[Row]:
    """Yield the figures: medians of the rounds, and that of the ratios within a round."""
    for case, runs in costs.items():

        def median(metric: str, unit: str, value: str, runs: Sequence[Cost] = runs, name: str = case.name) -> Row:
            return Row(name, metric, statistics.median(getattr(cost, value) for cost in runs), unit)

        row = median("CPU of managers and Redis per write", "us", "total_us")
        if case.baseline in costs and case.baseline != case:
            pairs = zip(runs, costs[case.baseline], strict=True)
            ratio = statistics.median(ours.total_us / theirs.total_us for ours, theirs in pairs)
            beside, target, ok = statistics.median(each.total_us for each in costs[case.baseline]), "", None
            if case.fleet.count == JUDGED_MANAGERS:
                other = case.baseline.fleet.name
                target, ok = f"value/{other} <= {MOST_RATIO}", ratio <= MOST_RATIO
            row = Row(row.case, row.metric, row.value, row.unit, beside, ratio, target, ok)
        yield row
        yield median("CPU of managers per write", "us", "managers_us")
        yield median("CPU of Redis per write", "us", "redis_us")
        yield median("CPU of writers per write, apart", "us", "writers_us")
        yield median("cores that managers had", "", "cores")


@contextlib.contextmanager
def running(directory: Path, servers: Standalone, fleet: Fleet) -> Iterator[Running]:
    """Run the managers of a fleet inside the block."""
    with contextlib.ExitStack() as stack:
        managers: list[Manager] = []
        for number in range(fleet.count if fleet.is_apart else 1):
            name = f"of-{fleet.count}-{number}-{int(fleet.is_apart)}"
            count = 1 if fleet.is_apart else fleet.count
            managers += stack.enter_context(managers_on(directory / name, servers.uri(name), count, _SETTINGS))
        yield Running(managers)
        failures = [line for each in managers for line in each.failures()]
        assert not failures, failures[:3]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--managers", type=int, nargs="+", help="numbers of managers (default: 1 2 4, 1 4 if quick)")
    parser.add_argument("--rounds", type=int, help="in which each case has a window (default: 7, 1 with --quick)")
    parser.add_argument("--writes", type=int, help="of 64 blocks in a window (default: 600, 96 with --quick)")
    parser.add_argument("--verbose", action="store_true", help="print each window")
    options = parser.parse_args()
    defaults: dict[str, Any] = {"managers": [1, 2, 4], "rounds": 7, "writes": 600}
    if options.quick:
        defaults = {"managers": [1, 4], "rounds": 1, "writes": 96}
    for key, value in defaults.items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    cases, cores = cases_of(options.managers, options.quick), sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-managers-")))
        with on_core(cores[-1]):
            servers = stack.enter_context(standalone(directory / "redis"))
        with on_core(cores[0]):
            fleets = dict.fromkeys(case.fleet for case in cases)
            started = {fleet: stack.enter_context(running(directory, servers, fleet)) for fleet in fleets}
        stack.enter_context(on_core(cores[-1]))
        costs = uvloop.run(measured(Bench(started, servers.server), cases, options))
    rows = list(rows_of(costs))
    if not options.quick:
        rows.append(Row("at once", "managers are limited by a cgroup", int(has_cgroups()), ""))
    is_met = publish("managers: CPU of a write on one, two and four", rows, options.json)
    return 0 if is_met or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
