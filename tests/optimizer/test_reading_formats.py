"""The formats qwen_bailian and optimizer_schema, how formats are detected, and lines of anything."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.keys import block_keys_from_tokens
from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.formats import FORMATS, digest_of, format_of
from kvcm.optimizer.readers import read_trace, trace_of_lines
from kvcm.optimizer.readers.numbering import chained
from kvcm.optimizer.readers.trace_cache import Origin, decode_trace, encode_trace
from kvcm.optimizer.trace import QueryMode, Trace


def bailian(*lines: dict[str, object]) -> Trace:
    base: dict[str, object] = {"timestamp": 0.5, "input_length": 32, "output_length": 1, "hash_ids": [1, 2]}
    return trace_of_lines([json.dumps(base | line).encode() for line in lines], "qwen_bailian", name="test")


def schema(*lines: dict[str, object], block_tokens: int | None = 10) -> Trace:
    base: dict[str, object] = {"instance_id": "a", "trace_id": "t", "timestamp_us": 7, "tokens": [], "keys": [1, 2]}
    texts = [json.dumps(base | line).encode() for line in lines]
    return trace_of_lines(texts, "optimizer_schema", name="test", block_tokens=block_tokens)


class TestBailian:
    def test_seconds_are_read_whole_or_not(self) -> None:
        trace = bailian({"timestamp": 3}, {"timestamp": 3.25}, {"timestamp": 1_700_000_000.000001})
        assert trace.times_us.tolist() == [3_000_000, 3_250_000, 1_700_000_000_000_001]
        assert trace.block_tokens == 16

    def test_equal_content_behind_another_prefix_is_another_block(self) -> None:
        trace = bailian({"hash_ids": [1, 2, 1]}, {"hash_ids": [2, 1]}, {"hash_ids": [1, 2, 2]})
        assert trace.blocks.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]
        assert trace.has_one_parent

    @settings(max_examples=examples(200), deadline=None)
    @given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=8), max_size=5))
    def test_ids_are_chained_as_tokens_are(self, requests: list[list[int]]) -> None:
        ids = np.array([each for request in requests for each in request], np.int64)
        offsets = np.cumsum([0, *map(len, requests)]).astype(np.int64)
        wanted = [key for request in requests for key in block_keys_from_tokens(request, 1)]
        assert chained(ids, offsets).tolist() == wanted

    def test_turns_are_followed_to_the_first_of_their_dialogue(self) -> None:
        chats: list[tuple[object, object]] = [(1, -1), (2, -1), (3, 1), (4, 3), (5, 2), (7, 99), (8, 99), (None, None)]
        trace = bailian(*({"chat_id": chat, "parent_chat_id": parent} for chat, parent in chats))
        assert trace.sessions.tolist() == [0, 1, 0, 0, 1, 2, 2, -1]


class TestSchema:
    def test_a_turn_reads_its_keys_and_writes_generated_blocks_too(self) -> None:
        trace = schema({"input_len": 25, "output_len": 9, "total_keys": [1, 2, 3]})
        assert trace.blocks.tolist() == [0, 1, 2]
        assert (trace.read_blocks.tolist(), trace.writes.tolist()) == ([2], [True])
        assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([25], [9])

    def test_a_turn_that_writes_something_else_is_a_read_and_a_write(self) -> None:
        trace = schema({"input_len": 20, "total_keys": [1, 3]}, {"input_len": 20, "total_keys": []})
        assert trace.offsets.tolist() == [0, 2, 4, 6]
        assert trace.read_blocks.tolist() == [2, 0, 2]
        assert trace.writes.tolist() == [False, True, False]

    def test_reads_and_writes_are_reported_by_their_fields(self) -> None:
        trace = schema({}, {"query_type": "batch_get"}, {"query_type": "prefix_match", "block_mask": [True]})
        assert trace.read_blocks.tolist() == [0, 2, 2]
        assert trace.writes.tolist() == [True, False, False]
        assert trace.modes == {1: QueryMode.BATCH}
        assert trace.masks[2].tolist() == [True, False]

    def test_the_size_of_blocks_is_found_out_from_turns(self) -> None:
        turn: dict[str, object] = {"keys": list(range(10)), "input_len": 165, "total_keys": []}
        trace = schema(turn, {}, block_tokens=None)
        assert trace.block_tokens == 16

    def test_bad_lines(self) -> None:
        trace = schema({}, {"input_len": -3}, {"total_keys": 5}, {"instance_id": None}, {"query_type": ""})
        reasons = [each.reason for each in trace.bad_lines]
        assert [each.number for each in trace.bad_lines] == [2, 3, 4, 5]
        for field, reason in zip(("input_len: -3", "total_keys: 5", "instance_id: None", "query_type: ''"), reasons,
                                 strict=True):  # fmt: skip
            assert reason.startswith(field)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"timestamp": 1, "input_length": 10, "hash_ids": [4]}', "mooncake"),
        ('{"timestamp": 1, "input_length": 16, "hash_ids": [4], "chat_id": 3, "type": "text"}', "qwen_bailian"),
        ('{"timestamp": 1, "input_length": 16, "hash_ids": [4], "turn": 3}', "qwen_bailian"),
        ('{"type": "GetCacheLocation", "source": "a", "trigger_time_us": 3, "keys": [4]}', "publisher_log"),
        ('{"type": "dropped", "source": "", "trigger_time_us": 3, "count": 4}', "publisher_log"),
        ('{"instance_id": "a", "timestamp_us": 3, "keys": [4]}', "optimizer_schema"),
    ],
)
def test_formats_are_reported_apart(tmp_path: Path, line: str, name: str) -> None:
    first = line.replace("dropped", "GetCacheLocation").replace('"count": 4', '"keys": [4]')
    path = tmp_path / "trace"
    path.write_text(f"no JSON\n{line}\n{first}\n")
    reported = read_trace(path, block_tokens=16, use_cache=False)
    named = read_trace(path, format=name, block_tokens=16, use_cache=False)
    for trace in (reported, named):
        assert trace.unique_blocks == 1
        assert trace.bad_lines[0].number == 1
    assert reported.times_us.tolist() == named.times_us.tolist()


_IDS_AS_TEXTS = {
    "mooncake": '{"timestamp": 1, "input_length": 30, "hash_ids": IDS}',
    "qwen_bailian": '{"timestamp": 1, "input_length": 48, "hash_ids": IDS, "turn": 1}',
    "publisher_log": '{"type": "GetCacheLocation", "source": "a", "trigger_time_us": 3, "keys": IDS}',
    "optimizer_schema": '{"instance_id": "a", "timestamp_us": 3, "keys": IDS, "total_keys": IDS}',
}


@pytest.mark.parametrize("name", _IDS_AS_TEXTS)
def test_ids_may_be_texts(name: str) -> None:
    """Numbers as texts are these numbers, as in JSON of 64-bit integers; any other text is an id of its own."""
    ids = [
        '[1, 2, "-3"]',
        '["1", "2", -3]',
        '["1", "02", "b7-é"]',
        '["1", "02", "b7-é"]',
        '["18446744073709551617"]',
    ]
    lines = [_IDS_AS_TEXTS[name].replace("IDS", each).encode() for each in ids]
    trace = trace_of_lines(lines, name, name="test", block_tokens=16)
    blocks = [trace.blocks[start:end].tolist() for start, end in itertools.pairwise(trace.offsets)]
    assert blocks == [[0, 1, 2], [0, 1, 2], [0, 3, 4], [0, 3, 4]]
    assert "has more than 64 bits" in trace.bad_lines[0].reason


def test_the_conversation_has_either_name() -> None:
    base: dict[str, object] = {"timestamp": 1, "input_length": 10, "hash_ids": [1]}
    named = [{"session": "s"}, {"session_id": "s"}, {"session_id": 5}, {"session": 5, "session_id": "ignored"}, {}]
    lines = [json.dumps(base | each).encode() for each in named]
    assert trace_of_lines(lines, "mooncake", name="test", block_tokens=10).sessions.tolist() == [0, 0, 1, 1, -1]


@pytest.mark.parametrize("reads", [read_trace, digest_of, format_of])
def test_a_git_lfs_pointer_is_named_as_one(tmp_path: Path, reads: Callable[[Path], object]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(TraceError, match="is a git-LFS pointer, and not the trace: `git lfs pull`"):
        reads(path)


EDGES = st.sampled_from(
    [0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 1e300, -0.0, 0.5]
)
VALUES = st.recursive(
    EDGES | st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.lists(st.integers(-3, 3) | EDGES.filter(lambda edge: isinstance(edge, int)) | st.text(max_size=3), max_size=5)
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
        # A trace that was read has to pass the checks on a kept one.
        kept = decode_trace(
            bytearray(b"".join(encode_trace(trace, Origin("", name, None)))), Origin("", name, None), "x"
        )
        assert kept is not None
        lengths = np.diff(trace.offsets)
        assert (trace.input_tokens >= 0).all()
        assert all(len(mask) == lengths[number] for number, mask in trace.masks.items())
        assert all(0 < size <= lengths[number] for number, size in trace.windows.items())
        assert trace.bad_line_count >= len(trace.bad_lines)
        assert all(bad.reason for bad in trace.bad_lines)

    check()
