"""Requests that are not begun. No answer has a header: transports say so in their own way (design.md decision 9).

The answer to whoever may not do something says nothing of what there is: neither blocks nor instances.
"""

from __future__ import annotations

import math
from typing import ClassVar

__all__ = ["ForbiddenError", "RateLimitedError", "TurnedAwayError", "UnauthenticatedError"]


class TurnedAwayError(Exception):
    """Overload or draining: the client may try again, here or elsewhere.

    Args:
        message: what to do about it.
        reason: one of few words, fit for a label of a metric.
        retry_after_seconds: when to try again, > 0; None for that it is of no use.
    """

    http_status: ClassVar[int] = 503

    def __init__(self, message: str, reason: str, retry_after_seconds: float | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What HTTP says beside the status."""
        if self.retry_after_seconds is None:
            return []
        return [("retry-after", str(max(1, math.ceil(self.retry_after_seconds))))]


class RateLimitedError(TurnedAwayError):
    """The client asks for more than it may."""

    http_status = 429


class UnauthenticatedError(TurnedAwayError):
    """The client does not prove who it is."""

    http_status = 401

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason, None)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What HTTP says beside the status (RFC 6750 section 3)."""
        return [("www-authenticate", 'Bearer realm="kvcm"')]


class ForbiddenError(TurnedAwayError):
    """The client may not do this, or not there."""

    http_status = 403

    def __init__(self, message: str) -> None:
        super().__init__(message, "forbidden", None)
