"""Containers without Docker: a process in namespaces of its own, on an image's files that cannot be written.

It gets what the image and docker-compose.yml say: user and groups, environment, entry point and command, volumes and
scratch memory, no capability and no new privileges. It is process 1 of its namespace, which is the harder case: with
`init: true` Docker puts a small init in front. Containers of one network share the loopback device of a namespace.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from waiting import until

__all__ = ["Container", "Network", "Recipe"]

_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
_CLONE_NEWNET = 0x40000000


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))


class Network:
    """A network that nothing outside of it reaches."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.path = Path(f"/proc/{self._holder.pid}/ns/net")
        until(lambda: self.path.readlink() != Path("/proc/self/ns/net").readlink())
        self.run(_loopback_up)

    def run(self, action: Callable[[], None]) -> None:
        """Do something in it, in a process of its own."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with self.path.open("rb") as entrance:
                    _enter(entrance.fileno())
                action()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line that runs another one in it."""
        return ["nsenter", f"--net={self.path}", *words]

    def close(self) -> None:
        """Give it up."""
        self._holder.kill()
        self._holder.wait()


def _enter(descriptor: int) -> None:
    """Python has os.setns since 3.12 only."""
    failed = ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET)
    assert not failed, os.strerror(ctypes.get_errno())


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a container is started with.

    Attributes:
        root: files of the image.
        command: entry point and command.
        user: `uid:gid`.
        groups: further groups.
        environment: all of it.
        volumes: by the place where they are mounted: directory or file of the host, and whether it may be written.
        scratch: places with memory to write to.
        hosts: names and addresses.
        directory: where it begins.
    """

    root: Path
    command: Sequence[str]
    user: str
    environment: Mapping[str, str]
    groups: Sequence[str] = ()
    volumes: Mapping[str, tuple[Path, bool]] = field(default_factory=dict)
    scratch: Sequence[str] = ("/tmp",)
    hosts: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/"


class Container:
    """A running one.

    Args:
        recipe: what it is made of.
        network: it is in.
        place: directory for its log and its root.
    """

    def __init__(self, recipe: Recipe, network: Network, place: Path) -> None:
        place.mkdir(parents=True)
        self._recipe, self._place = recipe, place
        self.log = place / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                network.command(
                    ["unshare", "--mount", "--propagation=private", "--pid", "--fork",
                     "bash", "-euc", "\n".join(self._script())]
                ),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _script(self) -> Iterator[str]:
        recipe, root = self._recipe, self._place / "root"
        root.mkdir()
        (recipe.root / "etc").mkdir(exist_ok=True)
        hosts = self._place / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for name, address in recipe.hosts.items()))
        mounts = {"/etc/hosts": (hosts, False), **recipe.volumes}
        for target, (source, _) in mounts.items():
            _mount_point(recipe.root / target[1:], is_directory=source.is_dir())
        for target in recipe.scratch:
            _mount_point(recipe.root / target[1:], is_directory=True)
        here = shlex.quote(str(root))
        yield f"mount --bind {shlex.quote(str(recipe.root))} {here}; mount -o remount,bind,ro {here}; cd {here}"
        yield "mount -t proc proc proc; mount --rbind /dev dev"
        yield from (f"mount -t tmpfs -o mode=1777,size=64m tmpfs .{target}" for target in recipe.scratch)
        for target, (source, is_writable) in mounts.items():
            yield f"mount --bind {shlex.quote(str(source))} .{target}"
            yield "" if is_writable else f"mount -o remount,bind,ro .{target}"
        as_user = self._as_user(recipe.user, f"--chdir={recipe.directory}")
        yield f"exec chroot . {shlex.join([*as_user, *recipe.command])}"

    def _as_user(self, user: str, *options: str) -> list[str]:
        uid, gid = user.split(":")
        groups = ",".join([gid, *self._recipe.groups])
        pairs = [f"{key}={value}" for key, value in self._recipe.environment.items()]
        return [
            "/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", f"--groups={groups}", "--bounding-set=-all",
            "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "/usr/bin/env", "-i", *options, *pairs,
        ]  # fmt: skip

    @property
    def pid(self) -> int:
        """Of its first process, as the host counts."""
        until(lambda: self._process.poll() is not None or self._children(), "a first process")
        assert self._process.poll() is None, self.log.read_text()
        return self._children()[0]

    def _children(self) -> list[int]:
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []

    def execute(self, words: Sequence[str], user: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as `docker exec` does; as its own user unless another one is named."""
        inside = [*self._as_user(user or self._recipe.user), *words]
        entering = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--root", "--wd"]
        return subprocess.run([*entering, *inside], capture_output=True, text=True, errors="replace", timeout=60)

    def is_healthy(self, check: Sequence[str]) -> bool:
        """Return what a health check finds, in the form of Docker: CMD or CMD-SHELL and its words."""
        words = ["sh", "-c", check[1]] if check[0] == "CMD-SHELL" else list(check[1:])
        assert self._process.poll() is None, self.log.read_text()
        return self.execute(words).returncode == 0

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end; returns its exit code."""
        return self._process.wait(seconds)

    def stop(self) -> int:
        """Stop the container as `docker stop` does, with SIGTERM; return its exit code."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it at once."""
        first = self._children()
        for pid in first:  # of its namespace: all others go with it, and `unshare` ends behind it
            os.kill(pid, signal.SIGKILL)
        if not first:
            self._process.kill()
        self._process.wait()


def _mount_point(path: Path, *, is_directory: bool) -> None:
    if is_directory:
        path.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
