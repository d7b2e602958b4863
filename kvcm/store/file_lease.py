"""A lease in a file, for managers of one host that share a directory.

* The file names the holder of the lease and its expiry. It is read and replaced under an exclusive lock of the
*directory*: the
  file itself is replaced by renaming, so that a crash leaves the old one or the new one, and a lock would be on the
  old one.
* Expiry is on the monotonic clock, which all processes of a host share and no clock adjustment changes. It starts again
when the host
  does, so a lease of an earlier boot is free.
* A damaged file is free: a lease that cannot be acquired would stop the background tasks for good.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.store.store import LeaseState

__all__ = ["FileLease", "MonotonicClock", "boot_id"]

_FILE_NAME = "_TAIR_KVCM_LEADER_KEY.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SECONDS_BETWEEN_TRIES = 0.01
_log = structlog.get_logger("kvcm.store")


class MonotonicClock:
    """Seconds since some moment that all processes of this host agree on until it is started again."""

    def now(self) -> float:
        return time.monotonic()


def boot_id() -> str:
    """Return the id of this boot of the host, "" where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class _Entry(NamedTuple):
    """What the file says; `expires` in monotonic seconds of the boot."""

    holder: str = ""
    expires: float = 0.0
    token: int = 0
    boot: str = ""


class FileLease:
    """A lease among the managers of this host that name the same directory.

    Args:
        directory: where the file is; made if it is missing.
        clock: the same in all managers, hence no unix time.
        boot: id of this boot of the host.
        lock_tries: how often the directory's lock is tried, 10 ms apart, before it is given up.
    """

    revision = None

    def __init__(
        self, directory: Path, clock: Clock | None = None, boot: str | None = None, *, lock_tries: int = 200
    ) -> None:
        self._directory = directory
        self._path = directory / _FILE_NAME
        self._clock = clock or MonotonicClock()
        self._boot = boot_id() if boot is None else boot
        self._lock_tries = lock_tries
        self._token = 0

    async def acquire(self, node_id: str, seconds: float) -> LeaseState:
        return await asyncio.to_thread(self._acquire, node_id, seconds)

    async def get(self) -> LeaseState:
        return await asyncio.to_thread(self._get)

    async def release(self, node_id: str) -> None:
        await asyncio.to_thread(self._release, node_id)

    def _acquire(self, node_id: str, seconds: float) -> LeaseState:
        with self._locked():
            entry, now = self._read(), self._clock.now()
            is_free = self._is_free(entry, now)
            if is_free or entry.holder == node_id:
                entry = _Entry(node_id, now + seconds, entry.token + is_free, self._boot)
                self._write(entry)
            self._token = entry.token
            return LeaseState(entry.holder, entry.token)

    def _get(self) -> LeaseState:
        with self._locked():
            entry = self._read()
            return LeaseState("" if self._is_free(entry, self._clock.now()) else entry.holder, entry.token)

    def _is_free(self, entry: _Entry, now: float) -> bool:
        return not entry.holder or now >= entry.expires or entry.boot != self._boot

    def _release(self, node_id: str) -> None:
        with self._locked():
            entry = self._read()
            if entry.holder == node_id:
                self._write(_Entry(token=entry.token))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _lock(descriptor, self._lock_tries)
                yield
            finally:
                os.close(descriptor)  # gives the lock back
        except OSError as error:
            raise StorageIOError(f"the lease in {str(self._path)!r} cannot be used: {error.strerror}") from error

    def _read(self) -> _Entry:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return _Entry()
        try:
            return _parse(text)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            _log.warning("lease_file_damaged", path=str(self._path), error=repr(error))
            return _Entry(token=self._token)

    def _write(self, entry: _Entry) -> None:
        document = {
            "value": entry.holder,
            "expire_time_ms": round(entry.expires * 1000),
            "token": entry.token,
            "boot_id": entry.boot,
        }
        new = self._path.with_name(f"{_FILE_NAME}.new")
        with open(new, "w", opener=_private) as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


def _parse(text: bytes) -> _Entry:
    document = json.loads(text)
    holder, boot = document["value"], document["boot_id"]
    if not isinstance(holder, str) or not isinstance(boot, str):
        raise TypeError(f"value is {holder!r} and boot_id {boot!r}, must be texts")
    return _Entry(holder, int(document["expire_time_ms"]) / 1000, int(document["token"]), boot)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _lock(descriptor: int, tries: int) -> None:
    # Not waited for without end: a process that is stopped right here would take the thread of everybody else.
    for _ in range(tries):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            return
    raise TimeoutError(0, "another process keeps the directory locked")
