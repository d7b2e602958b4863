"""When blocks were last read, and which of them are *resident*: those with a serving location, which can be evicted."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvcm.model.locations import BlockRecord, LocationStatus

__all__ = ["Access", "is_resident", "stored_at", "whole_seconds"]

_MOST_SECONDS: Final = (1 << 32) - 1
_SERVING = LocationStatus.SERVING


class Access(NamedTuple):
    """When a block was last read, and how often.

    Attributes:
        at: unix seconds; of a block not read since it became resident, when its location was written.
        reads: since it became resident; may saturate.
    """

    at: int
    reads: int


def is_resident(record: BlockRecord) -> bool:
    """Return whether a block has a serving location."""
    for location in record[2]:  # noqa: SIM110 - a generator would take twice the time
        if location[3] is _SERVING:
            return True
    return False


def stored_at(record: BlockRecord) -> float:
    """Return the unix time that counts as the last access of a block that nobody has read yet: when its first serving
    location was written, or its first one if none is serving."""
    for location in record[2]:
        if location[3] is _SERVING:
            return location[7]
    return record[2][0][7]


def whole_seconds(at: float) -> int:
    """Return a time as stores keep it."""
    return int(at) if 0 <= at <= _MOST_SECONDS else (_MOST_SECONDS if at > 0 else 0)
