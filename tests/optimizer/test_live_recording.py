"""Recent accesses as a manager publishes them, read for a rehearsal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.live.recording import Coverage, Finish, Lookup, Start, read_recording

RECENT = {"type": "recent", "from_us": 1_000_000, "until_us": 9_000_000, "most_keys": 100, "dropped_events": 0}


def lines(*events: dict[str, Any]) -> list[bytes]:
    return [json.dumps(event).encode() + b"\n" for event in (RECENT, *events)]


def lookup(at: float, keys: list[int], hits: int, source: str = "i", **more: Any) -> dict[str, Any]:
    fields = {"type": "GetCacheLocation", "source": source, "trigger_time_us": int(at * 1e6), "keys": keys}
    return {**fields, "query_type": "prefix_match", "block_mask": [], "hit_keys": hits, **more}


def start(at: float, keys: list[int], session: str, source: str = "i", **more: Any) -> dict[str, Any]:
    fields = {"type": "StartWriteCache", "source": source, "trigger_time_us": int(at * 1e6), "keys": keys}
    return {**fields, "write_session_id": session, "block_mask": 0, **more}


def finish(at: float, session: str, success: int | list[bool], source: str = "i") -> dict[str, Any]:
    fields = {"type": "FinishWriteCache", "source": source, "trigger_time_us": int(at * 1e6)}
    return {**fields, "write_session_id": session, "success_block": success}


def test_accesses_are_numbered_and_keep_their_outcome() -> None:
    written = (start(2, [10, 20, 30], "s"), finish(3, "s", [True, True, False]))
    other = {"type": "CacheReclaimSubmit", "source": "i", "block_keys": [1], "location_ids": [["x"]]}
    found = read_recording(lines(lookup(1, [10, 20, 30], 0), *written, lookup(4, [10, 20, 40], 2), other))
    assert found.coverage == Coverage(1.0, 9.0, 0, 0)
    first, last = Lookup(1.0, 0, [0, 1, 2], 0, True), Lookup(4.0, 0, [0, 1, 3], 2, True)
    writes = [Start(2.0, 0, 0, [0, 1, 2], 0), Finish(3.0, 0, 0, frozenset([2]))]
    assert list(found.accesses) == [first, *writes, last]
    assert list(found.parents) == [-1, 0, 1, 1]
    assert list(found.depths) == [0, 1, 2, 2]
    assert list(found.warm) == []


def test_blocks_of_two_instances_are_never_the_same() -> None:
    found = read_recording(lines(lookup(1, [5], 0, "a"), lookup(2, [5], 0, "b")))
    assert found.instance_names == ("a", "b")
    assert list(found.owners) == [0, 1]


def test_keys_that_a_lookup_leaves_out_are_not_asked_for() -> None:
    found = read_recording(lines(lookup(1, [1, 2, 3], 1, block_mask=2), lookup(2, [1, 2, 3], 1, block_mask=[True])))
    assert [access.blocks for access in found.accesses if isinstance(access, Lookup)] == [[2], [1, 2]]


def test_blocks_hit_before_their_first_write_are_warm() -> None:
    found = read_recording(
        lines(
            lookup(1, [1, 2, 3], 2),  # 1 and 2 were there
            start(2, [1, 2, 3], "s", block_mask=2),
            start(3, [7, 8], "t", block_mask=[True, False]),  # 7 was there
            start(4, [9], "u", block_mask=1, refused_keys=1),  # did not fit: it is not known
            lookup(5, [3], 1),  # was written here
        )
    )
    assert list(found.warm) == [1, 0, 3]


def test_an_end_without_a_beginning_says_nothing() -> None:
    assert list(read_recording(lines(finish(1, "unknown", 3))).accesses) == []


def test_accesses_are_in_the_order_of_their_times() -> None:
    found = read_recording(lines(lookup(3, [1], 0), lookup(1, [2], 0), lookup(2, [3], 0)))
    assert [access.at for access in found.accesses] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([], "nothing came"),
        ([b"{}"], "is no event"),
        ([b"["], "is no event"),
        ([b'{"type": "GetCacheLocation"}'], "must be 'recent'"),
        ([b'{"type": "recent", "most_keys": 0}'], "set kvcm.optimizer.recent_keys"),
        ([json.dumps(RECENT).encode(), b'{"type": "GetCacheLocation", "keys": ["x"]}'], "line 2"),
        ([json.dumps(RECENT).encode(), b"\xff"], "line 2"),
    ],
)
def test_unreadable_recordings_are_reported(text: list[bytes], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_recording(text)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=6), st.integers(-3, 9), st.booleans()), max_size=20))
def test_whatever_is_named_in_any_order_the_blocks_are_a_forest(accesses: list[tuple[list[int], int, bool]]) -> None:
    events = [
        start(at, keys, f"s{at}", block_mask=number) if is_write else lookup(at, keys, max(0, number))
        for at, (keys, number, is_write) in enumerate(accesses)
    ]
    found = read_recording(lines(*events))
    assert all(parent < block for block, parent in enumerate(found.parents))
    assert all(
        depth == (found.depths[parent] + 1 if parent >= 0 else 0)
        for depth, parent in zip(found.depths, found.parents, strict=True)
    )


def test_a_write_that_found_no_space_is_one_that_ends_at_once() -> None:
    found = read_recording(lines(start(1, [1, 2], "", block_mask=2, refused_keys=2), start(2, [3], "s")))
    assert list(found.accesses) == [
        Start(1.0, 0, 0, [0, 1], 2),
        Finish(1.0, 0, 0, frozenset()),
        Start(2.0, 0, 1, [2], 0),
    ]
    assert list(found.warm) == []
