"""A Docker daemon, Compose and a shell that has them, in namespaces of their own.

The programs are Debian's, in a root file system of their own. What the daemon does to networks, firewall and mounts
ends with it, and this machine's are not changed. It reaches no registry: what it runs is imported, or built of that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pexpect
from materials import debian_archive
from pexpect.replwrap import REPLWrapper
from waiting import until

__all__ = ["DockerEngine"]

_SUITE = "trixie"
_PACKAGES = ("docker.io", "docker-compose", "docker-buildx", "iptables", "iproute2", "ca-certificates")
# The root is not only changed: what enters a container's mounts afterwards would find this machine's files there.
_START = """
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
for each in proc dev sys; do mount --rbind "/$each" "$ROOT/$each"; done
mount -t tmpfs tmpfs "$ROOT/run"
for each in $SHARED; do mkdir -p "$ROOT$each"; mount --rbind "$each" "$ROOT$each"; done
cd "$ROOT"
mkdir -p .old
pivot_root . .old
umount --lazy /.old
ip link set lo up
exec dockerd --host "unix://$STATE/docker.sock" --data-root "$STATE/data" --pidfile "$STATE/docker.pid"
"""


class DockerEngine:
    """The daemon, which runs until it is closed.

    Args:
        directory: where its programs, images and volumes are kept, to be used again.
        shared: directories of this machine that services may mount; the daemon sees them at the same place.
    """

    def __init__(self, directory: Path, shared: Sequence[Path] = ()) -> None:
        self._root, self._state, self._bin = directory / "root", directory / "state", directory / "bin"
        self._state.mkdir(parents=True, exist_ok=True)
        self._install()
        self._socket = self._state / "docker.sock"
        self._socket.unlink(missing_ok=True)
        (self._state / "docker.pid").unlink(missing_ok=True)
        mounted = " ".join(map(str, (self._state, *shared)))
        self._log = (directory / "dockerd.log").open("w")
        self._daemon = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--ipc", "--pid", "--fork",
             "--kill-child", "--mount-proc", "sh", "-c", _START],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "ROOT": str(self._root), "STATE": str(self._state),
                 "SHARED": mounted},
            stdout=self._log, stderr=self._log,
        )  # fmt: skip
        until(self._socket.exists, f"the daemon listens, see {self._log.name}")
        until(lambda: self.run("docker", "info").returncode == 0, f"the daemon answers, see {self._log.name}")

    def run(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in its network."""
        return subprocess.run(
            self._entered(words), env=self._environment(), capture_output=True, text=True, timeout=seconds
        )

    def has_image(self, tag: str) -> bool:
        """Return whether Docker has an image."""
        return self.run("docker", "image", "inspect", tag).returncode == 0

    def import_image(self, archive: Path, tag: str, changes: Sequence[str]) -> None:
        """Make an image of the archive of a root file system.

        Args:
            archive: it.
            tag: its name.
            changes: instructions of a Dockerfile that say how it is run.
        """
        options = [word for change in changes for word in ("--change", change)]
        done = self.run("docker", "import", *options, str(archive), tag, seconds=600)
        assert done.returncode == 0, done

    def shell(self, directory: Path) -> REPLWrapper:
        """Return an interactive shell in its network, for the test to type in."""
        program, *words = self._entered(("bash", "--noprofile", "--norc", "--noediting", "-i"))
        child = pexpect.spawn(
            program, words, cwd=str(directory), env=self._environment(), encoding="utf-8", echo=False,
            dimensions=(50, 200),
        )  # fmt: skip
        return REPLWrapper(child, r"[$#] ", "PS1='{0}' PS2='{1}' PROMPT_COMMAND=''")

    def close(self) -> None:
        """End it, and with it everything that it runs."""
        self._daemon.kill()
        self._daemon.wait()
        self._log.close()

    def _install(self) -> None:
        if self._bin.exists():
            return
        archive = self._root.with_name("root.tar")
        debian_archive(archive, _SUITE, _PACKAGES)
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir()
        subprocess.run(["tar", "--extract", "--file", archive, "--directory", self._root], check=True)
        archive.unlink()
        plugins = self._state / "config/cli-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        for program in (self._root / "usr/libexec/docker/cli-plugins").iterdir():
            (plugins / program.name).unlink(missing_ok=True)
            (plugins / program.name).symlink_to(program)
        self._bin.mkdir()
        (self._bin / "docker").symlink_to(self._root / "usr/bin/docker")

    def _entered(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._daemon.pid}/ns/net", "--", *words]

    def _environment(self) -> dict[str, str]:
        programs = (self._bin, Path(sys.executable).parent, os.environ["PATH"])
        return {
            "PATH": ":".join(map(str, programs)), "HOME": str(self._state), "TERM": "xterm", "LANG": "C.UTF-8",
            "DOCKER_HOST": f"unix://{self._socket}", "DOCKER_CONFIG": str(self._state / "config"),
        }  # fmt: skip
