"""Curves, sessions and reports of tasks as they are shown."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcm.console.views.curves import curve_of
from kvcm.console.views.sessions import sessions_of
from kvcm.console.views.tasks import outcome_of

GIB = 1 << 30


def curve(
    kept: int = 4 * GIB, points: tuple[tuple[int, float], ...] = ((GIB, 0.2), (4 * GIB, 0.5), (8 * GIB, 0.8))
) -> Any:
    ratio = max((found for size, found in points if size <= kept), default=0.0)
    attainable = points[-1][1] if points else 0.0
    return {
        "since_ms": 1, "lookups": 100, "sampled_keys": 10, "attainable_ratio": attainable,
        "points": [{"bytes": size, "hit_ratio": found} for size, found in points],
        "targets": [{"part": part, "hit_ratio": part, "bytes": int(8 * GIB * part)} for part in (0.4, 0.9)],
        "present": {"quota_bytes": 5 * GIB, "kept_bytes": kept, "used_bytes": GIB, "predicted_ratio": ratio},
    }  # fmt: skip


def test_what_more_and_less_capacity_gives() -> None:
    view = curve_of(curve())
    assert [(change.bytes // GIB, change.ratio, round(change.gain, 3)) for change in view.changes] == [
        *[(1, 0.2, -0.3), (2, 0.2, -0.3), (4, 0.5, 0), (8, 0.8, 0.3), (16, 0.8, 0.3)]
    ]
    assert [change.is_present for change in view.changes] == [False, False, True, False, False]
    assert [missing for _, missing in view.targets] == [0, int(8 * GIB * 0.9) - 4 * GIB]
    assert view.headline == (
        "With 4.0 GiB the group finds 50.0 % of the blocks asked for; a cache of any size would find 80.0 %."
    )
    assert curve_of(curve(8 * GIB)).headline.startswith("The group has what it needs: 80.0 %")


def test_the_drawing_has_the_curve_and_where_the_group_stands() -> None:
    drawing = str(curve_of(curve()).drawing)
    assert "now: 4.0 GiB" in drawing
    assert "<title>Hit rate by capacity. With 4.0 GiB" in drawing
    places = [float(number) for number in re.findall(r"[HVM ](-?\d+(?:\.\d+)?)", drawing)]
    assert min(places) >= 0
    assert max(places) <= 640
    (steps,) = re.findall(r'class="line c0" d="([^"]*)"', drawing)
    heights = [float(number) for number in re.findall(r"V([\d.]+)", steps)]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("kept", [0, 1, 1 << 62])
def test_any_capacity_can_be_drawn(kept: int) -> None:
    assert "now: " in str(curve_of(curve(kept)).drawing)


def test_without_anything_that_was_asked_for_twice_there_is_nothing_to_draw() -> None:
    view = curve_of({**curve(points=()), "targets": []})
    assert (str(view.drawing), "asked for twice" in view.headline) == ("", True)


def test_sessions_are_summed_up() -> None:
    items = [
        {"blocks": 3, "bytes": 30, "is_overdue": True, "begun_at_ms": 50},
        {"blocks": 2, "bytes": 20, "is_overdue": False, "begun_at_ms": 0},
    ]
    found = sessions_of(items)
    assert (found.blocks, found.bytes, found.overdue, found.oldest_ms) == (5, 50, 1, 50)
    assert sessions_of([]).oldest_ms == 0


def garbage(**report: int) -> Any:
    found = {"blocks": 900, "without_bytes": 0, "without_prefix": 0, "expired_sessions": 0, "freed_bytes": 0}
    return {"kind": "collect_garbage", "report": {**found, **report}}


def scrub(**report: int) -> Any:
    found = dict.fromkeys(("objects", "bytes", "orphans", "orphan_bytes", "too_young", "deleted", "failed"), 0)
    return {"kind": "scrub", "report": {**found, **report}}


def test_a_look_that_found_something_can_be_followed_by_the_deed() -> None:
    look = outcome_of(garbage(without_prefix=3, freed_bytes=3 << 20), is_dry=True)
    assert (look.headline, look.has_work) == ("3 of them, 3.0 MiB, would be freed; nothing was changed.", True)
    done = outcome_of(garbage(without_prefix=3, freed_bytes=3 << 20), is_dry=False)
    assert (done.headline, done.has_work) == ("3 of them, 3.0 MiB, were freed.", False)
    assert ("Blocks whose prefix is gone", "3") in done.rows
    assert outcome_of(garbage(), is_dry=True).headline == "There is nothing to free."
    orphans = outcome_of(scrub(objects=9, orphans=4, too_young=1, orphan_bytes=1024), is_dry=True)
    assert (orphans.headline, orphans.has_work) == ("3 of them, 1.0 KiB, would be freed; nothing was changed.", True)
    assert not outcome_of(scrub(orphans=1, too_young=1), is_dry=True).has_work
    assert outcome_of(scrub(orphans=4, deleted=4, orphan_bytes=1024), is_dry=False).headline.endswith("were freed.")
