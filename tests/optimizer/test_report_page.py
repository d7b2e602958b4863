"""The report: what it says of a small trace, and that nothing in it can be forged."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from traces import HAND, HAND_IDS, trace_of

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.policy_spec import parse_policies
from kvcm.optimizer.report import page
from kvcm.optimizer.report.hit_rates import hit_rates
from kvcm.optimizer.report.markup import Markup, joined, tag
from kvcm.optimizer.report.section import rendered
from kvcm.optimizer.roi import parse_deployment
from kvcm.optimizer.study import Study, StudyOptions, study_of
from kvcm.optimizer.trace import BadLine

pytest.importorskip("matplotlib")

HOSTILE = "<script>alert('x')</script>\"&amp;<img src=x onerror=alert(1)>"
OPTIONS = StudyOptions(capacities="4,5,6,8", workers=1)
VOID = {"meta", "col", "br"}


class Structure(HTMLParser):
    """Checks that elements are closed in the order in which they were opened, and keeps what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.references += [value or ""] if name in {"href", "src", "xlink:href", "aria-labelledby"} else []
            assert not name.startswith("on"), name
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def structure(html: str) -> Structure:
    found = Structure()
    found.feed(html)
    found.close()
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def hand() -> Study:
    return study_of(HAND, OPTIONS)


@pytest.fixture(scope="module")
def html(hand: Study) -> str:
    """Return a report on the example, and on the same from a client that means harm."""
    bad = (BadLine(3, HOSTILE),)
    hostile = replace(HAND, name=HOSTILE, instance_names=(HOSTILE, "b"), bad_lines=bad, bad_line_count=1)
    return page([hand, study_of(hostile, replace(OPTIONS, deployment_name=HOSTILE))])


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", HOSTILE, title=HOSTILE).count("<") == 2
    assert joined("<", Markup("<br>")) == "&lt;<br>"
    assert tag("a", "x", class_="y", aria_label="z") == '<a class="y" aria-label="z">x</a>'


def test_the_page_is_well_formed_and_needs_nothing_else(html: str) -> None:
    found = structure(html)
    assert len(found.ids) == len(set(found.ids))
    wanted = {each.removeprefix("#") for text in found.references for each in text.split()}
    assert wanted <= set(found.ids)
    assert "script" not in found.counts
    assert "link" not in found.counts
    assert not re.findall(r"(?:url\(|@import)(?!#)[^)]*", html.replace("url(#", ""))
    assert not set(re.findall(r"https?://[^\"' <)]+", html)), "nothing is fetched"


def test_every_part_is_there_with_its_figures(html: str, hand: Study) -> None:
    found = structure(html)
    parts = (
        "rates",
        "value",
        "sensitivity",
        "ttft",
        "tiers",
        "pooling",
        "time",
        "locality",
        "prefixes",
        "trace",
        "method",
    )
    assert [each for each in found.ids if each in {f"t0-{part}" for part in parts}] == [f"t0-{part}" for part in parts]
    assert found.counts["figure"] >= 2 * 12
    assert found.counts["svg"] == 2 * found.counts["figure"] == html.count('role="img"')
    assert "var(--ink)" in html
    assert not re.search(r"#0102\d\d|#0103\d\d", html), "stand-ins are the page's colours"
    for replay in hand.replays:
        assert f"{100 * replay.block_hit_rate:.2f} %" in html, replay


def test_the_same_figures_are_the_same_chart(html: str, hand: Study) -> None:
    assert rendered(hit_rates(hand, "t0-rates")) in html


def test_the_summary_recommends_what_returns_most(hand: Study, html: str) -> None:
    found = hand.recommendation
    assert found is not None
    nets = {label: each.net_per_hour.max() for label, each in hand.returns.items() if label != "belady"}
    assert found.returns.net_per_hour.max() >= 0.99 * max(nets.values())
    summary = html[html.index('class="summary"') :]
    assert f"Take {found.policy} with {found.capacity_blocks} blocks" in summary
    assert (
        f"{100 * hand.curves['belady'].at(found.capacity_blocks).block_hit_rate:.1f} % of the blocks at this" in summary
    )


def test_names_from_clients_are_text(html: str) -> None:
    assert {"script", "img"}.isdisjoint(structure(html).counts)
    assert html.count("&lt;script&gt;") >= 5


def test_several_traces_are_compared_as_services(html: str) -> None:
    found = structure(html)
    assert found.ids.index("services") < found.ids.index("t0") < found.ids.index("t1")
    assert "Services by what a GiB saves" in html


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, mode="request", policies=parse_policies("lru,ttl:seconds=2,random_lru"), capacities="5"),
        replace(OPTIONS, policies=parse_policies("belady"), tiers="gpu:2,host:3", engines=2),
        replace(OPTIONS, deployment=parse_deployment("qwen3_coder_480b,latency=0.001,gib_month=0")),
    ],
    ids=["request", "bound alone", "deployment"],
)
def test_whatever_is_asked_makes_a_page(options: StudyOptions) -> None:
    structure(page([study_of(HAND, options)]))


@pytest.mark.parametrize(
    ("requests", "pays"),
    [([[1, 2], [3], [], [5, 6]], False), ([[1]], False), ([[1], [1]], True)],
    ids=["no reuse", "one request", "at once"],
)
def test_a_cache_that_does_not_pay_is_not_recommended(requests: list[list[int]], pays: bool) -> None:
    trace = trace_of(requests, times_seconds=[0.0] * len(requests) if pays else None)
    study = study_of(trace, replace(OPTIONS, capacities="1,2"))
    assert study.recommendation is not None
    html = page([study])
    structure(html)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL), re.IGNORECASE)
    # Requests that come all at once have no rate: nothing is saved per hour.
    assert not study.recommendation.pays
    assert "No cache pays for itself" in html
    assert ("nothing is used again" in html) != pays


def test_lookups_and_write_sessions_make_a_page() -> None:
    # What a manager records: a request is looked up, and what is missing written later.
    requests = [list(ids) for ids in HAND_IDS for _ in range(2)]
    reads = [len(ids) if place % 2 == 0 else 0 for place, ids in enumerate(requests)]
    trace = trace_of(requests, read_blocks=reads, writes=[not read for read in reads])
    study = study_of(trace, OPTIONS)
    assert {replay.policy: replay.hits.prefix_blocks for replay in study.replays if replay.capacity_blocks == 8} == {
        spec.label: 18 for spec in OPTIONS.policies
    }
    assert study.recommendation is not None
    assert study.recommendation.pays
    structure(page([study]))


def test_a_trace_that_reads_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="no request reads"):
        study_of(trace_of([[1, 2]], read_blocks=[0]), OPTIONS)
