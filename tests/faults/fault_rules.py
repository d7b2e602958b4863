"""What goes wrong on a file system on command: values that travel as JSON, and the rules that requests meet."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

# A request that hangs cannot be killed, nor can its process: without an end, a killed test run would stay for ever.
HANG_LIMIT_SECONDS = 100.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of some requests.

    Attributes:
        operations: `open`, `create`, `read`, `write`, `getattr`, `unlink`...: names of methods of the file system; a
            close is `flush`, and opening a directory to list it is `readdir`.
        path: pattern of paths below the mount point, which begin with a slash.
        error: name of the errno that is answered; "" for none.
        delay_seconds: before the request goes on; less when the fault is cleared.
        hang: the request goes on when the fault is cleared.
        most_bytes: a read or write moves so many bytes at once at most.
        ends_at: reads find the end of the file at this byte.
        flip_at: reads find all bits of this byte of the file flipped.
        after: so many requests pass first.
        times: so many requests meet the fault, then it is over; None for all.
    """

    operations: tuple[str, ...]
    path: str = "*"
    error: str = ""
    delay_seconds: float = 0.0
    hang: bool = False
    most_bytes: int | None = None
    ends_at: int | None = None
    flip_at: int | None = None
    after: int = 0
    times: int | None = None

    def __post_init__(self) -> None:
        if self.error and not hasattr(errno, self.error):
            raise ValueError(f"error is {self.error!r}, must be the name of an errno")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fault:
        """Read what `to_json` wrote."""
        return cls(**{**values, "operations": tuple(values["operations"])})

    def to_json(self) -> dict[str, Any]:
        """Return the fault as a JSON object."""
        return asdict(self)

    def is_met_by(self, operation: str, path: str) -> bool:
        """Whether a request is one of those that the fault is about."""
        return operation in self.operations and fnmatchcase(path, self.path)

    def limited(self, data_bytes: int) -> int:
        """Return how many of so many bytes are moved."""
        return data_bytes if self.most_bytes is None else min(data_bytes, self.most_bytes)

    def seen(self, data: bytes, offset: int) -> bytes:
        """Return what a read finds of the bytes that lie at an offset."""
        if self.ends_at is not None:
            data = data[: max(0, self.ends_at - offset)]
        if self.flip_at is None or not offset <= self.flip_at < offset + len(data):
            return data
        flipped = bytearray(data)
        flipped[self.flip_at - offset] ^= 0xFF
        return bytes(flipped)


class Rules:
    """The faults that are there now; threads of the file system meet them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._faults: dict[int, Fault] = {}
        self._requests: dict[int, int] = {}
        self._next_id = 0
        self._waiting = 0

    def inject(self, fault: Fault) -> int:
        """Add a fault, and return its id."""
        with self._changed:
            self._next_id += 1
            self._faults[self._next_id], self._requests[self._next_id] = fault, 0
            return self._next_id

    def clear(self) -> None:
        """End all faults; what hangs goes on."""
        with self._changed:
            self._faults.clear()
            self._changed.notify_all()

    def status(self) -> dict[str, Any]:
        """Return how many requests each fault has met, by its id, and how many wait."""
        with self._changed:
            met = {str(number): count for number, count in self._requests.items()}
            return {"met": met, "waiting": self._waiting}

    def meet(self, operation: str, path: str) -> Fault:
        """Let a request meet what it has to: return how its bytes are changed, None of the rest of the fault.

        Raises:
            OSError: the fault's.
        """
        bytes_changed = Fault(())
        for number, fault in self._met(operation, path):
            self._wait(number, fault.delay_seconds)
            if fault.hang and not self._wait(number, HANG_LIMIT_SECONDS):
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            if fault.error:
                code = getattr(errno, fault.error)
                raise OSError(code, os.strerror(code))
            changes = {name: getattr(fault, name) for name in ("most_bytes", "ends_at", "flip_at")}
            known = {name: value for name, value in changes.items() if value is not None}
            bytes_changed = replace(bytes_changed, **known)
        return bytes_changed

    def _met(self, operation: str, path: str) -> list[tuple[int, Fault]]:
        found = []
        with self._changed:
            for number, fault in self._faults.items():
                if not fault.is_met_by(operation, path):
                    continue
                self._requests[number] += 1
                count = self._requests[number] - fault.after
                if count > 0 and (fault.times is None or count <= fault.times):
                    found.append((number, fault))
        return found

    def _wait(self, number: int, seconds: float) -> bool:
        """Wait until a fault is cleared; returns whether it was, within so many seconds."""
        with self._changed:
            self._waiting += 1
            is_over = self._changed.wait_for(lambda: number not in self._faults, seconds)
            self._waiting -= 1
            return is_over
