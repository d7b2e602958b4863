"""Whatever is wrong at the end of a game is told of: each look is fed something that must not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from game_checks import EndState, judge_end, judge_prompts

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
        ("other than one leader", {"agreed": ""}),
        ("tasks", {"tasks": ["drain"]}),
        ("groups", {"usage": {"steady": 6}}),
        ("groups", {"instances": {"steady": 6}}),
        ("groups", {"recounted": {}}),
        ("groups", {"usage": {}}),
        ("groups", {"usage": {"other": 0}}),
        ("findings", {"verify": ["usage"]}),
        ("failures", {"doctor": ["m1: clock"]}),
        ("bytes without metadata", {"orphans": ["disk_a: 1 objects"]}),
        ("defects", {"failures": ["Traceback"]}),
        ("processes", {"stopped": ["e1 ended"]}),
        ("faults", {"faults": ["step 1"]}),
    ],
)
def test_what_is_wrong_is_told(what: str, changes: dict[str, Any]) -> None:
    told = {name for name, texts in judge_end(replace(GOOD, **changes)).items() if texts}
    assert len(told) == 1
    assert told.pop().startswith(what)


def _answer(**changes: Any) -> dict[str, Any]:
    return {"engine": "e1", "prompt": "0/0", "at": 1.0, "is_right": True, "loaded_tokens": 16, **changes}


def test_wrong_tokens_and_exceptions_are_told() -> None:
    wrong, raised = judge_prompts([_answer(), _answer(is_right=False), _answer(raised="OSError()")]).values()
    assert (len(wrong), len(raised)) == (1, 1)
