"""Availability counts what is outside of windows, recovery what comes after a fault."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from game_figures import Sample, Window, availability, hit_rate, merged, recovery_seconds
from game_lines import Lines, read_lines
from game_prompts import TURNS, prompt
from game_watch import Look, whole_since

WINDOWS = [Window(1, "store killed", 10.0, 12.0, 3.0), Window(2, "disk full", 14.0, 20.0, 2.0)]


def _call(at: float, *, is_good: bool = False, seconds: float = 0.1) -> Sample:
    return Sample(at, seconds, is_good, "match", "")


def test_windows_that_overlap_are_one() -> None:
    assert merged(WINDOWS) == [(10.0, 22.0)]
    assert merged([*WINDOWS, Window(3, "x", 30.0, 31.0, 1.0)]) == [(10.0, 22.0), (30.0, 32.0)]


def test_a_failure_outside_of_windows_counts() -> None:
    samples = [_call(1.0, is_good=True), _call(2.0), _call(11.0), _call(21.0, is_good=True), _call(23.0, is_good=True)]
    outside, inside = availability(samples, WINDOWS)
    assert (outside.good, outside.bad, inside.good, inside.bad) == (2, 1, 1, 1)
    assert outside.percent == pytest.approx(200 / 3)
    assert outside.examples == (samples[1],)


def test_a_call_that_a_fault_interrupts_is_inside() -> None:
    outside, inside = availability([_call(9.5, seconds=1.0)], WINDOWS)
    assert (outside.bad, inside.bad) == (0, 1)


def test_a_recovery_that_takes_longer_than_stated_is_seen() -> None:
    window = WINDOWS[0]
    assert recovery_seconds([_call(13.0), _call(11.0)], [window], window) == pytest.approx(1.1)
    assert recovery_seconds([_call(14.5, seconds=1.0)], [window], window) == pytest.approx(3.5)
    assert recovery_seconds([_call(14.5, seconds=1.0)], WINDOWS, window) == 0.0  # the other fault's, perhaps


def test_managers_are_whole_when_all_are_ready_and_agree() -> None:
    looks = [
        Look(1.0, "a", True, "a"),
        Look(2.0, "b", True, "b"),
        Look(3.0, "a", True, "b"),
        Look(4.0, "b", False, "b"),
    ]
    assert whole_since(looks, 0.0, ("a", "b")) == 3.0
    assert whole_since(looks, 2.5, ("a", "b")) is None
    assert whole_since(looks, 0.0, ("a", "b", "c")) is None


def test_hits_are_counted_in_tokens() -> None:
    assert hit_rate([{"loaded_tokens": 30, "prompt_tokens": 40}, {"raised": "x"}, {"prompt_tokens": 20}]) == 50.0


def test_a_turn_begins_with_the_one_before() -> None:
    turns = [prompt(5, turn) for turn in range(TURNS)]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(turns))
    assert prompt(1, 0)[:128] == prompt(5, 0)[:128]
    assert prompt(1, 0) != prompt(5, 0)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Lines(path)
    lines.add({"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": ')
    assert list(read_lines(path)) == [{"a": 1}]
