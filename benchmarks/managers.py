"""Claim: several managers on one Redis use no more CPU per write than one.

One, two and four managers share a core, so that each has its share of it and all are busy; Redis and the clients have
the other core. Sixteen clients of each manager begin their next write when the last one is finished. Each
count of managers has a Redis of its own, all of which are empty at first and get the same writes; windows of the three
alternate. CPU is that of all managers and of Redis by the operating system, with the work that writes leave behind,
less what the same processes use without requests in that time.

*Separate*: each manager's clients write an instance of their own. *Shared*: all managers' clients write the same one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from report import Row, arguments, publish
from server_process import process
from service_site import HERE, SETTLE_SECONDS, Client, Manager

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from manager_process import ManagerProcess, start_manager
from redis_servers import RedisServer, standalone

COUNTS = (1, 2, 4)
CLIENTS = 16  # of each manager
MOST_RATIO = 1.15
MANAGER_CORE, CLIENT_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
IDLE_SECONDS = 4.0


class Plan(NamedTuple):
    """How much is measured: rounds, and by blocks of a write how many of them a window has."""

    rounds: int
    writes: dict[int, int]


class Spent(NamedTuple):
    """Seconds of CPU."""

    managers: float
    redis: float


class Deployment(NamedTuple):
    """Managers over one Redis, a client for each, and what the servers use without requests, per second."""

    managers: Sequence[Manager]
    redis_pid: int
    clients: Sequence[Client]
    idle: Spent = Spent(0.0, 0.0)

    def spent(self) -> Spent:
        """Return what the servers used so far."""
        return Spent(sum(each.cpu_seconds() for each in self.managers), _clock(self.redis_pid))

    def knowing_idle(self) -> Deployment:
        """Return this with `idle` measured."""
        before = self.spent()
        time.sleep(IDLE_SECONDS)
        after = self.spent()
        return self._replace(idle=Spent(*((b - a) / IDLE_SECONDS for a, b in zip(before, after, strict=True))))

    def write(self, instances: Sequence[str], blocks: int, count: int) -> Spent:
        """Return the CPU of one of so many writes, seconds."""
        share = count // len(self.managers)
        begin, before = time.monotonic(), self.spent()

        def work(number: int) -> None:
            self.clients[number].write(self.managers[number], "grpc", instances[number], blocks, share, CLIENTS)

        with ThreadPoolExecutor(len(self.managers)) as threads:
            list(threads.map(work, range(len(self.managers))))  # each returns when its manager is settled
        after, passed = self.spent(), time.monotonic() - begin
        written = share * len(self.managers)
        used = ((b - a - idle * passed) / written for a, b, idle in zip(before, after, self.idle, strict=True))
        return Spent(*used)


def _clock(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


def _pin(pid: int, core: int) -> None:
    """Run a process and its threads on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def deployment(directory: Path, count: int) -> Iterator[Deployment]:
    """Run so many managers over a Redis of their own."""
    with contextlib.ExitStack() as stack:
        server: RedisServer = stack.enter_context(standalone(directory / "redis")).server
        uri = f"redis://127.0.0.1:{server.port}/?cluster_name=managers&timeout_ms=20000"
        settings = [
            f"kvcm.registry_storage.uri={uri}",
            "kvcm.limits.keys_per_second=0",
            "kvcm.limits.max_queue_ms=0",  # no request is shed, however long other work lets it wait
        ]
        running: list[ManagerProcess] = []
        for number in range(count):
            running.append(start_manager(directory / f"manager{number}", settings=settings))
            stack.callback(running[-1].stop)
        running[0].set_quota("default", 1 << 50)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        clients = [stack.enter_context(process(str(HERE / "service_client.py"), **pipes)) for _ in running]
        _pin(server.process.pid, CLIENT_CORE)
        for each in clients:
            _pin(each.pid, CLIENT_CORE)
        for each in running:
            _pin(each.process.pid, MANAGER_CORE)
        managers = [Manager(each.process.pid, {"grpc": each.ports["rpc_port"]}) for each in running]
        for instance in ("shared", *(f"separate{number}" for number in range(count))):
            managers[0].register(instance, 1)
        yield Deployment(managers, server.process.pid, [Client(each) for each in clients])


def measured(plan: Plan, directory: Path) -> list[Row]:
    """Measure everything."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(deployment(directory / str(count), count)) for count in COUNTS]
        time.sleep(SETTLE_SECONDS)
        deployments = dict(zip(COUNTS, [each.knowing_idle() for each in started], strict=True))
        rows: list[Row] = []
        for blocks, writes in plan.writes.items():
            for kind in ("separate", "shared"):
                rows += compared(deployments, kind, blocks, writes, plan.rounds)
        return rows


def compared(deployments: dict[int, Deployment], kind: str, blocks: int, writes: int, rounds: int) -> list[Row]:
    """Compare the counts of managers in windows that alternate."""
    costs: dict[int, list[Spent]] = {count: [] for count in deployments}
    for number in range(rounds + 1):
        for count, each in deployments.items():
            instances = [kind if kind == "shared" else f"{kind}{at}" for at in range(count)]
            cost = each.write(instances, blocks, writes if number else writes // 4)
            if number:  # the first window warms up
                costs[count].append(cost)
    rows = []
    for count, found in costs.items():
        ratio = statistics.median(sum(ours) / sum(one) for ours, one in zip(found, costs[1], strict=True))
        managers, redis = (statistics.median(each) * 1e3 for each in zip(*found, strict=True))
        case = f"{blocks:,} blocks, {kind} instances, {count} manager{'s' if count > 1 else ''}"
        base = statistics.median(map(sum, costs[1])) * 1e3
        compares = {} if count == 1 else {"baseline": base, "ratio": ratio}
        judged = {"target": f"value/one <= {MOST_RATIO}", "ok": ratio <= MOST_RATIO} if count > 1 else {}
        total = statistics.median(map(sum, found)) * 1e3
        rows.append(Row(case, "CPU per write, managers + Redis", total, "ms", **compares, **judged))
        rows.append(Row(case, "CPU per write, managers", managers, "ms"))
        rows.append(Row(case, "CPU per write, Redis", redis, "ms"))
    return rows


def main() -> int:
    """Run everything."""
    options = arguments(__doc__ or "").parse_args()
    plan = Plan(1, {64: 64}) if options.quick else Plan(7, {64: 1600, 1024: 160})
    with tempfile.TemporaryDirectory() as directory:
        rows = measured(plan, Path(directory))
    met = publish("managers: CPU of a write beside several managers", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
