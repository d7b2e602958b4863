"""The optimizer's report in a real browser: wide, narrow, dark and printed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from traces import trace_of

from kvcm.optimizer.trace import BadLine, Trace

pytest.importorskip("matplotlib")
pytest.importorskip("numba")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<img src=http://example.org/x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def conversations(name: str, count: int = 60) -> Trace:
    """Return dialogues that share a system prompt of two blocks; each turn has a block more than the one before."""
    chance = random.Random(name)
    rows = []
    for session in range(count):
        for turn in range(chance.randint(1, 8)):
            own = [1000 + 10 * session + depth for depth in range(turn + 1)]
            rows.append((session * 20.0 + turn * chance.uniform(1, 90), session, [0, 1, *own]))
    rows.sort()
    times, sessions, ids = zip(*rows, strict=True)
    tokens = [64 * len(each) - 5 for each in ids]
    made = trace_of(ids, times_seconds=times, input_tokens=tokens, sessions=sessions, block_tokens=64)
    return replace(made, name=name)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvcm.optimizer.report import page
    from kvcm.optimizer.study import StudyOptions, study_of

    hostile = replace(
        conversations("second.jsonl"), name=f"{HOSTILE}.jsonl", instance_names=(HOSTILE,),
        bad_lines=(BadLine(7, HOSTILE),), bad_line_count=1,
    )  # fmt: skip
    options = StudyOptions(workers=1)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page([study_of(trace, options) for trace in (conversations("first.jsonl"), hostile)]))
    return path


@pytest.fixture(params=[1280, 390], ids=["wide", "narrow"])
def shown(browser: Browser, report: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Return the report in a window; it sends no request to any server, and no error occurs."""
    asked, said = [], []
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    opened.on("request", lambda each: asked.append(each.url))
    opened.on("console", lambda each: said.append(each.text))
    opened.on("pageerror", lambda each: said.append(str(each)))
    opened.goto(report.as_uri())
    yield opened
    opened.close()
    assert asked == [report.as_uri()]
    assert said == []


def test_nothing_is_wider_than_the_window(shown: Page) -> None:
    for element in shown.query_selector_all("details"):
        element.evaluate("each => each.open = true")
    width = shown.evaluate("document.documentElement.clientWidth")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    beyond = "[...document.querySelectorAll('p, li, h1, h2, h3, figure, svg, dl, .scroll')].filter(each => "
    assert (
        shown.evaluate(f"{beyond} each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML)")
        == []
    )


def test_every_chart_is_there_once_and_can_be_read(shown: Page) -> None:
    figures = shown.query_selector_all("figure")
    assert len(figures) >= 2 * 13
    for figure in figures:
        drawn = [svg for svg in figure.query_selector_all("svg") if svg.is_visible()]
        assert len(drawn) == 1, "the one for this width"
        box = drawn[0].bounding_box()
        assert box is not None
        assert box["width"] >= 300
        assert drawn[0].get_attribute("role") == "img"
        assert drawn[0].evaluate("each => each.querySelectorAll('path').length") > 5
        sizes = drawn[0].evaluate(
            "each => [...each.querySelectorAll('text')].filter(text => text.textContent.trim())"
            ".map(text => text.getBoundingClientRect().height)"
        )
        assert min(sizes) >= 9, "pixels of the smallest letters"
        assert figure.query_selector("details table td") is not None


def test_no_text_of_a_chart_is_cut_off(shown: Page) -> None:
    cut = shown.evaluate(
        """() => [...document.querySelectorAll('svg')].filter(svg => svg.checkVisibility()).flatMap(svg => {
            const box = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(text => {
                const at = text.getBoundingClientRect();
                return at.width && (at.left < box.left - 3 || at.right > box.right + 3 || at.top < box.top - 3
                    || at.bottom > box.bottom + 3);
            }).map(text => svg.querySelector('title').textContent + ': ' + text.textContent);
        })"""
    )
    assert cut == []


def test_the_summary_comes_first_and_names_are_text(shown: Page) -> None:
    assert shown.title().startswith("What a cache is worth: first, <img src=http://example")
    summaries = shown.query_selector_all(".summary")
    assert len(summaries) == 2
    assert "blocks" in summaries[0].inner_text()
    assert shown.query_selector("img, script, iframe, object") is None
    assert shown.get_by_text("<script>document.title='taken'</script>").count() > 1
    links = shown.eval_on_selector_all("nav a", "all => all.map(each => each.getAttribute('href'))")
    assert len(links) >= 2 * 10
    assert all(shown.query_selector(link) is not None for link in links)


@pytest.mark.parametrize("medium", ["dark", "print"])
def test_text_stands_out_from_its_background(browser: Browser, report: Path, medium: str) -> None:
    opened = browser.new_page(color_scheme="dark")
    opened.emulate_media(media="print" if medium == "print" else "screen", color_scheme="dark")
    opened.goto(report.as_uri())
    variables = (
        "['--ink', '--paper'].map(each => getComputedStyle(document.documentElement).getPropertyValue(each).trim())"
    )
    ink, paper = (sum(int(each[at : at + 2], 16) for at in (1, 3, 5)) / 765 for each in opened.evaluate(variables))
    assert (ink > 0.85 and paper < 0.15) if medium == "dark" else (ink < 0.15 and paper > 0.95)
    opened.close()


def test_it_prints_on_pages(browser: Browser, report: Path) -> None:
    opened = browser.new_page()
    opened.goto(report.as_uri())
    printed = opened.pdf(format="A4")
    opened.close()
    assert printed.startswith(b"%PDF")
    assert 10 < printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") < 60
