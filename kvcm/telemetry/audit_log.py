"""The audit log: what was changed, by whom, from what to what. JSON lines, only ever appended to.

An entry is a log event at once, and a line of the file before the change is answered (`flushed`). The file is opened
anew for every batch, so whoever rotates it just renames it. A file that cannot be written does not undo a change that
was made: that is an error in the log, together with the entry.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

__all__ = ["AuditLog"]

_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("kvcm.audit")


class AuditLog:
    """Entries in order. To be used inside one event loop.

    Args:
        path: of the file, "" for none.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._waiting: list[Mapping[str, Any]] = []
        self._writing = asyncio.Lock()

    def record(self, entry: Mapping[str, Any]) -> None:
        """Take an entry; its values are JSON values without secrets."""
        _log.info("audit", **{name: value for name, value in entry.items() if name not in {"before", "after"}})
        if self._path:
            self._waiting.append(entry)

    async def flushed(self) -> None:
        """Return when every entry so far is in the file, or cannot be."""
        if not self._waiting:
            return
        async with self._writing:
            batch, self._waiting = self._waiting, []
            if not batch:
                return
            try:
                await asyncio.to_thread(_append, self._path, batch)
            except OSError as error:
                _log.error("audit_not_written", file=self._path, reason=error.strerror, entries=batch)

    async def run(self) -> None:
        """Write down what nobody waits for, for good."""
        while True:
            await asyncio.sleep(1.0)
            await self.flushed()


def _append(path: str, batch: list[Mapping[str, Any]]) -> None:
    lines = b"".join(_encode(entry) + b"\n" for entry in batch)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while lines:
            lines = lines[os.write(descriptor, lines) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
