"""Hosts on one machine: each has a network, mounts, a name and shared memory of its own, and a cable to the manager's.

Processes of two hosts meet nowhere but in the manager's network and in the files outside `/dev/shm`. A host that is
booted gets new ones of all; its memory is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "mooncake"))
from mooncake_rig import DIES_WITH_PARENT

_MEMORY_BYTES = 256 << 20
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)
_UNSHARE = ("unshare", "--net", "--mount", "--uts", "--ipc")
_HOLD = """
set -e
ip link set lo up
mount -t tmpfs -o size={size} none /dev/shm
hostname {name}
echo ready
exec cat
"""


def why_no_hosts() -> str:
    """Return why this machine cannot play several hosts, "" when it can."""
    missing = [
        each
        for each in ("unshare", "nsenter", "setpriv", "ip", "mount", "hostname", "sh")
        if shutil.which(each) is None
    ]
    if missing:
        return f"there is no {missing[0]} here"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", "ip link add here0 type veth peer name there0"], capture_output=True, text=True
    )
    if tried.returncode:
        return f"network namespaces need root's CAP_SYS_ADMIN and CAP_NET_ADMIN: {tried.stderr.strip()}"
    return ""


class Host:
    """State that the processes of one host share.

    Args:
        name: of the host, as the processes on it see it.
        log: of its processes' output.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        script = _HOLD.format(size=_MEMORY_BYTES, name=name)
        self._holder = subprocess.Popen(
            [*DIES_WITH_PARENT, *_UNSHARE, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n", f"host {name} cannot be made"
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    @property
    def pid(self) -> int:
        """A process on it."""
        return self._holder.pid

    @property
    def inside(self) -> list[str]:
        """The words before a command that is to run on the host."""
        return [*DIES_WITH_PARENT, "nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--mount", "--"]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread, and what it starts, be in the host's network inside the block."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            assert not _libc.setns(self._network, _NEW_NETWORK)
            yield
        finally:
            assert not _libc.setns(own, _NEW_NETWORK)
            os.close(own)

    def run(self, command: str) -> None:
        """Run a line of the shell on the host, which must succeed."""
        done = subprocess.run([*self.inside, "sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command} on {self.name}: {done.stderr}"

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program on the host."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self.inside, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def close(self) -> None:
        """End the host; its processes must have ended."""
        os.close(self._network)
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdin, self._holder.stdout):
            if stream is not None:
                stream.close()


class Network:
    """The manager's host, and a cable from it to each other host.

    Args:
        folder: for the processes' output.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.centre = Host("manager", folder / "manager-host.log")
        self._hosts: dict[str, Host] = {}
        self._numbers: dict[str, int] = {}

    def add(self, name: str) -> Host:
        """Start a host, also one that was here before, and lay a cable to it."""
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        host = self._hosts[name] = Host(name, self._folder / f"{name}.log")
        self.centre.run(f"ip link add c{number} type veth peer name c0 netns {host.pid}")
        self.centre.run(f"ip address add {self.centre_address(name)}/24 dev c{number}")
        self.centre.run(f"ip link set c{number} up")
        host.run(f"ip address add 10.77.{number}.2/24 dev c0")
        host.run("ip link set c0 up")
        return host

    def remove(self, name: str) -> None:
        """End a host and its cable."""
        self.centre.run(f"ip link del c{self._numbers[name]}")
        self._hosts.pop(name).close()

    def centre_address(self, name: str) -> str:
        """Return the address at which a host reaches the manager's."""
        return f"10.77.{self._numbers[name]}.1"

    def cut(self, name: str) -> None:
        """Pull the plug at the manager's side: packets of the host are dropped."""
        self.centre.run(f"ip link set c{self._numbers[name]} down")

    def mend(self, name: str) -> None:
        """Plug it in again."""
        self.centre.run(f"ip link set c{self._numbers[name]} up")

    def close(self) -> None:
        """End all hosts."""
        for host in (*self._hosts.values(), self.centre):
            host.close()
