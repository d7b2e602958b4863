"""Instances that share quotas, compared with a model over dictionaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from group_model import ModelOfGroups
from group_traces import NAMES, Step, steps, trace_of_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups import GroupLayout, InstanceLayout, QuotaGroup, SpecKind, SpecLayout, replay_groups
from kvcm.optimizer.policy_spec import PolicySpec, parse_policy
from kvcm.optimizer.trace import QueryMode

KV = SpecLayout("kv", 10)
SPECS = (
    (KV,),
    (SpecLayout("tp0", 3), SpecLayout("tp1", 4)),
    (KV, SpecLayout("state", 7, SpecKind.STATE, every=2)),
    (SpecLayout("tp0", 3), SpecLayout("tp1", 4), SpecLayout("state", 5, SpecKind.STATE)),
    (KV, SpecLayout("state", 7, SpecKind.STATE, every=0, at_end=True)),
    (KV, SpecLayout("window", 2, SpecKind.WINDOW, every=1, window_blocks=2)),
    (SpecLayout("window", 2, SpecKind.WINDOW, every=2, at_end=True, window_blocks=2), SpecLayout("tail", 1, every=1)),
    (SpecLayout("state", 7, SpecKind.STATE, every=2, at_end=True),),
)
SPEC_NAMES = ("kv", "tp0", "tp1", "state", "window", "tail", "none")


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    def instance(name: str) -> InstanceLayout:
        policy = PolicySpec(draw(st.sampled_from(("lru", "fifo", "lfu", "leaf_lru"))))
        return InstanceLayout(name, policy, draw(st.sampled_from(SPECS)), draw(st.sampled_from((1.0, 0.5, 3.0))))

    def group(name: str, names: str) -> QuotaGroup:
        unit = draw(st.sampled_from(("blocks", "bytes")))
        tail_first = draw(st.booleans())
        return QuotaGroup(
            name,
            draw(st.integers(1, 20)) * (1 if unit == "blocks" else draw(st.integers(4, 12))),
            tuple(map(instance, names)),
            unit,
            draw(st.sampled_from(("group_lru", "proportional", "fixed"))),
            draw(st.sampled_from((1.0, 0.75, 0.5))),
            draw(st.sampled_from((0.0, 0.25, 0.5))),
            tail_first,
            tail_first and unit == "bytes" and draw(st.booleans()),
        )

    parts = draw(st.sampled_from((("abc",), ("ab", "c"), ("a", "b", "c"))))
    groups = tuple(group(f"group of {names}", names) for names in parts)
    return GroupLayout(groups, draw(st.sampled_from(("block", "request"))))


@settings(max_examples=examples(1000))
@given(requests=steps(specs=SPEC_NAMES), layout=layouts())
def test_counts_what_a_model_over_dictionaries_counts(requests: list[Step], layout: GroupLayout) -> None:
    model = ModelOfGroups(layout)
    answers, used = [], []
    for place, step in enumerate(requests):
        answers.append(model.serve(step, place))
        used.append([each.used for each in model.instances.values()])
    replay = replay_groups(trace_of_steps(requests), layout, keep_requests=True)
    assert replay.request_hits is not None
    assert replay.request_hits.tolist() == [-1 if each is None else each for each in answers]
    assert replay.used.tolist() == used
    for instance in replay.instances:
        expected = model.instances[instance.instance]
        assert (instance.hits.prefix_blocks, instance.internal_blocks) == (expected.external, expected.internal)
        assert instance.hits.object_blocks == expected.objects
        assert (instance.evicted_blocks, instance.blocks) == (expected.evicted, len(expected.blocks))
        assert instance.written_blocks - instance.evicted_blocks == instance.blocks


def one(name: str = "a", policy: str = "lru", specs: tuple[SpecLayout, ...] = (KV,), **more: Any) -> InstanceLayout:
    return InstanceLayout(name, PolicySpec(policy), specs, **more)


def grouped(*instances: InstanceLayout, quota: int = 10, **more: Any) -> GroupLayout:
    return GroupLayout((QuotaGroup("g", quota, instances or (one(),), **more),))


def left(requests: list[Step], layout: GroupLayout) -> list[int]:
    return [each.blocks for each in replay_groups(trace_of_steps(requests), layout).instances]


def test_space_follows_traffic_under_group_lru_and_stays_with_weights() -> None:
    """What an old model version no longer reads goes to the new one; a share of its own holds that up."""
    old = [Step((each,), 0) for each in range(8)]
    new = [Step((each,), 1) for each in range(8)]
    assert left(old + new, grouped(one("a"), one("b"), quota=8)) == [0, 8]
    assert left(old + new, grouped(one("a", weight=1000.0), one("b"), quota=8)) == [7, 1]


def test_fixed_shares_are_kept_whatever_the_traffic() -> None:
    requests = [Step((each,), instance) for instance in (0, 1) for each in range(8)]
    for weight, shares in ((1.0, [4, 4]), (3.0, [6, 2])):
        layout = grouped(one("a", weight=weight), one("b"), quota=8, share="fixed")
        assert left(requests, replace(layout, mode="request")) == shares


def test_proportional_takes_the_same_part_of_each() -> None:
    requests = [Step(tuple(range(8)), 0), Step((1, 2), 1), Step((11, 12), 1)]
    layout = grouped(one("a"), one("b"), quota=10, share="proportional", mark=1.0, hysteresis=0.4)
    assert left(requests, replace(layout, mode="request")) == [4, 2]


def test_eviction_begins_above_the_mark_and_ends_below_it() -> None:
    layout = grouped(quota=10, mark=0.8, hysteresis=0.3)
    replay = replay_groups(trace_of_steps([Step((each,)) for each in range(1, 13)]), layout)
    assert replay.used[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
    assert replay.evicted[:, 0].tolist() == [0] * 8 + [4] * 4
    whole = replace(layout, mode="request")
    replay = replay_groups(trace_of_steps([Step(tuple(range(1, 9))), Step(tuple(range(9, 12)))]), whole)
    assert replay.used[:, 0].tolist() == [8, 5]


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "sieve", "s3fifo", "ttl"])
def test_the_tail_goes_before_the_head(policy: str) -> None:
    """Whatever the policy: what is left of chains is always their heads (invariant 7)."""
    layout = grouped(one(policy=policy), quota=5, tail_first=True)
    chains = [Step((1, 2, 3)), Step((1, 2, 4, 5)), Step((7, 8, 9, 10, 11)), Step((1, 2, 3))]
    for count in range(1, 5):
        trace = trace_of_steps([*chains[:count], *(Step(step.ids, writes=False) for step in chains)])
        replay = replay_groups(trace, layout, keep_requests=True)
        by_batch = replace(trace, modes=dict.fromkeys(range(count, count + 4), QueryMode.BATCH))
        assert replay.request_hits is not None
        batched = replay_groups(by_batch, layout, keep_requests=True).request_hits
        assert batched is not None
        assert replay.request_hits.tolist() == batched.tolist()


def hits(requests: list[Step], layout: GroupLayout, last: int = 1) -> list[int]:
    """Return the hits of the last requests."""
    found = replay_groups(trace_of_steps(requests), layout, keep_requests=True).request_hits
    assert found is not None
    answers: list[int] = found[-last:].tolist()
    return answers


@pytest.mark.parametrize(("followers", "goes"), [(1024, 2), (1025, 1)])
def test_a_root_that_too_many_follow_is_passed_over(followers: int, goes: int) -> None:
    """Else the leaf goes that was not read for longest, which is not the one that was written first."""
    fan = [
        Step((0,)),
        *(Step((0, each)) for each in range(1, followers + 1)),
        Step((0, 1), writes=False),
        Step((9999,)),
    ]
    reads = [Step((0, each), writes=False) for each in (1, 2, 3)]
    layout = grouped(one(policy="fifo"), quota=followers + 1, tail_first=True)
    assert hits(fan + reads, layout, 3) == [1 if each == goes else 2 for each in (1, 2, 3)]


def test_of_leaves_that_are_equally_cold_the_deepest_goes() -> None:
    requests = [Step((1,), seconds=0), Step((1, 2, 3), seconds=1), Step((1, 4), seconds=1)]
    reads = [Step((1, 2, 3), writes=False), Step((1, 4), writes=False)]
    for quota, left_over in ((3, [2, 2]), (2, [1, 2]), (1, [1, 1])):
        assert hits(requests + reads, grouped(one(policy="fifo"), quota=quota, tail_first=True), 2) == left_over
    at_once = grouped(one(policy="fifo"), quota=3, hysteresis=1 / 3, tail_first=True)
    assert hits(requests + reads, at_once, 2) == [1, 2]


def test_of_instances_that_are_equally_cold_the_first_gives() -> None:
    requests = [Step((1,), 0, seconds=0), Step((1,), 1, seconds=0), Step((2,), 1, seconds=0)]
    assert left(requests, grouped(one("a"), one("b"), quota=2)) == [0, 2]
    assert left(requests, grouped(one("b"), one("a"), quota=2)) == [1, 1]


@pytest.mark.parametrize(("policy", "found"), [("ttl:seconds=4:fixed", 0), ("ttl:seconds=4", 1), ("ttl:seconds=1", 0)])
def test_an_age_counts_from_the_write_or_from_the_read(policy: str, found: int) -> None:
    requests = [Step((1,), seconds=0), Step((1,), seconds=3, writes=False), Step((1,), seconds=7, writes=False)]
    instance = InstanceLayout("a", parse_policy(policy))
    assert hits(requests, grouped(instance)) == [found]
    assert hits([*requests[:2], Step((2,), 1, seconds=7), requests[2]], grouped(instance, one("b"))) == [found]


def test_a_block_that_leaves_for_its_own_specs_is_written_anew_if_it_fits() -> None:
    specs = (KV, SpecLayout("state", 25, SpecKind.STATE))
    only_state = [Step((1,), specs=("kv",)), Step((1,), specs=("state",))]
    for quota, used in ((35, 35), (30, 25), (25, 25), (24, 10)):
        replay = replay_groups(trace_of_steps(only_state), grouped(one(specs=specs), quota=quota, unit="bytes"))
        assert replay.used[-1].tolist() == [used]
    both = [Step((1,), specs=("kv",)), Step((1,))]
    replay = replay_groups(trace_of_steps(both), grouped(one(specs=specs), quota=30, unit="bytes"))
    assert (replay.used[-1].tolist(), replay.instances[0].refused_blocks) == ([0], 1)


def test_a_match_ends_at_the_last_block_that_has_the_state() -> None:
    """QT_PREFIX_MATCH_WITH_MAMBA (wire.md 14)."""
    chain = tuple(range(1, 8))
    for every, at_end, hits in ((1, False, 5), (2, False, 4), (3, False, 3), (4, True, 4), (0, True, 0), (7, False, 0)):
        specs = (KV, SpecLayout("state", 7, SpecKind.STATE, every, at_end))
        read = Step(chain[:5], writes=False)
        replay = replay_groups(trace_of_steps([Step(chain), read]), grouped(one(specs=specs)), keep_requests=True)
        assert replay.request_hits is not None
        assert replay.request_hits.tolist() == [0, hits]
        assert replay.hits.prefix_tokens == 10 * hits


def test_a_sliding_window_needs_its_last_blocks_alone() -> None:
    specs = (KV, SpecLayout("sw", 1, SpecKind.WINDOW, window_blocks=2))
    requests = [
        Step((1, 2, 3, 4, 5), specs=("kv",)),
        Step((1, 2, 3, 4, 5), writes=False),  # nowhere are two blocks with the window's spec
        Step((1, 2, 3), specs=("sw",)),
        Step((1, 2, 3, 4, 5), writes=False),  # 3 blocks end with two of them
        Step((1, 2, 3, 4, 5), writes=False, specs=("kv",)),
    ]
    replay = replay_groups(trace_of_steps(requests), grouped(one(specs=specs)), keep_requests=True)
    assert replay.request_hits is not None
    assert replay.request_hits.tolist() == [0, 0, 0, 3, 5]


def test_sizes_are_per_spec_and_a_block_grows_with_them() -> None:
    specs = (KV, SpecLayout("state", 25, SpecKind.STATE, every=2))
    requests = [Step((1, 2), specs=("kv",)), Step((1, 2)), Step((3, 4, 5))]
    replay = replay_groups(trace_of_steps(requests), grouped(one(specs=specs), quota=60, unit="bytes"))
    assert replay.used[:, 0].tolist() == [20, 45, 55]
    assert replay.instances[0].row()["used"] == 55


def test_what_does_not_fit_at_all_is_refused() -> None:
    replay = replay_groups(trace_of_steps([Step((1, 2))]), grouped(quota=9, unit="bytes"))
    assert (replay.instances[0].refused_blocks, replay.instances[0].blocks) == (2, 0)


def test_tokens_are_those_that_need_not_be_computed() -> None:
    def tokens(**asked: Any) -> int:
        requests = [Step((1, 2, 4)), Step((1, 2, 3, 4, 5), writes=False, **asked)]
        return replay_groups(trace_of_steps(requests), grouped()).hits.prefix_tokens

    assert tokens() == 20
    assert tokens(mask=(True,)) == 10
    assert tokens(mask=(True, True, True)) == 10
    assert tokens(mode=QueryMode.BATCH) == 30
    assert tokens(mode=QueryMode.BATCH, mask=(True,)) == 20
    assert tokens(mode=QueryMode.WINDOW, window=2) == 20
    assert tokens(mode=QueryMode.WINDOW, window=1) == 40
    assert tokens(mode=QueryMode.WINDOW, window=3) == 0
    assert tokens(mode=QueryMode.WINDOW, window=0) == 0
    assert tokens(mode=QueryMode.WINDOW, window=9) == 0


def test_instances_that_the_layout_does_not_have_are_left_out() -> None:
    replay = replay_groups(trace_of_steps([Step((1,), 0), Step((1,), 1)]), grouped(one("b"), one("z")))
    assert replay.unknown_instances == ("a",)
    assert [(each.instance, each.blocks) for each in replay.instances] == [("b", 1), ("z", 0)]
    assert replay.accesses == 1
    with pytest.raises(OptionError, match="instances: none of z is in the trace; allowed: a, b"):
        replay_groups(trace_of_steps([Step((1,), 0), Step((1,), 1)]), grouped(one("z")))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (grouped(quota=0), r"groups\[g\].quota: 0; allowed: 1 to"),
        (grouped(share="equal"), "share: 'equal'; allowed: group_lru, proportional, fixed"),
        (grouped(mark=1.2), "mark: 1.2; allowed: above 0 up to 1"),
        (grouped(hysteresis=-1), "hysteresis: -1; allowed: 0 to 1"),
        (grouped(unit="pages"), "unit: 'pages'; allowed: blocks, bytes"),
        (grouped(thins_states=True), "thins_states: true; allowed: only with tail_first and a quota in bytes"),
        (GroupLayout((QuotaGroup("g", 1, ()),)), "instances: none; allowed: at least one"),
        (replace(grouped(), mode="step"), "mode: 'step'; allowed: block, request"),
        (grouped(one(), one()), "instances: 'a' stands there twice"),
        (grouped(one(weight=0)), r"instances\[a\].weight: 0; allowed: a number above 0"),
        (grouped(one(specs=())), "specs: 0 of them; allowed: 1 to 8"),
        (grouped(one(specs=(KV, KV))), "specs: 'kv' stands there twice"),
        (grouped(one(specs=(SpecLayout("s", 1, every=0),))), r"specs\[s\]: never written; allowed: every above 0"),
        (grouped(one(specs=(SpecLayout("s", 1, SpecKind.WINDOW),))), "window_blocks: 0; allowed: 1 to"),
        (grouped(one(specs=(SpecLayout("s", -1),))), r"specs\[s\].bytes: -1; allowed: 0 to"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout: GroupLayout, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replay_groups(trace_of_steps([Step((1,))]), layout)


def test_an_empty_trace_counts_nothing() -> None:
    replay = replay_groups(trace_of_steps([]), grouped())
    assert (replay.accesses, replay.mean_used, replay.hits.prefix_blocks) == (0, 0.0, 0)
    assert replay.of("a").block_hit_rate == 0
    assert NAMES[0] == replay.instances[0].instance
    with pytest.raises(KeyError):
        replay.of("b")
    assert replay.used.shape == (0, 1)
    assert np.array_equal(replay.times_us, [])


def test_a_mark_is_what_people_mean_by_it() -> None:
    group = QuotaGroup("g", 100, (one(),), mark=0.29, hysteresis=0.01)
    assert (group.high, group.low) == (29, 28)


def test_states_between_go_before_blocks_do() -> None:
    specs = (KV, SpecLayout("state", 5, SpecKind.STATE))
    chains = [Step((1, 2, 3, 4)), Step((1, 2, 5))]  # 2 is where they branch, 4 and 5 are where they end
    layout = grouped(one(specs=specs), quota=65, unit="bytes", tail_first=True, thins_states=True)
    batch = Step((1, 2, 3, 4, 5), writes=False, mode=QueryMode.BATCH, specs=("state",))
    replay = replay_groups(trace_of_steps([*chains, batch]), layout)
    assert (replay.used[-1].tolist(), replay.instances[0].evicted_blocks) == ([65], 0)
    assert hits([*chains, batch], layout) == [3]
    assert hits([*chains, Step((1, 2), writes=False), Step((1, 2, 3, 4), writes=False)], layout, 2) == [2, 4]
    chain = [Step((1, 2, 3, 4)), Step((1, 2, 3, 4), writes=False, mode=QueryMode.BATCH, specs=("state",))]
    for policy in ("lru", "leaf_lru", "fifo", "sieve"):
        for quota, used, states in ((60, 60, 4), (59, 55, 3), (50, 50, 2), (45, 45, 1), (44, 30, 0)):
            thinned = grouped(
                one(policy=policy, specs=specs), quota=quota, unit="bytes", tail_first=True, thins_states=True
            )
            assert hits(chain, thinned) == [states]
            assert replay_groups(trace_of_steps(chain), thinned).used[-1].tolist() == [used]
    whole = replace(layout, groups=(replace(layout.groups[0], thins_states=False),))
    assert replay_groups(trace_of_steps(chains), whole).instances[0].evicted_blocks == 1


def test_a_state_alone_says_of_a_prefix_that_it_is_there() -> None:
    """A model of linear attention alone stores nothing but its states."""
    specs = (SpecLayout("state", 1, SpecKind.STATE, every=3),)
    requests = [Step(tuple(range(1, 8))), Step(tuple(range(1, 8)), writes=False), Step((1, 2), writes=False)]
    assert hits(requests, grouped(one(specs=specs)), 2) == [6, 0]


def test_a_state_stays_with_a_block_that_could_not_be_read_without_it_either() -> None:
    specs = (SpecLayout("tp0", 3), SpecLayout("tp1", 4), SpecLayout("state", 5, SpecKind.STATE))
    layout = grouped(one(specs=specs), quota=15, unit="bytes", tail_first=True, thins_states=True)
    half = replay_groups(trace_of_steps([Step((1, 2), specs=("tp0", "state"))]), layout)
    assert half.used[-1].tolist() == [8]  # the end of the chain went as a whole
