"""Requests that are not begun. No answer has a header: transports say so in their own way (design.md decision 9)."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["RateLimitedError", "TurnedAwayError"]


class TurnedAwayError(Exception):
    """Overload or draining: the client may try again, here or elsewhere.

    Args:
        message: what to do about it.
        reason: one of few words, fit for a label of a metric.
        retry_after_seconds: when to try again, > 0.
    """

    http_status: ClassVar[int] = 503

    def __init__(self, message: str, reason: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class RateLimitedError(TurnedAwayError):
    """The client asks for more than it may."""

    http_status = 429
