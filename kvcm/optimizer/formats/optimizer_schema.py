"""Lines of the original optimizer's own schema: reads, writes and turns of dialogues, told apart by their fields."""

from __future__ import annotations

import msgspec

from kvcm.optimizer.formats.decoding import Key, Length, Micros
from kvcm.optimizer.formats.publisher_log import Mask

__all__ = ["SchemaLine"]


class SchemaLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request: a turn of a dialogue with `total_keys`, else a read with `query_type`, else a write.

    Attributes:
        instance_id: that is asked.
        timestamp_us: when.
        trace_id: names the request.
        keys: that are read, or of a write: written.
        tokens: of the prompt; the keys are computed from them where there are none.
        query_type: how keys are matched.
        block_mask: positions that the caller has itself.
        sw_size: blocks per window.
        location_spec_names: specs that are asked for; empty: all.
        input_len: tokens of the prompt.
        output_len: tokens generated.
        total_keys: that a turn writes, those of what was generated too.
    """

    instance_id: str
    timestamp_us: Micros
    trace_id: str = ""
    keys: list[Key] = []
    tokens: list[int] = []
    query_type: str | None = None
    block_mask: Mask | None = None
    sw_size: int = 0
    location_spec_names: list[str] = []
    input_len: Length | None = None
    output_len: Length = 0
    total_keys: list[Key] | None = None
