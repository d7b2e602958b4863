"""Claim: a manager that is offered ten times what it can do goes on serving, and says to the rest when to come back.

Its capacity is measured first, by clients that keep a number of requests on their way; then its times while it has
little to do; then ten times the capacity is offered, whether it is answered or not. A mix of lookups of 64 and of
1,024 keys, of writes and of large batches, from processes that send prepared bytes. The server has a core of its own,
clients have the other one, so that neither slows the other down. Meanwhile a probe asks for health and metrics, and
samples the memory of the process.

Accepted requests are judged by kind: their p99 against that of the same kind with little to do. What HTTP/2 keeps
back at the client, since the server takes no more at a time, is counted and shown.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from report import Row, arguments, is_sound, publish
from server_process import process
from service_site import HERE, Manager, hash_keys, quantile, site

TIMES = 10
MOST_SLOWER = 5.0
MOST_MORE_BYTES = 256 << 20
SHED = {"503", "429", "grpc 14", "grpc 8", "reset 7"}  # the last: REFUSED_STREAM, for gRPC UNAVAILABLE
SERVED = {"200", "grpc 0"}
KEPT_BACK = "kept back"
CONNECTIONS = {"http": 64, "grpc": 4}
STREAMS = "kvcm.limits.max_streams_per_connection=2"
WITHOUT_SHEDDING = "kvcm.limits.max_queue_ms=0\n"
WITH_SHEDDING = "kvcm.limits.max_queue_ms=10\nkvcm.limits.long_requests=2\n"
SHARE_AT_REST = 0.15


class Plan(NamedTuple):
    """How long is measured."""

    capacity_seconds: float
    rest_seconds: float
    overload_seconds: float


class Outcome(NamedTuple):
    """The outcome of an offer: requests by kind, how they ended, and the times of those that were served."""

    wall: float
    offered: Counter[str]
    ended: Counter[str]
    times_us: dict[str, list[int]]

    @property
    def served(self) -> int:
        return sum(self.ended[status] for status in SERVED)

    @property
    def shed(self) -> int:
        return sum(self.ended[status] for status in SHED)

    @property
    def others(self) -> dict[str, int]:
        """How requests ended that were neither served nor shed, nor kept back by the client."""
        return {status: n for status, n in self.ended.items() if status not in SHED | SERVED | {KEPT_BACK}}

    def p99_us(self, kind: str) -> float:
        return quantile(self.times_us[kind], 0.99)


class Clients:
    """Client processes; their offers are summed.

    Args:
        running: the processes.
        manager: the server under load.
        cores: that they run on.
    """

    def __init__(self, running: Sequence[subprocess.Popen[str]], manager: Manager, cores: Sequence[int]) -> None:
        self._running = running
        self._manager = manager
        self._cores = cores
        self._seed = 0

    def offer(self, transport: str, seconds: float, rate: float = 0.0, concurrency: int = 0) -> Outcome:
        """Offer requests at a rate, or keep so many on their way."""
        for number, client in enumerate(self._running):
            self._seed += 1
            job = {
                "transport": transport,
                "port": self._manager.ports[transport],
                "connections": CONNECTIONS[transport] // len(self._running),
                "rate": rate / len(self._running),
                "concurrency": concurrency // len(self._running),
                "seconds": seconds,
                "seed": self._seed,
                "first": (number + 1 + (transport == "http") * 8) << 40,
                "core": self._cores[number % len(self._cores)],
            }
            assert client.stdin is not None
            client.stdin.write(json.dumps(job) + "\n")
            client.stdin.flush()
        return _summed([json.loads(_line(client)) for client in self._running])


def _line(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line, "a client ended"
    return line


def _summed(reported: Sequence[dict[str, Any]]) -> Outcome:
    offered: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    times: dict[str, list[int]] = {}
    for each in reported:
        offered.update(each["offered"])
        for by_status in each["outcomes"].values():
            ended.update(by_status)
        for kind, some in each["times_us"].items():
            times.setdefault(kind, []).extend(some)
    return Outcome(max(each["wall"] for each in reported), offered, ended, times)


@dataclass
class Watch:
    """Asks for health and metrics all the time, and notes the memory of the process."""

    manager: Manager
    admin_http: int
    admin_rpc: int
    times_us: dict[str, list[int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    most_bytes: int = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Watch]:
        """Watch inside the block."""
        stopping = threading.Event()
        asks = {
            "GET /livez, data port": lambda: self._get(self.manager.ports["http"], "/livez"),
            "GET /readyz, admin port": lambda: self._get(self.admin_http, "/readyz"),
            "GET /metrics": lambda: self._get(self.admin_http, "/metrics"),
            "gRPC health, admin port": lambda: self._health(self.admin_rpc),
            "gRPC health, data port": lambda: self._health(self.manager.ports["grpc"]),
        }
        threads = [threading.Thread(target=self._ask, args=(stopping, name, ask)) for name, ask in asks.items()]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stopping.set()
            for thread in threads:
                thread.join()

    def _ask(self, stopping: threading.Event, name: str, ask: Any) -> None:
        while not stopping.wait(0.25):
            begin = time.perf_counter()
            try:
                ask()
            except Exception as error:
                self.failures.append(f"{name}: {error!r}"[:200])
            self.times_us.setdefault(name, []).append(round((time.perf_counter() - begin) * 1e6))
            self.most_bytes = max(self.most_bytes, resident_bytes(self.manager.pid))

    def _get(self, port: int, path: str) -> str:
        return get(port, path)

    def _health(self, port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer


def get(port: int, path: str) -> str:
    """Ask for a page on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        return answer.read().decode()
    finally:
        connection.close()


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def series(admin_http: int) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Return every series of a scrape, which has to be valid."""
    families = text_string_to_metric_families(get(admin_http, "/metrics"))
    return {(each.name, tuple(sorted(each.labels.items()))) for family in families for each in family.samples}


def overload(plan: Plan, settings: Sequence[str]) -> list[Row]:
    """Measure both transports."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        limits = Path(directory) / "kvcm.conf"
        limits.write_text(WITHOUT_SHEDDING)
        manager = stack.enter_context(site((STREAMS, *settings), limits)).manager
        os.sched_setaffinity(manager.pid, cores[:1])
        for thread in Path(f"/proc/{manager.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[:1])
        others = cores[1:] or cores
        os.sched_setaffinity(0, others)
        for instance in ("hot", "fresh"):
            manager.register(instance, 1)
        for first in range(0, 16_384, 1024):
            manager.store("hot", hash_keys(first, 1024))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started = [process(str(HERE / "overload_client.py"), **pipes) for _ in range(2)]
        clients = Clients([stack.enter_context(client) for client in started], manager, others)
        return [row for transport in CONNECTIONS for row in _measured(clients, manager, transport, plan, limits)]


def _set(manager: Manager, file: Path, limits: str) -> None:
    """Have a running manager keep to other limits."""
    file.write_text(limits)
    connection = http.client.HTTPConnection("127.0.0.1", manager.ports["admin_http"], timeout=30)
    connection.request("POST", "/api/reloadConfig", b"{}")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["header"]["status"]["code"] == "OK", answer


def _measured(clients: Clients, manager: Manager, transport: str, plan: Plan, limits: Path) -> list[Row]:
    name = transport.upper().replace("GRPC", "gRPC")
    admin_http, admin_rpc = manager.ports["admin_http"], manager.ports["admin_grpc"]
    _set(manager, limits, WITHOUT_SHEDDING)
    clients.offer(transport, plan.capacity_seconds / 4, concurrency=8)
    busy = clients.offer(transport, plan.capacity_seconds, concurrency=8)
    capacity = busy.served / busy.wall
    _set(manager, limits, WITH_SHEDDING)
    rest = clients.offer(transport, plan.rest_seconds, rate=capacity * SHARE_AT_REST)
    before, series_before = resident_bytes(manager.pid), series(admin_http)
    with Watch(manager, admin_http, admin_rpc).running() as watch:
        flood = clients.offer(transport, plan.overload_seconds, rate=capacity * TIMES)
    series_after = series(admin_http)
    _set(manager, limits, WITHOUT_SHEDDING)
    again = clients.offer(transport, plan.rest_seconds, rate=capacity * SHARE_AT_REST)
    offered = sum(flood.offered.values())
    rows = [
        Row(f"{name}: capacity", "requests served", capacity, "1/s"),
        Row(
            f"{name}: {TIMES}x",
            "requests offered",
            offered / flood.wall,
            "1/s",
            capacity,
            offered / flood.wall / capacity,
        ),
        Row(
            f"{name}: {TIMES}x",
            "served",
            flood.served / flood.wall,
            "1/s",
            capacity,
            flood.served / flood.wall / capacity,
        ),
        Row(f"{name}: {TIMES}x", "turned away", flood.shed / flood.wall, "1/s"),
        Row(f"{name}: {TIMES}x", "kept back by the client", flood.ended[KEPT_BACK] / flood.wall, "1/s"),
        _none(f"{name}: {TIMES}x", "ended otherwise", flood.others),
        *(_slower(name, kind, rest, flood) for kind in sorted(rest.times_us) if "coming" not in kind),
        *_asked(name, watch),
        _memory(name, before, watch.most_bytes),
        _none(f"{name}: scrape", "series that came with the overload", _new(series_before, series_after)),
        _none(f"{name}: afterwards", "turned away or ended otherwise", {**again.others, **_shed(again)}),
    ]
    for kind in sorted(rest.times_us):
        if "coming" not in kind:
            p99, was = again.p99_us(kind), rest.p99_us(kind)
            rows.append(Row(f"{name}: afterwards, {kind}", "p99", p99 / 1e6, "s", was / 1e6, p99 / was))
    return rows


def _shed(outcome: Outcome) -> dict[str, int]:
    return {status: outcome.ended[status] for status in SHED - {"reset 7"}}


def _slower(name: str, kind: str, rest: Outcome, flood: Outcome) -> Row:
    case, target = f"{name}: {TIMES}x, {kind} served", f"value/baseline <= {MOST_SLOWER:g}"
    if not flood.times_us.get(kind):
        return Row(case, "none was served", 0, "s", rest.p99_us(kind) / 1e6, None, target, ok=False)
    p99, was = flood.p99_us(kind), rest.p99_us(kind)
    return Row(case, "p99", p99 / 1e6, "s", was / 1e6, p99 / was, target, p99 <= MOST_SLOWER * was)


def _asked(name: str, watch: Watch) -> list[Row]:
    for failure in watch.failures[:5]:
        print(failure, file=sys.stderr)
    rows = [
        Row(f"{name}: {TIMES}x, {what}", "p99", quantile(times, 0.99) / 1e6, "s")
        for what, times in sorted(watch.times_us.items())
    ]
    return [*rows, _none(f"{name}: {TIMES}x, health and metrics", "not answered", {"": len(watch.failures)})]


def _memory(name: str, before: int, most: int) -> Row:
    more = (most - before) / (1 << 20)
    target = f"<= {MOST_MORE_BYTES >> 20}"
    return Row(f"{name}: {TIMES}x", "memory taken", more, "MiB", None, None, target, more <= MOST_MORE_BYTES >> 20)


def _none(case: str, metric: str, found: dict[str, int]) -> Row:
    count = sum(found.values())
    if count:
        print(f"{case}: {metric}: {found}", file=sys.stderr)
    return Row(case, metric, count, "", target="= 0", ok=count == 0)


def _new(before: set[Any], after: set[Any]) -> dict[str, int]:
    """Return series that were not there, but those of new outcomes."""
    allowed = {"kvcm_rpc_requests_total"}
    return {str(each): 1 for each in after - before if each[0] not in allowed}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("-e", "--env", action="append", default=[], help="a setting of the manager, key=value")
    options = parser.parse_args()
    plan = Plan(2.0, 3.0, 4.0) if options.quick else Plan(10.0, 20.0, 20.0)
    rows = overload(plan, options.env)
    met = publish("overload: ten times what the manager can do", rows, options.json)
    return 0 if met or (options.quick and is_sound(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
