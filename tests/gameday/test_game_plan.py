"""Plans follow from their seed, leave quiet, and never let two faults of one window be about the same thing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from game_figures import Window, merged
from game_network import HOSTS
from game_plan import KINDS, LEAST_QUIET, Step, hosts_of, made, parts_of
from game_storages import KEYS_PER_FILE
from hypothesis import given
from hypothesis import strategies as st

GAME = Path(__file__).parents[2] / "benchmarks/gameday.py"
SEEDS = st.integers(0, 2**32)
SECONDS = st.floats(60.0, 3600.0)


def _windows(steps: list[Step]) -> list[Window]:
    return [Window(each.number, each.kind, each.at, each.at + each.seconds, each.recovery_seconds) for each in steps]


@given(SEEDS, SECONDS)
def test_a_plan_is_a_function_of_its_seed(seed: int, seconds: float) -> None:
    assert made(seed, seconds) == made(seed, seconds)


def test_other_seeds_make_other_plans() -> None:
    assert len({tuple(made(seed, 120.0)) for seed in range(20)}) == 20


@given(SEEDS, SECONDS)
def test_enough_of_the_time_is_quiet(seed: int, seconds: float) -> None:
    steps = made(seed, seconds)
    covered = sum(end - begin for begin, end in merged(_windows(steps)))
    assert steps
    assert covered <= (1 - LEAST_QUIET) * seconds
    assert all(step.at > 0 and step.until < seconds for step in steps)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert all(before.at <= after.at for before, after in itertools.pairwise(steps))


@given(SEEDS, SECONDS)
def test_faults_that_overlap_are_about_different_things(seed: int, seconds: float) -> None:
    steps = made(seed, seconds)
    for one in steps:
        for other in steps:
            if one.number < other.number and other.at < one.until:
                assert not parts_of(one.target) & parts_of(other.target), (one, other)


def test_some_faults_overlap() -> None:
    steps = [made(seed, 600.0) for seed in range(5)]
    assert any(after.at < before.at + before.seconds for plan in steps for before, after in itertools.pairwise(plan))


@given(SEEDS)
def test_every_kind_comes_before_one_comes_again(seed: int) -> None:
    steps = made(seed, 3600.0)
    firsts = {step.kind for step in steps[: len(KINDS) + 3]}  # in a window the second may be drawn, and moved, later
    assert firsts == {kind.name for kind in KINDS}


@given(SEEDS, st.sets(st.sampled_from(["fuse", "loss"])))
def test_what_a_machine_lacks_does_not_come(seed: int, lacks: set[str]) -> None:
    needs = {kind.name: kind.needs for kind in KINDS}
    assert not {needs[step.kind] for step in made(seed, 1200.0, frozenset(lacks))} & lacks


@pytest.mark.parametrize("minutes", ["0", "0.5", "nan", "inf", "2000"])
def test_a_game_that_is_too_short_or_too_long_is_refused(minutes: str) -> None:
    command = [sys.executable, str(GAME), "--plan", "--minutes", minutes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"argument --minutes: {minutes}, allowed are 1 to 1440" in done.stderr


def test_every_target_is_there() -> None:
    known = {*HOSTS, *KEYS_PER_FILE, "all"}
    for kind in KINDS:
        for target in kind.targets:
            sides = target.replace(">", "=").split("=")
            assert {part for side in sides for part in hosts_of(side)} <= known, target


def test_the_document_states_each_recovery() -> None:
    text = (Path(__file__).parents[2] / "docs/gameday/index.md").read_text()
    for kind in KINDS:
        lasts = f"{kind.seconds[0]:g} to {kind.seconds[1]:g} s"
        assert f"| {kind.name} | {lasts} | {kind.recovery_seconds:g} s | {kind.why} |" in text
