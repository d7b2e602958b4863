"""Rules of policies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcm.gateway.policies import (
    REGISTRY,
    ConsistentHash,
    EngineLoad,
    LeastLoaded,
    Prompt,
    RoundRobin,
    ScoreMinusWait,
    best_engine,
)
from kvcm.gateway.settings import POLICIES

NAMES = st.text("abcdefgh.:0123456789", min_size=1, max_size=12)
FLEETS = st.lists(NAMES, min_size=1, max_size=8, unique=True)
SECONDS = st.floats(0, 1e4)
ANY = Prompt(b"x")


def loads(*names: str, **in_flight: int) -> list[EngineLoad]:
    return [EngineLoad(name, in_flight.get(name, 0)) for name in names]


def test_every_policy_of_the_settings_is_made() -> None:
    assert set(POLICIES) == set(REGISTRY)


def test_round_robin_goes_round_although_engines_come_and_go() -> None:
    policy = RoundRobin()
    assert [policy.choose(ANY, loads("a", "b", "c")) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [policy.choose(ANY, loads("a", "c")) for _ in range(2)] == ["c", "a"]
    assert [policy.choose(ANY, loads("a", "b", "c", "d")) for _ in range(4)] == ["d", "b", "c", "a"]


def test_least_loaded_takes_the_least_and_ties_go_round() -> None:
    policy = LeastLoaded()
    assert policy.choose(ANY, loads("a", "b", "c", a=2, b=1, c=3)) == "b"
    assert [policy.choose(ANY, loads("a", "b", "c", b=1)) for _ in range(4)] == ["a", "c", "a", "c"]


@given(FLEETS, st.binary(max_size=40), st.data())
def test_a_removed_engine_moves_its_own_keys_and_no_others(fleet: list[str], key: bytes, data: st.DataObject) -> None:
    assume(len(fleet) > 1)
    removed = data.draw(st.sampled_from(fleet))
    policy, prompt = ConsistentHash(), Prompt(key)
    before = policy.choose(prompt, loads(*fleet))
    after = policy.choose(prompt, loads(*(name for name in fleet if name != removed)))
    assert after == before or before == removed
    assert policy.choose(prompt, loads(*reversed(fleet))) == before, "their order has no part in it"


def test_keys_are_even_over_engines_and_a_new_engine_takes_its_share() -> None:
    policy, fleet = ConsistentHash(), [f"10.0.0.{last}:8000" for last in range(1, 5)]
    keys = [Prompt(b"session %d" % number) for number in range(4000)]
    before = [policy.choose(key, loads(*fleet)) for key in keys]
    after = [policy.choose(key, loads(*fleet, "10.0.0.9:8000")) for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"10.0.0.9:8000"}
    assert 4000 / 5 * 0.85 < len(moved) < 4000 / 5 * 1.15
    assert all(850 < count < 1150 for count in Counter(before).values())


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.binary(max_size=8), st.floats(1, 4))
def test_bounded_loads_pass_engines_over_that_are_above_the_bound(
    in_flight: list[int], key: bytes, factor: float
) -> None:
    found = [EngineLoad(str(place), count) for place, count in enumerate(in_flight)]
    chosen = int(ConsistentHash(factor).choose(Prompt(key), found))
    assert in_flight[chosen] <= factor * (sum(in_flight) + 1) / len(in_flight)
    free = ConsistentHash().choose(Prompt(key), found)
    if in_flight[int(free)] + 1 <= factor * (sum(in_flight) + 1) / len(in_flight):
        assert chosen == int(free)


@given(
    st.lists(st.tuples(SECONDS, st.integers(0, 9), st.integers(0, 1 << 20)), min_size=1, max_size=8),
    st.floats(1, 1e6),
    st.binary(max_size=8),
)
def test_the_rule_of_kvcm_takes_the_highest_score_minus_wait(
    engines: list[tuple[float, int, int]], rate: float, key: bytes
) -> None:
    found = [EngineLoad(str(place), in_flight, tokens) for place, (_, in_flight, tokens) in enumerate(engines)]
    scores = {str(place): seconds for place, (seconds, _, _) in enumerate(engines)}
    values = [seconds - tokens / rate for seconds, _, tokens in engines]
    chosen = int(best_engine(found, scores, rate, key))
    assert values[chosen] == max(values)
    ties = [in_flight for value, (_, in_flight, _) in zip(values, engines, strict=True) if value == max(values)]
    assert engines[chosen][1] == min(ties)
    assert int(best_engine(found[::-1], scores, rate, key)) == chosen, "their order has no part in it"


def test_an_engine_without_a_score_saves_nothing() -> None:
    found = [EngineLoad("a", 0, 0), EngineLoad("b", 0, 100)]
    assert best_engine(found, {"b": 1.5}, 100) == "b"
    assert best_engine(found, {"b": 0.5}, 100) == "a"


def test_equal_prompts_meet_where_nothing_is_known_and_nothing_runs() -> None:
    found = loads("a", "b", "c", "d")
    chosen = {best_engine(found, {}, 1, b"system prompt %d" % number) for number in range(50)}
    assert chosen == {"a", "b", "c", "d"}
    assert len({best_engine(found, {}, 1, b"one") for _ in range(5)}) == 1


@pytest.mark.parametrize("key", [b"", b"a", b"b"])
def test_prompts_without_scores_are_placed_by_the_fallback(key: bytes) -> None:
    found, fallback = loads("a", "b", "c"), ConsistentHash()
    assert ScoreMinusWait(1, fallback).choose(Prompt(key), found) == fallback.choose(Prompt(key), found)
    assert ScoreMinusWait(1, fallback).choose(Prompt(key, {"b": 1.0}), found) == "b"
