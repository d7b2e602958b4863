"""Charts, as the documents that browsers get."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.console import formats
from kvcm.console.charts import chart, sparkline

_HOSTILE = "<script>alert(1)</script>"


def paths(document: str, kind: str) -> list[str]:
    """Return what is drawn of a kind."""
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
