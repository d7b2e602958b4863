"""Statistics of locality against counting by hand, request by request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import trace_of

from kvcm.optimizer.locality import Locality, distribution, locality_of, valuable_prefixes
from kvcm.optimizer.trace import Trace


class Request(NamedTuple):
    """One request: whole seconds, its session, its chain of blocks (named by their paths)."""

    seconds: int
    session: int
    chain: tuple[str, ...]
    writes_only: bool = False


def built(requests: Sequence[Request]) -> Trace:
    return trace_of(
        [request.chain for request in requests],
        times_seconds=[request.seconds for request in requests],
        read_blocks=[0 if request.writes_only else len(request.chain) for request in requests],
        sessions=[request.session for request in requests],
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Request]:
    """Some requests for paths of a small tree; ids name whole prefixes."""
    gaps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=14))
    found, seconds = [], 0
    for gap in gaps:
        seconds += gap
        path = draw(st.text("abc", min_size=0, max_size=4))
        chain = tuple(path[: end + 1] for end in range(len(path)))
        found.append(Request(seconds, draw(st.integers(-1, 2)), chain, draw(st.sampled_from([False, False, True]))))
    return found


class Model:
    """The same counted the plain way."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.distances: list[int] = []
        self.waits: list[int] = []
        self.revisits: list[int] = []
        self.counts: Counter[str] = Counter()
        self.saved: Counter[str] = Counter()
        self.origins: Counter[str] = Counter()
        last: dict[str, Request] = {}
        stack: list[str] = []
        for request in requests:
            deepest = None
            known = True
            for name in request.chain:
                is_read = not request.writes_only
                known = known and is_read and name in last
                if known:
                    deepest = request.seconds - last[name].seconds
                if name in last:
                    if is_read:
                        self.distances.append(stack[::-1].index(name) + 1)
                        self.waits.append(request.seconds - last[name].seconds)
                        self.saved[name] += 1
                    stack.remove(name)
                stack.append(name)
                self.counts[name] += 1
                if is_read and request.session >= 0:
                    origin = "own" if name in last and last[name].session == request.session else "other"
                    self.origins[origin if name in last else "new"] += 1
                last[name] = request
            if deepest is not None:
                self.revisits.append(deepest)


@settings(max_examples=examples(150), deadline=None)
@given(histories())
def test_statistics_are_those_of_counting_by_hand(requests: list[Request]) -> None:
    found, model = locality_of(built(requests)), Model(requests)
    assert found.reuse_seconds.count == len(model.waits)
    assert found.revisit_seconds.count == len(model.revisits)
    _is_spread_like(found.reuse_distance_blocks, model.distances)
    _is_spread_like(found.reuse_seconds, model.waits)
    _is_spread_like(found.revisit_seconds, model.revisits)
    counts = sorted(model.counts.values(), reverse=True)
    assert found.popularity.accesses.tolist() == [counts[rank - 1] for rank in found.popularity.ranks.tolist()]
    assert found.popularity.once_share == pytest.approx(counts.count(1) / max(1, len(counts)))
    _has_sessions_of(found, requests, model)


def _is_spread_like(found: object, samples: Sequence[int]) -> None:
    wanted = distribution(np.array(samples, np.float64))
    assert found.values.tolist() == wanted.values.tolist()  # type: ignore[attr-defined]
    assert found.shares.tolist() == wanted.shares.tolist()  # type: ignore[attr-defined]
    assert found.quantiles == wanted.quantiles  # type: ignore[attr-defined]


def _has_sessions_of(found: Locality, requests: Sequence[Request], model: Model) -> None:
    turns = Counter(request.session for request in requests if request.session >= 0)
    if not turns:
        assert found.sessions is None
        return
    total = max(1, model.origins.total())
    assert found.sessions.sessions == len(turns)
    assert found.sessions.own_share == pytest.approx(model.origins["own"] / total)
    assert found.sessions.other_share == pytest.approx(model.origins["other"] / total)
    assert found.sessions.new_share == pytest.approx(model.origins["new"] / total)
    assert found.sessions.turns.count == len(turns)
    assert found.sessions.turn_interval_seconds.count == turns.total() - len(turns)


@settings(max_examples=examples(80), deadline=None)
@given(histories())
def test_the_working_set_holds_recently_accessed_blocks(requests: list[Request]) -> None:
    found = locality_of(built(requests)).working_set
    start = requests[0].seconds
    for window, counts in found.windows.items():
        for at, count in zip(found.seconds.tolist(), counts.tolist(), strict=True):
            lately = {name for each in requests for name in each.chain if at - window <= each.seconds - start <= at}
            assert count == len(lately), (at, window)
    for at, count in zip(found.seconds.tolist(), found.seen.tolist(), strict=True):
        assert count == len({name for each in requests for name in each.chain if each.seconds - start <= at})


def test_blocks_that_live_as_long_as_the_trace_are_all_that_were_seen() -> None:
    requests = [Request(0, 0, ("a", "ab")), Request(10, 0, ("a", "ac")), Request(40, 1, ("a", "ab"))]
    found = locality_of(built(requests)).working_set
    assert found.lifetimes_seconds[-1] == pytest.approx(40)
    # a and ab live 40 s, ac 30 s, of the 40 s that the trace takes.
    assert found.mean_blocks[-1] == pytest.approx((40 + 40 + 30) / 40)
    assert found.hit_share[-1] == pytest.approx(3 / 6)
    assert found.hit_share[0] == 0


@settings(max_examples=examples(150), deadline=None)
@given(histories())
def test_prefixes_are_valued_by_saved_tokens(requests: list[Request]) -> None:
    trace, model = built(requests), Model(requests)
    tree = valuable_prefixes(trace, most=100)
    assert tree.saved_tokens == 10 * model.saved.total()
    assert sum(node.saved_tokens for node in tree.nodes) == tree.saved_tokens
    for place, node in enumerate(tree.nodes):
        assert node.saved_tokens == 10 * node.blocks * node.reuses
        assert node.level == (tree.nodes[node.parent].level + 1 if node.parent >= 0 else 0)
        assert node.parent < place
        name = _names(requests)[node.first_block]
        users = [each for each in requests if name in each.chain]
        assert node.depth == len(name) - 1
        assert node.reuses == model.saved[name]
        assert node.sessions == len({each.session for each in users} - {-1})
        assert node.first_seconds == users[0].seconds - requests[0].seconds
        assert node.last_seconds == users[-1].seconds - requests[0].seconds
    siblings: dict[int, list[int]] = defaultdict(list)
    for node in tree.nodes:
        siblings[node.parent].append(node.saved_tokens)
    assert all(values == sorted(values, reverse=True) for values in siblings.values())


def _names(requests: Sequence[Request]) -> list[str]:
    return list(dict.fromkeys(name for each in requests for name in each.chain))


def test_a_system_prompt_is_one_node_and_brings_its_ancestors_along() -> None:
    system = tuple(f"s{number}" for number in range(50))
    tails = [(f"u{user}",) for user in range(4)]
    requests = [Request(user, user, system + tails[user % 4]) for user in range(8)]
    tree = valuable_prefixes(built(requests), most=2)
    assert [(node.blocks, node.reuses, node.level) for node in tree.nodes] == [(50, 7, 0), (1, 1, 1)]
    assert tree.saved_tokens == 50 * 7 * 10 + 4 * 10


def test_nothing_is_known_of_an_empty_distribution() -> None:
    nothing = distribution(np.zeros(0))
    assert (nothing.count, nothing.quantiles, nothing.values.tolist()) == (0, {}, [])


def test_many_values_are_drawn_by_few_points_whose_ends_are_exact() -> None:
    samples = np.arange(10_000.0) ** 2
    found = distribution(samples)
    assert len(found.values) <= 202
    assert (found.values[0], found.values[-1], found.shares[-1]) == (0.0, samples[-1], 1.0)
    assert found.quantiles[0.5] == samples[4999]
