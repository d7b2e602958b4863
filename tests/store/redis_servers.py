"""Real Redis servers on loopback: alone, behind sentinels, as a cluster; a plug-in of all tests (`tests/conftest.py`).

With KVCM_REDIS_PROGRAM=valkey they are Valkey's: `valkey-server` and `valkey-cli` of the PATH.
Tests share the servers of the fixtures: each uses a deployment name of its own and leaves every process running.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from ports import BUS_OFFSET, free_port
from stopping import stop_process
from waiting import until

__all__ = ["REDIS_PROGRAM", "Cluster", "RedisServer", "Sentinels", "Servers", "cluster", "sentinel", "standalone"]

_START_SECONDS = 60.0
_PATIENT_MS = 20_000
_SILENCE_MS = 10_000  # after which a server is given up: longer than a busy machine keeps one silent
_SERVICE = "mymaster"
REDIS_PROGRAM = os.environ.get("KVCM_REDIS_PROGRAM", "redis")
"""What the names of the programs begin with: `redis` or `valkey`."""


class RedisServer:
    """A server process.

    Args:
        directory: of its own, for its files and its log.
        options: of the command line, `--name value`.
        port: where it listens.
        password: of the default user, None for none.
        is_sentinel: whether to start a sentinel.
    """

    def __init__(
        self, directory: Path, options: Sequence[str], port: int, password: str | None = None, is_sentinel: bool = False
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port, self._password = directory, port, password
        self._command = [f"{REDIS_PROGRAM}-server", *(["sentinel.conf", "--sentinel"] if is_sentinel else []), *options]
        self._start()

    def _start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(self.answers)

    @property
    def log_text(self) -> str:
        """Everything it logged."""
        return (self.directory / "log").read_text(errors="replace")

    @contextlib.contextmanager
    def admin(self) -> Iterator[redis.Redis]:
        """A plain, blocking client for the test's own questions."""
        client = redis.Redis(
            port=self.port, password=self._password, protocol=2, socket_timeout=30, retry=None, decode_responses=False
        )
        try:
            yield client
        finally:
            client.close()

    def answers(self) -> bool:
        """Whether it accepts connections and has loaded its data."""
        assert self.process.poll() is None, f"exit code {self.process.poll()}; log:\n{self.log_text}"
        with self.admin() as client:
            try:
                client.execute_command("PING")
            except redis.ResponseError as error:
                return "unknown command" in str(error) or "NOPERM" in str(error)
            except (redis.RedisError, OSError):
                return False
        return True

    def pause(self) -> None:
        """Stop the process as it stands; connections stay open and silent."""
        stop_process(self.process.pid)

    def resume(self) -> None:
        """Let a paused process go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once; what it did not write is lost."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_START_SECONDS)

    def restart(self) -> None:
        """Kill it and start it again with its files, on the same port."""
        self.kill()
        self._start()


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers that run, and the uri that deployments on them begin with."""

    base_uri: str

    def uri(self, cluster_name: str, **parameters: object) -> str:
        """Return the uri of a deployment on them.

        Answers are waited for as long as a busy machine may need; tests of silent servers give a `timeout_ms`.
        """
        named = {"cluster_name": cluster_name, "timeout_ms": _PATIENT_MS, **parameters}
        return f"{self.base_uri}?" + "&".join(f"{name}={value}" for name, value in named.items())


@dataclass(frozen=True, slots=True)
class Standalone(Servers):
    """One server."""

    server: RedisServer


@dataclass(frozen=True, slots=True)
class Cluster(Servers):
    """Masters and replicas."""

    nodes: tuple[RedisServer, ...]

    def is_whole(self) -> bool:
        """Whether every node sees every slot served."""
        return all(_cluster_state(node) == "ok" for node in self._living)

    def give_up_soon(self) -> None:
        """Let a node be given up after a second of silence, which a busy machine may cause, too."""
        for node in self._living:
            with node.admin() as admin:
                admin.config_set("cluster-node-timeout", 1000)

    @property
    def _living(self) -> list[RedisServer]:
        return [node for node in self.nodes if node.process.poll() is None]


@dataclass(frozen=True, slots=True)
class Sentinels(Servers):
    """A master, its replica, and the sentinels that watch them."""

    servers: tuple[RedisServer, ...]
    sentinels: tuple[RedisServer, ...]

    @property
    def master(self) -> RedisServer:
        """The master that the first sentinel names."""
        with self.sentinels[0].admin() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def give_up_soon(self) -> None:
        """Let a master be given up after a second of silence, which a busy machine may cause, too."""
        for watching in self.sentinels:
            with watching.admin() as admin:
                admin.execute_command("SENTINEL", "SET", _SERVICE, "down-after-milliseconds", 1000)


def _options(port: int, *options: str) -> list[str]:
    return ["--port", str(port), "--bind", "127.0.0.1", "--save", "", *options]


@contextlib.contextmanager
def _running() -> Iterator[list[RedisServer]]:
    servers: list[RedisServer] = []
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()
            shutil.rmtree(server.directory, ignore_errors=True)


@contextlib.contextmanager
def standalone(
    directory: Path, appendonly: bool = False, password: str | None = None, extra: Sequence[str] = ()
) -> Iterator[Standalone]:
    """Run one server inside the block.

    Args:
        directory: for its files.
        appendonly: whether every write is on disk before it is answered.
        password: of the default user.
        extra: further options.
    """
    port = free_port()
    durable = ["--appendonly", "yes", "--appendfsync", "always"] if appendonly else []
    login = ["--requirepass", password] if password else []
    with _running() as servers:
        servers.append(RedisServer(directory / str(port), _options(port, *durable, *login, *extra), port, password))
        yield Standalone(f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/", servers[0])


@contextlib.contextmanager
def cluster(directory: Path, nodes: int = 3, replicas: int = 0) -> Iterator[Cluster]:
    """Run a cluster inside the block: `nodes` masters with so many replicas each."""
    with _running() as servers:
        for _ in range(nodes * (1 + replicas)):
            port = free_port(BUS_OFFSET)
            places = ["--cluster-port", str(port + BUS_OFFSET), "--cluster-node-timeout", str(_SILENCE_MS)]
            options = _options(port, "--cluster-enabled", "yes", *places, "--repl-diskless-sync-delay", "0")
            servers.append(RedisServer(directory / str(port), options, port))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        subprocess.run(
            [f"{REDIS_PROGRAM}-cli", "--cluster", "create", *addresses,
             "--cluster-replicas", str(replicas), "--cluster-yes"],
            check=True, capture_output=True, timeout=_START_SECONDS,
        )  # fmt: skip
        made = Cluster(f"redis+cluster://{','.join(addresses)}/", tuple(servers))
        until(made.is_whole)
        until(lambda: sum(map(is_replica_in_step, servers)) == nodes * replicas)
        yield made


@contextlib.contextmanager
def sentinel(directory: Path) -> Iterator[Sentinels]:
    """Run a master, a replica and three sentinels inside the block."""
    with _running() as servers:
        for _ in range(2):
            port = free_port()
            of = ["--replicaof", f"127.0.0.1 {servers[0].port}"] if servers else []
            options = _options(port, "--repl-diskless-sync-delay", "0", *of)
            servers.append(RedisServer(directory / str(port), options, port))
        until(lambda: is_replica_in_step(servers[1]))
        data = tuple(servers)
        for _ in range(3):
            servers.append(_sentinel(directory, servers[0].port))
        watching = tuple(servers[2:])
        until(lambda: all(_knows_everybody(server) for server in watching))
        addresses = ",".join(f"127.0.0.1:{server.port}" for server in watching)
        yield Sentinels(f"redis+sentinel://{addresses}/{_SERVICE}", data, watching)


def _sentinel(directory: Path, master_port: int) -> RedisServer:
    port = free_port()
    place = directory / str(port)
    place.mkdir(parents=True)
    lines = [
        f"port {port}", "bind 127.0.0.1", f"sentinel monitor {_SERVICE} 127.0.0.1 {master_port} 2",
        f"sentinel down-after-milliseconds {_SERVICE} {_SILENCE_MS}", f"sentinel failover-timeout {_SERVICE} 3000",
    ]  # fmt: skip
    (place / "sentinel.conf").write_text("\n".join(lines) + "\n")
    return RedisServer(place, (), port, is_sentinel=True)


def _knows_everybody(server: RedisServer) -> bool:
    with server.admin() as client:
        answer = client.execute_command("SENTINEL", "MASTER", _SERVICE)
    fields = dict(zip(answer[::2], answer[1::2], strict=True)) if isinstance(answer, list) else answer
    known = {_text(name): _text(value) for name, value in fields.items()}
    return known["num-other-sentinels"] == "2" and known["num-slaves"] == "1" and known["flags"] == "master"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def is_replica_in_step(server: RedisServer) -> bool:
    """Whether a server is a replica that has all of its master's data."""
    with server.admin() as client:
        state = client.info("replication")
    return state["role"] == "slave" and state["master_link_status"] == "up"


def _cluster_state(server: RedisServer) -> str:
    with server.admin() as client:
        state: dict[str, str] = client.cluster("info")
    return state["cluster_state"]


@pytest.fixture(scope="session")
def redis_standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """One server."""
    with standalone(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with cluster(tmp_path_factory.mktemp("redis-cluster")) as made:
        yield made


@pytest.fixture(scope="session")
def redis_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    """A master and a replica, watched by three sentinels."""
    with sentinel(tmp_path_factory.mktemp("redis-sentinel")) as made:
        yield made
