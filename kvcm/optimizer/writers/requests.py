"""Requests of a trace as the formats have them that tell reads from writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvcm.optimizer.trace import BoolColumn, QueryMode, Trace

__all__ = ["Access", "accesses", "read_fields"]

_QUERY_TYPES: Mapping[QueryMode, str] = {
    QueryMode.PREFIX: "prefix_match",
    QueryMode.BATCH: "batch_get",
    QueryMode.WINDOW: "reverse_roll_sw_match",
}


@dataclass(frozen=True, slots=True)
class Access:
    """One request.

    Attributes:
        number: of the request.
        time_us: when.
        instance: that is asked.
        blocks: of the request.
        reads: how many of the first it reads.
        writes: whether it writes them.
        mask: which are left out.
    """

    number: int
    time_us: int
    instance: str
    blocks: list[int]
    reads: int
    writes: bool
    mask: BoolColumn | None


def accesses(trace: Trace) -> Iterator[Access]:
    """Yield the requests of a trace."""
    for number in range(len(trace)):
        yield Access(
            number,
            int(trace.times_us[number]),
            trace.instance_names[trace.instances[number]],
            trace.request_blocks(number).tolist(),
            int(trace.read_blocks[number]),
            bool(trace.writes[number]),
            trace.masks.get(number),
        )


def read_fields(trace: Trace, access: Access) -> dict[str, object]:
    """Return what formats say of a read beside its keys."""
    mask = access.mask
    return {
        "query_type": _QUERY_TYPES[trace.modes.get(access.number, QueryMode.PREFIX)],
        "block_mask": 0 if mask is None else mask[: access.reads].tolist(),
        "sw_size": trace.windows.get(access.number, 0),
        "location_spec_names": list(trace.specs.get(access.number, ())),
    }
