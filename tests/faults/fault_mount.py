"""A mount of the file system that fails on command, as a test holds it."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

from fault_rules import Fault
from waiting import until

_SERVER = Path(__file__).parent / "fault_fs.py"
_END_SECONDS = 5.0
_CAP_SYS_ADMIN = 1 << 21


def why_no_mounts() -> str:
    """Return why this machine cannot mount the file system, "" when it can."""
    if not may_mount():
        return "mounting needs root's CAP_SYS_ADMIN"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse3 is missing: `make fuse` installs it"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is missing: it comes with kvcm[dev]"
    return ""


def may_mount() -> bool:
    """Return whether this process may mount file systems."""
    (capabilities,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(capabilities, 16) & _CAP_SYS_ADMIN)


class FaultMount:
    """Shows a directory at a mount point of its own, in a process of its own.

    Args:
        directory: that is shown; what lies in it can be read and changed beside the mount.
        mount_point: made when it is missing.
    """

    def __init__(self, directory: Path, mount_point: Path) -> None:
        mount_point.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.path = mount_point
        self._lock = Lock()
        self._log = mount_point.with_name(mount_point.name + ".log")
        self.mount()

    def mount(self) -> None:
        """Mount it again after `close` or `die`, without faults."""
        with self._log.open("wb") as log:
            command = [sys.executable, str(_SERVER), str(self.directory), str(self.path)]
            environment, pipe = {**os.environ, "FUSE_LIBRARY_NAME": "fuse3"}, subprocess.PIPE
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def inject(self, *operations: str, **fault: Any) -> int:
        """Begin a fault; arguments as for `Fault`. Returns its id."""
        number = self._ask({"do": "inject", "fault": Fault(operations, **fault).to_json()})["id"]
        assert isinstance(number, int)
        return number

    def hide(self, path: str) -> None:
        """Let files that are there seem to be missing, as when a client still trusts an older look at the directory."""
        self.inject("getattr", "open", path=path, error="ENOENT")

    def clear(self) -> None:
        """End all faults; requests that hang go on."""
        self._ask({"do": "clear"})

    def met(self, fault: int) -> int:
        """Return how many requests a fault was met by."""
        return int(self._ask({"do": "status"})["met"][str(fault)])

    def until_waiting(self, requests: int = 1) -> None:
        """Return when so many requests hang or are delayed."""
        until(lambda: self._ask({"do": "status"})["waiting"] >= requests, f"{requests} requests wait")

    def die(self) -> None:
        """Kill the process: until `close` the mount is there, and every request fails."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and the mount, whatever still waits for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._is_mounted():
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _is_mounted(self) -> bool:
        return any(line.split()[1] == str(self.path) for line in Path("/proc/mounts").read_text().splitlines())

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the file system ended: {self._log.read_text()[-2000:]}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer
