"""Instances are spread over managers evenly, alike on all managers, and few move when a manager comes or goes."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.model.nodes import Endpoint
from kvcm.registry.assignment import Assignment, assign, rank

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=40, unique=True)
NODES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True)


@given(NAMES, NODES, st.randoms())
def test_the_order_in_which_names_are_known_changes_nothing(
    instances: list[str], nodes: list[str], random: object
) -> None:
    first = assign(instances, nodes)
    random.shuffle(instances), random.shuffle(nodes)  # type: ignore[attr-defined]
    assert assign(instances, nodes) == first
    assert first.keys() == set(instances)


@given(NAMES, NODES)
def test_no_manager_gets_more_than_its_share(instances: list[str], nodes: list[str]) -> None:
    loads = Counter(assign(instances, nodes).values())
    assert max(loads.values()) <= -(-11 * len(instances) // (10 * len(nodes)))


@given(st.text(), NODES, st.text(min_size=9, max_size=9))
def test_the_ranking_of_the_others_stays_when_a_manager_comes(instance: str, nodes: list[str], new: str) -> None:
    assert [each for each in rank(instance, [*nodes, new]) if each != new] == rank(instance, nodes)


@pytest.mark.parametrize(
    ("instances", "nodes", "most", "moved", "moved_by_registration"),
    [  # most instances of a manager beside the mean; share moved by a new manager, instances moved by a new one
        (20, 2, 1.10, 0.37, 0.5),
        (20, 3, 1.20, 0.31, 0.5),
        (20, 4, 1.20, 0.26, 0.6),
        (100, 4, 1.12, 0.23, 0.5),
        (2000, 3, 1.15, 0.27, 0.0),  # too many to balance: they fall evenly by themselves
    ],
)
def test_instances_are_spread_evenly_and_few_move(
    instances: int, nodes: int, most: float, moved: float, moved_by_registration: float
) -> None:
    """A manager that comes must get 1/(nodes + 1), so no assignment moves less than that on average."""
    loads, moves, moves_by_registration = [], [], []
    for deployment in range(40 if instances < 1000 else 3):
        names = [f"d{deployment}/model-{number}" for number in range(instances)]
        managers = [f"d{deployment}-manager-{number}" for number in range(nodes)]
        before = assign(names, managers)
        loads.append(max(Counter(before.values()).values()) * nodes / instances)
        after = assign(names, [*managers, f"d{deployment}-new"])  # read backwards, a manager that goes
        moves.append(sum(after[name] != before[name] for name in names) / instances)
        grown = assign([*names, "new"], managers)
        moves_by_registration.append(sum(grown[name] != before[name] for name in names))
    assert max(loads) <= most
    assert 1 / (nodes + 1) - 0.05 <= mean(moves) <= moved
    assert mean(moves_by_registration) <= moved_by_registration


def endpoint(node_id: str) -> Endpoint:
    return Endpoint(node_id, f"host-{node_id}", 1, 2, 3, 4)


def test_every_manager_names_the_same_one_and_only_others_hint_at_it() -> None:
    instances = dict.fromkeys(f"model-{number}" for number in range(20))
    views = {node_id: Assignment(node_id, instances) for node_id in "abc"}
    for view in views.values():
        view.set_managers(map(endpoint, "abc"))
    for instance in instances:
        orders = {tuple(each.node_id for each in view.managers_of(instance)) for view in views.values()}
        ((first, *rest),) = orders
        assert {first, *rest} == set("abc")
        hints = {node_id: view.other_manager(instance) for node_id, view in views.items()}
        assert hints == {node_id: None if node_id == first else endpoint(first) for node_id in "abc"}
    counts = views["a"].counts()
    assert counts is not None
    assert sorted(counts.values()) in ([6, 7, 7], [6, 6, 8], [5, 7, 8], [4, 8, 8])


def test_a_manager_alone_announces_nothing_and_one_that_leaves_names_the_others() -> None:
    view = Assignment("a", {"model": None})
    assert (view.managers_of("model"), view.other_manager("model")) == ((), None)  # before it knows of any
    view.set_managers([endpoint("a")])
    assert (view.managers_of("model"), view.other_manager("model")) == ((), None)
    view.set_managers([endpoint("b")])
    assert (list(view.managers_of("model")), view.other_manager("model")) == ([endpoint("b")], endpoint("b"))


def test_an_instance_that_is_registered_or_removed_counts_at_once() -> None:
    instances = dict.fromkeys(f"model-{number}" for number in range(9))
    view = Assignment("a", instances)
    view.set_managers(map(endpoint, "ab"))
    instances["new"] = None
    first = view.managers_of("new")[0]
    assert view.other_manager("new") == (None if first.node_id == "a" else first)
    assert first.node_id == assign(instances, "ab")["new"]
    del instances["model-0"], instances["model-1"]
    assert sum((view.counts() or {}).values()) == 8


def test_thousands_of_instances_are_not_counted() -> None:
    view = Assignment("a", dict.fromkeys(map(str, range(5000))))
    view.set_managers(map(endpoint, "ab"))
    assert view.counts() is None
    assert view.managers_of("7")[0].node_id == rank("7", "ab")[0]
