"""A real Mooncake master and processes that are its clients, in a network of their own where that is possible.

The clients listen on all addresses whatever their configuration says, so as root everything runs in a fresh network
namespace with nothing but its loopback. Every process is killed with the test run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from ports import free_port
from stopping import stop_process

FOLDER = Path(__file__).parent
LEASE_SECONDS = 0.3
CLIENT_TTL_SECONDS = 60  # longer than a busy client may stand still: with it goes the memory that it lends
ANSWER_SECONDS = 45.0  # longer than the client needs for anything: without an answer by then it hangs

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)

DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Words before a command. Python could do it between fork and exec, but after a fork gRPC starts its threads again:
they would stay in the network that the caller is in at that moment."""

_HOLD_A_NETWORK = """
import ctypes, fcntl, socket, struct, sys
if ctypes.CDLL(None).unshare(0x40000000):
    sys.exit(1)
with socket.socket() as any_socket:  # ifreq: name, flags UP and RUNNING
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
print("ready", flush=True)
sys.stdin.read()
"""


_locations = count(1)


def addresses(size_bytes: int, number: int = 1) -> list[str]:
    """Return addresses of so many parts of one location that no other test uses."""
    location = next(_locations)
    return [f"mooncake://mc/?key=cluster/inst/tp{n % 2}/{n:x}.m{location}&size={size_bytes}" for n in range(number)]


def name_of(uri: str) -> str:
    """Return the name of a part's object."""
    return uri.partition("key=")[2].partition("&")[0]


def missing() -> str:
    """Say what there is not here to run a store, "" when all is there."""
    found = importlib.util.find_spec("mooncake")
    if found is None or found.origin is None:
        return "the mooncake package is not installed"
    check = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    return check.stderr.strip().splitlines()[-1] if check.returncode else ""


def _master_program() -> str:
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).with_name("mooncake_master"))


class Process:
    """A process of ours that takes lines of JSON and answers each with one."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)

    def ask(self, call: str, **arguments: Any) -> Any:
        """Return the answer; what the process raised is raised here as its text."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
        self.popen.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        deadline, line = time.monotonic() + ANSWER_SECONDS, b""
        while not line.endswith(b"\n"):
            assert select.select([self.popen.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], "it hangs"
            piece = os.read(self.popen.stdout.fileno(), 1 << 16)
            assert piece, f"the process ended with {self.popen.wait()}"
            line += piece
        answer = json.loads(line)
        if "raised" in answer:
            raise AskedError(answer["raised"])
        return answer["result"]

    def resume(self) -> None:
        """Let a stopped process go on."""
        self.popen.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop every thread of the process; returns when they stand still, which a busy machine delays."""
        stop_process(self.popen.pid)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()


class AskedError(Exception):
    """What a participant raised."""


class Site:
    """A master, the network it is in and its clients."""

    def __init__(
        self, folder: Path, lease_seconds: float = LEASE_SECONDS, client_ttl_seconds: int = CLIENT_TTL_SECONDS
    ) -> None:
        self._lease_seconds = lease_seconds
        self._client_ttl_seconds = client_ttl_seconds
        self._log = folder / "mooncake.log"
        self._network: int | None = None
        self._holder = Process([*DIES_WITH_PARENT, sys.executable, "-c", _HOLD_A_NETWORK], self._log)
        assert self._holder.popen.stdout is not None
        if self._holder.popen.stdout.readline():
            self._network = os.open(f"/proc/{self._holder.popen.pid}/ns/net", os.O_RDONLY)
        self._ports = (50051, 50052) if self._network is not None else (free_port(), free_port())
        self._clients: list[Process] = []
        self.master: subprocess.Popen[bytes]
        self.start_master()

    @property
    def spec(self) -> dict[str, str]:
        """Fields of the storage's spec."""
        master = {"metadata_connstring": "P2PHANDSHAKE", "master_service_entry": f"127.0.0.1:{self._ports[0]}"}
        return {"local_hostname": "127.0.0.1", "protocol": "tcp", **master}

    def start_master(self) -> None:
        rpc = {"rpc_address": "127.0.0.1", "rpc_port": self._ports[0], "rpc_thread_num": 2}
        metrics = {"metrics_host": "127.0.0.1", "metrics_port": self._ports[1]}
        times = {"default_kv_lease_ttl": int(self._lease_seconds * 1000), "client_ttl": self._client_ttl_seconds}
        flags = [f"--{name}={value}" for name, value in (rpc | metrics | times).items()]
        command = [*self._inside(), _master_program(), *flags]
        with self._log.open("ab") as log:
            self.master = subprocess.Popen(command, stdout=log, stderr=log)

    def kill_master(self) -> None:
        self.master.kill()
        self.master.wait()

    def stop_master(self) -> None:
        """Let the master stand still: it answers nothing until `resume_master`."""
        stop_process(self.master.pid)

    def resume_master(self) -> None:
        self.master.send_signal(signal.SIGCONT)

    def client(self) -> Process:
        """Start a process that is a manager, an engine or an owner of memory, as it is asked."""
        participant = [sys.executable, str(FOLDER / "participant.py"), json.dumps(self.spec)]
        client = Process([*self._inside(), *participant], self._log)
        self._clients.append(client)
        return client

    def manager(self) -> Process:
        """Start a process that opens the store as a manager does."""
        manager = self.client()
        manager.ask("open")
        return manager

    def owner(self, size_bytes: int) -> Process:
        """Start a process that lends memory to the store."""
        owner = self.client()
        eventually(lambda: owner.ask("own", size_bytes=size_bytes) == "open")
        return owner

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread, and what it starts, be in the store's network inside the block."""
        if self._network is None:
            yield
            return
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            assert not _libc.setns(self._network, _NEW_NETWORK)
            yield
        finally:
            assert not _libc.setns(own, _NEW_NETWORK)
            os.close(own)

    def run(self, command: Sequence[str]) -> int:
        """Run a program in the store's network and return its exit status."""
        return subprocess.run([*self._inside(), *command], check=False).returncode

    def close(self) -> None:
        for client in self._clients:
            client.kill()
        self.kill_master()
        if self._network is not None:
            os.close(self._network)
        self._holder.kill()

    def _inside(self) -> list[str]:
        """Return the words before a command that is to run in the store's network."""
        network = f"--net=/proc/{self._holder.popen.pid}/ns/net"
        return [*DIES_WITH_PARENT, *(["nsenter", network, "--"] if self._network is not None else [])]


def eventually(condition: Callable[[], bool], within_seconds: float = 60.0) -> None:
    """Wait for a condition that is asked again and again; what it raises counts as not yet."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            if condition():
                return
            error: Exception | None = None
        except AskedError as raised:
            error = raised
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {error}"
        time.sleep(0.05)
