"""The manager's side of the process that holds the Mooncake client.

Why a process: the client is C++ that holds the interpreter's lock for seconds when it connects, and that ends its
process on some errors (`kvcm/model/mooncake.py`). Here it can hang and crash, and all that is lost is an answer.

Invariants: (1) at most one question is under way; (2) a process that did not answer in time is killed, so no answer is
ever taken for that of another question; (3) the next question starts a new process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from threading import Lock, Thread
from typing import IO, Any

from kvcm.model import errors
from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.storages import MooncakeStorageSpec

__all__ = ["MooncakeProcess"]

_PROGRAM = (sys.executable, "-m", "kvcm.storage.mooncake_worker")
_READ_BYTES = 1 << 16


class MooncakeProcess:
    """Asks the process, which is started when it is needed. Blocks; safe in any thread.

    Args:
        spec: of the storage.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(self, spec: MooncakeStorageSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def ask(self, call: str, keys: Sequence[str], timeout_seconds: float) -> list[int]:
        """Return the results of a call.

        Raises:
            StorageIOError: there was no answer in time, the process ended, or the store failed.
            KvcmError: the call itself failed; an operating system's error that was behind it is so here.
        """
        deadline = self._clock() + timeout_seconds
        if not self._lock.acquire(timeout=timeout_seconds):
            raise StorageIOError(f"mooncake is busy with earlier questions for {timeout_seconds:g} s")
        try:
            answer = self._exchange({"call": call, "keys": list(keys)}, deadline)
        except (OSError, EOFError, ValueError) as error:  # ended, silent, or closed meanwhile
            self._end()
            raise StorageIOError(f"the mooncake client gave no answer: {error}") from error
        finally:
            self._lock.release()
        if "error" in answer:
            raise _error_of(answer)
        codes: list[int] = answer["codes"]
        return codes

    def restart(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the process, whatever it does; does not wait for it."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for its answer lets go of the lock now
            Thread(target=self.restart, name="mooncake-end", daemon=True).start()

    def _exchange(self, question: dict[str, object], deadline: float) -> dict[str, Any]:
        child = self._child or self._start(deadline)
        assert child.stdout is not None
        self._write_line(child, question, deadline)
        answer: dict[str, Any] = json.loads(self._read_line(child.stdout, deadline))
        return answer

    def _start(self, deadline: float) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise OSError("the storage is closed")
        # A session of its own: Ctrl-C at the manager is no reason to end before the manager does.
        child = subprocess.Popen(  # noqa: S603 - our own program, and nothing of a client's in its arguments
            _PROGRAM,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._child = child
        if self._is_closed:  # while it was started
            raise OSError("the storage is closed")
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        self._write_line(child, asdict(self._spec), deadline)
        return child

    def _write_line(self, child: subprocess.Popen[bytes], content: dict[str, Any], deadline: float) -> None:
        """Write as much at a time as the pipe takes: of a process that is stopped it is full at some point."""
        assert child.stdin is not None
        rest = json.dumps(content).encode() + b"\n"
        while rest:
            self._wait(child.stdin, select.POLLOUT, deadline)
            rest = rest[os.write(child.stdin.fileno(), rest) :]

    def _read_line(self, stream: IO[bytes], deadline: float) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            self._wait(stream, select.POLLIN, deadline)
            piece = os.read(stream.fileno(), _READ_BYTES)
            if not piece:
                raise EOFError("it ended")
            line += piece
        return line

    def _wait(self, stream: IO[bytes], event: int, deadline: float) -> None:
        # Not `select.select`, which knows no descriptors from 1024 on: a manager has many connections.
        poll = select.poll()
        poll.register(stream, event)
        if not poll.poll(max(0.0, deadline - self._clock()) * 1000):
            raise TimeoutError("it took too long and was ended")

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()


def _error_of(answer: dict[str, Any]) -> KvcmError:
    error: KvcmError = getattr(errors, answer["kind"], KvcmError)(answer["error"])
    number: int = answer["errno"]
    if number:  # by which it is known that a medium is full
        error.__cause__ = OSError(number, os.strerror(number))
    return error
