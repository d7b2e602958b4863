"""Claim: a call to a manager with everything switched on costs little more than a Python gRPC server costs that does
nothing.

Three managers, with their metadata in memory, in RocksDB and in a Redis of its own, and a bare server run at once, and
windows of all sides alternate. The bare server is a `grpc.aio` handler on uvloop that reads the same requests and
returns equally large prepared answers. Clients in other processes send prepared requests and keep the answers as bytes.
CPU times are those of the processes by the operating system, less what they use without requests; that of Redis is a
row of its own. Hits on Redis are answered from the manager's search cache, as is usual; misses go to Redis each time.

HTTP is compared with gRPC in memory alone: the store has no part in what the transports differ in. Targets are those of
memory; rows of other stores report.

`--scaling` measures instead what the number of keys in a request and the number of resident blocks cost.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from report import Row, arguments, publish
from service_client import META, Exchange
from service_scaling import scaling
from service_site import SETTLE_SECONDS, STORES, Run, Site, hash_keys, quantile, site

from kvcm.protocol import meta_service_pb2 as pb

MOST_TAIL = 2.0  # p99/p50, of the bare server's own
MOST_HTTP = 3.0  # of the same case on gRPC
MOST_US_PER_BLOCK = 8.0  # of a write, beside two bare servers
CONCURRENCIES = (1, 8, 64)
QUICK_SETTLE = 0.3
SETTINGS = ("kvcm.limits.max_queue_ms=0",)
"""No request is shed, however long other work on the machine lets it wait."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request.

    Attributes:
        name: of the case.
        most: CPU time of the manager in that of the bare server; None for a write.
        measure: from (site, transport, number of units, concurrency) to a run of the manager.
        count: units of a full window.
        blocks: of a write.
    """

    name: str
    most: float | None
    measure: Callable[[Site, str, int, int], Run]
    count: int
    blocks: int = 0


class Plan(NamedTuple):
    """How much is measured."""

    rounds: int
    share: float
    concurrencies: Sequence[int]
    settle_seconds: float = SETTLE_SECONDS

    def count(self, case: Case, concurrency: int) -> int:
        """Units of a window: so many that every client has some."""
        return max(2 * concurrency, int(case.count * self.share))


class Measured(NamedTuple):
    """One side of a case: CPU time per unit of server and store, and the times that clients saw."""

    cpu_us: float
    store_us: float
    p50_us: float
    p99_us: float

    @property
    def tail(self) -> float:
        return self.p99_us / self.p50_us


def match_case(name: str, instance: str, keys: Sequence[int], most: float, hits: int) -> Case:
    """Ask where blocks are."""
    request = pb.GetCacheLocationRequest(
        trace_id="bench", instance_id=instance, query_type=pb.QT_PREFIX_MATCH, block_keys=keys
    )
    text = {
        "trace_id": "bench",
        "instance_id": instance,
        "query_type": "QT_PREFIX_MATCH",
        "block_keys": list(map(str, keys)),
    }
    units = {
        "grpc": [[Exchange(f"{META}GetCacheLocation", request.SerializeToString())]],
        "http": [[Exchange("/api/getCacheLocation", json.dumps(text).encode())]],
    }

    def measure(running: Site, transport: str, count: int, concurrency: int) -> Run:
        run = running.client.send(running.manager, transport, units[transport], count, concurrency)
        assert found(transport, run.answers[0]) == hits, f"{name}: not so many hits"
        assert run.smallest >= len(run.answers[0]) - 8, f"{name}: some answers were shorter"
        return run

    return Case(name, most, measure, 400)


def found(transport: str, answer: bytes) -> int:
    """Return how many locations an answer holds; it must be a success."""
    if transport == "grpc":
        message = pb.GetCacheLocationResponse.FromString(answer)
        assert message.header.status.code == pb.OK, message.header
        return len(message.locations)
    document = json.loads(answer)
    assert document["header"]["status"]["code"] == "OK", document["header"]
    return len(document["locations"])


def write_case(blocks: int, count: int) -> Case:
    """Start and finish writes of fresh blocks."""

    def measure(running: Site, transport: str, count: int, concurrency: int) -> Run:
        run = running.client.write(running.manager, transport, "fresh", blocks, count, concurrency)
        if transport == "grpc":
            assert len(pb.StartWriteCacheResponse.FromString(run.answers[0]).locations) == blocks
            assert pb.CommonResponse.FromString(run.answers[1]).header.status.code == pb.OK
        else:
            assert len(json.loads(run.answers[0])["locations"]) == blocks
            assert json.loads(run.answers[1])["header"]["status"]["code"] == "OK"
        return run

    return Case(f"start + finish, {blocks:,} fresh blocks", None, measure, count, blocks)


def cases(running: Site) -> list[Case]:
    """Store the blocks to look up, and return all cases."""
    keys = hash_keys(0, 1024)
    for instance, specs in (("one", 1), ("eight", 8), ("fresh", 1)):
        running.manager.register(instance, specs)
    running.manager.store("one", keys)
    running.manager.store("eight", keys)
    missing = hash_keys(1 << 50, 1024)
    return [
        match_case("64 hits", "one", keys[:64], 2.2, 64),
        match_case("1,024 hits", "one", keys, 2.2, 1024),
        match_case("1,024 hits, 8 specs", "eight", keys, 2.5, 1024),
        match_case("1,024 misses", "one", missing, 2.5, 0),
        write_case(64, 200),
        write_case(1024, 40),
    ]


def measured(sites: Mapping[str, Site], case: Case, concurrency: int, plan: Plan) -> list[Row]:
    """Measure one case on every store over gRPC, in memory over HTTP, and the bare server."""
    count, first = plan.count(case, concurrency), next(iter(sites.values()))
    sides = {store: (running, "grpc") for store, running in sites.items()}
    if "memory" in sites:
        sides["HTTP"] = sites["memory"], "http"
    warm, *_ = [case.measure(running, transport, 2 * concurrency, concurrency) for running, transport in sides.values()]
    bare = [
        Exchange(f"/floor.Floor/Answer{len(answer)}", sent.body)
        for sent, answer in zip(warm.sent, warm.answers, strict=True)
    ]
    first.client.send(first.floor, "grpc", [bare], 2 * concurrency, concurrency)
    runs: dict[str, list[Run]] = {name: [] for name in ("floor", *sides)}
    for _ in range(plan.rounds):
        runs["floor"].append(first.client.send(first.floor, "grpc", [bare], count, concurrency))
        for name, (running, transport) in sides.items():
            runs[name].append(case.measure(running, transport, count, concurrency))
    if case.blocks:
        for running in sites.values():
            running.manager.forget("fresh")
    found = {name: summed(each) for name, each in runs.items()}
    clients = f"{case.name}, {concurrency} client{'s' if concurrency > 1 else ''}"
    rows = [row for store in sites for row in _rows_of(store, f"{store}: {clients}", case, found)]
    if "HTTP" in found:
        name = f"memory: {clients}, HTTP"
        rows.append(_http_cost(name, found["HTTP"], found["memory"]))
        rows += _times(name, found["HTTP"], found["floor"], is_judged=True)
    return rows


def summed(runs: Sequence[Run]) -> Measured:
    """Return the median window's CPU times, and the times of the units of all windows."""
    times = [each for run in runs for each in run.times_us]
    server, store = (
        statistics.median(each) for each in zip(*((run.cpu_us, run.store_us) for run in runs), strict=True)
    )
    return Measured(server, store, quantile(times, 0.5), quantile(times, 0.99))


def _rows_of(store: str, name: str, case: Case, found: Mapping[str, Measured]) -> list[Row]:
    """Return the rows of one store on gRPC; those of memory are judged."""
    ours, floor, unit = found[store], found["floor"], "write" if case.blocks else "request"
    cost = _cost(name, case, ours, floor)
    rows = [cost if store == "memory" else replace(cost, target="", ok=None)]
    if store == "redis":
        rows.append(Row(name, f"redis CPU per {unit}", ours.store_us, "us"))
    return rows + _times(name, ours, floor, is_judged=store == "memory")


def _cost(name: str, case: Case, ours: Measured, floor: Measured) -> Row:
    metric = "server CPU per request" if not case.blocks else "server CPU per write"
    if case.most is not None:
        ratio, target = ours.cpu_us / floor.cpu_us, f"value/floor <= {case.most}"
        return Row(name, metric, ours.cpu_us, "us", floor.cpu_us, ratio, target, ratio <= case.most)
    per_block = (ours.cpu_us - floor.cpu_us) / case.blocks
    target = f"(value - floors)/block <= {MOST_US_PER_BLOCK} us"
    return Row(name, metric, ours.cpu_us, "us", floor.cpu_us, per_block, target, per_block <= MOST_US_PER_BLOCK)


def _http_cost(name: str, http: Measured, grpc: Measured) -> Row:
    ratio = http.cpu_us / grpc.cpu_us
    target = f"value/gRPC <= {MOST_HTTP}"
    return Row(name, "server CPU per request", http.cpu_us, "us", grpc.cpu_us, ratio, target, ratio <= MOST_HTTP)


def _times(name: str, side: Measured, floor: Measured, *, is_judged: bool) -> list[Row]:
    ratio = side.tail / floor.tail
    target, ok = (f"value/floor <= {MOST_TAIL}", ratio <= MOST_TAIL) if is_judged else ("", None)
    return [
        Row(name, "p50", side.p50_us, "us", floor.p50_us, side.p50_us / floor.p50_us),
        Row(name, "p99", side.p99_us, "us", floor.p99_us, side.p99_us / floor.p99_us),
        Row(name, "p99/p50", side.tail, "", floor.tail, ratio, target, ok),
    ]


def service(plan: Plan, stores: Sequence[str], only: str, settings: Sequence[str]) -> list[Row]:
    """Measure every case whose name has `only` in it, on managers that all run at once."""
    with ExitStack() as stack:
        sites = {
            store: stack.enter_context(site((*settings, *SETTINGS), store=store, settle_seconds=plan.settle_seconds))
            for store in stores
        }
        found, *_ = [cases(running) for running in sites.values()]  # all store the same blocks
        return [
            row
            for case in found
            if only in case.name
            for concurrency in plan.concurrencies
            for row in measured(sites, case, concurrency, plan)
        ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--scaling", action="store_true", help="keys per request and resident blocks instead")
    parser.add_argument("--store", choices=STORES, nargs="+", default=STORES, help="where metadata is kept")
    parser.add_argument("--only", default="", help="cases with this text in their names")
    parser.add_argument("--clients", type=int, nargs="+", default=CONCURRENCIES, help="requests at the same time")
    parser.add_argument("-e", "--env", action="append", default=[], help="a setting of the managers, key=value")
    options = parser.parse_args()
    plan = Plan(1, 0.1, options.clients[:1], QUICK_SETTLE) if options.quick else Plan(5, 1.0, options.clients)
    if options.scaling:
        rows = scaling(options.store, options.quick)
    else:
        rows = service(plan, options.store, options.only, options.env)
    met = publish("service: calls against a bare server", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
