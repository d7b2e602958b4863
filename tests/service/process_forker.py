"""Starts `kvcm` in processes that are forked from one that has imported it already: an import takes a second or two.

The forker runs as `python process_forker.py SOCKET`. A client connects for each process, sends one JSON object with the
arguments, the working directory and the environment, and beside it the files for stdout and stderr; it is sent the
process id, and the exit code when the process ends. When the client goes away, the process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

__all__ = ["ForkedProcess"]

_PRELOADED = ("kvcm.app", "kvcm.cli", "kvcm.service.rest.app")
_MAX_BYTES = 1 << 20


class ForkedProcess:
    """A forked `kvcm`; the same methods as those of `subprocess.Popen`.

    Args:
        arguments: of `kvcm`.
        directory: working directory.
        environment: all variables.
        output: takes stdout.
        errors: takes stderr.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        self._connection = _connect()
        request = {"arguments": list(arguments), "directory": str(directory), "environment": dict(environment)}
        files = [output.fileno(), errors.fileno()]
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("kvcm", timeout or 0.0)
            self._read_end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _read_end(self) -> None:
        self.returncode = int(self._answers.readline())
        self._answers.close()
        self._connection.close()


@cache
def _forker() -> str:
    """Start the forker of this process and return its socket."""
    directory = tempfile.mkdtemp(prefix="kvcm-forker-")
    path = f"{directory}/socket"
    kept = {name: value for name, value in os.environ.items() if not name.lower().startswith("kvcm")}
    process = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, env=kept)

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        with contextlib.suppress(OSError):
            Path(directory).rmdir()

    atexit.register(end)
    return path


def _connect() -> socket.socket:
    path, deadline = _forker(), time.monotonic() + 60.0
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            assert time.monotonic() < deadline, "the forker does not listen"
            time.sleep(0.02)
        else:
            return connection


# ── the forker ──


class _Forker:
    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._clients: dict[int, socket.socket] = {}
        self._wakeup, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._wakes = wakes
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno())

    def serve(self) -> list[str]:
        """Fork until stdin ends; returns the arguments of `kvcm` in each child, and never in the forker."""
        while True:
            watched = [sys.stdin, self._listener, self._wakeup, *self._clients.values()]
            ready, _, _ = select.select(watched, [], [])
            if sys.stdin in ready:
                self._end()
            if self._wakeup in ready:
                self._wakeup.recv(1000)
                self._reap()
            for pid, client in list(self._clients.items()):
                if client in ready:  # it sends nothing: it has gone away
                    os.kill(pid, signal.SIGKILL)
                    self._clients.pop(pid).close()
            if self._listener in ready and (arguments := self._fork()) is not None:
                return arguments

    def _fork(self) -> list[str] | None:
        client, _ = self._listener.accept()
        text, files, _, _ = socket.recv_fds(client, _MAX_BYTES, 2)
        request = json.loads(text)
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            self._clients[pid] = client
            client.sendall(f"{pid}\n".encode())
            return None
        self._become(request, *files)
        for each in (client, self._listener, self._wakeup, self._wakes, *self._clients.values()):
            each.close()
        arguments: list[str] = request["arguments"]
        return arguments

    def _become(self, request: dict[str, Any], output: int, errors: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if (client := self._clients.pop(pid, None)) is not None:
                    with contextlib.suppress(OSError):
                        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    client.close()

    def _end(self) -> None:
        for pid in self._clients:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        Path(self._path).unlink()
        sys.exit()


def _main(path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, whose processes all get one
    for name in _PRELOADED:
        __import__(name)
    sys.argv[1:] = _Forker(path).serve()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("kvcm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv[1])
