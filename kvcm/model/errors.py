"""The exception tree. Each error maps to exactly one wire code and one HTTP status, in the table below.

::

    KvcmError                      INTERNAL_ERROR              500
    ├── InvalidArgumentError       INVALID_ARGUMENT            400   a field is missing, malformed or out of range
    ├── UnsupportedError           UNSUPPORTED                 501   the call or option does not exist in this release
    ├── DuplicateEntityError       DUPLICATE_ENTITY            409   the name is taken by something different
    ├── UnknownInstanceError       INSTANCE_NOT_EXIST          404   the instance is not registered
    ├── NodeNotRegisteredError     NODE_NOT_REGISTERED         409   a reporter that was unregistered has to register
    ├── SnapshotRateLimitedError   SNAPSHOT_RATE_LIMITED       429   a reporter's last snapshot was a moment ago
    ├── CapacityError              REACH_MAX_ENTITY_CAPACITY   507   a quota or a key limit is reached
    ├── NotReadyError              SERVICE_NOT_READY           503   no usable storage, starting, draining or shedding
    ├── NotLeaderError             SERVER_NOT_LEADER           503   another manager has to answer
    └── StorageIOError             IO_ERROR                    502   a store or a storage failed

The original's calls carry the code in the answer header with HTTP 200 (wire.md 2); HTTP statuses are for REST
resources.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

__all__ = [
    "CapacityError",
    "DuplicateEntityError",
    "ErrorCode",
    "InvalidArgumentError",
    "KvcmError",
    "NodeNotRegisteredError",
    "NotLeaderError",
    "NotReadyError",
    "SnapshotRateLimitedError",
    "StorageIOError",
    "UnknownInstanceError",
    "UnsupportedError",
]


class ErrorCode(IntEnum):
    """Outcome codes of the wire protocol; the numbers are the protocol's.

    Two of the original's are left out, since they never occur here (`kvcm.residency.event_reports`):
    SNAPSHOT_IN_PROGRESS and SNAPSHOT_REQUIRED.
    """

    UNSPECIFIED = 0
    OK = 1
    UNSUPPORTED = 2
    INTERNAL_ERROR = 3
    SERVICE_NOT_READY = 4
    INVALID_ARGUMENT = 5
    DUPLICATE_ENTITY = 6
    REACH_MAX_ENTITY_CAPACITY = 7
    INSTANCE_NOT_EXIST = 8
    SERVER_NOT_LEADER = 9
    NODE_NOT_REGISTERED = 10
    SNAPSHOT_RATE_LIMITED = 13
    IO_ERROR = 20


class KvcmError(Exception):
    """A request cannot be served; the message says what to do about it."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL_ERROR
    http_status: ClassVar[int] = 500


class InvalidArgumentError(KvcmError):
    """A field of the request is missing, malformed or out of range.

    Args:
        text: the error and the allowed values.
        field: path of the field, dots between its parts, the message's name first; "" where the text alone names it.
        reason: the text without the path.
    """

    code = ErrorCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, text: str, field: str = "", reason: str = "") -> None:
        super().__init__(text)
        self.field = field
        self.reason = reason


class UnsupportedError(KvcmError):
    """The call or option exists in the protocol but not in this release."""

    code = ErrorCode.UNSUPPORTED
    http_status = 501


class DuplicateEntityError(KvcmError):
    """The name is already taken by something that differs."""

    code = ErrorCode.DUPLICATE_ENTITY
    http_status = 409


class UnknownInstanceError(KvcmError):
    """The instance is not registered."""

    code = ErrorCode.INSTANCE_NOT_EXIST
    http_status = 404


class NodeNotRegisteredError(KvcmError):
    """A reporter was unregistered, and has to register before it reports."""

    code = ErrorCode.NODE_NOT_REGISTERED
    http_status = 409


class SnapshotRateLimitedError(KvcmError):
    """A reporter's last snapshot was a moment ago.

    Args:
        text: the error and what to do.
        retry_after_ms: when the next one is accepted.
    """

    code = ErrorCode.SNAPSHOT_RATE_LIMITED
    http_status = 429

    def __init__(self, text: str, retry_after_ms: int = 0) -> None:
        super().__init__(text)
        self.retry_after_ms = retry_after_ms


class CapacityError(KvcmError):
    """A quota or a key limit does not admit the write."""

    code = ErrorCode.REACH_MAX_ENTITY_CAPACITY
    http_status = 507


class NotReadyError(KvcmError):
    """Nothing is wrong with the request; try again later."""

    code = ErrorCode.SERVICE_NOT_READY
    http_status = 503


class NotLeaderError(KvcmError):
    """This manager does not serve the call now; the message names the one that does."""

    code = ErrorCode.SERVER_NOT_LEADER
    http_status = 503


class StorageIOError(KvcmError):
    """A metadata store or a storage failed."""

    code = ErrorCode.IO_ERROR
    http_status = 502
