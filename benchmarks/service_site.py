"""What the service benchmark runs: a manager, its store, a bare server and a client, each a process.

Metadata is in memory, in RocksDB in a temporary directory, or in a Redis of its own without persistence.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
from server_process import free_port, process
from service_client import META, Exchange, key_of

from kvcm.protocol import meta_service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from redis_servers import RedisServer, standalone

__all__ = [
    "STORES",
    "Client",
    "Floor",
    "Manager",
    "Redis",
    "Run",
    "Site",
    "Store",
    "hash_keys",
    "opened",
    "site",
    "startup_config",
]

HERE = Path(__file__).parent
STORES = ("memory", "rocksdb", "redis")
SPEC_BYTES = 4096
SETTLE_SECONDS = 1.3
"""A manager records reads once a second; the time of that belongs to the readers."""
_IDLE_SECONDS = 3.0
_START_SECONDS = 60.0
_OBSERVE_SECONDS = 0.05
_PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")


def hash_keys(first: int, count: int) -> list[int]:
    """Return keys that look like hashes, the same for the same numbers."""
    return [key_of(number) for number in range(first, first + count)]


class Spent(NamedTuple):
    """Seconds of CPU that a server and the process of its store used up to a moment."""

    at: float
    server: float
    store: float


@dataclass(frozen=True, slots=True)
class Process:
    """A server process.

    Attributes:
        pid: of the process.
        ports: by transport.
        idle: seconds of CPU that it uses per second without requests.
        key: that it wants to be shown, "" for none.
        database: the process that keeps its data, None where it does so itself.
        settle_seconds: after which the work that requests left is done.
    """

    pid: int
    ports: dict[str, int] = field(default_factory=dict)
    idle: float = 0.0
    key: str = ""
    database: Redis | None = None
    settle_seconds: float = SETTLE_SECONDS

    def cpu_seconds(self) -> float:
        """Return what the process used so far, all threads, user and system: its CPU clock, as clock_getcpuclockid(3)
        names it. The same figure as utime + stime, in ns instead of ticks of 10 ms."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def spent(self) -> Spent:
        """Return what it and its store used so far."""
        store = self.database.cpu_seconds() if self.database is not None else 0.0
        return Spent(time.monotonic(), self.cpu_seconds(), store)

    def spent_since(self, begin: Spent) -> Spent:
        """Return what both used since then, after what requests left to do is done, less what they use anyway."""
        time.sleep(self.settle_seconds)
        now = self.spent()
        passed = now.at - begin.at
        idle_store = self.database.idle if self.database is not None else 0.0
        return Spent(
            passed, now.server - begin.server - self.idle * passed, now.store - begin.store - idle_store * passed
        )

    def knowing_idle(self) -> Self:
        """Return this with `idle` measured, its own and its store's."""
        time.sleep(self.settle_seconds)
        begin = self.spent()
        time.sleep(_IDLE_SECONDS * self.settle_seconds / SETTLE_SECONDS)
        now = self.spent()
        server, store = ((now[at] - begin[at]) / (now.at - begin.at) for at in (1, 2))
        return replace(self, idle=server, database=self.database and replace(self.database, idle=store))


class Redis(Process):
    """The server of a store."""


class Manager(Process):
    """The manager."""

    def call(self, method: str, request: Any, response_type: Any, port: str = "grpc") -> Any:
        """Ask it once; refuse an answer that is no success. `method` is one of MetaService, or a whole path."""
        options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[port]}", options=options) as channel:
            send = channel.unary_unary(method if method.startswith("/") else f"{META}{method}")
            metadata = (("authorization", f"Bearer {self.key}"),) if self.key else ()
            body = send(request.SerializeToString(), wait_for_ready=True, timeout=600, metadata=metadata)
            answer = response_type.FromString(body)
        assert answer.header.status.code == pb.OK, answer.header
        return answer

    def ready(self) -> None:
        """Return when it serves. It listens before, and refuses."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.call("GetClusterInfo", pb.GetClusterInfoRequest(), pb.GetClusterInfoResponse)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
                time.sleep(_OBSERVE_SECONDS)
            else:
                return

    def register(self, instance: str, specs: int) -> None:
        """Register an instance with so many specs of equal size."""
        request = pb.RegisterInstanceRequest(instance_group="default", instance_id=instance, block_size=64)
        request.model_deployment.model_name, request.model_deployment.dtype = "model", "float16"
        for rank in range(specs):
            request.location_spec_infos.add(name=f"tp{rank}", size=SPEC_BYTES)
        self.call("RegisterInstance", request, pb.RegisterInstanceResponse)

    def store(self, instance: str, keys: Sequence[int]) -> None:
        """Write blocks."""
        start = pb.StartWriteCacheRequest(instance_id=instance, block_keys=keys, write_timeout_seconds=60)
        started = self.call("StartWriteCache", start, pb.StartWriteCacheResponse)
        finish = pb.FinishWriteCacheRequest(instance_id=instance, write_session_id=started.write_session_id)
        finish.success_blocks.offset = len(started.locations)
        self.call("FinishWriteCache", finish, pb.CommonResponse)

    def forget(self, instance: str) -> None:
        """Drop the metadata of all blocks."""
        request = pb.TrimCacheRequest(instance_id=instance, strategy=pb.TS_REMOVE_ALL_META)
        self.call("TrimCache", request, pb.CommonResponse)


class Floor(Process):
    """The bare server. It does nothing after its answers."""


class Run(NamedTuple):
    """The measurements of one run of units.

    Attributes:
        cpu_us: of the server, per unit, with what it did in the background for them.
        store_us: the same of the process of its store, 0 where the server keeps its data itself.
        times_us: of the units, as the client saw them.
        answers: to the last unit.
        sent: the last unit.
        smallest: bytes of the smallest answers of a unit.
    """

    cpu_us: float
    store_us: float
    times_us: list[int]
    answers: list[bytes]
    sent: list[Exchange]
    smallest: int


@dataclass(slots=True)
class Client:
    """A client process."""

    running: subprocess.Popen[str]
    _next_number: int = field(default=1 << 40)

    def send(
        self, server: Process, transport: str, units: Sequence[Sequence[Exchange]], count: int, concurrency: int
    ) -> Run:
        """Send prepared units in turn until so many were answered."""
        encoded = [[[each.target, base64.b64encode(each.body).decode()] for each in unit] for unit in units]
        return self._run(server, transport, {"units": encoded}, count, concurrency)

    def rush(
        self, server: Process, transport: str, units: Sequence[Sequence[Exchange]], count: int, concurrency: int
    ) -> float:
        """Return the server's CPU per unit in us while it answers, without what it does for them later."""
        encoded = [[[each.target, base64.b64encode(each.body).decode()] for each in unit] for unit in units]
        begin, _ = self._ask(server, transport, {"units": encoded}, count, concurrency)
        return (server.cpu_seconds() - begin.server) / count * 1e6

    def write(self, server: Process, transport: str, instance: str, blocks: int, count: int, concurrency: int) -> Run:
        """Start and finish so many writes of fresh blocks."""
        first, self._next_number = self._next_number, self._next_number + blocks * count
        write = {"instance": instance, "blocks": blocks, "first": first}
        return self._run(server, transport, {"write": write}, count, concurrency)

    def fill(self, server: Process, instance: str, blocks: int, first: int, count: int) -> None:
        """Write blocks `first` and following, so many to a request."""
        write = {"instance": instance, "blocks": blocks, "first": first}
        self._ask(server, "grpc", {"write": write}, count, 2)

    def _run(self, server: Process, transport: str, what: dict[str, Any], count: int, concurrency: int) -> Run:
        begin, reported = self._ask(server, transport, what, count, concurrency)
        spent = server.spent_since(begin)
        answers = [base64.b64decode(answer) for answer in reported["answers"]]
        sent = [Exchange(target, base64.b64decode(body)) for target, body in reported["sent"]]
        server_us, store_us = (seconds / count * 1e6 for seconds in (spent.server, spent.store))
        return Run(server_us, store_us, reported["times_us"], answers, sent, reported["smallest"])

    def _ask(
        self, server: Process, transport: str, what: dict[str, Any], count: int, concurrency: int
    ) -> tuple[Spent, dict[str, Any]]:
        """Return the CPU that was used when the requests begin, and the client's report on them."""
        job = {"transport": transport, "port": server.ports[transport], "count": count, "concurrency": concurrency}
        job["key"] = server.key
        self._say(json.dumps(job | what))
        assert self._receive() == "ready"
        begin = server.spent()
        self._say("go")
        return begin, json.loads(self._receive())

    def _say(self, line: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(line + "\n")
        self.running.stdin.flush()

    def _receive(self) -> str:
        assert self.running.stdout is not None
        line = self.running.stdout.readline()
        assert line, "the client ended"
        return line.strip()


@dataclass(frozen=True, slots=True)
class Store:
    """Where a manager keeps its metadata.

    Attributes:
        name: one of STORES.
        uri: of it.
        server: its Redis, None for a store within the manager.
    """

    name: str
    uri: str
    server: RedisServer | None = None


@contextlib.contextmanager
def opened(name: str, directory: Path) -> Iterator[Store]:
    """Provide an empty store inside the block; a Redis keeps nothing on disk."""
    if name == "redis":
        with standalone(directory / "redis") as servers:
            yield Store(name, servers.uri("bench"), servers.server)
    else:
        yield Store(name, {"memory": "memory://", "rocksdb": f"local://{directory}/metadata"}[name])


class Site(NamedTuple):
    """Everything that runs."""

    manager: Manager
    floor: Floor
    client: Client
    store: Store


@contextlib.contextmanager
def site(
    settings: Sequence[str] = (),
    config_file: Path | None = None,
    code: Path | None = None,
    *,
    store: str = "memory",
    settle_seconds: float = SETTLE_SECONDS,
) -> Iterator[Site]:
    """Run a manager whose group is never full, its store, a bare server, and a client.

    Args:
        settings: more of the manager, as key=value.
        config_file: still more, which it can reload.
        code: checkout that the manager runs, this one by default.
        store: one of STORES; a uri among the settings goes before it.
        settle_seconds: to wait after each run; less than the default misses a part of its cost.
    """
    ports = {name: free_port() for name in _PORTS}
    with tempfile.TemporaryDirectory(prefix="kvcm-site-") as temporary, contextlib.ExitStack() as stack:
        directory = Path(temporary)
        kept = stack.enter_context(opened(store, directory))
        given = [  # of one key the first counts
            *settings,
            *(f"kvcm.service.{name}={port}" for name, port in ports.items()),
            f"kvcm.registry_storage.uri={kept.uri}",
            f"kvcm.startup_config={startup_config(directory)}",
            f"kvcm.auth.admin_key_file={directory}/admin.key",
            "kvcm.limits.keys_per_second=0",  # one client may have all that the manager has
        ]
        options = [word for setting in given for word in ("-e", setting)]
        options += ["-c", str(config_file)] if config_file is not None else []
        quiet = {"stderr": None if "KVCM_BENCH_LOGS" in os.environ else subprocess.DEVNULL}
        runs = {"env": {**os.environ, "PYTHONPATH": str(code)}, "cwd": code} if code is not None else {}
        manager = stack.enter_context(process("-m", "kvcm", "serve", *options, **quiet, **runs))
        floor = stack.enter_context(process(str(HERE / "floor_server.py"), stdout=subprocess.PIPE))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        client = stack.enter_context(process(str(HERE / "service_client.py"), **pipes))
        assert floor.stdout is not None
        floor_ports = {"grpc": int(floor.stdout.readline())}
        running = Manager(
            manager.pid,
            {name.removesuffix("_port").replace("rpc", "grpc"): port for name, port in ports.items()},
            database=Redis(kept.server.process.pid) if kept.server is not None else None,
            settle_seconds=settle_seconds,
        )
        running.ready()
        if (key := directory / "admin.key").exists():
            running = replace(running, key=key.read_text().strip())
        yield Site(running.knowing_idle(), Floor(floor.pid, floor_ports, settle_seconds=0.0), Client(client), kept)


def startup_config(directory: Path) -> Path:
    """Write the built-in storage and group for any number of blocks."""
    storage = {"root_path": f"{directory}/nfs/", "key_count_per_file": 8}
    document = {
        "storage_config": {"type": "file", "global_unique_name": "nfs_01", "storage_spec": storage},
        "instance_group": {
            "name": "default",
            "storage_candidates": ["nfs_01"],
            "max_instance_count": 100,
            "quota": {"capacity": 1 << 50, "quota_config": [{"storage_type": "file", "capacity": 1 << 50}]},
            "cache_config": {
                "reclaim_strategy": {
                    "storage_unique_name": "nfs_01",
                    "reclaim_policy": 1,
                    "trigger_strategy": {"used_percentage": 0.8},
                    "delay_before_delete_ms": 1000,
                },
                "meta_indexer_config": {"max_key_count": 1 << 30},
            },
        },
    }
    file = directory / "startup.json"
    file.write_text(json.dumps(document))
    return file


def quantile(times_us: Sequence[int], share: float) -> float:
    """Return the time that so many of the units are done in."""
    if len(times_us) < 2:
        return float(statistics.fmean(times_us))
    ordered = sorted(times_us)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
