"""A process that ended by itself is not taken for one that the game ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from game_network import Network
from game_processes import GameProcess, waited_for

_WAIT_SECONDS = 30.0
_WHAT = {
    "kill": GameProcess.kill,
    "stop": GameProcess.stop,
    "freeze": GameProcess.freeze,
    "thaw": GameProcess.thaw,
}


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


def test_a_process_that_does_not_end_when_it_is_told_to_is_killed(tmp_path: Path) -> None:
    process = _process(tmp_path, "trap '' TERM; touch ready; while :; do sleep 0.05; done")
    assert waited_for((tmp_path / "ready").exists, _WAIT_SECONDS)
    assert process.stop(0.2) == -9
    assert not process.is_running
