"""Engines and a pool: the compiled replay against plain Python, and what holds for all of them."""

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

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.pooling import (
    DEFAULT_ROUTERS,
    Engines,
    PoolingRow,
    Router,
    Topology,
    compare_pooling,
    homes_of,
    keys_of,
)
from kvcm.optimizer.replay import replay
from kvcm.optimizer.trace import QueryMode, Trace

TOKENS_PER_SECOND = 1e6 / 2**16  # a number of tokens per microsecond that floats hold exactly
TRACES = st.one_of(prefix_traces(separate=True), flat_traces(separate=True))
ROUTERS = st.sampled_from(DEFAULT_ROUTERS)


@st.composite
def clusters(draw: st.DrawFn) -> Engines:
    return Engines(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 10)),
        TOKENS_PER_SECOND,
        pool_blocks=draw(st.none() | st.integers(1, 20)),
        overload_factor=draw(st.sampled_from([1.0, 1.5, 3.0])),
        overload_seconds=draw(st.sampled_from([0.0, 1.0])),
        least_match=draw(st.sampled_from([0.0, 0.5, 1.0])),
        affinity_blocks=draw(st.none() | st.integers(1, 3)),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def dialogues(draw: st.DrawFn) -> Trace:
    """Draw a trace of which some requests belong to sessions."""
    trace = draw(TRACES)
    sessions = draw(st.lists(st.integers(-1, 4), min_size=len(trace), max_size=len(trace)))
    return replace(trace, sessions=np.array(sessions, np.int32))


def rows_of(trace: Trace, engines: Engines, **options: Any) -> tuple[PoolingRow, ...]:
    return compare_pooling(trace, engines, workers=1, **options).rows


def figures(row: PoolingRow) -> dict[str, Any]:
    """Return all that is counted; not how long it took."""
    others = ("seconds", "routed_requests", "routed_tokens", "prefill_tokens")
    counts = {name: getattr(row, name) for name in PoolingRow.__slots__ if name not in others}
    routed = np.stack([row.routed_requests, row.routed_tokens, row.prefill_tokens], axis=1)
    return {**counts, "routed": routed.tolist()}


@settings(max_examples=examples(800), deadline=None)
@given(trace=dialogues(), engines=clusters(), router=ROUTERS, topology=st.sampled_from(Topology))
def test_compiled_replay_counts_like_python(trace: Trace, engines: Engines, router: Router, topology: Topology) -> None:
    (row,) = rows_of(trace, engines, routers=[router], topologies=[topology])
    homes = homes_of(trace, router, engines.count, affinity_blocks=engines.affinity_blocks, seed=engines.seed)
    model = PoolingModel(engines, router, homes.tolist(), row.local_blocks, row.pool_blocks)
    model.replay(trace)
    for name in ("local_hit_blocks", "pool_hit_blocks", "local_hit_tokens", "pool_hit_tokens", "migrations"):
        assert getattr(row, name) == model.counts[name], name
    assert row.hits.object_blocks == model.counts["object_blocks"]
    assert row.hits.full_requests == model.counts["full_requests"]
    assert figures(row)["routed"] == model.routed
    assert row.most_duplicate_blocks == max(model.duplicates)
    assert row.mean_duplicate_blocks == pytest.approx(np.mean(model.duplicates))
    waits = model.waits or [0.0]
    assert row.mean_wait_seconds == pytest.approx(np.mean(waits) / TOKENS_PER_SECOND)
    assert row.longest_wait_seconds == pytest.approx(max(waits) / TOKENS_PER_SECOND)


@settings(max_examples=examples(100), deadline=None)
@given(trace=dialogues(), engines=clusters(), router=ROUTERS)
def test_one_engine_is_one_cache(trace: Trace, engines: Engines, router: Router) -> None:
    (row,) = rows_of(trace, replace(engines, count=1), routers=[router], topologies=[Topology.LOCAL])
    assert row.hits == replay(trace, PolicySpec("lru"), engines.local_blocks).hits
    assert (row.imbalance, row.migrations, row.most_duplicate_blocks) == (1.0, 0, 0)


@settings(max_examples=examples(100), deadline=None)
@given(trace=dialogues(), engines=clusters())
def test_a_pool_alone_is_one_cache_whatever_the_router(trace: Trace, engines: Engines) -> None:
    alone = replay(trace, PolicySpec("lru"), engines.shared_blocks).hits
    for row in rows_of(trace, engines, topologies=[Topology.POOL]):
        assert row.hits == alone
        assert row.local_hit_blocks == row.most_duplicate_blocks == 0


@settings(max_examples=examples(40), deadline=None)
@given(trace=dialogues(), engines=clusters())
def test_the_same_seed_gives_the_same_figures_with_any_number_of_threads(trace: Trace, engines: Engines) -> None:
    once = compare_pooling(trace, engines, workers=4)
    again = compare_pooling(trace, engines, workers=1)
    assert [figures(row) for row in once.rows] == [figures(row) for row in again.rows]
    assert [(row.router, row.topology) for row in once.rows] == [
        (router, topology) for router in DEFAULT_ROUTERS for topology in Topology
    ]


def test_requests_of_a_session_stay_together_and_others_go_by_their_first_blocks() -> None:
    trace = trace_of([[1, 2], [9], [1, 2, 3], [1, 4], [9, 8]], sessions=[0, 0, 1, -1, -1])
    keys = keys_of(trace, 1).tolist()
    assert keys[0] == keys[1]
    assert len({keys[0], keys[2], keys[3], keys[4]}) == 4
    assert keys_of(replace(trace, sessions=np.full(5, -1, np.int32)), 1).tolist() == [0, 4, 0, 0, 4]
    assert keys_of(replace(trace, sessions=np.full(5, -1, np.int32)), 2).tolist() == [2, 4, 2, 8, 10]


def test_a_prompt_that_all_begin_with_does_not_keep_them_together() -> None:
    trace = trace_of([[0, 1, 10 + number] for number in range(400)])
    homes = homes_of(trace, Router("affinity"), 4, affinity_blocks=None, seed=1)
    assert np.bincount(homes, minlength=4).min() > 60
    assert len(set(homes_of(trace, Router("affinity"), 4, affinity_blocks=2, seed=1).tolist())) == 1


@settings(max_examples=examples(60), deadline=None)
@given(count=st.integers(1, 30), seed=st.integers(0, 100))
def test_one_engine_more_takes_sessions_only_over_to_itself(count: int, seed: int) -> None:
    trace = trace_of([[number] for number in range(200)])
    fewer, more = (
        homes_of(trace, Router("affinity"), engines, affinity_blocks=1, seed=seed) for engines in (count, count + 1)
    )
    assert set(more[fewer != more].tolist()) <= {count}
    assert (fewer != more).mean() < 1 / (count + 1) + 0.2
    other = homes_of(trace, Router("affinity"), count + 1, affinity_blocks=1, seed=seed + 1)
    assert (other == more).mean() < 0.75


def test_chance_is_even_and_depends_on_the_seed() -> None:
    trace = trace_of([[1]] * 4000)
    one, other = (homes_of(trace, Router("random"), 4, affinity_blocks=1, seed=seed) for seed in (1, 2))
    assert np.bincount(one).tolist() == pytest.approx([1000] * 4, rel=0.1)
    assert (one == other).mean() == pytest.approx(0.25, abs=0.05)


def test_an_overloaded_engine_passes_requests_on() -> None:
    # All begin alike, so one engine gets them all, and each takes ten seconds.
    trace = trace_of([[1, number] for number in range(2, 12)], input_tokens=[20] * 10)
    engines = Engines(2, 100, 2.0, affinity_blocks=1, overload_seconds=5.0)
    stays, moves = rows_of(
        trace, engines, routers=[Router("affinity"), Router("affinity", migrates=True)], topologies=[Topology.LOCAL]
    )
    assert sorted(stays.routed_requests.tolist()) == [0, 10]
    assert (stays.migrations, stays.imbalance) == (0, 2.0)
    assert moves.migrations == min(moves.routed_requests) > 2
    assert moves.imbalance < 1.5
    assert moves.mean_wait_seconds < stays.mean_wait_seconds
    assert moves.hits.prefix_blocks == stays.hits.prefix_blocks - 1 == 8
    assert moves.most_duplicate_blocks == 1


def test_routers_that_are_none_are_refused() -> None:
    with pytest.raises(OptionError, match="'round' is no router; allowed: random"):
        Router("round")
    with pytest.raises(OptionError, match="random never migrates"):
        Router("random", migrates=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": 0}, "engines is 0; allowed: 1 to 64"),
        ({"local_blocks": 0}, "local_blocks is 0"),
        ({"throughput_tokens_per_second": float("nan")}, "throughput is nan"),
        ({"overload_factor": 0.5}, r"overload_factor is 0\.5"),
        ({"overload_seconds": -1.0}, r"overload_seconds is -1\.0"),
        ({"least_match": 1.5}, r"least_match is 1\.5; allowed: 0 to 1"),
        ({"seed": -1}, "seed is -1"),
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
        compare_pooling(HAND, engines, routers=[])
    with pytest.raises(OptionError, match="kv_bytes_per_token is 0"):
        compare_pooling(HAND, engines, kv_bytes_per_token=0)


def test_as_many_engines_as_there_may_be() -> None:
    trace = trace_of([[1, 2], [3]] * 200)
    for row in rows_of(trace, Engines(64, 2, 100.0), topologies=[Topology.LOCAL], routers=[Router("random")]):
        assert row.most_duplicate_blocks > 64
        assert row.routed_requests.sum() == 400
