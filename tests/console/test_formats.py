"""Numbers, sizes, times and charts, as browsers get them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
from history_documents import history
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.console import formats
from kvcm.console.charts import chart, sparkline
from kvcm.console.deployment import History, charts_of_all, charts_of_group
from kvcm.console.pages.overview import tiles


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (formats.size, {None: "–", -1: "no limit", 0: "0 B", 1536: "1.5 KiB", 3 << 40: "3.0 TiB"}),
        (formats.percent, {None: "–", 0: "0.0 %", 0.98234: "98.2 %", 0.99999: "99.9 %", 1: "100.0 %", 1.2: "120.0 %"}),
        (formats.duration, {None: "–", 0.00004: "40 µs", 0.0032: "3.2 ms", 0.5: "500 ms", 12: "12 s", 300: "5 min"}),
        (formats.duration, {7500: "2 h 5 min", 3 * 86400: "3 days"}),
        (formats.rate, {None: "–", 0: "0/s", 0.25: "0.25/s", 12.4: "12/s", 1250: "1,250/s"}),
    ],
)
def test_values_are_shown_in_their_unit(shown: Callable[[Any], str], texts: dict[float | None, str]) -> None:
    assert {value: shown(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("at_ms", "shown"), [(0, "–"), (None, "–"), (1_000_000, "now"), (990_000, "10 s ago"), (1_005_000, "in 5 s")]
)
def test_when_something_was_or_will_be(at_ms: float | None, shown: str) -> None:
    assert formats.ago(at_ms, 1_000_400 if at_ms == 1_000_000 else 1_000_000) == shown


_HOSTILE = "<script>alert(1)</script>"


def paths(document: str, kind: str) -> list[str]:
    """Return the drawn paths of a kind."""
    found = ET.fromstring(document).iter("path")
    return [path.attrib["d"] for path in found if path.attrib["class"].startswith(kind)]


@example([5e-324, 0.0])
@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.none() | st.floats(0, 1e15), min_size=2, max_size=40))
def test_every_value_is_drawn_inside_the_axes_and_gaps_are_gaps(values: list[float | None]) -> None:
    document = str(chart("traffic", [("match", values)], 1_000_000, 10, formats.count))
    points = [point for path in paths(document, "line") for point in path[1:].removesuffix("h0.1").split(" L")]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        assert "Nothing was measured yet" in document
        return
    assert len(points) == len(known)
    assert len(paths(document, "line")) == sum(
        value is not None and (place == 0 or values[place - 1] is None) for place, value in enumerate(values)
    )
    for point in points:
        x, y = map(float, point.split())
        assert 24 <= x <= 632
        assert 9.9 <= y <= 156.1


def test_names_are_escaped() -> None:
    document = str(chart(_HOSTILE, [(_HOSTILE, [1, 2])], 0, 1, str)) + str(sparkline([1, None, 3], _HOSTILE))
    assert _HOSTILE not in document
    assert "&lt;script&gt;" in document


def test_figures_stand_behind_the_lines_the_latest_first() -> None:
    document = str(chart("hits", [("a", [0.5, None, 0.25])], 3_600_000, 60, formats.percent))
    assert (
        document.index("01:00:00</th><td>25.0 %") < document.index("00:59:00</th><td>–") < document.index("50.0 %</td>")
    )


def test_a_line_of_which_nothing_is_known_stands_beside_others() -> None:
    document = str(chart("trouble", [("refused", ()), ("errors", [1.0, None, 2.0])], 3_600_000, 60, formats.count))
    assert len(paths(document, "line")) == 2
    (figures,) = list(ET.fromstring(document).iter("tbody"))
    assert [cell.text for cell in figures.iter("td")] == ["–", "2", "–", "–", "–", "1"]


_REQUESTS = [("requests_per_second", method) for method in ("match", "start", "finish", "other")]
_OF_ALL = [*_REQUESTS, ("errors_per_second",), ("match_p50_seconds",), ("match_p99_seconds",)]
_OF_GROUP = [
    ("used_bytes", "chat", "file"),
    *(("lookup_keys_per_second", "chat", outcome) for outcome in ("hit", "miss")),
    *((f"{name}_per_second", "chat") for name in ("evicted_bytes", "refused_writes")),
    *((name, "chat") for name in ("hit_ratio", "quota_bytes")),
]
_EVERYTHING = [*_OF_ALL, *_OF_GROUP]


@pytest.mark.parametrize("known", [_OF_ALL, _OF_GROUP, *([each] for each in _EVERYTHING), _EVERYTHING, []])
def test_whatever_is_known_is_drawn(known: list[tuple[str, ...]]) -> None:
    found = History(history({series: [1.0, None, 0.5] for series in known}))
    for each in (*charts_of_all(found), *charts_of_group(found, "chat")):
        assert chart(each.title, each.lines, found.until_ms, found.interval_seconds, each.shown, each.base)
    assert tiles(found)
