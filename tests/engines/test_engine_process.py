"""Tests see what an engine does, and above all how it fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kinds import EngineKind
from engine_process import EngineDiedError, EngineProcess, EngineRefusedError, EngineTimeoutError, start_engine

_KIND = EngineKind("scripted", Path(sys.executable), "scripted_engine.py")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    with start_engine(_KIND, tmp_path, tmp_path / "log") as running:
        yield running


def wait_until_ended(pid: int) -> None:
    """The system ends a process some time after it was told to."""
    deadline = time.monotonic() + 10
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, or is only still listed since nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_answers_come_through_whatever_is_printed(engine: EngineProcess) -> None:
    assert engine.started["version"] == "1"
    assert [answer.tokens for answer in engine.generate([[1, 5], [7]], 2)] == [[6, 7], [8, 9]]
    assert len(engine.ask("long", length=1 << 20)) == 1 << 20
    assert "not an answer" in engine.printed()


def test_answers_keep_the_order_of_commands(engine: EngineProcess) -> None:
    engine.tell("long", length=1)
    engine.tell("long", length=2)
    assert [engine.answer(), engine.answer()] == ["x", "xx"]


def test_what_is_raised_is_told_and_the_engine_goes_on(engine: EngineProcess) -> None:
    with pytest.raises(EngineRefusedError, match="unexpected keyword argument 'colour'"):
        engine.ask("long", colour="red")
    with pytest.raises(EngineRefusedError, match="_children is no command"):
        engine.ask("_children")
    assert engine.ask("long", length=1) == "x"


def test_a_late_answer_is_an_error_with_the_end_of_what_was_printed(engine: EngineProcess) -> None:
    with pytest.raises(EngineTimeoutError, match=r"(?s)did not answer in 0\.2 s.*starting with"):
        engine.ask("wait", seconds=0.2, pause_seconds=60)
    engine.kill()


def test_a_crash_is_told_with_its_exit_code(engine: EngineProcess) -> None:
    with pytest.raises(EngineDiedError, match=r"(?s)exit code -11.*starting with"):
        engine.ask("crash")
    with pytest.raises(EngineDiedError):
        engine.ask("long", length=1)


def test_a_killed_engine_takes_its_children_along(engine: EngineProcess) -> None:
    child = engine.ask("start_child")
    assert not has_ended(child)
    engine.kill()
    wait_until_ended(child)
    assert engine.process.returncode == -9


def test_closing_lets_it_shut_down_and_ends_what_it_leaves(engine: EngineProcess) -> None:
    child = engine.ask("start_child")
    engine.close()
    assert engine.printed().endswith("closed\n")
    assert engine.process.returncode == 0
    wait_until_ended(child)


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineRefusedError, match="ValueError: no room"):
        start_engine(_KIND, tmp_path, tmp_path / "log", fails="no room")


def test_what_was_printed_can_be_waited_for(engine: EngineProcess) -> None:
    engine.tell("generate", prompts=[[1]], max_tokens=1)
    engine.wait_until_said("not an answer")
    with pytest.raises(EngineTimeoutError, match="did not print 'nothing of the kind'"):
        engine.wait_until_said("nothing of the kind", seconds=0.1)
