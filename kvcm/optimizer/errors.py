"""Errors of the optimizer; each message names the field, the value and the allowed ones."""

from __future__ import annotations

__all__ = ["OptimizerError", "OptionError", "TraceError"]


class OptimizerError(Exception):
    """Something that was asked of the optimizer cannot be done."""


class OptionError(OptimizerError):
    """An option is none that there is, or out of its range."""


class TraceError(OptimizerError):
    """A file holds no trace that can be replayed."""
