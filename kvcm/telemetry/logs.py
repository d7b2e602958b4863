"""Logs are events with fields, one per line on stderr. Secrets and key lists are never fields.

What is below the level in force costs a call that does nothing: no field is formatted. Lines of libraries that use
Python's own logging have the same form. While a request is handled every line carries its trace id, and while calls are
traced that of the W3C trace it belongs to.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import Any

import structlog

__all__ = ["LEVELS", "configure_logs", "is_logged", "request_in_hand", "set_format", "set_level", "trace_in_hand"]

LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}

request_in_hand: ContextVar[Any] = ContextVar("request_in_hand", default=None)
"""The request that is being handled, None outside of any. The whole request, so that its trace id is decoded only when
there is a line to write."""

trace_in_hand: ContextVar[str] = ContextVar("trace_in_hand", default="")
"""W3C id of the trace that the request belongs to, "" for none or while calls are not traced."""

_MOST_TRACE_ID = 256

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
    """Change the form of all lines from now on."""
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
    logging.getLogger(_GRPC).addFilter(_quotes_nobody)


def set_level(level: int) -> None:
    """Change the least level of events, at once and for all loggers."""
    global _level  # one log per process
    _level = level
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


def is_logged(level: int) -> bool:
    """Whether events of a level are written, for those whose fields cost something to gather."""
    return level >= _level


def _quotes_nobody(record: logging.LogRecord) -> bool:
    """Metadata that is no UTF-8 is shown by gRPC as it came: a key with a wrong character in it, or what a stranger
    wants to be written there."""
    return not str(record.msg).startswith(_QUOTED)


def _renderer(form: str) -> structlog.typing.Processor:
    if form == "console" or (form == "auto" and sys.stderr.isatty()):
        return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    return structlog.processors.JSONRenderer()


def _add_trace_id(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    request = request_in_hand.get()
    if request is not None and request.trace_id:
        event.setdefault("trace_id", request.trace_id[:_MOST_TRACE_ID])
    if trace := trace_in_hand.get():
        event.setdefault("w3c_trace_id", trace)
    return event
