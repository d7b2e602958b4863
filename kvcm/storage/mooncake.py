"""Storage `mooncake`: objects in the memory of other hosts, kept by a Mooncake store.

Objects are immutable and named `<cluster id>/<instance>/<spec>/<key>.<location id>`, one per part. Engines store and
read them; the manager asks whether they are there and removes them.

The store may drop the least read objects when its segments are full, and all objects of a segment whose process dies:
a location is a hint here. An object that is read holds a lease, for 10 s by the master's default, in which it cannot be
removed; such deletions fail and are retried. An object that a late writer stores after its location was deleted is
never read, so the store drops it first.

Objects cannot be listed: the client has no call for it, and the master's own list on its HTTP port has neither sizes
nor times, so that objects being written could not be distinguished from orphans.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from threading import Lock, Thread
from typing import IO, Any, NoReturn

from kvcm.model import errors
from kvcm.model.errors import KvcmError, StorageIOError, UnsupportedError
from kvcm.model.mooncake import MooncakeCode, check_mooncake, explain
from kvcm.model.storages import MooncakeStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri, path_component
from kvcm.storage.backend import Allocation, ObjectBatch, StorageBackend, StorageSpace, StoredObject, pack
from kvcm.storage.threads import StorageThreads

__all__ = ["MooncakeProcess", "MooncakeStorage"]

# The manager's side of the process that holds the Mooncake client.
#
# Why a process: the client is C++ that holds the interpreter's lock for seconds when it connects, and that ends its
# process on some errors (`kvcm/model/mooncake.py`). Here it can hang and crash, and all that is lost is an answer.
#
# Invariants: (1) at most one question is under way; (2) a process that did not answer in time is killed, so no answer
# is ever taken for that of another question; (3) the next question starts a new process.

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

    def call(self, call: str, keys: Sequence[str], timeout_seconds: float) -> list[int]:
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
            self._stop()
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
            self._stop()

    def close(self) -> None:
        """End the process, whatever it does; does not wait for it."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()  # the caller that waits for its answer releases the lock now
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

    def _stop(self) -> None:
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


_CALL_SECONDS = 10.0  # more than the client needs to give a silent master up
_LOAD_SECONDS = 60.0  # to load the client's libraries from a cold disk
_KEYS_PER_CALL = 1000
_MOST_THREADS = 4  # one question at a time: what more of them do is wait
_MASTER_IS_AWAY = {MooncakeCode.MASTER_UNREACHABLE, MooncakeCode.MASTER_SILENT}
_DELETED = {MooncakeCode.OK, MooncakeCode.MISSING}
_NOT_KNOWN = StorageSpace(-1, -1)


class MooncakeStorage:
    """A Mooncake store.

    Args:
        name: of the storage.
        spec: checked.
        cluster_id: of the deployment.
    """

    def __init__(self, name: str, spec: MooncakeStorageSpec, cluster_id: str) -> None:
        self._name = name
        self._directory = f"{path_component(cluster_id)}/"
        self._process = MooncakeProcess(spec)
        self._threads = StorageThreads(f"storage-{name}", _MOST_THREADS)

    @classmethod
    def open(cls, config: StorageConfig, cluster_id: str) -> MooncakeStorage:
        """Load the client. The master may be away: probes detect that.

        Raises:
            UnsupportedError: the client is not installed, or a library that it needs.
            InvalidArgumentError: a field of the spec is malformed.
        """
        assert isinstance(config.spec, MooncakeStorageSpec)
        check_mooncake(config.spec)
        storage = cls(config.global_unique_name, config.spec, cluster_id)
        try:
            storage._process.call("load", [], _LOAD_SECONDS)
        except KvcmError:
            storage.close()
            raise
        return storage

    async def allocate(self, allocation: Allocation) -> list[str]:
        uris: list[str] = []
        for packed in pack(allocation, keys_per_object=1):
            uri = LocationUri(
                scheme="mooncake",
                storage=self._name,
                path="/",
                size=packed.size_bytes,
                key=self._directory + packed.name,
            )
            uris.append(str(uri))
        return uris

    @property
    def makes_objects(self) -> bool:
        return False

    async def make_objects(self, uris: Sequence[str]) -> None:
        """Engines make the objects."""

    async def probe(self) -> None:
        await self._call("probe", [self._directory])

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        try:
            codes = await self._call("remove", list(map(_key, uris)))
        except StorageIOError as error:
            return [str(error)] * len(uris)
        return [
            None if code in _DELETED else f"{_key(uri)}: {explain(code)}" for uri, code in zip(uris, codes, strict=True)
        ]

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self.delete(uris)

    async def forgotten(self, uris: Sequence[str]) -> None:
        """Nothing is handed out again."""

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        codes = await self._call("exists", list(map(_key, uris)))
        for code in codes:
            if code < 0:
                raise StorageIOError(f"storage {self._name}: {explain(code)}")
        return [code == 1 for code in codes]

    async def _call(self, call: str, keys: Sequence[str]) -> list[int]:
        return await self._threads.run(lambda: self._call_in_batches(call, keys))

    def _call_in_batches(self, call: str, keys: Sequence[str]) -> list[int]:
        codes: list[int] = []
        try:
            for start in range(0, len(keys), _KEYS_PER_CALL):
                codes += self._process.call(call, keys[start : start + _KEYS_PER_CALL], _CALL_SECONDS)
                if not _MASTER_IS_AWAY.isdisjoint(codes):
                    break
        except KvcmError as error:
            raise StorageIOError(f"storage {self._name}: {error}") from error
        away = _MASTER_IS_AWAY.intersection(codes)
        if away:
            # A new client looks for the master first, which fails at once where this one takes seconds, and finds it
            # where the name leads by then.
            self._process.restart()
            raise StorageIOError(f"storage {self._name}: {explain(min(away))}")
        return codes

    def objects(self, cluster_id: str) -> AsyncIterator[ObjectBatch]:
        self._refuse_scrub()

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        self._refuse_scrub()

    def _refuse_scrub(self) -> NoReturn:
        raise UnsupportedError(
            f"storage {self._name}: a mooncake store cannot list its objects with their ages, so it cannot be "
            "scrubbed; it drops unread objects by itself"
        )

    async def space(self) -> StorageSpace:
        """Return -1 for both, unknown: the client has no call for it. See the master's metrics."""
        return _NOT_KNOWN

    def take_over(self, previous: StorageBackend) -> None:
        """There is nothing to remember."""

    def close(self) -> None:
        """End the process that holds the client."""
        self._process.close()


def _key(uri: str) -> str:
    return LocationUri.parse(uri).key or ""
