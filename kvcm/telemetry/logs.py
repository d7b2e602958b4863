"""Logs are events with fields, one per line on stderr. Secrets and key lists are never fields."""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["LEVELS", "configure_logs", "set_level"]

LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}

_level = logging.INFO


def configure_logs(level: int) -> None:
    """Write events of at least `level` to stderr: coloured on a terminal, else as JSON lines."""
    set_level(level)
    terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            _drop_below_level,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)


def set_level(level: int) -> None:
    """Change the least level of events, at once and for all loggers."""
    global _level  # one log per process
    _level = level


def _drop_below_level(_logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if logging.getLevelNamesMapping().get(method.upper(), logging.INFO) < _level:
        raise structlog.DropEvent
    return event
