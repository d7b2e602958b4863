"""Engines behind a gateway and a pool: the replay against the gateway's own router, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pooling_model import PoolingModel
from thoroughness import examples
from traces import HAND, flat_traces, prefix_traces, trace_of

from kvcm.gateway.policies import EngineLoad
from kvcm.gateway.settings import POLICIES, GatewaySettings
from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.pooling import (
    DEFAULT_ROUTING,
    Engines,
    FleetLoad,
    PoolingRow,
    Routing,
    Topology,
    affinities_of,
    compare_pooling,
    parse_routing,
)
from kvcm.optimizer.replay import replay
from kvcm.optimizer.trace import QueryMode, Trace

TRACES = st.one_of(prefix_traces(separate=True), flat_traces(separate=True))
ROUTING = st.sampled_from([*DEFAULT_ROUTING, Routing("consistent_hash", 0.0), Routing("consistent_hash", 2.0, 25)])
# Powers of two, so that seconds and their sums are exact, and equal scores are equal.
RATES: dict[str, Any] = {"throughput_tokens_per_second": 16.0, "kv_bytes_per_token": 1.0, "load_bytes_per_second": 64.0}


@st.composite
def clusters(draw: st.DrawFn) -> Engines:
    return Engines(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 10)),
        pool_blocks=draw(st.none() | st.integers(1, 20)),
        load_latency_seconds=draw(st.sampled_from([0.0, 0.5])),
        seconds_per_output_token=draw(st.sampled_from([0.0, 0.125])),
        **{**RATES, "load_bytes_per_second": draw(st.sampled_from([8.0, 64.0]))},
    )


@st.composite
def dialogues(draw: st.DrawFn) -> Trace:
    """Draw a trace of which some requests belong to sessions, with answers."""
    trace = draw(TRACES)
    sessions = draw(st.lists(st.integers(-1, 4), min_size=len(trace), max_size=len(trace)))
    answers = draw(st.lists(st.integers(0, 40), min_size=len(trace), max_size=len(trace)))
    return replace(trace, sessions=np.array(sessions, np.int32), output_tokens=np.array(answers, np.int64))


def rows_of(trace: Trace, engines: Engines, **options: Any) -> tuple[PoolingRow, ...]:
    return compare_pooling(trace, engines, workers=1, **options).rows


def figures(row: PoolingRow) -> dict[str, Any]:
    """Return all that is counted; not how long it took."""
    others = ("seconds", "routed_requests", "routed_tokens", "prefill_tokens")
    counts = {name: getattr(row, name) for name in PoolingRow.__slots__ if name not in others}
    routed = np.stack([row.routed_requests, row.routed_tokens, row.prefill_tokens], axis=1)
    return {**counts, "routed": routed.tolist()}


@settings(max_examples=examples(600), deadline=None)
@given(trace=dialogues(), engines=clusters(), routing=ROUTING, topology=st.sampled_from(Topology))
def test_a_replay_sends_requests_where_a_gateway_does_and_counts_like_python(
    trace: Trace, engines: Engines, routing: Routing, topology: Topology
) -> None:
    (row,) = rows_of(trace, engines, routing=[routing], topologies=[topology])
    model = PoolingModel(engines, routing, row.local_blocks, row.pool_blocks)
    model.replay(trace)
    assert figures(row)["routed"] == model.routed
    for name in ("local_hit_blocks", "pool_hit_blocks", "local_hit_tokens", "pool_hit_tokens"):
        assert getattr(row, name) == model.counts[name], name
    assert row.hits.object_blocks == model.counts["object_blocks"]
    assert row.hits.full_requests == model.counts["full_requests"]
    assert row.most_duplicate_blocks == max(model.duplicates)
    assert row.mean_duplicate_blocks == pytest.approx(np.mean(model.duplicates))
    waits = model.waits or [0.0]
    assert row.mean_wait_seconds == pytest.approx(np.mean(waits))
    assert row.longest_wait_seconds == pytest.approx(max(waits))


@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces(separate=True), engines=clusters(), routing=ROUTING)
def test_one_engine_is_one_cache(trace: Trace, engines: Engines, routing: Routing) -> None:
    (row,) = rows_of(trace, replace(engines, count=1), routing=[routing], topologies=[Topology.LOCAL])
    assert row.hits == replay(trace, PolicySpec("leaf_lru"), engines.local_blocks).hits
    assert (row.imbalance, row.request_imbalance, row.most_duplicate_blocks) == (1.0, 1.0, 0)


@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces(separate=True), engines=clusters())
def test_a_pool_alone_is_one_cache_whatever_the_policy(trace: Trace, engines: Engines) -> None:
    alone = replay(trace, PolicySpec("leaf_lru"), engines.shared_blocks).hits
    for row in rows_of(trace, engines, topologies=[Topology.POOL]):
        assert row.hits == alone
        assert row.local_hit_blocks == row.most_duplicate_blocks == 0


@settings(max_examples=examples(40), deadline=None)
@given(trace=dialogues(), engines=clusters())
def test_figures_do_not_depend_on_the_number_of_threads(trace: Trace, engines: Engines) -> None:
    once = compare_pooling(trace, engines, workers=4)
    again = compare_pooling(trace, engines, workers=1)
    assert [figures(row) for row in once.rows] == [figures(row) for row in again.rows]
    assert [(row.routing, row.topology) for row in once.rows] == [
        (routing, topology) for routing in DEFAULT_ROUTING for topology in Topology
    ]


# Worked out by hand: two engines that hold everything.

TURNS = trace_of([[1], [1, 2], [1, 2, 3]], times_seconds=[0, 100, 200], sessions=[0, 0, 0])
"""One conversation: 10, 20 and 30 tokens, of which 10 and 20 were there before."""


@pytest.mark.parametrize(
    ("policy", "own", "pool", "requests"),
    [
        ("round_robin", 10, 20, [1, 2]),  # the third turn comes back to the first engine, which has the first block
        ("least_loaded", 10, 20, [1, 2]),  # none is loaded any more, so turns go round
        ("consistent_hash", 30, 0, [0, 3]),
        ("kvcm", 30, 0, [0, 3]),
    ],
)
def test_turns_find_in_their_engine_what_the_policy_left_there(
    policy: str, own: int, pool: int, requests: list[int]
) -> None:
    local, both = rows_of(
        TURNS, Engines(2, 9, **RATES), routing=[Routing(policy)], topologies=[Topology.LOCAL, Topology.BOTH]
    )
    assert (both.local_hit_tokens, both.pool_hit_tokens) == (own, pool)
    assert (local.local_hit_tokens, local.pool_hit_tokens) == (own, 0)
    assert (local.local_share, local.computed_share) == pytest.approx((own / 60, 1 - own / 60))
    assert (both.local_share, both.pool_share, both.computed_share) == pytest.approx((own / 60, pool / 60, 0.5))
    assert sorted(both.routed_requests.tolist()) == requests
    assert sorted(both.prefill_tokens.tolist()) == ([10, 20] if requests[0] else [0, 30])


@pytest.mark.parametrize(("seconds", "own", "requests"), [(60, 20, [1, 2]), (66, 40, [0, 3])])
def test_kvcm_leaves_the_engine_that_has_most_when_the_wait_is_longer(
    seconds: float, own: int, requests: list[int]
) -> None:
    # The second request computes 160 tokens from t = 55 on: 10 s. Its engine would save 20 / 16 = 1.25 s on the third.
    trace = trace_of([[1, 2], [1, 2, *range(5, 21)], [1, 2, 3]], times_seconds=[0, 55, seconds])
    (row,) = rows_of(trace, Engines(2, 99, **RATES), routing=[Routing("kvcm")], topologies=[Topology.LOCAL])
    assert row.local_hit_tokens == own
    assert sorted(row.routed_requests.tolist()) == requests
    assert row.longest_wait_seconds == 0


@pytest.mark.parametrize(
    ("topology", "requests"), [(Topology.LOCAL, [0, 3]), (Topology.BOTH, [1, 2])], ids=["no pool", "pool"]
)
def test_kvcm_leaves_it_for_a_shorter_wait_when_others_can_load(topology: Topology, requests: list[int]) -> None:
    # The wait is 10 / 16 s. The third request saves 20 / 16 s there, and 20 / 16 - 20 / 64 s where it loads.
    trace = trace_of([[1, 2], [1, 2, 5], [1, 2, 3]], times_seconds=[0, 50, 50.5])
    (row,) = rows_of(trace, Engines(2, 99, **RATES), routing=[Routing("kvcm")], topologies=[topology])
    assert sorted(row.routed_requests.tolist()) == requests


def test_prompts_wait_for_those_before_them_and_answers_are_in_flight() -> None:
    fleet = FleetLoad(["a", "b"])
    fleet.advance(1.0)
    assert fleet.begin(0, tokens=30, prompt_seconds=2.0, answer_seconds=3.0) == 0
    assert fleet.begin(0, tokens=20, prompt_seconds=1.0, answer_seconds=0.0) == 2.0
    seen = []
    for now in (1.0, 2.9, 3.0, 4.0, 3.5, 6.0):  # a trace that goes back in time changes nothing
        fleet.advance(now)
        load, idle = fleet.loads
        seen.append((load.in_flight, load.tokens_in_flight))
        assert idle == EngineLoad("b")
    assert seen == [(2, 50), (2, 50), (2, 20), (1, 0), (1, 0), (0, 0)]


def test_an_overloaded_engine_passes_requests_on() -> None:
    # All begin with one block, so one engine gets them all, and each takes ten seconds.
    trace = trace_of([[1, number] for number in range(2, 12)], input_tokens=[20] * 10)
    engines = Engines(2, 100, 2.0)
    stays, moves = rows_of(
        trace,
        engines,
        routing=[Routing("consistent_hash", 0, 10), Routing("consistent_hash", 1.25, 10)],
        topologies=[Topology.LOCAL],
    )
    assert sorted(stays.routed_requests.tolist()) == [0, 10]
    assert (stays.imbalance, stays.request_imbalance) == (2.0, 2.0)
    assert moves.request_imbalance < 1.5
    assert moves.mean_wait_seconds < stays.mean_wait_seconds
    assert moves.hits.prefix_blocks == stays.hits.prefix_blocks - 1 == 8
    assert moves.most_duplicate_blocks == 1


def test_what_was_looked_up_is_written_to_the_engine_that_looked() -> None:
    lookups = [[1, 2], [1, 2], [3], [3], [1, 2]]
    trace = trace_of(
        lookups, read_blocks=[2, 0, 1, 0, 2], writes=[False, True, False, True, False], sessions=[0, 1, 2, 3, 0]
    )
    (row,) = rows_of(trace, Engines(4, 9, **RATES), routing=[Routing("kvcm")], topologies=[Topology.LOCAL])
    assert row.local_hit_blocks == 2


def test_a_write_belongs_to_the_lookup_of_its_deepest_block() -> None:
    trace = trace_of([[1, 2], [1, 3], [1, 2], [1, 2]], read_blocks=[2, 2, 0, 2], writes=[False, False, True, False])
    (row,) = rows_of(trace, Engines(2, 9, **RATES), routing=[Routing("round_robin")], topologies=[Topology.LOCAL])
    assert row.local_hit_blocks == 2


def test_requests_of_a_session_stay_together_and_others_go_by_their_first_tokens() -> None:
    trace = trace_of([[1, 2], [9], [1, 2, 3], [1, 4], [], []], sessions=[0, 0, -1, -1, -1, -1])
    keys = affinities_of(trace, 10)
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 4, "what has neither stays with no other"
    assert len(set(affinities_of(trace, 11))) == 5


def test_names_of_engines_decide_what_a_hash_gives_and_nothing_else() -> None:
    trace = trace_of([[number] for number in range(40)])
    routed = [
        rows_of(trace, Engines(2, 9, **RATES, given_names=names), topologies=[Topology.LOCAL])
        for names in (("a:1", "b:1"), ("b:1", "a:1"))
    ]
    one, other = ({row.routing.name: row.routed_requests.tolist() for row in rows} for rows in routed)
    assert one["consistent_hash"] == other["consistent_hash"][::-1]
    assert one["round_robin"] == other["round_robin"] == [20, 20]


# Policies as they are asked for.


def test_policies_have_the_names_and_defaults_of_the_gateway() -> None:
    settings = GatewaySettings()
    assert sorted(each.name for each in parse_routing("all")) == sorted(POLICIES)
    (routing,) = parse_routing("consistent_hash")
    assert routing.load_factor == settings.hash_load_factor
    assert routing.prefix_tokens == settings.hash_prefix_characters // 4


@pytest.mark.parametrize(
    "text", ["kvcm", "consistent_hash:load_factor=0", "consistent_hash:load_factor=2:prefix_tokens=64"]
)
def test_the_label_of_a_policy_is_the_shortest_text_that_parses_to_it(text: str) -> None:
    (routing,) = parse_routing(f" {text},{text}")
    assert routing.label == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("round", "'round' is no policy of the gateway; there are round_robin, .*; did you mean round_robin"),
        ("", "'' is no policy"),
        ("kvcm:load_factor=0", "kvcm has no option 'load_factor=0'; allowed: none"),
        ("consistent_hash:x=0", "has no option 'x=0'; allowed: load_factor, prefix_tokens"),
        ("consistent_hash:load_factor=0.5", "load_factor=0.5 is out of range; allowed: load_factor=0, or 1 to 1000"),
        ("consistent_hash:load_factor=nan", "out of range"),
        ("consistent_hash:prefix_tokens=0", "out of range; allowed: prefix_tokens=1 to"),
    ],
)
def test_policies_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_routing(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": 0}, "engines is 0; allowed: 1 to 64"),
        ({"count": 65}, "engines is 65"),
        ({"local_blocks": 0}, "local_blocks is 0"),
        ({"throughput_tokens_per_second": float("nan")}, "throughput is nan"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token is 0"),
        ({"load_bytes_per_second": 0.0}, r"load_bytes_per_second is 0\.0; allowed: above 0"),
        ({"load_latency_seconds": -1.0}, r"load_latency is -1\.0"),
        ({"given_names": ("a", "a")}, "names is 2; allowed: one of each engine"),
        ({"seconds_per_output_token": -1.0}, r"output_token is -1\.0"),
    ],
)
def test_clusters_that_are_none_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        replace(Engines(2, 5, 100.0), **change)


def test_incomparable_inputs_are_refused() -> None:
    engines = Engines(2, 5, 100.0)
    with pytest.raises(TraceError, match="plain prefixes"):
        compare_pooling(replace(HAND, modes={0: QueryMode.BATCH}), engines)
    with pytest.raises(OptionError, match="nothing to compare"):
        compare_pooling(HAND, engines, routing=[])


def test_as_many_engines_as_there_may_be() -> None:
    trace = trace_of([[1, 2], [3]] * 200)
    for row in rows_of(trace, Engines(64, 2, 100.0), topologies=[Topology.LOCAL], routing=[Routing("round_robin")]):
        assert row.most_duplicate_blocks > 64
        assert row.routed_requests.sum() == 400
