"""Writes the original optimizer's own schema: reads, writes and turns. Numbers of blocks serve as keys."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers.requests import Access, accesses, read_fields

__all__ = ["schema_lines"]


def schema_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Return one line per request.

    Raises:
        OptionError: a write left out some of its blocks, which the schema cannot say.
    """
    masked = next((number for number in trace.masks if trace.writes[number]), None)
    if masked is not None:
        raise OptionError(
            f"format: optimizer_schema holds whole writes only, and request {masked + 1} of {trace.name} is none"
        )
    return (_line(trace, access) for access in accesses(trace))


def _line(trace: Trace, access: Access) -> dict[str, object]:
    line: dict[str, object] = {
        "instance_id": access.instance,
        "trace_id": f"{access.number}",
        "timestamp_us": access.time_us,
        "tokens": [],
        "keys": access.blocks[: access.reads],
    }
    if not access.writes:
        return line | read_fields(trace, access)
    if not access.reads:
        return line | {"keys": access.blocks}
    lengths = {
        "input_len": int(trace.input_tokens[access.number]),
        "output_len": int(trace.output_tokens[access.number]),
    }
    return line | read_fields(trace, access) | lengths | {"total_keys": access.blocks}
