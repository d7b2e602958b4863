"""Health of a storage: a row of probes decides, never a single one, and what is down is not available."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.storage.backend import StorageSpace
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthRules, HealthState, Probe, ProbeEnd, StorageHealth

UP, DEGRADED, DOWN = HealthState.SH_UP, HealthState.SH_DEGRADED, HealthState.SH_DOWN
# One letter per probe: good, slow, unwritable, failed, late.
PROBES = {
    "g": Probe(ProbeEnd.ANSWERED, 0.1, space=StorageSpace(100, 40)),
    "s": Probe(ProbeEnd.ANSWERED, 3.0, space=StorageSpace(100, 39)),
    "u": Probe(ProbeEnd.UNWRITABLE, 0.1, "no space left"),
    "f": Probe(ProbeEnd.FAILED, 0.1, "it is gone"),
    "l": Probe(ProbeEnd.LATE, 5.0, "no answer"),
}
HISTORIES = st.text("gsufl", max_size=30) | st.text("gf", max_size=30)
RULES = st.builds(HealthRules, down_after=st.integers(2, 5), up_after=st.integers(2, 4))


def states(history: Iterable[str], rules: HealthRules) -> list[StorageHealth]:
    """The health before the first probe and after each, one a second."""
    healths = [StorageHealth()]
    for second, letter in enumerate(history, start=1):
        healths.append(healths[-1].after(PROBES[letter], float(second), rules))
    return healths


def expected(history: str, rules: HealthRules) -> HealthState:
    """The rules once more, as patterns over the whole history."""
    down, up = rules.down_after, rules.up_after
    if re.search(f"[fl]{{{down}}}(?!.*[gsu]{{{up}}})", history):
        return DOWN
    return UP if re.fullmatch(f"g*|.*g{{{up}}}", history) else DEGRADED


@given(HISTORIES, RULES)
@example("fff" + "g", HealthRules())
@example("fff" + "ggf", HealthRules())
@example("fff" + "ss", HealthRules())
def test_the_state_follows_from_the_history(history: str, rules: HealthRules) -> None:
    assert states(history, rules)[-1].state is expected(history, rules)


@given(HISTORIES, RULES)
def test_a_single_failure_takes_nothing_down_and_a_single_answer_brings_nothing_back(
    history: str, rules: HealthRules
) -> None:
    healths = states(history, rules)
    for at in range(1, len(history)):
        before, after, pair = healths[at], healths[at + 1], history[at - 1 : at + 1]
        if pair[0] in "gsu":
            assert after.is_usable or not before.is_usable, f"{pair} took it down"
        if pair[0] in "fl":
            assert before.is_usable or not after.is_usable, f"{pair} brought it back"


@given(HISTORIES, RULES, st.data())
def test_whatever_was_before_failures_in_a_row_take_it_down_and_answers_in_a_row_bring_it_back(
    history: str, rules: HealthRules, data: st.DataObject
) -> None:
    failures = data.draw(st.text("fl", min_size=rules.down_after, max_size=rules.down_after))
    answers = data.draw(st.text("gsu", min_size=rules.up_after, max_size=rules.up_after))
    assert states(history + failures, rules)[-1].state is DOWN
    assert states(history + failures + answers, rules)[-1].is_usable
    assert states(history + failures + "g" * rules.up_after, rules)[-1].state is UP


@given(st.text("gsu", max_size=30), RULES)
def test_a_storage_that_answers_is_used_however_slow_or_full(history: str, rules: HealthRules) -> None:
    assert all(health.is_usable for health in states(history, rules))


@given(st.text("gsufl", min_size=1, max_size=30), RULES)
def test_since_when_and_why_go_with_the_state(history: str, rules: HealthRules) -> None:
    healths = states(history, rules)
    for second, (before, after) in enumerate(pairwise(healths), start=1):
        changed = after.state is not before.state or second == 1
        assert after.since == (second if changed else before.since)
        assert (after.reason == "") is (after.state is UP)
    assert healths[-1].failed_probes == sum(letter in "ufl" for letter in history)
    assert healths[-1].probe_seconds == PROBES[history[-1]].seconds
    spaces = [PROBES[letter].space for letter in history if letter in "gs"]
    assert healths[-1].space == (spaces[-1] if spaces else None)


@given(HISTORIES, RULES)
def test_whether_it_takes_bytes_is_what_the_last_answer_said(history: str, rules: HealthRules) -> None:
    answers = [letter for letter in history if letter in "gsu"]
    assert states(history, rules)[-1].is_unwritable is (answers[-1:] == ["u"])


def test_the_reason_is_the_last_thing_that_was_wrong() -> None:
    reasons = [health.reason for health in states("fflggsgg", HealthRules())]
    slow = "slow: it took 3.0 s to answer"
    assert reasons == ["", "it is gone", "it is gone", "no answer", "no answer", "", slow, slow, ""]


# In the directory.

DUMMY = StorageConfig("d", DummyStorageSpec())
IS_DOWN = StorageHealth(DOWN, "it is gone")


@pytest.fixture
def directory() -> StorageDirectory:
    opened = StorageDirectory("cluster")
    opened.open(DUMMY)
    return opened


def test_what_is_down_is_open_and_not_available(directory: StorageDirectory) -> None:
    """Deletions go on trying it."""
    rank = directory.rank("d")
    directory.set_health("d", IS_DOWN)
    assert (directory.rank("d"), directory.backend("d") is not None, directory.health("d")) == (None, True, IS_DOWN)
    directory.set_health("d", StorageHealth(DEGRADED, "slow"))
    assert directory.rank("d") == rank is not None


def test_only_a_change_of_what_is_available_is_a_new_generation(directory: StorageDirectory) -> None:
    """Every new generation empties the search caches."""
    generations = [directory.generation]
    for health in (StorageHealth(DEGRADED, "slow"), StorageHealth(UP), IS_DOWN, IS_DOWN, StorageHealth(UP)):
        directory.set_health("d", health)
        generations.append(directory.generation)
    first = generations[0]
    assert generations == [first, first, first, first + 1, first + 1, first + 2]


def test_what_is_down_or_disabled_is_available_again_only_when_it_is_neither(directory: StorageDirectory) -> None:
    directory.set_health("d", IS_DOWN)
    directory.set_enabled("d", enabled=False)
    directory.set_enabled("d", enabled=True)
    assert directory.rank("d") is None
    directory.set_enabled("d", enabled=False)
    directory.set_health("d", StorageHealth())
    assert directory.rank("d") is None
    directory.set_enabled("d", enabled=True)
    assert directory.rank("d") is not None


@pytest.mark.parametrize("closes", [False, True], ids=["replaced", "opened again"])
def test_another_medium_of_that_name_begins_as_up(directory: StorageDirectory, *, closes: bool) -> None:
    directory.set_health("d", IS_DOWN)
    if closes:
        directory.close("d")
        assert directory.health("d") is None
    directory.open(DUMMY)
    assert directory.health("d") == StorageHealth()
    assert directory.rank("d") is not None
