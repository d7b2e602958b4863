"""Starts `kvcm` in processes that are forked from one that has imported it already: an import takes a second or two.

The forker runs as `python process_forker.py DESCRIPTOR`, of a socket over which it is sent a message for each process:
a JSON object with the arguments, the working directory and the environment, and with it the files for stdout and stderr
and a socket of the client. Over that it reports the process id, and the exit code when the process ends. When a client
goes away, its process is killed, and all are when the socket of the forker is closed.
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
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

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
        self._connection, its_end = socket.socketpair()
        request = {"arguments": list(arguments), "directory": str(directory), "environment": dict(environment)}
        with its_end:
            files = [output.fileno(), errors.fileno(), its_end.fileno()]
            socket.send_fds(_forker(), [json.dumps(request).encode()], files)
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
def _forker() -> socket.socket:
    """Start the forker of this process and return the socket for its messages."""
    messages, its_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
    kept = {name: value for name, value in os.environ.items() if not name.lower().startswith("kvcm")}
    with its_end:
        number = its_end.fileno()
        command = [sys.executable, __file__, str(number)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=kept, pass_fds=[number])

    def end() -> None:
        messages.close()
        process.wait()

    atexit.register(end)
    return messages


# ── the forker ──


class _Forker:
    """Attributes:
    messages: socket for them.
    processes: id and client of each, by a descriptor that can be read when it has ended.
    """

    def __init__(self, messages: socket.socket) -> None:
        self.messages = messages
        self.processes: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> list[str]:
        """Fork until the socket is closed; returns the arguments of `kvcm` in each child, and never in the forker."""
        while True:
            clients = [client for _, client in self.processes.values()]
            ready, _, _ = select.select([self.messages, *self.processes, *clients], [], [])
            for descriptor, (pid, client) in list(self.processes.items()):
                if client in ready:  # it sends nothing: it has gone away
                    os.kill(pid, signal.SIGKILL)
                if client in ready or descriptor in ready:
                    self._reap(descriptor)
            if self.messages in ready and (arguments := self._fork()) is not None:
                return arguments

    def _fork(self) -> list[str] | None:
        text, files, _, _ = socket.recv_fds(self.messages, _MAX_BYTES, 3)
        if not text:
            self._end()
        output, errors, connection = files
        client = socket.socket(fileno=connection)
        pid = os.fork()
        if pid:
            os.close(output)
            os.close(errors)
            self.processes[os.pidfd_open(pid)] = pid, client
            client.sendall(f"{pid}\n".encode())
            return None
        for descriptor, (_, other) in self.processes.items():
            os.close(descriptor)
            other.close()
        client.close()
        self.messages.close()
        request = json.loads(text)
        self._become(request, output, errors)
        arguments: list[str] = request["arguments"]
        return arguments

    def _become(self, request: dict[str, Any], output: int, errors: int) -> None:
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])

    def _reap(self, descriptor: int) -> None:
        pid, client = self.processes.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError), client:
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _end(self) -> None:
        for pid, _ in self.processes.values():
            os.kill(pid, signal.SIGKILL)
        sys.exit()


def _main(descriptor: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, whose processes all get one
    for name in _PRELOADED:
        __import__(name)
    sys.argv[1:] = _Forker(socket.socket(fileno=int(descriptor))).serve()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("kvcm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv[1])
