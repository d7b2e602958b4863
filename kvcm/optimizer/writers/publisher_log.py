"""Writes events as managers tell them (wire.md 10.3): a lookup per read, a write session per write.

A turn of a dialogue becomes both, one after the other. Numbers of blocks serve as keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.optimizer.formats.publisher_log import FINISHED, LOOKUP, STARTED
from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers.requests import Access, accesses, read_fields

__all__ = ["event_lines"]


_SESSION_SECONDS = 30


def event_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Yield the events of every request."""
    for access in accesses(trace):
        if access.reads or not access.writes:
            yield _lookup(trace, access)
        if access.writes:
            yield from _session(access)


def _event(access: Access, kind: str, step: int) -> dict[str, object]:
    return {
        "id": f"{4 * access.number + step:032x}",
        "source": access.instance,
        "component": "cache_manager",
        "type": kind,
        "trigger_time_us": access.time_us,
    }


def _lookup(trace: Trace, access: Access) -> dict[str, object]:
    keys: dict[str, object] = {"keys": access.blocks[: access.reads], "tokens": []}
    return _event(access, LOOKUP, 0) | read_fields(trace, access) | keys


def _session(access: Access) -> Iterator[dict[str, object]]:
    session = {"write_session_id": f"{access.number:032x}"}
    wanted: dict[str, object] = {
        "keys": access.blocks,
        "tokens": [],
        "block_mask": 0,
        "location_spec_group_names": [],
        "write_timeout_seconds": _SESSION_SECONDS,
    }
    yield _event(access, STARTED, 1) | session | wanted
    success = len(access.blocks) if access.mask is None else (~access.mask).tolist()
    yield _event(access, FINISHED, 2) | session | {"success_block": success}
