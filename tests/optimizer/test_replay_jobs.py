"""Jobs: what is refused, in what order they are answered, and what is counted in tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import HAND, trace_of

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.policy_spec import parse_policies, parse_policy
from kvcm.optimizer.replay import Job, reference_replay, replay, replay_all
from kvcm.optimizer.trace import QueryMode

LRU = parse_policy("lru")


def test_answers_come_in_the_order_of_the_jobs_however_many_threads_there_are() -> None:
    jobs = [Job(spec, capacity) for capacity in (8, 4, 6) for spec in parse_policies("all")]
    steps: list[tuple[int, int]] = []
    found = replay_all(HAND, jobs, workers=3, progress=lambda done, total: steps.append((done, total)))
    assert [(each.policy, each.capacity_blocks) for each in found] == [(j.spec.label, j.capacity_blocks) for j in jobs]
    assert [each.hits for each in found] == [replay(HAND, job.spec, job.capacity_blocks).hits for job in jobs]
    assert steps == [(done, len(jobs)) for done in range(1, len(jobs) + 1)]
    assert replay_all(HAND, []) == []


@pytest.mark.parametrize("run", [replay, reference_replay])
def test_what_cannot_be_replayed_is_refused(run) -> None:
    with pytest.raises(OptionError, match="capacity_blocks: 0 is out of range; allowed: 1 or more"):
        run(HAND, LRU, 0)
    with pytest.raises(OptionError, match="mode: 'both' is none; allowed: block, request"):
        run(HAND, LRU, 4, mode="both")
    for peculiar in (
        replace(HAND, modes={0: QueryMode.BATCH}),
        replace(HAND, masks={0: np.ones(4, np.bool_)}),
        replace(HAND, specs={0: ("full",)}),
    ):
        with pytest.raises(OptionError, match=r"'test' has requests with .*kvcm\.optimizer\.groups"):
            run(peculiar, LRU, 4)


def test_one_job_that_cannot_be_done_keeps_all_from_beginning() -> None:
    steps: list[int] = []
    with pytest.raises(OptionError, match="capacity_blocks"):
        replay_all(HAND, [Job(LRU, 4), Job(LRU, -1)], progress=lambda done, total: steps.append(done))
    assert not steps


def test_outcomes_of_requests_are_kept_only_if_asked_for() -> None:
    assert replay(HAND, LRU, 8).request_hits is None
    kept = replay(HAND, LRU, 8, keep_requests=True)
    assert kept.request_hits is not None
    assert kept.request_resident is not None
    assert kept.request_hits.tolist() == [0, 2, 0, 4, 3, 3, 2, 4]
    assert kept.request_resident.tolist() == [4, 5, 7, 7, 7, 8, 8, 8]
    assert kept.accesses == HAND.accesses


def test_tokens_are_counted_in_the_blocks_of_each_instance_and_no_more_than_the_prompt_has() -> None:
    trace = replace(
        trace_of([[1, 2], [3, 4], [1, 2], [3, 4], [3, 4]], input_tokens=[20, 8, 19, 8, 7]),
        instances=np.array([0, 1, 0, 1, 1], np.int32),
        instance_names=("a", "b"),
        instance_block_tokens=(10, 4),
        block_tokens=0,
    )
    hits = replay(trace, LRU, 4).hits
    assert (hits.prefix_blocks, hits.prefix_tokens, hits.full_requests) == (6, 19 + 8 + 7, 3)


def test_lookups_insert_nothing_and_writes_count_nothing() -> None:
    requests = ([1, 2], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    writes = [False, True, False, True, False]
    trace = trace_of(requests, read_blocks=[2, 0, 3, 0, 2], writes=writes)
    found = replay(trace, LRU, 3, keep_requests=True)
    assert found.request_hits is not None
    assert found.request_hits.tolist() == [0, 0, 2, 0, 2]
    assert (found.hits.object_blocks, found.hits.full_requests) == (4, 1)
    assert (found.totals.requests, found.totals.blocks) == (3, 7)


def test_a_lookup_renews_what_it_finds() -> None:
    trace = trace_of([[1], [2], [1], [3], [1, 2]], writes=[True, True, False, True, False])
    found = replay(trace, LRU, 2, keep_requests=True)
    assert found.request_hits is not None
    assert found.request_hits.tolist() == [0, 0, 1, 0, 1]


def test_age_is_counted_in_the_time_of_requests() -> None:
    trace = trace_of([[1], [1], [1], [1]], times_seconds=[0, 2, 4, 6.000001])
    for policy, hits in (("ttl:seconds=2", [0, 1, 1, 0]), ("ttl:seconds=2:fixed", [0, 1, 0, 0])):
        found = replay(trace, parse_policy(policy), 5, keep_requests=True)
        assert found.request_hits is not None
        assert found.request_hits.tolist() == hits


def test_a_victim_that_others_follow_is_replaced_by_its_coldest_leaf() -> None:
    trace = trace_of([[1, 2, 3], [1, 4], [5], [1, 2, 3], [1, 4]])
    plain = reference_replay(trace, LRU, 4, keep_requests=True)
    guarded = reference_replay(trace, LRU, 4, keep_requests=True, tail_first=True)
    assert plain.request_hits is not None
    assert guarded.request_hits is not None
    assert plain.request_hits.tolist() == [0, 1, 0, 1, 1]
    assert guarded.request_hits.tolist() == [0, 1, 0, 2, 1]


def test_columns_that_cannot_be_written_are_replayed_as_they_are() -> None:
    blocks = HAND.blocks.copy()
    blocks.flags.writeable = False
    assert replay(replace(HAND, blocks=blocks), LRU, 5).hits == replay(HAND, LRU, 5).hits
    assert HAND.blocks.flags.writeable


def test_prompts_too_short_for_a_block_are_part_of_what_tokens_are_relative_to() -> None:
    trace = trace_of([[1], [], [1]], input_tokens=[10, 7, 10])
    found = replay(trace, LRU, 1)
    assert (found.totals.requests, found.totals.blocks, found.totals.tokens) == (2, 2, 27)
    assert found.token_hit_rate == 10 / 27
    wrote = trace_of([[1], [1]], input_tokens=[10, 10], read_blocks=[0, 1])
    assert wrote.totals.tokens == 10
