"""Batches of events as engines publish them: maps, arrays of older releases, and damage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.events.decoding import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch

DIGEST = bytes(range(32))
STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def batch(*events: Any, **others: Any) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode([1.5, list(events), 0]))


def test_events_as_maps() -> None:
    found = batch(
        STORED
        | {"extra_keys": [["s"], None], "group_idx": 1, "kv_cache_spec_kind": "full_attention", "session_id": "x"},
        {"type": "BlockRemoved", "block_hashes": [-1], "medium": "CPU_PINNED", "group_idx": 2, "locality": "REMOTE"},
        {"type": "AllBlocksCleared"},
    )
    assert found.timestamp == 1.5
    assert (found.unknown, found.malformed, found.is_lossy) == (0, 0, False)
    assert found.events == (
        BlockStored(
            (1, 2),
            parent=None,
            token_ids=[1, 2, 3, 4],
            block_tokens=2,
            medium="GPU",
            extra_keys=[["s"], None],
            group=1,
            group_kind="full_attention",
        ),
        BlockRemoved(((1 << 64) - 1,), "CPU_PINNED", 2, is_remote=True),
        AllBlocksCleared(),
    )


def test_events_as_arrays_of_older_releases() -> None:
    found = batch(
        ["BlockStored", [1], 7, [1, 2], 2, None],
        ["BlockStored", [1], 7, [1, 2], 2, 3, "CPU", "adapter", [["s"]], 1],
        ["BlockRemoved", [1]],
        ["BlockRemoved", [DIGEST], "GPU"],
        ["AllBlocksCleared"],
    )
    assert found.events == (
        BlockStored((1,), parent=7, token_ids=[1, 2], block_tokens=2, extra_keys=[]),
        BlockStored(
            (1,),
            parent=7,
            token_ids=[1, 2],
            block_tokens=2,
            medium="CPU",
            has_adapter=True,
            extra_keys=[["s"]],
            group=1,
        ),
        BlockRemoved((1,)),
        BlockRemoved((DIGEST,), "GPU"),
        AllBlocksCleared(),
    )


def test_unknown_types_and_a_further_element_are_ignored() -> None:
    found = decode_batch(msgspec.msgpack.encode([1, [{"type": "Later", "x": 1}, ["Older"], STORED], None, "more"]))
    assert (len(found.events), found.unknown, found.malformed, found.is_lossy) == (1, 2, 0, False)


@pytest.mark.parametrize(
    ("event", "is_lossy"),
    [
        (STORED | {"block_hashes": "x"}, False),
        (STORED | {"block_hashes": [b"short"]}, False),
        (STORED | {"token_ids": 1}, False),
        ({"type": "BlockStored"}, False),
        ({"type": "BlockRemoved"}, True),
        (["BlockRemoved", 7], True),
        ({"no": "type"}, True),
        (17, True),
    ],
)
def test_damaged_events_are_counted(event: object, is_lossy: bool) -> None:
    found = batch(event, STORED)
    assert (len(found.events), found.malformed, found.is_lossy) == (1, 1, is_lossy)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode({}), msgspec.msgpack.encode([1.0, {}])])
def test_a_damaged_message_is_lost(payload: bytes) -> None:
    assert decode_batch(payload) == EventBatch(0.0, malformed=1, is_lossy=True)


@given(st.binary(max_size=200))
def test_no_bytes_raise(payload: bytes) -> None:
    decode_batch(payload)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["BlockStored", "BlockRemoved"]), st.dictionaries(st.sampled_from(list(STORED)), _VALUES))
def test_no_fields_raise(name: str, fields: dict[str, Any]) -> None:
    batch(fields | {"type": name})
