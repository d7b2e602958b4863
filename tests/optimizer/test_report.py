"""The report: its figures, worked out again, what it says, and that nothing in it can be forged."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from traces import HAND, HAND_IDS, trace_of

from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.options import parse_policies
from kvcm.optimizer.pooling import Topology
from kvcm.optimizer.report import html as amounts
from kvcm.optimizer.report import page
from kvcm.optimizer.report.hit_rates import hit_rates, over_time
from kvcm.optimizer.report.html import Markup, joined, tag
from kvcm.optimizer.report.value import first_tokens, value
from kvcm.optimizer.roi import parse_deployment
from kvcm.optimizer.study import Study, StudyOptions, display_name, study_of
from kvcm.optimizer.trace import BadLine

pytest.importorskip("matplotlib")

DEPLOYMENT = parse_deployment("deepseek_v3,offered=5e4")
OPTIONS = StudyOptions(capacities="4,5,6,8", workers=1, engines=2, tiers="host:2,ssd:4", deployment=DEPLOYMENT)


@pytest.fixture(scope="module")
def hand() -> Study:
    return study_of(HAND, OPTIONS)


def rows(html: str) -> list[list[str]]:
    """Return the cells of all rows of figures, the first of each being its name."""
    found = re.findall(r"<tr>(<th scope=\"row\">.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]


def test_the_table_of_hit_rates_is_that_of_the_replays(hand: Study) -> None:
    table = rows(hit_rates(hand, "x").parts[0])
    assert [row[0] for row in table] == ["4", "5", "6", "8"]
    hits = {"lru": [6, 9, 12, 18], "leaf_lru": [11, 12, 13, 18], "belady": [15, 16, 17, 18]}
    assert [spec.label for spec in OPTIONS.policies][:3] == list(hits)
    for place, expected in enumerate(hits.values(), start=3):
        assert [row[place] for row in table] == [f"{100 * each / 26:.2f} %" for each in expected]


def test_over_time_every_window_has_its_own_requests(hand: Study) -> None:
    *_, unlimited = hand.over_time
    assert unlimited.capacity_blocks == 8
    table = rows(over_time(hand, "x").parts[0])
    # 60 windows of 0.2 s, of which every fifth is in the table: each second, as far as there are requests in it.
    shown = {row[0]: row[-2:] for row in table}
    assert list(shown)[:4] == ["0 s", "1 s", "2 s", "3 s"]
    hits = dict(zip([0, 1, 2, 3, 5, 9, 10], unlimited.request_hits.tolist(), strict=False))
    for second, ids in zip(hits, HAND_IDS, strict=False):
        assert shown[f"{second} s"][0] == f"{100 * hits[second] / len(ids):.1f} %"
    assert shown["4 s"][0] == "", "nothing is read then"
    assert shown["3 s"][1] == f"{100 * 7 / 8:.1f} %", "7 of 8 blocks were seen by then"


def test_nodes_for_prefill_and_for_links_meet_at_the_turning_share(hand: Study) -> None:
    found = hand.recommendation
    table = rows(value(hand, "x").parts[1])  # type: ignore[union-attr]
    prefill = [float(row[1]) for row in table]
    links = [float(row[2]) for row in table]
    assert prefill[0] == pytest.approx(found.returns.nodes_without, abs=0.01)
    assert (links[0], prefill[-1]) == (0, 0)
    turning = found.returns.turning_share * 10
    above = [each for each, (node, link) in enumerate(zip(prefill, links, strict=True)) if link > node]
    assert min(above) - 1.1 <= turning <= min(above), "within two decimals"


def test_waiting_is_reported_apart_from_serving(hand: Study) -> None:
    without, *_ = hand.first_tokens
    assert without.queued.nodes == max(1, int(np.ceil(hand.returns["lru"].nodes_without)))
    table = {row[0]: row[1:] for row in rows(first_tokens(hand, "x").parts[0])}
    assert table["no cache"][0] == amounts.duration(without.queued.spread.mean)
    assert table["no cache, without waiting for others"][0] == amounts.duration(without.unqueued.mean)


@pytest.mark.parametrize("price", ["0.1", "3e6", "4.5e6", "1e7"])
@pytest.mark.parametrize("policies", ["lru,leaf_lru,belady,fifo,lfu", "fifo,lru,belady", "fifo,lfu"])
def test_the_recommendation_can_be_set_and_is_nearly_the_best(policies: str, price: str) -> None:
    deployment = parse_deployment(f"deepseek_v3,offered=1e5,gib_month={price}")
    study = study_of(HAND, replace(OPTIONS, policies=parse_policies(policies), deployment=deployment))
    found = study.recommendation
    nets = {label: float(each.net_per_hour.max()) for label, each in study.returns.items() if label != "belady"}
    good = [label for label, net in nets.items() if net >= 0.99 * max(nets.values())]
    assert found.policy == ("leaf_lru" if "leaf_lru" in good else good[0])
    assert found.pays == (max(nets.values()) > 0)
    assert found.returns.net_per_hour[found.place] >= 0.99 * nets[found.policy]
    assert (found.returns.net_per_hour[: found.place] < 0.99 * nets[found.policy]).all(), "it is the smallest"


def test_tiers_share_the_space_that_there_is(hand: Study) -> None:
    found, tiers = hand.tiering.splits, hand.tiering.replay.tiers
    assert [use.tier.capacity_blocks for use in tiers] == [2, 4]
    assert found.hits.prefix_blocks.sum(axis=1).tolist() == [12] * len(found.shares), "lru with 6 blocks, however split"
    assert found.hits.prefix_blocks[0].tolist() == [0, 12]
    assert found.hits.prefix_blocks[-1].tolist() == [12, 0]
    assert all(small.saved_seconds <= large.saved_seconds for small, large in pairwise(found.best))
    assert all(best.price_per_month <= budget for best, budget in zip(found.best, found.budgets, strict=True))
    assert sum(found.best[-1].capacities) >= 6, "levels are not held to their own capacities"


def test_local_caches_and_pool_have_the_same_space(hand: Study) -> None:
    space = hand.recommendation.capacity_blocks if hand.recommendation else 0
    local = next(row for row in hand.pooling.rows if row.topology is Topology.LOCAL)
    pool = next(row for row in hand.pooling.rows if row.topology is Topology.POOL)
    assert hand.pooling.engines == 2
    assert local.local_blocks == space // 2
    assert pool.pool_blocks == hand.pooling.engines * local.local_blocks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (amounts.short(172_156), "172 k"),
        (amounts.short(4_031_251), "4.03 M"),
        (amounts.size(1.5 * 2**30), "1.50 GiB"),
        (amounts.duration(0.04), "40 ms"),
        (amounts.duration(5400), "1.5 h"),
        (amounts.duration(float("inf")), "never"),
        (amounts.percent(0.3664), "36.6 %"),
        (amounts.money(-1234.5, 2), "−$1,234.50"),
        (display_name("a.b.jsonl.gz"), "a.b"),
    ],
)
def test_amounts_are_written_with_units(text: str, expected: str) -> None:
    assert text == expected


HOSTILE = "<script>alert('x')</script>\"&amp;<img src=x onerror=alert(1)>"
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
        for name, text in attrs:
            self.ids += [text or ""] if name == "id" else []
            self.references += [text or ""] if name in {"href", "src", "xlink:href", "aria-labelledby"} else []
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
    answers = ["rates", "value", "sensitivity", "ttft", "tiers", "pooling"]
    parts = [f"t0-{name}" for name in [*answers, "time", "locality", "prefixes", "trace", "method"]]
    assert [each for each in found.ids if each in parts] == parts
    assert found.counts["figure"] >= 2 * 12
    assert found.counts["svg"] == 2 * found.counts["figure"] == html.count('role="img"')
    assert "var(--ink)" in html
    assert not re.search(r"#0102\d\d|#0103\d\d", html), "stand-ins are the page's colours"
    for replay in hand.replays:
        assert f"{100 * replay.block_hit_rate:.2f} %" in html, replay


def test_the_summary_recommends_the_highest_return(hand: Study, html: str) -> None:
    found = hand.recommendation
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
    study = study_of(trace, StudyOptions(capacities="1,2", workers=1))  # the trace's own load is offered
    assert study.recommendation is not None
    html = page([study])
    structure(html)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL), re.IGNORECASE)
    # Requests that come all at once have no rate: nothing is saved per hour.
    assert not study.recommendation.pays
    assert "No cache pays for itself" in html
    assert ("nothing is used again" in html) != pays


def test_lookups_and_write_sessions_make_a_page() -> None:
    # What a manager records: a request is looked up, and missing blocks are written later.
    requests = [list(ids) for ids in HAND_IDS for _ in range(2)]
    reads = [len(ids) if place % 2 == 0 else 0 for place, ids in enumerate(requests)]
    trace = trace_of(requests, read_blocks=reads, writes=[not read for read in reads])
    study = study_of(trace, OPTIONS)
    assert {replay.policy: replay.hits.prefix_blocks for replay in study.replays if replay.capacity_blocks == 8} == {
        spec.label: 18 for spec in OPTIONS.policies
    }
    assert study.recommendation.pays
    structure(page([study]))


def test_a_trace_that_reads_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="no request reads"):
        study_of(trace_of([[1, 2]], read_blocks=[0]), OPTIONS)
