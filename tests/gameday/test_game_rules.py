"""The game day: its plan, ledger, figures, processes and end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from game_checks import EndState, judge_end, judge_prompts
from game_figures import Sample, Window, availability, merged, recovery_seconds
from game_ledger import Found, Judgement, blocks_of, gone_of, judged
from game_network import Network
from game_plan import KINDS, LEAST_QUIET, Step, made, parts_of
from game_processes import GameProcess, waited_for
from game_storages import Spoiled
from game_watch import Observation, whole_since
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32)
SECONDS = st.floats(60.0, 3600.0)


def _windows(steps: list[Step]) -> list[Window]:
    return [Window(each.number, each.kind, each.at, each.at + each.seconds, each.recovery_seconds) for each in steps]


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


@given(SEEDS)
def test_every_kind_comes_before_one_comes_again(seed: int) -> None:
    steps = made(seed, 3600.0)
    firsts = {step.kind for step in steps[: len(KINDS) + 3]}  # in a window the second may be drawn, and moved, later
    assert firsts == {kind.name for kind in KINDS}


@given(SEEDS, st.sets(st.sampled_from(["fuse", "loss"])))
def test_faults_that_a_machine_cannot_inject_are_left_out(seed: int, lacks: set[str]) -> None:
    needs = {kind.name: kind.needs for kind in KINDS}
    assert not {needs[step.kind] for step in made(seed, 1200.0, frozenset(lacks))} & lacks


def test_the_document_states_each_recovery() -> None:
    text = (Path(__file__).parents[2] / "docs/gameday/index.md").read_text()
    for kind in KINDS:
        lasts = f"{kind.seconds[0]:g} to {kind.seconds[1]:g} s"
        assert f"| {kind.name} | {lasts} | {kind.recovery_seconds:g} s | {kind.why} |" in text


EVICTING = frozenset({"churning"})
PLACE = "/mnt/a/game/steady/tp0/00_4xab.cd"


def _uri(slot: int) -> str:
    return f"file://disk_a{PLACE}?blkid={slot}&size=100"


def _line(
    key: int = 1, slot: int = 0, instance: str = "steady", checksum: int = 77, at: float = 10.0
) -> dict[str, Any]:
    return {"instance": instance, "key": key, "parts": {"tp0": [_uri(slot), checksum]}, "at": at}


def _event(kind: str, reason: str, at: float = 11.0, instance: str = "steady") -> dict[str, Any]:
    return {"type": kind, "reason": reason, "source": instance, "keys": [1], "trigger_time_us": int(at * 1e6)}


def _judge(
    *lines: dict[str, Any],
    found: dict[tuple[str, int], Found] | None = None,
    events: Sequence[dict[str, Any]] = (),
    spoiled: Spoiled | None = None,
    kills: Sequence[float] = (),
) -> Judgement:
    damage = spoiled or Spoiled()
    return judged(
        blocks_of(lines).values(),
        found or {},
        gone_of(events),
        lambda uri: damage.touches(uri.path, uri.offset, uri.size),
        EVICTING,
        kills,
    )


EVICTED = _event("evicted", "group", instance="churning")
STAYS, GOES = _line(), _line(instance="churning")
AGAIN = [GOES, _line(slot=1, instance="churning", at=20.0)]


@pytest.mark.parametrize(
    ("lines", "events", "kills", "expected"),
    [
        ([STAYS], [], [], "no manager reported why"),
        ([STAYS], [_event("removed", "missing")], [], "missing"),
        ([STAYS], [_event("removed", "corrupt")], [], "corrupt"),
        ([STAYS], [_event("removed", "RemoveCache")], [], "RemoveCache"),
        ([STAYS], [_event("evicted", "group")], [], ""),  # its instance is never full
        ([STAYS], [], [30.0], ""),
        ([GOES], [EVICTED | {"trigger_time_us": 7_000_000}], [], ""),  # before it was written
        ([GOES], [_event("expired", "session", instance="churning")], [], ""),
        ([GOES], [_event("removed", "missing", instance="churning")], [30.0], "missing"),
        (AGAIN, [EVICTED], [], ""),  # it was written again after that
        ([GOES], [], [], ""),
        ([GOES], [], [7.0], ""),  # a manager was killed before it was written
    ],
)
def test_a_block_that_is_gone_without_a_good_reason_is_lost(
    lines: list[dict[str, Any]], events: list[dict[str, Any]], kills: list[float], expected: str
) -> None:
    (text,) = _judge(*lines, events=events, kills=kills).lost
    assert expected in text


def test_a_block_that_no_manager_answers_for_is_lost_even_where_blocks_are_evicted() -> None:
    (text,) = _judge(GOES, found={("churning", 1): Found({}, "no manager answers")}, kills=[30.0]).lost
    assert "no manager answers" in text


def test_a_block_that_was_evicted_is_not_lost() -> None:
    assert _judge(GOES, events=[EVICTED]) == Judgement(evicted=1)
    later = _event("evicted", "group", at=21.0, instance="churning")
    assert _judge(*AGAIN, events=[EVICTED, later]).evicted == 1
    untold = _judge(GOES, kills=[7.0, 30.0])
    assert (len(untold.untold), untold.lost, untold.evicted) == (1, [], 0)


def test_the_bytes_of_a_block_are_compared() -> None:
    assert _judge(STAYS, found={("steady", 1): Found({"tp0": (_uri(0), 77)})}) == Judgement(served=1)
    assert _judge(STAYS, found={("steady", 1): Found({"tp0": (_uri(0), 78)})}).wrong
    (text,) = _judge(STAYS, found={("steady", 1): Found({"tp0": (_uri(0), None)}, "no such file")}).wrong
    assert "no such file" in text
    # At a place that was never acknowledged: its writer got no answer, and the manager compares them with its own.
    assert _judge(STAYS, found={("steady", 1): Found({"tp0": (_uri(3), 5)})}) == Judgement(served=1)


def test_damage_by_the_game_explains_damaged_slots_only() -> None:
    damage = Spoiled()
    damage.add(PLACE, 150, 151)  # slot 1
    there = {("steady", 1): Found({"tp0": (_uri(1), 5)})}
    assert _judge(_line(slot=1), spoiled=damage) == Judgement(spoiled=1)
    assert _judge(_line(slot=1), found=there, spoiled=damage) == Judgement(spoiled=1)
    assert _judge(_line(slot=0), spoiled=damage).lost
    assert _judge(_line(slot=2), spoiled=damage).lost


def test_damage_of_one_part_explains_no_other_bytes_in_another() -> None:
    damage = Spoiled()
    damage.add(PLACE, 0, 1)  # slot 0
    parts = {"tp0": [_uri(0), 77], "tp1": [_uri(1), 88]}
    found = {"tp0": (_uri(0), 5), "tp1": (_uri(1), 6)}
    assert _judge(_line() | {"parts": parts}, found={("steady", 1): Found(found)}, spoiled=damage).wrong
    found["tp1"] = (_uri(1), 88)
    assert _judge(_line() | {"parts": parts}, found={("steady", 1): Found(found)}, spoiled=damage).spoiled == 1


def test_a_block_with_an_undamaged_copy_is_lost_when_it_is_gone() -> None:
    damage = Spoiled()
    damage.add(PLACE, 0, 1)
    assert _judge(_line(slot=0), _line(slot=1), spoiled=damage).lost
    assert _judge(_line(slot=0), _line(slot=0), spoiled=damage) == Judgement(spoiled=1)


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
    observations = [
        Observation(1.0, "a", True, "a"),
        Observation(2.0, "b", True, "b"),
        Observation(3.0, "a", True, "b"),
        Observation(4.0, "b", False, "b"),
    ]
    assert whole_since(observations, 0.0, ("a", "b")) == 3.0
    assert whole_since(observations, 2.5, ("a", "b")) is None
    assert whole_since(observations, 0.0, ("a", "b", "c")) is None


_WAIT_SECONDS = 30.0
_WHAT = {"kill": GameProcess.kill, "stop": GameProcess.stop, "freeze": GameProcess.freeze, "thaw": GameProcess.thaw}


def _process(folder: Path, script: str) -> GameProcess:
    process = GameProcess(Network(""), "root", ["sh", "-c", script], folder)
    process.start()
    return process


@pytest.mark.parametrize("what", _WHAT.values(), ids=_WHAT)
def test_nothing_is_done_to_a_process_that_is_not_there(what: Callable[[GameProcess], object], tmp_path: Path) -> None:
    process = _process(tmp_path, "exit 3")
    assert waited_for(lambda: not process.is_running, _WAIT_SECONDS)
    with pytest.raises(ProcessLookupError, match="root is not there, it ended with 3"):
        what(process)


GOOD = EndState(
    settled_seconds=1.0,
    ready=["m1", "m2", "m3"],
    leaders=["m2"],
    agreed="m2",
    usage={"steady": 5},
    instances={"steady": 5},
    recounted={"steady": 5},
)


def test_nothing_is_wrong_with_a_good_end() -> None:
    judged = judge_end(GOOD)
    assert not any(judged.values())
    assert len(judged) == 11


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("sessions", {"settled_seconds": None, "unsettled": ["1 sessions are open"]}),
        ("managers that are not ready", {"ready": ["m1", "m3"]}),
        ("other than one leader", {"leaders": []}),
        ("other than one leader", {"leaders": ["m1", "m2"]}),
        ("other than one leader", {"agreed": "m3"}),
        ("tasks", {"tasks": ["drain"]}),
        ("groups", {"usage": {"steady": 6}}),
        ("groups", {"instances": {"steady": 6}}),
        ("groups", {"usage": {}}),
        ("findings", {"verify": ["usage"]}),
        ("failures", {"doctor": ["m1: clock"]}),
        ("bytes without metadata", {"orphans": ["disk_a: 1 objects"]}),
        ("defects", {"failures": ["Traceback"]}),
        ("processes", {"stopped": ["e1 ended"]}),
        ("faults", {"faults": ["step 1"]}),
    ],
)
def test_faults_are_reported(what: str, changes: dict[str, Any]) -> None:
    reported = {name for name, texts in judge_end(replace(GOOD, **changes)).items() if texts}
    assert len(reported) == 1
    assert reported.pop().startswith(what)


def _answer(**changes: Any) -> dict[str, Any]:
    return {"engine": "e1", "prompt": "0/0", "at": 1.0, "is_right": True, "loaded_tokens": 16, **changes}


def test_wrong_tokens_and_exceptions_are_reported() -> None:
    wrong, raised = judge_prompts([_answer(), _answer(is_right=False), _answer(raised="OSError()")]).values()
    assert (len(wrong), len(raised)) == (1, 1)
