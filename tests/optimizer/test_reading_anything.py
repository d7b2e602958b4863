"""Whatever a file holds, reading it ends in a trace whose numbers are sound, or in an error that says why not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.formats.sniffing import FORMATS
from kvcm.optimizer.readers import trace_of_lines
from kvcm.optimizer.readers.trace_file import Origin, packed, unpacked

EDGES = st.sampled_from(
    [0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 1e300, -0.0, 0.5]
)
VALUES = st.recursive(
    EDGES | st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.lists(st.integers(-3, 3) | EDGES.filter(lambda edge: isinstance(edge, int)), max_size=5)
MASKS = st.integers(-2, 7) | st.lists(st.booleans(), max_size=7)
SMALL = st.integers(0, 70)
SESSIONS = st.sampled_from(["s", "t"])
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "mooncake": {"timestamp": SMALL, "input_length": SMALL, "output_length": SMALL, "hash_ids": KEYS, "session": SMALL},
    "qwen_bailian": {
        "timestamp": SMALL, "input_length": SMALL, "hash_ids": KEYS, "chat_id": SMALL, "parent_chat_id": SMALL,
    },
    "publisher_log": {
        "type": st.sampled_from(["GetCacheLocation", "StartWriteCache", "FinishWriteCache", "else"]),
        "source": SESSIONS, "trigger_time_us": SMALL, "keys": KEYS, "tokens": KEYS, "block_mask": MASKS,
        "query_type": st.sampled_from(["prefix_match", "batch_get", "reverse_roll_sw_match"]), "sw_size": SMALL,
        "write_session_id": SESSIONS, "success_block": MASKS, "location_spec_names": st.lists(SESSIONS, max_size=2),
    },
    "optimizer_schema": {
        "instance_id": SESSIONS, "timestamp_us": SMALL, "keys": KEYS, "tokens": KEYS, "block_mask": MASKS,
        "query_type": st.sampled_from(["prefix_match", "batch_get", "reverse_roll_sw_match"]), "sw_size": SMALL,
        "input_len": SMALL, "total_keys": KEYS,
    },
}  # fmt: skip


def lines_of(name: str) -> st.SearchStrategy[list[bytes]]:
    """Return lines that are nearly of a format: some fields are missing, some hold anything."""
    fields = {field: st.one_of(values, values, values, VALUES) for field, values in FIELDS[name].items()}
    good = st.fixed_dictionaries(FIELDS[name])
    near = st.fixed_dictionaries({}, optional=fields)
    objects = st.one_of(good, good, near, VALUES).map(lambda value: json.dumps(value).encode())
    return st.lists(objects | st.binary(max_size=9), max_size=8)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_tokens", [None, 2])
def test_any_lines(name: str, block_tokens: int | None) -> None:
    @settings(max_examples=examples(160), deadline=None)
    @given(lines_of(name))
    def check(lines: Iterable[bytes]) -> None:
        try:
            trace = trace_of_lines(lines, name, name="x", block_tokens=block_tokens)
        except TraceError:
            return
        # What is read has to pass the examination of what was kept.
        kept = unpacked(bytearray(b"".join(packed(trace, Origin("", name, None)))), Origin("", name, None), "x")
        assert kept is not None
        lengths = np.diff(trace.offsets)
        assert (trace.input_tokens >= 0).all()
        assert all(len(mask) == lengths[number] for number, mask in trace.masks.items())
        assert all(0 < size <= lengths[number] for number, size in trace.windows.items())
        assert trace.bad_line_count >= len(trace.bad_lines)
        assert all(bad.reason for bad in trace.bad_lines)

    check()
