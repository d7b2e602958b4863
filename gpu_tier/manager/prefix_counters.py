"""What is counted of prefixes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefixCounters"]


@dataclass(slots=True)
class PrefixCounters:
    """What was counted so far.

    Attributes:
        host_tokens: attached tokens that were in the pool.
        storage_tokens: attached tokens that were loaded.
        loads_short: loads of which fewer blocks arrived than were promised.
        sidecar_misses: attached tokens whose optional sidecar was not there.
        written_pages: pages that the storage has taken, or had.
        failed_pages: pages that it has not.
        dropped_pages: pages not given to it, or only later, because too many were being written.
    """

    host_tokens: int = 0
    storage_tokens: int = 0
    loads_short: int = 0
    sidecar_misses: int = 0
    written_pages: int = 0
    failed_pages: int = 0
    dropped_pages: int = 0
