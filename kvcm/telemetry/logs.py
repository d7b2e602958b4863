"""Logs: events with fields, one per line on stderr, and the audit log. Secrets and key lists are never fields.

Events below the level in force cost a call that does nothing: no field is formatted. Lines of libraries that use
Python's own logging have the same form. While a request is handled every line carries its trace id, and while calls are
traced the W3C trace id, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import msgspec
import structlog

__all__ = [
    "LEVELS",
    "AuditLog",
    "configure_logs",
    "current_request_id",
    "current_trace_id",
    "is_enabled",
    "set_format",
    "set_level",
]

LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}
current_request_id: ContextVar[Any] = ContextVar("request_in_hand", default=None)
"""The request that is being handled, None outside of any. The whole request, so that its trace id is decoded only for
a line that is written."""
current_trace_id: ContextVar[str] = ContextVar("trace_in_hand", default="")
"""W3C id of the request's trace, "" for none or while calls are not traced."""
_MAX_TRACE_ID = 256
_GRPC = "grpc._cython.cygrpc"
_QUOTED = "Invalid encoding on"
_level = logging.INFO


def configure_logs(level: int, form: str = "auto") -> None:
    """Write events of at least `level` to stderr.

    Args:
        level: one of `LEVELS`.
        form: `json` for one object per line, `console` for people, `auto` for the latter on a terminal.
    """
    set_format(form)
    set_level(level)


def set_format(form: str) -> None:
    """Change the form of all later lines."""
    shown: list[structlog.typing.Processor] = [
        _add_trace_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer = _renderer(form)
    structlog.configure(
        processors=[*shown, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # or levels could not change
    )
    handler = logging.StreamHandler(sys.stderr)
    finish = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    foreign = [structlog.stdlib.add_logger_name, *shown]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=finish, foreign_pre_chain=foreign))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(_GRPC).addFilter(_has_no_client_text)


def set_level(level: int) -> None:
    """Change the least level of events, at once and for all loggers."""
    global _level  # one log per process
    _level = level
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


def is_enabled(level: int) -> bool:
    """Return whether events of a level are written, for events whose fields are expensive."""
    return level >= _level


def _has_no_client_text(record: logging.LogRecord) -> bool:
    """Filter gRPC's lines that quote metadata which is not UTF-8: a mistyped key, or text that a stranger injects."""
    return not str(record.msg).startswith(_QUOTED)


def _renderer(form: str) -> structlog.typing.Processor:
    if form == "console" or (form == "auto" and sys.stderr.isatty()):
        return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    return structlog.processors.JSONRenderer()


def _add_trace_id(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    request = current_request_id.get()
    if request is not None and request.trace_id:
        event.setdefault("trace_id", request.trace_id[:_MAX_TRACE_ID])
    if trace := current_trace_id.get():
        event.setdefault("w3c_trace_id", trace)
    return event


# The audit log: each change, its principal, the old and the new value. JSON lines, append-only.
#
# An entry is a log event at once, and a line of the file before the change is answered (`flushed`). The file is opened
# for every batch, so rotation is a rename. A file that cannot be written does not undo a change: the log has an error
# with the entry.

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
        """Record an entry; its values are JSON values without secrets."""
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
        """Flush entries that no call waits for, until cancelled."""
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
