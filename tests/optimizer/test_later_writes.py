"""Writes that end some time after the read, and what states of linear attention are worth."""

from __future__ import annotations

import numpy as np
import pytest
from group_traces import Step, steps, trace_of_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups import (
    GroupLayout,
    InstanceLayout,
    QuotaGroup,
    SpecKind,
    SpecLayout,
    one_group,
    replay_groups,
    with_later_writes,
    worth_of_spacing,
)
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.trace import QueryMode

LRU = PolicySpec("lru")


def test_who_asks_before_the_write_ended_finds_nothing() -> None:
    requests = [Step((1, 2), seconds=0), Step((1, 2), seconds=2), Step((1, 2), seconds=5), Step((1,), seconds=5)]
    for seconds, hits in ((0, [0, 2, 2, 1]), (1.5, [0, 2, 2, 1]), (2.5, [0, 0, 2, 1]), (6, [0, 0, 0, 0])):
        trace = with_later_writes(trace_of_steps(requests), seconds)
        replay = replay_groups(trace, one_group(trace, LRU, 10), keep_requests=True)
        assert replay.request_hits is not None
        assert replay.request_hits[replay.request_hits >= 0].tolist() == hits


def test_an_output_takes_its_time() -> None:
    assert with_later_writes(HAND, 1, seconds_per_output_token=2).times_us.max() == 13_000_000
    with pytest.raises(OptionError, match="seconds: -1; allowed: 0 to"):
        with_later_writes(HAND, -1)


@settings(max_examples=examples(200))
@given(requests=steps(), seconds=st.sampled_from((0.0, 0.5, 1.0, 3.5)))
def test_every_request_is_still_there(requests: list[Step], seconds: float) -> None:
    trace = trace_of_steps(requests)
    later = with_later_writes(trace, seconds)
    expected = []
    for place, step in enumerate(requests):
        is_turn = step.writes and step.read_blocks > 0
        asked = (step.read_blocks, step.mode, step.window if step.mode is QueryMode.WINDOW else 0, step.mask)
        expected.append((place * 10**6, 0, place, asked, step.writes and not is_turn))
        if is_turn:
            nothing = (0, QueryMode.PREFIX, 0, ())
            expected.append((round((place + seconds) * 10**6), 1, place, nothing, True))
    expected.sort(key=lambda each: each[:3])
    assert later.times_us.tolist() == [each[0] for each in expected]
    for place, (_, _, source, asked, writes) in enumerate(expected):
        assert np.array_equal(later.request_blocks(place), trace.request_blocks(source))
        assert later.instances[place] == trace.instances[source]
        mode = later.modes.get(place, QueryMode.PREFIX)
        mask = tuple(later.masks.get(place, ()))
        assert (later.read_blocks[place], mode, later.windows.get(place, 0), mask) == asked
        assert later.writes[place] == writes


def hybrid(quota: int, *, state_bytes: int = 30, unit: str = "bytes") -> GroupLayout:
    specs = (SpecLayout("kv", 10), SpecLayout("state", state_bytes, SpecKind.STATE, at_end=True))
    instance = InstanceLayout("a", PolicySpec("leaf_lru"), specs)
    return GroupLayout((QuotaGroup("g", quota, (instance,), unit=unit),))  # type: ignore[arg-type]


def test_a_state_with_every_block_is_worth_most_only_where_there_is_room() -> None:
    requests = [Step(tuple(range(100 * chain, 100 * chain + 12))[:length]) for chain in range(4) for length in (12, 7)]
    trace = trace_of_steps([*requests, *requests])
    roomy = worth_of_spacing(trace, hybrid(10_000), "state", (1, 4, 0))
    assert [each.every for each in roomy] == [1, 4, 0]
    assert [each.hit_tokens for each in roomy] == [1040, 920, 760]
    assert roomy[0].mean_used_bytes > roomy[1].mean_used_bytes > roomy[2].mean_used_bytes
    narrow = worth_of_spacing(trace, hybrid(900), "state", (1, 4))
    assert narrow[0].hit_tokens < narrow[1].hit_tokens
    assert narrow[0].hit_tokens_per_byte < narrow[1].hit_tokens_per_byte


def test_a_spec_that_is_none_is_refused() -> None:
    trace = trace_of_steps([Step((1,))])
    with pytest.raises(OptionError, match="spec: 'x' is none of any instance; allowed: kv, state"):
        worth_of_spacing(trace, hybrid(10), "x", (1,))
    with pytest.raises(OptionError, match="unit: 'blocks'; allowed here: bytes"):
        worth_of_spacing(trace, hybrid(10, unit="blocks"), "state", (1,))
