"""Claim: what a fleet of 1,000 engines costs in manager cores, Redis cores and bytes, and which latencies engines see.

Real managers and a real Redis serve simulated engines, which replay a trace: a lookup of the block keys of each request
and, for the blocks that missed, a write session that lasts as long as the prefill. The fleet has 1,000 engines in 20
instances (50 for each model), which send 5 requests a second each. This machine cannot serve that. The fleet's clock is
therefore slowed by a factor, chosen from measured CPU so that no process is saturated, and cores at the real rate are
(CPU - idle CPU) x factor / seconds + idle CPU. CPU times are those of the processes by the operating system, with what
they do in the background for the requests; that of the engines is kept apart. Latencies hold for the slowed rate. A
manager costs more for each of few requests than for each of many, so cores at the real rate are rather fewer; what one
manager costs at a half and a quarter of the slowed rate is measured, too.

Hosts of eight engines share a connection. In "shared" cases the hosts of an instance are spread over all managers; in
"separate" ones each instance has one manager. All cases start from the same Redis, which holds what the requests of the
trace found from before, and every manager has looked it up once. Cases take turns, and ratios are those of one turn.
With --assigned there are cases in which each instance has the manager that managers announce for it, and, beside shared
instances, with managers that have looked nothing up before.

    python benchmarks/fleet.py [--managers 1 2 4] [--engines 1000] [--seconds 30] [--trace NAME] [--assigned] [--quick]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import uvloop
from fleet_engines import CALLS, MOVED, Engine, Fleet, Pace, Plan, Seen, made_up_trace, planned
from report import Row, arguments, is_sound, left_out, publish
from service_site import Process, quantile

from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.trace import Trace
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from manager_site import GroupPlan, Manager, Site, managers_on
from redis_servers import Standalone, standalone

ROOT = Path(__file__).parents[1]
TRACE = "mooncake_conversation"
REQUESTS_PER_ENGINE = 5.0
"""A second, of the fleet that the figures are extrapolated to."""
HOST_ENGINES = 8
MOST_RATIO = 1.15
"""Most CPU of a request, and of a written block, beside that with one manager."""
MOST_MANAGER_CORES, MOST_CORES = 0.3, 0.5
"""Of a single manager and of all processes, engines included; the factor is chosen for that."""
SATURATED = 0.7
_TRIAL_RATE = 25.0
_SETTLE_SECONDS = 1.3  # a manager records reads once a second
_LOADERS = 8
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels to a manager share one connection
)
_SEARCH_COUNTS = "meta_indexer.search_cache_hit_count", "meta_indexer.search_cache_miss_count"
_SETTINGS = {"kvcm.limits.keys_per_second": "0"}  # all engines are one client here


class Case(NamedTuple):
    """Managers, and how instances are spread over them."""

    managers: int
    is_shared: bool
    is_assigned: bool = False
    is_cold: bool = False

    @property
    def name(self) -> str:
        """For people."""
        if self.managers == 1:
            return "1 manager"
        kind = "assigned" if self.is_assigned else "shared" if self.is_shared else "separate"
        return f"{self.managers} managers, {kind} instances{', cold search caches' if self.is_cold else ''}"

    def manager_of(self, instance: int, host: int) -> int:
        """Return the manager of a host's engines; hosts are counted over all instances."""
        return (host if self.is_shared else instance) % self.managers


class Times(NamedTuple):
    """How long is measured: seconds of the trial that the factor is chosen from, of a case, and of its idle time."""

    trial: float
    case: float
    idle: float


class Spent(NamedTuple):
    """CPU seconds until a moment, or between two.

    Attributes:
        at: the moment, or the seconds between.
        managers: of each.
        redis: of the store.
        engines: of the process that simulates them.
        cached: keys that the search caches answered, of all managers, between two moments.
        uncached: keys that they did not know.
    """

    at: float
    managers: tuple[float, ...]
    redis: float
    engines: float
    cached: float = 0.0
    uncached: float = 0.0

    def since(self, before: Spent) -> Spent:
        """Return the difference."""
        managers = tuple(now - then for now, then in zip(self.managers, before.managers, strict=True))
        return Spent(self.at - before.at, managers, self.redis - before.redis, self.engines - before.engines)


class Cores(NamedTuple):
    """Cores of all managers together and of Redis."""

    managers: float
    redis: float


@dataclass(frozen=True, slots=True)
class Observed:
    """One run of a case.

    Attributes:
        seen: by the engines.
        requests: that they sent.
        seconds: of the window, on the wall.
        spent: in the window and while it settled.
        idle: in seconds without requests, before.
        rss_bytes: of each manager, at the end.
        block_bytes: memory of Redis per block.
    """

    seen: Seen
    requests: int
    seconds: float
    spent: Spent
    idle: Spent
    rss_bytes: tuple[int, ...]
    block_bytes: float

    @property
    def idle_cores(self) -> Cores:
        """Return the cores without requests."""
        return Cores(sum(self.idle.managers) / self.idle.at, self.idle.redis / self.idle.at)

    @property
    def net(self) -> Cores:
        """Return the CPU seconds that the requests cost."""
        idle = self.idle_cores
        managers = sum(self.spent.managers) - idle.managers * self.spent.at
        return Cores(managers, self.spent.redis - idle.redis * self.spent.at)

    @property
    def request_us(self) -> float:
        """Return the CPU of a request, managers and Redis."""
        return sum(self.net) / self.requests * 1e6

    @property
    def engines_us(self) -> float:
        """Return the CPU of the engines for a request, which is the same work in every case."""
        return (self.spent.engines - self.idle.engines / self.idle.at * self.spent.at) / self.requests * 1e6

    @property
    def block_us(self) -> float:
        """Return the CPU of a request by the blocks that it writes, managers and Redis."""
        return sum(self.net) / max(1, self.seen.written) * 1e6

    def full(self, rate: float) -> Cores:
        """Return the cores at so many requests a second."""
        factor, idle = rate / (self.requests / self.seconds), self.idle_cores
        return Cores(*(extrapolated(net, self.seconds, factor, rest) for net, rest in zip(self.net, idle, strict=True)))


def extrapolated(net_seconds: float, wall_seconds: float, factor: float, idle_cores: float) -> float:
    """Return the cores at `factor` times the rate: what requests cost grows with them, the rest does not."""
    return net_seconds * factor / wall_seconds + idle_cores


def rate_for(manager_seconds: float, all_seconds: float) -> float:
    """Return the requests a second that saturate nothing, from the CPU of one: a manager's, and everything's."""
    return min(MOST_MANAGER_CORES / max(manager_seconds, 1e-5), MOST_CORES / max(all_seconds, 1e-5))


# ---- what runs ------------------------------------------------------------------------------------------------------


def site_of(fleet: Fleet) -> Site:
    """Return one group that is never full, with all instances; a block has one location spec."""
    return Site(GroupPlan("fleet", tuple(f"model-{number}" for number in range(fleet.instances)), 1 << 60))


@contextlib.contextmanager
def running(directory: Path, snapshot: Path, managers: int) -> Iterator[tuple[Standalone, list[Manager]]]:
    """Run managers over a Redis that begins with the snapshot, if there is one."""
    with standalone(directory / "redis", extra=("--dir", str(snapshot))) as servers:
        with managers_on(directory, servers.uri("fleet"), managers, _SETTINGS) as started:
            yield servers, started
            failures = [line for each in started for line in each.failures()]
            assert not failures, failures[:3]


def used_bytes(servers: Standalone) -> int:
    """Return the memory that Redis uses, without that of connections."""
    with servers.server.admin() as admin:
        found = admin.info("memory")
    return int(found["used_memory"]) - int(found["mem_clients_normal"])


@contextlib.asynccontextmanager
async def connected(case: Case, plan: Plan, managers: Sequence[Manager]) -> AsyncIterator[Callable[[int, int], Any]]:
    """Connect each host to its manager; yield what gives an engine's calls, by its instance and its index."""
    hosts_each = -(-plan.fleet.engines_each // HOST_ENGINES)
    assigned = await assigned_managers(plan.fleet, managers) if case.is_assigned else None
    stubs: dict[int, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        for host in range(plan.fleet.instances * hosts_each):
            instance = host // hosts_each
            manager = case.manager_of(instance, host) if assigned is None else assigned[instance]
            address = managers[manager].address()
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, _CHANNEL))
            await asyncio.wait_for(channel.channel_ready(), 60)
            stubs[host] = MetaServiceStub(channel)  # type: ignore[no-untyped-call]
        yield lambda instance, engine: stubs[instance * hosts_each + engine // HOST_ENGINES]


async def assigned_managers(fleet: Fleet, managers: Sequence[Manager]) -> list[int]:
    """Return the number of the manager of each instance, once all managers announce the same ones."""
    ports = [int(each.settings["kvcm.service.rpc_port"]) for each in managers]
    requests = [meta_pb.GetClusterInfoRequest(instance_id=f"model-{number}") for number in range(fleet.instances)]
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(each.connected()) for each in managers]
        while True:
            views = [
                [
                    [each.meta_rpc_port for each in (await wire.meta.GetClusterInfo(one)).preferred_managers]
                    for one in requests
                ]
                for wire in wires
            ]
            if all(view == views[0] and all(set(named) == set(ports) for named in view) for view in views):
                return [ports.index(named[0]) for named in views[0]]
            await asyncio.sleep(0.5)


async def search_counts(managers: Sequence[Manager]) -> tuple[float, float]:
    """Return how many keys all search caches knew until now, and how many they did not."""
    found = dict.fromkeys(_SEARCH_COUNTS, 0.0)
    for manager in managers:
        async with manager.connected() as wire:
            for each in (await wire.admin.GetMetrics(admin_pb.GetMetricsRequest())).metrics:
                if each.metric_name in found and not each.metric_tags:
                    found[each.metric_name] += each.metric_value.float_value or each.metric_value.int_value
    return found[_SEARCH_COUNTS[0]], found[_SEARCH_COUNTS[1]]


def engine_of(instance: int, meta: Any, pace: Pace, seen: Seen) -> Engine:
    """Return an engine."""
    return Engine(f"model-{instance}", meta, pace, seen)


async def store(plan: Plan, manager: Manager) -> None:
    """Write the blocks that were there before the window."""
    pace, seen = Pace(1.0), Seen()
    async with connected(Case(1, False), plan, [manager]) as meta_of:
        left = iter([list(pieces) for _, pieces in itertools.groupby(plan.pieces, lambda piece: piece.instance)])

        async def load() -> None:
            for pieces in left:
                for piece in pieces:
                    engine = engine_of(piece.instance, meta_of(piece.instance, 0), pace, seen)
                    await engine.write(piece.keys.tolist(), piece.parent, 0.0)

        await asyncio.gather(*(load() for _ in range(_LOADERS)))
    assert not seen.errors, seen.errors[:3]
    assert seen.written == plan.stored_blocks


def snapshot_of(plan: Plan, directory: Path) -> int:
    """Write into `dump.rdb` of a directory the Redis that all cases begin with; return the memory of an empty one."""
    directory.mkdir()
    with running(directory / "run", directory, 1) as (servers, (manager,)):
        uvloop.run(site_of(plan.fleet).set_up_at(manager))
        empty = used_bytes(servers)
        uvloop.run(store(plan, manager))
        assert manager.stop() == 0
        with servers.server.admin() as admin:
            admin.save()
    return empty


async def warm(plan: Plan, meta_of: Callable[[int, int], Any]) -> None:
    """Look up once on each manager what its engines find from before the window: a manager keeps what it served."""
    seen, longest = Seen(), {}
    for request in plan.requests:
        if request.stored:
            meta = meta_of(request.instance, request.engine)
            longest[id(meta), request.instance, int(request.keys[request.stored - 1])] = meta, request
    left = iter(longest.values())

    async def match() -> None:
        for meta, request in left:
            engine = engine_of(request.instance, meta, Pace(1.0), seen)
            found = await engine.match(request.keys[: request.stored].tolist())
            assert found == request.stored, (found, request.stored, seen.errors[:3])

    await asyncio.gather(*(match() for _ in range(_LOADERS)))


def observed(case: Case, plan: Plan, times: Times, seconds: float, snapshot: tuple[Path, int]) -> Observed:
    """Run a case: the plan's window takes so many seconds."""
    directory, empty = snapshot
    with tempfile.TemporaryDirectory(prefix="kvcm-fleet-") as own:
        with running(Path(own), directory, case.managers) as (servers, managers):
            processes = [Process(each.pid, {}) for each in managers]
            redis = Process(servers.server.process.pid, {})

            def spent() -> Spent:
                used = tuple(each.cpu_seconds() for each in processes)
                return Spent(time.monotonic(), used, redis.cpu_seconds(), time.process_time())

            seen, idle, busy = uvloop.run(replayed(case, plan, managers, times, seconds, spent))
            blocks = plan.stored_blocks + seen.written
            rss_bytes = tuple(resident_bytes(each.pid) for each in managers)
            block_bytes = (used_bytes(servers) - empty) / max(1, blocks)
    for error in seen.errors[:10]:
        print(f"{case.name}: {error}", file=sys.stderr)
    return Observed(seen, len(plan.requests), seconds, busy, idle, rss_bytes, block_bytes)


async def replayed(
    case: Case, plan: Plan, managers: Sequence[Manager], times: Times, seconds: float, spent: Callable[[], Spent]
) -> tuple[Seen, Spent, Spent]:
    """Send everything; return what engines saw, and the CPU spent idle and with them."""
    async with connected(case, plan, managers) as meta_of:
        for manager in managers:
            async with manager.connected() as wire:
                await site_of(plan.fleet).until_known_at([wire])
        if not case.is_cold:
            await warm(plan, meta_of)
        await asyncio.sleep(2 * _SETTLE_SECONDS)
        begin = spent()
        await asyncio.sleep(times.idle)
        idle = spent().since(begin)
        cached, uncached = await search_counts(managers)
        seen, begin = Seen(), spent()
        pace = Pace(plan.trace_seconds / seconds)
        await asyncio.gather(
            *(
                engine_of(instance, meta_of(instance, engine), pace, seen).replay(requests)
                for (instance, engine), requests in plan.of_engine().items()
            )
        )
        await asyncio.sleep(_SETTLE_SECONDS)
        busy = spent().since(begin)
        counts = await search_counts(managers)
        return seen, idle, busy._replace(cached=counts[0] - cached, uncached=counts[1] - uncached)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- figures --------------------------------------------------------------------------------------------------------


def workload_rows(trace: Trace, plan: Plan, seconds: float, moved: float) -> Iterator[Row]:
    """Yield the sizes of the replay and the assumptions of the extrapolation."""
    fleet = plan.fleet
    case = f"{fleet.engines:,} engines, {fleet.instances} instances, {trace.name}"
    keys = [len(request.keys) for request in plan.requests]
    rate, full = len(plan.requests) / seconds, fleet.engines * REQUESTS_PER_ENGINE
    yield Row(case, "requests a second", rate, "1/s")
    yield Row(case, "the trace's clock: its seconds in a second", plan.trace_seconds / seconds, "")
    yield Row(case, "engines with requests", len(plan.of_engine()), "")
    yield Row(case, "keys per lookup, mean", statistics.fmean(keys), "")
    yield Row(case, "keys per lookup, most", max(keys), "")
    yield Row(case, "hit rate of a cache that knows a block at once", plan.unlimited_hit_rate, "")
    yield Row("assumed", "requests a second of an engine", REQUESTS_PER_ENGINE, "1/s")
    yield Row("assumed", "requests of the full fleet a second", full, "1/s")
    yield Row("assumed", "CPU grows linearly with requests: the fleet's clock is slowed by the factor", full / rate, "")
    yield Row("assumed", "part of requests that any engine serves instead of that of their session", moved, "")
    yield Row("assumed", "location specs of a block", 1, "")
    yield Row("assumed", "evictions, and commands that Redis logs to disk", 0, "")


def case_rows(case: Case, runs: Sequence[Observed], fleet: Fleet, is_quick: bool) -> Iterator[Row]:
    """Yield the measured figures of a case: medians of its runs, latencies of all of them."""

    def median(metric: str, unit: str, value: Callable[[Observed], float]) -> Row:
        return Row(case.name, metric, statistics.median(map(value, runs)), unit)

    errors = sum(len(run.seen.errors) for run in runs)
    yield Row(case.name, "calls that failed", errors, "", target="= 0", ok=errors == 0)
    yield median("requests", "", lambda run: run.requests)
    yield median("hit rate", "", lambda run: run.seen.hit / max(1, run.seen.asked))
    yield median("blocks written", "", lambda run: run.seen.written)
    yield median("keys past the search cache per request", "", lambda run: run.spent.uncached / run.requests)
    for call in CALLS:
        times_us = [round(each * 1e6) for run in runs for each in run.seen.seconds[call]]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)) if times_us else ():
            yield Row(case.name, f"{call} at the slowed rate, {name}", quantile(times_us, share) / 1e3, "ms")
    yield median("requests sent late, p99", "ms", lambda run: statistics.quantiles(run.seen.late, n=100)[98] * 1e3)
    yield median("CPU of managers per request", "us", lambda run: run.net.managers / run.requests * 1e6)
    yield median("CPU of Redis per request", "us", lambda run: run.net.redis / run.requests * 1e6)
    yield median("CPU of engines per request, apart", "us", lambda run: run.engines_us)
    yield median("idle CPU of all managers", "ms/s", lambda run: run.idle_cores.managers * 1e3)
    yield median("idle CPU of Redis", "ms/s", lambda run: run.idle_cores.redis * 1e3)
    busiest = max(max(run.spent.managers) / run.spent.at for run in runs)
    target, ok = ("", None) if is_quick else (f"<= {SATURATED}", busiest <= SATURATED)
    yield Row(case.name, "busiest manager", busiest, "of a core", target=target, ok=ok)
    yield median("RSS of the largest manager", "MB", lambda run: max(run.rss_bytes) / 1e6)
    yield median("memory of Redis per block", "B", lambda run: run.block_bytes)
    rate = fleet.engines * REQUESTS_PER_ENGINE
    written = statistics.median(run.seen.written / run.requests for run in runs) * rate
    full = f"{case.name}, full fleet, extrapolated"
    managers, redis = (statistics.median(run.full(rate)[at] for run in runs) for at in (0, 1))
    yield Row(full, "cores of all managers", managers, "")
    yield Row(full, "cores of Redis", redis, "")
    yield Row(full, "Redis servers: each runs commands on one core", math.ceil(redis), "")
    yield Row(full, "blocks written a second", written, "1/s")
    block_bytes = statistics.median(run.block_bytes for run in runs)
    yield Row(full, "memory of Redis for the blocks of an hour", written * block_bytes * 3600 / 1e9, "GB")


def ratio_rows(results: Mapping[Case, Sequence[Observed]]) -> Iterator[Row]:
    """Yield the cost of requests and written blocks, beside that with one manager; the ratio is the turns' median.

    Engines do the same work in every case. The judged ratio is divided by that of their CPU, since the same work takes
    up to a third more CPU time while others use the machine.
    """
    single = results.get(Case(1, False))
    if single is None:
        return
    costs: tuple[tuple[str, Callable[[Observed], float]], ...] = (
        ("CPU of managers and Redis per written block", lambda run: run.block_us),
        ("CPU of managers and Redis per request", lambda run: run.request_us),
    )
    for case, runs in results.items():
        for metric, cost in costs:
            value, baseline = (statistics.median(map(cost, each)) for each in (runs, single))
            if case.managers == 1:
                yield Row(case.name, metric, value, "us")
                continue
            pairs = list(zip(runs, single, strict=True))
            measured = statistics.median(cost(run) / cost(one) for run, one in pairs)
            paced = statistics.median(cost(run) / cost(one) / (run.engines_us / one.engines_us) for run, one in pairs)
            target, ok = f"value/1 manager <= {MOST_RATIO}", paced <= MOST_RATIO
            yield Row(case.name, metric, value, "us", baseline, measured)
            yield Row(case.name, f"{metric}, at one pace of the machine", value, "us", baseline, paced, target, ok)


def load_rows(results: Mapping[Case, Sequence[Observed]], slower: Mapping[int, Observed]) -> Iterator[Row]:
    """Yield the cost of a request with one manager at a part of the rate, and that with several beside it.

    Each of several managers has a part of the requests, and a manager that has few at a time does less of its work for
    many of them at once: that is the difference between this ratio and that beside one manager which serves them all.
    Engines, too, work differently at another rate, so their CPU says nothing of the machine's pace here.

    Args:
        results: of all cases.
        slower: one manager, by the number of managers each of which has as many requests a second.
    """
    metric = "CPU of managers and Redis per request"
    whole = statistics.median(run.request_us for run in results.get(Case(1, False), ())) if slower else 0.0
    for managers, one in slower.items():
        part = f"{metric}, at 1/{managers} of the rate"
        yield Row(Case(1, False).name, part, one.request_us, "us", whole, one.request_us / whole)
        for case, runs in results.items():
            if case.managers == managers:
                value, baseline = statistics.median(run.request_us for run in runs), one.request_us
                yield Row(
                    case.name, f"{metric}, beside one manager at that rate", value, "us", baseline, value / baseline
                )


# ---- the benchmark --------------------------------------------------------------------------------------------------


def trace_of(name: str, is_quick: bool) -> Trace | None:
    """Return a published trace by its name, or one of a file; None where it is not there and not made up either."""
    named = os.environ.get("KVCM_TRACES")
    places = [Path(named)] if named else [each / "shared/data/traces" for each in (ROOT, *ROOT.parents)]
    files = [Path(name), *(each / f"{name}.jsonl.gz" for each in places)]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        return made_up_trace(4000) if is_quick else None
    return read_trace(file)


def chosen_rate(trace: Trace, fleet: Fleet, times: Times, directory: Path) -> float:
    """Return the requests a second that saturate nothing, measured with one manager."""
    natural = planned(trace, fleet, trace.span_seconds / 10).requests_per_second
    plan = planned(trace, fleet, min(trace.span_seconds / 2, times.trial * _TRIAL_RATE / natural))
    run = observed(Case(1, False), plan, times, times.trial, (directory, snapshot_of(plan, directory)))
    assert not run.seen.errors, run.seen.errors[:3]
    all_seconds = sum(run.net) + run.spent.engines
    found = rate_for(run.net.managers / run.requests, all_seconds / run.requests)
    # No more of the trace than there is; a part of it, so that instances differ.
    return min(found, natural * trace.span_seconds / 2 / times.case)


def measured(trace: Trace, fleet: Fleet, options: argparse.Namespace, times: Times) -> list[Row]:
    """Run all cases and return their figures."""
    cases = [Case(count, shared) for count in options.managers for shared in ((False, True) if count > 1 else (False,))]
    if options.assigned:
        for count in (each for each in options.managers if each > 1):
            cases += [Case(count, is_shared=False, is_assigned=True, is_cold=is_cold) for is_cold in (False, True)]
            cases.append(Case(count, is_shared=True, is_cold=True))
    with tempfile.TemporaryDirectory(prefix="kvcm-fleet-") as name:
        rate = options.requests_per_second or chosen_rate(trace, fleet, times, Path(name) / "trial")
        natural = planned(trace, fleet, trace.span_seconds / 10).requests_per_second
        plan = planned(trace, fleet, min(trace.span_seconds, times.case * rate / natural), options.moved)
        snapshot = Path(name) / "fleet", snapshot_of(plan, Path(name) / "fleet")
        results: dict[Case, list[Observed]] = {case: [] for case in cases}
        for turn in range(options.turns):
            for case in cases if turn % 2 == 0 else cases[::-1]:
                begin = time.monotonic()
                results[case].append(observed(case, plan, times, times.case, snapshot))
                print(f"turn {turn + 1}, {case.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        slower = {}
        if Case(1, False) in results and not options.quick:
            for count in options.managers:
                if count > 1:
                    slower[count] = observed(Case(1, False), plan, times, times.case * count, snapshot)
    rows = list(workload_rows(trace, plan, times.case, options.moved))
    for case, runs in results.items():
        rows += case_rows(case, runs, fleet, options.quick)
    return [*rows, *ratio_rows(results), *load_rows(results, slower)]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--engines", type=int, help="of the fleet (default: 1000, 50 with --quick)")
    parser.add_argument("--instances", type=int, help="that the engines belong to (default: 20, 2 with --quick)")
    parser.add_argument(
        "--managers", type=int, nargs="+", help="numbers of managers (default: 1 2 4, 1 2 with --quick)"
    )
    parser.add_argument("--seconds", type=float, help="of a case (default: 30, 2 with --quick)")
    parser.add_argument("--turns", type=int, help="that each case has (default: 3, 1 with --quick)")
    parser.add_argument("--trace", default=TRACE, help="name of a published trace, or a file (default: %(default)s)")
    parser.add_argument(
        "--moved", type=float, default=MOVED, help="part of requests that any engine serves (%(default)s)"
    )
    parser.add_argument("--assigned", action="store_true", help="also with the managers that are announced")
    parser.add_argument("--requests-per-second", type=float, default=0.0, help="instead of a chosen rate")
    options = parser.parse_args()
    defaults: dict[str, Any] = {"engines": 1000, "instances": 20, "managers": [1, 2, 4], "seconds": 30.0, "turns": 3}
    if options.quick:
        defaults = {"engines": 50, "instances": 2, "managers": [1, 2], "seconds": 2.0, "turns": 1}
    for key, value in defaults.items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    if options.engines % options.instances:
        parser.error(f"--engines {options.engines} is no multiple of --instances {options.instances}")
    times = Times(1.0, options.seconds, 0.5) if options.quick else Times(8.0, options.seconds, 10.0)
    trace = trace_of(options.trace, options.quick)
    if trace is None:
        rows = [left_out(f"the trace {options.trace}", "KVCM_TRACES names no directory that has it", options.quick)]
    else:
        rows = measured(trace, Fleet(options.engines, options.instances), options, times)
    is_met = publish("fleet: what 1,000 engines cost", rows, options.json)
    return 0 if is_met or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
