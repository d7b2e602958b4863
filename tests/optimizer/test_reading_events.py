"""Events of the original and of our own manager, read as lookups and write sessions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.cache.prefix_match import Match, MatchMode, MatchQuery
from kvcm.cache.write_sessions import StartedWrite, WriteSession
from kvcm.model.keys import BlockMask, block_keys_from_tokens
from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.readers import trace_of_lines
from kvcm.optimizer.readers.numbering import keys_of_tokens
from kvcm.optimizer.readers.reading import block_mask_of
from kvcm.optimizer.trace import QueryMode, Trace
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.meta_api import RequestEvents
from kvcm.telemetry.events import CACHE_RECLAIMER, EventLog, RecentAccesses

int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def event(kind: str, at: int, source: str = "a", **fields: Any) -> bytes:
    envelope = {"id": "x" * 32, "source": source, "component": "cache_manager", "type": kind, "trigger_time_us": at}
    return json.dumps(envelope | fields).encode()


def lookup(at: int, keys: list[int], **fields: Any) -> bytes:
    return event("GetCacheLocation", at, **{"keys": keys, "query_type": "prefix_match", "block_mask": 0, **fields})


def start(at: int, session: str, keys: list[int], **fields: Any) -> bytes:
    return event("StartWriteCache", at, **{"write_session_id": session, "keys": keys, "block_mask": 0, **fields})


def finish(at: int, session: str, success: object) -> bytes:
    return event("FinishWriteCache", at, write_session_id=session, success_block=success)


def of(*lines: bytes, block_tokens: int | dict[str, int] | None = 4) -> Trace:
    return trace_of_lines(lines, "publisher_log", name="test", block_tokens=block_tokens)


def rows(trace: Trace) -> list[tuple[int, list[int], int, bool]]:
    """Return time, blocks, how many are read, and whether they are written, of each request."""
    return [
        (int(at), trace.request_blocks(number).tolist(), int(reads), bool(writes))
        for number, (at, reads, writes) in enumerate(zip(trace.times_us, trace.read_blocks, trace.writes, strict=True))
    ]


def test_a_lookup_and_then_the_write_of_missing_blocks() -> None:
    trace = of(lookup(5, [7, 8, 9]), start(6, "s", [7, 8, 9], block_mask=1), finish(50, "s", 2), lookup(60, [7, 8]))
    assert rows(trace) == [(5, [0, 1, 2], 3, False), (50, [0, 1, 2], 0, True), (60, [0, 1], 2, False)]
    assert trace.input_tokens.tolist() == [12, 12, 8]
    assert trace.is_plain
    assert trace.has_one_parent


def test_a_write_counts_when_it_ends() -> None:
    trace = of(start(0, "s", [1]), lookup(10, [1]), start(20, "t", [2]), finish(30, "s", 1), lookup(130_000, [2]))
    assert rows(trace) == [
        (10, [0], 1, False),
        (30, [0], 0, True),
        (100_020, [1], 0, True),  # never ended: 100 ms after its start
        (130_000, [1], 1, False),
    ]


def test_failed_requests_are_left_out() -> None:
    keys = [1, 2, 3, 4, 5]
    trace = of(start(0, "s", keys, block_mask=[False, True]), finish(1, "s", [True, False, True, False]))
    assert trace.request_blocks(0).tolist() == [0, 1, 2, 3]  # 1 and 4 were written, 2 was there, 5 failed at the end
    assert trace.masks[0].tolist() == [False, False, True, False]
    assert trace.unique_blocks == 4
    nothing = of(lookup(0, [9]), start(0, "s", keys), finish(1, "s", 0), finish(2, "unknown", 3))
    assert len(nothing) == 1
    only_there = of(start(0, "s", keys, block_mask=3), finish(1, "s", 0))
    assert rows(only_there) == [(1, [0, 1, 2], 0, True)]


@pytest.mark.parametrize("success", [-1, 3, [True], [True] * 3])
def test_a_success_of_other_blocks_is_a_bad_line(success: object) -> None:
    trace = of(start(0, "s", [1, 2]), finish(1, "s", success))
    assert trace.bad_lines[0].number == 2
    assert "does not fit the session's 2 blocks" in trace.bad_lines[0].reason
    assert rows(trace) == [(100_000, [0, 1], 0, True)]


def test_a_write_that_goes_on_where_another_ended_leaves_the_tree_a_tree() -> None:
    lines = [lookup(0, [1, 2, 3]), start(1, "s", [3]), finish(2, "s", 1), start(3, "t", [5, 6]), finish(4, "t", 2)]
    trace = of(*lines, lookup(9, [1, 2, 5, 6]))
    assert trace.has_one_parent
    assert trace.parents.tolist() == [-1, 0, 1, 1, 3]
    assert not of(*lines, lookup(9, [6, 5])).has_one_parent


def test_query_types_masks_windows_and_specs() -> None:
    trace = of(
        lookup(0, [1, 2, 3], query_type="batch_get", block_mask=2),
        lookup(1, [1, 2, 3], query_type="reverse_roll_sw_match", sw_size=2),
        lookup(2, [1, 2, 3], query_type="prefix_match_with_mamba", location_spec_names=["full", "state"]),
        lookup(3, [1, 2, 3], block_mask=2),
        lookup(4, [1, 2, 3], block_mask=[False, True]),
        lookup(5, [1, 2, 3], block_mask=-1),
        lookup(6, [1, 2, 3], block_mask=[False] * 3),
    )
    assert trace.modes == {0: QueryMode.BATCH, 1: QueryMode.WINDOW}
    assert trace.windows == {1: 2}
    assert trace.specs == {2: ("full", "state")}
    masks = {3: [True, True, False], 4: [False, True, False], 5: [True] * 3}
    assert {number: mask.tolist() for number, mask in trace.masks.items()} == masks


def test_rare_fields_move_with_their_request() -> None:
    trace = of(lookup(9, [1, 2], block_mask=1), lookup(1, [3], query_type="batch_get"), lookup(5, [4]))
    assert trace.modes == {0: QueryMode.BATCH}
    assert {number: mask.tolist() for number, mask in trace.masks.items()} == {2: [True, False]}


def test_other_events_are_no_bad_lines() -> None:
    others = [
        event("CacheReclaimSubmit", 3, block_keys=[1], location_ids=[["l"]], delay_us=4),
        event("dropped", 3, source="", count=7),
        event("evicted", 3, keys=["not", "keys"], reason="quota"),
    ]
    trace = of(lookup(1, [1]), *others)
    assert (len(trace), trace.bad_line_count) == (1, 0)
    with pytest.raises(TraceError, match=r"test: holds no request$"):
        of(*others)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (lookup(1, [1], query_type="suffix"), "query_type: 'suffix' is none; allowed: prefix_match, "),
        (lookup(1, [1], query_type="reverse_roll_sw_match"), "sw_size: 0 does not fit 1 keys; allowed: 1 to"),
        (lookup(1 << 70, [1]), "trigger_time_us: 1180591620717411303424 does not fit"),
        (lookup(1, [1], block_mask="all"), "block_mask: 'all' does not fit"),
        (event("GetCacheLocation", 1, source=3), "source: 3 does not fit"),  # type: ignore[arg-type]
        (b'{"trigger_time_us": 3}', "missing required field type"),
        (lookup(1, [], tokens=[1, 1 << 65, 1]), "tokens[1]: 36893488147419103232 has more than 64 bits"),
    ],
)
def test_bad_lines(line: bytes, reason: str) -> None:
    trace = of(lookup(1, [1]), line)
    assert reason in trace.bad_lines[0].reason


def test_keys_of_two_instances_are_two_blocks() -> None:
    trace = of(lookup(1, [5], source="b"), lookup(2, [5]), lookup(3, [5], source="b"))
    assert trace.blocks.tolist() == [0, 1, 0]
    assert trace.instance_names == ("b", "a")
    assert trace.instances.tolist() == [0, 1, 0]


class TestTokens:
    def test_keys_are_computed_from_tokens_where_there_are_none(self) -> None:
        tokens = list(range(1, 10))
        trace = of(lookup(1, [], tokens=tokens), lookup(2, [455111481605203084, 6902853672176602142]))
        assert trace.blocks.tolist() == [0, 1, 0, 1]
        assert trace.input_tokens.tolist() == [9, 8]

    def test_the_size_of_blocks_must_be_known_then(self) -> None:
        with pytest.raises(TraceError, match="block_tokens: instance 'a' names blocks by their tokens only; give them"):
            of(lookup(1, [], tokens=[1, 2, 3]), block_tokens=None)

    def test_the_size_is_found_out_where_both_are_reported(self) -> None:
        reported = lookup(1, [1, 2], tokens=[0] * 33), lookup(1, [1], tokens=[0] * 31)
        trace = of(*reported, lookup(3, [5], source="b"), block_tokens=None)
        assert (trace.block_tokens, trace.instance_block_tokens) == (16, (16, 16))

    def test_instances_have_sizes_of_their_own(self) -> None:
        trace = of(lookup(1, [1]), lookup(2, [1], source="b"), block_tokens={"a": 4, "b": 6})
        assert (trace.block_tokens, trace.instance_block_tokens) == (0, (4, 6))
        assert trace.input_tokens.tolist() == [4, 6]

    @settings(max_examples=examples(200), deadline=None)
    @given(st.lists(int64s, max_size=40), st.integers(1, 9))
    def test_the_kernel_equals_the_model(self, tokens: list[int], block_tokens: int) -> None:
        keys = keys_of_tokens(np.array(tokens, np.int64), block_tokens)
        assert keys.tolist() == block_keys_from_tokens(tokens, block_tokens)


@pytest.mark.parametrize("is_ring", [False, True])
async def test_events_of_our_own_manager_are_read(is_ring: bool) -> None:
    log = EventLog(now=lambda: 5000.0)
    subscription = log.subscribe()
    recent = RecentAccesses(1000, now=lambda: 5000.0)
    events = RequestEvents(log, recent)
    request = pb.GetCacheLocationRequest(instance_id="i", token_ids=[1, 2, 3, 4, 5], location_spec_names=["tp0"])
    query = MatchQuery(MatchMode.PREFIX_MATCH, [11, 12], BlockMask(flags=(False, True)))
    events.on_read(request, query, Match([], [11]))
    session = WriteSession("secret", 1, 6000.0, "l", (12,))
    write = pb.StartWriteCacheRequest(instance_id="i", write_timeout_seconds=3)
    events.on_write_started(write, [11, 12], StartedWrite(session, BlockMask(offset=1), []))
    log.publish("i", CACHE_RECLAIMER, "evicted", {"keys": [11], "bytes": 3})
    events.on_write_finished(
        pb.FinishWriteCacheRequest(instance_id="i", write_session_id="secret"), BlockMask(offset=1)
    )
    running = asyncio.create_task(log.run())
    lines = b"".join([part async for part in recent.lines()]) if is_ring else await anext(subscription)
    running.cancel()
    trace = of(*lines.splitlines(), block_tokens=2)
    at = 5_000_000_000
    assert rows(trace) == [(at, [0, 1], 2, False), (at, [0, 1], 0, True)]
    assert trace.masks[0].tolist() == [False, True]
    assert trace.specs == {0: ("tp0",)}
    assert trace.instance_names == ("i",)
    assert trace.input_tokens.tolist() == [4 if is_ring else 5, 4]
    assert not trace.bad_line_count


@settings(max_examples=examples(200), deadline=None)
@given(st.none() | st.integers(-2, 9) | st.lists(st.booleans(), max_size=9), st.integers(0, 7))
def test_masks_are_those_of_the_model(mask: int | list[bool] | None, count: int) -> None:
    model = BlockMask(offset=mask) if isinstance(mask, int) else BlockMask(flags=mask)
    found = block_mask_of(mask, count)
    unmasked = [] if found is None else np.flatnonzero(~found).tolist()
    assert (list(range(count)) if found is None else unmasked) == list(model.unmasked(count))
