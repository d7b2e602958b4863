"""Readings as text: complete, valid in both formats, in slices, and the same numbers that were counted."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from kvcm.service.prometheus_text import FamilyTable, written
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_catalog import METRICS, Kind
from kvcm.telemetry.metrics_values import OTHER, BoundedNames, Histogram, Reading

OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"
GROUPS = [f"group {number}" for number in range(300)]


def _table() -> FamilyTable:
    table = FamilyTable()
    for number, group in enumerate(GROUPS):
        table.add(Reading(catalog.INDEX_KEYS, number, (group,)))
        table.add(Reading(catalog.WRITES_REFUSED, number, (group,)))
        histogram = Histogram((1.0, 10.0))
        for value in (1, number + 1):
            histogram.observe(value)
        table.add(Reading(catalog.LOOKUP_PREFIX_BLOCKS, histogram.read(), (group,)))
    return table


@pytest.mark.parametrize(("accept", "parse"), [("", parse_plain), (OPENMETRICS, parse_openmetrics)])
async def test_what_is_written_in_many_slices_reads_as_one_family_each(accept: str, parse: object) -> None:
    body, content_type = await written(_table().taken(), accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    families = {family.name: family for family in parse(body.decode())}  # type: ignore[operator]
    assert families.keys() == {metric.name.removesuffix("_total") for metric in METRICS}
    keys = {sample.labels["group"]: sample.value for sample in families["kvcm_index_keys"].samples}
    assert keys == {group: number for number, group in enumerate(GROUPS)}
    refused = {sample.labels["group"]: sample.value for sample in families["kvcm_writes_refused"].samples}
    assert refused == keys
    blocks = {
        (sample.name.removeprefix("kvcm_lookup_prefix_blocks"), sample.labels.get("le")): sample.value
        for sample in families["kvcm_lookup_prefix_blocks"].samples
        if sample.labels["group"] == GROUPS[20]
    }
    assert blocks == {
        ("_bucket", "1.0"): 1,
        ("_bucket", "10.0"): 1,
        ("_bucket", "+Inf"): 2,
        ("_count", None): 2,
        ("_sum", None): 22,
    }


async def test_others_get_turns_while_a_large_page_is_written() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body, _ = await written(_table().taken(), "")
    counting.cancel()
    assert turns > body.count(b"\n") / 400


async def test_a_version_that_is_none_is_answered_in_the_plain_format() -> None:
    _, content_type = await written(FamilyTable().taken(), "application/openmetrics-text; version=x.y")
    assert content_type.startswith("text/plain")


def test_buckets_hold_what_is_not_above_their_bound() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.0, 0.5, 0.75, 1.0, 1.5, 100.0):
        histogram.observe(value)
    found = histogram.read()
    assert (list(found.counts), found.total) == ([2, 4, 6], 103.75)


def test_names_beyond_the_bound_share_one_label() -> None:
    names = BoundedNames(2)
    assert [names.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_names_follow_the_rules_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("kvcm_"), metric
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric
        assert metric.about.endswith("."), metric
        assert not {"key", "keys", "token", "user", "instance", "trace_id", "peer"} & set(metric.labels), metric
