"""Claim: a write on Redis costs manager and Redis together a part of what it costs with the code of another commit.
Two managers, one of each commit, each over a Redis of its own, answer the same requests in windows that alternate, so
that other load of the machine affects both alike. CPU times are those of the processes by the operating system, with
what they do in the background for the requests. Beside writes it measures a match of blocks that another manager wrote,
the bytes that a block takes in Redis, and the scripts and commands of a write as Redis counts them. `--store` runs the
same on memory and RocksDB, where the store is part of the manager.

    git worktree add /tmp/before COMMIT
    python benchmarks/shared_writes.py --before /tmp/before [--store redis] [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from report import Row, arguments, publish
from service_client import META, Exchange
from service_site import STORES, Manager, Site, hash_keys, quantile, site

from kvcm.protocol import meta_service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from redis_servers import RedisServer

CLIENTS = 8
TARGETS = {64: 0.31, 1024: 0.25}
"""Most that a write of so many blocks may cost on Redis, of the other commit's."""
MOST_COLD = 1 / 3
COLD_MATCHES = 64
MOST_BYTES = 260
MOST_SCRIPT_US = 2000
MOST_BESIDE_US, MOST_SERVED_US = 0.05, 0.5


class Cost(NamedTuple):
    """CPU of a unit in microseconds."""

    manager_us: float
    store_us: float

    @property
    def total_us(self) -> float:
        return self.manager_us + self.store_us


@dataclass(frozen=True, slots=True)
class Side:
    """A manager of one commit.

    Attributes:
        running: manager, store and client.
        code: checkout that the manager runs.
    """

    running: Site
    code: Path

    @property
    def server(self) -> RedisServer | None:
        """Its Redis, None for a store within the manager."""
        return self.running.store.server

    @property
    def uri(self) -> str:
        """Of its store."""
        return self.running.store.uri

    def store_seconds(self) -> float:
        """Return the CPU that the store has used so far."""
        return self.running.manager.spent().store

    def write(self, blocks: int, count: int) -> Cost:
        """Start and finish so many writes."""
        run = self.running.client.write(self.running.manager, "grpc", "fresh", blocks, count, CLIENTS)
        return Cost(run.cpu_us, run.store_us)

    def calls(self) -> dict[str, int]:
        """Return how often each command ran so far, also within scripts."""
        if self.server is None:
            return {}
        with self.server.admin() as admin:
            found = admin.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items()}

    def used_bytes(self) -> int:
        """Return the bytes of memory that the store's data take."""
        assert self.server is not None
        with self.server.admin() as admin:
            return int(admin.info("memory")["used_memory"])


@contextlib.contextmanager
def opened(store: str, code: Path) -> Iterator[Side]:
    """Run a manager of a checkout over an empty store."""
    with site(code=code, store=store) as running:
        running.manager.register("fresh", 1)
        yield Side(running, code)


def write_rows(store: str, sides: Sequence[Side], blocks: int, count: int, rounds: int) -> Iterator[Row]:
    """Yield what writes of so many blocks cost."""
    costs: list[list[Cost]] = [[] for _ in sides]
    for side in sides:
        side.write(blocks, 2 * CLIENTS)
    calls = [side.calls() for side in sides]
    for number in range(rounds):
        for at in (0, 1) if number % 2 else (1, 0):
            costs[at].append(sides[at].write(blocks, count))
    case = f"{store}: start + finish, {blocks:,} fresh blocks, {CLIENTS} clients"
    ratio = statistics.median(ours.total_us / theirs.total_us for ours, theirs in zip(*costs, strict=True))
    ours, theirs = (statistics.median(cost.total_us for cost in each) for each in costs)
    limit = TARGETS[blocks] if store == "redis" else 1.0
    yield Row(case, "manager and store CPU", ours, "us", theirs, ratio, f"value/before <= {limit}", ratio <= limit)
    for part, name in enumerate(("manager CPU", "store CPU") if store == "redis" else ()):
        ours, theirs = (statistics.median(cost[part] for cost in each) for each in costs)
        yield Row(case, name, ours, "us", theirs, ours / theirs)
    for command in ("evalsha", "mget", "zadd") if store == "redis" else ():
        counts = [
            (side.calls().get(command, 0) - before.get(command, 0)) / (rounds * count)
            for side, before in zip(sides, calls, strict=True)
        ]
        yield Row(case, f"calls of {command}, with what runs beside", counts[0], "", counts[1])


def script_row(sides: Sequence[Side], count: int) -> Row:
    """Return how long scripts hold up the server, which says so: in writes of 1,024 blocks, one after the other, since
    beside others the time would be that of the machine."""
    ours, theirs = (quantile(_script_times_us(side, count), 0.99) for side in sides)
    return Row("redis: start + finish, 1,024 fresh blocks, 1 client", "a script in the server, p99", ours, "us", theirs,
               ours / theirs, f"<= {MOST_SCRIPT_US:,} us", ours <= MOST_SCRIPT_US)  # fmt: skip


def _script_times_us(side: Side, count: int) -> list[int]:
    assert side.server is not None
    side.running.client.write(side.running.manager, "grpc", "fresh", 1024, 4, 1)
    with side.server.admin() as admin:
        admin.config_set("slowlog-max-len", 1 << 14)
        admin.config_set("slowlog-log-slower-than", 0)
        admin.slowlog_reset()
        side.running.client.write(side.running.manager, "grpc", "fresh", 1024, count, 1)
        ran = admin.slowlog_get(1 << 14)
        admin.config_set("slowlog-log-slower-than", -1)
    return [each["duration"] for each in ran if each["command"].startswith(b"EVALSHA")]


def bytes_row(sides: Sequence[Side], blocks: int, count: int) -> Row:
    """Return the bytes of a block."""
    sizes = []
    for side in sides:
        side.running.manager.forget("fresh")
        before = side.used_bytes()
        side.write(blocks, count)
        sizes.append((side.used_bytes() - before) / (blocks * count))
    case = f"redis: {blocks * count:,} blocks written by {blocks}"
    return Row(case, "bytes", sizes[0], "B", sizes[1], sizes[0] / sizes[1], f"<= {MOST_BYTES}", sizes[0] <= MOST_BYTES)


def cold_row(sides: Sequence[Side], rounds: int) -> Row:
    """Return what a match of 1,024 blocks costs a manager that has not seen them, and Redis.

    Many in a row: what Redis and the manager use within the seconds of a window by themselves is more than one costs.
    """
    parts = [hash_keys((1 << 60) + 1024 * number, 1024) for number in range(COLD_MATCHES * rounds)]
    costs: list[list[Cost]] = [[], []]
    for at, side in enumerate(sides):
        for part in parts:
            side.running.manager.store("fresh", part)
        requests = [
            pb.GetCacheLocationRequest(instance_id="fresh", block_keys=part, query_type=pb.QT_PREFIX_MATCH)
            for part in parts
        ]
        with site((f"kvcm.registry_storage.uri={side.uri}",), code=side.code) as other:
            units = [[Exchange(f"{META}GetCacheLocation", request.SerializeToString())] for request in requests]
            for first in range(0, len(units), COLD_MATCHES):
                begin = side.store_seconds()
                run = other.client.send(other.manager, "grpc", units[first : first + COLD_MATCHES], COLD_MATCHES, 1)
                answer = pb.GetCacheLocationResponse.FromString(run.answers[0])
                assert len(answer.locations) == 1024
                assert run.smallest > 0.9 * len(run.answers[0])
                costs[at].append(Cost(run.cpu_us, (side.store_seconds() - begin) / COLD_MATCHES * 1e6))
    ours, theirs = (statistics.median(cost.total_us for cost in each) for each in costs)
    target = f"value/before <= {MOST_COLD:.2f}"
    ratio = ours / theirs
    return Row("redis: match of 1,024 blocks that another manager wrote", "manager and store CPU", ours, "us", theirs,
               ratio, target, ratio <= MOST_COLD)  # fmt: skip


def _idle_cpu(manager: Manager, seconds: float) -> float:
    """Return what a manager uses right now in so many seconds in which nothing is written."""
    begin = manager.cpu_seconds()
    time.sleep(seconds)
    return manager.cpu_seconds() - begin


def beside_rows(sides: Sequence[Side], blocks: int, count: int, rounds: int) -> Iterator[Row]:
    """Yield what a block that one manager writes costs another one, which has answers of its instance or has none.

    The manager that writes leads: what the leader has to do for a block belongs to its price.
    """
    keys = hash_keys(1 << 61, 64)
    request = pb.GetCacheLocationRequest(instance_id="fresh", block_keys=keys, query_type=pb.QT_PREFIX_MATCH)
    for is_served, most in ((False, MOST_BESIDE_US), (True, MOST_SERVED_US)):
        costs: list[list[float]] = [[], []]
        for at, side in enumerate(sides):
            side.running.manager.store("fresh", keys)
            with site((f"kvcm.registry_storage.uri={side.uri}",), code=side.code) as other:
                for _ in range(rounds):
                    if is_served:
                        other.manager.call("GetCacheLocation", request, pb.GetCacheLocationResponse)
                    begin, since = other.manager.cpu_seconds(), time.monotonic()
                    side.write(blocks, count)
                    spent, seconds = other.manager.cpu_seconds() - begin, time.monotonic() - since
                    spent -= _idle_cpu(other.manager, seconds)
                    costs[at].append(spent / (blocks * count) * 1e6)
        ours, theirs = map(statistics.median, costs)
        what = "has answers of its instance" if is_served else "has none of its instance"
        yield Row(f"redis: a block written in {blocks} by another manager", f"CPU of a manager that {what}", ours, "us",
                  theirs, ours / theirs, f"<= {most} us", ours <= most)  # fmt: skip


def measured(store: str, before: Path, is_quick: bool) -> list[Row]:
    """Measure one store."""
    rounds = 2 if is_quick else 9
    here = Path(__file__).parents[1]
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(opened(store, code)) for code in (here, before)]
        rows = [
            *write_rows(store, sides, 64, 40 if is_quick else 300, rounds),
            *write_rows(store, sides, 1024, 8 if is_quick else 40, rounds),
        ]
        if store == "redis":
            rows += [
                script_row(sides, 10 if is_quick else 100),
                bytes_row(sides, 64, 50 if is_quick else 500),
                cold_row(sides, 2 if is_quick else 3),
            ]
            rows += beside_rows(sides, 64, 100 if is_quick else 1000, 2 if is_quick else 7)
        return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--store", choices=STORES, nargs="+", default=["redis"])
    options = parser.parse_args()
    rows = [row for store in options.store for row in measured(store, options.before.resolve(), options.quick)]
    met = publish("shared writes: against those of another commit", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
